"""The kinds of value a key can have. Each one checks a value and says in one phrase what it wanted."""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
)
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

    # Compiling all sections would take longer than the rest of an import: each is compiled when it is first checked.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    ALIASES: ClassVar[Mapping[str, str]] = {}  # other names of fields


def absent(section: type[Section]) -> Any:
    """The field of a section that may be absent, and then has all its defaults.

    Defaults need no check, so a section that no file has is never compiled. It is frozen, so all files share one.
    """
    return Field(default_factory=functools.cache(section.model_construct))


def refuse(wanted: str) -> PydanticCustomError:
    """The error to raise in a validator for a value that is not as `wanted`."""
    return PydanticCustomError(WANTED, "{wanted}", {"wanted": wanted})


def _kind(annotation: Any, wanted: str) -> Any:
    """Values that pydantic accepts for `annotation`; others are refused in one phrase."""

    def check(value: Any, by_pydantic: Callable[[Any], Any]) -> Any:
        try:
            return by_pydantic(value)
        except ValidationError:
            raise refuse(wanted) from None

    return Annotated[annotation, WrapValidator(check)]


def _never(*kinds: type) -> BeforeValidator:
    """Refuses values that pydantic would convert, such as true and "1" to a number."""

    def check(value: Any) -> Any:
        if isinstance(value, kinds):
            raise ValueError(type(value).__name__)
        return value

    return BeforeValidator(check)


def _range(low: float | None, high: float | None) -> str:
    return "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"


def integer(low: int | None = None, high: int | None = None, multiple_of: int | None = None) -> Any:
    """An integer in a range. A float without a fraction is accepted, too: some files write 5e8."""
    noun = "an integer" if multiple_of is None else f"a multiple of {multiple_of}"
    exact = Annotated[int, Field(ge=low, le=high, multiple_of=multiple_of), _never(bool, str)]
    return _kind(exact, noun + _range(low, high))


def number(low: float | None = None, high: float | None = None, text: bool = False) -> Any:
    """A finite number in a range; with `text` also as a string, such as "128"."""
    never = _never(bool) if text else _never(bool, str)
    return _kind(Annotated[float, Field(ge=low, le=high, allow_inf_nan=False), never], "a number" + _range(low, high))


def _word(meaning: dict[str, str]) -> Any:
    """One of the keys of `meaning`, in any case; its value there is stored."""
    wanted = "one of " + ", ".join(repr(name) for name in dict.fromkeys(meaning.values()))

    def check(value: Any) -> Any:
        if not isinstance(value, str) or value.lower() not in meaning:
            raise refuse(wanted)
        return meaning[value.lower()]

    return Annotated[str, Field(json_schema_extra={"enum": list(meaning)}), BeforeValidator(check)]


def choice(*names: str) -> Any:
    """One of a few words, in any case; stored in lower case."""
    return _word({name: name for name in names})


def _nbytes(value: Any) -> Any:
    wanted = "a number of bytes above 0, such as 1073741824 or '1 GiB'"
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower())
        factor = _NBYTES.get(match[2] or "b") if match else None
        value = None if factor is None else float(match[1]) * factor
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 1):
        raise refuse(wanted)
    return int(value)


def _method(value: str) -> str:
    if value.lower() not in ("parameters", "uniform", "time", "best") and not value.startswith("type:"):
        raise ValueError(value)
    return "parameters" if value == "best" else value  # DeepSpeed's word


def _infinite(value: float) -> float:
    if value != math.inf:
        raise ValueError(value)
    return value


Bool = _kind(Annotated[bool, _never(str)], "true or false")
_one_or_more = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Texts = _kind(Annotated[list[str], _one_or_more], "a list of strings")
Settings: TypeAlias = Annotated[dict, Field(default_factory=dict)]  # whose keys are not checked here
_Beta = Annotated[float, Field(ge=0, lt=1), _never(bool, str)]
Betas = _kind(tuple[_Beta, _Beta], "a list of two numbers in [0, 1)")
Nbytes: TypeAlias = Annotated[int | str, BeforeValidator(_nbytes)]
_Whole = Annotated[int, _never(bool, str, float)]
Counts = _kind(list[Annotated[_Whole, Field(ge=0)]], "a list of integers of at least 0")
StepRange = _kind(tuple[Annotated[_Whole, Field(ge=1)], _Whole], "a list of two integers of at least 1, as [10, 12]")
Int = integer()
Count = integer(0)
Positive = integer(1)
Parts = _kind(dict[str, Positive | list[Positive]], "numbers of parts, or lists of their rows, as {'*.qkv.weight': 3}")
Fused = _kind(list[_Whole | list[Annotated[_Whole, Field(ge=1)]]], "a list such as [3, -1] or [[64, 16, 16], -1]")
PositiveOrAuto = Annotated[
    _kind(Positive | Literal["auto"], "an integer of at least 1"), Field(json_schema_extra={"examples": [2, "auto"]})
]
_Method = Annotated[str, AfterValidator(_method)]
Partition = _kind(
    list[Positive] | _Method, "'parameters', 'uniform', 'time', 'type:regex' or a list of numbers of layers, as [5, 7]"
)
Places = _kind(dict[str, Count], "numbers of stages by names of modules, as {'layer3': 1}")
Steps = _kind(Positive | Annotated[float, AfterValidator(_infinite)], "an integer of at least 1, or inf")
Number = number()
NotNegative = number(0)
Scale = number(0, text=True)
Fraction = number(0, 1)
FractionOrAuto = Annotated[
    _kind(Fraction | Literal["auto"], "a number from 0 to 1, or 'auto'"),
    Field(json_schema_extra={"examples": [1.0, "auto"]}),
]
Every = _kind(Annotated[bool, _never(str)] | Count, "true, false or an integer of at least 0")
Seconds = number(1)
Dtype = _word({alias: name for name, aliases in DTYPES.items() for alias in aliases})
