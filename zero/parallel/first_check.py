"""The check before the first step: a short part of the first batch, whole on each rank and on pieces, gives the same.

Whatever a model takes from other positions without attention, and whatever its loss counts, shows there. How far two
right results are apart is measured: the whole part runs again with outputs of modules that are changed by rounding.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from zero.core.agree import agree
from zero.parallel.loss import count_in, loss_in
from zero.parallel.sequence import Sequence
from zero.plan.sequences import pieces

_LENGTH = 128  # of the part, which has two rows; more only where ranks need that for two positions in each of theirs
_ROUNDING = 1e-5  # of the largest value: so much may differ without being measured
_MARGIN = 8  # times what rounding was measured to change


def part_of(named: Mapping[str, Any], first: str, cut: list[str], ranks: int, halves: bool) -> dict[str, Any]:
    """Two rows of a batch, of its first ones, over a short span in which what they count begins, if anything does.

    cut: the arguments that have the sequence as their second dimension. The second row counts nothing in the piece of
    the first rank: what marks positions there is false, or its least value, so that pieces count differently.
    """
    rows, length = named[first].shape[:2]
    step = ranks * (1 + halves)
    more = -length % step
    size = min(length, max(_LENGTH, 2 * step) // step * step - more)
    borders = named.get("cu_seq_lens_q")
    chosen = [0] if borders is not None else [0, min(1, rows - 1)]
    marks = [name for name in cut if named[name].ndim == 2 and name not in (first, "attention_mask", "position_ids")]
    begins = [(each != each.min()).any(0).int().argmax().item() for each in (named[name] for name in marks)]
    start = min(max(0, max(begins, default=0) - size // 2), length - size)
    part = dict(named)
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value.ndim and len(value) == rows and (rows > 1 or name in cut):
            part[name] = value[chosen]
        if name in cut:
            part[name] = part[name][:, start : start + size]
    for name in marks if borders is None else ():
        whole, value = named[name], part[name]
        least = 0 if ((whole == 0) | (whole == 1)).all() else whole.min()
        for piece in pieces(size + more, ranks, halves)[0] if len(value) > 1 else ():
            value[1, piece.start : piece.stop] = least
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if named.get(name) is not None:
            part[name] = (named[name] - start).clamp(0, size).unique_consecutive()
    return part


class Output(NamedTuple):
    """A module's output: one number for each position, or, where it has no positions, the values as they are."""

    values: torch.Tensor
    width: int  # how many there were for each position, 0 where it has none
    error: float  # of its dtype


Outputs = dict[tuple[str, str, int], Output]  # by the module's name, the place in what it returned, and its call


def compare(
    module: nn.Module,
    sequence: Sequence,
    whole: Callable[[], Any],
    shared: Callable[[], Any],
    seen: torch.Tensor,
    weighed: str,
) -> None:
    """Raise RuntimeError on all ranks that share the sequence unless `whole()` and `shared()` return the same.

    Both run the module, here in eval and without gradients; all of it is left as it was. seen: which positions of the
    whole are no padding; weighed: what the loss is taken to be.
    """
    with _as_it_was(module, seen.device), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        wanted, found = _outputs(module, whole, len(seen)), _outputs(module, shared, sequence.size)
        # Of 16 bits rounding may turn a choice, as of experts, which it does not do again. On all ranks alike, as each
        # run may be a sequence of collectives.
        narrow = any(each.error > _ROUNDING for each in wanted.values())
        error = _error_of_fp32(seen.device)
        noise = [_outputs(module, whole, len(seen), error) for _ in range(3 if narrow else 1)]
        again = _outputs(module, shared, sequence.size, error) if narrow else found
    positions = sequence.piece(torch.arange(sequence.length, device=seen.device), 0)
    counts = positions < len(seen)
    counts[counts.clone()] = seen[positions[counts]]
    where = positions[counts], counts
    apart = {}  # in the order in which modules ended
    for key in (key for key in wanted if key in found and key in again):
        noisy = [each[key].values for each in noise if key in each]
        if (at := _apart(wanted[key], (found[key], again[key]), noisy, *where)) is not None:
            apart[key] = at
    text = _text(module, wanted, found, apart, weighed)
    if text := next(filter(None, agree(text, sequence.axis, "comparison of pieces with the whole")), None):
        raise RuntimeError(text)


def _text(
    module: nn.Module, wanted: Outputs, found: Outputs, apart: Mapping[tuple[str, str, int], int], weighed: str
) -> str:
    """The error for outputs that are apart, and where; empty if there are none."""
    if not apart:
        return ""
    returned = next((each for each in apart if not each[0]), None)
    inner = next((each for each in apart if each[0]), None)
    others = [each for each in wanted if not each[0] and wanted[each].width]
    if inner is not None and others and returned is not None and not any(each in apart for each in others):
        inner = None  # an output that the model does not use
    text = (
        f"sequence_parallel_size: {type(module).__name__} computes something else on pieces of a sequence. In eval, "
        "for a short part of the first batch, "
    )
    if returned is not None:
        there, here = (each[returned].values.flatten()[0].item() for each in (found, wanted))
        what = f"is {there:.7g}, and {here:.7g} of the whole"
        if wanted[returned].width:
            what = f"is not that of the whole at position {apart[returned]}"
        text += f"'{returned[1] or 'the output'}' {what}. "
    if inner is not None:
        text += (
            f"The first module whose output differs is '{inner[0]}', {type(module.get_submodule(inner[0])).__name__}, "
            f"at position {apart[inner]}: it or what is computed for it uses other positions, which a piece does not "
            "have; train this model with sequence_parallel_size 1"
        )
    elif returned[1] in ("loss", "count"):
        text += (
            f"No output before it differs, so it is what the loss counts, taken for {weighed}: let forward return "
            '(loss, count), or name the argument that tells, "zero": {"context": {"count": "loss_mask"}}, or say '
            '"reduction": "sum" there. A loss that shifts labels by itself has none at the border of a piece'
        )
    else:
        text += "No output before it differs: leave it out, or compute it outside of the model"
    return f'{text}. "check": false in zero.context leaves out this comparison'


