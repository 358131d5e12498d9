"""The promise: a cut is known wherever its parameter goes, and a grid along which nothing lies is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact import WAYS, Exact
from scenario import settings
from torch import nn

import zero
from zero.core.owner import axes_of, cut_of, keep_cuts
from zero.plan.grid import PARTS
from zero.utils import safe_set_full_fp32_param


def half(linear: nn.Linear) -> nn.Linear:
    """A layer of which this is said to be the first of two parts."""
    shape = (2 * linear.out_features, linear.in_features)
    zero.set_cut(linear.weight, zero.Cut(shape, (zero.Box((0, 0), tuple(linear.weight.shape)),)), module=linear)
    return linear


def replaced(linear: nn.Linear) -> nn.Linear:
    linear.weight = nn.Parameter(linear.weight.detach().double())
    return linear


def swapped(linear: nn.Linear) -> nn.Linear:
    torch.utils.swap_tensors(linear.weight, nn.Parameter(torch.ones_like(linear.weight)))
    return linear


@pytest.mark.parametrize(
    "changed",
    [copy.deepcopy, replaced, swapped, nn.Module.double, lambda layer: nn.Sequential(layer)[0]],
    ids=["deepcopy", "another parameter", "swapped", "double", "moved"],
)
def test_a_cut_is_kept_by_name(changed: Any) -> None:
    linear = half(nn.Linear(4, 3))
    cut = cut_of(linear.weight)
    changed = changed(linear)
    keep_cuts(changed)  # as initialize() does
    assert cut_of(changed.weight) == cut and axes_of(changed.weight) == PARTS
    assert cut_of(changed.bias) is None


def test_a_copied_parameter_keeps_its_cut_by_itself() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    zero.set_cut(weight, zero.Cut((4, 2), (zero.Box((2, 0), (2, 2)),)))
    assert cut_of(copy.deepcopy(weight)) == cut_of(weight) and type(copy.deepcopy(nn.ParameterList([weight]))[0])
    with pytest.raises(ValueError, match=r"has no such parameter of its own"):
        zero.set_cut(weight, cut_of(weight), module=nn.Linear(1, 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp": 2}, "tensor_parallel.autotp_size 2: nothing tells how Linear is cut"),
        ({"pp": 2}, "pp is 2, and all ranks have the same parameters"),
        ({"ep": 2}, "autoep_size 2: no experts are found in Linear"),
    ],
)
def test_a_grid_along_which_nothing_lies_is_refused(sizes: dict[str, int], said: str) -> None:
    data = 2 // (sizes.get("tp", 1) * sizes.get("pp", 1))
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            zero.initialize(model=nn.Linear(4, 4), config=settings(1, data), mesh_param=sizes)


@pytest.mark.ranks(2)
def test_parts_that_do_not_make_it_up_are_refused_on_all_ranks() -> None:
    with pytest.raises(ValueError, match=r"the ranks' parts of parameter 'weight' \(6, 4\) do not make it up"):
        zero.initialize(model=half(nn.Linear(4, 3)), config=settings(1, 1), mesh_param={"tp": 2})


@pytest.mark.ranks(4)
def test_a_wrong_value_on_one_rank_raises_on_all_at_once() -> None:
    """Along both of its axes: the others would wait for their time-out."""
    way = WAYS["tp 2 x dp 2"]
    engine = zero.initialize(model=Exact(way), config=settings(3, 2), mesh_param=way.sizes)[0]
    wrong = 1 if dist.get_rank() == 3 else 0
    for name, shape in (("up", (24, 8)), ("scale", (8,))):
        with pytest.raises((ValueError, RuntimeError), match=r"shape|rank 3"):
            safe_set_full_fp32_param(engine.module.get_parameter(name), torch.zeros(shape[0] + wrong, *shape[1:]))
    engine.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", ["tp 2 x dp 2", "pp 2 x dp 2"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_flipped_number_is_found_among_those_that_hold_the_same(way: str, stage: int) -> None:
    sizes = WAYS[way].told(stage)
    json = settings({"stage": stage, "zero": {"check_replicas": 1}}, 2)
    engine = zero.initialize(model=Exact(WAYS[way]), config=json, mesh_param=sizes)[0]
    for number in range(3):
        if number == 2 and dist.get_rank() == 1:  # of stage 0 of the pipeline
            with torch.no_grad():
                next(engine.module.parameters()).view(-1)[3] += 1
        engine.backward(engine(number))
        if number < 2:
            engine.step()
    with pytest.raises(RuntimeError, match=r"zero\.check_replicas: parameter '(up|embed|scale)' of unit"):
        engine.step()
    engine.destroy()
