"""The promise: units are whole while they are used and no longer, at the messages, bytes and launches of the plan."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import each_once, longer
from models import WIDE, WIDTH, batch, make_net
from scenario import run, settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zero
from zero.plan.formats import Formats
from zero.plan.memory import Scheme, StateBytes, alive_nbytes

pytestmark = pytest.mark.ranks(2)
UNITS = ["<root>", "blocks.0", "blocks.1"]  # the root's unit: embedding, norm and head
COUNTED = {"section": {"stage3_prefetch_bucket_size": 1}, "comms_logger": {"enabled": True}}


def small() -> nn.Module:
    return make_net(blocks=2)


def messages(engine: Any, number: int = 0) -> dict[str, int]:
    """How many collectives there were so far, by operation."""
    return {name: each.count for name, each in engine.log_comms_summary().items()}


@pytest.mark.parametrize("stage", range(4))
def test_with_accumulation_gradients_that_are_cut_are_reduced_at_each_micro_batch(stage):
    """And parameters that are cut are gathered for each forward and backward, but for the unit between the two."""
    *_, before, _, after = run(small, {"stage": stage, **COUNTED}, watch=messages, accumulation=2).seen
    counts = {name: count - before.get(name, 0) for name, count in after.items()}
    units = len(UNITS)
    assert counts["reduce"] == (2 * units if stage >= 2 else units)
    assert counts["replica gather" if stage == 0 else "gather"] == (2 * (2 * units - 1) if stage == 3 else units)


def states(engine: Any) -> dict[str, str]:
    return {unit.name: unit.state for unit in engine.describe().units}


def all_cut(engine: Any) -> bool:
    return set(states(engine).values()) == {"sharded"}


def test_evaluation_gathers_each_unit_once_and_leaves_nothing():
    """Three forwards without gradients after two training steps; the step after them is one like the others."""
    engine, *_ = zero.initialize(model=small(), config=settings(3, 2, **COUNTED))
    gathers = []

    def train(number: int) -> None:
        engine.backward(engine(*batch(number, 2)))
        engine.step()

    for number in range(3):
        train(number)
        gathers.append(messages(engine)["gather"])
        assert all_cut(engine)
    for _ in range(3):
        with torch.no_grad():
            engine(*batch(0, 2))
        assert all_cut(engine)
        gathers.append(messages(engine)["gather"])
    train(3)
    gathers.append(messages(engine)["gather"])
    engine.destroy()
    units = len(UNITS)
    assert [after - before for before, after in pairwise(gathers)] == [
        *(2 * units - 1, 2 * units - 1),
        *(units, units, units),
        2 * units - 1,
    ]


def test_frozen_units_are_released_when_backward_has_passed_them():
    """Each goes as soon as its block's input has its gradient; not at the end with all the others."""
    net, seen = small(), {}
    for block in net.blocks:
        block.up.requires_grad_(False)
        block.down.requires_grad_(False)
    engine, *_ = zero.initialize(model=net, config=settings(3, 2, **COUNTED))

    def look(name: str) -> None:
        found = states(engine)
        seen[name] = [found[f"blocks.{index}[fp32, frozen]"] == "sharded" for index in range(2)]

    net.blocks[0].norm.weight.register_post_accumulate_grad_hook(lambda param: look("first block"))
    net.embed.weight.register_post_accumulate_grad_hook(lambda param: look("embedding"))
    for number in range(2):
        engine.backward(engine(*batch(number, 2)))
        engine.step()
        assert seen == {"first block": [False, True], "embedding": [True, True]}
    engine.destroy()


FORMATS = {  # what is asked for, on top of which precision, and what comes of it
    "fp32": (False, {}, Formats()),
    "bf16": (True, {}, Formats("remainder")),
    "fp32 masters, bf16 moments": (True, {"master": "fp32", "moments": "bf16"}, Formats("fp32", "bf16")),
    "8bit moments": (True, {"moments": "8bit"}, Formats("remainder", "8bit")),
}


