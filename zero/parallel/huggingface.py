"""Attention of transformers' models where ranks share a sequence, through its registry of attention functions."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from zero.log import log_once
from zero.parallel import ulysses
from zero.parallel.attention import attention, refuse, running, shared
from zero.parallel.sequence import Sequence
from zero.plan.sequences import begins

NAME = "zero_shared"
_WINDOW = "sliding_attention"
# What masks are made of; those of padding come later.
_MASKS = {f"{name}_mask_function" for name in ("causal", "bidirectional", "packed_sequence")}
_MASKS |= {"and_masks", "sliding_window_overlay", "remap_positions_for_packed_sequence"}
_COUNTS = "create_position_ids_from_input_ids"


class SharedModel:
    """A model of transformers that attends over shared sequences, and what else it asks of them; or another model.

    shares: whether what runs now is on pieces of sequences.
    """

    def __init__(self, module: nn.Module, shares: Callable[[], bool]) -> None:
        self._most = 0  # the last position of the sequence
        self._packed = self._masked = False  # whether documents would be seen here, of several; a mask was given
        self.causal: set[bool] = set()  # whether masks that the last forward asked for were
        self.given: set[str] = set()  # names of the arguments of the last forward
        self._module = module
        config = getattr(module, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        layers = getattr(config, "layer_types", None)
        self.has_windows = bool(getattr(config, "sliding_window", None)) and (not layers or _WINDOW in layers)
        self.windows = 0  # calls of attention that were told one
        self._plain: dict[int, str] = {}  # the implementations that configurations named
        self.is_theirs = any(each.__name__ == "PreTrainedModel" for each in type(module).__mro__)
        theirs = [each for each in module.modules() if type(each).__module__.startswith("transformers")]
        self.counts = _counting(theirs)  # None where positions count from 0
        self.hooks = [
            hook
            for each in theirs
            if _scales(each)
            for hook in _told_most(each, lambda: self._most if shares() else None)
        ]
        if "transformers" in sys.modules:
            self._adopt()

    def _adopt(self) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

        AttentionInterface.register(NAME, torch.compiler.disable(_attention))
        AttentionMaskInterface.register(NAME, _mask)
        for each in self._module.modules():
            if isinstance(each, PreTrainedModel) and id(each.config) not in self._plain:
                named = each.config._attn_implementation
                self._plain[id(each.config)] = "sdpa" if named in (None, NAME) else named  # NAME: a copy of another's
                each.config._attn_implementation = NAME

    def give_back(self) -> None:
        """Leave the model as it was."""
        for each in self._module.modules():
            config = getattr(each, "config", None)
            if id(config) in self._plain and config._attn_implementation == NAME:
                config._attn_implementation = self._plain[id(config)]
        for hook in self.hooks:
            hook.remove()

    def plain(self, config: Any) -> str:
        """The implementation of attention that a configuration named."""
        return self._plain.get(id(config), "sdpa")

    def positions(self, ids: torch.Tensor | None, mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """The positions that the model itself counts [rows or 1, length], where `like` is [rows, length, ..]."""
        found = None if self.counts is None else self.counts(ids, mask)
        return torch.arange(like.shape[1], device=like.device)[None] if found is None else found

    def begins(self, sequence: Sequence, positions: torch.Tensor, mask: torch.Tensor | None) -> None:
        """A forward begins over a sequence, of these positions [rows or 1, length]; `mask`: if one was given."""
        several = any(sum(mark >= 0 for mark in borders[:-1]) > 1 for _, borders in sequence.documents)
        self._masked, self.causal = mask is not None, set()
        self._packed = several and (self._masked or sequence.parted())
        if self.hooks:
            self._most = int(positions.max())

    def asks_mask(self, function: Callable[..., Any], config: Any) -> None:
        """Raise ValueError for a mask that attention here does not have, and warn of one without documents."""
        parts = _parts(function)
        if other := sorted(parts - _MASKS):
            raise ValueError(
                f"attention over a shared sequence: got a mask made by {', '.join(other)}; wanted one that is causal "
                "or hides nothing, of sliding windows and documents"
            )
        self.causal.add("causal_mask_function" in parts)
        blind = self._masked or "packed_sequence_mask_function" not in parts
        if self._packed and blind and "flash" not in self.plain(config):
            log_once(
                logging.WARNING,
                "sequence_parallel_size: attention stays inside of documents; in one process that of "
                f"{type(self._module).__name__} would not. transformers finds packed rows by position_ids without an "
                "attention_mask, with use_cache=False, and in models that hand position_ids to their masks",
            )


def shifts(module: nn.Module, aligned: tuple[str, ...]) -> bool:
    """Whether the model's loss compares each position with the label of the next one.

    aligned: names of arguments that the user cuts as they are. Raises ValueError where nothing tells.
    """
    if "labels" in aligned:
        return False
    loss, name = getattr(module, "loss_type", None), type(module).__name__
    heads = [each for each in module.modules() if hasattr(each, "loss_type")]
    if not any({"loss_function", "shift_labels"} & _names(each) for each in heads):
        loss = loss if loss not in (None, "ForCausalLM") else None  # it shifts by itself, whatever it is given
    elif loss is None and ("LMHead" in name or "CausalLM" in name):
        loss = "ForCausalLM"  # what transformers falls back on
    function = getattr(module, "loss_function", None)
    own = callable(function) and not getattr(function, "__module__", "").startswith("transformers.")
    if loss == "ForCausalLM" and own and "shift_labels" not in inspect.signature(function).parameters:
        loss, name = None, f"the loss_function of {name}"
    if loss is None:
        raise ValueError(
            f"sequence_parallel_size: whether {name} shifts its labels is not known; let it take shift_labels, call "
            "the argument targets, aligned with the inputs, or name all that is cut in "
            '"zero": {"context": {"cut": [...]}}'
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
    name = "sdpa" if engine is None else engine.model.plain(module.config)
    given = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
    given |= {} if is_causal is None else {"is_causal": is_causal}
    found = shared(query, key)
    if found is None:
        return _implementation(name, module)(module, query, key, value, attention_mask, **given, **kwargs)
    known = engine.model.given | {"position_ids", "cache_position"}  # others would change what is computed
    others = {name: each for name, each in kwargs.items() if isinstance(each, torch.Tensor) and name not in known}
    refuse(attention_mask, dropout, softcap=kwargs.get("softcap"), **others)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if engine.model.causal - {causal}:
        raise ValueError(
            f"attention over a shared sequence: {type(module).__name__} has is_causal={causal}, and a mask was asked "
            f"for that is{' not' * causal} causal"
        )
    engine.model.windows += bool(sliding_window)
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
        out = parts[0].new_zeros(parts[0][which].shape[:3] + parts[2].shape[3:]).transpose(1, 2)
        spans = [slice(start, begins(stop)) for start, stop in pairwise(borders) if start >= 0]
        for span in spans:
            out[:, span] = function(module, *(each[which, :, span] for each in parts), None, **given)[0]
        rows.append(out.transpose(1, 2))
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
        return engine.model.asks_mask(kwargs["mask_function"], config)
    name = "sdpa" if engine is None else engine.model.plain(config)
    make = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    return None if make is None else make(*args, config=config, **kwargs)


def _parts(function: Callable[..., Any]) -> set[str]:
    """The functions of transformers that a function of a mask is made of."""
    found = {function.__qualname__.split(".")[0]}
    for value in inspect.getclosurevars(function).nonlocals.values():
        for each in value if isinstance(value, tuple) else (value,):
            found |= _parts(each) if inspect.isfunction(each) else set()
    return found


def _names(module: nn.Module) -> set[str]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else {*code.co_names, *code.co_varnames}


def _counting(modules: list[nn.Module]) -> Callable[[torch.Tensor | None, torch.Tensor | None], Any] | None:
    """How positions are counted by a model that does not count them from 0; None for all others.

    In RoBERTa and its like padding, told by its token, has no position, and others begin behind its number; OPT counts
    what the mask leaves.
    """
    for module in modules:
        names = _names(module)
        if _COUNTS in names:
            make = getattr(module, _COUNTS, None) or getattr(sys.modules[type(module).__module__], _COUNTS)
            return functools.partial(_by_tokens, make, module.padding_idx)
        if {"cumsum", "attention_mask", "position_ids"} <= names and not isinstance(module, nn.Embedding):
            return lambda ids, mask: None if mask is None else mask.cumsum(1) * mask - 1
    return None


def _by_tokens(make: Callable[..., Any], padding: int, ids: torch.Tensor | None, mask: Any) -> torch.Tensor:
    del mask
    if ids is None:
        raise ValueError("sequence_parallel_size: this model counts positions by input_ids; give it position_ids")
    return make(ids, padding)


def _scales(module: nn.Module) -> bool:
    """Whether a rotary embedding has other frequencies for longer sequences."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds or ""]
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)


def _told_most(module: nn.Module, most: Callable[[], int | None]) -> Iterator[Any]:
    """Hooks that show a rotary embedding one more position, the last of the whole sequence, and drop its result."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (last := most()) is None:
            return None
        places = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        longer = torch.cat([places, places.new_full((*places.shape[:-1], 1), last)], -1)
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    def after(module: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> Any:
        return output if most() is None else tuple(each[..., :-1, :] for each in output)

    yield module.register_forward_pre_hook(before, with_kwargs=True)
    yield module.register_forward_hook(after)
