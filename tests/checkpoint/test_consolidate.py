"""The promise: `zero consolidate` gives the model of a checkpoint, exactly, in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_files import checkpoint, flip
from checkpoint_small import Small, engine_of
from safetensors import safe_open
from safetensors.torch import load_file
from test_weights_out import start, step

from zero.__main__ import main
from zero.checkpoint.index import Damaged
from zero.checkpoint.model_files import consolidate
from zero.checkpoint.reader import SLICE
from zero.checkpoint.safe_file import DTYPES, TensorChunk
from zero.checkpoint.staging import LazyTensor
from zero.kernels.remainder import join, split
from zero.utils import safe_get_full_fp32_param


def saved(stage: int, dtype: str, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What the model computes with, and the exact values of its parameters, on rank 0."""
    engine = start(stage, dtype)
    for index in range(2):
        step(engine, index)
    engine.save_checkpoint(folder)
    exact = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return (weights, exact) if dist.get_rank() == 0 else ({}, {})


@pytest.mark.parametrize(("stage", "dtype"), [(0, "bf16"), (3, "bf16"), (2, "fp32")])
def test_the_model_of_a_run_is_whole_and_there_exactly(pool, stage, dtype, tmp_path, capsys):
    weights, exact = pool.run(2, saved, stage, dtype, str(tmp_path))[0]
    assert main(["verify", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "whole; tag global_step2, step 2, world size 2, " in said and said.endswith(" GB/s\n")
    assert main(["consolidate", str(tmp_path), str(tmp_path / "fp32.safetensors")]) == 0
    found = load_file(tmp_path / "fp32.safetensors")
    assert set(found) == set(weights) - {"head.weight"}
    with safe_open(tmp_path / "fp32.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    for name, value in found.items():
        wanted = exact.get(name)
        assert torch.equal(value, weights[name].float() if wanted is None else wanted), name
    for other in ("bf16", "fp16"):
        path = tmp_path / f"{other}.safetensors"
        assert main(["consolidate", str(tmp_path / "global_step2"), str(path), "--dtype", other]) == 0
        for name, value in load_file(path).items():
            if name == "scale" or dtype == other:
                assert torch.equal(value, weights[name]), name
            else:
                wanted = exact.get(name)
                rounded = (weights[name].float() if wanted is None else wanted).to(DTYPES[other])
                assert torch.equal(value, rounded), name


def chunks(world: int) -> tuple[list[list[TensorChunk]], dict[str, torch.Tensor]]:
    """Parameters and buffers of several dtypes, cut at odd places, and the exact values."""
    generator = torch.Generator().manual_seed(world)
    exact = {"a": torch.randn(37, 11, generator=generator), "b": torch.randn(5, generator=generator)}
    exact["wide"] = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    exact["steps"] = torch.arange(7)
    exact["empty"] = torch.empty(0, 4)
    weight, remainder = split(exact["a"])
    parts = [("weight", "a", weight), ("master", "a", remainder), ("weight", "b", exact["b"])]
    parts += [
        ("weight", "wide", exact["wide"]),
        ("buffer", "steps", exact["steps"]),
        ("weight", "empty", exact["empty"]),
    ]
    found: list[list[TensorChunk]] = [[] for _ in range(world)]
    for kind, name, value in parts:
        flat, shape = value.reshape(-1), tuple(value.shape)
        ends = [rank * flat.numel() // world for rank in range(world + 1)] if kind != "buffer" else [0, flat.numel()]
        for rank, (begin, end) in enumerate(pairwise(ends)):
            if end > begin or name == "empty":
                found[rank].append(TensorChunk(kind, name, begin, shape, flat[begin:end].clone()))
    return found, exact


def test_the_layout_of_hugging_face(tmp_path):
    given, exact = chunks(3)
    folder = checkpoint(tmp_path / "run", given, {"z": "a"})
    out = tmp_path / "out"
    single = consolidate(folder, out)
    assert [path.name for path in single] == ["model.safetensors"]
    assert not (out / "model.safetensors.index.json").exists()
    whole = load_file(single[0])
    assert torch.equal(whole["a"], exact["a"])
    assert whole["wide"].dtype == torch.float32
    assert torch.equal(whole["steps"], exact["steps"])
    assert whole["empty"].shape == (0, 4)
    assert main(["consolidate", str(tmp_path / "run"), str(out), "--max-shard-size", "1KB"]) == 0
    names = sorted(path.name for path in out.iterdir())
    assert names == [
        *(f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)),
        "model.safetensors.index.json",
    ], "the single file of before is gone, as readers would prefer it"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    with safe_open(out / index["weight_map"]["a"], "pt") as file:
        assert file.metadata()["z"] == "a"
    assert len(consolidate(folder, out / "model.safetensors", hf=True)) == 1
    assert (out / "model.safetensors" / "model.safetensors").exists()


def test_transformers_reads_the_layout(tmp_path):
    transformers = pytest.importorskip("transformers")
    settings = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=23, n_positions=8)
    torch.manual_seed(5)
    model = transformers.GPT2LMHeadModel(settings)
    named = model.named_parameters()
    own = [TensorChunk("weight", name, 0, tuple(value.shape), value.detach().view(-1)) for name, value in named]
    checkpoint(tmp_path / "run", [own], {"lm_head.weight": "transformer.wte.weight"})
    assert main(["consolidate", str(tmp_path / "run"), str(tmp_path / "hf"), "--max-shard-size", "4KB"]) == 0
    settings.save_pretrained(tmp_path / "hf")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_what_is_not_in_the_model_is_said(tmp_path, capsys):
    engine = engine_of(Small(frozen="third"), bf16={"enabled": True}, zero={"checkpoint": {"keep_optimizer": 1}})
    engine.save_checkpoint(tmp_path, tag="a", exclude_frozen_parameters=True)
    assert main(["consolidate", str(tmp_path), str(tmp_path / "a.safetensors")]) == 0
    said = capsys.readouterr().out
    assert "frozen parameters were left out of the checkpoint: third.bias, third.weight" in said
    assert "masters were deleted" not in said
    engine.save_checkpoint(tmp_path, tag="b")
    assert main(["consolidate", str(tmp_path), str(tmp_path / "a.safetensors"), "--tag", "a"]) == 0
    assert "masters were deleted" in capsys.readouterr().out
    assert main(["consolidate", str(tmp_path), str(tmp_path / "b.safetensors")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_damage_gives_no_model(tmp_path, capsys):
    given, _ = chunks(2)
    folder = checkpoint(tmp_path / "run", given)
    path = next(folder.glob("masters-00001-of-00002*"))
    flip(path, -3)
    out = tmp_path / "model.safetensors"
    with pytest.raises(Damaged, match="master of 'a'"):
        consolidate(folder, out)
    assert main(["consolidate", str(folder), str(tmp_path / "out"), "--max-shard-size", "1KB"]) == 1
    assert path.name in capsys.readouterr().err
    assert sorted(found.name for found in tmp_path.iterdir()) == ["out", "run"]
    assert list((tmp_path / "out").iterdir()) == []
    path.unlink()
    assert main(["consolidate", str(folder), str(out)]) == 1
    assert f"{path.name} is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{run}", "o", "--tag", "x"], "has no checkpoint 'x'; it has 'global_step3'"),
        (["{run}", "o.safetensors", "--max-shard-size", "1GB"], "--max-shard-size is for a folder"),
        (["{run}", "o", "--max-shard-size", "much"], "--max-shard-size: got 'much', wanted a number of bytes"),
        (["{run}/..", "o"], "name a checkpoint with --tag"),
    ],
)
def test_what_cannot_be_meant_is_said(arguments, text, tmp_path, capsys):
    checkpoint(tmp_path / "run", chunks(1)[0])
    assert main(["consolidate", *(given.format(run=tmp_path / "run") for given in arguments)]) == 2
    assert text in capsys.readouterr().err


