"""The promise: what ranks send is counted, by operation and unit, and is what ZeRO says: 2 Psi, at stage 3 3 Psi."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from models import config, make_net
from scenario import run

import zero
from zero.log import logger

PER_STEP = {  # how often half of the bytes of all parameters leave each of two ranks
    0: {"reduce": 1, "replica gather": 1},
    1: {"reduce": 1, "gather": 1},
    2: {"reduce": 1, "gather": 1},
    3: {"reduce": 1, "gather": 2},
}
LAST = "<root>"  # what forward uses last is the first of backward, and stays


def sent(engine: Any, number: int) -> list[dict[str, tuple[int, int]]]:
    """Count and bytes so far, by operation and by unit."""
    every = [engine.log_comms_summary(by_unit) for by_unit in (False, True)]
    return [{name: (each.count, each.sent) for name, each in found.items()} for found in every]


def of_second_step(stage: int) -> list[dict[str, tuple[int, int]]]:
    first, second = run("net", stage, steps=2, watch=sent, comms_logger={"enabled": True}).seen
    return [
        {
            name: (count - before.get(name, (0, 0))[0], size - before.get(name, (0, 0))[1])
            for name, (count, size) in now.items()
        }
        for before, now in zip(first, second, strict=True)
    ]


@pytest.mark.ranks(2)
def test_a_step_sends_what_the_paper_says() -> None:
    _, units = of_second_step(2)
    sizes = {name: size for name, (_, size) in units.items() if name}  # half of them twice
    whole = 4 * sum(param.numel() for param in make_net().parameters())
    assert whole <= sum(sizes.values()) < whole + 4 * 1024 * len(sizes), "padded"
    for stage, times in PER_STEP.items():
        operations, units = of_second_step(stage)
        count, norm = operations.pop("gradient norm")
        assert count == 1 and 0 < norm < 1000
        wanted = {name: (each * len(sizes), each * sum(sizes.values()) // 2) for name, each in times.items()}
        stays = sizes[LAST] // 2 if stage == 3 else 0
        if stays:
            wanted["gather"] = wanted["gather"][0] - 1, wanted["gather"][1] - stays
        assert operations == wanted
        halves = {name: sum(times.values()) * size // 2 - (name == LAST) * stays for name, size in sizes.items()}
        assert {name: size for name, (_, size) in units.items()} == halves | {"": norm}


@pytest.mark.ranks(2)
def test_only_the_operations_that_were_asked_for() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    section = {"enabled": True, "prof_all": False, "prof_ops": ["reduce_scatter_tensor"], "verbose": True}
    (traffic,) = run("net", 2, 1, comms_logger=section, keep=lambda engine: engine.log_comms_summary()).seen
    logger.removeHandler(handler)
    assert list(traffic) == ["reduce"]
    assert traffic["reduce"].bus == traffic["reduce"].sent / traffic["reduce"].seconds > 0
    assert any("reduce of unit 'blocks.0'" in line for line in lines)
    assert not any("gather of unit" in line for line in lines)


def test_without_the_log_there_is_no_summary() -> None:
    engine: Any = zero.initialize(model=make_net(), config=config(0, 1))[0]
    with pytest.raises(RuntimeError, match=r"set comms_logger\.enabled to true"):
        engine.log_comms_summary()
    engine.destroy()
