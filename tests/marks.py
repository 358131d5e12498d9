"""Which cases of a parametrized test belong to `make test`, which are `long`, and what a test needs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Skip the test where one of these libraries is not installed."""
    missing = [name for name in libraries if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def longer(*cases: Any) -> list[Any]:
    """These cases, marked `long`; a case of several arguments is a tuple."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]


def each_once(*axes: Sequence[Any]) -> list[Any]:
    """A few cases that have every value of every axis; and as many `long` ones, in which the values meet others."""
    count = max(map(len, axes))

    def diagonal(shift: int) -> list[tuple[int, ...]]:
        return [tuple((index + place * shift) % len(axis) for place, axis in enumerate(axes)) for index in range(count)]

    short = dict.fromkeys(diagonal(0))
    more = [each for each in dict.fromkeys(diagonal(1)) if each not in short]
    cases = [(each, each in short) for each in (*short, *more)]
    return [
        pytest.param(*(axis[at] for axis, at in zip(axes, each, strict=True)), marks=() if quick else pytest.mark.long)
        for each, quick in cases
    ]
