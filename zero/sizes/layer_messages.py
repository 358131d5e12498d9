"""The messages of a micro-batch between ranks that layers are cut over, before a run.

A copy of the model runs forward and backward on the meta device by the engine's own forwards, whose collectives are
noted in place of being done. So these are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from zero.core.mixed_precision import DTYPES
from zero.parallel.tensor.cutting import replaced, set_counts
from zero.parallel.tensor.forward import Section
from zero.recompute.modules import Recomputing
from zero.sizes.cut_layers import CutCopy, folded, nobody
from zero.sizes.model_trace import Inputs, arguments, ends, samples_in
from zero.sizes.recorder import DeviceKernels
from zero.watchdog.rank_status import Collective
from zero.watchdog.watchdog import Watchdog

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


def messages(cut: CutCopy, inputs: Inputs, device: str = "cuda") -> list[Message]:
    """What rank 0 sends in a micro-batch of these `inputs`, in order; to be asked for once.

    inputs: as of `trace`, whose errors it has, and ValueError for a model that its maker has cut.
    """
    if cut.plan is None:
        raise ValueError("layers are cut by hand, and what they send is not known")
    settings, section, found = cut.settings, cut.settings.tensor_parallel, list[Message]()
    dtype = settings.autocast_dtype or settings.compute_dtype
    kind = None if dtype == "fp32" else DTYPES[dtype]
    for param in cut.module.parameters():
        param.data = param.data.to(kind) if param.is_floating_point() else param.data
    set_counts(cut.module, cut.plan)
    blocks = section.blocks if section.reduce == "tree" else 0
    names = {id(module): name for name, module in cut.module.named_modules()}
    forwards, _ = replaced(cut.module, cut.plan, nobody(cut.plan.ranks), blocks, {})
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
    """Lines that say what is sent along tp in a micro-batch of the configuration."""
    settings = cut.settings
    count, shared = settings.train_micro_batch_size_per_gpu, settings.grid.size("cp")
    try:
        found = messages(cut, inputs, device)
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
    if settings.autocast_dtype:
        yield f"  in {settings.autocast_dtype} all; what torch.autocast leaves in fp32, as embeddings, takes twice that"
    rows = folded((each.where, each[1:]) for each in found)
    width = max((len(name) for name, *_ in rows), default=0)
    for name, (what, nbytes, backward), times in rows:
        when = "backward" if backward else "forward"
        yield f"  {name:<{width}}  {when:<8}  {what:<13} {times:>3} x {factor * nbytes:,.0f} bytes"
