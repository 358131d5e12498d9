"""What the CUDA kernels must give, on whatever runs them: a GPU (test_cuda_kernels), or a CPU that emulates one
(test_cuda_emulated). The oracle is the plain torch reference, on the CPU.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from kernel_cases import DTYPES, fixed_sum_squares, numbers, same, step_reference
from torch import Tensor

from zero.kernels.bucket import Bucket, move_reference
from zero.kernels.formulas import Adagrad, Adam, Formula, Lion, Sgd
from zero.kernels.live import Live
from zero.kernels.moments import FORMATS, Moment, blocks_of
from zero.kernels.norm import sum_squares_into
from zero.kernels.step import step

SIZES = (0, 1, 7, 8, 15, 16, 17, 255, 256, 257, 1023, 1025, 5000)
FORMULAS = {
    "adamw": Adam(1e-3, weight_decay=0.1),
    "adam": Adam(1e-2, 0.3, 0.99, 1e-6, weight_decay=0.1, decoupled=False),
    "adam plain": Adam(1e-3, 0.0, 0.0, 0.0, bias_correction=False, decoupled=False),
    "lion": Lion(1e-4, weight_decay=0.2),
    "momentum": Sgd(0.1, 0.9, 0.3, weight_decay=1e-2),
    "nesterov": Sgd(0.1, 0.9, nesterov=True),
    "sgd": Sgd(0.1, weight_decay=1e-2),
    "adagrad": Adagrad(0.1, lr_decay=1e-2, weight_decay=1e-2),
}
# (kind of master, dtype of the parameter beside it)
MASTERS = (
    ("remainder", torch.bfloat16),
    ("fp32", None),
    ("fp32", torch.bfloat16),
    ("fp32", torch.float16),
    ("fp32", torch.float32),
)
MARGIN, FILLER = 9, 77  # elements around the tensors of a step, and what stands there


def cases(formula: str, form: str) -> list[tuple]:
    """(master, grad dtype, numel, start, hostile): all masters and gradients, sizes in turn."""
    turn = itertools.cycle(SIZES)
    return [
        (master, grad, next(turn), start, hostile)
        for master in MASTERS
        for grad in DTYPES
        for start, hostile in ((0, False), (1, False), (0, True), (3, True))
    ]


class Shard(NamedTuple):
    """The tensors of a step."""

    master: Tensor
    moments: tuple[Moment, ...]
    grad: Tensor
    param: Tensor | None

    def tensors(self) -> list[Tensor]:
        moments = [t for moment in self.moments for t in (moment.values, moment.scales)]
        return [t for t in (self.master, *moments, self.grad, self.param) if t is not None]

    def to(self, device: torch.device, start: int) -> Shard:
        """A copy on a device, each tensor `start` elements into its memory, with a margin behind it."""

        def put(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            room = torch.full((start + tensor.numel() + MARGIN,), FILLER, dtype=tensor.dtype, device=device)
            return room[start : start + tensor.numel()].copy_(tensor)

        moments = tuple(Moment(put(moment.values), put(moment.scales)) for moment in self.moments)
        return Shard(put(self.master), moments, put(self.grad), put(self.param))


def moment(numel: int, form: str, signed: bool, seed: int, hostile: bool) -> Moment:
    """A moment in any of its formats: normal numbers, or for 8bit, where hostile, any codes with any scales."""
    if form == "8bit" and hostile:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 256, (numel,), generator=generator).to(torch.uint8)
        exponents = torch.randint(-126, 128, (blocks_of(numel),), generator=generator).float()
        scales = torch.exp2(exponents)
        scales[::7] = 0.0
        scales[3::11] = math.inf
        return Moment(codes, scales)
    x = numbers(numel, seed=seed, hostile=hostile) * 0.1
    made = Moment.filled(numel, form, signed=signed)
    made.write(x if signed else x.square(), signed)
    return made


def shard(formula: Formula, form: str, master: tuple, grad: torch.dtype, numel: int, hostile: bool) -> Shard:
    """A shard on the CPU, the same each time for the same arguments."""
    kind, dtype = master
    p = numbers(numel, seed=1, hostile=hostile)
    moments = tuple(moment(numel, form, signed, 2 + index, hostile) for index, signed in enumerate(formula.signed))
    param = None if dtype is None else p.to(dtype, copy=True)
    if kind == "remainder":
        generator = torch.Generator().manual_seed(5)
        p = torch.randint(-(2**15), 2**15, (numel,), generator=generator).to(torch.int16)
    return Shard(p, moments, numbers(numel, grad, 4, hostile), param)


def same_shard(got: Shard, wanted: Shard, what: object) -> None:
    for tensor in got.tensors():
        room, start = tensor._base, tensor.storage_offset()
        around = torch.cat([room[:start], room[start + tensor.numel() :]])
        assert len(around) >= MARGIN and around.eq(FILLER).all(), f"{what}: written beside a tensor"
    for index, (mine, its) in enumerate(zip(got.tensors(), wanted.tensors(), strict=True)):
        same(mine.cpu(), its, f"{what}, tensor {index}:")


def check_step(device: torch.device, formula: Formula, form: str, case: tuple) -> None:
    """A step with numbers of the host, and the first one of a run, against the reference."""
    master, grad, numel, start, hostile = case
    for count, scale, key, first in ((7, 0.37, 3, 512), (1, 1.0, 0, 0)):
        wanted = shard(formula, form, master, grad, numel, hostile)
        got = wanted.to(device, start)
        options = {"step": count, "grad_scale": scale, "key": key, "first": first}
        step_reference(formula, *wanted, **options)
        step(formula, *got, **options)
        same_shard(got, wanted, (formula, form, case, options))


def check_live(device: torch.device, formula: Formula, form: str, numel: int = 1025) -> None:
    """Five steps that read lr, factor, step and found_inf on the device; the third is skipped."""
    wanted = shard(formula, form, MASTERS[0], torch.bfloat16, numel, False)
    got = wanted.to(device, 0)
    live, taken = Live(device, step=4), 4
    for turn in range(5):
        lr, scale, bad = 10.0**-turn, 1.0 / (turn + 1), turn == 2
        live.write(lr=lr, grad_scale=scale, found_inf=bad)
        live.prepare(formula)
        live.step(formula, *got, key=9, first=256)
        if not bad:
            taken += 1
            now = type(formula)(**{**vars(formula), "lr": lr})
            step_reference(now, *wanted, step=taken, grad_scale=scale, key=9, first=256)
        assert live.read()[:4] == (lr, scale, taken, bad)
        same_shard(got, wanted, (formula, form, turn))


def check_clip(device: torch.device) -> None:
    """norm, factor and found_inf against zero/optim/clip.py."""
    from zero.optim.norm import clip_factor

    live = Live(device)
    for total, mean, limit in itertools.product(
        (0.0, 1e-30, 4.0, 1e30, math.inf, math.nan), (1.0, 0.125, 1 / 3), (0.0, 1.0, 1e-3)
    ):
        live.clip(torch.tensor([total], dtype=torch.float64, device=device), mean, limit)
        numbers_now = live.read()
        norm = math.sqrt(total) * mean if total >= 0 else math.nan
        assert numbers_now.found_inf == (not math.isfinite(norm))
        assert numbers_now.norm == norm or math.isnan(norm)
        if math.isfinite(norm):
            assert numbers_now.grad_scale == mean * clip_factor(norm, limit)
    assert live.read().step == 0


def check_norm(device: torch.device, numel: int, dtype: torch.dtype, start: int) -> None:
    x = numbers(numel + start, dtype, 7).to(device)[start:]
    out = torch.full((1,), 5.0, dtype=torch.float64, device=device)
    wanted = fixed_sum_squares(x.cpu())
    sum_squares_into(x, out)
    assert out.item() == wanted
    sum_squares_into(x, out, accumulate=True)
    assert out.item() == wanted + wanted
    for at, bad in zip((0, numel // 2, numel - 1) if numel else (), (math.inf, -math.inf, math.nan), strict=False):
        y = x.clone()
        y[at] = bad
        sum_squares_into(y, out)
        assert not out.isfinite().item()
    sum_squares_into(torch.full_like(x, torch.finfo(dtype).max), out)
    assert out.isfinite().item()


def check_bucket(device: torch.device, flat_dtype: torch.dtype, scale: float, gap: int) -> None:
    """Tensors of all sizes and dtypes with gaps between them, there and back."""
    sizes = (*SIZES[1:], 20000, 8192)
    tensors = [numbers(numel, dtype, numel, True) for dtype in DTYPES for numel in sizes]
    tensors.append(numbers(6, seed=3).view(2, 3))
    *offsets, size = itertools.accumulate((tensor.numel() + gap for tensor in tensors), initial=gap)
    wanted = torch.full((size,), 9.0, dtype=flat_dtype)
    got = wanted.to(device, copy=True)
    mine = [tensor.to(device, copy=True) for tensor in tensors]
    bucket = Bucket(mine, got, offsets)
    move_reference(tensors, wanted, offsets, scale, True)
    bucket.pack(scale)
    same(got.cpu(), wanted, f"pack, {flat_dtype}, {scale}:")
    move_reference(tensors, wanted, offsets, scale, False)
    bucket.unpack(scale)
    for index, (a, b) in enumerate(zip(mine, tensors, strict=True)):
        same(a.cpu().flatten(), b.flatten(), f"unpack, {index}, {flat_dtype}, {scale}:")


class Phase:
    """A whole optimizer phase of one group: gradients packed, norm, clip, prepare, a step of each of two shards."""

    def __init__(self, device: torch.device) -> None:
        self.formula = Adam(0.0, weight_decay=0.1)
        master, numels = MASTERS[0], (70_000, 5_000)
        self.wanted = [shard(self.formula, "8bit", master, torch.float32, n, False) for n in numels]
        self.shards = [shard.to(device, 0) for shard in self.wanted]
        self.live = Live(device)
        self.total = torch.zeros(1, dtype=torch.float64, device=device)
        self.grads = [shard.grad.bfloat16() for shard in self.shards]
        self.buckets = [Bucket([grad], shard.grad, [0]) for grad, shard in zip(self.grads, self.shards, strict=True)]
        self.taken = 0

    def run(self) -> None:
        for index, (shard, bucket) in enumerate(zip(self.shards, self.buckets, strict=True)):
            bucket.pack(0.5)
            sum_squares_into(shard.grad, self.total, accumulate=index > 0)
        self.live.clip(self.total, 0.25, 1.0)
        self.live.prepare(self.formula)
        for index, shard in enumerate(self.shards):
            self.live.step(self.formula, *shard, key=index)

    def renew(self, turn: int, lr: float, finite: bool) -> None:
        """Other gradients, and another lr."""
        self.live.write(lr=lr)
        for grad in self.grads:
            grad.copy_(numbers(grad.numel(), seed=50 + turn))
        if not finite:
            self.grads[1][17] = torch.inf

    def check(self, lr: float, finite: bool) -> None:
        """Take the step on the CPU as well and compare."""
        now = self.live.read()
        assert now.found_inf == (not finite)
        self.taken += finite
        assert now.step == self.taken
        for index, (shard, wanted) in enumerate(zip(self.shards, self.wanted, strict=True)):
            wanted.grad.copy_(self.grads[index].float().cpu() * 0.5)
            if finite:
                formula = Adam(lr, weight_decay=0.1)
                step_reference(formula, *wanted, step=self.taken, grad_scale=now.grad_scale, key=index)
            same_shard(shard, wanted, ("phase", self.taken, index))


ALL_STEPS = [
    (name, form) for name, form in itertools.product(FORMULAS, FORMATS) if FORMULAS[name].state_names or form == "fp32"
]
