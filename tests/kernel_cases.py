"""Shared by the kernel tests: instruction sets, thread counts, shards of numbers, bad tensors, what equal bits are."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from zero.kernels import native
from zero.kernels.bucket import pack, pack_reference
from zero.kernels.formulas import Adagrad, Adam, Formula, Lion, Sgd
from zero.kernels.marks import nbytes, unpack
from zero.kernels.marks import pack as pack_marks
from zero.kernels.moments import FORMATS, Moment
from zero.kernels.remainder import split
from zero.kernels.step import step
from zero.kernels.wire import encode, encode_reference, record_bytes, sum_messages, sum_messages_reference

CPU = native.load()
step_reference = functools.partial(step, compiled=False)
# Those that run here; without compiled kernels the tests compare the reference with itself, and test_kernel_native.py
# says why in its skip.
ISAS: tuple[str, ...] = ("torch",) if CPU is None else tuple(CPU.isas())
NARROW = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *NARROW)
FORMULAS = {
    "AdamW": Adam(1e-3, 0.9, 0.999, 1e-8, 0.1),
    "Adam": Adam(1e-3, 0.4, 0.99, 1e-6, 0.1, decoupled=False, bias_correction=False),
    "Lion": Lion(1e-4, 0.9, 0.99, 0.1),
    "Momentum": Sgd(0.1, 0.9, 0.3, 0.01),
    "Nesterov": Sgd(0.1, 0.9, nesterov=True),
    "Sgd": Sgd(0.1, weight_decay=0.01),
    "Adagrad": Adagrad(0.1, 1e-3, 1e-10, 0.01),
}
KINDS = [(name, fmt) for name in FORMULAS for fmt in FORMATS if fmt == "fp32" or FORMULAS[name].signed]
MASTERS = (None, *DTYPES, "remainder")  # dtype of the parameter copy beside an fp32 master, or none
SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 31, 61, 65, 4095, 4096, 4097, 33013)  # the last is split over two threads
MESSAGES = (0, 1), (1, 1), (10, 2), (27, 3), (517, 11)  # blocks and parts, the last split over two threads


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on each instruction set of this machine."""
    if CPU is not None:
        CPU.set_isa(request.param)
    yield request.param
    if CPU is not None:
        CPU.set_isa("auto")


@pytest.fixture(params=(1, 2))
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let the kernels use this many threads, and torch itself one."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return request.param


def sizes(threads: int) -> tuple[int, ...]:
    """All sizes for one thread; for two only such as are worth two, and a small one."""
    return SIZES if threads == 1 else (1, 4097, 33013)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same(got: torch.Tensor, wanted: torch.Tensor, what: str = "") -> None:
    """Equal bits, except that any NaN equals any other."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    if torch.equal(bits(got), bits(wanted)):
        return
    nan = wanted.isnan()
    where = (((bits(got) != bits(wanted)) & ~nan) | (got.isnan() != nan)).nonzero().flatten()
    first = where[:3]
    assert not len(where), f"{what} {len(where)} differ, at {first.tolist()}: {got[first]} wanted {wanted[first]}"


def all_same(got: list, wanted: list) -> None:
    for a, b in zip(got, wanted, strict=True):
        if b is not None:
            same(a, b)


@functools.cache
def _numbers(numel: int, seed: int, hostile: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + numel)
    x = torch.randn(numel, generator=generator)
    if hostile:
        x *= torch.exp2(torch.randint(-140, 120, (numel,), generator=generator).float())
        odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, -1e-40, 3.4e38, 65504.0, 65520.0])
        at = torch.randperm(numel, generator=generator)[: numel // 3]
        x[at] = odd[torch.randint(0, len(odd), at.shape, generator=generator)]
    return x


def shifted(x: torch.Tensor, start: int) -> torch.Tensor:
    """A copy of a tensor that begins `start` elements into its memory."""
    return torch.empty(x.numel() + start, dtype=x.dtype)[start:].copy_(x)


def numbers(
    numel: int, dtype: torch.dtype = torch.float32, seed: int = 0, hostile: bool = False, start: int = 0
) -> torch.Tensor:
    """Normal numbers; hostile: over all magnitudes, with nan, inf, -0 and subnormals."""
    return shifted(_numbers(numel, seed, hostile).to(dtype), start)


class Shard(NamedTuple):
    """The arguments of a step, but the formula and the numbers."""

    master: torch.Tensor
    moments: tuple[Moment, ...]
    grad: torch.Tensor
    param: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        moments = [tensor for moment in self.moments for tensor in (moment.values, moment.scales)]
        return [tensor for tensor in (self.master, *moments, self.grad, self.param) if tensor is not None]

    def copy(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Shard:
        """One with what `change` makes of each tensor."""

        def made(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else change(tensor)

        moments = tuple(Moment(made(moment.values), made(moment.scales)) for moment in self.moments)
        return Shard(made(self.master), moments, made(self.grad), made(self.param))


def raw(
    numel: int, seed: int, fmt: str, hostile: bool, start: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Hostile numbers; beside 8-bit moments only block 0 of several is not finite, and the others shrink to nothing."""
    x = numbers(numel, dtype, seed, hostile, start)
    if hostile and fmt == "8bit":
        tame = x[256:] if numel > 256 else x
        largest = min(1e17, torch.finfo(dtype).max)
        tame.nan_to_num_(1.0, 2.0, -3.0).clamp_(-largest, largest)
        for index, block in enumerate(tame.split(256)):
            block *= 2.0 ** -min(60 * index, 140)
    return x