def large(root: Path, numel: int) -> Path:
    """One bf16 parameter `w` of so many elements, with remainders, of numbers that repeat; made in little memory."""

    def numbers(start: int, count: int) -> torch.Tensor:
        return (torch.arange(start, start + count, dtype=torch.int32) % 997).to(torch.int16)

    def floats(start: int, count: int) -> torch.Tensor:
        return numbers(start, count).to(torch.bfloat16)

    shape = (numel // 1000, 1000)
    weight = TensorChunk("weight", "w", 0, shape, LazyTensor(torch.bfloat16, numel, floats))
    return checkpoint(root, [[weight, TensorChunk("master", "w", 0, shape, LazyTensor(torch.int16, numel, numbers))]])


MEASURE = """
import sys, torch, zero
from sampled_memory import Sampled
torch.set_num_threads(1)
from zero.__main__ import main
small, large, out = sys.argv[1:]
main(["consolidate", small, out + ".small.safetensors"])  # imports what the command imports
with Sampled() as memory:
    code = main(["consolidate", large, out])
print(memory.growth)
sys.exit(code)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_is_far_below_the_largest_parameter(tmp_path):
    """160 MB of weights in one parameter."""
    numel = 40_000_000
    checkpoint(tmp_path / "small", chunks(1)[0])
    out = tmp_path / "model.safetensors"
    command: list[Any] = [sys.executable, "-c", MEASURE, tmp_path / "small", large(tmp_path / "run", numel), out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    # A slice in fp32 and the two halves that it is joined from: 8 bytes per element; half as much for what is read.
    assert int(done.stdout.split()[-1]) < 12 * SLICE < 4 * numel / 3
    with safe_open(out, "pt") as file:
        rows = file.get_slice("w")[-1000:]
    last = torch.arange(numel - rows.numel(), numel, dtype=torch.int32) % 997
    assert torch.equal(rows.view(-1), join(last.to(torch.int16).to(torch.bfloat16), last.to(torch.int16)))
