"""Whether a checkpoint is whole: every byte that a tensor has against its checksum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from zero.checkpoint import folder as folders
from zero.checkpoint.index import CHUNK, ITEMSIZE, Damaged, Part, Stored
from zero.checkpoint.reader import Reader
from zero.checkpoint.safe_file import contents


def verify(folder: str | Path, progress: Callable[[int], Callable[[int], None]] = lambda total: id) -> list[str]:
    """All that is wrong with the checkpoint in `folder`, each with tensor and file; empty for a whole one.

    Reads every file once, a MiB at a time. `progress` is told the number of bytes of all files, and gives what is told
    how many more have been read.
    """
    folder = Path(folder)
    try:
        index = folders.load_index(folder)
    except Damaged as error:
        return [str(error)]
    except OSError as error:
        return [f"{folder / folders.INDEX} cannot be read: {error}"]
    moved = progress(sum(index.files.values()))
    problems = index.problems()
    headers = {}
    for name, nbytes in index.files.items():
        problem, headers[name] = _file(folder / name, nbytes)
        problems += [problem] if problem else []
    with Reader(folder, index) as reader:
        for what, stored in index.stored():
            for part in stored.parts:
                if headers.get(part.file) is not None:
                    problems += _part(reader, what, stored, part, headers[part.file], moved)
    return problems


def rubbish(folder: str | Path) -> list[str]:
    """Names in the folder that belong to no checkpoint, such as what a save that was killed has left."""
    folder = Path(folder)
    try:
        known = {folders.INDEX, *folders.load_index(folder).files}
    except Damaged:
        known = {folders.INDEX}
    return sorted(path.name for path in folder.iterdir() if path.name not in known)


def _file(path: Path, nbytes: int) -> tuple[str | None, Mapping[int, int] | None]:
    """What is wrong with a file as one, and its tensors as first byte -> bytes, None where nothing can be read."""
    try:
        size = path.stat().st_size
        if size != nbytes:
            return f"{path.name} has {size} bytes, not {nbytes}", {}
        entries = contents(path)[0].values()
        return None, {entry.parts[0].offset: entry.nbytes for entry in entries if entry.nbytes}
    except FileNotFoundError:
        return f"{path.name} is missing", None
    except Damaged as error:
        return str(error), {}
    except OSError as error:
        return f"{path.name} cannot be read: {error}", None


def _part(
    reader: Reader, what: str, stored: Stored, part: Part, header: Mapping[int, int], moved: Callable[[int], None]
) -> list[str]:
    size = ITEMSIZE[stored.dtype]
    step = CHUNK // size
    first, more = None, 0
    alone = replace(stored, parts=(part,))  # an element that two parts hold is checked in both
    for start in range(part.start, part.start + part.numel, step):
        numel = min(step, part.start + part.numel - start)
        try:
            reader.read(alone, start, numel, what)
        except (Damaged, OSError) as error:
            first, more = (str(error), 0) if first is None else (first, more + 1)
        moved(numel * size)
    problems = [] if first is None else [f"{first}; so are {more} MiB behind them" if more else first]
    if header and part.numel and header.get(part.offset) != part.numel * size:
        problems.append(f"{what}: the header of {part.file} knows no such tensor at byte {part.offset}")
    if part.crc32 is None:
        problems.append(f"{what}: {part.file} has no checksums of it")
    return problems
