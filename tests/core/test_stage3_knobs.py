"""The promise: the knobs of stage 3 change when parameters come and how long they stay, and no number."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from models import make_net, step
from scenario import runs, same, settings

import zero

UNITS = ["<root>", "blocks.0", "blocks.1", "blocks.2"]
ROOT, BLOCK = 449, 661  # their elements
P = "stage3_prefetch_bucket_size"
LIVE = "stage3_max_live_parameters"
REUSE = "stage3_max_reuse_distance"
WHOLE = "stage3_param_persistence_threshold"
IN_ALL = "stage3_model_persistence_threshold"


class Seen(NamedTuple):
    """Of the third step: gathers begun when each block computes first, and gathers of each unit; and bytes at rest."""

    begun: list[int]
    gathers: list[int]
    resting: int
    planned: int


def seen(section: dict[str, int]) -> Seen:
    logger = {"enabled": True, "prof_all": False, "prof_ops": ["gather"]}
    json = settings({"stage": 3, "section": section, "comms_logger": logger}, 2)
    planned = zero.estimate(make_net(), json, 2).configured.device.parameters
    engine: Any = zero.initialize(model=make_net(), config=json)[0]
    sent, begun, send = 0, [], dist.isend

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += 1
        return send(*args, **kwargs)

    for index in range(2):
        step(engine, index)
    before = Counter({name: each.count for name, each in engine.log_comms_summary(by_unit=True).items()})
    for block in engine.module.blocks:
        block.norm.register_forward_pre_hook(lambda *_: begun.append(sent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", count)
        step(engine, 2)
    after = {name: each.count for name, each in engine.log_comms_summary(by_unit=True).items()}
    found = Seen(begun, [after[name] - before[name] for name in UNITS], engine.state_nbytes().parameters, planned)
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("section", "begun"),
    [
        ({P: 0}, [2, 3, 4]),  # none ahead
        ({P: 1}, [3, 4, 4]),  # one at least
        ({P: 2 * BLOCK - 1}, [3, 4, 4]),
        ({P: 2 * BLOCK}, [4, 4, 4]),  # as many as fit
        ({}, [4, 4, 4]),
        ({LIVE: ROOT + 2 * BLOCK - 1}, [2, 3, 4]),
        ({LIVE: ROOT + BLOCK - 1}, [2, 3, 4]),
    ],
)
def test_units_are_fetched_ahead_as_far_as_bucket_and_limit_allow(pool, section, begun):
    for found in pool.run(2, seen, section):
        assert found.begun == begun


@pytest.mark.parametrize(
    ("section", "gathers", "whole"),
    [
        ({}, [1, 2, 2, 2], []),
        ({REUSE: 10**9}, [1, 1, 1, 1], []),  # a unit that is used again soon stays
        ({WHOLE: ROOT - 1}, [1, 2, 2, 2], []),
        ({WHOLE: ROOT}, [1, 2, 2, 2], [0]),
        ({WHOLE: BLOCK}, [1, 1, 1, 1], [0, 1, 2, 3]),
        ({WHOLE: BLOCK, IN_ALL: 2 * BLOCK}, [1, 1, 2, 2], [0, 1]),
        ({WHOLE: BLOCK, IN_ALL: BLOCK - 1}, [1, 2, 2, 2], [0]),
        ({WHOLE: BLOCK, IN_ALL: 0}, [1, 2, 2, 2], []),
    ],
)
def test_what_stays_is_gathered_once_a_step(pool, section, gathers, whole):
    """Also where small units stay whole, whose bytes are planned."""
    elements = sum(size * (1 if index in whole else 0.5) for index, size in enumerate([ROOT, BLOCK, BLOCK, BLOCK]))
    for found in pool.run(2, seen, section):
        assert found.gathers == gathers
        assert 4 * elements <= found.resting == found.planned, "what is more is padding"


KNOBS: list[dict[str, int]] = [
    {P: 0},
    {P: 1},
    {P: 700},
    {LIVE: 0},
    {LIVE: 1200},
    {REUSE: 500},
    {REUSE: 10**9},
    {WHOLE: 450},
    {WHOLE: 10**9},
    {WHOLE: 661, IN_ALL: 700, REUSE: 2000, P: 3},
]


def test_no_knob_changes_a_number(pool):
    for standard, *others in pool.run(2, runs, [(("net", {"stage": 3, "section": knob}), {}) for knob in [{}, *KNOBS]]):
        for section, found in zip(KNOBS, others, strict=True):
            assert same(standard, found), section
