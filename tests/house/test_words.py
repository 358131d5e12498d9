"""The pages of words say where each term lives; what docs/write_internals.py writes is in tests/docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ZERO = ROOT / "zero"
WORDS = (ROOT / "docs" / "words.md").read_text()  # those that users meet
PAGE = WORDS + (ROOT / "docs" / "internals.md").read_text()
TERMS = re.findall(r"^\| ([^|`]+) \| .+ \| `(\S+\.py)` `(\w+)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("term", "file", "name"), TERMS, ids=[term for term, *_ in TERMS])
def test_every_term_lives_where_the_page_says(term: str, file: str, name: str):
    assert re.search(rf"\b(class|def) {name}\b|self\.{name}\b", (ZERO / file).read_text())


def test_the_terms_of_other_systems_are_on_the_page_of_users_which_is_short():
    assert WORDS.count("\n| ") - 1 <= 40, "a term that only the code uses, or a class, stands in docs/internals.md"
    terms = {word for term, *_ in TERMS if f"| {term} |" in WORDS for word in re.split(r"[,:] | \w*: ", term)}
    assert {"gather", "reduce-scatter", "all-reduce", "prefetch", "offload", "watchdog", "HSDP", "hpZ"} <= terms
