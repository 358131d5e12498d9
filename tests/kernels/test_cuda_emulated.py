"""The CUDA kernels' logic without a GPU: the same sources and bindings, compiled for and run on the processor."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from types import ModuleType

import cuda_cases
import pytest
import torch
from cuda_cases import ALL_STEPS, FORMULAS
from cuda_emulation.build import build, compiler

from zero.kernels import bucket, cuda, live, norm
from zero.kernels.step import kernel_arguments
from zero.memory.pinned_arena import PinnedArena

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """``zero._cuda`` for the processor, built once."""
    if compiler() is None:
        pytest.skip("no C++ compiler to emulate the CUDA kernels with")
    pytest.importorskip("pybind11")
    return build(tmp_path_factory.mktemp("cuda_on_cpu"))


@pytest.fixture
def emulated(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Sends what would go to a CUDA device to the emulation, with CPU tensors."""

    def launch(call, device, *arguments):
        call(*arguments, 0, 0)

    def step(formula, master, moments, grad, param, *, step, grad_scale, key, first):
        if master.numel():
            shard = (*kernel_arguments(formula, master, moments, grad, param), key, first)
            launch(module.step, CPU, formula.native(), step, grad_scale, shard)

    monkeypatch.setattr(cuda, "kernels", lambda device: module)
    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(cuda_cases, "step", step)  # zero.kernels.step sends CPU tensors elsewhere
    yield module


def test_python_and_c_agree_about_sizes(module: ModuleType) -> None:
    assert (bucket.PIECE, norm.NORM_BLOCK) == (module.PIECE, module.NORM_BLOCK)
    assert (live._LIVE_WORDS, 8 * live._PREPARED_WORDS) == (module.LIVE_WORDS, module.PREPARED_BYTES)


@pytest.mark.parametrize(("name", "form"), ALL_STEPS)
def test_step(emulated: ModuleType, name: str, form: str) -> None:
    for case in cuda_cases.cases(name, form):
        cuda_cases.check_step(CPU, FORMULAS[name], form, case)


@pytest.mark.parametrize(("name", "form"), ALL_STEPS)
def test_a_step_that_reads_its_numbers_on_the_device(emulated: ModuleType, name: str, form: str) -> None:
    cuda_cases.check_live(CPU, FORMULAS[name], form)


def test_clip(emulated: ModuleType) -> None:
    cuda_cases.check_clip(CPU)


@pytest.mark.parametrize("dtype", cuda_cases.DTYPES)
def test_norm(emulated: ModuleType, dtype: torch.dtype) -> None:
    for numel, start in itertools.product((0, 1, 17, 4095, 4096, 4097, 70001), (0, 1)):
        cuda_cases.check_norm(CPU, numel, dtype, start)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dtype", cuda_cases.DTYPES)
def test_pack_and_unpack(emulated: ModuleType, dtype: torch.dtype, scale: float) -> None:
    for gap in (0, 3, 8):
        cuda_cases.check_bucket(CPU, dtype, scale, gap)


def test_a_phase(emulated: ModuleType) -> None:
    phase = cuda_cases.Phase(CPU)
    for turn in range(4):
        lr, finite = 10.0 ** -(turn + 2), turn != 2
        phase.renew(turn, lr, finite)
        phase.run()
        phase.check(lr, finite)


def test_a_launch_that_fails_says_which_and_why(module: ModuleType) -> None:
    module.probe(32, 0, 0)
    wanted = r"launch of probe with 1 x 2048 threads on device 0: CUDA error 9, cudaErrorInvalidConfiguration: invalid"
    with pytest.raises(RuntimeError, match=wanted):
        module.probe(2048, 0, 0)
    with pytest.raises(RuntimeError, match=r"cudaSetDevice on device 5: CUDA error 101"):
        module.probe(32, 5, 0)


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
