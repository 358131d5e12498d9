"""The promise: `zero plan` decides `"update": "auto"` by bytes and rates, as an engine does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from models import config

from zero.config import load
from zero.memory.update_costs import UpdateRates
from zero.sizes.choice import own_choice
from zero.sizes.cost import shape_cost
from zero.sizes.estimate import estimate
from zero.sizes.rates import DEVICES
from zero.sizes.shape import Shape
from zero.tools.plan.search import Search, Setup

SHAPE = Shape(layers=6, width=512, inner=1024, vocabulary=4096)
H100 = UpdateRates(51e9, 68e9, 3000e9)


def setup(rates: UpdateRates = H100, memory: float = 80e9, ranks: int = 1, **more: Any) -> Setup:
    section = {"device": "cpu", "zero": {"update": "auto"}, **more.pop("section", {})}
    given = config(2, ranks, bf16={"enabled": True}, zero_optimization={"stage": 2, "offload_optimizer": section})
    named = {"host_link": rates.link, "host_bandwidth": rates.host, "device_bandwidth": rates.device}
    found = replace(DEVICES["h100"], device_memory=memory, **named)
    return Setup(SHAPE, shape_cost(SHAPE, 1024), load(given | more, ranks), found)


def plan_streams(made: Setup) -> bool:
    return any(at.streamed for at in Search(made, own_choice(made.settings))._scheme(1)[0].placements)


EIGHT = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "zero": {"moments": "8bit"}}}}


@pytest.mark.parametrize(
    ("more", "gpu"),
    [
        ({}, True),
        ({"rates": H100._replace(link=12e9)}, False),
        ({"rates": H100._replace(link=26e9)}, False),
        ({"rates": H100._replace(link=26e9), **EIGHT}, True),
        ({"section": {"ratio": 0.5}}, True),
        ({"section": {"ratio": 0.0}}, False),
        ({"memory": 0.1e9}, False),
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, False),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}, False),
        ({"section": {"zero": {"update": "gpu"}}, "rates": H100._replace(link=1e9)}, True),
        ({"section": {"zero": {"update": "host"}}}, False),
    ],
)
def test_the_plan_decides(more, gpu):
    made = setup(**more)
    assert plan_streams(made) is gpu
    assert not plan_streams(replace(made, mirrored=False)), "host and device are one"


def test_bytes_without_rates_say_what_they_assume():
    section = {"stage": 2, "offload_optimizer": {"device": "cpu", "zero": {"update": "auto"}}}
    given = config(2, 1, zero_optimization=section)
    assert "update 'auto' looks at rates" in str(estimate(1e6, given))
    assert "update 'auto'" not in str(estimate(1e6, given, device="cpu"))
