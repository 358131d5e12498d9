"""Checkpoints as they lie in a folder: read with safetensors and the index alone, or made without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from models import config, make_net
from models import step as net_step
from safetensors.torch import load_file

import zero
from zero.checkpoint import folder
from zero.checkpoint.index import assemble, file_name
from zero.checkpoint.safe_file import DTYPES, NAMES, TensorChunk, write
from zero.checkpoint.writer import FILES, line_of

SAVE = "00ff00ff"


def index_of(place: Path) -> dict[str, Any]:
    return json.loads((place / "index.json").read_text())


def entries(index: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every tensor that the index knows, by kind and name."""
    found = {f"buffer/{name}": stored for name, stored in index["buffers"].items()}
    found |= {f"tensor/{name}": stored for name, stored in index["tensors"].items()}
    for name, parameter in index["parameters"].items():
        found[f"weight/{name}"] = parameter["weight"]
        if "master" in parameter:
            found[f"master/{name}"] = parameter["master"]
        for group in ("moments", "scales"):
            found |= {f"{group}.{key}/{name}": stored for key, stored in parameter.get(group, {}).items()}
    return found


def tensors(place: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, without random numbers and the like; each element was written once."""
    by_place = {}
    for name in index_of(place)["files"]:
        raw = (place / name).read_bytes()
        base = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:base])
        for key, values in load_file(place / name).items():
            by_place[name, base + header[key]["data_offsets"][0]] = values.reshape(-1)
    made, used = {}, set()
    for what, stored in entries(index_of(place)).items():
        whole = torch.zeros(stored["shape"], dtype=DTYPES[stored["dtype"]])
        counts = torch.zeros(whole.numel(), dtype=torch.int64)
        for start, numel, file, offset, _ in stored["parts"]:
            if numel:
                whole.view(-1)[start : start + numel] = by_place[file, offset]
                counts[start : start + numel] += 1
                used.add((file, offset))
        assert (counts == 1).all(), what
        if not what.startswith(("tensor/rank_state/", "tensor/engine_state/")):
            made[what] = whole
    assert used == {where for where, values in by_place.items() if values.numel()}, "bytes that the index does not name"
    return made


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def engine_of(stage: int, world: int, model: torch.nn.Module | None = None, **more: Any) -> Any:
    model = make_net() if model is None else model
    return zero.initialize(model=model, config=config(stage, world, **more))[0]


def step(engine: Any, number: int) -> float:
    """One step of a Net on this rank's part of the batch."""
    return net_step(engine, number).item()


def checkpoint(
    root: Path, chunks: list[list[TensorChunk]], tied: dict[str, str] | None = None, tag: str = "global_step3"
) -> Path:
    """`root`/`tag` and `root`/latest, as ranks that have these chunks write them; returns the folder of the tag."""
    target = root / tag
    target.mkdir(parents=True)
    lines, files, known = [], {}, {}
    for rank, own in enumerate(chunks):
        by_file: dict[str, list[TensorChunk]] = {}
        for chunk in own:
            by_file.setdefault(FILES.get(chunk.kind, "moments"), []).append(chunk)
            if chunk.kind == "weight":
                dtype = NAMES[chunk.values.dtype]
                known[chunk.name] = {"group": 0, "numbers": {}, "dtype": dtype, "shape": chunk.shape}
        for kind, inside in by_file.items():
            path = target / file_name(kind, rank, len(chunks), SAVE)
            lines += [line_of(*done) for done in write(path, inside)]
            files[path.name] = path.stat().st_size
    values = {"save": SAVE, "tag": tag, "files": files, "tied": tied or {}, "shared": {"global_steps": 3}}
    index = assemble(lines, known, {**values, "ranks": tuple({} for _ in chunks)})
    folder.publish(target / folder.INDEX, index.to_json())
    folder.publish(root / folder.LATEST, tag + "\n")
    return target


def flip(path: Path, place: int) -> None:
    """One bit of a file, in the byte at `place`, which may count from the end."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
