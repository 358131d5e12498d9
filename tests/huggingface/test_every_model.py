"""The promise: models of Transformers are built, loaded and trained at stage 3 as plain Transformers does, bit for bit.

Here some whose heads pad their bias, as those of all masked language models do. `tests/huggingface/every_model.py
[FAMILY ...]`, with `tests` on PYTHONPATH, tries every class, and says what each family gives.
"""

from __future__ import annotations

import pytest
from every_model import outcomes
from ranks import Pool


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "name"),
    [("bert", "BertForMaskedLM"), ("mobilebert", "MobileBertForMaskedLM"), ("roberta", "RobertaForMaskedLM")],
)
def test_a_masked_language_model_is_that_of_plain_transformers(door: Pool, family: str, name: str) -> None:
    assert door.run(2, outcomes, family, [name]) == [{name: "passed"}] * 2
