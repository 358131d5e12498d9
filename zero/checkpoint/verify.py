"""Whether a checkpoint is whole: headers against the index, and every byte that a tensor has against its checksum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zero.checkpoint import folder as folders
from zero.checkpoint.index import CHUNK, ITEMSIZE, Damaged, Index, Part, Stored
from zero.checkpoint.reader import Reader
from zero.checkpoint.safe_file import header_problem, headers


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
    wanted, readable = headers(index, index.files), set()
    for name, nbytes in index.files.items():
        try:
            size = (folder / name).stat().st_size
            problem = f"{name} has {size} bytes, not {nbytes}"
            if size == nbytes:
                problem = header_problem(folder / name, wanted[name])
            readable.add(name)
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            problem = f"{name} is missing" if gone else f"{name} cannot be read: {error}"
        problems += [problem] if problem else []
    with Reader(folder, index) as reader:
        for what, stored in index.stored():
            for part in stored.parts:
                if part.file in readable:
                    problems += _part(reader, what, stored, part, moved)
    return problems


def check_headers(folder: Path, index: Index, rank: int = 0, world_size: int = 1) -> None:
    """Raise Damaged where the header of a file is not what was saved. Each rank looks at its share of the files.

    Reading goes by the index and would not notice. Files of other programs are in no index. Raises OSError.
    """
    mine = sorted(index.files)[rank::world_size]
    wanted = headers(index, mine)
    problems = [problem for name in mine if (problem := header_problem(folder / name, wanted[name]))]
    if problems:
        raise Damaged(f"checkpoint {folder} is damaged: {'; '.join(problems[:20])}")


def rubbish(folder: str | Path) -> list[str]:
    """Names in the folder that belong to no checkpoint, such as what a save that was killed has left."""
    folder = Path(folder)
    try:
        known = {folders.INDEX, *folders.load_index(folder).files}
    except Damaged:
        known = {folders.INDEX}
    return sorted(path.name for path in folder.iterdir() if path.name not in known)


def _part(reader: Reader, what: str, stored: Stored, part: Part, moved: Callable[[int], None]) -> list[str]:
    size = ITEMSIZE[stored.dtype]
    step = CHUNK // size
    first, more = None, 0
    # As it lies there; an element that two parts hold is checked in both.
    alone = replace(stored, parts=(part,), boxes=())
    for start in range(part.start, part.start + part.numel, step):
        numel = min(step, part.start + part.numel - start)
        try:
            reader.read(alone, start, numel, what)
        except (Damaged, OSError) as error:
            first, more = (str(error), 0) if first is None else (first, more + 1)
        moved(numel * size)
    problems = [] if first is None else [f"{first}; so are {more} MiB behind them" if more else first]
    if part.crc32 is None:
        problems.append(f"{what}: {part.file} has no checksums of it")
    return problems
