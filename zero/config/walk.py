"""One walk over the values of a file: it renames aliases, checks each key, and collects problems."""

import contextlib
from collections.abc import Mapping
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from zero.config.errors import dotted, show
from zero.config.file import File, section_of
from zero.config.instead import OLD, hint, slip
from zero.config.unavailable import Idle, Unavailable, lookup
from zero.config.values import WANTED, Section
from zero.config.zero_section import ZeroOptimization

_COMMENTS = ("$schema", "_", "//", "#")  # the schema's place, for editors; and what takes the place of a comment
_PASSED_ON = ("params",)  # objects that are passed to other code, for which null may have a meaning
_OBJECT = "an object {...}"
_WANTED = {"string_type": "a string", "dict_type": _OBJECT, "model_type": _OBJECT, "model_attributes_type": _OBJECT}


class Walk:
    """The problems found on the way. Paths are as the user wrote them.

    autos: paths of "auto" that another program should have filled in, and that a default cannot replace.
    idle: the keys in the file that have no effect, by the reason.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.autos: list[tuple] = []
        self.idle: dict[str, list[str]] = {}

    def section(self, values: Any, model: type[Section], path: tuple = ()) -> Any:
        """The section without its wrong keys, so that later checks can go on; None if nothing is left of it.

        Null counts as not given if the default is empty, such as 0 or false; elsewhere it could mean the default
        or its opposite, and is refused.
        """
        if model is ZeroOptimization:
            values = self._renamed(values, path)
        if not isinstance(values, Mapping):
            self.errors.append(f"{dotted(path)}: got {show(values)}, wanted {_OBJECT}")
            return None
        kept: dict[Any, Any] = {}
        written: dict[Any, Any] = {}  # the keys as the user wrote them, by the names of the fields
        for key, value in values.items():
            name, here = model.ALIASES.get(key, key), (*path, key)
            field = model.model_fields.get(name)
            if name in written:
                both = f"{dotted((*path, written[name]))} and {dotted(here)}"
                self.errors.append(f"{both}: two names of one key; keep {dotted((*path, name))}")
                continue
            if field is None and str(key).startswith(_COMMENTS):
                continue
            if field is None and model is File:
                if (meant := slip(str(key), value)) is not None:
                    self.errors.append(f"unknown top-level key {str(key)!r}{meant}")
                else:
                    self.warnings.append(f"unknown top-level key {str(key)!r} is ignored{hint(str(key), model)}")
                continue
            written[name] = key
            if _is_auto(value) and not _says_auto(field):
                # What affects at most when parameters move has a default that gives the same numbers.
                idle = field is not None and any(isinstance(mark, Idle) for mark in field.metadata)
                if field is None or not (idle or name.startswith("stage3_")):
                    self.autos.append(here)
            elif value is not None or not _is_nothing(field):
                inner = section_of(field.annotation) if field is not None else None
                if inner is None:
                    kept[name] = self._free(value, here, name in _PASSED_ON)
                elif get_origin(field.annotation) is list and isinstance(value, list):
                    each = [self.section(one, inner, (*here, at)) for at, one in enumerate(value)]
                    kept[name] = [one for one in each if one is not None]
                elif get_origin(field.annotation) is list:
                    self.errors.append(f"{dotted(here)}: got {show(value)}, wanted a list of objects")
                elif (checked := self.section(value, inner, here)) is not None:
                    kept[name] = checked
        return self._checked(kept, model, path, written)

    def _checked(self, values: dict[Any, Any], model: type[Section], path: tuple, written: dict[Any, Any]) -> Any:
        try:
            checked = model.model_validate(values)
        except ValidationError as error:
            checked = None
            for problem in error.errors(include_url=False):
                self.errors.append(problem_line(problem, model, path, written))
                values.pop(problem["loc"][0], None)
            with contextlib.suppress(ValidationError):  # a key that is missing now was wrong before
                checked = model.model_validate(values)
        for name, value in values.items():
            for mark in model.model_fields[name].metadata:
                where = dotted((*path, written[name]))
                if isinstance(mark, Idle):
                    self.idle.setdefault(mark.why, []).append(where)
                elif isinstance(mark, Unavailable) and mark.on(lookup(value, mark.at) if mark.at else value):
                    self.errors.append(f"{where}{mark.at and '.'}{mark.at}: {mark.message}")
        return checked

    def _free(self, value: Any, path: tuple, passed_on: bool) -> Any:
        """An object whose keys are not ours, without the keys that count as not given."""
        if not isinstance(value, Mapping):
            return value
        if passed_on:  # nothing reads the others
            self.autos += [(*path, key) for key, inner in value.items() if _is_auto(inner)]
        return {
            key: self._free(inner, (*path, key), passed_on)
            for key, inner in value.items()
            if not _is_auto(inner) and (passed_on or inner is not None)
        }

    def _renamed(self, values: Any, path: tuple) -> Any:
        """The section `zero_optimization` with its old spellings replaced."""
        where = dotted(path)
        if isinstance(values, bool):
            self.warnings.append(f"{where}: true and false are old; write {{'stage': {int(values)}}}")
            return {"stage": int(values)}
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        for old, new in OLD.items():
            on = values.pop(old, None)
            if on is None:
                continue
            if new in values:
                self.errors.append(f"{where}.{old} and {where}.{new}: an old and a new name of one key; keep the new")
            elif on not in (0, 1):
                self.errors.append(f"{where}.{old}: got {show(on)}, wanted true or false")
            else:
                self.warnings.append(f"{where}: {old!r} is old; write {where}.{new}.device")
                values[new] = {"device": "cpu" if on else "none"}
        return values


def problem_line(problem: Any, model: type[Section], path: tuple, written: Mapping[Any, Any]) -> str:
    """Pydantic's problem in the section at `path`; `written` has the keys as they are in the file."""
    kind, value, inside = problem["type"], problem["input"], problem["loc"]
    path = (*path, *(written.get(part, part) for part in inside))
    for part in inside[:-1]:
        model = section_of(model.model_fields[part].annotation)
    if kind == "extra_forbidden":
        return f"{dotted(path[:-1])}: unknown key {str(path[-1])!r}{hint(str(path[-1]), model)}"
    if kind == "missing":
        return f"{dotted(path[:-1])}: {str(path[-1])!r} is missing"
    wanted = problem["ctx"]["wanted"] if kind == WANTED else _WANTED.get(kind)
    if wanted is None:
        return f"{dotted(path)}: got {show(value)}; {problem['msg']}"
    field = model.model_fields.get(inside[-1]) if inside else None
    if value is None and field is not None and isinstance(field.default, bool | int | float | str):
        wanted += f"; leave it out for {show(field.default)}"
    return f"{dotted(path)}: got {show(value)}, wanted {wanted}"


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _says_auto(field: FieldInfo | None) -> bool:
    """Whether "auto" is one of the key's own values, not a placeholder for another program."""
    words = field.json_schema_extra if field is not None and isinstance(field.json_schema_extra, dict) else {}
    return "auto" in (*words.get("enum", ()), *words.get("examples", ()))


def _is_nothing(field: FieldInfo | None) -> bool:
    """Whether a key's default is a section, or empty."""
    if field is None or field.is_required() or section_of(field.annotation) is not None:
        return True
    return not field.get_default(call_default_factory=True)
