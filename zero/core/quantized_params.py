"""Frozen weights in 4 or 8 bits, as bitsandbytes has them: packed values, and beside them what these mean.

`Params4bit`: two values in a byte, [n / 2, 1] in whatever dtype, and `quant_state`, with the scales of blocks.
`Int8Params`: int8 [rows, columns], `SCB` with the scales of rows, and `CB`, which is its own values once more. A layer
moves both to its `state` at its first forward, and works with them there. Units take the values for what they are, in
their own dtype; what is beside them is small, and whole on every rank. All is told by names, as Transformers and PEFT
do, so nothing is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

_CODE = {"4bit": 16 * 4, "nested": 256 * 4 + 4}  # bytes of tables of values, and of the offset of nested scales


def format_of(param: torch.Tensor) -> str | None:
    """ "nf4", "fp4" or "int8" of a parameter that is, or is to be, kept so; None of every other one."""
    names = {kind.__name__ for kind in type(param).__mro__}
    if "Params4bit" in names:
        return param.quant_type
    return "int8" if "Int8Params" in names and not param.has_fp16_weights else None


def is_pending(param: torch.Tensor) -> bool:
    """Whether it has yet to be quantised, and is what `nn.Linear` made of it."""
    kept = format_of(param)
    return kept is not None and (param.dtype != torch.int8 if kept == "int8" else not param.bnb_quantized)


def quant_tensors(param: torch.Tensor) -> list[torch.Tensor]:
    """The tensors without which its values mean nothing, in one order; none where it is not quantised."""
    if format_of(param) is None or is_pending(param):
        return []
    if format_of(param) == "int8":
        return [param._zero_rows if param.SCB is None else param.SCB]
    return _tensors(param.quant_state)


def _tensors(state: Any) -> list[torch.Tensor]:
    nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *nested]


def footprint(param: torch.Tensor) -> tuple[int, torch.dtype, int]:
    """Elements, their dtype, and bytes beside them, as they are once it is quantised."""
    numel = param.numel()
    if not is_pending(param):
        return numel, param.dtype, sum(each.nbytes for each in quant_tensors(param))
    if format_of(param) == "int8":
        return numel, torch.int8, 4 * param.shape[0]
    blocks = -(-numel // param.blocksize)
    scales = blocks + 4 * -(-blocks // 256) + _CODE["nested"] if param.compress_statistics else 4 * blocks
    return -(-numel // (2 * param.quant_storage.itemsize)), param.quant_storage, scales + _CODE["4bit"]


class Int8(NamedTuple):
    """An int8 parameter of a unit, by its index there; its scales [rows] stay with it."""

    index: int
    param: nn.Parameter

    @classmethod
    def among(cls, params: Sequence[nn.Parameter]) -> list[Int8]:
        """Those of `params`; each keeps its scales when its layer has taken them."""
        found = [cls(*each) for each in enumerate(params) if format_of(each[1]) == "int8" and not is_pending(each[1])]
        for each in found:
            each.param._zero_rows = quant_tensors(each.param)[0]
        return found

    def point(self, views: Sequence[torch.Tensor] | None) -> None:
        """Have it know its values, or that they are away; the next forward of its layer takes them from there."""
        self.param.CB, self.param.SCB = None if views is None else views[self.index], self.param._zero_rows


def prepare(module: nn.Module, device: torch.device) -> None:
    """Quantise what has yet to be, as its own `to(device)` does, and bring what is beside values to the device.

    Raises ValueError for what has lost it, for what is to be trained, and for what a forward has changed for good.
    """
    for path, child in module.named_modules():
        if hasattr(child, "support_avx512bf16_for_cpu"):
            child.support_avx512bf16_for_cpu = False  # else a forward in eval mode repacks, and rounds scales to bf16
        for key, param in child._parameters.items():
            if param is None or format_of(param) is None or param.is_meta:
                continue
            _check(param, f"{path}.{key}" if path else key, child)
            if is_pending(param):
                param.to(device)
            elif format_of(param) == "int8":
                param.CB, param.SCB = None, param.SCB.to(device)
            else:
                param.quant_state.to(device)


def _check(param: nn.Parameter, name: str, layer: nn.Module) -> None:
    kept = format_of(param)
    if param.requires_grad:
        raise ValueError(
            f"parameter '{name}' is kept in {kept}, which no optimizer trains, and its requires_grad is True; call "
            "requires_grad_(False) on it, and train adapters beside it"
        )
    if is_pending(param):
        return
    if kept == "int8":
        state = getattr(layer, "state", None)
        param.SCB = getattr(state, "SCB", None) if param.SCB is None else param.SCB
        lost = param.SCB is None
        if state is not None:
            state.CB = None  # the layer takes it from the parameter
    else:
        param.quant_state = param.quant_state or getattr(layer, "quant_state", None)
        lost = param.quant_state is None
        if getattr(param.quant_state, "packing_format_for_cpu", False):
            raise ValueError(
                f"parameter '{name}' was repacked for this CPU by a forward in eval mode, which has rounded its scales "
                "to bf16; load the model anew, and call initialize() before its first forward in eval mode"
            )
    if lost:
        what = "SCB" if kept == "int8" else "quant_state"
        raise ValueError(
            f"parameter '{name}' is in {kept} and has lost its {what}, without which its values mean nothing; load the "
            "model anew, and hand it to initialize() as bitsandbytes made it"
        )


def quant_params(module: nn.Module) -> dict[str, nn.Parameter]:
    """The names in the module's state_dict of what is beside values, and of which parameter."""
    found, state = {}, module.state_dict(keep_vars=True)
    for path, param in [(name, value) for name, value in state.items() if format_of(value) is not None]:
        scales = f"{path.removesuffix('weight')}SCB"
        found |= {name: param for name in state if name.startswith(f"{path}.") or name == scales}
    return found


@torch.no_grad()
def load_quant_state(module: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Take what is beside quantised values from a state_dict of bitsandbytes; returns the rest.

    Layers cannot do it: that of 4 bits has no code for it, and that of int8 none once a forward has moved its scales.
    Raises ValueError where the scales are of another form.
    """
    rest, groups = dict(values), dict[nn.Parameter, dict[str, torch.Tensor]]()
    for name, param in quant_params(module).items():
        if name in rest:
            groups.setdefault(param, {})[name] = rest.pop(name)
    for param, entries in groups.items():
        old, names = quant_tensors(param), sorted(entries)
        if format_of(param) == "int8":
            new = list(entries.values())
        else:
            new = _tensors(type(param.quant_state).from_dict(entries, old[0].device))
        if [each.shape for each in old] != [each.shape for each in new]:
            raise ValueError(f"{names} are of another form than those of the model, which is in {format_of(param)}")
        for mine, theirs in zip(old, new, strict=True):
            mine.copy_(theirs)
    return rest
