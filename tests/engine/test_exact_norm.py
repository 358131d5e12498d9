"""The promise: the exact norm has the same bits for any cut and order, is right to 1e-12, and finds inf and NaN."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import each_once
from models import Net, batch, make_net
from scenario import run, scenario
from torch import nn

from zero.optim import norm as norms

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
NEAR = st.floats(-2.0, 2.0, width=32)


def norm(parts: list[torch.Tensor]) -> float:
    """The norm as ranks find it that hold one part each."""
    bound = max(norms.largest_of([part]) for part in parts)
    if bound == 0:
        return 0.0
    exponent = math.frexp(bound)[1]
    return norms.norm_of(sum(norms.sum_of_squares([part], exponent) for part in parts), exponent)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(FLOATS | NEAR, min_size=1, max_size=60), data=st.data())
def test_no_cut_and_no_order_changes_it_and_it_is_right(values, data):
    whole = norm([torch.tensor(values)])
    # Exact: squares of fp32 fit fp64 but where they fall below its range, and there is always a larger one then.
    true = math.sqrt(math.fsum(value * value for value in values))
    assert whole == pytest.approx(true, rel=1e-12, abs=0)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=5)))
    shuffled = data.draw(st.permutations(values))
    parts = [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True)]
    assert norm([torch.tensor(part) for part in parts]) == whole


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000))
def test_chunks_and_wide_ranges_do_not_matter(seed):
    values = torch.randn(9000, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-20, 18, 9000)
    true = math.sqrt(math.fsum(value * value for value in values.double().tolist()))
    order = torch.randperm(9000, generator=torch.Generator().manual_seed(seed))
    cut = random.Random(seed).randrange(9000)
    assert norm([values]) == pytest.approx(true, rel=1e-12)
    assert norm([values[order][:cut], values[order][cut:]]) == norm([values])


def test_the_ends_of_fp32_and_a_whole_chunk_of_largest_elements():
    for scale in (2.0**-149, 1.0, torch.tensor(3e38).item()):
        assert norm([torch.full((4,), scale)]) == 2 * scale
    values = torch.full((norms.CHUNK + 3,), 1.0 - 2.0**-24)
    assert norm([values]) == pytest.approx(math.sqrt(norms.CHUNK + 3) * (1.0 - 2.0**-24), rel=1e-15)


class Spoilt(Net):
    """A Net with a parameter whose gradient is what the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(2))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, grad: tuple[float, ...] = ()) -> torch.Tensor:
        loss = super().forward(tokens, targets)
        for index, value in enumerate(grad):
            loss = loss + self.extra[index] * value - (self.extra[index] * value).detach()
        return loss


def spoil(values: tuple[float, ...], engine: Any, number: int, inputs: Any) -> torch.Tensor:
    """The last rank has these values in its gradient from the second step on."""
    spoilt = number > 0 and dist.get_rank() == dist.get_world_size() - 1
    engine.backward(loss := engine(*inputs, values if spoilt else ()))
    return loss


def applied(engine: Any, number: int) -> bool:
    return engine.was_step_applied()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "spoilt"), each_once([0, 1, 3], [(math.inf,), (math.nan,), (math.inf, math.nan)]))
def test_what_is_not_finite_skips_the_step(stage, spoilt):
    json = {"stage": stage, "zero": {"reduce": "tree"}}
    found = run(Spoilt, json, 2, loop=functools.partial(spoil, spoilt), watch=applied)
    good, bad = found.norms
    assert math.isfinite(good) and found.seen == [True, False]
    assert math.isnan(bad) if any(map(math.isnan, spoilt)) else bad == math.inf


def test_it_is_the_norm(pool):
    plain = make_net()
    plain(*batch(0, 4)).backward()
    squares = [value * value for p in plain.parameters() for value in p.grad.view(-1).double().tolist()]
    found = {
        record.norms[0]
        for stage in (0, 3)
        for record in scenario(pool, "dealt", {"stage": stage, "zero": {"reduce": "tree"}}, 2, 1)
    }
    assert len(found) == 1
    assert found.pop() == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-6)
