"""The promise: between two operators that disagree exactly what is said is moved, once, and the log says it once."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
from marks import longer
from operator_models import WHOLE, Products, batch, config, engine_of
from ranks import listening
from torch.distributed.tensor.debug import CommDebugMode

import zero
from zero.parallel.operators.placed import Moved

GIVEN, COLUMNS = (4, 1), (1, 4)
GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"

# What the first operator gives, the second wants, what moves in the forward, and in the backward.
PAIRS: dict[str, tuple[Any, Any, tuple[str, ...], tuple[str, ...]]] = {
    "rows to rows": ((GIVEN, WHOLE), (GIVEN, WHOLE), (), ()),
    "rows to whole": ((GIVEN, WHOLE), (WHOLE, COLUMNS), (GATHER,), (SCATTER,)),
    "rows to columns": ((GIVEN, WHOLE), (COLUMNS, (4, 1)), (GATHER,), (GATHER,)),
    "columns to columns": ((WHOLE, COLUMNS), (COLUMNS, (4, 1)), (), ()),
    "columns to rows": ((WHOLE, COLUMNS), (GIVEN, WHOLE), (GATHER,), (GATHER,)),
    "parts to rows": ((COLUMNS, (4, 1)), (GIVEN, WHOLE), (SCATTER,), (GATHER,)),
    "parts to columns": ((COLUMNS, (4, 1)), (COLUMNS, (4, 1)), (SCATTER,), (GATHER,)),
    "parts to whole": ((COLUMNS, (4, 1)), (WHOLE, COLUMNS), (REDUCE,), (REDUCE,)),
    "whole to rows": ((WHOLE, WHOLE), (GIVEN, WHOLE), (), (GATHER,)),
    "whole to whole": ((WHOLE, WHOLE), (WHOLE, WHOLE), (), ()),
    "half the ranks": (((1, 2), (2, 1)), (GIVEN, WHOLE), (SCATTER,), (GATHER,)),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("pair", ["rows to whole", "half the ranks", *longer(*PAIRS)])
def test_what_moves_between_two_products(pair: str) -> None:
    first, second, forward, backward = PAIRS[pair]
    engine = engine_of(Products((first,), (second,)))
    mesh = engine._training.forms.operators.mesh
    own = [each.chunk(4)[engine.global_rank] for each in batch(0)]
    with CommDebugMode() as seen:
        loss = engine(*own)
    assert between(mesh.counts, False) == list(forward)
    assert seen.get_total_counts() == all_of(mesh.counts)
    mesh.counts.clear()
    with CommDebugMode() as seen:
        engine.backward(loss)
    assert between(mesh.counts, True) == list(backward)
    assert seen.get_total_counts() == all_of(mesh.counts)
    engine.destroy()


@pytest.mark.ranks(4)
def test_a_cut_contraction_and_a_relu_cut_in_rows() -> None:
    """One reduce-scatter between them."""
    engine = engine_of(Products(((COLUMNS, (4, 1)),), between=((GIVEN,),)))
    loss = engine(*(each.chunk(4)[engine.global_rank] for each in batch(0)))
    mesh = engine._training.forms.operators.mesh
    assert between(mesh.counts, False, "into between") == [SCATTER]
    engine.backward(loss)
    assert between(mesh.counts, True, "into between") == [GATHER]
    engine.destroy()


@pytest.mark.ranks(4)
def test_the_log_says_each_once_and_the_summary_counts_all() -> None:
    json = config() | {"comms_logger": {"enabled": True}}
    engine = zero.initialize(model=Products(((GIVEN, WHOLE),), ((WHOLE, COLUMNS),)), config=json)[0]
    with listening(logging.INFO) as said:
        for number in range(3):
            engine.backward(engine(*(each.chunk(4)[engine.global_rank] for each in batch(number))))
            engine.step()
    said = [line for line in said if "into two" in line]
    there, back = "(cut 0) -> (whole) by all-gather", "(partial) -> (cut 0) in the backward by reduce-scatter"
    assert said == ([f"zero.shard: into two: {way}" for way in (there, back)] if engine.global_rank == 0 else [])
    mesh = engine._training.forms.operators.mesh
    assert between(mesh.counts, False) == [GATHER] * 3
    assert engine.log_comms_summary()["redistribution"].count == sum(mesh.counts.values())
    engine.destroy()


def between(counts: Counter[Moved], backward: bool, where: str = "into two") -> list[str]:
    moved = [each for each in counts.elements() if each.where == where and each.backward is backward]
    return [word for each in moved for word in each.collectives]


def all_of(counts: Counter[Moved]) -> int:
    return sum(len(each.collectives) for each in counts.elements())
