"""The promise: state that streams through the device gives the same training, and no more than two units' is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import CODED, WIDE, config, make_net, step
from offload_cases import BOTH, GPU, as_on_a_gpu
from test_offload_numbers import BF16, FP16, TREE, Case, differing, moments

import zero
import zero.core.ratio
import zero.core.streaming
from zero.config import ConfigError
from zero.memory.update_costs import UpdateRates

STREAMED = {"offload_optimizer": GPU}
CPU = torch.device("cpu")


def placements(stage: int, folder: str) -> list[dict[str, Any]]:
    """Sections of the JSON whose state streams, and one that the host updates."""
    filed = {"device": "nvme", "nvme_path": folder}
    found = [STREAMED, {"offload_optimizer": {**GPU, "ratio": 0.5}}]
    found += [{"offload_optimizer": {**GPU, **filed, "buffer_count": count}} for count in (1, 4)]
    if stage == 3:
        files = {**filed, "max_in_cpu": 0}
        found += [{**BOTH, **STREAMED}, {**STREAMED, "offload_param": files}]
        found.append({"offload_optimizer": {**GPU, **filed}, "offload_param": files})
    return [*found, {"offload_optimizer": {"device": "cpu"}}]


QUICK = [Case(1, 2, 2, more=moments("8bit")), Case(3, 2, more=BF16)]
LONG = [
    *(Case(stage, world, 1, clip) for stage in (1, 2, 3) for world, clip in ((1, 0.5), (2, 0.0), (4, 0.5))),
    *(Case(3, 2, 3, more=moments(kind)) for kind in ("fp32", "bf16", "8bit")),
    *(Case(stage, 2, 2, more=more) for stage, more in ((1, FP16), (2, TREE), (3, TREE))),
    Case(2, 1, 3, 0.0, moments("8bit")),
    *(Case(stage, 2, more={"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}) for stage in (1, 3)),
    Case(3, 2, 2, more=BF16, section=CODED),
    *(Case(stage, 1, more={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}) for stage in (2, 3)),  # no state
]


@pytest.mark.parametrize("case", [*QUICK, *longer(*((case,) for case in LONG))], ids=str)
def test_losses_norms_and_weights_are_those_of_the_device(pool, tmp_path: Path, case: Case):
    assert pool.run(case.world, differing, case._replace(apart=True), str(tmp_path), placements) == [[]] * case.world


def engine_of(section: dict[str, Any], **more: Any) -> Any:
    stage = 2
    world = dist.get_world_size() if dist.is_initialized() else 1
    given = config(stage, world, **{**BF16, **more}, zero_optimization={"stage": stage, **section})
    return zero.initialize(model=make_net(blocks=4, width=WIDE), config=given)[0]


def continued(folder: str, first: dict[str, Any], then: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters after two steps, a checkpoint, and two more in another engine; with writes to state on the way."""
    with as_on_a_gpu():
        engine = engine_of(first)
        for number in range(2):
            step(engine, number)
        weight = engine.module.head.weight
        for key in ("exp_avg", "exp_avg_sq"):
            found = zero.utils.safe_get_full_optimizer_state(weight, key)
            zero.utils.safe_set_full_optimizer_state(weight, found * 2, key)
        zero.utils.safe_set_full_fp32_param(weight, zero.utils.safe_get_full_fp32_param(weight) + 2**-12)
        engine.save_checkpoint(folder)
        engine.destroy()
        engine = engine_of(then)
        engine.load_checkpoint(folder)
        for number in range(2, 4):
            step(engine, number)
        exact = [zero.utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
        engine.destroy()
    return exact


def test_checkpoints_and_edits_pass_through_as_from_elsewhere(tmp_path):
    ways = [({}, {}), (STREAMED, {}), ({}, STREAMED), (STREAMED, {"offload_optimizer": {"device": "cpu"}})]
    found = [continued(str(tmp_path / str(at)), *way) for at, way in enumerate(ways)]
    assert all(map(torch.equal, exact, found[0]) for exact in found[1:])
    for exact in found[1:]:
        assert all(map(torch.equal, exact, found[0]))


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"zero\.update: got 'gpu' with offload_optimizer\.device 'none'"):
        engine_of({"offload_optimizer": {"zero": {"update": "gpu"}}})
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"zero\.update: got 'gpu', and this rank computes on 'cpu'.*'auto'"):
            engine_of(STREAMED)
    torchs = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    with as_on_a_gpu(), pytest.raises(ValueError, match=r"zero\.update: got 'gpu' with LAMB, or an optimizer class"):
        engine_of(STREAMED, **torchs)
    with as_on_a_gpu(), pytest.raises(ValueError, match=r"zero\.update: got 'gpu' with LAMB"):
        engine_of(STREAMED, optimizer={"type": "Lamb", "params": {"lr": 1e-3}})
    with pytest.raises(ConfigError, match=r"zero\.update: got 'tpu', wanted one of 'host', 'gpu', 'auto'"):
        engine_of({"offload_optimizer": {"device": "cpu", "zero": {"update": "tpu"}}})


