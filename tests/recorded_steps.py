"""Steps of a small model, recorded as programs of streams, at the stages and placements that use them differently."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
from models import CODED, config, make_net, share
from offload_cases import BOTH, GPU, OPTIMIZER, PARAMS
from stream_order import Program
from stream_recorder import Recorder

import zero


class Case(NamedTuple):
    """A training of a small model on `world` ranks, at a stage, with more of the sections of the JSON.

    looks: at the state of what the step updates first, before each step.
    """

    world: int
    stage: int
    section: dict[str, Any] | None = None
    more: dict[str, Any] | None = None
    looks: bool = False


CUT = {"stage3_param_persistence_threshold": 0}
NVME = {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
TWICE = {"gradient_accumulation_steps": 2}
STREAMED = {"offload_optimizer": GPU}
STREAMED_FILE = {"offload_optimizer": {**GPU, "device": "nvme"}}
STREAMED_NVME = {**STREAMED_FILE, "offload_param": {"device": "nvme"}}
TREE = {"zero": {"reduce": "tree"}, **TWICE}
INPUTS = {"zero": {"recompute": {"modules": ["Block"]}}, "activation_checkpointing": {"cpu_checkpointing": True}}
MUON = {"optimizer": {"type": "Muon", "params": {}}}
QUICK = [
    Case(2, 0),
    Case(2, 1, OPTIMIZER, TWICE),
    Case(2, 2),
    Case(2, 3, {**BOTH, **CUT}),
    Case(1, 3, {**PARAMS, **CUT}),
    Case(1, 2, STREAMED),
    Case(1, 2, STREAMED, looks=True),
]
LONG = [
    *(Case(world, stage, OPTIMIZER) for world in (1, 2) for stage in (1, 2)),
    *(Case(*place) for place in ((1, 0), (1, 2), (2, 1))),
    *(Case(world, 3, {**offload, **CUT}) for world in (1, 2) for offload in ({}, OPTIMIZER, PARAMS, BOTH, NVME)),
    *(Case(2, stage, {**OPTIMIZER, **CUT}, TWICE) for stage in (2, 3)),
    *(Case(2, stage, CUT, TREE) for stage in range(4)),
    *(Case(2, 3, {**offload, **CUT}, INPUTS) for offload in ({}, BOTH)),
    Case(2, 3, BOTH, {"bf16": {"enabled": True}}),
    Case(2, 1, STREAMED, {"bf16": {"enabled": True}, **TWICE}),
    *(Case(2, 3, {**offload, **CUT}) for offload in (STREAMED, {**BOTH, **STREAMED}, STREAMED_NVME)),
    *(Case(1, *place, looks=True) for place in ((2, STREAMED_FILE), (3, STREAMED_NVME))),
    Case(4, 3, {**STREAMED, **CUT, "zero_hpz_partition_size": 2}),
    *(Case(4, 3, {**offload, **CUT, "zero_hpz_partition_size": 2}) for offload in ({}, BOTH)),
    *(Case(4, stage, {**OPTIMIZER, **CUT}, {"zero": {"shard_size": 2}}) for stage in (2, 3)),
    *(Case(2, 3, {**offload, **CODED, **CUT}) for offload in ({}, OPTIMIZER, BOTH, STREAMED, {**STREAMED, **PARAMS})),
    Case(4, 3, {**CODED, "zero_hpz_partition_size": 2}),
    Case(2, 1, {}, MUON),
    *(Case(world, 2, STREAMED, MUON) for world in (1, 2)),
]


class Recorded(NamedTuple):
    """What a rank does from the first step on.

    ends: of its steps, in the program; held: bytes of the buffers that were there before, by number; priorities: of
    its streams.
    """

    program: Program
    ends: list[int]
    held: dict[int, int]
    priorities: list[int]


def record(cases: list[Case], folder: str, steps: int = 2) -> list[Recorded]:
    """Of this rank, in each case."""
    found = []
    for case in cases:
        recorder, more = Recorder(), case.more or {}
        accumulation = more.get("gradient_accumulation_steps", 1)
        section = json.loads(json.dumps(case.section or {}).replace('"nvme"', f'"nvme", "nvme_path": "{folder}"'))
        settings = config(case.stage, case.world, accumulation=accumulation) | more
        settings["zero_optimization"] |= section
        with recorder.standing_in():
            engine, *_ = zero.initialize(model=make_net(), config=settings)
            held, ends = recorder.held(), []
            with recorder.recording():
                for number in range(steps * accumulation):
                    engine.backward(engine(*share(number)))
                    with torch.no_grad():
                        engine(*share(number))  # reads parameters whose gradients have left long ago
                    if case.looks:
                        zero.utils.safe_get_full_optimizer_state(engine.module.head.weight, "exp_avg")
                    engine.step()
                    if (number + 1) % accumulation == 0:
                        ends.append(len(recorder.program))
            engine.destroy()
        found.append(Recorded(recorder.program, ends, held, recorder.priorities))
    return found
