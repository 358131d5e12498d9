"""The promise: state that streams through the device gives the same training, and no more than two units' is there.

And `"ratio": "auto"` keeps what fits on the device, alike on all ranks, says so, and changes no number.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import WIDE, config, make_net, share, step
from offload_cases import BOTH, GPU, as_on_a_gpu
from ranks import listening
from scenario import Record, run, same, scenario
from test_exceptions import in_backward

import zero
import zero.core.ratio
import zero.core.streaming
from zero.memory.update_costs import UpdateRates

STREAMED = {"offload_optimizer": GPU}
KEYS = ("exp_avg", "exp_avg_sq")
AUTO = {"offload_optimizer": {"device": "cpu", "zero": {"update": "auto"}}}


def engine_of(section: dict[str, Any], stage: int = 2, **more: Any) -> Any:
    world = dist.get_world_size() if dist.is_initialized() else 1
    given = config(stage, world, **{"bf16": {"enabled": True}, **more}, zero_optimization={"stage": stage, **section})
    return zero.initialize(model=make_net(blocks=4, width=WIDE), config=given)[0]


def filed(folder: Any, **more: Any) -> dict[str, Any]:
    return {"offload_optimizer": {**GPU, "device": "nvme", "nvme_path": str(folder), **more}}


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_no_more_than_two_units_are_on_the_device(tmp_path: Path, device: str) -> None:
    with as_on_a_gpu():
        engine = engine_of(STREAMED if device == "cpu" else filed(tmp_path))
    for number in range(2):
        step(engine, number)
    units, host = engine.describe().units, engine.host_nbytes()
    assert {unit.optimizer for unit in units} == {"host" if device == "cpu" else "file"}
    assert host.files + host.memory >= 10 * sum(unit.numel for unit in units)  # remainders and two moments
    largest = max(unit.numel for unit in units)
    assert (
        2 * 10 * largest
        <= engine.state_nbytes().optimizer
        <= 2 * (10 * largest + 8192)
        < 10 * sum(unit.numel for unit in units)
    )
    engine.destroy()


def continued(folder: str, first: dict[str, Any], then: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters after two steps, a checkpoint, and two more in another engine; with writes to state on the way."""
    with as_on_a_gpu():
        engine = engine_of(first)
        for number in range(2):
            step(engine, number)
        weight = engine.module.head.weight
        for key in KEYS:
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
    for exact in found[1:]:
        assert all(map(torch.equal, exact, found[0]))


def test_what_cannot_be_is_refused(tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"zero\.update: got 'gpu', and this rank computes on 'cpu'.*'auto'"):
            engine_of(STREAMED)
    torchs = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    with as_on_a_gpu(), pytest.raises(ValueError, match=r"zero\.update: got 'gpu' with LAMB, or an optimizer class"):
        engine_of(STREAMED, **torchs)
    with as_on_a_gpu(), pytest.raises(ValueError, match=r"zero\.update: got 'gpu' with LAMB"):
        engine_of(STREAMED, optimizer={"type": "Lamb", "params": {"lr": 1e-3}})


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
    with as_on_a_gpu():
        engine = engine_of(AUTO, **more)
    assert (engine.state_nbytes().optimizer > 0) == streams
    engine.destroy()
    said = [record.getMessage() for record in caplog.records if "zero.update 'auto'" in record.getMessage()]
    assert len(said) == 1 and re.search(why, said[0]), said


@pytest.mark.ranks(2)
def test_all_ranks_choose_by_the_slowest(monkeypatch):
    link = 50e9 if dist.get_rank() else 1e9
    monkeypatch.setattr(zero.core.streaming, "rates", lambda device: UpdateRates(link, 80e9, 2000e9))
    with as_on_a_gpu():
        engine = engine_of(AUTO)
    assert engine.state_nbytes().optimizer == 0
    engine.destroy()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_auto_is_the_host_where_there_is_no_device(monkeypatch, caplog):
    monkeypatch.setattr(zero.core.streaming, "rates", lambda device: pytest.fail("nothing is to be measured"))
    engine_of(AUTO).destroy()
    assert "'auto': host, as 'cpu' shares the host's memory" in caplog.text


def test_ratio_auto_leaves_room_for_what_streams(monkeypatch, tmp_path):
    """For the two places and the gradients; with them, as much state stays as fits."""
    monkeypatch.setattr(zero.core.streaming, "rates", lambda device: UpdateRates(50e9, 80e9, 2000e9))
    found = []
    for free in (0, *(1 << bit for bit in range(19, 24)), 1_200_000):
        monkeypatch.setattr(zero.core.ratio, "available_nbytes", lambda ranks, free=free: free)
        section = {"device": "nvme", "nvme_path": str(tmp_path), "ratio": "auto", "zero": {"update": "auto"}}
        with as_on_a_gpu(), listening(logging.INFO) as said:
            engine = engine_of({"offload_optimizer": section})
        away = [unit for unit in engine.describe().units if unit.optimizer != "device"]
        streamed = len(away) if any("zero.update 'auto': gpu" in text for text in said) else 0
        nbytes = engine.state_nbytes().optimizer
        assert not streamed or nbytes <= 0.6 * free
        found.append((len(away), streamed))
        engine.destroy()
    units = max(count for count, _ in found)
    assert (units, 0) in found and (0, 0) in found
    assert any(0 < streamed < units for _, streamed in found), found


