"""The promise: what is inside a leaf module is gathered as one, so ranks may go different ways through it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import WIDTH, Block
from ranks import listening, said_by
from scenario import settings
from stages import build, check, inputs
from torch import nn

import zero
from zero.core.leaf import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)


class Experts(nn.Module):
    """Each rank takes an expert of its own, and one is taken by none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.experts[rank](x)


class Mixture(nn.Module):
    """Two mixtures of experts with a layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Experts()
        self.between = nn.Linear(WIDTH, WIDTH)
        self.two = Experts()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.two(torch.tanh(self.between(self.one(x, rank))), rank).square().mean()


class Marked(Mixture):
    """Marked as leaves in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        set_z3_leaf_modules(self, [Experts])


class Passed(Marked):
    """Experts that also return what they were given, whose gradient comes when theirs are there."""

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.between(x)
        handle = self.two.register_forward_hook(lambda module, args, output: (output, args[0]))
        y, same = self.two(x, rank)
        handle.remove()
        return (self.one(y, rank) + same).square().mean()


@pytest.mark.parametrize("kind", [Marked, Passed], ids=lambda kind: kind.__name__)
def test_ranks_take_different_experts(pool, kind):
    check(pool, kind)


def units(model: nn.Module, **section: Any) -> list[str]:
    engine = zero.initialize(model=model, config=settings(3, 1, **section))[0]
    names = [unit.name for unit in engine.describe().units]
    engine.destroy()
    return sorted(names)


def test_a_leaf_is_one_unit_whatever_it_contains():
    split = [f"{name}.experts.{index}" for name in ("one", "two") for index in range(3)]
    assert units(Mixture()) == sorted([*split, "<root>"])
    assert units(Marked()) == ["<root>", "one", "two"]
    model = Mixture()
    set_z3_leaf_module(model.two, True)
    assert units(model) == sorted(["<root>", "two", *split[:3]])
    set_z3_leaf_module(model, True)
    assert units(model) == ["<root>"]
    assert units(Marked(), zero={"units": ["Block", "between"]}) == ["between", "one", "two"]


def test_a_leaf_inside_a_block_goes_with_the_block():
    model = nn.Sequential(Mixture(), Mixture())
    set_z3_leaf_modules(model, [Experts])
    assert units(model) == ["0", "1"]


def test_the_configuration_marks_leaves():
    by_class, by_name = {"classes": [f"{__name__}.Experts"]}, {"names": ["one", "two"]}
    for section in (by_class, by_name, {"names": ["one"], "name_suffixes": ["wo"]}):
        assert units(Mixture(), section={"leaf_module": section}) == ["<root>", "one", "two"]


def test_the_default_classes_are_marked_by_their_full_names():
    name = "transformers.models.mixtral.modeling_mixtral"
    kind = type("MixtralSparseMoeBlock", (Experts,), {"__module__": name})
    model = Mixture()
    model.one = kind()
    assert "one" in units(model)


def test_names_without_a_match_are_warned_of(caplog):
    section = {"classes": ["Nothing", "Experts"], "names": ["three", "one"], "name_suffixes": ["x"]}
    with caplog.at_level(logging.WARNING, logger="zero"):
        units(Mixture())
        assert not caplog.records
        units(Mixture(), section={"leaf_module": section})
    assert [record.getMessage() for record in caplog.records] == [
        "zero_optimization.leaf_module: nothing in the model matches "
        "classes: 'Nothing', names: 'three', name_suffixes: 'x'"
    ]


@pytest.mark.ranks(2)
def test_a_leaf_that_nobody_calls_is_warned_of_once():
    json = settings(3, 2, section={"leaf_module": {"names": ["one", "two.experts"]}})
    with listening() as said:
        engine = zero.initialize(model=build(Mixture), config=json)[0]
        for step in range(2):
            engine.backward(engine(inputs(step, dist.get_rank()), 0))
            engine.step()
        engine.destroy()
    warned = (
        "leaf modules that were not called in the first forward: 'two.experts'; what is inside is not gathered as "
        "one. Name the module whose forward runs it"
    )
    said = [text for text in said if "sends over gloo" not in text]  # from a GPU
    assert said == ([] if dist.get_rank() else [warned])


def test_marking_and_asking():
    model = Mixture()
    assert set_z3_leaf_modules(model, [Experts]) == [model.one, model.two] == get_z3_leaf_modules(model)
    assert z3_leaf_module(model.one)
    assert not z3_leaf_module(model)
    assert z3_leaf_parameter(model.one.experts[0].up.weight)
    assert not z3_leaf_parameter(model.between.weight)
    assert unset_z3_leaf_modules(model, ["Experts"]) == [model.one, model.two]
    assert get_z3_leaf_modules(model) == []
    assert not z3_leaf_parameter(model.one.experts[0].up.weight)
    assert set_z3_leaf_modules_by_name(model, ["one.experts.1", "five"]) == ([model.one.experts[1]], ["five"])
    assert set_z3_leaf_modules_by_name(model, "one.experts.1", flag=False) == ([model.one.experts[1]], [])
    found, missing = set_z3_leaf_modules_by_suffix(model, ["experts", "q"])
    assert (found, missing) == ([model.one.experts, model.two.experts], ["q"])
    assert get_z3_leaf_modules(model) == found


def test_nothing_found():
    model = build(Mixture)
    for call, names, message in (
        (set_z3_leaf_modules, [nn.LSTM, "Foo"], "of type ['LSTM', 'Foo']"),
        (unset_z3_leaf_modules, ["Foo"], "of type ['Foo']"),
        (set_z3_leaf_modules_by_name, ["x"], "named ['x']"),
        (set_z3_leaf_modules_by_suffix, ["x"], "matching suffixes ['x']"),
    ):
        assert said_by(lambda call=call, names=names: call(model, names)) == (
            f"ValueError: No modules {message} found in model Mixture"
        )
    assert set_z3_leaf_modules(model, [nn.LSTM], raise_if_not_found=False) == []
    assert set_z3_leaf_modules_by_name(model, ["x"], raise_if_not_found=False) == ([], ["x"])
    with pytest.raises(TypeError, match="leaf_module_classes: got 3, wanted classes or names of classes"):
        set_z3_leaf_modules(model, [3])
