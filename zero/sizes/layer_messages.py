"""The messages of a micro-batch between ranks that layers or experts are divided among, before a run.

A copy of the model runs forward and backward on the meta device by the engine's own forwards, whose collectives are
noted in place of being done. So these are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from zero.core.mixed_precision import DTYPES
from zero.parallel.experts.dispatch import COUNTS
from zero.parallel.tensor.cutting import replaced, set_counts
from zero.parallel.tensor.forward import Section
from zero.recompute.modules import Recomputing
from zero.sizes.cut_layers import CutCopy, folded, nobody
from zero.sizes.expert_messages import IMBALANCES, PlannedForward
from zero.sizes.model_trace import Inputs, arguments, ends, samples_in
from zero.sizes.recorder import DeviceKernels
from zero.watchdog.rank_status import Collective
from zero.watchdog.watchdog import Watchdog

_META = torch.device("meta")


class Message(NamedTuple):
    """What a rank sends to those that layers or experts are divided among, in a micro-batch.

    where: the name of the module that does; what: "layer sum", "layer gather", "layer scatter", "expert counts" or
    "expert exchange"; nbytes: that leave the rank; backward: whether its backward does.
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


def messages(cut: CutCopy, inputs: Inputs, device: str = "cuda") -> list[Message]:
    """What rank 0 sends in a micro-batch of these `inputs`, in order; to be asked for once.

    inputs: as of `trace`, whose errors it has, and ValueError for a model that its maker has cut.
    """
    if cut.plan is None and cut.settings.grid.size("tp") > 1:
        raise ValueError("layers are cut by hand, and what they send is not known")
    settings, section, found = cut.settings, cut.settings.tensor_parallel, list[Message]()
    dtype = settings.autocast_dtype or settings.compute_dtype
    kind = None if dtype == "fp32" else DTYPES[dtype]
    for param in cut.module.parameters():
        param.data = param.data.to(kind) if param.is_floating_point() else param.data
    for each in cut.experts:
        axes = (replace(nobody(settings.grid.size(axis)), watchdog=_Noting(each.name, found)) for axis in ("ep", "tp"))
        cut.sends.append(PlannedForward(each, *axes))
    forwards, blocks = [], section.blocks if section.reduce == "tree" else 0
    if cut.plan is not None:
        set_counts(cut.module, cut.plan)
        forwards, _ = replaced(cut.module, cut.plan, nobody(cut.plan.ranks), blocks, {})
    names = {id(module): name for name, module in cut.module.named_modules()}
    sections = [each for each in forwards if isinstance(each, Section)]
    for forward in forwards:
        forward.axis = replace(forward.axis, watchdog=_Noting(names[id(forward.module)], found))
    recomputing = Recomputing(settings.zero.recompute, settings.activation_checkpointing, _META)
    if settings.zero.recompute.policy != "auto":
        recomputing.apply(cut.module)
    for each in recomputing.modules:  # whose second run does not see what surrounds a backward
        each.compile(DeviceKernels(device).around)
    positional, named = arguments(inputs, _META, kind)
    for _ in range(2 if sections else 1):  # the first step finds out which sums are scattered
        found.clear()
        for each in sections:
            each.scatters = each.learned
        with DeviceKernels(device):
            out = cut.module(*positional, **named)
        forward_count = len(found)
        torch.autograd.backward([each.sum() for each in ends(out)])
    return [each._replace(backward=at >= forward_count) for at, each in enumerate(found)]


def message_text(cut: CutCopy, inputs: Inputs, device: str = "cuda") -> Iterator[str]:
    """Lines that say what is sent along tp and ep in a micro-batch of the configuration."""
    settings = cut.settings
    count, shared = settings.train_micro_batch_size_per_gpu, settings.grid.size("cp")
    along = " and ".join(axis for axis in ("tp", "ep") if settings.grid.size(axis) > 1)
    try:
        found = messages(cut, inputs, device)
    except Exception as error:  # whatever a model does on the meta device, the rest of the plan holds
        yield f"Messages along {along} are not counted: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return
    factor = count / samples_in(inputs) / shared
    found = [each._replace(nbytes=each.nbytes * (each.what == COUNTS or factor)) for each in found]
    yield (
        f"A micro-batch of {count} sample{'s' * (count > 1)} sends from each rank along {along} {len(found)} messages, "
        f"{sum(each.nbytes for each in found) / 1e6:,.3f} MB:"
    )
    if settings.zero.recompute.modules and settings.zero.recompute.policy == "auto":
        yield "  and those of the forward once more of each block that 'auto' recomputes, which the run chooses"
    if settings.autocast_dtype:
        yield f"  in {settings.autocast_dtype} all; what torch.autocast leaves in fp32, as embeddings, takes twice that"
    rows = folded((each.where, each[1:]) for each in found)
    width = max((len(name) for name, *_ in rows), default=0)
    for name, (what, nbytes, backward), times in rows:
        when = "backward" if backward else "forward"
        yield f"  {name:<{width}}  {when:<8}  {what:<15} {times:>3} x {nbytes:,.0f} bytes"
    if cut.sends:
        yield from _expert_text(cut, factor)


def _expert_text(cut: CutCopy, factor: float) -> Iterator[str]:
    """Lines on the tokens that experts are sent, and the buffers that they arrive in."""
    ranks, steps = cut.settings.grid.size("ep"), cut.settings.gradient_accumulation_steps
    rows = factor * steps * sum(each.rows for each in cut.sends)
    yield (
        f"In a step each rank sends {rows:,.0f} tokens to experts, {rows - rows / ranks:,.0f} of them to other ranks "
        "if routers give all experts equally many; they go there and back, and so do their gradients."
    )
    *most, worst = (factor * max(each) for each in zip(*(each.received() for each in cut.sends), strict=True))
    sizes = [f"{nbytes / 1e6:,.3f} MB at {times}" for times, nbytes in zip(IMBALANCES, most, strict=True)]
    yield (
        f"The largest buffer of tokens that arrive, by imbalance (tokens of the fullest rank beside the mean): "
        f"{', '.join(sizes[:ranks])}; {worst / 1e6:,.3f} MB at worst, where all ranks send all tokens to one."
    )
