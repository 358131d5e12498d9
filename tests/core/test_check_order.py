"""The promise: with `check_order`, ranks that communicate in different orders learn it at the next step, all of them.

The other run of ranks that disagree in silence: an engine of different models or settings is refused on all ranks.
"""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist
from models import config, make_net
from models import step as micro_step
from ranks import Pool

import zero


def swap_once(check: bool) -> tuple[list[float], str]:
    """Before the third step rank 1 asks for two units in another order than rank 0, as a wrong forecast would."""
    rank, losses = dist.get_rank(), []
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 2, zero={"check_order": check}))
    try:
        for step in range(4):
            if step == 2:
                units = engine._sharded.units[1:3]
                for unit in units if rank == 0 else reversed(units):
                    unit.gather()
                for unit in units:
                    unit.release()
            losses.append(micro_step(engine, step).item())
    except RuntimeError as error:
        return losses, str(error)
    finally:
        engine.destroy()
    return losses, ""


def test_a_difference_in_order_is_named_on_all_ranks(pool: Pool) -> None:
    results = pool.run(2, swap_once, True)
    assert results[0][1] == results[1][1]
    assert re.fullmatch(
        r"the ranks' orders of collectives differ in step 2, at position \d+: "
        r"rank 0: gather of unit 'blocks\.\d'; rank 1: gather of unit 'blocks\.\d'",
        results[0][1],
    ), results[0][1]
    assert [len(losses) for losses, _ in results] == [2, 2]


def test_without_the_check_the_messages_still_find_each_other(pool: Pool) -> None:
    assert [(len(losses), error) for losses, error in pool.run(2, swap_once, False)] == [(4, ""), (4, "")]


def losses_with(check: bool) -> list[float]:
    losses = []
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 2, zero={"check_order": check}))
    for step in range(3):
        losses.append(micro_step(engine, step).item())
    engine.destroy()
    return losses


def test_ranks_that_agree_are_let_through_with_the_same_numbers(pool: Pool) -> None:
    assert pool.run(2, losses_with, True) == pool.run(2, losses_with, False)


def make_different(what: str) -> str:
    """Initialize with rank 2 at odds with the others; the error."""
    odd = dist.get_rank() == 2
    model = make_net(width=10 if odd and what == "shape" else 12, blocks=2 if odd and what == "count" else 3)
    if odd and what == "frozen":
        model.norm.weight.requires_grad_(False)
    settings: dict[str, Any] = config(1, 3)
    if odd and what == "stage":
        settings["zero_optimization"]["stage"] = 3
    if odd and what == "rate":
        settings["optimizer"]["params"]["lr"] = 0.5
    if odd and what == "harmless":
        settings["steps_per_print"] = 3
    try:
        engine, *_ = zero.initialize(model=model, config=settings)
    except RuntimeError as error:
        return str(error)
    engine.destroy()
    return ""


def test_ranks_that_initialize_differently_are_told_what_differs_first(pool: Pool) -> None:
    wanted = {
        "shape": r"ranks 0, 1: parameter 'embed\.weight' \(17, 12\) .*; rank 2: parameter 'embed\.weight' \(17, 10\).*",
        "count": r"ranks 0, 1: parameter 'blocks\.2\.norm\.weight' .*; rank 2: parameter 'norm\.weight' .*",
        "frozen": r"ranks 0, 1: parameter 'norm\.weight' .*_grad=True, group 0; rank 2: .*_grad=False, no group",
        "stage": r"ranks 0, 1: zero_optimization\.stage = 1; rank 2: zero_optimization\.stage = 3",
        "rate": r"ranks 0, 1: optimizer\.params\.lr = 0\.01; rank 2: optimizer\.params\.lr = 0\.5",
    }
    for what, text in wanted.items():
        errors = pool.run(3, make_different, what)
        assert len(set(errors)) == 1, errors
        assert re.fullmatch(r"the ranks do not initialize the same engine: " + text, errors[0]), errors[0]
    assert pool.run(3, make_different, "harmless") == ["", "", ""]