def _outputs(module: nn.Module, run: Callable[[], Any], length: int, error: float = 0.0) -> Outputs:
    """The outputs of `run()` and of each module in it. error: of fp32, where outputs are to be changed by rounding."""
    found: Outputs = {}
    calls: Counter[str] = Counter()

    def note(name: str, output: Any, loss: torch.Tensor | None = None) -> None:
        calls[name] += 1
        for place, value in _leaves(output):
            other = value.ndim < 3 or value.shape[1] != length  # as of tokens that are sorted by experts
            if value.is_floating_point() and value.numel() and not (name and other):
                found[name, "loss" if value is loss else place, calls[name]] = _condensed(value.detach(), length)

    def hook(name: str, output: Any) -> Any:
        if error and isinstance(output, torch.Tensor) and output.is_floating_point():
            output = _rounded(output, error)
        note(name, output)
        return output

    def hooked(name: str) -> Callable[..., Any]:
        return lambda module, args, output: hook(name, output)

    hooks = [each.register_forward_hook(hooked(name)) for name, each in module.named_modules() if name]
    try:
        output = run()
    finally:
        for each in hooks:
            each.remove()
    note("", output, loss_in(output))
    if (count := count_in(output)) is not None:
        found["", "count", 1] = Output(torch.tensor(count, dtype=torch.float64), 0, 0.0)
    return found


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in an output, and where they are in it."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(each, f"{place}.{name}" if place else str(name))
    elif isinstance(value, (tuple, list)):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{place}[{index}]")
    elif dataclasses.is_dataclass(value):
        yield from _leaves(vars(value), place)


def _condensed(value: torch.Tensor, length: int) -> Output:
    """An output as one number for each position, in which whatever it has there takes part."""
    error = torch.finfo(value.dtype).eps
    value = value.to(torch.promote_types(value.dtype, torch.float32))
    dim = next((dim for dim in (*range(1, value.ndim), 0) if value.ndim and value.shape[dim] == length), None)
    if dim is None and value.ndim and len(value) % length == 0:  # rows x positions in one dimension
        value, dim = value.unflatten(0, (-1, length)), 1
    if dim is None:
        return Output(value, 0, error)
    value = value.movedim(dim, 0).flatten(1) if value.ndim > 1 else value[:, None]
    width = value.shape[1]
    return Output(value @ torch.arange(1, width + 1, device=value.device).to(value).cos(), width, error)


def _apart(
    wanted: Output, found: Collection[Output], noise: list[torch.Tensor], own: torch.Tensor, counts: torch.Tensor
) -> int | None:
    """The first place at which outputs are apart by more than rounding; None where they cannot be compared.

    own: positions of the whole that count on this rank; counts: which positions of its piece these are.
    """
    here, noise = (wanted.values[own], [each[own] for each in noise]) if wanted.width else (wanted.values, noise)
    there = [each.values[counts] if each.width else each.values for each in found]
    widths = {wanted.width, *(each.width for each in found)}
    if len(widths) > 1 or any(each.shape != here.shape for each in there) or not here.numel():
        return None
    changed = max((each.sub(here).nan_to_num(0, 0, 0).abs().max().item() for each in noise), default=0.0)
    allowed = max(_ROUNDING, 2 * wanted.error) * here.nan_to_num(0, 0, 0).abs().max() + _MARGIN * changed
    alike = torch.zeros_like(here, dtype=torch.bool)
    for each in there:
        alike |= (here == each) | (here.isnan() & each.isnan()) | ((here - each).abs() <= allowed)
    if alike.all():
        return None
    at = int(alike.flatten().int().argmin())
    return int(own[at]) if wanted.width else at


def _rounded(output: torch.Tensor, error: float) -> torch.Tensor:
    """Another result that is as near to the exact one."""
    error = error if output.dtype == torch.float32 else 2 * torch.finfo(output.dtype).eps
    wide = output.to(torch.promote_types(output.dtype, torch.float32))
    return (wide * (1 + error * (2 * torch.rand_like(wide) - 1))).to(output.dtype)


def _error_of_fp32(device: torch.device) -> float:
    """The relative error of a product in fp32, which is larger where it is computed with TF32."""
    left, right = torch.randn(2, 128, 128, device=device)
    exact = left.double() @ right.double()
    return max(((left @ right - exact).abs().max() / exact.abs().max()).item(), torch.finfo(torch.float32).eps)


@contextlib.contextmanager
def _as_it_was(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, a module is in eval; behind it, its attributes, its buffers and all random numbers are as before."""
    held = [(vars(each), dict(vars(each))) for each in module.modules()]
    inside = [(each, copy.copy(each)) for _, own in held for each in own.values() if type(each) in (dict, list, set)]
    buffers = [(each, each.clone()) for each in module.buffers()]
    python, numpy = random.getstate(), sys.modules.get("numpy.random")
    drawn = None if numpy is None else numpy.get_state(legacy=False)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for each, _ in held:
                each["training"] = False
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(drawn)
        for now, before in (*held, *inside):
            now.clear()
            (now.extend if isinstance(now, list) else now.update)(before)
        for each, before in buffers:
            if not torch.equal(each, before):  # else a graph that holds it may go on
                each.copy_(before)
