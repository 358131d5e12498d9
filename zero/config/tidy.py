"""One name for each key: aliases and old names are replaced, `"auto"` and null are taken out.

Null counts as not given where the default is nothing, such as 0 or false; elsewhere it could mean the default or its
opposite, and stays for the check to refuse.
"""

from collections.abc import Mapping
from typing import Any

from zero.config.errors import dotted
from zero.config.file import File
from zero.config.keys import aliases, hint, section_of
from zero.config.values import Section
from zero.config.zero_section import ZeroOptimization

_FREE = ("params",)  # objects that are passed on to other code, to which null may mean something
_ZERO = "zero_optimization"


def is_auto(value: Any) -> bool:
    """Whether another program, such as Accelerate, is to fill this in."""
    return isinstance(value, str) and value == "auto"


def _says_auto(value: Any, model: type[Section], name: Any) -> bool:
    """Whether "auto" is one of the values of the key, and so nothing that another program was to fill in."""
    field = model.model_fields.get(name)
    words = field.json_schema_extra if field is not None and isinstance(field.json_schema_extra, dict) else {}
    return is_auto(value) and "auto" in (*words.get("enum", ()), *words.get("examples", ()))


def _is_nothing(model: type[Section], name: Any) -> bool:
    """Whether what a key has by default is a section, or the same as nothing."""
    field = model.model_fields.get(name)
    if field is None or field.is_required() or section_of(field.annotation) is not None:
        return True
    return not field.get_default(call_default_factory=True)


class Tidy:
    """The values of a file under one name each, and what was noticed on the way.

    `values` uses the field names of the models; `written(path)` gives a path as the user wrote it. `autos` are the
    paths, in those names, of what is to be filled in.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.autos: list[tuple] = []
        self._written: dict[tuple, tuple] = {}
        self.values = self._section(values, File, (), ())
        self._old_zero_keys()
        aio = self.values.get("aio") if isinstance(self.values, dict) else None
        if isinstance(aio, dict) and "thread_count" in aio:
            self.warnings.append(
                "aio: 'thread_count' has no effect, here as in DeepSpeed; write aio.intra_op_parallelism for workers"
            )

    def written(self, path: tuple) -> tuple:
        """`path` as the user wrote it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._written:
                return (*self._written[path[:length]], *path[length:])
        return path

    def _section(self, values: Any, model: type[Section], path: tuple, written: tuple) -> Any:
        if not isinstance(values, Mapping):
            return values  # the check that follows says what was wanted
        known, section = aliases(model), {}
        for key, value in values.items():
            name, at = known.get(key, key), (*written, key)
            if model is File and name not in model.model_fields:
                self.warnings.append(f"unknown top-level key {str(key)!r} is ignored{hint(str(key), model)}")
                continue
            if name in section:
                both = f"{dotted(self.written((*path, name)))} and {dotted(at)}"
                self.errors.append(f"{both}: two names of one key; keep {dotted((*path, name))}")
                continue
            self._written[(*path, name)] = at
            if is_auto(value) and not _says_auto(value, model, name):
                self.autos.append((*path, name))
            elif value is not None or not _is_nothing(model, name):
                section[name] = self._value(value, model, name, (*path, name), at)
        return section

    def _value(self, value: Any, model: type[Section], name: Any, path: tuple, written: tuple) -> Any:
        field = model.model_fields.get(name)
        inner = section_of(field.annotation) if field else None
        if inner is ZeroOptimization and isinstance(value, bool):
            self.warnings.append(f"{_ZERO}: true and false are old; write {{'stage': {int(value)}}}")
            return {"stage": int(value)}
        if inner is not None:
            return self._section(value, inner, path, written)
        return self._free(value, path, handed_on=name in _FREE)

    def _free(self, value: Any, path: tuple, handed_on: bool) -> Any:
        """An object whose keys are not ours, without what counts as not given."""
        if not isinstance(value, Mapping):
            return value
        if handed_on:  # nothing reads the others
            self.autos += [(*path, key) for key, inner in value.items() if is_auto(inner)]
        return {
            key: self._free(inner, (*path, key), handed_on)
            for key, inner in value.items()
            if not is_auto(inner) and (handed_on or inner is not None)
        }

    def _old_zero_keys(self) -> None:
        zero = self.values.get(_ZERO) if isinstance(self.values, dict) else None
        if not isinstance(zero, dict):
            return
        self._renamed(zero, "stage3_gather_fp16_weights_on_model_save", ("stage3_gather_16bit_weights_on_model_save",))
        self._renamed(zero, "cpu_offload", ("offload_optimizer", "device"))
        self._renamed(zero, "cpu_offload_param", ("offload_param", "device"))
        if zero.pop("cpu_offload_use_pin_memory", None) is not None:
            self.warnings.append(f"{_ZERO}: 'cpu_offload_use_pin_memory' is old and has no effect")

    def _renamed(self, zero: dict, old: str, new: tuple[str, ...]) -> None:
        """Move an old key to where it belongs now; only `true` and `false` mean something there."""
        if old not in zero:
            return
        at, name = f"{_ZERO}.{old}", dotted((_ZERO, *new))
        value = zero.pop(old)
        if new[0] in zero:
            self.errors.append(f"{at} and {dotted((_ZERO, new[0]))}: an old and a new name of one key; keep the new")
        elif value not in (0, 1):
            self.errors.append(f"{at}: got {value!r}, wanted true or false")
        else:
            self.warnings.append(f"{_ZERO}: {old!r} is old; write {name}")
            self._written[(_ZERO, *new)] = (_ZERO, old)
            zero[new[0]] = bool(value) if len(new) == 1 else {new[1]: "cpu" if value else "none"}
