"""The promise: the exact norm has the same bits for any cut and order, is right to 1e-12, and finds inf and NaN."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import each_once
from models import Net, batch, config, make_net
from torch import nn

import zero
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


def fp32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


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


def test_a_whole_chunk_of_largest_elements_fits():
    values = torch.full((norms.CHUNK + 3,), 1.0 - 2.0**-24)
    assert norm([values]) == pytest.approx(math.sqrt(norms.CHUNK + 3) * (1.0 - 2.0**-24), rel=1e-15)


@pytest.mark.parametrize("scale", [2.0**-149, 1.0, fp32(3e38)])
def test_the_ends_of_fp32(scale):
    assert norm([torch.full((4,), scale)]) == 2 * scale


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


def trained(stage: int, spoilt: tuple[float, ...]) -> list[Any]:
    """Norms of a clean step and of one in whose gradient the last rank has `spoilt`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = Spoilt()
    engine, *_ = zero.initialize(model=model, config=config(stage, world, zero={"reduce": "tree"}))
    tokens, targets = batch(0, 2 * world)
    found = []
    part = slice(2 * rank, 2 * rank + 2)
    for values in ((), spoilt):
        loss = engine(tokens[part], targets[part], values if rank == world - 1 else ())
        engine.backward(loss)
        engine.step()
        found += [engine.get_global_grad_norm(), engine.was_step_applied()]
    return found


@pytest.mark.parametrize(("stage", "spoilt"), each_once([0, 1, 3], [(math.inf,), (math.nan,), (math.inf, math.nan)]))
def test_what_is_not_finite_skips_the_step(pool, stage, spoilt):
    wanted = math.nan if math.nan in spoilt else math.inf
    for good, applied, bad, spoilt_applied in pool.run(2, trained, stage, spoilt):
        assert math.isfinite(good)
        assert applied
        assert not spoilt_applied
        assert bad == wanted or (math.isnan(bad) and math.isnan(wanted))


def test_it_is_the_norm(pool):
    plain = make_net()
    plain(*batch(0, 4)).backward()
    true = math.sqrt(
        math.fsum(value * value for p in plain.parameters() for value in p.grad.view(-1).double().tolist())
    )
    assert {result[0] for result in pool.run(2, trained, 3, ())} == {pool.run(2, trained, 0, ())[1][0]}
    assert pool.run(2, trained, 3, ())[0][0] == pytest.approx(true, rel=1e-6)
