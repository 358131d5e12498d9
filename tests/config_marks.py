"""The keys of a config that are marked as not available, or as without effect, by their dotted paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zero.config.errors import dotted
from zero.config.file import sections
from zero.config.unavailable import Idle, Unavailable


def unavailable() -> dict[str, Unavailable]:
    """The keys that are an error once they are switched on."""
    return {f"{path}.{mark.at}" if mark.at else path: mark for path, mark in _marked(Unavailable)}


def idle() -> dict[str, Idle]:
    """The keys that are accepted and change nothing."""
    return dict(_marked(Idle))


def _marked(kind: type) -> Iterator[tuple[str, Any]]:
    for path, model in sections().items():
        for name, field in model.model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, kind):
                    yield dotted((*path, name)), mark
