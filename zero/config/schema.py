"""The JSON Schema of a config file, so that an editor completes and checks it."""

import ast
import inspect
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zero.config.file import File, section_of, sections
from zero.config.instead import OLD
from zero.config.optimizers import ARGUMENTS
from zero.config.unavailable import Idle, Unavailable, enabled, given
from zero.config.values import Section

Shape = dict[str, Any]  # a JSON Schema, or a part of one


def json_schema(others: Mapping[str, Mapping[str, Shape]] = MappingProxyType({})) -> Shape:
    """The JSON Schema of a config file, with the other names of keys, and `"auto"` as a value of any key.

    others: for the sections optimizer and scheduler, the schema of `params` by `type`, of the classes that need torch
    to be known: see `zero.tools.whole_schema`. Without them any type passes, and only the arguments of our own
    optimizers are checked.
    """
    schema = File.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for model in sections().values():
        _complete(schema if model is File else schema["$defs"][model.__name__], model)
    ours = _arguments(schema["$defs"])
    _say_params(schema["$defs"]["Optimizer"], ours, others.get("optimizer", {}))
    _say_params(schema["$defs"]["Scheduler"], {}, others.get("scheduler", {}))
    schema["properties"]["$schema"] = {"type": "string", "description": "Where an editor finds this schema."}
    for old, new in OLD.items():
        about = {"description": f"Old; write {new}.device.", "deprecated": True}
        schema["$defs"]["ZeroOptimization"]["properties"][old] = or_auto({"type": "boolean", **about})
    # Most unknown top-level keys are only a warning: other programs keep theirs in the same file.
    schema["additionalProperties"] = True
    return schema


def _complete(shape: Shape, model: type[Section]) -> None:
    """Add to a section's schema what pydantic does not know: descriptions, "auto", and other names."""
    properties, texts = shape["properties"], descriptions(model)
    for name, field in properties.items():
        for mark in model.model_fields[name].metadata:  # what is not available has the value that switches it off
            if isinstance(mark, Unavailable) and (mark.on is enabled or mark.at == "enabled"):
                field["properties"] = {"enabled": or_auto({"const": False})}
            elif isinstance(mark, Unavailable) and mark.on is given and field.get("type") == "boolean":
                field["const"] = False
        properties[name] = or_auto({"description": texts[name], **field})
    for alias, name in model.ALIASES.items():
        properties[alias] = {**properties[name], "description": f"Another name of {name}."}


def _arguments(known: dict[str, Shape]) -> dict[str, Shape]:
    """The schema of the arguments of each of our optimizers; the schemas that they refer to are added to `known`."""
    for model in dict.fromkeys(ARGUMENTS.values()):
        shape = model.model_json_schema(ref_template="#/$defs/{model}")
        shapes = {**shape.pop("$defs", {}), model.__name__: shape}
        for part in sections(model).values():
            if part.__name__ not in known:
                _complete(shapes[part.__name__], part)
                known[part.__name__] = shapes[part.__name__]
    return {kind: {"$ref": f"#/$defs/{model.__name__}"} for kind, model in ARGUMENTS.items()}


def _say_params(section: Shape, ours: Mapping[str, Shape], others: Mapping[str, Shape]) -> None:
    """Make the params of a section depend on its type. As in the check, the case of our own names is ignored."""
    any_case = {kind: "".join(f"[{c.upper()}{c}]" for c in kind) for kind in ours}
    kinds = {f"^{any_case[kind]}$": shape for kind, shape in ours.items()}
    kinds |= {f"^{kind}$": shape for kind, shape in others.items() if kind.lower() not in ours}
    section["allOf"] = []
    for kind, shape in kinds.items():
        then: Shape = {"properties": {"params": or_auto(shape)}}
        if shape.get("required"):
            then["required"] = ["params"]
        section["allOf"].append({"if": {"properties": {"type": {"pattern": kind}}}, "then": then})
    if others:
        names = {kind.lower(): kind for kind in (*ours, *others, "auto")}
        of_ours = {"pattern": f"^({'|'.join(any_case.values())})$"} if ours else False
        section["properties"]["type"] |= {"if": of_ours, "else": {"enum": [names[key] for key in sorted(names)]}}


def descriptions(model: type[Section]) -> dict[str, str]:
    """The description of each field: the string that follows it in the source, its mark's or its section's.

    Pydantic would read the sources when the classes are made, which would slow down every import.
    """
    texts = {}
    for name, field in model.model_fields.items():
        if (section := section_of(field.annotation)) is not None:
            texts[name] = inspect.getdoc(section)
        for mark in field.metadata:
            if isinstance(mark, Unavailable | Idle):
                texts[name] = mark.description
    for home in reversed(model.__mro__[: model.__mro__.index(Section)]):
        (body,) = ast.parse(inspect.getsource(home)).body
        for field, text in itertools.pairwise(body.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(written))):
                    texts[name] = inspect.cleandoc(written)
    return texts


def or_auto(shape: Shape) -> Shape:
    """A value of this shape, or "auto"; errors of other values are those of the shape alone."""
    notes = {key: shape[key] for key in ("title", "description", "default", "deprecated") if key in shape}
    if "description" in notes:
        notes["description"] = " ".join(notes["description"].split())
    words: list[Any] = []
    shapes: list[Shape] = []
    for one in _alternatives({key: value for key, value in shape.items() if key not in notes}):
        if one.get("type") == "null":
            words.append(None)
        elif "enum" in one or "const" in one:
            words += one.get("enum", [one.get("const")])
        elif one:
            shapes.append(one)
    if not words and (not shapes or shapes == [{"type": "string"}]):
        return {**notes, **shape}  # anything, or any text, may be "auto" already
    if shapes == [{"type": "boolean"}]:
        words, shapes = [True, False, *words], []
    words = list(dict.fromkeys([*words, "auto"]))
    if not shapes:
        return {**notes, "enum": words}
    return {**notes, "if": {"not": {"enum": words}}, "then": _merged(shapes)}


def _alternatives(shape: Shape) -> list[Shape]:
    return [part for one in shape["anyOf"] for part in _alternatives(one)] if "anyOf" in shape else [shape]


def _merged(shapes: list[Shape]) -> Shape:
    """One schema for shapes of different types: a keyword other than `type` applies to values of one type only."""
    if len(shapes) == 1:
        return shapes[0]
    types = [shape["type"] for shape in shapes]
    merged = {key: value for shape in shapes for key, value in shape.items()}
    return {**merged, "type": [one for one in types if one != "integer" or "number" not in types]}
