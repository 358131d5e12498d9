"""The promise: experts that cannot be divided right are refused by an error that says what was found."""

from __future__ import annotations

import copy
import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import WIDTH, family, full, integers, place_of
from expert_models import Experts, Mixture, json_with
from marks import longer
from ranks import said_by
from sharing import needs_transformers
from torch import nn

import zero
from zero.config import ConfigError, load
from zero.config.expert_parallel import ExpertParallel
from zero.parallel.experts.cutting import CutExperts, divided
from zero.parallel.experts.find import experts_of
from zero.parallel.refusals import refuse_model


def said(model: nn.Module, ranks: int = 2, **section: Any) -> str:
    with pytest.raises(ValueError) as error:
        experts_of(model, ExpertParallel(enabled=True, autoep_size=ranks, **section), ranks)
    return str(error.value)


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))


class Called(nn.Module):
    """Called like experts, with stacks of these lengths."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.zeros(length, WIDTH, WIDTH)) for length in lengths)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x


class Positions(nn.Module):
    """A table for each of two dimensions, which is no stack of experts (Gemma 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2, 5, WIDTH))

    def forward(self, pixels: torch.Tensor, positions: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return pixels + self.table[:, positions].sum(0).masked_fill(padding, 0)


def test_what_was_found_is_said() -> None:
    assert said(Separate()).startswith(
        "expert_parallel.autoep_size 2: no experts are found in Separate: experts are lists of separate modules "
        "(Linear); stack their weights in one parameter [experts, ...] of a module"
    )
    assert "no experts are found in Positions; say which they are by zero.experts" in said(Positions())
    named = nn.ModuleDict({"expert_bank": nn.Bilinear(2, 2, 2)})
    assert "expert_bank {'weight': (2, 2, 2), 'bias': (2,)} are no stacks that are called" in said(named)
    both = nn.ModuleDict({"good": Called(4, 4), "odd": Called(4, 8)})
    assert said(both).startswith(
        "expert_parallel.autoep_size: 'odd', a Called, is called like experts, and its parameters are not stacks of "
        "equally many: {'up': (4, 8, 8), 'down': (8, 8, 8)}. Say which are stacks by zero.experts(module, names)"
    )
    (found,) = experts_of(both, ExpertParallel(enabled=True, moe_layer_pattern="good"), 2)
    assert found.name == "good"
    both["other"] = Called(6, 6)  # another number, which the ranks divide, too
    assert len(experts_of(both, ExpertParallel(enabled=True, moe_layer_pattern="good|other"), 2)) == 2
    both.config = SimpleNamespace(num_experts=4)
    assert "config.num_experts does not say what is found: {'good': 4, 'other': 6}" in said(
        both, moe_layer_pattern="good|other", num_experts_attr="num_experts"
    )


def test_stacks_are_parameters_of_one_length() -> None:
    with pytest.raises(ValueError, match=r"Called has stacks of different lengths: \{'up': 4, 'down': 8\}"):
        zero.experts(Called(4, 8), ["up", "down"])
    with pytest.raises(ValueError, match=r"Called has no parameters \['gate'\] of its own"):
        zero.experts(Called(4, 4), ["up", "gate"])


@pytest.mark.parametrize(("count", "ranks", "near"), [(6, 4, "2 or 3"), (5, 2, "1 or 5"), (2, 4, "1 or 2")])
def test_ranks_that_do_not_divide_the_experts_are_told_which_would(count: int, ranks: int, near: str) -> None:
    assert said(Experts(count), ranks) == (
        f"expert_parallel.autoep_size {ranks} does not divide the {count} experts of 'blocks.0.mix.experts'; {near} do"
    )


def test_ranks_that_do_not_divide_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"ep 3 .*divide"):
        load(json_with(3), 4)


def test_experts_that_were_divided_before() -> None:
    model = Experts()
    model.__dict__[CutExperts.RECORD] = SimpleNamespace(axis=SimpleNamespace(size=4))
    with pytest.raises(ValueError, match=r"were divided among 4 ranks, for an engine .*this JSON says 2; make the"):
        divided(model, load(json_with(2), 4), 0)


@needs_transformers
def test_experts_that_transformers_has_divided_and_routers_of_whole_sequences() -> None:
    model = family("mixtral")
    model.model.layers[1].mlp.experts._is_expert_parallel = True
    assert "Transformers has divided the experts of 'model.layers.1.mlp.experts' itself; load" in said(model)
    for name in ("mixtral", "qwen3_moe"):
        with pytest.raises(ValueError, match="config has output_router_logits, which needs the whole sequence"):
            refuse_model(family(name, output_router_logits=True))


