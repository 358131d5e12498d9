"""The kinds of value a key can have. Each one checks for itself and says in one phrase what it wanted."""

import functools
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

WANTED = "wanted"  # the type of every error raised here; its context holds the phrase
DTYPES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}
_NBYTES = {"b": 1} | {
    f"{letter}{between}b": base**power
    for power, letter in enumerate("kmgt", 1)
    for between, base in (("", 1000), ("i", 1024))
}


class Section(BaseModel):
    """A JSON object whose keys are all known: an unknown one is an error."""

    # Compiling all sections would take longer than the rest of an import: each one is when it is first checked.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    ALIASES: ClassVar[Mapping[str, str]] = {}  # other names of fields


def absent(section: type[Section]) -> Any:
    """The field of a section that may be absent, and then has all its defaults.

    Defaults need no check, so a section that no file has is never compiled; it cannot change, so one serves all files.
    """
    return Field(default_factory=functools.cache(section.model_construct))


def refuse(wanted: str) -> PydanticCustomError:
    """The error of a value that is not what was `wanted`, to be raised in a validator."""
    return PydanticCustomError(WANTED, "{wanted}", {"wanted": wanted})


def _numeric(kind: type, noun: str, low: float | None, high: float | None, multiple_of: int = 0, text: bool = False):
    wanted = noun + ("" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}")
    types = int | float | str if text else int | float

    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, types):
            raise refuse(wanted)
        try:
            number = kind(value)
        except (ValueError, OverflowError):
            raise refuse(wanted) from None
        # A float without a fraction is an integer, too: JSON people write 5e8.
        exact = number == value if kind is int else math.isfinite(number)
        if not exact or (multiple_of and number % multiple_of):
            raise refuse(wanted)
        if (low is not None and number < low) or (high is not None and number > high):
            raise refuse(wanted)
        return number

    return Annotated[kind, Field(ge=low, le=high, multiple_of=multiple_of or None), BeforeValidator(check)]


def integer(low: int | None = None, high: int | None = None, multiple_of: int = 0) -> Any:
    """An integer in a range."""
    return _numeric(int, f"a multiple of {multiple_of}" if multiple_of else "an integer", low, high, multiple_of)


def number(low: float | None = None, high: float | None = None, text: bool = False) -> Any:
    """A finite number in a range; with `text` also as a string, such as "128"."""
    return _numeric(float, "a number", low, high, text=text)


def _word(meaning: dict[str, str]) -> Any:
    """One of the keys of `meaning`, in any case; kept as what it means."""
    wanted = "one of " + ", ".join(repr(name) for name in dict.fromkeys(meaning.values()))

    def check(value: Any) -> Any:
        if not isinstance(value, str) or value.lower() not in meaning:
            raise refuse(wanted)
        return meaning[value.lower()]

    return Annotated[str, Field(json_schema_extra={"enum": list(meaning)}), BeforeValidator(check)]


def choice(*names: str) -> Any:
    """One of a few words, in any case; kept in lower case."""
    return _word({name: name for name in names})


def _boolean(value: Any) -> Any:
    if value not in (0, 1):
        raise refuse("true or false")
    return bool(value)


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise refuse("a list of strings")
    return list(value)


def _pair(value: Any) -> Any:
    wanted = "a list of two numbers in [0, 1)"
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise refuse(wanted)
    for beta in value:
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < 1:
            raise refuse(wanted)
    return tuple(value)


def _fraction_or_auto(value: Any) -> Any:
    if isinstance(value, bool) or (value != "auto" and not (isinstance(value, int | float) and 0 <= value <= 1)):
        raise refuse("a number from 0 to 1, or 'auto'")
    return value


def _nbytes(value: Any) -> Any:
    wanted = "a number of bytes above 0, such as 1073741824 or '1 GiB'"
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower())
        factor = _NBYTES.get(match[2] or "b") if match else None
        value = None if factor is None else float(match[1]) * factor
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 1):
        raise refuse(wanted)
    return int(value)


def _steps(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in ("inf", "infinity"):
        return math.inf
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value != math.inf and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise refuse("an integer of at least 1, or inf")
    return value


Bool: TypeAlias = Annotated[bool, BeforeValidator(_boolean)]
Texts: TypeAlias = Annotated[list[str], BeforeValidator(_texts)]
Settings: TypeAlias = Annotated[dict, Field(default_factory=dict)]  # whose keys are not checked here
Betas: TypeAlias = Annotated[tuple[float, float], BeforeValidator(_pair)]
Nbytes: TypeAlias = Annotated[int | str, BeforeValidator(_nbytes)]
Steps: TypeAlias = Annotated[int | float, BeforeValidator(_steps)]
Int = integer()
Count = integer(0)
Positive = integer(1)
Number = number()
NotNegative = number(0)
Scale = number(0, text=True)
Fraction = number(0, 1)
FractionOrAuto: TypeAlias = Annotated[
    Fraction | Literal["auto"], Field(json_schema_extra={"examples": [1.0, "auto"]}), BeforeValidator(_fraction_or_auto)
]
Seconds = number(1)
Dtype = _word({alias: name for name, aliases in DTYPES.items() for alias in aliases})
