"""The CUDA kernels: bits, launches without waiting, a whole step in a CUDA graph, errors that speak.

The same cases run on the host, which does without kernels, on a processor for which the same sources and bindings are
compiled, and on a GPU. The oracle is the plain torch reference, on the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import math
from types import ModuleType

import kernel_cases
import pytest
import torch
from cuda_emulation.build import build, compiler
from kernel_cases import DTYPES, FORMULAS, KINDS, MASTERS, Shard, fixed_sum_squares, numbers, same, step_reference

from zero.kernels import cuda, native, norm
from zero.kernels.bucket import sum_rows, sum_rows_reference
from zero.kernels.formulas import Adam, Formula
from zero.kernels.moments import FORMATS
from zero.kernels.norm import sum_squares, sum_squares_into
from zero.kernels.step import step
from zero.memory.pinned_arena import PinnedArena
from zero.optim.outcome import step_factor

CPU = torch.device("cpu")
SIZES = (0, 1, 7, 8, 15, 16, 17, 255, 256, 257, 1023, 1025, 5000)
MARGIN, FILLER = 9, 77  # elements around the tensors of a step, and what stands there
SEEN = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
GPU = [pytest.mark.gpu, SEEN]
on_a_gpu = pytest.mark.parametrize("device", [pytest.param("gpu", marks=GPU)], indirect=True)
every_kind = pytest.mark.parametrize(("name", "fmt"), KINDS)


@pytest.fixture(scope="module")
def module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """``zero._cuda`` for the processor, built once for these sources: it is kept in pytest's cache."""
    if compiler() is None:
        pytest.skip("no C++ compiler to emulate the CUDA kernels with")
    pytest.importorskip("pybind11")
    cache = getattr(request.config, "cache", None)
    return build(tmp_path_factory.mktemp("cuda_on_cpu") if cache is None else cache.mkdir("cuda_on_cpu"))


