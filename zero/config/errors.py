"""The error that lists everything that is wrong with a config, and how it shows values and paths."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

_SHOWN = 60  # characters of a value that are worth showing in an error line


class ConfigError(ValueError):
    """Everything that is wrong with one config: one line each, naming the JSON path.

    `errors` holds the lines; `source` is the path of the file, or None for a dict.
    """

    def __init__(self, errors: Sequence[str], source: str | None = None) -> None:
        self.errors = tuple(errors)
        self.source = source
        lines = "\n".join(self.errors)
        super().__init__(f"in {source}:\n{lines}" if source else lines)

    def __reduce__(self) -> tuple[Any, ...]:  # pickle would rebuild the exception from its message alone
        return type(self), (self.errors, self.source), self.__dict__


def show(value: Any) -> str:
    """A value as the user would write it in the file, shortened."""
    if isinstance(value, str):
        text = repr(value)
    else:
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 4] + " ..."


def dotted(path: Iterable[Any]) -> str:
    """`("optimizer", "params", "betas", 1)` as `optimizer.params.betas[1]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text
