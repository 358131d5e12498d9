"""Tiny models of Transformers, for several tests."""

from __future__ import annotations

import os
from typing import Any

import torch

NO_DROPOUT = {
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),  # of GPT-2
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),  # of BERT
}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, **NO_DROPOUT}


def tiny(kind: str, /, seed: int = 5, **config: Any) -> Any:
    """A model of this class with seeded weights."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRANSFORMERS_VERBOSITY="error")
    import transformers

    made = getattr(transformers, kind)
    config = made.config_class(**config)
    torch.manual_seed(seed)
    return made(config)
