"""Which checkpoint a command is about."""

from __future__ import annotations

from pathlib import Path

from zero.checkpoint import folder


def chosen(given: Path, tag: str | None = None) -> Path:
    """The folder of one checkpoint: `given` itself, or the one below it that `tag` or `latest` names.

    Raises ValueError where that says nothing.
    """
    if not given.is_dir():
        raise ValueError(f"there is no folder {given}")
    if tag is not None:
        if not (given / tag).is_dir():
            raise ValueError(f"{given} has no checkpoint '{tag}'; it has {_there(given)}")
        return given / tag
    if (given / folder.INDEX).exists():
        return given
    named = folder.latest(given)
    if named is None:
        raise ValueError(
            f"{given} has neither {folder.INDEX}, as a checkpoint, nor {folder.LATEST}, as the folder of a run: "
            f"name a checkpoint with --tag; there is {_there(given)}"
        )
    if not (given / named).is_dir():
        raise ValueError(f"{given / folder.LATEST} names '{named}', which is not there; there is {_there(given)}")
    return given / named


def _there(given: Path) -> str:
    return ", ".join(f"'{tag}'" for tag in folder.tags(given)) or "no whole checkpoint"
