"""The JSON Schema of a config file, so that an editor completes and checks it."""

import ast
import inspect
import itertools
import textwrap
from typing import Any

from zero.config.file import File
from zero.config.keys import aliases, sections
from zero.config.optimizers import ARGUMENTS
from zero.config.unavailable import Unavailable
from zero.config.values import Section


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file, with the other names of keys, and `"auto"` as a value of any key."""
    schema = File.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for model in sections().values():
        properties = (schema if model is File else schema["$defs"][model.__name__])["properties"]
        texts = descriptions(model)
        for name, shape in list(properties.items()):
            properties[name] = _or_auto(texts.get(name, {}) | shape)
        for alias, name in aliases(model).items():
            properties[alias] = {**properties[name], "description": f"Another name of {name}."}
    _add_arguments(schema)
    # A top-level key that is not ours is a warning only, as other programs keep theirs in the same file.
    schema["additionalProperties"] = True
    return schema


def _add_arguments(schema: dict[str, Any]) -> None:
    """Let the type of the optimizer say what its params are, where its arguments are known."""
    choices = []
    for model in dict.fromkeys(ARGUMENTS.values()):
        shape = model.model_json_schema(ref_template="#/$defs/{model}")
        texts = {of.__name__: descriptions(of) for of in sections(model).values()}
        for name, definition in {**shape.pop("$defs", {}), model.__name__: shape}.items():
            if name not in schema["$defs"]:
                of_each = {key: texts[name].get(key, {}) | of for key, of in definition["properties"].items()}
                definition["properties"] = {key: _or_auto(of) for key, of in of_each.items()}
                schema["$defs"][name] = definition
        # Names in any case, as the check takes them.
        pattern = "|".join("".join(f"[{c.upper()}{c}]" for c in kind) for kind in ARGUMENTS if ARGUMENTS[kind] is model)
        choices.append(
            {
                "if": {"properties": {"type": {"pattern": f"^({pattern})$"}}},
                "then": {"properties": {"params": _or_auto({"$ref": f"#/$defs/{model.__name__}"})}},
            }
        )
    schema["$defs"]["Optimizer"]["allOf"] = choices


def descriptions(model: type[Section]) -> dict[str, dict[str, str]]:
    """The description of each field: the string that follows it in the source, or why it is not available.

    Pydantic would read the sources when the classes are made, which every program that imports them would wait for.
    """
    texts: dict[str, dict[str, str]] = {}
    for name, field in model.model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, Unavailable):
                texts[name] = {"description": f"An error once it is switched on: {mark.message}."}
    for home in reversed(model.__mro__):
        if not issubclass(home, Section):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(home))).body
        lines = body.body if isinstance(body, ast.ClassDef) else []
        for field, text in itertools.pairwise(lines):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            value = text.value.value if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) else None
            if isinstance(value, str):
                texts[field.target.id] = {"description": inspect.cleandoc(value)}
    return texts


def _or_auto(shape: dict[str, Any]) -> dict[str, Any]:
    notes = {key: shape[key] for key in ("title", "description", "default") if key in shape}
    if "description" in notes:
        notes["description"] = " ".join(notes["description"].split())
    rest = {key: value for key, value in shape.items() if key not in notes}
    if not rest or (rest.get("type") == "string" and "enum" not in rest):
        return shape  # a string of any kind may be "auto" already
    return {**notes, "anyOf": [rest, {"const": "auto"}]}
