"""Which cases of a parametrized test belong to `make test`, and which are `long`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def longer(*cases: Any) -> list[Any]:
    """These cases, marked `long`; a case of several arguments is a tuple."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]


def each_once(*axes: Sequence[Any]) -> list[Any]:
    """The product of the axes. A few cases that have every value of every axis are short, the others `long`."""
    count = max(map(len, axes))
    short = {tuple(index % len(axis) for axis in axes) for index in range(count)}
    numbers = itertools.product(*(range(len(axis)) for axis in axes))
    cases = [(one, tuple(axis[at] for axis, at in zip(axes, one, strict=True))) for one in numbers]
    return [pytest.param(*case, marks=() if one in short else pytest.mark.long) for one, case in cases]
