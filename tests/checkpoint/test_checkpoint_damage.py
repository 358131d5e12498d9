"""The promise: a checkpoint that is not whole is refused with what is wrong, and the former one still loads.

What is seen before reading changes nothing. What is seen only on reading, on one rank, is raised on all, and the engine
refuses everything until it has loaded a whole checkpoint.
"""

from __future__ import annotations

import json
import operator
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import FORMATS, Case, engine_of, settings, states, step
from checkpoint_files import flip, same
from marks import longer
from models import make_net
from torch import nn

import zero

TAG = "b"


def edit(place: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the JSON of the index, as one who knows of its checksum does."""
    values = json.loads((place / "index.json").read_text())
    del values["crc32"]
    change(values)
    (place / "index.json").write_text(json.dumps(values))


def file_of(place: Path, kind: str) -> Path:
    return next(place.glob(f"{kind}-00000-*"))


def cut(path: Path, to: float = 0.5) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * to)])


def other_step(place: Path) -> None:
    path = place / "index.json"
    text = path.read_text()
    assert '"global_steps":2' in text
    path.write_text(text.replace('"global_steps":2', '"global_steps":3'))


def other_model(values: dict[str, Any]) -> None:
    values["parameters"] = {f"model.{name}": each for name, each in values["parameters"].items()}


def other_part(field: int, value: Any) -> Callable[[Path], None]:
    """A field of the first part of a weight is another."""
    return lambda place: edit(
        place, lambda values: operator.setitem(values["parameters"]["head.weight"]["weight"]["parts"][0], field, value)
    )


def other_header(place: Path, readable: bool) -> None:
    """Each tensor is where the index says, and has its checksum."""
    path = file_of(place, "masters")
    data = path.read_bytes()
    header = data.replace(b'"I16"', b'"F16"') if readable else data[:8] + b"\0" * (len(data) - 8)
    path.write_bytes(header[:4096] + data[4096:])


def write(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda place: (place / name).write_bytes(data)


# What is done to the checkpoint, and what the error says.
BEFORE_READING: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file is cut": (
        lambda place: cut(file_of(place, "moments")),
        r"moments-00000-of-00001\.\w+\.safetensors has \d+ bytes, not \d+",
    ),
    "a file is gone": (
        lambda place: file_of(place, "weights").unlink(),
        r"weights-00000-of-00001\.\w+\.safetensors is missing",
    ),
    "the index is cut": (lambda place: cut(place / "index.json"), "index.json is not JSON"),
    "the index is empty": (write("index.json", b""), "index.json is not JSON"),
    "the index is gone": (
        lambda place: (place / "index.json").unlink(),
        "holds no whole checkpoint: index.json, which is written last",
    ),
    "a number of the index is another": (other_step, r"index.json is not what was saved \(its checksum is another\)"),
    "the index is other JSON": (write("index.json", b"[]"), "is not the index of a checkpoint of zero"),
    "the index is of another model": (
        lambda place: edit(place, other_model),
        "not in the checkpoint: 'embed.weight'.*not in the model: 'model.embed.weight'",
    ),
    "the format is of the future": (
        lambda place: edit(place, lambda values: values.update(version=7)),
        "format version 7; this zero reads 1",
    ),
    "a field is gone": (
        lambda place: edit(place, lambda values: values.pop("tied")),
        "index.json is damaged: it has no tied",
    ),
    "elements are missing": (other_part(1, 5), r"weight of 'head.weight': elements \d+ to \d+ of \d+ are missing"),
    "a file lies elsewhere": (
        other_part(2, "../../secret"),
        "index.json is damaged: parameters.*parts.0.2.*got '../../secret'",
    ),
    "a file has no header": (lambda place: other_header(place, False), "is no safetensors file: JSONDecodeError"),
    "a file has the header of another": (
        lambda place: other_header(place, True),
        r"header of masters\S* has fp16 \[\d+.* from byte 4096 on as 'master/",
    ),
    "the folder is gone": (shutil.rmtree, "there is no folder"),
    "latest is empty": (write("../latest", b""), "it names ''"),
    "latest is rubbish": (write("../latest", b"\xff\x00\x01x"), "which is no name of a checkpoint"),
    "latest leads elsewhere": (write("../latest", b"../a"), r"it names '\.\./a', which is no name"),
    "latest names nothing": (write("../latest", b"c\n"), "there is no folder"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one run, "a" and "b"."""
    folder = tmp_path_factory.mktemp("whole")
    engine = made()
    for tag in "ab":
        train(engine)
        engine.save_checkpoint(folder, tag=tag)
    return folder


def made() -> Any:
    json = settings(Case(1, 3, format=FORMATS[1]), Path())
    return zero.initialize(model=make_net(width=48, blocks=1), config=json)[0]


def train(engine: Any) -> None:
    tokens = torch.arange(10).view(2, 5)
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(tokens, tokens))
        engine.step()


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def check_goes_on(engine: Any, folder: Path, whole: Path) -> None:
    """The checkpoint before loads, and training goes on as from a whole one."""
    assert engine.load_checkpoint(folder, tag="a")[0] == str(folder / "a")
    train(engine)
    other = made()
    other.load_checkpoint(whole, tag="a")
    train(other)
    assert same(weights(engine), weights(other))