@needs_transformers
def test_a_plan_that_names_what_has_no_stacks() -> None:
    model = family("mixtral")
    model.model.layers[0].mlp.experts = nn.Linear(2, 2)
    assert "the ep_plan names 'model.layers.0.mlp.experts', a Linear, whose parameters are not stacks" in said(model)


class Bypassed(Mixture):
    """Reads the stacks itself, of which it would find a part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(x @ up.t() @ down.t() for up, down in zip(self.experts.up, self.experts.down, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "stage"), [(2, 1), *longer((2, 0), (2, 3), (4, 2))])
def test_copies_and_state_dicts_of_parts_which_are_whole_behind_the_engine(world: int, stage: int) -> None:
    """Each would look like the model's own, with this rank's experts."""
    model, wanted = Experts(), Experts().state_dict()
    engine, *_ = zero.initialize(model=model, config=json_with(2, stage))
    assert "which is cut over 2 ranks" in said_by(model.state_dict)
    text = "is released; read it" if stage == 3 else "a copy of Experts, whose experts are divided among 2 ranks"
    for call in (lambda: copy.deepcopy(model), lambda: torch.save(model, io.BytesIO())):
        assert text in said_by(call)
    engine.destroy()
    found = copy.deepcopy(model).state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert model(**integers(0, 0)).equal(Experts()(**integers(0, 0)))


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "stage"), [(2, 3), *longer((2, 0), (4, 1), (4, 2))])
def test_stacks_that_are_read_without_a_call(world: int, stage: int) -> None:
    """The first step is refused on all ranks, and nothing has changed."""
    model = Experts()
    model.blocks[1].mix = Bypassed(4, None)
    for param in model.blocks[1].mix.parameters():
        nn.init.ones_(param)
    engine, *_ = zero.initialize(model=model, config=json_with(2, stage))
    engine.backward(engine(**integers(0, place_of(1))))
    before = full(engine)
    assert said_by(engine.step).startswith(
        "RuntimeError: expert_parallel: 'blocks.1.mix.experts.down' (Stacks), 'blocks.1.mix.experts.up' (Stacks) had "
        "gradients, and no forward called the module: whoever reads its parameters finds the experts of one of 2 ranks"
    )
    assert all(torch.equal(value, before[name]) for name, value in full(engine).items())
    engine.destroy()


class Skipping(Experts):
    """Each rank leaves out the experts of another block."""

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for at, block in enumerate(self.blocks):
            x = x + block.mlp(x if at == dist.get_rank() % 2 else x + block.mix(x))
        return (self.head(x) * weights).sum() / 1024


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "stage"), [(2, 1), *longer((2, 0), (2, 2), (4, 1))])
def test_ranks_that_call_experts_of_other_layers_at_a_time(world: int, stage: int) -> None:
    """Their counts fit each other, and tokens would be computed by experts of another layer."""
    engine, *_ = zero.initialize(model=Skipping(), config=json_with(2, stage))
    odd = dist.get_rank() % 2
    first = dist.get_rank() - odd
    assert said_by(lambda: engine(**integers(0, place_of(1)))).startswith(
        f"RuntimeError: expert_parallel: ranks [{first}, {first + 1}] call modules [1, 0] of those with experts at the "
        f"same time, this one 'blocks.{1 - odd}.mix.experts', number {1 - odd}; all have to call the same ones"
    )
    engine.destroy()


class Leaving(Experts):
    """The first rank does not come to the last experts."""

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for at, block in enumerate(self.blocks):
            x = x + block.mlp(x if at and not dist.get_rank() else x + block.mix(x))
        return (self.head(x) * weights).sum() / 1024


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "stage"), longer(*((world, stage) for world in (2, 4) for stage in range(4))))
def test_ranks_that_do_not_come_to_the_last_experts_are_named(world: int, stage: int) -> None:
    """One is in its backward, whose messages have other sizes: gloo took one for the other, and ended the process."""
    engine, *_ = zero.initialize(model=Leaving(), config=json_with(2, stage))

    def step() -> None:
        engine.backward(engine(**integers(0, place_of(1))))
        engine.step()

    assert re.match(r"Parted: .*ranks 0(, 1|-3) run different parts of the program", said_by(step))
