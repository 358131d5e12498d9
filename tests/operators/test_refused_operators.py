"""The promise: a strategy that cannot be is an error that names the operator, what came and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from operator_models import ROWS, WHOLE, WIDTH, config, engine_of
from torch import nn
from torch.nn import functional as F

import zero
from zero.config import load
from zero.core import torch_private
from zero.parallel.operators.cutting import strategies_in
from zero.parallel.operators.strategy import plan_mesh, strategy_of


class Around(nn.Module):
    """A function of rows, behind a layer."""

    def __init__(self, function: Any, *strategy: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), zero.shard(function, *strategy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x)).square().mean()


@contextlib.contextmanager
def refused(model: nn.Module, text: str, rows: int = ROWS // 4, **section: Any) -> Iterator[None]:
    engine = engine_of(model, **section)
    with pytest.raises((ValueError, RuntimeError), match=text):
        engine(torch.randn(rows, WIDTH))
    dist.barrier()  # some find out seconds later, which an engine behind an exception would not wait for
    with torch.no_grad():  # all ranks are where they were
        assert engine.reduce(1.0) == 1
    engine.destroy()
    yield


def fails(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("of its own")


CASES: dict[str, tuple[Any, str]] = {
    "dims": ((torch.relu, ((4, 1, 1),)), r"function': \(4, 1, 1\) does not divide a tensor of shape \(8, 16\)"),
    "tensors": ((torch.relu, ((4, 1), (1, 1))), "called with 1 tensors, has 0 parameters"),
    "softmax of a dim that is cut": ((lambda x: x.softmax(1), ((1, 4),)), "'function': DTensor has no rule"),
    "dropout": ((F.dropout, ((1, 4),)), "'function' draws random numbers"),
    "a write into what is given": ((torch.relu_, ((1, 4),)), "writes into what it is given.*inplace=False"),
    "a rule that is wrong": ((lambda x: x.cumsum(-1), ((1, 4),)), "'function': DTensor has no rule.*those of one rank"),
    "an error of its own": ((fails, ((1, 4),)), "'function', of this rank's pieces: of its own"),
    "a result without rows": ((lambda x: x.t()[:3], ((1, 1),)), r"'function' gives \(3, 8\), of which 4 ranks"),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", list(CASES))
def test_what_an_operator_cannot_be_given(case: str) -> None:
    how, text = CASES[case]
    with refused(Around(*how), text):
        pass


@pytest.mark.ranks(4)
def test_attention_for_which_there_is_no_rule_on_a_cpu() -> None:
    def attention(x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(1, (4, 1, 4)).requires_grad_()
        return F.scaled_dot_product_attention(q, q, q)

    with refused(Around(attention, ((1, 4),)), "has no rule"):
        pass


@pytest.mark.ranks(4)
def test_batches_that_ranks_cannot_share() -> None:
    with refused(Around(torch.relu, ((4, 1),)), "leave the last batch out", rows=ROWS - 1, full_batch=True):
        pass
    with refused(Around(torch.relu, ((4, 1),)), "want equally many rows", rows=2 + dist.get_rank() // 3):
        pass


@pytest.mark.ranks(4)
def test_ranks_that_run_other_numbers_of_micro_batches() -> None:
    engine = zero.initialize(
        model=Around(torch.relu, ((4, 1),)), config=config(1) | {"managed_gradient_accumulation": False}
    )[0]
    with pytest.raises(RuntimeError, match=r"run \[1, 2, 2, 2\] micro-batches.*operators are cut over all of them"):
        for _ in range(min(dist.get_rank(), 1) + 1):
            engine.backward(engine(torch.randn(ROWS // 4, WIDTH)))
        engine.step()
    engine.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("full", [True, False])
def test_a_wrong_rule_is_found_by_check(full: bool) -> None:
    """None says that all ranks have the tensor whole; of these rows each has others."""
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    own = x if full else x.chunk(4)[dist.get_rank()]
    for strategy in (None, (4, 1)):
        engine = engine_of(Around(torch.tanh, (strategy,)), full_batch=full)
        found = engine.check((own,), steps=1, stages=(0, 3), accumulations=(1,))
        assert bool(found) is (strategy is not None)
        assert ("first in the gradient of 'layer.weight'" in str(found)) is (strategy is None)
        engine.destroy()


@pytest.mark.ranks(2)
def test_an_older_torch_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private, "VERSION", (2, 12))
        with pytest.raises(RuntimeError, match=r"operators with strategies want torch 2\.13"):
            engine_of(Around(torch.relu, ((2, 1),)))


@pytest.mark.ranks(2)
def test_more_pieces_than_ranks_and_names_of_nothing() -> None:
    with pytest.raises(ValueError, match=r"'function': \(\(4, 1\),\) -> None makes 4 pieces on 2 ranks"):
        engine_of(Around(torch.relu, ((4, 1),)))
    with pytest.raises(ValueError, match=r"zero.shard: \['fc9'\] name no module; there are \['layer'\]"):
        engine_of(Around(torch.relu, ((2, 1),)), shard={"fc9": [[2, 1]]})
    engine_of(Around(torch.relu, ((2, 1),))).destroy()


def test_pieces_that_are_none() -> None:
    for wrong in (4, "rows", [4], [[0, 1]], [["2"]], [[2.0]]):
        with pytest.raises(ValueError, match="wanted the pieces of each dim of each tensor"):
            zero.shard(torch.relu, wrong)
    with pytest.raises(ValueError, match="in 2 and in 4 pieces; both are to be cut alike"):
        plan_mesh(8, [strategy_of("f", torch.matmul, ((1, 2), (4, 1)), None)])


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize(
    "more",
    [
        *({"tensor_parallel": {"autotp_size": 2}}, {"sequence_parallel_size": 2}),
        *({"zero": {"reduce": "tree"}}, {"zero": {"mean": "tokens"}}),
    ],
)
def test_other_divisions_beside(more: dict[str, Any], by_hand: bool) -> None:
    model = Around(torch.relu, ((4, 1),)) if by_hand else nn.Sequential(nn.Linear(WIDTH, WIDTH))
    section = more.get("zero", {}) | ({} if by_hand else {"shard": {"0": [[4, 1], [1, 1], [1]]}})
    settings = load({"train_batch_size": 8} | more | {"zero": section}, 4)
    with pytest.raises(ValueError, match="operators are cut over the ranks with samples"):
        strategies_in(model, settings)


def test_functions_are_plain_where_no_engine_trains() -> None:
    x = torch.randn(4, 4)
    assert torch.equal(zero.shard(torch.relu, ((4, 1),))(x), x.relu())
    assert "plain (4, 4)" in zero.layout(x)


@pytest.mark.parametrize(
    ("ranks", "strategies", "shape"),
    [
        (4, [((4, 1), WHOLE), (WHOLE, (1, 4))], (4,)),
        (4, [((1, 2), (2, 1))], (2, 2)),
        (12, [((3, 1), (1, 2)), ((2, 1), WHOLE)], (2, 2, 3)),
        (12, [((12, 1), WHOLE)], (12,)),
        (7, [(WHOLE, WHOLE)], (7,)),
        (1, [(WHOLE, WHOLE)], (1,)),
    ],
)
def test_the_mesh_has_as_few_dims_as_will_do(ranks: int, strategies: Any, shape: tuple[int, ...]) -> None:
    told = [strategy_of("f", torch.matmul, each, None) for each in strategies]
    assert plan_mesh(ranks, told)[0] == shape