def moment(values: torch.Tensor, fmt: str, signed: bool, start: int) -> Moment:
    """A moment whose tensors begin `start` elements into their memory."""
    made = Moment.filled(values.numel(), fmt)
    made.write(values, signed)
    return Moment(shifted(made.values, start), None if made.scales is None else shifted(made.scales, start))


def shard(
    formula: Formula, fmt: str, kind: Any, grad_dtype: torch.dtype, numel: int, hostile: bool = False, start: int = 0
) -> Shard:
    """A shard of one of `MASTERS`, the same each time for the same arguments."""
    master = raw(numel, 1, fmt, hostile, start)
    moments = []
    for index, signed in enumerate(formula.signed):
        values = raw(numel, 2 + index, fmt, hostile) * 0.1
        moments.append(moment(values if signed else values.square(), fmt, signed, start))
    param = None
    if kind == "remainder":
        param, master = (shifted(half, start) for half in split(master))
    elif kind is not None:
        param = shifted(torch.zeros(numel, dtype=kind), start)
    return Shard(master, tuple(moments), raw(numel, 4, fmt, hostile, start, grad_dtype), param)


def check_marks(formula: Formula, wanted: Shard, got: Shard, what: object) -> None:
    """Two steps that mark have the bits of two of the reference that do not, and each parameter that changes is marked.

    `got` is what `wanted` is, perhaps elsewhere.
    """
    seen = got.master if got.param is None else got.param
    numel, marks = seen.numel(), torch.zeros(seen.numel() // 8 + 2, dtype=torch.uint8, device=seen.device)
    there = torch.zeros(8 * len(marks), dtype=torch.bool)
    there[numel // 2] = there[numel:] = True  # set before, and behind the last element
    marks.copy_(pack_marks(there))
    for count in (1, 2):
        before = bits(seen).clone()
        step(formula, *got, step=count, grad_scale=0.37, key=5, first=512, marks=marks[: nbytes(numel)], threads=2)
        step_reference(formula, *wanted, step=count, grad_scale=0.37, key=5, first=512)
        there[:numel] |= (before != bits(seen)).cpu()
    assert torch.equal(unpack(marks.cpu(), len(there)), there), what
    for mine, its in zip(got.tensors(), wanted.tensors(), strict=True):
        same(mine.cpu(), its, str(what))


def check_pack(dtype: torch.dtype, flat_dtype: torch.dtype, scale: float, add: bool, device: torch.device) -> None:
    """The bits of the reference, of more tensors than one launch takes, from any address to any, and none beside them.

    Where torch rounds twice, its passes may have to take the place of the kernel.
    """
    sizes = [*SIZES, *range(130)]
    tensors = [numbers(numel, dtype, hostile=True, start=numel % 3) for numel in sizes]
    tensors, gap = [*tensors, numbers(6).view(2, 3)], 3  # any shape, and dtypes may be mixed
    *offsets, size = itertools.accumulate((tensor.numel() + gap for tensor in tensors), initial=gap)
    got = torch.full((size,), 9.0, dtype=flat_dtype, device=device)
    wanted = got.cpu().clone()
    if not pack([tensor.to(device) for tensor in tensors], got, offsets, scale, add):
        assert flat_dtype is not torch.float32 and (add or scale != 1.0)
        return
    pack_reference(tensors, wanted, offsets, scale, add)
    same(got.cpu(), wanted)
    assert got[:gap].tolist() == got[-gap:].tolist() == [9.0] * gap


def check_messages(dtype: torch.dtype, device: torch.device) -> None:
    """Encoded, decoded and summed as by the reference, in parts with groups that are not full, at any address.

    One pass over values and an error has the bits of plain torch's several ones.
    """
    for (blocks, parts), count, start in itertools.product(MESSAGES, (1, 2, 5), (0, 1, 2)):
        numel, room = 64 * blocks, torch.empty(start + count * 66 * blocks, dtype=torch.uint8, device=device)
        rows = list(room[start:].view(count, -1))
        for index, row in enumerate(rows):
            values, wanted = numbers(numel, dtype, seed=index, hostile=index == 1, start=start), row.cpu().clone()
            encode(values.to(device), row, parts)
            encode_reference(values, wanted, parts)
            same_bytes(row.cpu(), wanted, parts)
        mine, its = rows[0].clone(), rows[0].cpu().clone()
        encode_reference(values, wanted, parts, its)
        same_bytes(encode(values.to(device), None, parts, mine).cpu(), wanted, parts)
        same_bytes(mine.cpu(), its, parts)
        for accumulate in (False, True):
            wanted = numbers(numel, dtype, seed=9, start=start)
            got = wanted.to(device, copy=True)
            sum_messages_reference([row.cpu() for row in rows], wanted, accumulate, parts)
            sum_messages(rows, got, accumulate, parts)
            same(got.cpu(), wanted, (blocks, parts, count, start, accumulate))


def same_bytes(message: torch.Tensor, wanted: torch.Tensor, parts: int) -> None:
    """Two messages, but for the bits of scales that are NaN."""
    order = record_bytes(len(wanted), parts, wanted.device)
    mine, its = message[order], wanted[order]
    same(mine[:, 64:].contiguous().view(torch.bfloat16), its[:, 64:].contiguous().view(torch.bfloat16))
    assert torch.equal(mine[:, :64], its[:, :64])


def released(numel: int) -> torch.Tensor:
    tensor = torch.zeros(numel + 3)
    view = tensor[3:]
    tensor.untyped_storage().resize_(0)
    return view


BAD_FLAT = {
    "list": lambda: [1.0] * 8,
    "short": lambda: torch.zeros(7),
    "2-D": lambda: torch.zeros(2, 4),
    "strided": lambda: torch.zeros(16)[::2],
    "integer": lambda: torch.zeros(8, dtype=torch.int32),
    "meta": lambda: torch.zeros(8, device="meta"),
    "sparse": lambda: torch.zeros(8).to_sparse(),
    "released": lambda: released(8),
}


def fixed_sum_squares(x: torch.Tensor) -> float:
    """The documented structure of the additions of csrc/norm_math.h, slowly."""
    lanes = [0.0] * 1024
    for index, block in enumerate(x.double().split(4096)):
        chains = torch.zeros(16, dtype=torch.float64)
        for row in torch.nn.functional.pad(block, (0, -len(block) % 16)).square().view(-1, 16):
            chains += row
        for half in (8, 4, 2, 1):
            chains = chains[:half] + chains[half:]
        lanes[index % 1024] += chains.item()
    total = torch.tensor(lanes, dtype=torch.float64)
    while len(total) > 1:
        half = len(total) // 2
        total = total[:half] + total[half:]
    return total.item()
