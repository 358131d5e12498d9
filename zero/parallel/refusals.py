"""Models and arguments that would compute something else on pieces of a sequence, named before the first step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# Layers that carry a state from position to position; a piece would begin with an empty one.
_STATE = re.compile(
    r"mamba|(?-i:SSM)|gateddelta|deltanet|rwkv|linearattention|retention|recurrent|lru|hyena|xlstm", re.I
)
_LAYERS = ("full_attention", "sliding_attention")
_LOSSES = (None, "ForCausalLM", "ForMaskedLM", "ForTokenClassification")


def refuse_model(module: nn.Module) -> None:
    """Raise ValueError for a model that cannot run on pieces of sequences."""
    for name, each in module.named_modules():
        state = isinstance(each, nn.RNNBase) or _STATE.search(type(each).__name__)
        convolves = isinstance(each, nn.Conv1d) and any(size > 1 for size in each.kernel_size)
        if state or convolves:
            what = "carries a state along the sequence" if state else "convolves along the sequence"
            raise ValueError(
                f"sequence_parallel_size: '{name}', a {type(each).__name__}, {what}, and would begin anew on each "
                "rank's piece; train this model with sequence_parallel_size 1"
            )
        if getattr(getattr(each, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                f"sequence_parallel_size: {each.active_peft_config.peft_type.value} puts virtual tokens in front of "
                "each rank's piece, not of the sequence; train this model with sequence_parallel_size 1, or use LoRA"
            )
        theirs = type(each).__module__.startswith("transformers")
        if theirs and not getattr(each, "_can_set_attn_implementation", lambda: True)():
            raise ValueError(
                f"sequence_parallel_size: the attention of {type(each).__name__} is its own, and not of transformers' "
                "registry, through which ranks share it; train this model with sequence_parallel_size 1"
            )
    config = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYERS)):
        raise ValueError(
            f"sequence_parallel_size: got layers of {', '.join(other)}; what they see is not shared, only that of "
            f"{' and '.join(_LAYERS)}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"sequence_parallel_size: {type(module).__name__} has an encoder and a decoder: two sequences")
    for key in ("output_attentions", "output_router_logits"):
        if getattr(config, key, False):
            raise ValueError(f"sequence_parallel_size: the model's config has {key}, which needs the whole sequence")
    if (loss := getattr(module, "loss_type", None)) not in _LOSSES:
        raise ValueError(
            f"sequence_parallel_size: {type(module).__name__} has the loss '{loss}', which is of whole sequences and "
            f"not of their tokens; wanted {', '.join(filter(None, _LOSSES))}"
        )
    takes = [inspect.signature(each.forward).parameters for each in module.modules()]
    if "mc_token_ids" in takes[0]:
        raise ValueError(
            f"sequence_parallel_size: {type(module).__name__} takes mc_token_ids, places in whole sequences of several "
            "choices; train this model with sequence_parallel_size 1"
        )
    keywords = any(each.kind is each.VAR_KEYWORD for each in takes[0].values())
    if "position_ids" not in takes[0] and not (keywords and any("position_ids" in each for each in takes)):
        raise ValueError(
            f"sequence_parallel_size: {type(module).__name__}.forward takes no position_ids, so each rank would count "
            "the positions of its piece from 0; let it take position_ids [rows or 1, size] and use them"
        )


def refuse_arguments(named: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of one forward that a shared sequence does not have."""
    for name in ("attention_mask", "position_ids"):
        if name in named and (dims := getattr(named[name], "ndim", 0)) != 2:
            raise ValueError(
                f"sequence_parallel_size: got {name} of {dims} dimensions; wanted [rows, length], which tells documents"
            )
    whole = {
        "output_attentions": "all scores on one rank",
        "output_router_logits": "the tokens of the whole sequence",
        "logits_to_keep": "the end of the whole sequence",
    }
    for name, what in whole.items():
        if isinstance(value := named.get(name), torch.Tensor) or value:
            raise ValueError(f"sequence_parallel_size: {name} needs {what}; leave it out")
    if wrong := [name for name in named if name.startswith(("pixel_values", "mm_token_type", "seq_idx", "cache_pos"))]:
        raise ValueError(f"sequence_parallel_size: got {', '.join(wrong)}, which is not shared; leave it out")
