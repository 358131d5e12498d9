"""The promise: `"zero": {"recompute": ...}` changes no bit of a training, on any stage, in whatever way it runs."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import share
from recomputing import Block, Net, all_same, make, result, same, settings, steps, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from zero.core import comm
from zero.recompute.modules import Recomputed

pytestmark = pytest.mark.ranks(2)
FULL = {"modules": ["Block"]}
SELECTIVE = {"modules": ["blocks.*"], "policy": "selective"}
HOST = {"cpu_checkpointing": True}
BLOCK_OF_INPUTS = {"contiguous_memory_optimization": True, "number_checkpoints": 3}
WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (FULL, {}),
    (SELECTIVE, {}),
    ({**SELECTIVE, "products": 2}, {}),
    ({**FULL, "every": 2}, {}),
    ({**FULL, "policy": "auto", "budget": "20 KB"}, {}),
    (FULL, HOST),
    (FULL, BLOCK_OF_INPUTS),
    (SELECTIVE, {**HOST, **BLOCK_OF_INPUTS, "number_checkpoints": 2}),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("stage", "world", "dtype", "reduce"),
    [
        *((3, 2, "bf16", "ranks"), (2, 2, "fp32", "tree"), (0, 1, "fp32", "ranks")),
        *longer((1, 2, "bf16", "ranks"), (3, 1, "fp32", "ranks")),
    ],
)
def test_no_bit_changes(stage, world, dtype, reduce):
    more = {"bf16": {"enabled": dtype == "bf16"}, "zero": {"reduce": reduce}}
    base = trained(make(), settings(stage, {}, **more))
    for section, rest in WAYS:
        assert same(base, trained(make(), settings(stage, section, activation_checkpointing=rest, **more)))


def test_no_bit_changes_with_offload(tmp_path):
    """State and parameters off the device, against a training with neither that nor recomputation."""
    base = trained(make(), settings(3, {}))
    for place in ({"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path)}):
        section = {"stage": 3, "offload_optimizer": place, "offload_param": place}
        for recompute, rest in (FULL, {}), (SELECTIVE, HOST):
            more = {"zero_optimization": section, "activation_checkpointing": rest}
            assert same(base, trained(make(), settings(3, recompute, **more)))


def gathers(section: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Tags of the gathers of a step, which tell units, and how often each block's forward ran."""
    engine = zero.initialize(model=make(), config=settings(3, section))[0]
    steps(engine, 1)
    for block in engine.module.blocks:
        block.calls = 0
    tags, plain = [], comm.gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "gather", lambda full, axis, tag: (tags.append(tag), plain(full, axis, tag))[1])
        steps(engine, 1)
    calls = [block.calls for block in engine.module.blocks]
    engine.destroy()
    return sorted(tags), calls


def test_a_recomputed_unit_is_gathered_once():
    (plain, once), (full, twice), (selective, again) = [gathers(section) for section in ({}, FULL, SELECTIVE)]
    assert plain == full == selective
    assert once == [1, 1, 1]
    assert twice == again == [2, 2, 2]


def two_losses(engine: Any) -> list[float]:
    """Backward calls of several kinds: a graph run twice, two losses through one forward, one through two."""
    first = engine(*share(0))
    first.backward(retain_graph=True)
    first.backward()
    x = engine.module.embed(share(1)[0])
    second = engine.module.body(x)
    (second[:, 0].sum() * 0.1).backward(retain_graph=True)
    second.square().mean().backward()
    third = engine(*share(2)) + engine(*share(3))
    third.backward()
    engine.step()
    return [first.item(), second.sum().item(), third.item()]


class Smooth(nn.Module):
    """Has a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_through_a_backward(stage):
    """A penalty on the gradient."""
    found = []
    for section, rest in ({}, {}), ({}, {}), (SELECTIVE, {}), ({}, {**HOST, **BLOCK_OF_INPUTS}):
        torch.manual_seed(1)
        model = nn.Sequential(*(Smooth() for _ in range(3)))
        section = {**section, "modules": ["Smooth"]} if found else {}
        engine = zero.initialize(model=model, config=settings(stage, section, activation_checkpointing=rest))[0]
        for _ in range(2):
            x = torch.ones(2, 6, requires_grad=True)
            y = engine(x * 1.0).sum()
            (slope,) = torch.autograd.grad(y, x, create_graph=True)
            (y + slope.square().sum()).backward()
            engine.step()
        found.append(result(engine, [y.item(), slope.tolist()]))
    all_same(found)


@pytest.mark.parametrize("stage", [3, *longer(1)])
def test_backward_runs_several_times(stage):
    found = []
    for section, rest in ({}, {}), (FULL, {}), (SELECTIVE, {}), (FULL, {**HOST, **BLOCK_OF_INPUTS}):
        engine = zero.initialize(model=make(), config=settings(stage, section, activation_checkpointing=rest))[0]
        torch.manual_seed(4)
        found.append(result(engine, [two_losses(engine), steps(engine, 1)]))
    all_same(found)


class SelfCheckpointing(Net):
    """Recomputes its blocks, and parts of them, itself."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.blocks:
            block.dropout = Again(block.dropout)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(self.one, block, x, use_reentrant=number == 1)
        return x

    def one(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x, (self.turn[0], self.turn[1]), scale=self.turn[0, 0])


