"""The promise: a family of Transformers whose experts ranks divide gives what plain Transformers gives, or is refused.

`expert_families.json` has what each gives; a new family, and another outcome, fail.
"""

from __future__ import annotations

import json

import pytest
from expert_families import TABLE, outcome, planned
from ranks import Pool
from sharing import needs_transformers

FAMILIES = json.loads(TABLE.read_text())
SOME = ["deepseek_v4", "diffusion_gemma", "gemma4", *(key for at, key in enumerate(sorted(FAMILIES)) if not at % 12)]


@needs_transformers
@pytest.mark.long
@pytest.mark.parametrize("family", dict.fromkeys(SOME))  # expert_families.py tries all, for some minutes
def test_a_family_gives_what_the_table_says(pool: Pool, family: str) -> None:
    first, second = pool.run(2, outcome, family)
    name, what, _ = FAMILIES[family]
    assert first[:2] == second[:2] == (name, what), first[2]


@needs_transformers
@pytest.mark.long
def test_every_family_with_a_plan_is_in_the_table() -> None:
    assert set(planned()) == set(FAMILIES)
    assert all(what == "equal" for family, (_, what, _) in FAMILIES.items() if family != "qwen3_omni_moe")
