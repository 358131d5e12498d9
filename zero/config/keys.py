"""Every key of a config: its path, and its other names."""

import functools
from typing import Any, get_args

from zero.config.errors import dotted, nearest
from zero.config.file import File
from zero.config.values import Section


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


def names(model: type[Section]) -> list[str]:
    """The keys of a section: its fields, and the other names they go by."""
    return [*model.model_fields, *model.ALIASES]


@functools.cache
def _homes() -> dict[str, list[tuple[str, ...]]]:
    homes: dict[str, list[tuple[str, ...]]] = {}
    for path, model in sections().items():
        for name in names(model):
            homes.setdefault(name, []).append(path)
    return homes


def hint(key: str, model: type[Section]) -> str:
    """The key that the user may have meant by the unknown `key` inside `model`, as the end of a sentence."""
    homes = _homes().get(key, [])
    if len(homes) == 1:
        return f"; it belongs in {dotted(homes[0])!r}" if homes[0] else "; it belongs at the top level"
    near = nearest(key, names(model))
    if near is not None:
        return f"; did you mean {near!r}?"
    if len(model.model_fields) <= 12:
        return f"; known keys: {', '.join(model.model_fields)}"
    return "; `zero schema` lists the known keys"
