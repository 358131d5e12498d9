"""The JSON Schema of a config file, so that an editor completes and checks it."""

import ast
import inspect
import itertools
from typing import Any

from zero.config.file import File
from zero.config.keys import sections
from zero.config.optimizers import ARGUMENTS
from zero.config.unavailable import Idle, Unavailable
from zero.config.values import Section


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file, with the other names of keys, and `"auto"` as a value of any key."""
    schema = File.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for model in sections().values():
        _complete(schema if model is File else schema["$defs"][model.__name__], model)
    _add_arguments(schema)
    # A top-level key that is not ours is a warning only, as other programs keep theirs in the same file.
    schema["additionalProperties"] = True
    return schema


def _complete(shape: dict[str, Any], model: type[Section]) -> None:
    """Give a section's schema what pydantic does not know: descriptions, "auto", and other names."""
    properties, texts = shape["properties"], descriptions(model)
    for name, field in properties.items():
        properties[name] = _or_auto({"description": texts[name], **field})
    for alias, name in model.ALIASES.items():
        properties[alias] = {**properties[name], "description": f"Another name of {name}."}


def _add_arguments(schema: dict[str, Any]) -> None:
    """Let the type of the optimizer say what its params are, where its arguments are known."""
    choices = []
    for model in dict.fromkeys(ARGUMENTS.values()):
        shape = model.model_json_schema(ref_template="#/$defs/{model}")
        shapes = {**shape.pop("$defs", {}), model.__name__: shape}
        for part in sections(model).values():
            if part.__name__ not in schema["$defs"]:
                _complete(shapes[part.__name__], part)
                schema["$defs"][part.__name__] = shapes[part.__name__]
        # Names in any case, as the check takes them.
        pattern = "|".join("".join(f"[{c.upper()}{c}]" for c in kind) for kind in ARGUMENTS if ARGUMENTS[kind] is model)
        choices.append(
            {
                "if": {"properties": {"type": {"pattern": f"^({pattern})$"}}},
                "then": {"properties": {"params": _or_auto({"$ref": f"#/$defs/{model.__name__}"})}},
            }
        )
    schema["$defs"]["Optimizer"]["allOf"] = choices


def descriptions(model: type[Section]) -> dict[str, str]:
    """The description of each field: the string that follows it in the source, or what its mark says.

    Pydantic would read the sources when the classes are made, which every program that imports them would wait for.
    """
    texts = {
        name: mark.description
        for name, field in model.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, Unavailable | Idle)
    }
    for home in reversed(model.__mro__[: model.__mro__.index(Section)]):
        (body,) = ast.parse(inspect.getsource(home)).body
        for field, text in itertools.pairwise(body.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(written))):
                    texts[name] = inspect.cleandoc(written)
    return texts


def _or_auto(shape: dict[str, Any]) -> dict[str, Any]:
    notes = {key: shape[key] for key in ("title", "description", "default") if key in shape}
    if "description" in notes:
        notes["description"] = " ".join(notes["description"].split())
    rest = {key: value for key, value in shape.items() if key not in notes}
    if not rest or (rest.get("type") == "string" and "enum" not in rest):
        return shape  # a string of any kind may be "auto" already
    return {**notes, "anyOf": [rest, {"const": "auto"}]}
