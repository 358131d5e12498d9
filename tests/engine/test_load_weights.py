"""The promise: weights come out of files of safetensors and of torch.save as the libraries read them.

They go into modules and exactly into engines; under `zero.Init` each rank reads its own ranges; what does not fit is
told at once.
"""

from __future__ import annotations

import functools
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import each_once, longer, needs
from models import WIDE, config, make_net, step
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import zero
from zero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

small = functools.partial(make_net, width=WIDE, blocks=1)


def write(path: Path, seed: int = 9, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A file with the weights of another net; what is in it."""
    state = {name: value.to(dtype) for name, value in small(seed).state_dict().items()}
    save_file(state, path)
    return load_file(path)


def shards(folder: Path, count: int = 3) -> dict[str, torch.Tensor]:
    """The same in several files with an index, as Hugging Face writes them."""
    state, names = small(9).state_dict(), {}
    for index in range(count):
        file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
        some = {name: value for number, (name, value) in enumerate(state.items()) if number % count == index}
        save_file(some, folder / file)
        names |= dict.fromkeys(some, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return state


def assert_has(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    found = module.state_dict()
    assert found.keys() == state.keys()
    wrong = [name for name in state if not torch.equal(found[name], state[name].to(found[name].dtype))]
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_plain_module(tmp_path: Path, dtype: torch.dtype) -> None:
    state = write(tmp_path / "some.safetensors", dtype=dtype)
    for path in (tmp_path / "some.safetensors", tmp_path, str(tmp_path)):
        for model in (small(), small().bfloat16()):
            version = model.head.weight._version
            assert zero.load_weights(model, path) == ([], [])
            assert_has(model, state)
            assert model.head.weight._version > version  # a graph of before must not be used


@pytest.mark.parametrize("kind", ["one", "shards", "list"])
def test_files_of_torch(tmp_path: Path, kind: str) -> None:
    """With several tensors of one memory, empty ones, and dtypes between each other."""
    state = small(9).state_dict()
    state |= {"buffer": state["head.weight"][3:7], "empty": torch.empty(0, 3), "count": torch.tensor(7)}
    names = list(state)
    parts = [names] if kind == "one" else [names[::2], names[1::2]]
    files = ["pytorch_model.bin", "pytorch_model-2.bin"][: len(parts)]
    for file, some in zip(files, parts, strict=True):
        torch.save({name: state[name] for name in some}, tmp_path / file)
    if kind == "shards":
        where = {name: file for file, some in zip(files, parts, strict=True) for name in some}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    torch.save({"lr": object}, tmp_path / "training_args.bin")  # as Trainers leave beside it
    model = small().bfloat16()
    for name in ("buffer", "empty", "count"):
        model.register_buffer(name, torch.zeros_like(state[name]))
    path = [tmp_path / file for file in files] if kind == "list" else tmp_path
    assert zero.load_weights(model, path) == ([], [])
    assert_has(model, state)


def test_buffers_and_names(tmp_path: Path) -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    source = made()
    source(torch.randn(5, 3))
    save_file({f"model.{name}": value for name, value in source.state_dict().items()}, tmp_path / "x.safetensors")
    model = made()
    zero.load_weights(model, tmp_path, rename=lambda name: name.removeprefix("model."))
    assert_has(model, source.state_dict())
    assert model[1].num_batches_tracked == 1
    with pytest.raises(ValueError, match=r"several tensors the name 'x'"):
        zero.load_weights(model, tmp_path, rename=lambda name: "x")
    fresh, model = made(), made()
    model.load_state_dict(fresh.state_dict())
    found = zero.load_weights(
        model, tmp_path, strict=False, rename=lambda name: None if "bias" in name else name.removeprefix("model.")
    )
    assert found == (["0.bias", "1.bias"], [])
    assert torch.equal(model[0].bias, fresh[0].bias)
    assert torch.equal(model[0].weight, source[0].weight)


class Tied(nn.Module):
    """Two names of one parameter."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_tied_weights(tmp_path: Path) -> None:
    one, two = Tied(True), Tied(False)
    save_model(one, str(tmp_path / "one.safetensors"))  # writes it once, with the other name in the metadata
    save_file(two.state_dict(), tmp_path / "two.safetensors")
    for model in (Tied(True), Tied(False)):
        zero.load_weights(model, tmp_path / "one.safetensors")
        assert_has(model, one.state_dict())
    with pytest.raises(ValueError, match=r"'embed\.weight' is tied here; .* have other values"):
        zero.load_weights(Tied(True), tmp_path / "two.safetensors")


def test_what_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    write(tmp_path / "some.safetensors")
    model = make_net(blocks=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="does not fit this module") as caught:
        zero.load_weights(model, tmp_path)
    assert "not in the checkpoint: 'blocks.1.norm.weight'" in str(caught.value)
    assert "'head.weight' has shape (17, 12), in the checkpoint (17, 48)" in str(caught.value)
    assert_has(model, before)
    with pytest.raises(ValueError, match=r"parameter '0\.weight' has no memory yet"):
        zero.load_weights(nn.Sequential(nn.Linear(2, 2, device="meta")), tmp_path)
    with pytest.raises(ValueError, match="got dict; wanted an engine"):
        zero.load_weights({}, tmp_path)


def damaged(tmp_path: Path, kind: str) -> str:
    if kind == "pickle":
        torch.save({"head": make_net().head}, tmp_path / "pytorch_model.bin")
        return "pytorch_model.bin is refused: it holds an object of torch.nn.modules.linear.Linear"
    if kind == "nested":
        torch.save({"state_dict": make_net().state_dict()}, tmp_path / "pytorch_model.bin")
        return "holds a OrderedDict as 'state_dict'; wanted tensors by name, as torch.save(model.state_dict(), file)"
    if kind == "transposed":
        torch.save({"head.weight": torch.ones(2, 3).t()}, tmp_path / "pytorch_model.bin")
        return "'head.weight' is not contiguous"
    if kind == "sparse":
        torch.save({"head.weight": torch.eye(3).to_sparse()}, tmp_path / "pytorch_model.bin")
        return "'head.weight' is sparse_coo; wanted a dense, contiguous tensor"
    if kind == "old":
        torch.save({}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
        return "is not a whole file of torch.save in its format since torch 1.6"
    if kind == "zipped":  # by another program, which puts storages elsewhere than torch
        torch.save(small().state_dict(), tmp_path / "of_torch")
        with zipfile.ZipFile(tmp_path / "of_torch") as old, zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
        return "is not as torch.save writes it"
    if kind == "name":
        (tmp_path / "model.onnx").touch()
        return "holds no safetensors file"
    if kind == "empty":
        return "holds no safetensors file, no .bin file and no checkpoint"
    if kind == "cut":
        write(tmp_path / "model.safetensors")
        data = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(data[:-100])
        return "is cut short"
    if kind == "rubbish":
        (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
        return "is no safetensors file"
    if kind == "two":
        write(tmp_path / "a.safetensors")
        write(tmp_path / "b.safetensors")
        return "holds several models: a.safetensors, b.safetensors"
    shards(tmp_path)
    if kind == "shard":
        (tmp_path / "model-00002-of-00003.safetensors").unlink()
        return "model-00002-of-00003.safetensors is missing"
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["head.bias"] = "model-00001-of-00003.safetensors" if kind == "moved" else "../x.safetensors"
    index.write_text(json.dumps(values))
    return "'head.bias' is not in model-00001" if kind == "moved" else "names '../x.safetensors', which is no file"


TORCH = ("pickle", "nested", "transposed", "sparse", "old", "zipped")


@pytest.mark.parametrize("kind", [*TORCH, "empty", "name", "cut", "rubbish", "two", "shard", "moved", "outside"])
def test_files_that_are_not_whole(tmp_path: Path, kind: str) -> None:
    text = damaged(tmp_path, kind)
    with pytest.raises(ValueError, match="pytorch_model.bin" if kind in TORCH else "safetensors") as caught:
        zero.load_weights(small(), tmp_path)
    assert text in str(caught.value)


def built_and_loaded(
    folder: Path, dtype: torch.dtype | None, inside: bool
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Under `Init`; the whole values, and the bytes that this rank has read of the file."""
    with zero.Init(dtype=dtype):
        model = small()
        if inside:
            zero.load_weights(model, folder)
    read, before = [], os.preadv

    def counted(*args: Any) -> int:
        read.append(before(*args))
        return read[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        if not inside:
            zero.load_weights(model, folder)
    with zero.GatheredParameters(model.parameters()):
        return {name: param.detach().clone() for name, param in model.named_parameters()}, read


@pytest.mark.parametrize(
    ("world", "dtype", "kind"), each_once([1, 2, 3], [None, torch.bfloat16], ["safetensors", "torch"])
)
def test_a_module_that_is_built_in_pieces(
    pool: Any, tmp_path: Path, world: int, dtype: torch.dtype | None, kind: str
) -> None:
    if kind == "torch":
        state = small(9).state_dict()
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        state = shards(tmp_path)
    for inside in (False, True):
        found = pool.run(world, built_and_loaded, tmp_path, dtype, inside)
        for params, _ in found:
            assert all(torch.equal(params[name], state[name].to(params[name].dtype)) for name in state)
        if not inside:
            nbytes = sum(value.nbytes for value in state.values())
            assert sum(sum(read) for _, read in found) == nbytes  # each byte by one rank


def into_engines(folder: Path, kinds: list[tuple[int, str]]) -> list[str]:
    """Exact weights in engines of all stages, from files and from a checkpoint; the optimizer keeps its state."""
    wrong, state = [], load_file(folder / "some.safetensors")
    for stage, kind in kinds:
        more = {} if kind == "fp32" else {kind: {"enabled": True}}
        engine, *_ = zero.initialize(model=small(), config=config(stage, torch.distributed.get_world_size(), **more))
        for number in range(2):
            step(engine, number)
        before = {name: safe_get_full_optimizer_state(p, "exp_avg") for name, p in engine.module.named_parameters()}
        zero.load_weights(engine, folder / "some.safetensors")
        for again in (False, True):
            if again:  # by way of a checkpoint, into an engine with other weights
                engine.save_checkpoint(folder / f"run{stage}{kind}")
                zero.load_weights(engine, folder / "zeros.safetensors")
                zero.load_weights(engine, folder / f"run{stage}{kind}")
            for name, param in engine.module.named_parameters():
                if not torch.equal(safe_get_full_fp32_param(param), state[name]):
                    wrong.append(f"{name} at stage {stage} in {kind}")
                if not torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), before[name]):
                    wrong.append(f"state of {name} at stage {stage} in {kind}")
        try:
            zero.load_weights(engine.module, folder / "some.safetensors")
            wrong.append("the module of an engine was taken")
        except ValueError as error:
            wrong += [] if "give the engine" in str(error) else [str(error)]
        engine.destroy()
        plain = small()
        zero.load_weights(plain, folder / f"run{stage}{kind}" / "global_step2")
        wrong += [f"{name} plain" for name, value in plain.state_dict().items() if not torch.equal(value, state[name])]
    return wrong


@pytest.mark.parametrize("world", [2, *longer(1)])
def test_engines(pool: Any, tmp_path: Path, world: int) -> None:
    state = write(tmp_path / "some.safetensors")
    save_file({name: torch.zeros_like(value) for name, value in state.items()}, tmp_path / "zeros.safetensors")
    kinds = [(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "fp32"), (3, "bf16")]
    for wrong in pool.run(world, into_engines, tmp_path, kinds):
        assert not wrong


@needs("transformers")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_that_transformers_has_saved(tmp_path: Path, kind: str) -> None:
    from test_transformers import build

    source = build(kind)
    source.save_pretrained(tmp_path, max_shard_size="30KB", safe_serialization=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = build(kind)
    for param in model.parameters():
        nn.init.zeros_(param)
    assert zero.load_weights(model, tmp_path) == ([], [])
    assert_has(model, source.state_dict())
    engine, *_ = zero.initialize(model=model, config=config(3, 1))
    zero.load_weights(engine, tmp_path)
    found = engine.module_state_dict()
    assert all(torch.equal(found[name], value) for name, value in source.state_dict().items())
    engine.destroy()


def test_several_files_that_do_not_go_together(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors")
    write(tmp_path / "b.safetensors")
    (tmp_path / "c").mkdir()
    write(tmp_path / "c" / "c.safetensors")
    model = small()
    for names, text in (
        (["a", "b"], "several of them have 'blocks.0.down.bias'"),
        (["a", "c/c"], "2 files lie in 2 folders"),
        ([], "0 files lie in 0 folders"),
    ):
        with pytest.raises(ValueError, match=text):
            zero.load_weights(model, [tmp_path / f"{name}.safetensors" for name in names])
    with pytest.raises(ValueError, match="neither a safetensors file nor one of torch"):
        zero.load_weights(model, [tmp_path / "c"])


def test_shards_of_hugging_face_and_memory_in_another_order(tmp_path: Path) -> None:
    state = shards(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        model = small()
        model.head.weight.data = model.head.weight.data.t().contiguous().t()
        zero.load_weights(model, path)
        assert_has(model, state)
