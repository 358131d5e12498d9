"""The JSON Schema of a config file, so that an editor completes and checks it."""

from typing import Any

from zero.config.file import File
from zero.config.optimizers import ARGUMENTS
from zero.config.tidy import aliases, sections


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file, with the other names of keys, and `"auto"` as a value of any key."""
    schema = File.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for model in sections().values():
        properties = (schema if model is File else schema["$defs"][model.__name__])["properties"]
        for name, shape in list(properties.items()):
            properties[name] = _or_auto(shape)
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
        for name, found in {**shape.pop("$defs", {}), model.__name__: shape}.items():
            if name not in schema["$defs"]:
                found["properties"] = {key: _or_auto(of) for key, of in found["properties"].items()}
                schema["$defs"][name] = found
        # Names in any case, as the check takes them.
        pattern = "|".join("".join(f"[{c.upper()}{c}]" for c in kind) for kind in ARGUMENTS if ARGUMENTS[kind] is model)
        choices.append(
            {
                "if": {"properties": {"type": {"pattern": f"^({pattern})$"}}},
                "then": {"properties": {"params": _or_auto({"$ref": f"#/$defs/{model.__name__}"})}},
            }
        )
    schema["$defs"]["Optimizer"]["allOf"] = choices


def _or_auto(shape: dict[str, Any]) -> dict[str, Any]:
    notes = {key: shape[key] for key in ("title", "description", "default") if key in shape}
    if "description" in notes:
        notes["description"] = " ".join(notes["description"].split())
    rest = {key: value for key, value in shape.items() if key not in notes}
    if not rest or (rest.get("type") == "string" and "enum" not in rest):
        return shape  # a string of any kind may be "auto" already
    return {**notes, "anyOf": [rest, {"const": "auto"}]}
