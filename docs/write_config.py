"""Writes docs/config.md from the sections of the configuration; tests/docs/test_generated.py says when it is old."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zero.config.file import File, sections
from zero.config.optimizers import ARGUMENTS
from zero.config.schema import descriptions
from zero.config.unavailable import Idle, Unavailable
from zero.config.values import DTYPES, Section

PAGE = Path(__file__).parent / "config.md"
DTYPE_NAMES = [name for names in DTYPES.values() for name in names]
HEAD = """# Config

The JSON that `zero.initialize(config=...)` takes: a path, or a dict. The keys are DeepSpeed's, and those under `zero`
our own. A typo inside a section is an error that names the key you meant; all that is wrong is said at once. `zero
schema` prints the JSON Schema of the file, with which an editor completes and checks it. Comments are allowed. A dtype
is `"fp32"`, `"fp16"` or `"bf16"`, or torch's name of one.

Of `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` any two give the third: the
first is the product of the other two and the number of ranks.

```json
{
  "train_batch_size": 32,
  "train_micro_batch_size_per_gpu": 8,
  "optimizer": { "type": "AdamW", "params": { "lr": 1e-3, "weight_decay": 0.1 } },
  "scheduler": { "type": "WarmupLR", "params": { "warmup_num_steps": 10 } },
  "gradient_clipping": 1.0,
  "bf16": { "enabled": true },
  "zero_optimization": { "stage": 3 }
}
```

This page is written by `docs/write_config.py`. Keys of DeepSpeed that are refused or have no effect are at the end.
[What of DeepSpeed works here](deepspeed.md) says why, and what else differs.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The text of the page."""
    properties = _properties()
    parts, refused, idle = [HEAD], [], []
    for title, model in _titles():
        rows, texts = [], descriptions(model)
        for name, field in model.model_fields.items():
            shape, marks = properties[model.__name__][name], {type(mark) for mark in field.metadata}
            where = f"`{title.strip('`')}.{name}`" if title.startswith("`") else f"`{name}`"
            if Idle in marks:
                idle.append(where)
            elif Unavailable in marks and not _is_for_use(model, name):
                refused.append(where)
            elif not any("$ref" in option for option in _options(shape)):
                rows.append(f"| `{name}` | {_kind(shape)} | {_default(shape)} | {_text(texts[name])} |")
        if rows:
            about = f"{model.__doc__.strip()}\n\n" if title.startswith("`") else "\n"
            table = ["| key | value | default | |", "|---|---|---|---|", *rows]
            parts.append(f"## {title}\n{about}" + "\n".join(table) + "\n")
    for title, names in ("Errors once they are switched on", refused), ("Accepted without effect", idle):
        parts.append(f"## {title}\n\n{', '.join(sorted(names))}\n")
    return "\n".join(parts)


def _titles() -> list[tuple[str, type[Section]]]:
    """Each section once: that of the file, those in it, and what optimizers take as their `params`."""
    found = [(f"`{'.'.join(path)}`" if path else "The top level", model) for path, model in sections().items()]
    kinds: dict[type[Section], list[str]] = {}
    for kind, model in ARGUMENTS.items():
        kinds.setdefault(model, []).append(kind)
    found += [(f"`optimizer.params` of {' and '.join(names)}", model) for model, names in kinds.items()]
    inner = {part: path for model in kinds for path, part in sections(model, ("optimizer", "params")).items()}
    return found + [(f"`{'.'.join(path)}`", part) for part, path in inner.items() if part not in kinds]


def _is_for_use(model: type[Section], name: str) -> bool:
    """Whether a key, something in which is marked, is one of use itself: it has a description of its own."""
    mark = next(mark for mark in model.model_fields[name].metadata if isinstance(mark, Unavailable))
    return descriptions(model)[name] != mark.description


def _properties() -> dict[str, dict[str, Any]]:
    """The keys of each section as pydantic has them, by the name of its class."""
    shapes: dict[str, Any] = {}
    for model in (File, *ARGUMENTS.values()):
        schema = model.model_json_schema()
        shapes |= {model.__name__: schema, **schema.get("$defs", {})}
    return {name: shape.get("properties", {}) for name, shape in shapes.items()}


def _options(shape: dict[str, Any]) -> list[dict[str, Any]]:
    """What a key may be, but for null."""
    return [option for option in shape.get("anyOf", [shape]) if option.get("type") != "null"]


def _kind(shape: dict[str, Any]) -> str:
    return " or ".join(dict.fromkeys(_one(option) for option in _options(shape)))


def _one(option: dict[str, Any]) -> str:
    if option.get("enum") == DTYPE_NAMES:
        return "a dtype"
    if "const" in option:
        return f'`"{option["const"]}"`'
    if "enum" in option:
        return ", ".join(f'`"{value}"`' for value in option["enum"])
    words = {"boolean": "true or false", "array": "list", "object": "object", "string": "text"}
    kind = words.get(option.get("type", ""), option.get("type", "any"))
    if "prefixItems" in option:
        return "two numbers"
    low, high = option.get("minimum"), option.get("maximum")
    if low is not None:
        kind += f" from {low:,} to {high:,}" if high is not None else f" of at least {low:,}"
    return kind


def _default(shape: dict[str, Any]) -> str:
    value = shape.get("default")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}" if value < 2**60 else "no limit"
    return "" if value in (None, {}, []) else f"`{json.dumps(value)}`"


def _text(written: str) -> str:
    return " ".join(written.split()).replace("|", r"\|")


if __name__ == "__main__":
    main()
