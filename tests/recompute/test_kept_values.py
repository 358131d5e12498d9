"""The promise: what a recomputed forward keeps is made once, whatever runs it again, and each place gets its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from zero.core.kept import Values, kept
from zero.recompute.call import recomputed


class Factors:
    """Numbers of which each is another, 2, 3, 4 and so on, as a read of the device may give."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x * kept(self._next)).sin()

    def _next(self) -> int:
        self.made += 1
        return self.made + 1


def again(fn: Callable[..., Any], *args: Any) -> Any:
    return recomputed(fn, args, {})


def torchs(fn: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(fn, *args, use_reentrant=False)


def plainly(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


Call = Callable[..., Any]


def net(x: torch.Tensor, factor: Factors, outer: Call, inner: Call) -> torch.Tensor:
    """Places before, inside of, between and behind two inner calls, of which the last is the end of the outer one."""

    def part(x: torch.Tensor) -> torch.Tensor:
        return factor(factor(x))

    def whole(x: torch.Tensor) -> torch.Tensor:
        return inner(part, factor(inner(part, factor(x))))

    return outer(whole, factor(outer(whole, x))).sum()


def gradients(outer: Call, inner: Call, backwards: int = 1) -> tuple[list[torch.Tensor], int]:
    """Of two forwards, whose backwards take turns; and how many numbers were made."""
    factor, x = Factors(), torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    losses = [net(x, factor, outer, inner) for _ in range(2)]
    found = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(backwards) for loss in losses]
    return found, factor.made


@contextlib.contextmanager
def early(stops: bool) -> Iterator[None]:
    with set_checkpoint_early_stop(stops):
        yield


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("ways", [(again, plainly), (plainly, again), (again, again)])
def test_each_is_made_once_also_in_nested_calls_and_several_backwards(ways: tuple[Call, Call], stops: bool) -> None:
    wanted, made = gradients(plainly, plainly, 3)
    with early(stops):
        found, count = gradients(*ways, 3)
    assert count == made == 26
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("ways", [(torchs, again), (again, torchs)])
def test_torchs_own_checkpoint_has_them_made_anew(ways: tuple[Call, Call]) -> None:
    """It does not say that it runs a forward again: known, and what is kept around it or inside must be right."""
    factor = Factors()
    factor._next = lambda: setattr(factor, "made", factor.made + 1) or 2  # the same at each place
    x = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(net(x, factor, plainly, plainly), x)
    before = factor.made
    (found,) = torch.autograd.grad(net(x, factor, *ways), x)
    assert torch.equal(found, wanted)
    assert factor.made == 2 * before + 8, "of 13 those of the inner calls, or those that stand before the last of these"


def test_a_call_that_has_failed_leaves_nothing_to_the_next() -> None:
    factor, x = Factors(), torch.ones(2, dtype=torch.float64, requires_grad=True)

    def part(x: torch.Tensor, fails: bool) -> torch.Tensor:
        x = factor(x)
        if fails:
            raise ArithmeticError("spoilt")
        return factor(x)

    def tries(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(ArithmeticError):
            again(part, x, True)
        return again(part, factor(x), False).sum()

    with pytest.raises(ArithmeticError):
        again(part, x, True)
    assert factor.made == 1
    again(tries, x).backward()
    assert factor.made == 5, "that of the call outside, of the one that fails, and three"
    y = x.detach().requires_grad_()
    (((y * 4).sin() * 5).sin() * 6).sin().sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_a_backward_that_fails_in_the_middle_can_be_done_again() -> None:
    factor, x = Factors(), torch.ones(2, dtype=torch.float64, requires_grad=True)
    fails = [False]

    def part(x: torch.Tensor) -> torch.Tensor:
        x = factor(x)
        if fails[0]:
            raise ArithmeticError("spoilt")
        return factor(x)

    loss = again(lambda x: again(part, factor(x)), x).sum()
    fails[0] = True
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    fails[0] = False
    loss.backward()
    y = x.detach().requires_grad_()
    (((y * 2).sin() * 3).sin() * 4).sin().sum().backward()
    assert factor.made == 3 and torch.equal(x.grad, y.grad)


def test_a_call_that_runs_further_the_second_time_makes_the_rest() -> None:
    values, numbers = Values(), iter(range(9))
    for count in (1, 3, 3):
        with values.running():
            assert [kept(lambda: next(numbers)) for _ in range(count)] == [*range(count)]


def test_without_gradients_or_recomputation_nothing_is_kept() -> None:
    factor, x = Factors(), torch.ones(2)
    with torch.no_grad():
        again(factor, x)
        again(factor, x)
    factor(x)
    assert factor.made == 3
