"""Weights in files of any program, as an index: one file, several, a folder of shards, or a checkpoint.

Files are those of safetensors, or of torch.save.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from zero.checkpoint import safe_file, torch_file
from zero.checkpoint.folder import INDEX, LATEST, find, read_index
from zero.checkpoint.index import Damaged, Index, SavedParameter, Stored

_SHARDS = ".index.json"  # a JSON of Hugging Face that says which file holds which tensor
_WANTED = "wanted a safetensors file, one of torch.save (.bin, .pt, .pth, .ckpt), or a folder with some"
_FIRST = ("model", "pytorch_model")  # of several models in a folder


def weights_at(place: Path | Sequence[Path]) -> tuple[Path, Index]:
    """The folder and the index of the weights at `place`, which may also be several files of one folder.

    Of files that do not say which tensors are buffers, all are parameters; see `sort_out`. Raises Damaged for what
    holds none or is not whole, ValueError for files that are not read, OSError for what cannot be read.
    """
    if not isinstance(place, Path):
        return _of_files(place)
    if place.is_dir():
        return _of_folder(place)
    if not place.exists():
        raise Damaged(f"{place} does not exist; {_WANTED}")
    if place.name.endswith(_SHARDS):
        return place.parent, _of_shards(place)
    return place.parent, _index(place.name, *_contents(place))


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
    if layers := sorted(path.glob("layer_*-model_states.pt")):
        return path, _of_layers(path, layers)
    for pattern in (f"*.safetensors{_SHARDS}", "*.safetensors", f"*.bin{_SHARDS}", "*.bin"):
        candidates = sorted(path.glob(pattern))
        preferred = [each for each in candidates if each.name.split(".")[0] in _FIRST]
        candidates = preferred if len(preferred) == 1 else candidates
        if len(candidates) == 1:
            return weights_at(candidates[0])
        if candidates:
            names = ", ".join(each.name for each in candidates)
            raise Damaged(f"{path} holds several models: {names}; name one of them")
    raise Damaged(f"{path} holds no safetensors file, no .bin file and no checkpoint of zero")


def _of_layers(path: Path, files: Sequence[Path]) -> Index:
    """What a pipeline of DeepSpeed has written of each layer, its number before the names."""
    if parts := [each.name for each in files if re.search("-model_0*[1-9]", each.name)]:
        raise ValueError(
            f"{path} has {parts[0]}: layers that are cut are not put together; save them at tensor parallel 1"
        )
    numbers = [int(each.name.removeprefix("layer_").partition("-")[0]) for each in files]
    held = zip(numbers, _all_contents(files)[0].values(), strict=True)
    return _index(path.name, {f"{at}.{name}": each for at, stored in held for name, each in stored.items()}, {})


def _of_files(paths: Sequence[Path]) -> tuple[Path, Index]:
    """All tensors of all files, whose names must differ."""
    folders = {path.absolute().parent for path in paths}
    if len(folders) != 1:
        raise Damaged(f"{len(paths)} files lie in {len(folders)} folders; wanted one or more files of one folder")
    held, metadata = _all_contents(paths)
    counts = Counter(name for stored in held.values() for name in stored)
    if twice := [name for name, count in counts.items() if count > 1]:
        names = ", ".join(path.name for path in paths)
        raise Damaged(f"{names}: several of them have {', '.join(map(repr, twice[:5]))}")
    stored = {name: each for tensors in held.values() for name, each in tensors.items()}
    return folders.pop(), _index("+".join(sorted(held)), stored, metadata)


def _contents(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a file, and the metadata beside them."""
    if path.suffix == ".safetensors":
        return safe_file.contents(path)
    if path.suffix in torch_file.SUFFIXES:
        return torch_file.contents(path), {}
    raise Damaged(f"{path} is neither a safetensors file nor one of torch.save by its name; {_WANTED}")


def _all_contents(paths: Iterable[Path]) -> tuple[dict[str, dict[str, Stored]], dict[str, str]]:
    """By the name of the file; and the metadata of all."""
    held, metadata = {}, {}
    for path in paths:
        held[path.name], more = _contents(path)
        metadata |= more
    return held, metadata


def _of_shards(path: Path) -> Index:
    """What an index file of Hugging Face names, each tensor looked up in its file."""
    try:
        files = json.loads(path.read_bytes())["weight_map"]
        wanted = {str(name): str(file) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is no index of files with weights: {type(error).__name__}: {error}") from None
    problems, found = [], []
    for file in sorted(set(wanted.values())):
        if Path(file).name != file:
            problems.append(f"it names {file!r}, which is no file beside it")
        elif not (path.parent / file).is_file():
            problems.append(f"{file} is missing")
        else:
            found.append(path.parent / file)
    held, aliases = _all_contents(found)
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
        parameters={name: SavedParameter(each) for name, each in stored.items()},
        files={},
        # Tensors that are one are written once, with their other names in the metadata.
        tied={name: other for name, other in metadata.items() if name not in stored and other in stored},
    )
