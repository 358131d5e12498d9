"""The promise: when each unit is gathered, waited for, released, reduced and invalidated; and what that costs.

The lists of verbs below are the specification. Verbs without effect (a gather of what is full, a release of
what is not cut) are not in them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marks import each_once
from models import WIDE, WIDTH, batch, config, make_net
from models import step as micro_step

import zero
from zero.core import comm
from zero.core.param_buffer import ParamBuffer
from zero.core.unit import Unit
from zero.plan.formats import Formats
from zero.plan.memory import StateBytes, alive_nbytes

UNITS = ["<root>", "blocks.0", "blocks.1"]  # the root's unit: embedding, norm and head

UPDATE = [  # each unit's shard is updated, and its full copy travels while the next one is
    *("invalidate <root>", "gather <root>"),
    *("invalidate blocks.0", "gather blocks.0"),
    *("invalidate blocks.1", "gather blocks.1"),
    *("wait <root>", "wait blocks.0", "wait blocks.1"),
]
REDUCE = ["reduce blocks.1", "reduce blocks.0", "reduce <root>"]
FIRST_FORWARD = [  # nothing is foreseen yet
    *("gather <root>", "wait <root>"),
    *("gather blocks.0", "wait blocks.0", "release blocks.0"),
    *("gather blocks.1", "wait blocks.1", "release blocks.1"),
    "release <root>",
]
FIRST_BACKWARD = [
    *("gather <root>", "wait <root>"),
    *("gather blocks.1", "wait blocks.1", "release blocks.1", "reduce blocks.1"),
    *("gather blocks.0", "wait blocks.0", "release blocks.0", "reduce blocks.0"),
    *("release <root>", "reduce <root>"),
]
LATER_FORWARD = [  # the next unit travels while one computes; the root stays, backward begins with it
    *("gather <root>", "wait <root>", "gather blocks.0"),
    *("wait blocks.0", "gather blocks.1", "release blocks.0"),
    *("wait blocks.1", "release blocks.1"),
]
LATER_BACKWARD = [
    "gather blocks.1",
    *("wait blocks.1", "gather blocks.0", "release blocks.1", "reduce blocks.1"),
    *("wait blocks.0", "release blocks.0", "reduce blocks.0"),
    *("release <root>", "reduce <root>"),
]
SPECIFICATION = {  # (stage, micro-batches) -> verbs of the first optimizer step, of the second
    (0, 1): ([*REDUCE, *UPDATE], [*REDUCE, *UPDATE]),
    (1, 1): ([*REDUCE, *UPDATE], [*REDUCE, *UPDATE]),
    (2, 1): ([*REDUCE, *UPDATE], [*REDUCE, *UPDATE]),
    (3, 1): ([*FIRST_FORWARD, *FIRST_BACKWARD], [*LATER_FORWARD, *LATER_BACKWARD]),
    (0, 2): ([*REDUCE, *UPDATE], [*REDUCE, *UPDATE]),
    (1, 2): ([*REDUCE, *UPDATE], [*REDUCE, *UPDATE]),
    (2, 2): ([*REDUCE, *REDUCE, *UPDATE], [*REDUCE, *REDUCE, *UPDATE]),
    (3, 2): (
        [*FIRST_FORWARD, *FIRST_BACKWARD, *LATER_FORWARD, *LATER_BACKWARD],
        [*LATER_FORWARD, *LATER_BACKWARD] * 2,
    ),
}


class Recorder:
    """Notes verbs that have an effect, and the collectives with their full bytes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.verbs: list[str] = []
        self.traffic: list[tuple[str, int]] = []
        move, reduce, gather, scatter = ParamBuffer.move, Unit.reduce, comm.gather, comm.scatter

        def noted_move(buffer: ParamBuffer, verb: str) -> None:
            move(buffer, verb)
            if verb not in ("conceal", "reveal"):  # nothing comes or goes
                self.verbs.append(f"{verb} {buffer.plan.name}")

        def noted_reduce(unit: Unit, *leaf: Any) -> None:
            reduce(unit, *leaf)
            self.verbs.append(f"reduce {unit.plan.name}")

        def noted_gather(full: Any, axis: Any, tag: int) -> Any:
            if axis.size > 1:
                self.traffic.append(("gather", full.nbytes))
            return gather(full, axis, tag)

        def noted_scatter(flat: Any, axis: Any, *more: Any) -> Any:
            if axis.size > 1:
                self.traffic.append(("scatter", flat.nbytes))
            return scatter(flat, axis, *more)

        patch.setattr(ParamBuffer, "move", noted_move)
        patch.setattr(Unit, "reduce", noted_reduce)
        patch.setattr(comm, "gather", noted_gather)
        patch.setattr(comm, "scatter", noted_scatter)

    def take(self) -> tuple[list[str], list[tuple[str, int]]]:
        taken = self.verbs, self.traffic
        self.verbs, self.traffic = [], []
        return taken