@pytest.mark.parametrize("what", BEFORE_READING)
def test_what_is_seen_before_reading(tmp_path: Path, whole: Path, what: str) -> None:
    damage, text = BEFORE_READING[what]
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    damage(folder / TAG)
    engine = made()
    train(engine)
    before = weights(engine)
    with pytest.raises(ValueError, match=re.compile(text, re.DOTALL)) as caught:
        engine.load_checkpoint(folder)
    # Of another model the checkpoint is whole, and what does not fit is the engine; headers are read after the index.
    if "model" not in what and "header" not in what:
        assert "Whole checkpoints there: 'a'" in str(caught.value)
    assert same(weights(engine), before)
    train(engine)
    check_goes_on(engine, folder, whole)


@pytest.mark.parametrize("kind", ["weights", "masters", "moments"])
def test_a_flipped_bit_tears_the_engine_until_it_loads_again(tmp_path: Path, whole: Path, kind: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    damaged = file_of(folder / TAG, kind)
    flip(damaged, damaged.stat().st_size * 3 // 4)
    engine = made()
    train(engine)
    what = {"weights": "weight", "masters": "master", "moments": "exp_avg(_sq)?"}[kind]
    text = rf"{what} of '[\w.]+': bytes \d+ to \d+ of {kind}-00000-of-00001\.\w+\.safetensors are not what was saved"
    with pytest.raises(ValueError, match=text):
        engine.load_checkpoint(folder)
    for use in (
        lambda: engine(torch.zeros(1, 5).long(), torch.zeros(1, 5).long()),
        lambda: engine.save_checkpoint(tmp_path / "other"),
        engine.step,
        engine.module_state_dict,
    ):
        with pytest.raises(RuntimeError, match="half loaded"):
            use()
    with pytest.raises(ValueError, match="Whole checkpoints there: 'a', 'b'"):
        engine.load_checkpoint(folder, tag="c")  # still half loaded
    with pytest.raises(RuntimeError, match="half loaded"):
        engine.step()
    check_goes_on(engine, folder, whole)
    module = engine.module
    with pytest.raises(ValueError, match="not what was saved"):
        engine.load_checkpoint(folder)
    engine.destroy()  # torn
    assert all(type(param) is nn.Parameter for param in module.parameters())


def one_rank_reads_damage(case: Case, folder: Path) -> tuple[str, list[str]]:
    """Rank 1's own file is damaged where only rank 1 reads it, after the index was looked at."""
    rank, lines = dist.get_rank(), []
    with engine_of(case, folder, make_net(seed=8, width=48, blocks=1)) as engine:
        step(engine, 0)
        engine.save_checkpoint(folder, tag="a")
        kept = states(engine)
        step(engine, 1)
        engine.save_checkpoint(folder, tag="b")
        if rank == 0:
            path = next((folder / "b").glob("masters-00001-*"))
            flip(path, path.stat().st_size // 2)
        dist.barrier()
        with pytest.raises(ValueError, match="are not what was saved") as caught:
            engine.load_checkpoint(folder)
        with pytest.raises(RuntimeError, match="half loaded"):
            engine.step()
        engine.load_checkpoint(folder, tag="a")
        found = states(engine)
        lines += [name for name in kept if not torch.equal(found[name]["exact"], kept[name]["exact"])]
        lines += [name for name in kept if not torch.equal(found[name]["weight"], kept[name]["weight"])]
        step(engine, 1)
    return str(caught.value), lines


@pytest.mark.parametrize(("stage", "place"), [(1, ""), (3, "files gpu"), *longer((2, "cpu"), (3, ""))])
def test_all_ranks_raise_what_one_has_read(pool: Any, tmp_path: Path, stage: int, place: str) -> None:
    case = Case(2, stage, place, FORMATS[1])
    found = pool.run(2, one_rank_reads_damage, case, tmp_path)
    texts = [text for text, _ in found]
    assert not any(lines for _, lines in found)
    assert "masters-00001-of-00002" in texts[1]
    assert not texts[1].startswith("load_checkpoint: rank")
    assert texts[0] == f"load_checkpoint: rank 1: {texts[1]}"


def test_a_folder_of_weights_is_no_checkpoint(tmp_path: Path, whole: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"zero\.load_weights"):
        made().load_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"is itself a checkpoint; load_checkpoint\('.*', tag='a'\)"):
        made().load_checkpoint(whole / "a")
    file = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="is no folder"):
        made().load_checkpoint(file)
