"""Python values as JSON and tensors, and back, exactly; nothing that is decoded can run code.

What JSON has stands as it is. What it lacks is an object whose first key begins with "$":

    {"$tuple": [...]}, also "$set", "$frozenset", "$size" (torch.Size)
    {"$dict": [[key, value], ...]}: keys that are no text, or begin with "$"; also "$ordered" (OrderedDict), "$counter"
    {"$float": "inf"}, {"$dtype": "float32"}, {"$device": "cuda:0"}
    {"$tensor": key}: a tensor of that name; with "dtype" and "shape" where a file may lack the dtype and it is bytes
    {"$array": key, "dtype": "<u4", "shape": [...]} and {"$scalar": "<f8", "bytes": hex}: of NumPy
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zero.checkpoint.consistency import DEEPEST
from zero.checkpoint.safe_file import NAMES

Json = Any
WANTED = "wanted JSON values and tensors"

_SEQUENCES = {tuple: "$tuple", torch.Size: "$size"}
_SETS = {set: "$set", frozenset: "$frozenset"}
_MAPPINGS = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}


def encode(value: Any, what: str) -> tuple[Json, dict[str, torch.Tensor]]:
    """`value` as something that `json` writes and reads unchanged, and the tensors that it names, copies on the CPU.

    `what` names the value in errors, and its tensors: "<what>/0", "<what>/1", ... A tensor that stands in several
    places is one. Raises ValueError that names every place at which something stands that has no plain form.
    """
    run = _Encoder(what)
    encoded = run.encode(value, what)
    if run.offences:
        raise ValueError("\n".join(run.offences))
    return encoded, run.tensors


def decode(value: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `encode` was given; its tensors are those of `tensors`. Raises ValueError for a form that it never makes."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    form = next(iter(value), "")
    if not form.startswith("$"):
        return {key: decode(item, tensors) for key, item in value.items()}
    try:
        return _DECODERS[form](value, tensors)
    except Exception as error:  # whatever torch, NumPy or a container says of another value
        raise ValueError(
            f"no value that encode() has made: {str(value)[:200]} ({type(error).__name__}: {error})"
        ) from None


def as_json(value: Any) -> Json:
    """`value` as far as JSON has it, and text for all else: to be looked up, not to be read back."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    plain = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)