def phases(stage: int, accumulation: int, kind: str) -> tuple[list[tuple[str, StateBytes]], list[Any]]:
    """State bytes alive on this rank at each phase of the first step, and the plans of the units."""
    bf16, states, formats = FORMATS[kind]
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "zero": states}}
    json = settings(stage, 2, accumulation=accumulation, bf16={"enabled": bf16}, optimizer=optimizer)
    width = WIDTH if formats.moments == "fp32" else WIDE
    engine, *_ = zero.initialize(model=make_net(blocks=2, width=width), config=json)
    seen = [("rest", engine.state_nbytes())]
    for index, block in enumerate(engine.module.blocks):
        block.register_forward_pre_hook(lambda *_, i=index: seen.append((f"forward {i}", engine.state_nbytes())))
    tokens, targets = batch(0, 2)
    loss = engine(tokens, targets)
    seen.append(("forward done", engine.state_nbytes()))
    engine.backward(loss)
    seen.append(("backward done", engine.state_nbytes()))
    engine.step()
    if accumulation == 1:
        seen.append(("step done", engine.state_nbytes()))
    plans = [unit.plan for unit in engine._sharded.units]
    engine.destroy()
    return seen, plans


@pytest.mark.parametrize(
    ("stage", "form"), each_once([0, 1, 2, 3], [*((kind, 1) for kind in FORMATS), ("fp32", 2), ("bf16", 2)])
)
def test_bytes_alive(pool, stage, form):
    """What is alive at each phase is what `plan/memory.py` computed before."""
    kind, accumulation = form
    for rank, (seen, plans) in enumerate(pool.run(2, phases, stage, accumulation, kind)):
        sharding = zero.plan.sharding.Sharding.of_stage(stage)
        local = accumulation > 1 and not sharding.grads
        moments = {
            "rest": {},
            "forward 0": {"gathered": {"<root>", "blocks.0"}},
            "forward 1": {"gathered": {"<root>", "blocks.1"}},
            "forward done": {},
            "backward done": {"local_gradients" if local else "reduced_gradients": UNITS},
            # Where gradients are not cut, their memory stays for the next step.
            "step done": {} if sharding.optim else {"reduced_gradients": UNITS},
        }
        assert [name for name, _ in seen] == list(moments)[: len(seen)]
        for name, found in seen:
            parts, place = (2, rank) if sharding.optim else (1, 0)
            scheme = Scheme(sharding, parts, formats=FORMATS[kind][2], accumulation=accumulation)
            wanted = alive_nbytes(plans, scheme, place, **moments[name])
            assert found == (wanted.parameters, wanted.gradients, wanted.record), name


# --- launches --------------------------------------------------------------------------------------------------------


PRODUCT = str(Path(zero.__file__).parent)
BF16 = {"precision": "bf16"}
WORLD, STEPS = 2, 3


class Launches(TorchDispatchMode):
    """Inside, counts what the product launches, by operator; not what autograd computes for the model."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty")) and by_product():
            self.calls[name] += 1
            if name == "_foreach_add_":
                dtypes = {each.dtype for each in tree_leaves(args)}
                assert len(dtypes) == 1 or len(args[0]) == 1, "on a GPU these would be added one by one"
        return func(*args, **kwargs or {})


def by_product() -> bool:
    """Whether it is the product that asks, not autograd, maybe in its own thread."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_code.co_filename.startswith(PRODUCT):
            return True
        frame = frame.f_back
    return False


class Biased(nn.Module):
    """A unit of a matrix and so many vectors."""

    def __init__(self, vectors: int) -> None:
        super().__init__()
        self.matrix = nn.Linear(24, 24)
        self.vectors = nn.ParameterList(torch.full((24,), 0.1) for _ in range(vectors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.matrix(x) + sum(self.vectors))


def count(vectors: int, json: dict[str, Any]) -> Counter[str]:
    """What is launched in the backwards of the last step, and in it."""
    torch.manual_seed(1)
    engine, *_ = zero.initialize(model=nn.Sequential(*(Biased(vectors) for _ in range(3))), config=json)
    dtype = next(engine.module.parameters()).dtype
    for _ in range(STEPS):
        launches = Launches()
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(torch.randn(2, 24, dtype=dtype)).float().square().mean()
            with launches:
                engine.backward(loss)
                engine.step()
    engine.destroy()
    return launches.calls


@pytest.mark.ranks(WORLD)
@pytest.mark.parametrize(
    ("stage", "accumulation", "more"),
    [(0, 3, BF16), (3, 1, {}), *longer((1, 1, BF16), (2, 3, {}))],
)
def test_launches_do_not_grow_with_the_parameters_of_a_unit(stage, accumulation, more):
    json = settings(stage, WORLD, accumulation=accumulation, cut=stage == 3, gradient_clipping=1.0, **more)
    few, many = count(1, json), count(9, json)
    assert few == many and few.total() > 3
