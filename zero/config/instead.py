"""What to write instead: of an old name the new one, of an unknown one what was most likely meant."""

import difflib
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from zero.config.errors import dotted
from zero.config.file import File, section_of, sections
from zero.config.values import Section

OLD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}  # flags, and sections with a device
# Sections that decide over numbers and memory: what was meant for them must not be ignored.
_DECISIVE = ("zero_optimization", "zero", "fp16", "bf16", "data_types", "torch_autocast", "activation_checkpointing")
_SAME = 0.86  # alike enough for a slip: finds gradient_clip, and leaves out tensor_parallel_size, which is of others


def nearest(key: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that `key` was most likely meant to be, or None; `cutoff` is how alike they must be, up to 1."""
    names = sorted(known)
    lowered = {name.lower(): name for name in reversed(names)}
    matches = difflib.get_close_matches(key.lower(), lowered, n=1, cutoff=cutoff)
    return lowered[matches[0]] if matches else None


def did_you_mean(key: str, known: Iterable[str]) -> str:
    """The end of a sentence about the unknown name `key`: the most likely known name, or a full stop."""
    near = nearest(key, known)
    return f"; did you mean '{near}'?" if near else "."


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


def slip(key: str, value: Any) -> str | None:
    """What was meant by an unknown top-level key, as the end of a sentence; None where it is another program's.

    An object need resemble the name of a section less, if it has a key of that. Names with dots are TRL's.
    """
    ours = {*names(File)}.union(*(names(_top_section(name)) for name in _DECISIVE))
    near = nearest(key, ours, _SAME if len(key) > 4 else 1.0) or ""
    homes = [] if "." in key else _homes().get(near, [])
    if () in homes:
        return f"; did you mean {near!r}?"
    if len(homes) == 1:
        at = dotted(homes[0])
        return f"; it belongs in {at!r}" if near == key else f"; did you mean {near!r} in {at!r}?"
    for name in (*_DECISIVE, "bfloat16", "optimizer", "scheduler") if isinstance(value, Mapping) else ():
        if nearest(key, [name]) and not {*names(_top_section(name))}.isdisjoint(value):
            return f"; did you mean {name!r}?"
    return None


def _top_section(name: str) -> type[Section]:
    return section_of(File.model_fields[File.ALIASES.get(name, name)].annotation)


def hint(key: str, model: type[Section]) -> str:
    """The key that the user may have meant by the unknown `key` inside `model`, as the end of a sentence."""
    homes = _homes().get(key, [])
    if homes == [()] and "enabled" in model.model_fields and _top_section(key) is model:
        return "; did you mean 'enabled'?"
    if len(homes) == 1:
        return f"; it belongs in {dotted(homes[0])!r}" if homes[0] else "; it belongs at the top level"
    near = nearest(key, names(model))
    if near is not None:
        return f"; did you mean {near!r}?"
    if len(model.model_fields) <= 12:
        return f"; known keys: {', '.join(model.model_fields)}"
    return "; `zero schema` lists the known keys"