def whatever_comes(stage: int, section: dict[str, Any], folder: str) -> list[torch.Tensor]:
    """Weights and moments after steps between whose backward and update something else happens."""
    engine = engine_of(section, stage=stage)
    params = list(engine.module.parameters())

    def edit(index: int) -> None:
        for key in KEYS:
            state = zero.utils.safe_get_full_optimizer_state(params[index], key)
            zero.utils.safe_set_full_optimizer_state(params[index], state * 2, key)
        exact = zero.utils.safe_get_full_fp32_param(params[index])
        zero.utils.safe_set_full_fp32_param(params[index], exact + 2**-12)

    def edit_all() -> None:
        for index in reversed(range(len(params))):
            edit(index)

    between = [
        lambda: None,
        lambda: edit(0),  # brought already
        edit_all,  # more than there are places
        engine.zero_grad,
        lambda: in_backward(engine, RuntimeError("in the middle")),
    ]
    for number, what in enumerate(between):
        engine.backward(engine(*share(number)))
        what()
        if number == len(between) - 1:
            engine.backward(engine(*share(number)))  # the gradients went with the exception
        engine.step()
        engine.backward(engine(*share(number)) * float("inf"))  # brought for a step that is skipped
        engine.step()
        assert engine.skipped_steps == number + 1
        if number == 1:
            engine.save_checkpoint(folder, tag="between")  # of what has been brought, too
    engine.load_checkpoint(folder, tag="between")
    engine.backward(engine(*share(100)))
    engine.step()
    found = [zero.utils.safe_get_full_fp32_param(param) for param in params]
    found += [zero.utils.safe_get_full_optimizer_state(param, key) for param in params for key in KEYS]
    engine.destroy()
    return found


def differing(stage: int, folder: str) -> list[int]:
    """Which of the sections come to other bits than that without offload."""
    sections = [{}, STREAMED, {"offload_optimizer": {**GPU, "ratio": 0.5}}]
    sections += [filed(folder, buffer_count=1), filed(folder)]
    if stage == 3:
        sections += [{**BOTH, **STREAMED}, {**BOTH, **filed(folder)}]
    with as_on_a_gpu():
        wanted, *found = (whatever_comes(stage, section, f"{folder}/{at}") for at, section in enumerate(sections))
    return [at for at, values in enumerate(found) if not all(map(torch.equal, wanted, values))]


@pytest.mark.parametrize(("stage", "world"), [(2, 1), *longer((1, 2), (3, 2))])
def test_what_happens_before_the_step_counts(pool, tmp_path: Path, stage: int, world: int) -> None:
    """Edits, a checkpoint, gradients that are dropped, an exception in the backward, steps that are skipped."""
    assert pool.run(world, differing, stage, str(tmp_path)) == [[]] * world


# --- what stays on the device ----------------------------------------------------------------------------------------


def auto(free: list[int], kind: str, folder: str) -> tuple[Record, list[str]]:
    """A training where rank r has `free[r]` bytes; `seen` is which units stay on the device. And what was logged."""
    place = {"device": kind, "ratio": "auto", "nvme_path": folder}
    with pytest.MonkeyPatch.context() as patch, listening(logging.INFO) as said:
        patch.setattr(zero.core.ratio, "available_nbytes", lambda ranks: free[dist.get_rank()])
        found = run("net", {"stage": 2, "section": {"offload_optimizer": place}}, keep=on_device)
    return found, [text for text in said if "ratio 'auto'" in text]


def on_device(engine: Any) -> list[bool]:
    return [unit.optimizer == "device" for unit in engine.describe().units]


@pytest.mark.parametrize(("free", "stays"), [([1 << 40, 1 << 40], True), ([1 << 40, 1000], False)])
def test_all_ranks_choose_by_the_one_with_the_least_memory(pool, tmp_path, free, stays):
    (first, (message,)), (second, silent) = pool.run(2, auto, free, "nvme", str(tmp_path))
    assert first.seen == second.seen == [[stays] * 4]
    assert f"ratio {'0' if stays else '1'}," in message and "(40%) for activations" in message
    assert not silent, "one rank logs"
    assert same(first, scenario(pool, "net", 2)[0])


def test_nothing_stays_where_host_and_device_share_one_memory(pool):
    (first, (message,)), (second, _) = pool.run(2, auto, [1 << 40, 1 << 40], "cpu", "")
    assert first.seen == second.seen == [[False] * 4]
    assert "state takes the same memory on either side. Chosen: ratio 1, 0 parameters" in message
