"""The CUDA kernels on a GPU: bits, launches without waiting, a whole step in a CUDA graph, errors that speak."""

from __future__ import annotations

import itertools

import cuda_cases
import pytest
import torch
from cuda_cases import ALL_STEPS, FORMULAS, Phase

from zero.kernels import cuda, native
from zero.kernels.norm import sum_squares, sum_squares_into

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]


@pytest.fixture(scope="module")
def device() -> torch.device:
    """The first GPU, which must run the compiled kernels."""
    found = torch.device("cuda", 0)
    if native.load(native.CUDA_MODULE) is None:
        pytest.skip(str(native.missing_text(native.CUDA_MODULE)))
    assert cuda.kernels(found), "the device does not run what was compiled; the log says why"
    return found


@pytest.mark.parametrize(("name", "form"), ALL_STEPS)
def test_step(device: torch.device, name: str, form: str) -> None:
    for case in cuda_cases.cases(name, form):
        cuda_cases.check_step(device, FORMULAS[name], form, case)


@pytest.mark.parametrize(("name", "form"), ALL_STEPS)
def test_a_step_that_reads_its_numbers_on_the_device(device: torch.device, name: str, form: str) -> None:
    cuda_cases.check_live(device, FORMULAS[name], form)


@pytest.mark.parametrize("form", cuda_cases.FORMATS)
def test_a_shard_of_many_blocks(device: torch.device, form: str) -> None:
    """More than the chip holds at once, so that every thread goes around its loop."""
    case = (cuda_cases.MASTERS[0], torch.bfloat16, 5_000_003, 0, False)
    cuda_cases.check_step(device, FORMULAS["adamw"], form, case)


def test_clip(device: torch.device) -> None:
    cuda_cases.check_clip(device)


@pytest.mark.parametrize("dtype", cuda_cases.DTYPES)
def test_norm(device: torch.device, dtype: torch.dtype) -> None:
    for numel, start in itertools.product((0, 1, 17, 4095, 4096, 4097, 70001, 9_000_001), (0, 1)):
        cuda_cases.check_norm(device, numel, dtype, start)


def test_norm_has_the_bits_of_the_hosts(device: torch.device) -> None:
    x = torch.randn(9_000_001)
    assert sum_squares(x.to(device)) == sum_squares(x)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dtype", cuda_cases.DTYPES)
def test_pack_and_unpack(device: torch.device, dtype: torch.dtype, scale: float) -> None:
    for gap in (0, 3, 8):
        cuda_cases.check_bucket(device, dtype, scale, gap)


def test_a_phase_waits_for_nothing(device: torch.device) -> None:
    phase = Phase(device)
    phase.run()
    phase.check(0.0, True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        phase.live.write(lr=1e-3)
        phase.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    phase.check(1e-3, True)


def test_a_phase_in_a_cuda_graph(device: torch.device) -> None:
    """Captured once; lr, gradients and found_inf change between replays, the third of which must be skipped."""
    phase = Phase(device)
    side = torch.cuda.Stream(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        phase.run()
    side.synchronize()
    phase.check(0.0, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        phase.run()
    for turn in range(5):
        lr, finite = 10.0 ** -(turn + 2), turn != 2
        phase.renew(turn, lr, finite)
        graph.replay()
        torch.cuda.synchronize()
        phase.check(lr, finite)


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


def test_a_launch_that_fails_says_which_and_why(device: torch.device) -> None:
    """Too many threads: refused by the launch, and so the context lives on."""
    wanted = r"launch of probe with 1 x 2048 threads on device 0: CUDA error 9, cudaErrorInvalidConfiguration: invalid"
    with pytest.raises(RuntimeError, match=wanted):
        cuda.launch(cuda.kernels(device).probe, device, 2048)
    with pytest.raises(RuntimeError, match=r"cudaSetDevice on device 4711: CUDA error"):
        cuda.kernels(device).probe(32, 4711, 0)
    assert sum_squares(torch.ones(10, device=device)) == 10.0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_of_a_device_that_is_not_the_current_one(device: torch.device) -> None:
    other = torch.device("cuda", 1)
    assert cuda.kernels(other)
    cuda_cases.check_live(other, FORMULAS["adamw"], "8bit")
    assert torch.cuda.current_device() == 0
    assert torch.ones(3, device="cuda").device == torch.device("cuda", 0)
