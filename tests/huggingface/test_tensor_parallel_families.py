"""The promise: a family of Transformers whose layers a plan cuts gives what plain Transformers gives, or is refused.

`tensor_families.json` has what each gives, and docs/tensors_tried.md says it; a new family, and another outcome, fail.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ranks import Pool
from sharing import needs_transformers
from tensor_families import TABLE, outcome, planned

PAGE = Path(__file__).parents[2] / "docs" / "tensors_tried.md"
FAMILIES = json.loads(TABLE.read_text())


SOME = [key for at, key in enumerate(sorted(FAMILIES)) if not at % 12 or FAMILIES[key][1] == "refused"]


def layers(reason: str) -> list[str]:
    return re.findall(r"'([a-z_0-9.]+)'", reason)[:1]


@needs_transformers
@pytest.mark.long
@pytest.mark.parametrize("family", SOME)  # tensor_families.py tries all, for a quarter of an hour
def test_a_family_gives_what_the_table_says(pool: Pool, family: str) -> None:
    first, second = pool.run(2, outcome, family)
    name, what, why = FAMILIES[family]
    assert first[:2] == second[:2] == (name, what), first[2]
    assert layers(first[2][: len(why)]) == layers(why)


@needs_transformers
@pytest.mark.long
def test_every_family_with_a_plan_is_in_the_table() -> None:
    assert set(planned()) == set(FAMILIES)


def test_the_page_says_what_the_table_has() -> None:
    text = PAGE.read_text()
    equal = re.search(r"^Equal:\n\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    assert equal is not None
    assert re.findall(r"[\w-]+", equal[1]) == [key for key, row in sorted(FAMILIES.items()) if row[1] == "equal"]
    rows = re.findall(r"^\| ([^|]+) \| (refused|plain) \|", text, re.MULTILINE)
    said = {family: what for names, what in rows for family in names.split(", ")}
    assert said == {key: row[1] for key, row in FAMILIES.items() if row[1] != "equal"}
    assert f"| equal | {len(equal[1].split(','))} |" in text
