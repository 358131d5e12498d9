"""Weights in safetensors files, whoever wrote them, as an index: one file, a folder of shards, or a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from zero.checkpoint.folder import INDEX, LATEST, find, read_index
from zero.checkpoint.index import Damaged, Index, Parameter, Stored
from zero.checkpoint.safe_file import contents

_TORCH_FILES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARDS = ".safetensors.index.json"  # a JSON of Hugging Face that says which file holds which tensor


def weights_at(path: Path) -> tuple[Path, Index]:
    """The folder and the index of the weights at `path`.

    Of files that do not say which tensors are buffers, all are parameters; see `sort_out`. Raises Damaged for what
    holds none or is not whole, OSError for what cannot be read.
    """
    if path.is_dir():
        return _of_folder(path)
    if not path.exists():
        raise Damaged(f"{path} does not exist; wanted a safetensors file, or a folder with some")
    if path.name.endswith(_SHARDS):
        return path.parent, _of_shards(path)
    if path.suffix != ".safetensors":
        raise _refused(path)
    stored, metadata = contents(path)
    return path.parent, _index(path.name, stored, metadata)


def sort_out(index: Index, buffers: Collection[str], rename: Callable[[str], str | None] | None) -> Index:
    """The index under the names of a model, in which these are buffers and all else are parameters.

    `rename` gives the model's name for one of a file, or None for what is to be left out.
    """
    if rename is not None:
        index = _renamed(index, rename)
    parameters = {name: each for name, each in index.parameters.items() if name not in buffers}
    moved = {name: each.weight for name, each in index.parameters.items() if name in buffers}
    moved |= {name: index.parameters[other].weight for name, other in index.tied.items() if name in buffers}
    return replace(index, parameters=parameters, buffers={**index.buffers, **moved})


def _renamed(index: Index, rename: Callable[[str], str | None]) -> Index:
    new = {name: rename(name) for name in (*index.parameters, *index.buffers, *index.tied)}
    counts = Counter(name for name in new.values() if name is not None)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(f"rename gives several tensors the name {', '.join(map(repr, twice))}")
    return replace(
        index,
        parameters={new[name]: each for name, each in index.parameters.items() if new[name] is not None},
        buffers={new[name]: each for name, each in index.buffers.items() if new[name] is not None},
        tied={
            new[name]: new[other]
            for name, other in index.tied.items()
            if new[name] is not None and new[other] is not None
        },
    )


def _of_folder(path: Path) -> tuple[Path, Index]:
    if (path / INDEX).exists():
        return path, read_index(path)
    if (path / LATEST).exists():
        return find(path, None)
    shards = sorted(path.glob(f"*{_SHARDS}"))
    files = sorted(path.glob("*.safetensors"))
    for candidates in (shards, files):
        preferred = [each for each in candidates if each.name.split(".")[0] == "model"]
        candidates = preferred if len(preferred) == 1 else candidates
        if len(candidates) == 1:
            return weights_at(candidates[0])
        if candidates:
            names = ", ".join(each.name for each in candidates)
            raise Damaged(f"{path} holds several models: {names}; name one of them")
    others = [each for each in sorted(path.iterdir()) if each.suffix in _TORCH_FILES]
    raise _refused(others[0]) if others else Damaged(f"{path} holds no safetensors file and no checkpoint of zero")


def _of_shards(path: Path) -> Index:
    """What an index file of Hugging Face names, each tensor looked up in its file."""
    try:
        files = json.loads(path.read_bytes())["weight_map"]
        wanted = {str(name): str(file) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is no index of safetensors files: {type(error).__name__}: {error}") from None
    problems, held, aliases = [], {}, {}
    for file in sorted(set(wanted.values())):
        if Path(file).name != file:
            problems.append(f"it names {file!r}, which is no file beside it")
        elif not (path.parent / file).is_file():
            problems.append(f"{file} is missing")
        elif Path(file).suffix != ".safetensors":
            raise _refused(path.parent / file)
        else:
            held[file], metadata = contents(path.parent / file)
            aliases |= metadata
    problems += [
        f"'{name}' is not in {file}" for name, file in wanted.items() if file in held and name not in held[file]
    ]
    if problems:
        raise Damaged(f"{path}: {'; '.join(problems)}")
    return _index(path.name, {name: held[file][name] for name, file in wanted.items()}, aliases)


def _index(tag: str, stored: dict[str, Stored], metadata: dict[str, str]) -> Index:
    digest = hashlib.blake2b(repr(sorted(stored.items())).encode(), digest_size=4).hexdigest()
    return Index(
        save=digest,
        tag=tag,
        parameters={name: Parameter(each) for name, each in stored.items()},
        files={},
        # Tensors that are one are written once, with their other names in the metadata.
        tied={name: other for name, other in metadata.items() if name not in stored and other in stored},
    )


def _refused(path: Path) -> Damaged:
    if path.suffix in _TORCH_FILES:
        return Damaged(
            f"{path} is a file of torch.save, which runs code when it is read; convert it to safetensors first: "
            f"safetensors.torch.save_file(torch.load('{path.name}', weights_only=True), 'model.safetensors')"
        )
    return Damaged(f"{path} is no safetensors file; wanted one, or a folder with some")
