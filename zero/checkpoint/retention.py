"""Checkpoints that may go: old ones, their optimizer state, and what killed saves have left behind.

A kill between any two steps leaves each checkpoint whole, or without an index, and then it is none.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from zero.checkpoint import folder
from zero.checkpoint.index import FILE, Damaged, Index

# Names that a save gives to files, those of a file that is being written around them.
_OURS = re.compile(FILE)
_PARTIAL = re.compile(rf"\.({FILE}|{re.escape(folder.INDEX)}|{folder.LATEST})\.\d+\.partial")
_GONE = re.compile(r"\..+\.gone")  # a tag that is being removed


class Retention(NamedTuple):
    """How many checkpoints are kept, and with how many of them the optimizer's state; None: all."""

    keep: int | None = None
    keep_optimizer: int | None = None


def is_ours(name: str) -> bool:
    """Whether a save has made this file, which no index need name."""
    return bool(_OURS.fullmatch(name) or _PARTIAL.fullmatch(name))


def tidy(root: Path, tag: str, retention: Retention, began: float, moved: Callable[[int], object] = id) -> None:
    """After `tag` was saved whole: remove older checkpoints and rubbish. Raises OSError.

    A checkpoint stays that is the newest, that `latest` names, that was saved with save_latest=False, or that is not
    whole. began: time.time() of this run's start; what was touched later may belong to a save that still runs beside
    us, and stays, outside of `tag` itself.
    """
    _clear(root / tag, folder.read_index(root / tag), 0.0, moved)
    _clear_ruins(root, began, moved)
    named = folder.latest(root)
    older = []
    for other in reversed(folder.tags(root)):
        with contextlib.suppress(Damaged):
            index = folder.read_index(root / other)
            if other != tag:
                _clear(root / other, index, began, moved)
            if index.rotates:
                older.append((other, index))
    keep = len(older) if retention.keep is None else retention.keep
    whole = len(older) if retention.keep_optimizer is None else retention.keep_optimizer
    for position, (other, index) in enumerate(older):
        if other in (tag, named):
            continue
        if position >= keep:
            remove(root / other, moved)
        elif position >= whole and not index.stripped:
            strip(root / other, index, moved)


def remove(place: Path, moved: Callable[[int], object] = id) -> None:
    """Delete a checkpoint: its index first, then all that saves have made; the folder goes unless more is in it."""
    (place / folder.INDEX).unlink(missing_ok=True)
    folder.sync(place)
    whole = all(is_ours(name) for name in os.listdir(place))
    if whole and not _GONE.fullmatch(place.name):
        # A kill may leave an empty folder behind: its name must say that it was ours.
        place = place.rename(place.with_name(f".{place.name}.gone"))
    _delete(place, is_ours, moved)
    if whole:
        with contextlib.suppress(OSError):  # some file systems keep names of files that are open
            place.rmdir()


def strip(place: Path, index: Index, moved: Callable[[int], object] = id) -> None:
    """Leave the weights of a checkpoint: first the index says so, then the files of masters and moments go."""
    parameters = {
        name: replace(one, master=None, moments={}, scales={}, numbers={}) for name, one in index.parameters.items()
    }
    rest = replace(index, parameters=parameters, stripped=True)
    used = {part.file for _, stored in rest.stored() for part in stored.parts}
    # A file without tensors of the optimizer stays, whether something lies in it or not.
    gone = {part.file for _, stored in index.stored() for part in stored.parts} - used
    rest = replace(rest, files={name: size for name, size in index.files.items() if name not in gone})
    when = (place / folder.INDEX).stat().st_mtime_ns
    folder.publish(place / folder.INDEX, rest.to_json(), when)  # the order of checkpoints is that of their saves
    _delete(place, lambda name: name in gone, moved)


def _clear(place: Path, index: Index, began: float, moved: Callable[[int], object]) -> None:
    """Remove what killed saves of a tag have left beside its checkpoint."""
    _delete(place, lambda name: is_ours(name) and name not in index.files and not _young(place / name, began), moved)


def _clear_ruins(root: Path, began: float, moved: Callable[[int], object]) -> None:
    """Remove the tags that never got an index, and what is unfinished beside them."""
    for entry in list(os.scandir(root)):
        path = Path(entry.path)
        if _PARTIAL.fullmatch(entry.name) and not _young(path, began):
            path.unlink(missing_ok=True)
        elif entry.is_dir(follow_symlinks=False) and not (path / folder.INDEX).exists():
            names = os.listdir(path)
            ours = [name for name in names if is_ours(name)]
            if _GONE.fullmatch(entry.name) or (ours and not any(_young(path / name, began) for name in ours)):
                remove(path, moved)


def _delete(place: Path, wanted: Callable[[str], bool], moved: Callable[[int], object]) -> None:
    for name in os.listdir(place):
        if wanted(name):
            (place / name).unlink(missing_ok=True)
            moved(1)


def _young(path: Path, began: float) -> bool:
    """Whether a running save may be writing it; `began` 0: none can."""
    if not began:
        return False
    try:
        return path.stat().st_mtime >= began
    except FileNotFoundError:
        return True
