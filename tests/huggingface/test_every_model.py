"""The promise: models of Transformers are built, loaded and trained at stage 3 as plain Transformers does, bit for bit.

Here those whose heads pad their bias, which are the masked language models. `python tests/huggingface/every_model.py
[FAMILY ...]` with `tests` on PYTHONPATH tries every class, and says what each family gives.
"""

from __future__ import annotations

import pytest
from every_model import outcomes
from ranks import Pool

# A family, and its masked language model.
MASKED = {
    "albert": "AlbertForMaskedLM",
    "bert": "BertForMaskedLM",
    "camembert": "CamembertForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "electra": "ElectraForMaskedLM",
    "mobilebert": "MobileBertForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
    "mpnet": "MPNetForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "xlm-roberta": "XLMRobertaForMaskedLM",
}


@pytest.mark.long
@pytest.mark.parametrize("family", MASKED)
def test_a_masked_language_model_is_that_of_plain_transformers(door: Pool, family: str) -> None:
    name = MASKED[family]
    assert door.run(2, outcomes, family, [name]) == [{name: "passed"}] * 2
