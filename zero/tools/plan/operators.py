"""`zero plan --trace`: the operators that a step runs, the most costly first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from zero.sizes.cost import ModelCost, Operator, total


def operator_lines(cost: ModelCost, by_unit: bool = False) -> Iterator[str]:
    """A table of all operators, or one for each unit: for one sample, forward and backward together."""
    if by_unit:
        for name, operators in cost.operators.items():
            yield from ("", f"{name or '<root>'}:", *_table(operators))
        return
    yield from _table(total(chain.from_iterable(cost.operators.values())))


def _table(operators: Iterable[Operator]) -> Iterator[str]:
    operators = [each for each in operators if not each.name.startswith("empty")]  # those compute nothing
    found = sorted(operators, key=lambda each: (-each.flops, -each.nbytes, each.name))
    width = max((len(each.name) for each in found), default=8) + 2
    yield f"{'operator':<{width}}{'times':>10}{'GFLOP':>18}{'MB given':>18}"
    for each in found:
        yield f"{each.name:<{width}}{each.count:>10,}{each.flops / 1e9:>18,.3f}{each.nbytes / 1e6:>18,.3f}"
