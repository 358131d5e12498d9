"""What must be right before a save writes anything, on one rank and among all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path
from typing import Any

from zero.checkpoint.folder import LATEST
from zero.watchdog.hang_report import difference_text

SLACK = 1 << 16  # bytes of each rank's share that headers and the index may take


def check_folder(path: Any, what: str) -> Path:
    """The folder of the checkpoints, as given; ValueError, naming `what` it is, for what is none."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ValueError(f"{what} must be a non-empty string or a path, got {path!r}")
    return Path(path)


def check_tag(tag: Any) -> str:
    """The tag as text; ValueError for what cannot be the name of a folder beside the file `latest`."""
    text = str(tag)
    plain = text.isprintable() and text.strip() == text and not {"/", "\\", os.sep} & set(text)
    if not text or not plain or text.startswith(".") or text == LATEST or len(os.fsencode(text)) > 200:
        raise ValueError(
            f"save_checkpoint(): tag must be the plain name of a folder, without separators or a leading dot, and not "
            f"'{LATEST}'; got {text!r}"
        )
    return text


def begin(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """On rank 0, with what all ranks ask for: make the folder, and answer what all need to know.

    Raises ValueError where they ask for different things, OSError where the folder cannot be written or has no room.
    """
    for key, what in (("dir", "save_dir"), ("tag", "tag"), ("options", "options")):
        texts = [str(one[key]) for one in requests]
        if len(set(texts)) > 1:
            raise ValueError(f"save_checkpoint(): {what} is not the same on all ranks: {difference_text(texts, '')}")
    names = [[[name, *kind] for name, *kind, _ in one["buffers"]] for one in requests]
    if any(one != names[0] for one in names):
        texts = [", ".join(f"{name} {dtype} {shape}" for name, dtype, shape in one) for one in names]
        raise RuntimeError(f"save_checkpoint(): the ranks have different buffers: {difference_text(texts, 'none')}")
    place = Path(requests[0]["dir"]) / requests[0]["tag"]
    new = not place.exists()
    try:
        os.makedirs(place, exist_ok=True)
        _check_room(place, sum(one["nbytes"] + SLACK for one in requests))
    except OSError as error:
        if new:
            with contextlib.suppress(OSError):
                place.rmdir()
        raise OSError(error.errno, f"save_checkpoint() cannot write to {place}: {error.strerror}") from error
    buffers = zip(*(one["buffers"] for one in requests), strict=True)
    differ = [same[0][0] for same in buffers if any(one != same[0] for one in same)]
    return {"save": secrets.token_hex(4), "differ": differ, "files": any(one["files"] for one in requests)}


def _check_room(place: Path, needed: int) -> None:
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    system = os.statvfs(place)
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and free < needed:  # of no blocks at all: the file system does not say
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed} bytes are needed and {free} are free")
