"""Whether a checkpoint is whole: its index, headers against it, every byte of tensors against its checksum, values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zero.checkpoint import folder as folders
from zero.checkpoint.consistency import problems
from zero.checkpoint.index import CHUNK, ITEMSIZE, Damaged, Index, Part, Stored
from zero.checkpoint.reader import Reader
from zero.checkpoint.run_state import RunState
from zero.checkpoint.safe_file import header_problem, headers


def verify(folder: str | Path, progress: Callable[[int], Callable[[int], None]] = lambda total: id) -> list[str]:
    """All that is wrong with the checkpoint in `folder`, each with tensor and file; empty for a whole one.

    Reads every file once, a MiB at a time. `progress` is told the number of bytes of all files, and gives what is told
    how many more have been read.
    """
    folder = Path(folder)
    try:
        index = folders.load_index(folder)
        of_files = folders.file_problems(folder, index)
    except Damaged as error:
        return [str(error)]
    except OSError as error:
        return [f"{folder / folders.INDEX} cannot be read: {error}"]
    moved = progress(sum(index.files.values()))
    found = [*problems(index), *of_files.values()]
    wanted, sizes = headers(index, index.files), {}
    for name in index.files:
        try:
            sizes[name] = (folder / name).stat().st_size if (folder / name).is_file() else 0
            if name not in of_files and (problem := header_problem(folder / name, wanted[name], index.stripped)):
                found.append(problem)
        except OSError as error:
            found.append(f"{name} cannot be read: {error}")
    with Reader(folder, index) as reader:
        for what, stored in index.stored():
            if stored.problem(index.files):
                continue  # said already
            for part in stored.parts:
                found += _part(reader, what, stored, part, sizes.get(part.file, 0), moved)
        # These go into generators and counters; what they are made of is right by now.
        found += [] if found else RunState(reader).problems()
    return found


def check_headers(folder: Path, index: Index, rank: int = 0, world_size: int = 1) -> None:
    """Raise Damaged where the header of a file is not what was saved. Each rank looks at its share of the files.

    Reading goes by the index and would not notice. Files of other programs are in no index. Raises OSError.
    """
    mine = sorted(index.files)[rank::world_size]
    wanted = headers(index, mine)
    found = [problem for name in mine if (problem := header_problem(folder / name, wanted[name], index.stripped))]
    if found:
        raise Damaged(f"checkpoint {folder} is damaged: {'; '.join(found[:20])}")


def rubbish(folder: str | Path) -> list[str]:
    """Names in the folder that belong to no checkpoint, such as what a save that was killed has left."""
    folder = Path(folder)
    try:
        known = {folders.INDEX, *folders.load_index(folder).files}
    except (Damaged, OSError):
        known = {folders.INDEX}
    return sorted(path.name for path in folder.iterdir() if path.name not in known)


def _part(reader: Reader, what: str, stored: Stored, part: Part, size: int, moved: Callable[[int], None]) -> list[str]:
    """What of a part is not what was saved; `size`: bytes of its file, 0 where it cannot be read."""
    itemsize = ITEMSIZE[stored.dtype]
    if part.offset + part.numel * itemsize > size:
        return [f"{what}: {part.file} ends at byte {size}, inside of it"] if size else []
    step = CHUNK // itemsize
    first, more = None, 0
    # As it lies there; an element that two parts hold is checked in both.
    alone = replace(stored, parts=(part,), boxes=())
    for start in range(part.start, part.start + part.numel, step):
        numel = min(step, part.start + part.numel - start)
        try:
            reader.read(alone, start, numel, what)
        except (Damaged, OSError) as error:
            first, more = (str(error), 0) if first is None else (first, more + 1)
        moved(numel * itemsize)
    return [] if first is None else [f"{first}; so are {more} MiB behind them" if more else first]
