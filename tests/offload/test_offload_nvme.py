"""The promise: with state in files the numbers are those of a run without, bit by bit; the drive works meanwhile."""

from __future__ import annotations

import contextlib
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from models import batch, config, make_net
from ranks import Pool

import zero
import zero.core.offload
from zero.config import ConfigError


def files(folder: str, **more: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": folder, **more}


def engine_of(folder: str, **more: Any) -> Any:
    settings = config(2, 1, zero_optimization={"stage": 2, "offload_optimizer": files(folder, **more)})
    engine, *_ = zero.initialize(model=make_net(blocks=6), config=settings)
    return engine


def step(engine: Any, number: int) -> float:
    loss = engine(*batch(number, 2))
    engine.backward(loss)
    engine.step()
    return loss.item()


def looked_into(folder: str, device: str) -> dict[str, Any]:
    """What the accessors say, and losses after they have written, of a run with the state on `device`."""
    settings = config(
        3, 2, zero_optimization={"stage": 3, "offload_optimizer": {"device": device, "nvme_path": folder}}
    )
    net = make_net()
    engine, *_ = zero.initialize(model=net, config=settings)
    found: dict[str, Any] = {"losses": [step(engine, 0)]}
    for name, param in net.named_parameters():
        moment = zero.utils.safe_get_full_optimizer_state(param, "exp_avg")
        found[name] = [zero.utils.safe_get_full_fp32_param(param), moment]
        zero.utils.safe_set_full_fp32_param(param, found[name][0] * 0.5)
        zero.utils.safe_set_full_optimizer_state(param, moment + 1, "exp_avg")
    with zero.GatheredParameters(list(net.parameters()), modifier_rank=0), torch.no_grad():
        net.head.bias.add_(1)
    found["losses"] += [step(engine, number) for number in range(1, 4)]
    engine.destroy()
    return found


def test_accessors_read_and_write_what_is_in_files(pool: Pool, tmp_path: Path) -> None:
    plain, ours = (pool.run(2, looked_into, str(tmp_path), device)[0] for device in ("none", "nvme"))
    assert plain.keys() == ours.keys()
    assert plain.pop("losses") == ours.pop("losses")
    for name, values in plain.items():
        assert all(torch.equal(one, other) for one, other in zip(values, ours[name], strict=True)), name


def order_of_events(folder: str) -> list[tuple[str, str]]:
    engine = engine_of(folder, buffer_count=4)
    step(engine, 0)
    engine.optimizer.settle()
    seen: list[tuple[str, str]] = []
    pool = engine._sharded.offload.swap_files["optimizer"].pool

    def update_seen(what: str, unit: str) -> None:
        seen.append((what, unit))
        if what == "done":
            # A slow drive would leave no buffer to read ahead into, and the order would be its, not ours.
            with pool.lock:
                for buffer in list(pool.buffers):
                    pool.wait(buffer)

    engine.optimizer._updater.on_update = update_seen
    pool.on_request = lambda what, unit: seen.append((what, unit))
    step(engine, 1)
    engine.optimizer.settle()
    units = [unit.plan.name for unit in engine._sharded.trained]
    engine.destroy()
    return [("units", " ".join(units)), *seen]


def test_reads_begin_before_the_update_before_is_over(pool: Pool, tmp_path: Path) -> None:
    (_, names), *seen = pool.run(1, order_of_events, str(tmp_path))[0]
    units = names.split()
    assert len(units) > 6
    at = {event: place for place, event in reversed(list(enumerate(seen)))}
    ahead = 0
    for before, unit in pairwise(units):
        # What is not read here was read ahead at the end of the step before.
        reads = [place for place, event in enumerate(seen[: at["update", unit]]) if event == ("read", unit)]
        assert all(place < at["done", before] for place in reads)
        ahead += len(reads)
        # The next update begins while this one's result is on its way to the drive.
        assert at["update", before] < at["write", before] < at["done", before] < at["update", unit]
    assert ahead >= len(units) - 4
    # The next step's first units are read when there is nothing else to bring.
    assert [unit for what, unit in seen if what == "read"][-1] in units[:4]


def open_files(folder: str) -> int:
    """How many files of a folder this process has open, by a name or without one."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the list itself
            found += os.readlink(f"/proc/self/fd/{number}").startswith(folder)
    return found


def hidden_files(folder: str) -> tuple[list[str], list[int], tuple[int, ...], bool]:
    folder = str(Path(folder) / "new" / "folder")
    engine = engine_of(folder)
    opened, listed = [], []
    for number in range(8):
        step(engine, number)
        engine.optimizer.settle()
        opened.append(open_files(folder))
        listed += os.listdir(folder)
    unit = engine._sharded.trained[0]
    shapes = tuple(len(tensor) for _, _, tensor in engine.optimizer.shard_optimizer.tensors(unit))
    drive = engine._sharded.offload.swap_files["optimizer"]
    engine.destroy()
    return listed, opened, shapes, drive.file._descriptor is None


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
def test_files_have_no_name_and_their_number_stays(pool: Pool, tmp_path: Path) -> None:
    listed, opened, shapes, closed = pool.run(1, hidden_files, str(tmp_path))[0]
    assert listed == []
    assert len(set(opened)) == 1 and opened[0] > 0
    assert set(shapes) == {0}
    assert closed


def refused(folder: str, kind: str, params: dict[str, Any], group: dict[str, Any]) -> str:
    settings = config(1, 1, optimizer={"type": kind, "params": params})
    settings["zero_optimization"]["offload_optimizer"] = files(folder)
    net = make_net()
    groups = [{"params": list(net.parameters()), **group}]
    try:
        engine, *_ = zero.initialize(model=net, model_parameters=groups, config=settings)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    engine.optimizer.param_groups[0]["momentum"] = 0.9
    try:
        for number in range(2):
            step(engine, number)
            engine.optimizer.settle()
    except RuntimeError as error:
        return f"later: {error}"
    return "nothing"


def test_state_that_no_file_foresaw_is_refused(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for kind, more in (("RMSprop", {}), ("AdamW", {"torch_adam": True})):
        said = pool.run(1, refused, folder, kind, {"lr": 1e-3, **more}, {})[0]
        assert "zero_optimization.offload_optimizer.device: got 'nvme' with an optimizer class of torch" in said
    said = pool.run(1, refused, folder, "SGD", {"lr": 1e-3}, {})[0]
    assert said.startswith("later: ")
    assert "0 were reserved" in said and "SGD's momentum" in said
    said = pool.run(1, refused, folder, "SGD", {"lr": 1e-3}, {"momentum": 0.5})[0]
    assert said.startswith("RuntimeError: ")
    assert "0 were reserved" in said
    assert pool.run(1, refused, folder, "SGD", {"lr": 1e-3, "momentum": 0.1}, {})[0] == "nothing"


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
def test_a_path_is_required(name: str) -> None:
    settings = config(3, 1)
    settings["zero_optimization"][name] = {"device": "nvme", "nvme_path": None}
    with pytest.raises(ConfigError, match=f"zero_optimization.{name}.nvme_path: is missing; device 'nvme' needs"):
        zero.config.load(settings, 1)
