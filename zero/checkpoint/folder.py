"""The folder of a run's checkpoints: one folder per tag, the name of the newest in `latest`, and which one is meant."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any

from zero.checkpoint.consistency import problems
from zero.checkpoint.index import FILE, Damaged, Index

INDEX = "index.json"
LATEST = "latest"


def check_folder(path: Any, what: str) -> Path:
    """The folder of the checkpoints, as given; ValueError, naming `what` it is, for what is none."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ValueError(f"{what} must be a non-empty string or a path, got {path!r}")
    return Path(path)


def publish(path: Path, text: str, time_ns: int | None = None) -> None:
    """Give a file this content in one moment: written beside, synced, renamed, and the folder synced.

    time_ns: when it was changed last, as its time will say; default: now.
    """
    beside = prepare(path, text, time_ns)
    try:
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync(path.parent)


def prepare(path: Path, text: str, time_ns: int | None = None) -> Path:
    """Write and sync what is to become the content of `path` beside it, and say where; renaming that needs no room."""
    # Of the thread, as two engines of one process may save beside their loops into one folder.
    beside = path.with_name(f".{path.name}.{threading.get_native_id()}.partial")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if time_ns is not None:
                os.utime(file.fileno(), ns=(time_ns, time_ns))
            os.fsync(file.fileno())
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return beside


def sync(folder: Path) -> None:
    """Make the names in a folder survive a loss of power, as far as its file system can promise that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # what those say that sync files only
            raise
    finally:
        os.close(handle)


def load_index(folder: Path) -> Index:
    """The index, whatever is in the files; raises Damaged where there is none that can be read."""
    path = folder / INDEX
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise Damaged(f"{path} is no file")
    try:
        return Index.of_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise Damaged(f"{folder} holds no whole checkpoint: {INDEX}, which is written last, is not there") from None


def read_index(folder: Path) -> Index:
    """The index of one checkpoint; raises Damaged for one that is not whole as far as sizes tell."""
    index = load_index(folder)
    if found := [*problems(index), *file_problems(folder, index).values()]:
        raise Damaged(f"checkpoint {folder} is damaged: {'; '.join(found[:20])}")
    return index


def file_problems(folder: Path, index: Index) -> dict[str, str]:
    """What is wrong with files, by name, as far as names and sizes tell."""
    found = {}
    for name, nbytes in index.files.items():
        try:
            there = (folder / name).stat()
        except FileNotFoundError:
            found[name] = f"{name} is missing"
            continue
        if not stat.S_ISREG(there.st_mode):
            found[name] = f"{name} is no file"
        elif there.st_size != nbytes:
            found[name] = f"{name} has {there.st_size} bytes, not {nbytes}"
    for name in [] if index.stripped else os.listdir(folder):  # else a kill may have left some
        match = re.fullmatch(FILE, name)
        if match and match[4] == index.save and name not in index.files:
            found[name] = f"{name} is of this save, and the index does not name it"
    return found


def latest(folder: Path) -> str | None:
    """The tag that `latest` names, or None without one."""
    try:
        return (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None


def tags(folder: Path, marker: str = INDEX) -> list[str]:
    """The tags in a folder that have an index, or files like `marker`, oldest first."""
    dated = []
    for path in folder.glob(f"*/{marker}"):
        with contextlib.suppress(FileNotFoundError):  # it was deleted meanwhile
            dated.append((path.stat().st_mtime_ns, _natural(path.parent.name), path.parent.name))
    return list(dict.fromkeys(tag for *_, tag in sorted(dated)))


def _natural(tag: str) -> list[tuple[int, str]]:
    """So that step 9 comes before step 10 on a file system whose times are coarse."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", tag)]


def find(folder: Path, tag: str | None) -> tuple[Path, Index] | None:
    """The checkpoint `tag`, by default what `latest` names; None where nothing is asked for and there is no `latest`.

    Raises ValueError for what is not a whole checkpoint, with the names of those that are; OSError for what cannot be
    read.
    """
    if not folder.is_dir():
        if tag is None and not folder.exists():
            return None
        raise Damaged(f"{folder} is no folder; give the one that save_checkpoint was given")
    named = latest(folder) if tag is None else tag
    if named is None:
        _check_kind(folder)
        return None
    place = folder / named
    try:
        if tag is None and (not named or not named.isprintable() or Path(named).name != named):
            raise Damaged(f"it names {named[:80]!r}, which is no name of a checkpoint")
        if not place.is_dir():
            raise Damaged(f"there is no folder {place}")
        return place, read_index(place)
    except Damaged as error:
        asked = f"'{LATEST}' in {folder}" if tag is None else f"tag '{tag}' in {folder}"
        raise Damaged(f"{asked}: {error}. {_whole(folder)}") from None


def without_latest(folder: Path) -> str:
    """What is to be said where nothing is asked for and there is no `latest`, and so nothing is loaded."""
    if not folder.exists():
        return f"there is no folder {folder}; nothing is loaded"
    return f"{folder} has no file '{LATEST}'; nothing is loaded. {_whole(folder)}"


def _whole(folder: Path) -> str:
    """A sentence that names the whole checkpoints of a folder and says how to load one."""
    names = []
    for tag in tags(folder):
        with contextlib.suppress(Damaged, OSError):
            read_index(folder / tag)
            names.append(f"'{tag}'")
    if names:
        return f"Whole checkpoints there: {', '.join(names)}; pass one of them as `tag`"
    return "No checkpoint there is whole, so there is nothing to go on from: begin anew, or load from another folder"


def _check_kind(folder: Path) -> None:
    """Raise for a folder that holds something else to be loaded than tags."""
    if (folder / INDEX).exists():
        raise Damaged(f"{folder} is itself a checkpoint; load_checkpoint('{folder.parent}', tag='{folder.name}')")
    if any(folder.glob("*.safetensors")):
        raise Damaged(
            f"{folder} holds weights and no checkpoint; zero.load_weights(engine, '{folder}') takes them into an "
            "engine or a module"
        )