def step(engine: Any, index: int) -> None:
    for micro in range(engine.gradient_accumulation_steps()):
        micro_step(engine, 10 * index + micro)


def one_ahead(stage: int, **more: Any) -> dict[str, Any]:
    """A configuration under which one unit travels ahead at a time; by default it is as many as fit a bucket."""
    return {**config(stage, 2, **more), "zero_optimization": {"stage": stage, "stage3_prefetch_bucket_size": 1}}


def record(stage: int, accumulation: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        engine, *_ = zero.initialize(model=make_net(blocks=2), config=one_ahead(stage, accumulation=accumulation))
        recorder = Recorder(patch)
        steps = []
        for index in range(3):
            step(engine, index)
            steps.append(recorder.take())
    sizes = {unit.plan.name: unit.plan.layout.numel * 4 for unit in engine._sharded.units}
    engine.destroy()
    return {"steps": steps, "nbytes": sizes}


@pytest.mark.parametrize(("stage", "accumulation"), SPECIFICATION)
def test_verbs_and_traffic(pool, stage, accumulation):
    """Stages 0 to 2 move 2 Psi a step, stage 3 moves 3 Psi; each full buffer counted once."""
    first, later = SPECIFICATION[stage, accumulation]
    for found in pool.run(2, record, stage, accumulation):
        assert list(found["nbytes"]) == UNITS
        verbs = [verbs for verbs, _ in found["steps"]]
        assert verbs[0] == first
        assert verbs[1] == verbs[2] == later
        psi, kept = sum(found["nbytes"].values()), found["nbytes"]["<root>"]
        reductions = accumulation if stage >= 2 else 1
        for index, (_, traffic) in enumerate(found["steps"]):
            moved = {kind: sum(n for k, n in traffic if k == kind) for kind in ("gather", "scatter")}
            assert moved["scatter"] == reductions * psi
            if stage < 3:
                assert moved["gather"] == psi
            else:  # the unit that ends the forward and begins the backward is kept in between, once that is known
                unforeseen = 1 if index == 0 else 0
                assert moved["gather"] == accumulation * (2 * psi - kept) + unforeseen * kept
            assert [kind for kind, _ in traffic].count("scatter") == reductions * len(UNITS)


def record_frozen() -> list[str]:
    """Verbs of the second step under stage 3 when only norms, embedding and head are trained."""
    net = make_net(blocks=2)
    for block in net.blocks:
        block.up.requires_grad_(False)
        block.down.requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        engine, *_ = zero.initialize(model=net, config=one_ahead(3))
        recorder = Recorder(patch)
        for index in range(2):
            recorder.take()
            step(engine, index)
    engine.destroy()
    return [verb for verb in recorder.take()[0] if "frozen" in verb]


def test_frozen_units_are_released_when_backward_has_passed_them(pool):
    first, second = "blocks.0[fp32, frozen]", "blocks.1[fp32, frozen]"
    for verbs in pool.run(2, record_frozen):
        forward, backward = verbs[:6], verbs[6:]
        assert [verb for verb in forward if not verb.startswith("gather")] == [
            *(f"wait {first}", f"release {first}", f"wait {second}", f"release {second}")
        ]
        # Each goes as soon as its block's input has its gradient, which is when the block before it begins; not at
        # the end with all the others.
        assert [verb for verb in backward if not verb.startswith("gather")] == [
            *(f"wait {second}", f"wait {first}", f"release {second}", f"release {first}")
        ]


@pytest.mark.ranks(2)
def test_evaluation_gathers_each_unit_once_and_leaves_nothing():
    """Verbs of three forwards without gradients, after two training steps, and of the training step after them."""
    with pytest.MonkeyPatch.context() as patch:
        engine, *_ = zero.initialize(model=make_net(blocks=2), config=one_ahead(3))
        recorder = Recorder(patch)
        for index in range(2):
            step(engine, index)
        recorder.take()
        seen = []
        for _ in range(3):
            with torch.no_grad():
                engine(*batch(0, 2))
            seen.append(recorder.take()[0])
        step(engine, 2)
        seen.append(recorder.take()[0])
    engine.destroy()
    *evaluations, training = seen
    for verbs in evaluations:
        assert verbs == [*LATER_FORWARD, "release <root>"]
    assert training == [*LATER_FORWARD, *LATER_BACKWARD]


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
    settings = config(stage, 2, accumulation=accumulation, bf16={"enabled": bf16}, optimizer=optimizer)
    width = WIDTH if formats.moments == "fp32" else WIDE
    engine, *_ = zero.initialize(model=make_net(blocks=2, width=width), config=settings)
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
            more = {"rank": place, "formats": FORMATS[kind][2], "accumulation": accumulation}
            wanted = alive_nbytes(plans, sharding, parts, **more, **moments[name])
            assert found == wanted, name
