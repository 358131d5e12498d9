"""Layers cut over tensor-parallel ranks before a run: a copy of the model on the meta device, cut as rank 0 has it.

No other rank has larger parts. The copy runs the forwards of the engine, whose collectives are noted and not done, so
what is said of messages is what the engine does.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from zero.config import Config
from zero.core.mixed_precision import DTYPES
from zero.core.world import Axis
from zero.parallel.tensor.cutting import RECORD, CutModel, place, planned, replaced, set_counts
from zero.parallel.tensor.plan import TensorPlan
from zero.parallel.tensor.styles import linears_of
from zero.recompute.modules import Recomputing
from zero.sizes.model_trace import Inputs, arguments, ends, samples_in
from zero.sizes.recorder import DeviceKernels
from zero.watchdog.rank_status import Collective
from zero.watchdog.watchdog import Watchdog

_WORDS = {"out": "column", "in": "row", "rows": "vocabulary"}
_META = torch.device("meta")


class Message(NamedTuple):
    """What a rank sends to those that layers are cut over, in a micro-batch.

    where: the name of the module that does; what: "layer sum", "layer gather" or "layer scatter"; nbytes: that leave
    the rank; backward: whether its backward does.
    """

    where: str
    what: str
    nbytes: float
    backward: bool = False


class _Noting(Watchdog):
    """Of ranks that are not there: notes what would be sent."""

    def __init__(self, where: str, messages: list[Message]) -> None:
        super().__init__()
        self._where, self._messages = where, messages

    def begin(self, direction: str, unit: str = "", sent: int = 0, *args: Any, **kwargs: Any) -> Collective:
        self._messages.append(Message(self._where, direction, sent))
        return super().begin(direction, unit, sent, *args, **kwargs)


def meta_copy(module: nn.Module) -> nn.Module:
    """The module with parameters and buffers that have no memory; those of the module are not read.

    One that is cut over ranks is cut in the copy, too, and sends nothing.
    """
    memo: dict[int, Any] = {
        id(param): nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), param.requires_grad)
        for param in module.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
    record: CutModel | None = module.__dict__.get(RECORD)
    memo |= {id(record): None} if record is not None else {}
    copied = copy.deepcopy(module, memo)
    if record is not None:
        axis = _nobody(record.axis.size, record.axis.rank)
        _, sections = replaced(copied, copy.deepcopy(record.plan, memo), axis, record.blocks)
        for section, real in zip(sections, record.sections, strict=True):
            section.scatters = real.scatters
    return copied


def _nobody(size: int, rank: int = 0) -> Axis:
    return Axis(None, size, rank, native=False, ranks=tuple(range(size)))


class CutCopy:
    """A copy of a model on the meta device, cut as the configuration says, as rank 0 of the grid has it."""

    def __init__(self, model: nn.Module, settings: Config) -> None:
        """Raises ValueError where an engine would: nothing tells how the model is cut, or ranks do not divide it."""
        self.module = meta_copy(model)
        self._settings = settings
        plan = planned(self.module, settings, 0)
        self.plan = plan if isinstance(plan, TensorPlan) else None  # None: its maker has cut it
        places = {} if self.plan is None else self.plan.places
        for name, param in self.module.named_parameters():
            if name in places:
                place(param, places[name], 0)

    def text(self) -> Iterator[str]:
        """Lines that say what is cut, how, and what is whole; layers that repeat are one."""
        if self.plan is None:
            yield "Layers are cut by hand, as zero.set_cut says."
            return
        yield f"Layers are cut over {self.plan.ranks} ranks as {self.plan.source} says; rank 0 has the most:"
        rows = _folded(_fates(self.module, self.plan))
        width = max(len(name) for name, *_ in rows)
        yield from (f"  {name:<{width}}  {kind:<10} {rest}" for name, (kind, rest), _ in rows)

    def messages(self, inputs: Inputs, device: str = "cuda") -> list[Message]:
        """What rank 0 sends in a micro-batch of these `inputs`, in order; to be asked for once.

        inputs: as of `trace`, whose errors it has.
        """
        if self.plan is None:
            return []
        settings, section, found = self._settings, self._settings.tensor_parallel, list[Message]()
        dtype = settings.autocast_dtype or settings.compute_dtype
        kind = None if dtype == "fp32" else DTYPES[dtype]
        for param in self.module.parameters():
            param.data = param.data.to(kind) if param.is_floating_point() else param.data
        set_counts(self.module, self.plan)
        blocks = section.blocks if section.reduce == "tree" else 0
        names = {id(module): name for name, module in self.module.named_modules()}
        forwards, sections = replaced(self.module, self.plan, _nobody(self.plan.ranks), blocks)
        for forward in forwards:
            forward.axis = replace(forward.axis, watchdog=_Noting(names[id(forward.module)], found))
        recomputing = Recomputing(settings.zero.recompute, settings.activation_checkpointing, _META)
        if settings.zero.recompute.policy != "auto":
            recomputing.apply(self.module)
        for each in recomputing.modules:  # whose second run does not see what surrounds a backward
            each.compile(partial(_within, DeviceKernels(device)))
        positional, named = arguments(inputs, _META, kind)
        for _ in range(2 if sections else 1):  # the first step finds out which sums are scattered
            found.clear()
            for each in sections:
                each.scatters = each.learned
            with DeviceKernels(device):
                out = self.module(*positional, **named)
            forward_count = len(found)
            torch.autograd.backward([each.sum() for each in ends(out)])
        return [each._replace(backward=at >= forward_count) for at, each in enumerate(found)]

    def message_text(self, inputs: Inputs, device: str = "cuda") -> Iterator[str]:
        """Lines that say what is sent along tp in a micro-batch of the configuration."""
        settings = self._settings
        count, shared = settings.train_micro_batch_size_per_gpu, settings.grid.size("cp")
        try:
            found = self.messages(inputs, device)
        except Exception as error:  # whatever a model does on the meta device, the rest of the plan holds
            yield f"Messages along tp are not counted: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return
        factor = count / samples_in(inputs) / shared
        yield (
            f"A micro-batch of {count} sample{'s' * (count > 1)} sends from each rank along tp {len(found)} messages, "
            f"{factor * sum(each.nbytes for each in found) / 1e6:,.3f} MB:"
        )
        if settings.zero.recompute.modules and settings.zero.recompute.policy == "auto":
            yield "  and those of the forward once more of each block that 'auto' recomputes, which the run chooses"
        rows = _folded((each.where, each[1:]) for each in found)
        width = max((len(name) for name, *_ in rows), default=0)
        for name, (what, nbytes, backward), times in rows:
            when = "backward" if backward else "forward"
            yield f"  {name:<{width}}  {when:<8}  {what:<13} {times:>3} x {factor * nbytes:,.0f} bytes"


def _within(kernels: DeviceKernels, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with kernels:
            return forward(*args, **kwargs)

    return run


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


def _folded(found: Iterable[tuple[str, Any]]) -> list[tuple[str, Any, int]]:
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