class _Encoder:
    """One call of `encode`."""

    def __init__(self, what: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.offences: list[str] = []
        self._what = what
        self._names: dict[int, str] = {}  # of tensors, by id
        self._around: set[int] = set()  # ids of the containers that are being encoded

    def encode(self, value: Any, path: str) -> Json:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is torch.dtype:
            return {"$dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"$device": str(value)}
        if kind in (list, *_SEQUENCES, *_SETS, *_MAPPINGS):
            return self._container(value, path)
        if kind in (torch.Tensor, nn.Parameter):
            return self._tensor(value, path)
        numpy = sys.modules.get("numpy")
        if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            return self._numpy(value, path)
        return self._refuse(path, _kind_of(value))

    def _container(self, value: Any, path: str) -> Json:
        if id(value) in self._around:
            return self._refuse(path, f"a {type(value).__name__} that contains itself")
        if len(self._around) >= DEEPEST:
            return self._refuse(path, f"more than {DEEPEST} containers inside each other")
        self._around.add(id(value))
        try:
            if type(value) in _MAPPINGS:
                return self._mapping(value, path)
            items = value
            if type(value) in _SETS:
                items = [item for item in value if self._is_key(item, f"{path}: element {item!r:.80}")]
            encoded = [self.encode(item, f"{path}[{index}]") for index, item in enumerate(items)]
            form = _SEQUENCES.get(type(value)) or _SETS.get(type(value))
            return encoded if form is None else {form: sorted(encoded, key=repr) if type(value) in _SETS else encoded}
        finally:
            self._around.discard(id(value))

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Json:
        keys = [key for key in value if self._is_key(key, f"{path}: key {key!r:.80}")]
        items = {key: self.encode(value[key], f"{path}[{key!r:.80}]") for key in keys}
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in items):
            return items
        return {_MAPPINGS[type(value)]: [[self.encode(key, path), item] for key, item in items.items()]}

    def _is_key(self, key: Any, path: str) -> bool:
        """Whether `key` is found again under what is decoded; an offence where not."""
        if type(key) in (tuple, frozenset):
            return all(self._is_key(part, path) for part in key)
        if key is None or type(key) in (bool, int, str, torch.dtype, torch.device, torch.Size):
            return True
        if type(key) is float and key == key:  # NaN equals nothing, so it is never found
            return True
        self._refuse(path, "NaN" if type(key) is float else _kind_of(key), "wanted text, numbers, or tuples of these")
        return False

    def _tensor(self, value: torch.Tensor, path: str) -> Json:
        if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
            layout = str(value.layout).removeprefix("torch.")
            kind = "quantized" if value.is_quantized else "nested" if value.is_nested else layout
            return self._refuse(path, f"a {'meta' if value.is_meta else kind} tensor")
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"{self._what}/{len(self.tensors)}"
            plain = value.detach().resolve_conj().resolve_neg()
            plain = plain.to("cpu", copy=True, memory_format=torch.contiguous_format)
            self.tensors[name] = plain if plain.dtype in NAMES else plain.reshape(-1).view(torch.uint8)
        if value.dtype in NAMES:
            return {"$tensor": name}
        return {"$tensor": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}

    def _numpy(self, value: Any, path: str) -> Json:
        dtype = value.dtype
        if dtype.hasobject or dtype.kind == "V":
            return self._refuse(path, f"a NumPy {type(value).__name__} of dtype {dtype}")
        if type(value).__name__ != "ndarray":
            return {"$scalar": dtype.str, "bytes": value.tobytes().hex()}
        name = f"{self._what}/{len(self.tensors)}"
        raw = bytearray(value.tobytes())
        self.tensors[name] = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return {"$array": name, "dtype": dtype.str, "shape": list(value.shape)}

    def _refuse(self, path: str, got: str, wanted: str = WANTED) -> None:
        self.offences.append(f"{path}: got {got}; {wanted}")


def _kind_of(value: Any) -> str:
    name = value.__name__ if isinstance(value, type) else type(value).__name__
    return f"the class {name}" if isinstance(value, type) else f"a{'n' if name[0] in 'aeiouAEIOU' else ''} {name}"


def _sequence(kind: Callable[[Iterable[Any]], Any], form: str) -> Callable[[dict, Mapping], Any]:
    return lambda value, tensors: kind([decode(item, tensors) for item in value[form]])


def _mapping(kind: type, form: str) -> Callable[[dict, Mapping], Any]:
    return lambda value, tensors: kind({decode(k, tensors): decode(item, tensors) for k, item in value[form]})


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def _tensor(value: dict, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor = tensors[value["$tensor"]]
    if "dtype" not in value:
        return tensor
    dtype = _dtype(value["dtype"])
    # Copied, as bytes out of a file need not lie where the dtype may begin.
    found = tensor.clone().view(dtype) if tensor.numel() else torch.empty(0, dtype=dtype)
    return found.reshape(value["shape"])


def _numpy_dtype(name: str) -> Any:
    import numpy

    if not re.fullmatch(r"[<>|=][biufcSUmM]\d+(\[\w+\])?", name):
        raise ValueError(f"{name!r} is no dtype of plain numbers or text")
    return numpy.dtype(name)


def _array(value: dict, tensors: Mapping[str, torch.Tensor]) -> Any:
    import numpy

    raw = tensors[value["$array"]].numpy().tobytes()
    return numpy.frombuffer(raw, dtype=_numpy_dtype(value["dtype"])).reshape(value["shape"]).copy()


def _scalar(value: dict, tensors: Mapping[str, torch.Tensor]) -> Any:
    import numpy

    dtype = _numpy_dtype(value["$scalar"])
    raw = bytes.fromhex(value["bytes"])
    return numpy.frombuffer(raw, dtype=dtype)[0] if dtype.itemsize else dtype.type()


_DECODERS: dict[str, Callable[[dict, Mapping[str, torch.Tensor]], Any]] = {
    **{form: _sequence(kind, form) for kind, form in (_SEQUENCES | _SETS).items()},
    **{form: _mapping(kind, form) for kind, form in _MAPPINGS.items()},
    "$float": lambda value, tensors: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[value["$float"]],
    "$dtype": lambda value, tensors: _dtype(value["$dtype"]),
    "$device": lambda value, tensors: torch.device(value["$device"]),
    "$tensor": _tensor,
    "$array": _array,
    "$scalar": _scalar,
}