@pytest.mark.parametrize(
    ("link", "host", "free", "torchs", "streams", "why"),
    [
        (50e9, 80e9, 1 << 40, False, True, r"gpu, as a step takes .* ms on the GPU \(.* MiB each way at 50\.0 GB/s\)"),
        (5e9, 80e9, 1 << 40, False, False, r"host, as .* each way at 5\.0 GB/s.* ms on the host \(80\.0 GB/s\)$"),
        (50e9, 80e9, 1000, False, False, r"host, as .* \(80\.0 GB/s\); the GPU lacks .* MiB for it"),
        (50e9, 80e9, 1 << 40, True, False, "host, as the optimizer is not our kernels' alone"),
    ],
)
def test_auto_takes_what_moves_faster(monkeypatch, caplog, link, host, free, torchs, streams, why):
    monkeypatch.setattr(zero.core.streaming, "rates", lambda device: UpdateRates(link, host, 2000e9))
    monkeypatch.setattr(zero.core.ratio, "available_nbytes", lambda ranks: free)
    more = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}} if torchs else {}
    section = {"offload_optimizer": {"device": "cpu", "zero": {"update": "auto"}}}
    with as_on_a_gpu():
        engine = engine_of(section, **more)
    assert {unit.placement.streamed for unit in engine._sharded.trained} == {streams}
    engine.destroy()
    said = [record.getMessage() for record in caplog.records if "zero.update 'auto'" in record.getMessage()]
    assert len(said) == 1 and re.search(why, said[0]), said


@pytest.mark.ranks(2)
def test_all_ranks_choose_by_the_slowest(monkeypatch):
    link = 50e9 if dist.get_rank() else 1e9
    monkeypatch.setattr(zero.core.streaming, "rates", lambda device: UpdateRates(link, 80e9, 2000e9))
    with as_on_a_gpu():
        engine = engine_of({"offload_optimizer": {"device": "cpu", "zero": {"update": "auto"}}})
    assert all(unit.placement.updated_on_host for unit in engine._sharded.trained)
    engine.destroy()


def test_auto_is_the_host_where_there_is_no_device(monkeypatch, caplog):
    monkeypatch.setattr(zero.core.streaming, "rates", lambda device: pytest.fail("nothing is to be measured"))
    if not torch.cuda.is_available():
        engine = engine_of({"offload_optimizer": {"device": "cpu", "zero": {"update": "auto"}}})
        assert all(unit.placement.updated_on_host for unit in engine._sharded.trained)
        assert "'auto': host, as 'cpu' shares the host's memory" in caplog.text
        engine.destroy()


def test_ratio_auto_leaves_room_for_what_streams(monkeypatch, tmp_path):
    """For the two places and the gradients; with them, as much state stays as fits."""
    monkeypatch.setattr(zero.core.streaming, "rates", lambda device: UpdateRates(50e9, 80e9, 2000e9))
    found = []
    for free in (0, *(1 << bit for bit in range(19, 24)), 1_200_000):
        monkeypatch.setattr(zero.core.ratio, "available_nbytes", lambda ranks, free=free: free)
        section = {"device": "nvme", "nvme_path": str(tmp_path), "ratio": "auto", "zero": {"update": "auto"}}
        with as_on_a_gpu():
            engine = engine_of({"offload_optimizer": section})
        away = [unit for unit in engine._sharded.trained if unit.placement.state_offloaded]
        streamed = sum(unit.placement.streamed for unit in away)
        assert streamed in (0, len(away))
        nbytes = engine.state_nbytes().optimizer
        assert not streamed or nbytes <= 0.6 * free
        found.append((len(away), streamed))
        engine.destroy()
    units = max(count for count, _ in found)
    assert (units, 0) in found and (0, 0) in found
    assert any(0 < streamed < units for _, streamed in found), found
