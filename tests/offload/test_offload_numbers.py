"""The promise: offloaded training is the same training, bit by bit, wherever optimizer state and parameters rest.

Losses, norms and weights are those of the device, whether the host updates or state streams through the device; so is
what is said of a gradient that is not finite.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import CODED, WIDE, WIDTH, make_net
from offload_cases import BOTH, GPU, HALF, OPTIMIZER, PARAMS, as_on_a_gpu
from ranks import listening
from scenario import Model, Record, differences, run

import zero

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 128}}
TREE = {**BF16, "zero": {"reduce": "tree"}}


def moments(kind: str) -> dict[str, Any]:
    params = {"lr": 1e-2, "weight_decay": 0.1, "zero": {"moments": kind}}
    return {**BF16, "optimizer": {"type": "AdamW", "params": params}}


def on_the_host(stage: int, folder: str) -> list[dict[str, Any]]:
    """Sections of the JSON; parameters leave the device at stage 3 only."""

    def state(**more: Any) -> dict[str, Any]:
        return {"offload_optimizer": {"device": "nvme", "nvme_path": folder, **more}}

    def params(**more: Any) -> dict[str, Any]:
        return {"offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0, **more}}

    found = [OPTIMIZER, HALF, state(), state(buffer_count=1)]
    found.append(state(buffer_count=2, pipeline_read=False, pipeline_write=False, ratio=0.5))
    if stage == 3:
        found += [PARAMS, params(), BOTH, {**params(), **state()}, {**PARAMS, **state(buffer_count=1)}]
        found += [{**params(buffer_count=2), **OPTIMIZER}, {**params(max_in_cpu=500, buffer_count=1), **state()}]
    return found


def streamed(stage: int, folder: str) -> list[dict[str, Any]]:
    """Sections whose state streams through the device, and one that the host updates."""
    filed, streams = {"device": "nvme", "nvme_path": folder}, {"offload_optimizer": GPU}
    found = [streams, {"offload_optimizer": {**GPU, "ratio": 0.5}}]
    found += [{"offload_optimizer": {**GPU, **filed, "buffer_count": count}} for count in (1, 4)]
    if stage == 3:
        files = {**filed, "max_in_cpu": 0}
        found += [{**BOTH, **streams}, {**streams, "offload_param": files}]
        found.append({"offload_optimizer": {**GPU, **filed}, "offload_param": files})
    return [*found, OPTIMIZER]


class Case(NamedTuple):
    """A training; `apart`: as on a GPU, where what the host updates is a copy of what the device computes with."""

    stage: int
    world: int
    accumulation: int = 1
    clipping: float = 0.5
    more: dict[str, Any] | None = None  # further sections of the JSON
    apart: bool = False
    steps: int = 3
    section: dict[str, Any] | None = None  # further keys of zero_optimization
    streams: bool = False


def differing(case: Case, folder: str) -> list[dict[str, Any]]:
    """The placements whose run differs from that which keeps all on the device."""
    width = WIDE if "optimizer" in (case.more or {}) else WIDTH

    def trained(section: dict[str, Any]) -> Record:
        json = {"stage": case.stage, "section": {**(case.section or {}), **section}, **(case.more or {})}
        json |= {"gradient_clipping": case.clipping, "accumulation": case.accumulation}
        return run(Model(lambda: make_net(blocks=2, width=width)), json, case.steps)

    with as_on_a_gpu(case.apart or case.streams):
        wanted = trained({})
        assert len(set(wanted.losses)) > 1, "it does not learn"
        places = streamed if case.streams else on_the_host
        return [each for each in places(case.stage, folder) if differences(trained(each), wanted)]


CASES = [
    Case(1, 2),
    Case(2, 2, 3, more=BF16),
    Case(3, 1, clipping=0.0),
    Case(1, 2, 3, clipping=0.0, more=FP16, apart=True),
    Case(2, 2, more=moments("bf16")),
    Case(3, 2, more=moments("8bit"), apart=True),
    Case(1, 2, 4, more=TREE, apart=True),
    Case(1, 2, 2, more=moments("8bit"), streams=True),
    Case(3, 2, more=BF16, streams=True),
]
LONG = [  # each stage at each world, and what shares code with either
    Case(3, 3, 3, clipping=0.0, more=BF16, apart=True),
    Case(3, 2, 2, more=BF16, apart=True, section=CODED),
    Case(2, 2, steps=20),
    Case(1, 1, 3, more=BF16),
    Case(1, 3, apart=True),
    Case(2, 2, 4, more=TREE),
]
STREAMED_LONG = [
    *(Case(*place) for place in ((1, 4), (2, 1), (3, 2, 1, 0.0))),
    Case(3, 2, 3, more=moments("bf16")),
    *(Case(stage, 2, 2, more=more) for stage, more in ((1, FP16), (2, TREE))),
    Case(3, 2, more={"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}),
    Case(3, 2, 2, more=BF16, section=CODED),
    Case(2, 1, more={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}),  # no state
]
LONG += [case._replace(streams=True) for case in STREAMED_LONG]


@pytest.mark.parametrize("case", [*CASES, *longer(*((case,) for case in LONG))], ids=str)
def test_losses_norms_and_weights_are_those_of_the_device(pool: Any, tmp_path: Path, case: Case) -> None:
    assert pool.run(case.world, differing, case, str(tmp_path)) == [[]] * case.world


def everywhere(json: dict[str, Any], **more: Any) -> Iterator[tuple[list[str], Record]]:
    """What a run logs of skipped steps, and its record, by where gradients rest.

    The device; host memory that is the device's own, where sums add up directly; host memory apart from the device's,
    where their squares are summed before they leave; and the device, with state that streams through it.
    """
    for section, apart in ({}, False), (OPTIMIZER, False), (OPTIMIZER, True), ({"offload_optimizer": GPU}, True):
        with as_on_a_gpu(apart), listening(logging.INFO) as said:
            found = run("net", {"stage": 2, "gradient_clipping": 0.5, "section": section, **json}, 4, **more)
        yield [text for text in said if "skipped" in text], found


def edited(engine: Any, number: int, inputs: tuple[Any, ...]) -> torch.Tensor:
    """Its squares were summed before; that sum is not used any more."""
    engine.backward(loss := engine(*inputs))
    bias = engine.module.blocks[1].up.bias
    zero.utils.safe_set_full_grad(bias, torch.full_like(bias, 3.0))
    return loss


@pytest.mark.ranks(2)
def test_a_gradient_that_was_replaced_counts() -> None:
    (_, plain), *others = everywhere({}, loop=edited)
    assert plain.norms[0] != run("net", {"stage": 2, "gradient_clipping": 0.5}).norms[0]
    assert not any(differences(found, plain) for _, found in others)


def spoiled(at: int, block: int, engine: Any, number: int, inputs: tuple[Any, ...]) -> torch.Tensor:
    """The gradient of a block becomes infinite on the last rank in micro-step `at`."""
    loss, weight = engine(*inputs), engine.module.blocks[block].down.weight
    wrong = number == at and dist.get_rank() == dist.get_world_size() - 1
    handle = weight.register_hook(lambda grad: grad * float("inf") if wrong else grad)
    engine.backward(loss)
    handle.remove()
    return loss


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("accumulation", "at", "block", "said"),
    [
        (1, 1, 1, "'blocks.1.down.weight' is not finite (micro-step 1 of 1)"),
        (3, 5, 2, "'blocks.2.down.weight' is not finite (micro-step 3 of 3)"),
    ],
)
def test_what_is_not_finite_is_named(accumulation: int, at: int, block: int, said: str) -> None:
    loop = functools.partial(spoiled, at, block)
    (told, plain), *others = everywhere({"accumulation": accumulation}, loop=loop)
    assert told == ([f"step skipped: the gradient of parameter {said}"] if dist.get_rank() == 0 else [])
    for words, found in others:
        assert words == told
        assert not differences(found, plain, "losses", "weights")
        assert str(found.norms) == str(plain.norms)  # as text: NaN is NaN there