@pytest.fixture
def emulated(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Sends what would go to a CUDA device to the emulation, with CPU tensors."""

    def launch(call, device, *arguments):
        call(*arguments, 0, 0)

    monkeypatch.setattr(cuda, "kernels", lambda device: module)
    monkeypatch.setattr(cuda, "launch", launch)
    return module


@pytest.fixture(params=[pytest.param("host", marks=pytest.mark.long), "emulated", pytest.param("gpu", marks=GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where tensors are. The first GPU must run the compiled kernels."""
    if request.param != "gpu":
        if request.param == "emulated":
            request.getfixturevalue("emulated")
        return CPU
    if native.load(native.CUDA_MODULE) is None:
        pytest.skip(str(native.missing_text(native.CUDA_MODULE)))
    found = torch.device("cuda", 0)
    assert cuda.kernels(found), "the device does not run what was compiled; the log says why"
    return found


def put(wanted: Shard, device: torch.device, start: int) -> Shard:
    """A copy on a device, each tensor `start` elements into its memory, with a margin behind it."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        room = torch.full((start + tensor.numel() + MARGIN,), FILLER, dtype=tensor.dtype, device=device)
        return room[start : start + tensor.numel()].copy_(tensor)

    return wanted.copy(copy)


def same_shard(got: Shard, wanted: Shard, what: object) -> None:
    for index, (mine, its) in enumerate(zip(got.tensors(), wanted.tensors(), strict=True)):
        room, start = mine._base, mine.storage_offset()
        around = torch.cat([room[:start], room[start + mine.numel() :]])
        assert len(around) >= MARGIN and around.eq(FILLER).all(), f"{what}: written beside a tensor"
        same(mine.cpu(), its, f"{what}, tensor {index}:")


# Steps.


def check_step(
    device: torch.device, formula: Formula, fmt: str, kind: object, grad: torch.dtype, numel: int, start: int, odd: bool
) -> None:
    """A step with numbers of the host, and the first one of a run, against the reference."""
    for count, scale, key, first in ((7, 0.37, 3, 512), (1, 1.0, 0, 0)):
        wanted = kernel_cases.shard(formula, fmt, kind, grad, numel, odd)
        got = put(wanted, device, start)
        options = {"step": count, "grad_scale": scale, "key": key, "first": first}
        step_reference(formula, *wanted, **options)
        step(formula, *got, **options)
        same_shard(got, wanted, (formula, fmt, kind, grad, numel, start, odd, options))


@every_kind
def test_step(device: torch.device, name: str, fmt: str) -> None:
    turn = itertools.cycle(SIZES)
    for kind, grad in itertools.product(MASTERS, DTYPES):
        for start, odd in ((0, False), (1, False), (0, True), (3, True)):
            check_step(device, FORMULAS[name], fmt, kind, grad, next(turn), start, odd)


@every_kind
def test_marks(device: torch.device, name: str, fmt: str) -> None:
    """Of parameters that change, as on the host."""
    turn = itertools.cycle(SIZES)
    for kind, start in itertools.product(MASTERS, (0, 1)):
        numel = next(turn)
        wanted = kernel_cases.shard(FORMULAS[name], fmt, kind, torch.bfloat16, numel)
        kernel_cases.check_marks(FORMULAS[name], wanted, put(wanted, device, start), (name, fmt, kind, numel))


@on_a_gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_shard_of_many_blocks(device: torch.device, fmt: str) -> None:
    """More than the chip holds at once, so that every thread goes around its loop."""
    check_step(device, FORMULAS["AdamW"], fmt, "remainder", torch.bfloat16, 5_000_003, 0, False)


@every_kind
def test_a_step_that_reads_its_factor_on_the_device(device: torch.device, name: str, fmt: str) -> None:
    check_factor(device, FORMULAS[name], fmt)


def check_factor(device: torch.device, formula: Formula, fmt: str) -> None:
    """Five steps that read their factor on the device; the third is skipped, since that is NaN there."""
    wanted = kernel_cases.shard(formula, fmt, "remainder", torch.bfloat16, 1025)
    got = put(wanted, device, 0)
    factor = torch.zeros((), dtype=torch.float64, device=device)
    for turn in range(5):
        options = {"step": turn + 4, "key": 9, "first": 256}
        factor.fill_(math.nan if turn == 2 else 1.0 / (turn + 1))
        step(formula, *got, **options, grad_scale=factor)
        if turn != 2:
            step_reference(formula, *wanted, **options, grad_scale=1.0 / (turn + 1))
        same_shard(got, wanted, (formula, fmt, turn))


def test_the_factor_of_a_step(device: torch.device) -> None:
    """Against torch's formula in Python's numbers: NaN where the norm is not finite and that is checked."""
    norms = (0.0, 1e-30, 4.0, 1e30, math.inf, math.nan)
    for norm_, mean, limit, check in itertools.product(norms, (1.0, 0.125, 1 / 3), (0.0, 1.0, 1e-3), (False, True)):
        there = torch.tensor(norm_, dtype=torch.float64, device=device)
        got = step_factor(there, mean, limit, check).item()
        wanted = mean * (min(1.0, limit / (norm_ + 1e-6)) if limit else 1.0)
        assert got == wanted if math.isfinite(norm_) or not check else math.isnan(got)


# Norms and buckets.


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(device: torch.device, dtype: torch.dtype) -> None:
    large = (9_000_001,) if device.type == "cuda" else ()
    for numel, start in itertools.product((0, 1, 17, 4095, 4096, 4097, 70001, *large), (0, 1)):
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


@on_a_gpu
def test_norm_has_the_bits_of_the_hosts(device: torch.device) -> None:
    x = torch.randn(9_000_001)
    assert sum_squares(x.to(device)) == sum_squares(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_rows(device: torch.device, dtype: torch.dtype) -> None:
    """Rows of one buffer, as they are received, and any two, of which the first may be the sum; then rows apart."""
    for numel, count, start in itertools.product((0, 1, 7, 4096, 5001), (1, 2, 5), (0, 1)):
        buffer = numbers(start + count * numel, dtype, seed=count, hostile=True).to(device)
        rows, total = list(buffer[start:].view(count, numel)), numbers(numel, seed=99).to(device)
        for accumulate, some in itertools.product((False, True), (rows, rows[::-1], [*rows[:2], rows[0].clone()])):
            wanted = total.cpu()
            sum_rows_reference([row.cpu() for row in some], wanted, accumulate)
            sum_rows(some, total, accumulate)
            same(total.cpu(), wanted, (numel, count, start, accumulate))
    left, right = (numbers(1000, seed=seed).to(device) for seed in (1, 2))
    wanted = left + right
    sum_rows([left, right], left, False)
    same(left, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_8_bits(device: torch.device, dtype: torch.dtype) -> None:
    kernel_cases.check_messages(dtype, device)


@pytest.mark.parametrize(("scale", "add"), [(1.0, False), (0.3, False), (1.0, True)])
@pytest.mark.parametrize(("dtype", "flat_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_pack(device: torch.device, dtype: torch.dtype, flat_dtype: torch.dtype, scale: float, add: bool) -> None:
    kernel_cases.check_pack(dtype, flat_dtype, scale, add, device)


# An optimizer phase.


class Phase:
    """A whole optimizer phase: gradients packed, norm, factor, a step of each of two shards."""

    def __init__(self, device: torch.device) -> None:
        self.formula = Adam(1e-2, weight_decay=0.1)
        self.wanted = [
            kernel_cases.shard(self.formula, "8bit", "remainder", torch.float32, numel) for numel in (70_000, 5_000)
        ]
        self.shards = [put(each, device, 0) for each in self.wanted]
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.grads = [each.grad.bfloat16() for each in self.shards]
        self.factor = torch.zeros((), dtype=torch.float64, device=device)

    def run(self, count: int) -> None:
        for index, (each, grad) in enumerate(zip(self.shards, self.grads, strict=True)):
            each.grad.copy_(grad * 0.5)
            sum_squares_into(each.grad, self.total, accumulate=index > 0)
        self.factor.copy_(step_factor(self.total.sqrt() * 0.25, 0.25, 1.0, True))
        for index, each in enumerate(self.shards):
            step(self.formula, *each, step=count, grad_scale=self.factor, key=index)

    def renew(self, turn: int, finite: bool) -> None:
        """Other gradients."""
        for grad in self.grads:
            grad.copy_(numbers(grad.numel(), seed=50 + turn))
        if not finite:
            self.grads[1][17] = torch.inf

    def check(self, count: int, finite: bool) -> None:
        """Take the step on the CPU as well and compare."""
        factor = self.factor.item()
        assert math.isnan(factor) == (not finite)
        for index, (mine, wanted) in enumerate(zip(self.shards, self.wanted, strict=True)):
            wanted.grad.copy_(self.grads[index].float().cpu() * 0.5)
            if finite:
                step_reference(self.formula, *wanted, step=count, grad_scale=factor, key=index)
            same_shard(mine, wanted, ("phase", count, index))


def test_a_phase(device: torch.device) -> None:
    phase = Phase(device)
    for turn in range(4):
        phase.renew(turn, turn != 2)
        phase.run(turn + 1)
        phase.check(turn + 1, turn != 2)


@on_a_gpu
def test_a_phase_waits_for_nothing(device: torch.device) -> None:
    phase = Phase(device)
    phase.run(1)
    phase.check(1, True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        phase.run(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    phase.check(2, True)


# Launches.


@on_a_gpu
def test_launches_go_to_the_current_stream(device: torch.device) -> None:
    """Behind half a second of other work, a step on the same stream sees that work's result, one beside it does not."""
    x = torch.zeros(1000, device=device)
    out = torch.zeros(1, dtype=torch.float64, device=device)
    sum_squares_into(x, out)  # loading a kernel may wait for the device
    torch.cuda.synchronize()
    busy = torch.cuda.Stream(device)
    with torch.cuda.stream(busy):
        torch.cuda._sleep(500_000_000)
        x.fill_(1.0)
    sum_squares_into(x, out)
    assert out.item() == 0.0
    with torch.cuda.stream(busy):
        sum_squares_into(x, out)
        assert out.item() == 1000.0


@pytest.mark.parametrize("device", ["emulated", pytest.param("gpu", marks=GPU)], indirect=True)
def test_a_launch_that_fails_says_which_and_why(device: torch.device) -> None:
    """Too many threads: refused by the launch, and so the context lives on."""
    module = cuda.kernels(device)
    cuda.launch(module.probe, device, 32)
    told = "(9, cudaErrorInvalidConfiguration|1, cudaErrorInvalidValue): invalid"  # by the driver; 580 says the second
    with pytest.raises(RuntimeError, match=f"launch of probe with 1 x 2048 threads on device 0: CUDA error {told}"):
        cuda.launch(module.probe, device, 2048)
    with pytest.raises(RuntimeError, match=r"cudaSetDevice on device 4711: CUDA error"):
        module.probe(32, 4711, 0)
    assert sum_squares(torch.ones(10, device=device)) == 10.0


@on_a_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_of_a_device_that_is_not_the_current_one(device: torch.device) -> None:
    other = torch.device("cuda", 1)
    assert cuda.kernels(other)
    check_factor(other, FORMULAS["AdamW"], "8bit")
    assert torch.cuda.current_device() == 0
    assert torch.ones(3, device="cuda").device == torch.device("cuda", 0)


def test_what_a_chip_holds_is_asked_once_for_each_kernel(emulated: ModuleType) -> None:
    asked = ctypes.CDLL(emulated.__file__).emulated_questions
    sum_squares(torch.ones(10))
    before = asked()
    for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16):
        sum_squares(torch.ones(10, dtype=dtype))
        sum_squares(torch.ones(70_000, dtype=dtype))
    assert 0 < before <= asked() <= before + 1


def test_python_and_c_agree_about_sizes(module: ModuleType) -> None:
    assert norm.NORM_BLOCK == module.NORM_BLOCK


def test_memory_of_the_host_is_registered_until_its_last_tensor_is_gone(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "load", lambda name: emulated)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    device = torch.device("cuda", 0)
    arena = PinnedArena(4096, device, pinned=True)
    address, taken = arena.address, arena.take(4096)
    assert arena.pinned
    assert not PinnedArena(4096, device, pinned=False).pinned
    arena.close()
    with pytest.raises(RuntimeError, match=r"cudaHostRegister on device 0: CUDA error 712, cudaErrorHostMemoryAlready"):
        cuda.pin_host(address, 4096, device)
    del arena, taken
    gc.collect()
    unpin = cuda.pin_host(address, 4096, device)  # it is free again
    unpin()
    with pytest.raises(RuntimeError, match=r"cudaHostUnregister on device 0: CUDA error 713"):
        unpin()
    with pytest.raises(RuntimeError, match="cudaErrorInvalidDevice"):
        cuda.pin_host(address, 4096, torch.device("cuda", 1))
