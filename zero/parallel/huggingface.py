"""Attention of transformers' models where ranks share a sequence, through its registry of attention functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from zero.parallel import ulysses
from zero.parallel.attention import attention, refuse, running, shared
from zero.parallel.sequence import Sequence

NAME = "zero_shared"


def adopt(module: nn.Module) -> dict[int, str]:
    """Let a model of transformers attend through us; returns the implementations that its configurations named."""
    if "transformers" not in sys.modules:
        return {}
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    AttentionInterface.register(NAME, torch.compiler.disable(_attention))
    AttentionMaskInterface.register(NAME, _mask)
    configs = {id(each.config): each.config for each in module.modules() if isinstance(each, PreTrainedModel)}
    named = {key: config._attn_implementation for key, config in configs.items()}
    plain = {key: "sdpa" if name in (None, NAME) else name for key, name in named.items()}  # NAME: a copy of another's
    for config in configs.values():
        config._attn_implementation = NAME
    return plain


def give_back(module: nn.Module, plain: Mapping[int, str]) -> None:
    """Undo `adopt`."""
    for each in module.modules():
        config = getattr(each, "config", None)
        if id(config) in plain and config._attn_implementation == NAME:
            config._attn_implementation = plain[id(config)]


def has_windows(module: nn.Module) -> bool:
    """Whether a layer of the model sees a sliding window only."""
    config = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(config, "layer_types", None)
    return bool(getattr(config, "sliding_window", None)) and (layers is None or "sliding_attention" in layers)


def shifts(module: nn.Module, aligned: tuple[str, ...]) -> bool:
    """Whether the model's loss compares each position with the label of the next one.

    aligned: names of arguments that the user cuts as they are. Raises ValueError where nothing tells.
    """
    if "labels" in aligned:
        return False
    loss, name = getattr(module, "loss_type", None), type(module).__name__
    codes = [inspect.unwrap(type(each).forward).__code__ for each in module.modules() if hasattr(each, "loss_type")]
    if not any({"loss_function", "shift_labels"} & {*code.co_names, *code.co_varnames} for code in codes):
        loss = loss if loss not in (None, "ForCausalLM") else None  # it shifts by itself, whatever it is given
    elif loss is None and ("LMHead" in name or "CausalLM" in name):
        loss = "ForCausalLM"  # what transformers falls back on
    if loss is None:
        raise ValueError(
            f"sequence_parallel_size: whether {name} shifts its labels is not known; call the "
            'argument targets, aligned with the inputs, or name all that is cut in "zero": {"context": {"cut": [...]}}'
        )
    return loss == "ForCausalLM"


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    engine = running()
    name = "sdpa" if engine is None else engine.plain(module.config)
    given = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
    given |= {} if is_causal is None else {"is_causal": is_causal}
    found = shared(query, key)
    if found is None:
        return _implementation(name, module)(module, query, key, value, attention_mask, **given, **kwargs)
    refuse(attention_mask, dropout, **{name: kwargs.get(name) for name in ("softcap", "s_aux", "position_bias")})
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    engine.windows += bool(sliding_window)
    mode, sequence = found
    if mode == "ulysses" and "flash" in name:  # it has a kernel of its own

        def local(*parts: torch.Tensor) -> torch.Tensor:
            return _by_document(_implementation(name, module), module, parts, sequence, given)

        out = ulysses.attend(query, key, value, sequence.axis, local)
    else:
        out = attention(query, key, value, causal=causal, window=sliding_window or 0, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _by_document(
    function: Callable[..., Any],
    module: nn.Module,
    parts: tuple[torch.Tensor, ...],
    sequence: Sequence,
    given: Mapping[str, Any],
) -> torch.Tensor:
    """The function's attention inside each document [rows, heads, length, dim], for which it needs no mask."""
    rows = []
    for which, borders in sequence.rows():
        spans = [slice(*span) for span in pairwise(borders)]
        found = [function(module, *(each[which, :, span] for each in parts), None, **given)[0] for span in spans]
        rows.append(torch.cat(found, 1).transpose(1, 2))
    return torch.cat(rows)


def _implementation(name: str, module: nn.Module) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def _mask(*args: Any, config: Any = None, **kwargs: Any) -> Any:
    """No mask where the sequence is shared, whose documents attention knows; else as the model would make it."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    engine = running()
    if engine is not None and engine.shares:
        return None
    name = "sdpa" if engine is None else engine.plain(config)
    make = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    return None if make is None else make(*args, config=config, **kwargs)
