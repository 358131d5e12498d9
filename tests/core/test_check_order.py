"""The promise: with `check_order`, ranks that communicate in different orders learn it at the next step, all of them.

The other run of ranks that disagree in silence: an engine of different models or settings is refused on all ranks.
"""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist
from models import config, make_net, step
from ranks import said_by
from scenario import differences, run

import zero


@pytest.mark.ranks(2)
@pytest.mark.parametrize("check", [True, False])
def test_a_difference_in_order_is_named_on_all_ranks(check):
    """Rank 1 asks for two units in another order, as a wrong forecast would; unchecked, messages find each other."""
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 2, zero={"check_order": check}))
    step(engine, 0), step(engine, 1)
    units = engine._sharded.units[1:3]
    for unit in units if dist.get_rank() == 0 else reversed(units):
        unit.gather()
    for unit in units:
        unit.release()
    said = said_by(lambda: (step(engine, 2), step(engine, 3)))
    wanted = (
        r"RuntimeError: the ranks' orders of collectives differ in step 2, at position \d+: "
        r"rank 0: gather of unit 'blocks\.\d'; rank 1: gather of unit 'blocks\.\d'"
    )
    assert re.fullmatch(wanted if check else "nothing", said), said
    assert engine.global_steps == (2 if check else 4)
    engine.destroy()


@pytest.mark.ranks(2)
def test_ranks_that_agree_are_let_through_with_the_same_numbers():
    assert not differences(*(run("net", 3, zero={"check_order": check}) for check in (True, False)))


WANTED = {
    "shape": r"ranks 0, 1: parameter 'embed\.weight' \(17, 12\) .*; rank 2: parameter 'embed\.weight' \(17, 10\).*",
    "count": r"ranks 0, 1: parameter 'blocks\.2\.norm\.weight' .*; rank 2: parameter 'norm\.weight' .*",
    "frozen": r"ranks 0, 1: parameter 'norm\.weight' .*_grad=True, group 0; rank 2: .*_grad=False, no group",
    "stage": r"ranks 0, 1: zero_optimization\.stage = 1; rank 2: zero_optimization\.stage = 3",
    "rate": r"ranks 0, 1: optimizer\.params\.lr = 0\.01; rank 2: optimizer\.params\.lr = 0\.5",
    "harmless": "",
}


@pytest.mark.ranks(3)
def test_ranks_that_initialize_differently_are_told_what_differs_first():
    """Rank 2 is at odds with the others."""
    for what, text in WANTED.items():
        odd = what if dist.get_rank() == 2 else ""
        model = make_net(width=10 if odd == "shape" else 12, blocks=2 if odd == "count" else 3)
        model.norm.weight.requires_grad_(odd != "frozen")
        json = config(3 if odd == "stage" else 1, 3, steps_per_print=3 if odd == "harmless" else 1e9)
        json["optimizer"]["params"]["lr"] = 0.5 if odd == "rate" else 0.01
        said = said_by(lambda model=model, json=json: zero.initialize(model=model, config=json)[0].destroy())
        told = f"the ranks do not initialize the same engine: {text}"
        assert re.fullmatch(f"RuntimeError: {told}" if text else "nothing", said), f"{what}: {said}"
