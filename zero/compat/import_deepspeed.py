"""A checkpoint of DeepSpeed into one of ours, as a single rank would have written it."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint import folder as folders
from zero.checkpoint.consistency import problems
from zero.checkpoint.index import Damaged, assemble, file_name
from zero.checkpoint.plain_values import as_json
from zero.checkpoint.safe_file import NAMES, TensorChunk, write
from zero.checkpoint.staging import LazyTensor
from zero.checkpoint.writer import line_of
from zero.compat.deepspeed_files import Files, Slice, open_files, slices

_NOT_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg")
# What DeepSpeed itself puts beside the client's state.
_OWN = (
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
    *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts"),
)


def import_deepspeed(
    folder: Path, out: Path, progress: Callable[[int], Callable[[int], None]] = lambda total: id
) -> tuple[Path, list[str]]:
    """Write `out`/<tag> from the files in `folder`, and `out`/latest; returns it, and what was not taken.

    progress: as of `zero.checkpoint.model_files.consolidate`. Memory: files are mapped, and a few MiB.
    Raises ValueError: Refused for a file with foreign objects, Damaged for missing files, entries and elements.
    """
    target = out / folder.name
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty; give another folder")
    left: list[str] = []
    try:
        files = open_files(folder)
        where = slices(files)
        weights, known = _weights(files, where, left)
        kinds = {"weights": weights, "masters": _masters(files, where, known), "moments": _moments(files, where, known)}
        values = {
            "tied": _tied(files, known),
            "shared": _shared(files),
            "ranks": ({},),
            "client": _client(files, left),
            "signed": dict.fromkeys(_NOT_NEGATIVE, False),
            "config": as_json(files.model.get("ds_config")),
            "rotates": True,
        }
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Damaged(
            f"{folder} is not laid out as DeepSpeed's ZeRO 1, 2 and 3 lay it out ({type(error).__name__}: {error}); "
            "nothing is imported"
        ) from error
    moved = progress(sum(chunk.values.nbytes for chunks in kinds.values() for chunk in chunks))
    save = secrets.token_hex(4)
    target.mkdir(parents=True, exist_ok=True)
    lines, sizes = [], {}
    for kind, chunks in kinds.items():
        if chunks:
            path = target / file_name(kind, 0, 1, save)
            lines += [line_of(*written) for written in write(path, chunks, None, moved)]
            sizes[path.name] = path.stat().st_size
    folders.sync(target)
    index = assemble(lines, known, {**values, "save": save, "tag": target.name, "files": sizes})
    if found := problems(index):
        raise Damaged(f"{folder}: {'; '.join(found[:20])}")
    folders.publish(target / folders.INDEX, index.to_json())
    folders.publish(out / folders.LATEST, target.name + "\n")
    return target, left


def _weights(
    files: Files, where: Mapping[str, Sequence[Slice]], left: list[str]
) -> tuple[list[TensorChunk], dict[str, dict[str, Any]]]:
    """Parameters as the model computes with them, buffers, and what `assemble` wants to know of the parameters."""
    module, buffers = files.model["module"], set(files.model["buffer_names"])
    tied = files.model.get("shared_params") or {}
    chunks, known = [], {}

    def add(name: str, shape: tuple[int, ...], values: Any, group: int | None = None, numbers: Any = None) -> None:
        chunks.append(TensorChunk("weight", name, 0, shape, values))
        known[name] = {"group": group, "numbers": numbers or {}, "dtype": NAMES[values.dtype], "shape": shape}

    for flat, shapes in enumerate(files.shapes()):
        group, numbers = files.group_of(flat), _numbers(files, flat)
        for name, shape in shapes.items():
            whole = module.get(name)
            if isinstance(whole, torch.Tensor) and whole.numel() == math.prod(shape):
                values: torch.Tensor | LazyTensor = whole.detach().contiguous().view(-1)
            else:
                values = _lazy(shape, _dtype(files, name), where[name], files.master)
            add(name, shape, values, group, numbers)
    for name, shape, values in _frozen(files):
        add(name, shape, values)
    for name, value in module.items():
        if name in known or name in tied:
            continue
        if not isinstance(value, torch.Tensor):
            left.append(f"'{name}' of the module, which is no tensor but a {type(value).__name__}")
            continue
        shape, flat_values = tuple(value.shape), value.detach().contiguous().view(-1)
        if name in buffers:
            chunks.append(TensorChunk("buffer", name, 0, shape, flat_values))
        elif not files.cut:  # at ZeRO 3 it is empty: its values are elsewhere, or were left out
            add(name, shape, flat_values)
        else:
            left.append(f"parameter '{name}', which was saved without values")
    return chunks, known


def _frozen(files: Files) -> Iterator[tuple[str, tuple[int, ...], LazyTensor]]:
    """Parameters that no group trains, where the files keep them apart: each rank has a range, or rank 0 all."""
    for name, shape in (files.model.get("frozen_param_shapes") or {}).items():
        fragments = [model["frozen_param_fragments"][name].view(-1) for model in files.models]
        numel, begin, some = math.prod(shape), 0, []
        for rank, fragment in enumerate(fragments):
            some.append(Slice(begin, min(fragment.numel(), numel - begin), rank, 0, 0))
            begin += some[-1].numel
        if begin != numel:
            raise Damaged(f"frozen parameter '{name}' has {begin} of its {numel} elements")
        values = _lazy(shape, fragments[0].dtype, some, lambda rank, flat, fragments=fragments: fragments[rank])
        yield name, tuple(shape), values


def _masters(files: Files, where: Mapping[str, Sequence[Slice]], known: Mapping[str, Any]) -> list[TensorChunk]:
    chunks = []
    for name, some in where.items():
        dtypes = {NAMES[files.master(one.rank, one.flat).dtype] for one in some}
        if dtypes - {known[name]["dtype"]}:  # else the weight is exact
            shape = known[name]["shape"]
            chunks.append(TensorChunk("master", name, 0, shape, _lazy(shape, torch.float32, some, files.master)))
    return chunks


def _moments(files: Files, where: Mapping[str, Sequence[Slice]], known: Mapping[str, Any]) -> list[TensorChunk]:
    chunks = []
    for name, some in where.items():
        wide = [_wide(files, one) for one in some]
        for key in wide[0] if wide else ():
            for one, keys in zip(some, wide, strict=True):
                if key not in keys:
                    raise Damaged(f"state '{key}' of rank {one.rank}, group {one.flat}, is missing")
            first = files.moment(key, some[0].rank, some[0].flat)
            dtype = first.dtype if first.dtype == torch.bfloat16 else torch.float32
            shape = known[name]["shape"]
            chunks.append(TensorChunk(key, name, 0, shape, _lazy(shape, dtype, some, partial(files.moment, key))))
    return chunks


def _wide(files: Files, one: Slice) -> list[str]:
    """The states with an element per parameter."""
    length, state = files.masters(one.rank)[one.flat].numel(), files.state(one.rank, one.flat)
    wide = {key: value.numel() for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim()}
    for key, numel in wide.items():
        if numel < length:
            raise Damaged(f"state '{key}' of rank {one.rank} has {numel} elements for {length}; not read")
    return list(wide)


def _numbers(files: Files, flat: int) -> dict[str, float]:
    """Single numbers of the state, "step" among them, which some optimizers keep with their groups."""
    base = files.base(0)
    group = base["param_groups"][files.group_of(flat)] if isinstance(base, Mapping) and base.get("param_groups") else {}
    step = group.get("step", files.states[0].get("base_optimizer_state_step"))
    state = {} if step is None else {"step": step}
    for key, value in files.state(0, flat).items():
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and not value.dim()):
            state[key] = value
    numbers = {key: float(value) for key, value in state.items()}
    return {key: int(value) if value.is_integer() else value for key, value in numbers.items()}


def _lazy(
    shape: Sequence[int], dtype: torch.dtype, some: Sequence[Slice], flat: Callable[[int, int], torch.Tensor]
) -> LazyTensor:
    """A tensor whose elements lie in `some` places of the flat tensors that `flat` gives by rank and number."""

    def of(start: int, numel: int) -> torch.Tensor:
        parts = []
        for one in some:
            low, high = max(one.start, start), min(one.start + one.numel, start + numel)
            if low < high:
                parts.append(flat(one.rank, one.flat).narrow(0, one.at + low - one.start, high - low))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return LazyTensor(dtype, math.prod(shape), of)


def _dtype(files: Files, name: str) -> torch.dtype:
    """What the model computes with."""
    value = files.model["module"].get(name)
    if isinstance(value, torch.Tensor):
        return value.dtype
    settings = files.model.get("ds_config") or {}
    on = [key for key in ("bf16", "fp16") if isinstance(settings, Mapping) and (settings.get(key) or {}).get("enabled")]
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[on[0]] if on else torch.float32


def _tied(files: Files, known: Mapping[str, Any]) -> dict[str, str]:
    """Other names -> the name that a parameter is stored by, whichever of them DeepSpeed stored it by."""
    pairs = (files.model.get("shared_params") or {}).items()
    found = ((name, other) if name in known else (other, name) for other, name in pairs)
    return {alias: stored for stored, alias in found if stored in known and alias not in known}


def _shared(files: Files) -> dict[str, Any]:
    """Counters of the run; below "deepspeed" what it says of schedule and groups, for whoever wants to look it up."""
    model, base = files.model, files.base(0)
    groups = base.get("param_groups", []) if isinstance(base, Mapping) else []
    more = {
        "lr_scheduler": model.get("lr_scheduler"),
        "param_groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        **{key: model.get(key) for key in ("global_samples", "skipped_steps", "ds_version")},
    }
    return {"global_steps": int(model["global_steps"]), "deepspeed": as_json(more)}


def _client(files: Files, left: list[str]) -> dict[str, Any]:
    """What the client saved, as far as it is JSON."""
    client = {}
    for key, value in files.model.items():
        if key in _OWN:
            continue
        try:
            if json.loads(json.dumps(value, allow_nan=False)) != value:
                raise ValueError
            client[key] = value
        except (TypeError, ValueError):
            left.append(f"'{key}' of client_state, which is no JSON")
    if files.model.get("lr_scheduler"):
        left.append("the state of the learning rate schedule")
    return client
