"""Checkpoints of zero made without an engine, of any size, for tests of the commands that read them."""

from __future__ import annotations

from pathlib import Path

import torch

from zero.checkpoint import folder
from zero.checkpoint.index import assemble, file_name
from zero.checkpoint.safe_file import NAMES, TensorChunk, write
from zero.checkpoint.staging import LazyTensor
from zero.checkpoint.writer import line_of

SAVE = "00ff00ff"


def checkpoint(
    root: Path, chunks: list[list[TensorChunk]], tied: dict[str, str] | None = None, tag: str = "global_step3"
):
    """`root`/`tag` and `root`/latest, as ranks that have these chunks write them; returns the folder of the tag."""
    target = root / tag
    target.mkdir(parents=True)
    lines, files, known = [], {}, {}
    for rank, own in enumerate(chunks):
        for kind, in_file in (("weights", ("weight", "buffer")), ("masters", ("master",)), ("moments", ("exp_avg",))):
            path = target / file_name(kind, rank, len(chunks), SAVE)
            if not (inside := [chunk for chunk in own if chunk.kind in in_file]):
                continue
            lines += [line_of(*done) for done in write(path, inside)]
            files[path.name] = path.stat().st_size
        for chunk in own:
            if chunk.kind == "weight":
                known[chunk.name] = {
                    "group": 0,
                    "numbers": {},
                    "dtype": NAMES[chunk.values.dtype],
                    "shape": chunk.shape,
                }
    shared = {"global_steps": 3}
    values = {"save": SAVE, "tag": tag, "files": files, "tied": tied or {}, "shared": shared}
    index = assemble(lines, known, {**values, "ranks": tuple({} for _ in chunks)})
    folder.publish(target / folder.INDEX, index.to_json())
    folder.publish(root / folder.LATEST, tag + "\n")
    return target


def large(root: Path, numel: int) -> Path:
    """One bf16 parameter `w` of so many elements, with remainders, of numbers that repeat; made in little memory."""

    def numbers(start: int, count: int) -> torch.Tensor:
        return (torch.arange(start, start + count, dtype=torch.int32) % 997).to(torch.int16)

    def floats(start: int, count: int) -> torch.Tensor:
        return numbers(start, count).to(torch.bfloat16)

    shape = (numel // 1000, 1000)
    weight = TensorChunk("weight", "w", 0, shape, LazyTensor(torch.bfloat16, numel, floats))
    return checkpoint(root, [[weight, TensorChunk("master", "w", 0, shape, LazyTensor(torch.int16, numel, numbers))]])
