"""Layers and experts divided among ranks before a run: a copy of the model on the meta device, cut as rank 0 has it.

No other rank has larger parts. The copy runs the forwards of the engine, with ranks that are not there.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zero.config import Config
from zero.core.comm import Axis
from zero.core.owner import cut_of, placed_as
from zero.parallel.division import place
from zero.parallel.experts.cutting import CutExperts, divided, places_of
from zero.parallel.tensor.cutting import CutModel, planned, replaced
from zero.parallel.tensor.forward import Section
from zero.parallel.tensor.plan import TensorPlan
from zero.parallel.tensor.styles import linears_of
from zero.plan.formats import ITEMSIZE
from zero.sizes.expert_messages import PlannedForward

_WORDS = {"out": "column", "in": "row", "rows": "vocabulary"}


def meta_copy(module: nn.Module) -> nn.Module:
    """The module with parameters and buffers that have no memory; those of the module are not read.

    One that is cut over ranks is cut in the copy, too, and sends nothing.
    """
    memo: dict[int, Any] = {
        id(param): placed_as(
            param, nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), param.requires_grad)
        )
        for param in module.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
    record: CutModel | None = module.__dict__.get(CutModel.RECORD)
    memo |= {id(each): None for each in (record, module.__dict__.get(CutExperts.RECORD)) if each is not None}
    copied = copy.deepcopy(module, memo)
    if record is not None:
        axis = nobody(record.axis.size, record.axis.rank)
        forwards, _ = replaced(copied, copy.deepcopy(record.plan, memo), axis, record.blocks, record.stage_of)
        sections = (each for each in forwards if isinstance(each, Section))
        for section, real in zip(sections, record.sections, strict=True):
            section.scatters = real.scatters
    return copied


def nobody(size: int, rank: int = 0) -> Axis:
    """An axis of ranks that are not there: what would be sent is not."""
    return Axis(None, size, rank, native=False, ranks=tuple(range(size)))


class CutCopy:
    """A copy of a model on the meta device, cut as the configuration says, as rank 0 of the grid has it."""

    def __init__(self, model: nn.Module, settings: Config) -> None:
        """Raises ValueError where an engine would: nothing tells how the model is cut, or ranks do not divide it."""
        self.module = meta_copy(model)
        self.settings = settings
        found = divided(self.module, settings, 0)
        self.experts = found if isinstance(found, list) else []
        self.sends: list[PlannedForward] = []  # the forwards of experts, when messages are known
        plan = planned(self.module, settings, 0, [each.name for each in self.experts])
        self.plan = plan if isinstance(plan, TensorPlan) else None  # None: no layer is cut, or its maker has done it
        ranks = nobody(settings.grid.size("ep"))
        places = dict(places_of(self.module, self.experts, ranks, settings.grid.size("tp") > 1))
        places |= {} if self.plan is None else self.plan.places
        for name, param in self.module.named_parameters():
            if name in places:
                place(param, places[name], 0)

    def text(self) -> Iterator[str]:
        """Lines that say what is cut, how, and what is whole; layers that repeat are one."""
        if self.experts:
            yield from self._expert_text()
        if self.plan is None:
            if self.settings.grid.size("tp") > 1:
                yield "Layers are cut by hand, as zero.set_cut says."
            return
        yield f"Layers are cut over {self.plan.ranks} ranks as {self.plan.source} says; rank 0 has the most:"
        rows = folded(_fates(self.module, self.plan))
        width = max(len(name) for name, *_ in rows)
        yield from (f"  {name:<{width}}  {kind:<10} {rest}" for name, (kind, rest), _ in rows)

    def _expert_text(self) -> Iterator[str]:
        """Lines that say how many experts a rank has, and the bytes of their parameters."""
        itemsize, found = ITEMSIZE[self.settings.compute_dtype], []
        for name, module, count, stacks in self.experts:
            nbytes = itemsize * sum(module._parameters[stack].numel() for stack in stacks)
            whole = itemsize * sum(cut_of(module._parameters[stack]).full_numel for stack in stacks)
            found.append((name, f"{count * nbytes // whole} of {count} experts, {nbytes:,} bytes of {whole:,}"))
        yield f"Experts are divided over {self.settings.grid.size('ep')} ranks, which have equally many:"
        rows = folded(found)
        width = max(len(name) for name, *_ in rows)
        yield from (f"  {name:<{width}}  {said}{' each' * (times > 1)}" for name, said, times in rows)


def _fates(module: nn.Module, plan: TensorPlan) -> Iterator[tuple[str, tuple[str, str]]]:
    """Names of parameters, and what becomes of them, in two columns."""
    words = {id(slot.param): layer.style.dim for layer in plan.layers for slot in layer.slots}
    own = {name for name, each in module.named_modules() if isinstance(each, nn.MultiheadAttention)}
    linears = {name for name, _ in linears_of(module)}
    for name, param in module.named_parameters():
        at, owner = plan.places.get(name), name.rpartition(".")[0]
        if at is not None and at.cut is not None:
            sizes = dict.fromkeys(sum(size for _, size in ranges) for ranges in at.ranges)
            parts = [(*at.cut.shape[: at.dim], size, *at.cut.shape[at.dim + 1 :]) for size in sizes]
            yield name, (_WORDS[words[id(param)]], f"{at.cut.shape} -> {' or '.join(map(str, parts))}")
            continue
        why = ""
        if at is not None:
            why = ", its gradient is summed over tp"
        elif any(f"{name}.".startswith(f"{each}.") for each in own):
            why = ", nn.MultiheadAttention reads its weights itself"
        elif id(param) in words:
            why = ", added once"
        elif owner in linears:
            why = ", no rule names it"
        yield name, ("whole", f"{tuple(param.shape)}{why}")


def folded(found: Iterable[tuple[str, Any]]) -> list[tuple[str, Any, int]]:
    """Names with what is said of them, and how often it is; names that differ in numbers alone are one, as {0-3}."""
    groups: dict[Any, list[list[str]]] = {}
    for name, said in found:
        parts = name.split(".")
        generic = tuple("" if part.isdigit() else part for part in parts)
        groups.setdefault((generic, said), []).append(parts)
    rows = []
    for (_, said), names in groups.items():
        spans = [list(dict.fromkeys(places)) for places in zip(*names, strict=True)]
        each = Counter(map(tuple, names))
        if math.prod(map(len, spans)) == len(each) and len(set(each.values())) == 1:
            rows.append((".".join(map(_span, spans)), said, len(names)))
        else:  # not all of each with all of the others
            rows += [(".".join(parts), said, times) for parts, times in each.items()]
    return rows


def _span(parts: list[str]) -> str:
    """Parts of names that are the same, or numbers."""
    if len(parts) == 1:
        return parts[0]
    numbers = sorted(map(int, parts))
    together = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{{{numbers[0]}-{numbers[-1]}}}" if together else f"{{{','.join(map(str, numbers))}}}"
