"""A run folder read back, whole or the newest lines; `zero.monitor.run_folder` says what stands in one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]


class NoRunFolder(ValueError):
    """The folder is not there, or holds no files of ranks."""


@dataclass(frozen=True)
class WrittenRank:
    """The events of one rank as written, and how many lines could not be read, such as one that SIGKILL cut short."""

    number: int
    events: tuple[Event, ...]
    torn: int

    def of(self, *kinds: str) -> list[Event]:
        """Those of these kinds, oldest first."""
        return [event for event in self.events if event["event"] in kinds]

    def steps(self) -> list[Event]:
        """One per step, in their order, with what was logged of it later; of one that was taken again the newest."""
        newest = {event["step"]: event for event in self.of("step")}
        for late in self.of("log"):
            if (event := newest.get(late["step"])) is not None:
                newest[late["step"]] = {**event, "values": {**event.get("values", {}), **late["values"]}}
        return [newest[step] for step in sorted(newest)]

    def last(self, *kinds: str, having: str = "event") -> Event:
        """The newest event of these kinds that has such a value; empty where there is none."""
        return next((event for event in reversed(self.events) if event["event"] in kinds and having in event), {})


@dataclass(frozen=True)
class WrittenRun:
    """facts: what run.json says, empty where it cannot be read. ranks: in order of their number."""

    folder: Path
    facts: Mapping[str, Any]
    ranks: tuple[WrittenRank, ...]


def read(folder: str | os.PathLike[str], newest: int | None = None) -> WrittenRun:
    """Read a run folder, at any time; `newest`: of each rank the last so many bytes only.

    Raises NoRunFolder, and OSError for files that may not be read.
    """
    path = Path(folder)
    names = ((re.fullmatch(r"rank-(\d+)\.jsonl", each.name), each) for each in path.glob("rank-*"))
    files = {int(found[1]): each for found, each in names if found}
    if not files:
        there = "holds no rank-N.jsonl" if path.is_dir() else "is no folder"
        raise NoRunFolder(
            f'{path} {there}; wanted the folder that a run writes: "zero": {{"report": "DIR"}} in its configuration'
        )
    try:
        facts = json.loads((path / "run.json").read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, json.JSONDecodeError):
        facts = {}
    world = facts.get("world", max(files) + 1)  # of the newest run in the folder; others may have had more ranks
    return WrittenRun(
        path, facts, tuple(_rank(number, files[number], newest) for number in sorted(files) if number < world)
    )


def _rank(number: int, path: Path, newest: int | None) -> WrittenRank:
    with path.open("rb") as file:
        if newest is not None and path.stat().st_size > newest:
            file.seek(-newest, os.SEEK_END)
            file.readline()  # the rest of a line
        lines = file.read().split(b"\n")
    events = [event for line in lines if line.strip() for event in [_event(line)]]
    whole = tuple(event for event in events if event)
    return WrittenRank(number, whole, len(events) - len(whole))


def _event(line: bytes) -> Event:
    """Of a line whose writer was killed, and on which the next run goes on, what that one wrote."""
    try:
        event = json.loads(line[max(0, line.rfind(b'{"event"')) :])
    except ValueError:  # also for bytes that are no text
        return {}
    return event if isinstance(event, dict) and "event" in event else {}
