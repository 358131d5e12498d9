"""The promise: what `save_checkpoint` writes is whole, written once, and readable without us.

A save that cannot be raises the same on all ranks, before anything is written, and the engine trains on.
"""

from __future__ import annotations

import json
import os
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_files import engine_of, entries, index_of, same, step, tensors
from models import make_net
from ranks import Pool, listening
from safetensors.torch import load_file
from torch import nn

import zero
from zero.checkpoint import folder as folders

UNITS = ("", "blocks.0", "blocks.1", "blocks.2")  # of a Net; each is padded to a multiple of 64 elements per rank


def save(stage: int, folder: str, more: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Two steps and a save; what the engine holds, as `tensors` names it, as far as it can be asked for."""
    engine = engine_of(stage, dist.get_world_size(), **more)
    for number in range(2):
        step(engine, number)
    assert engine.save_checkpoint(folder) is True
    held = {}
    for name, param in engine.module.named_parameters():
        held[f"weight/{name}"] = zero.utils.safe_get_full_fp32_param(param)
        for key in ("exp_avg", "exp_avg_sq"):
            held[f"moments.{key}/{name}"] = zero.utils.safe_get_full_optimizer_state(param, key)
    engine.destroy()
    return held


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 0), (3, 1), (2, 2), (4, 3)])
def test_each_element_is_written_once_and_every_file_is_plain_safetensors(
    pool: Pool, tmp_path: Path, world: int, stage: int
) -> None:
    held = pool.run(world, save, stage, str(tmp_path), {})[0]
    place = tmp_path / "global_step2"
    assert (tmp_path / "latest").read_text().strip() == "global_step2"
    assert same(tensors(place), held)
    index = index_of(place)
    assert sorted([*index["files"], "index.json"]) == sorted(os.listdir(place))
    assert len(index["files"]) == 3 * world  # weights, moments, state; what is fp32 has no masters
    assert all((place / name).stat().st_size == size for name, size in index["files"].items())
    assert all(parameter["numbers"] == {"step": 2} for parameter in index["parameters"].values())
    weights = [
        sum(part[1] for stored in entries(index).values() for part in stored["parts"] if part[2] == name)
        for name in index["files"]
        if name.startswith("weights")
    ]
    assert max(weights) <= sum(weights) / world + 64 * len(UNITS), "a rank writes more than its share"


def test_a_world_of_one_writes_weights_that_load_into_the_plain_module(tmp_path: Path) -> None:
    engine = engine_of(3, 1)
    step(engine, 0)
    engine.save_checkpoint(tmp_path, tag="first", client_state={"epoch": 3, "best": torch.arange(3)})
    plain = make_net(seed=1)
    (file,) = (tmp_path / "first").glob("weights-*")
    plain.load_state_dict(load_file(file))
    engine.destroy()
    pairs = zip(plain.parameters(), engine.module.parameters(), strict=True)
    assert all(torch.equal(a, b.cpu()) for a, b in pairs)
    index = index_of(tmp_path / "first")
    assert index["client"]["epoch"] == 3
    assert torch.equal(tensors(tmp_path / "first")["tensor/client_state/0"], torch.arange(3))


@pytest.mark.parametrize(("bf16", "moments"), [(False, "8bit"), (True, "bf16"), (True, None)])
def test_state_that_rests_in_files_is_saved_as_that_in_memory(
    pool: Pool, tmp_path: Path, bf16: bool, moments: str | None
) -> None:
    # Of a class of torch the state cannot rest in files, but beside parameters that do.
    kind = {"torch_adam": True} if moments is None else {"zero": {"moments": moments}}
    cpu, drive = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path / "drive")}
    (tmp_path / "drive").mkdir()
    both = {"offload_param": drive | {"max_in_cpu": 0}, "offload_optimizer": cpu if moments is None else drive}
    for name, places in (("memory", {"offload_optimizer": cpu}), ("files", both), ("beside", both)):
        given = {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, **kind}},
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": 3, **places},
            "zero": {"checkpoint": {"async": name == "beside"}},
        }
        pool.run(2, save, 3, str(tmp_path / name), given)
    wanted = tensors(tmp_path / "memory" / "global_step2")
    assert any(what.startswith("master/") for what in wanted) == bf16
    for name in ("files", "beside"):
        assert same(tensors(tmp_path / name / "global_step2"), wanted)


class Stateful(nn.Module):
    """Statistics of each rank's own, a state beside the tensors, a frozen part, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 6)
        self.again = self.head
        self.register_buffer("table", torch.arange(4.0))
        self.seen: Any = {"words": [1, 2], "sum": torch.ones(2)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.head(self.frozen(self.norm(x)))).square().mean()

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def save_kept(folder: str, exclude: bool) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(3)
    engine = engine_of(3, 2, Stateful())
    loss = engine(torch.randn(2, 6, generator=torch.Generator().manual_seed(rank)))
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(folder, tag="all", exclude_frozen_parameters=exclude)
    buffers = {name: value.clone() for name, value in engine.module.named_buffers()}
    engine.module.seen = {"model": nn.Linear(1, 1)}
    with pytest.raises(ValueError, match=r"extra_state.*model.*Linear"):
        engine.save_checkpoint(folder, tag="refused")
    engine.destroy()
    return buffers


@pytest.mark.parametrize("exclude", [False, True])
def test_buffers_of_each_rank_extra_state_and_frozen_parameters(pool: Pool, tmp_path: Path, exclude: bool) -> None:
    buffers = pool.run(2, save_kept, str(tmp_path), exclude)
    found, index = tensors(tmp_path / "all"), index_of(tmp_path / "all")
    for name, value in buffers[0].items():
        assert torch.equal(found[f"buffer/{name}"], value)
    own = index["ranks"][1]["buffers"]
    assert set(own) == {"norm.running_mean", "norm.running_var"}, "only what differs is written again"
    for name, where in own.items():
        assert torch.equal(found[f"tensor/{where}"], buffers[1][name])
    extra = index["shared"]["extra_state"]["_extra_state"]
    assert extra["words"] == [1, 2]
    assert index["tied"] == {"again.weight": "head.weight", "again.bias": "head.bias"}
    frozen = ["frozen.bias", "frozen.weight"]
    assert index["excluded"] == (frozen if exclude else [])
    assert [name for name in index["parameters"] if name.startswith("frozen")] == (
        [] if exclude else sorted(frozen)[::-1]
    )
    assert os.listdir(tmp_path) == ["all"] or sorted(os.listdir(tmp_path)) == ["all", "latest"]


def refuse(folder: str) -> list[str]:
    """What each wrong save says on this rank; a good one at the end."""
    rank, said = dist.get_rank(), []
    engine = engine_of(2, 2, accumulation=3, checkpoint={"tag_validation": "Fail"})

    def refused(kind: type[Exception], *args: Any, **kwargs: Any) -> None:
        with pytest.raises(kind) as error:
            engine.save_checkpoint(*args, **kwargs)
        said.append(str(error.value))

    refused(ValueError, "")
    refused(ValueError, None if rank else folder)
    for tag in ("", ".", "..", "a/b", ".hidden", "latest", " x", "a\nb"):
        refused(ValueError, folder, tag=tag)
    refused(ValueError, folder, tag=f"step{rank}")
    refused(ValueError, f"{folder}/{rank}")
    refused(ValueError, folder, save_latest=bool(rank))
    refused(ValueError, folder, client_state={"model": [object()] if rank else 1})
    Path(f"{folder}.file").write_text("")
    refused(OSError, f"{folder}.file")
    real, room = os.statvfs, namedtuple("room", "f_blocks f_bavail f_frsize")
    os.statvfs = lambda path: room(100, 3, 512)
    refused(OSError, folder)
    os.statvfs = real
    step(engine, 0)
    step(engine, 1)
    refused(RuntimeError, folder)
    step(engine, 2)
    engine.offload_states()
    refused(RuntimeError, folder)
    engine.reload_states()
    assert os.listdir(folder) == []
    assert engine.save_checkpoint(folder, tag=7)
    with pytest.raises(RuntimeError, match=r"engine\.save_checkpoint\(\)"):
        engine.optimizer.state_dict()
    engine.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        engine.save_checkpoint(folder)
    return said


def test_wrong_saves_raise_the_same_on_all_ranks_and_write_nothing(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    first, second = pool.run(2, refuse, str(folder))
    assert first == second
    wanted = [
        "non-empty string",
        "rank 1: .*non-empty",
        *["plain name of a folder"] * 8,
        "rank 0: step0; rank 1: step1",
    ]
    wanted += ["save_dir is not the same", "options is not the same", r"rank 1: client_state\['model'\]\[0\].*object"]
    wanted += ["File exists|Not a directory", r"\d+ bytes are needed and 1536 are free", "2 of 3 micro-batches"]
    wanted += ["offloaded"]
    assert len(first) == len(wanted)
    for text, pattern in zip(first, wanted, strict=True):
        assert re.search(pattern, text), (pattern, text)
    assert sorted(os.listdir(folder)) == ["7", "latest"]
    json.loads((folder / "7" / "index.json").read_text())


class Own(nn.Linear):
    """A model that writes its files itself."""

    def save_pretrained(self, folder: Path, state_dict: dict[str, torch.Tensor], max_shard_size: int) -> None:
        torch.save(list(state_dict), folder / "own.bin")


def save_by_the_time(folder: str, mode: str) -> list[str]:
    """Names with what each rank read from its clock, twice; what was warned of or raised."""
    engine = engine_of(3, 2, Own(4, 4), checkpoint={"tag_validation": mode} if mode else {})
    with listening() as said:
        for hour in range(2):
            place = f"{folder}/{hour}.{dist.get_rank()}"
            for save, *args in (
                (engine.save_checkpoint, f"{folder}/all", f"tag{hour}.{dist.get_rank()}"),
                (engine.save_checkpoint, place, "tag"),
                (engine.save_16bit_model, place, f"{dist.get_rank()}.bin"),
                (engine.save_pretrained, place),
            ):
                try:
                    save(*args)
                except ValueError as error:
                    said.append(str(error))
        engine.save_checkpoint(f"{folder}/all", tag="same")
    engine.destroy()
    return said


@pytest.mark.parametrize("mode", ["", "Ignore", "Fail"])
def test_where_names_differ_between_ranks_that_of_rank_0_is_taken(pool: Pool, tmp_path: Path, mode: str) -> None:
    first, second = pool.run(2, save_by_the_time, str(tmp_path), mode)
    if mode == "Fail":
        assert first == second and len(first) == 8
        assert "save_checkpoint(): tag is not the same on all ranks: rank 0: tag0.0; rank 1: tag0.1" in first[0]
        assert all("is not the same on all ranks" in text and "wants it" in text for text in first)
        assert [path.name for path in tmp_path.iterdir()] == ["all"] and folders.latest(tmp_path / "all") == "same"
        return
    assert folders.latest(tmp_path / "all") == "same" and folders.tags(tmp_path / "all") == ["tag0.0", "tag1.0", "same"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.0", "1.0", "all"]
    for hour in "01":
        assert sorted(os.listdir(tmp_path / f"{hour}.0")) == ["0.bin", "latest", "own.bin", "tag"]
        assert len(index_of(tmp_path / f"{hour}.0" / "tag")["ranks"]) == 2
    assert second == []
    wanted = ["save_checkpoint(): tag", "save_checkpoint(): save_dir", "save_16bit_model()", "save_pretrained()"]
    assert [text[: len(start)] for text, start in zip(first, wanted, strict=mode == "")] == ([] if mode else wanted)
    assert all("; that of rank 0 is taken, now and later" in text for text in first)
