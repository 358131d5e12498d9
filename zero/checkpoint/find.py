"""Which checkpoint is meant by a folder and a tag, and what to say where there is none that is whole."""

from __future__ import annotations

from pathlib import Path

from zero.checkpoint.folder import INDEX, LATEST, latest, read_index, tags
from zero.checkpoint.index import Damaged, Index


def whole_ones(folder: Path) -> list[str]:
    """The tags in a folder that can be loaded as far as their indices and the sizes of files tell, oldest first."""
    found = []
    for tag in tags(folder):
        try:
            read_index(folder / tag)
        except (Damaged, OSError):
            continue
        found.append(tag)
    return found


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
        others = ", ".join(f"'{other}'" for other in whole_ones(folder)) or "none"
        raise Damaged(f"{asked}: {error}. Whole checkpoints there: {others}; pass one of them as `tag`") from None


def _check_kind(folder: Path) -> None:
    """Raise for a folder that holds something else to be loaded than tags."""
    if (folder / INDEX).exists():
        raise Damaged(f"{folder} is itself a checkpoint; load_checkpoint('{folder.parent}', tag='{folder.name}')")
    if any(folder.glob("*.safetensors")):
        raise Damaged(
            f"{folder} holds weights and no checkpoint; zero.load_weights(engine, '{folder}') takes them into an "
            "engine or a module"
        )
