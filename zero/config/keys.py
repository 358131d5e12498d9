"""Every key of a config: its path, its other names, and its mark."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args

from zero.config.errors import dotted, nearest
from zero.config.file import File
from zero.config.unavailable import Idle, Unavailable
from zero.config.values import Section

_Mark = TypeVar("_Mark", Idle, Unavailable)


def section_of(annotation: Any) -> type[Section] | None:
    """The `Section` behind a field's annotation, `| None` or not."""
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def sections(model: type[Section] = File, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], type[Section]]:
    """Every section of the file by its path; the file itself is `()`."""
    by_path = {path: model}
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            by_path |= sections(inner, (*path, name))
    return by_path


def aliases(model: type[Section]) -> Mapping[str, str]:
    """The other names of a section's fields."""
    return getattr(model, "ALIASES", {})


def names(model: type[Section]) -> list[str]:
    """The keys of a section: its fields, and the other names they go by."""
    return [*model.model_fields, *aliases(model)]


@functools.cache
def unavailable() -> dict[str, Unavailable]:
    """The keys that are an error once they are switched on, by their dotted paths."""
    return {f"{path}.{mark.at}" if mark.at else path: mark for path, mark in _marked(Unavailable)}


@functools.cache
def idle() -> dict[str, Idle]:
    """The keys that are accepted and change nothing, by their dotted paths."""
    return dict(_marked(Idle))


def _marked(kind: type[_Mark]) -> Iterator[tuple[str, _Mark]]:
    for path, model in sections().items():
        for name, field in model.model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, kind):
                    yield dotted((*path, name)), mark


def moves_only(path: tuple[str, ...]) -> bool:
    """Whether a key says at most what moves when, so that its default gives the same numbers in the same places."""
    name = dotted(path)
    return name.startswith("zero_optimization.stage3_") or name in idle() or path[0] in idle()


@functools.cache
def _homes() -> dict[str, list[tuple[str, ...]]]:
    homes: dict[str, list[tuple[str, ...]]] = {}
    for path, model in sections().items():
        for name in names(model):
            homes.setdefault(name, []).append(path)
    return homes


def hint(key: str, model: type[Section]) -> str:
    """What a user who wrote the unknown `key` inside `model` may have meant, as the end of a sentence."""
    homes = _homes().get(key, [])
    if len(homes) == 1:
        return f"; it belongs in {dotted(homes[0])!r}" if homes[0] else "; it belongs at the top level"
    near = nearest(key, names(model))
    if near is not None:
        return f"; did you mean {near!r}?"
    if len(model.model_fields) <= 12:
        return f"; known keys: {', '.join(model.model_fields)}"
    return "; `zero schema` lists the known keys"
