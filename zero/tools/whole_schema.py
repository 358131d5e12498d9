"""The JSON Schema of what only torch knows in a config file: its optimizers, and the learning-rate schedules."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter

from zero.config import json_schema
from zero.config.schema import Shape, or_auto
from zero.optim import lr
from zero.optim.make import NOT_ELEMENTWISE, torch_classes


def whole_schema() -> Shape:
    """That of a config file, with every `type` of optimizer and scheduler that there is, and their `params`."""
    optimizers = {name: kind for name, kind in torch_classes().items() if name not in NOT_ELEMENTWISE}
    schedules = {name: getattr(lr, name, None) or getattr(torch.optim.lr_scheduler, name) for name in lr.schedules()}
    by_section = {"optimizer": optimizers, "scheduler": schedules}
    return json_schema(
        {section: {name: _params(kind) for name, kind in kinds.items()} for section, kinds in by_section.items()}
    )


def _params(kind: type) -> Shape:
    """The arguments of a class without its first, which are the parameters or the optimizer."""
    known = get_type_hints(kind) if issubclass(kind, lr.Schedule) else {}
    arguments = list(inspect.signature(kind).parameters.values())[1:]
    properties = {each.name: or_auto(_value(known.get(each.name), each.default)) for each in arguments}
    required = [each.name for each in arguments if each.default is each.empty]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(kind: Any, default: Any) -> Shape:
    """What an argument may be: of this kind, else as far as its default says."""
    if kind is not None and kind is not Any:
        return TypeAdapter(kind).json_schema() | ({} if default is inspect.Parameter.empty else {"default": default})
    types = {bool: "boolean", int: "number", float: "number", str: "string", tuple: "array"}
    shape: Shape = {"type": types[type(default)]} if type(default) in types else {}
    return shape | ({"default": default} if shape else {})