class Again(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("stage", [3, *longer(0)])
def test_a_model_that_recomputes_itself(stage):
    base = trained(make(), settings(stage, {}))
    sections = ({}, FULL, SELECTIVE, {"modules": ["Again"]}, {"modules": ["SelfCheckpointing"]})
    made = [trained(make(SelfCheckpointing), settings(stage, section)) for section in sections]
    made.append(trained(make(SelfCheckpointing), settings(stage, FULL, activation_checkpointing=HOST)))
    renamed = [
        {**each, "params": {name.replace("inner.", ""): p for name, p in each["params"].items()}} for each in made
    ]
    all_same([base, *renamed])


def test_without_gradients_forward_is_plain():
    engine = zero.initialize(model=make(), config=settings(3, FULL, activation_checkpointing=HOST))[0]
    engine.eval()
    with torch.no_grad():
        engine(*share(0))
    with torch.inference_mode():
        engine(*share(0))
    assert [block.calls for block in engine.module.blocks] == [2, 2, 2]
    loss = engine(*share(0))  # in eval with gradients, memory is wanted as in training
    loss.backward()
    assert [block.calls for block in engine.module.blocks] == [4, 4, 4]
    engine.destroy()


class Fragile(Block):
    """Raises in the call before which `fail_at` calls have been."""

    fail_at = -1

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.calls == self.fail_at:
            raise ArithmeticError("no")
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("stage", [3, *longer(0)])
def test_an_exception_in_a_recomputation_leaves_the_engine_usable(stage):
    """Steps that fail in the recomputation of the middle block; what follows is as if they had not been."""
    base = trained(make(), settings(stage, {}))
    for section, rest in (FULL, {}), (SELECTIVE, {}), (FULL, {**HOST, **BLOCK_OF_INPUTS}):
        model = make()
        model.blocks[1].__class__ = Fragile
        values = settings(stage, {**section, "modules": ["blocks.*"]}, activation_checkpointing=rest)
        engine = zero.initialize(model=model, config=values)[0]
        for call in engine.backward, torch.Tensor.backward:
            loss = engine(*share(7))
            model.blocks[1].fail_at = model.blocks[1].calls
            with pytest.raises(ArithmeticError):
                call(loss)
            model.blocks[1].fail_at = -1
        torch.manual_seed(100 + dist.get_rank())
        assert same(base, result(engine, steps(engine, 3)))


def own_forward(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """A forward that its module was given as an attribute."""
    return x * 2.0


@pytest.mark.parametrize("stage", [0, 3])
def test_nothing_of_the_model_changes(stage):
    plain = make()
    model = make()
    model.blocks[2].forward = own_forward
    signature = inspect.signature(model.blocks[0].forward)
    engine = zero.initialize(model=model, config=settings(stage, FULL))[0]
    blocks = engine.module.blocks
    assert all(isinstance(block.forward, Recomputed) for block in blocks)
    assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    assert list(engine.module_state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert inspect.signature(blocks[0].forward) == signature
    with zero.GatheredParameters(list(model.parameters())):
        copies = [copy.deepcopy(blocks), pickle.loads(pickle.dumps(blocks))]
    for copied in copies:
        assert not any(isinstance(block.forward, Recomputed) for block in copied)
        assert copied[0].forward.__self__ is copied[0] and copied[2].forward is own_forward
    engine.destroy()
    assert not any("forward" in block.__dict__ for block in model.blocks[:2])
    assert model.blocks[2].forward is own_forward


def refused(section: dict[str, Any], kind: type[Net] = Net) -> str:
    model = make(kind)
    with pytest.raises(ValueError) as caught:
        zero.initialize(model=model, config=settings(0, section))
    assert not any("forward" in module.__dict__ for module in model.modules())
    zero.initialize(model=model, config=settings(0, FULL))[0].destroy()  # the model is as it was
    return str(caught.value)


def test_modules_that_are_not_there_are_named():
    there = "Its classes are ['Block', 'Dropout', 'Embedding', 'LayerNorm', 'Linear', 'ModuleList', 'Net']."
    for modules, wrong, meant in (["Blok", "Block"], "Blok", "Block"), (["block.1"], "block.1", "blocks.1"):
        said = f"zero.recompute.modules: ['{wrong}'] match no module of the model; did you mean '{meant}'? {there}"
        assert refused({"modules": modules}) == said
    said = "zero.recompute.modules: 'blocks' is a ModuleList, which has no forward; name the modules in it"
    assert refused({"modules": ["blocks"]}) == said
