"""Reads a config from a path or a dict: hjson syntax, and keys that are given twice in one object."""

import copy
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero.config.errors import ConfigError, dotted, show

# Errors of Python's JSON parser in other words, with the remedy.
_BROKEN = {
    "Expecting ',' delimiter": "a comma or a closing bracket is missing here",
    "Expecting ':' delimiter": "a ':' is missing here, between a key and its value",
    "Expecting value": 'this is no value; JSON has numbers, true, false, null, "text", [...] and {...}',
    "Expecting property name enclosed in double quotes": "a key in double quotes is missing here",
    "Unterminated string starting at": "the text that begins here has no closing quote",
    "Extra data": "the object ends before this; take away what follows, or a closing bracket too many",
}
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|[\[\]{}]')
EXPECTED = "the path of a JSON or hjson file, or a dict"


class Source(NamedTuple):
    """The values of a config, and their source."""

    values: dict[str, Any]  # a copy; the caller may change it
    name: str | None  # the path as given, None for a dict
    errors: list[str]  # keys that are given twice


class _Object(dict):
    """A parsed object that remembers keys given twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__()
        self.repeats: list[tuple[str, Any, Any]] = []  # key, first value, second value
        for key, value in pairs:
            if key in self:
                self.repeats.append((key, self[key], value))
            else:
                self[key] = value


def read(source: str | os.PathLike | Mapping) -> Source:
    """The values of a file or a dict, and the keys that are given twice in it."""
    repeats: list[str] = []
    if isinstance(source, Mapping):
        return Source(_plain(source, (), repeats), None, repeats)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError([f"config: got {show(source)} ({type(source).__name__}), wanted {EXPECTED}"])
    source = os.fsdecode(source)
    values = _parse(_text(source), source)
    if not isinstance(values, _Object):
        raise ConfigError([f"got {show(values)}, wanted an object {{...}} at the top"], source)
    return Source(_plain(values, (), repeats), source, repeats)


def _text(source: str) -> str:
    if not (path := Path(source)).exists():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError([f"config: there is no file {source!r}{where}; wanted {EXPECTED}"])
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError([f"config: cannot read {source!r}: {why}; wanted {EXPECTED}"]) from error


def _parse(text: str, name: str) -> Any:
    if not text.strip():
        raise ConfigError(["the file is empty, wanted an object {...}"], name)
    try:
        # Strict JSON first: Infinity, which json.dump writes, is a quoteless string to hjson.
        return json.loads(text, object_pairs_hook=_Object)
    except json.JSONDecodeError as error:
        strict = error
    if name.lower().endswith((".yaml", ".yml")):
        raise ConfigError(["the file is YAML; wanted JSON or hjson: an object {...} with keys in double quotes"], name)
    import hjson

    try:
        return hjson.loads(text, object_pairs_hook=_Object)
    except hjson.HjsonDecodeError as error:
        raise ConfigError([_problem(text, strict, error)], name) from error


def _problem(text: str, strict: json.JSONDecodeError, error: Any) -> str:
    """Where the text stops being JSON, or hjson if that got further by more than a quoteless word, such as True."""
    if error.pos >= len(text.rstrip()) and (opened := _open(text)):
        line, bracket = opened[-1]
        missing = "".join({"{": "}", "[": "]"}[each] for _, each in reversed(opened))
        return (
            f"line {len(text.splitlines())}: the file ends too early: '{missing}' is missing, the first of it for the "
            f"'{bracket}' of line {line}"
        )
    as_hjson = strict.doc[strict.pos :].lstrip().startswith(("#", "//", "/*"))
    first = error if as_hjson or error.pos <= strict.pos else strict
    return f"line {first.lineno} column {first.colno}: {_BROKEN.get(first.msg, first.msg)}"


def _open(text: str) -> list[tuple[int, str]]:
    """The brackets that are never closed, each with its line; empty if other brackets are closed than were opened."""
    opened: list[tuple[int, str]] = []
    for found in _TOKEN.finditer(text):
        bracket = found[0]
        if bracket in "{[":
            opened.append((text.count("\n", 0, found.start()) + 1, bracket))
        elif bracket in "}]" and (not opened or opened.pop()[1] != {"}": "{", "]": "["}[bracket]):
            return []
    return opened


def _plain(value: Any, path: tuple, repeats: list[str]) -> Any:
    """A copy made of plain dicts and lists, so that changes do not reach the caller's.

    Adds a line to `repeats` for each key that is given twice in the object at `path`.
    """
    if isinstance(value, _Object):
        where = f"{dotted(path)}: " if path else ""
        for key, first, second in value.repeats:
            repeats.append(f"{where}key {key!r} is given twice ({show(first)}, then {show(second)}); keep one")
    if isinstance(value, Mapping):
        return {key: _plain(inner, (*path, key), repeats) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, (*path, index), repeats) for index, inner in enumerate(value)]
    return copy.copy(value)
