"""The promise: `engine.stream_weights` gives each weight whole, one unit at a time, on every stage and placement.

`engine.weight_updates` gives what has changed; taken by a copy, that is the model, bit by bit.
"""

from __future__ import annotations

import copy
import logging
import random
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import WIDE, WIDTH, Block, Net, TiedNet, config, share, step
from offload_cases import BOTH, GPU, HALF, OPTIMIZER, as_on_a_gpu
from ranks import listening
from stand_in_device import storage_of
from torch import nn

import zero
from zero import WeightUpdate
from zero.kernels.marks import unpack

pytestmark = pytest.mark.ranks(2)
WHERE = {"0": {"stage": 0}, "1": {"stage": 1}, "2": {"stage": 2}, "3": {"stage": 3}}
WHERE |= {"1, host": {"stage": 1, **OPTIMIZER}, "3, host": {"stage": 3, **BOTH}}


class Adapted(nn.Module):
    """A frozen matrix and what is added to it: `up` x `down`."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def merging(engine: Any) -> Any:
    """Bases with what their adapters add, under the names of a model that has none."""

    def merge(name: str, tensor: torch.Tensor) -> Any:
        if ".down." in name or ".up." in name:
            return None
        if name.endswith("base.weight"):
            block = engine.module.get_submodule(name.removesuffix(".base.weight"))
            with zero.GatheredParameters(block.parameters()):
                return name.replace("base.", ""), tensor + block.up.weight @ block.down.weight
        return tensor

    return merge


def alive(engine: Any, *given: torch.Tensor) -> int:
    """How many units of stage 3 are whole now, with what was given that lies in other memory."""
    params = [storage_of(param) for param in engine.module.parameters()]
    sizes = [param.numel() * param.itemsize for param in engine.module.parameters()]
    memory = {one.data_ptr() for one, size in zip(params, sizes, strict=True) if one.nbytes() >= size}
    return len(memory | {tensor.untyped_storage().data_ptr() for tensor in given})


@pytest.mark.parametrize("where", ["3, host", *longer("0", "1", "2", "3", "1, host")])
def test_each_weight_comes_whole_and_once(where: str) -> None:
    torch.manual_seed(7)
    section = WHERE[where]
    with as_on_a_gpu():
        settings = config(section["stage"], 2, bf16={"enabled": True}, zero_optimization=section)
        model = TiedNet(Block, Adapted, Block, Adapted, frozen=2)
        engine = zero.initialize(model=model, config=settings)[0]
    step(engine, 0)
    engine.empty_partition_cache()
    first, wanted, merged, most = dist.get_rank() == 0, {}, {}, []
    assert section["stage"] < 3 or alive(engine) == 0
    for name, tensor in engine.stream_weights():
        wanted[name] = tensor.clone()
        most.append(alive(engine, tensor))
    for name, tensor in engine.stream_weights(merge=merging(engine)):
        merged[name] = tensor.clone()
        most.append(alive(engine, tensor))
    assert section["stage"] < 3 or 1 <= max(most) <= 2, "whole at once, with a copy of one weight"
    assert len([name for name in merged if "blocks.1." in name]) == 2
    state = engine.module_state_dict()
    assert list(state.pop("head.weight").shape) == [17, WIDTH]
    assert wanted.keys() == state.keys()
    assert all(torch.equal(wanted[name], state[name]) for name in state)
    for name in ("blocks.1", "blocks.3"):
        added = state[f"{name}.up.weight"] @ state[f"{name}.down.weight"]
        assert torch.equal(merged[f"{name}.weight"], state[f"{name}.base.weight"] + added)
        assert added.any()
    assert not any("up." in name and "blocks.1" in name for name in merged)
    few = dict(engine.stream_weights(torch.float64, ["head.*", "blocks.3.base.bias"], rank0_only=True))
    names = {"head.weight", "head.bias", "blocks.3.base.bias"} if first else set()
    assert few.keys() == names
    assert all(tensor.dtype == torch.float64 for tensor in few.values())
    assert not first or torch.equal(few["head.weight"], wanted["embed.weight"].double())
    for _ in engine.stream_weights(names="blocks.*"):
        if first:  # the others go on
            break
    with pytest.raises(ValueError, match=r"names=\.\.\.: \['nothing\.\*'\] match no parameter or buffer"):
        engine.stream_weights(names=["*.weight", "nothing.*"])
    assert section["stage"] < 3 or alive(engine) == 0
    step(engine, 1)
    assert engine.was_step_applied()
    engine.destroy()


def taken(where: str) -> None:
    """A consumer writes into all that it gets; an engine of the same weights that nobody asks says what is right."""
    torch.manual_seed(7)
    model = TiedNet(Block, Block)
    world = dist.get_world_size() if dist.is_initialized() else 1
    settings = config(WHERE[where]["stage"], world, zero_optimization=WHERE[where])
    engine, twin = (zero.initialize(model=one, config=settings)[0] for one in (model, copy.deepcopy(model)))
    before = {name: tensor.clone() for name, tensor in engine.module_state_dict().items()}

    for stream in (
        lambda: engine.stream_weights(),
        lambda: engine.stream_weights(torch.float32),
        lambda: engine.stream_weights(merge=lambda name, value: value.mul_(2)),
        lambda: engine.weight_updates(None),
    ):
        alive: list[weakref.ref[Any]] = []
        for item in stream():
            tensor = item[-1]
            alive = [*(each for each in alive if each() is not None), weakref.ref(tensor.untyped_storage())]
            assert len(alive) <= 2
            tensor.zero_()
            torch.from_dlpack(tensor.detach()).fill_(3)  # of which its counter of versions knows nothing
            for change in (engine.step, lambda: engine.load_module_state_dict(before)):
                with pytest.raises(RuntimeError, match=r"inside a loop over engine\.stream_weights\(\)"):
                    change()
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.module_state_dict().items())
    for one in (engine, twin):
        step(one, 0)
    wanted = twin.module_state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in engine.module_state_dict().items())
    for one in (engine, twin):
        one.destroy()


@pytest.mark.parametrize("where", ["0", "3", *longer("1", "2", "1, host", "3, host")])
def test_what_is_given_is_the_callers_and_no_step_goes_between(where: str) -> None:
    taken(where)


@pytest.mark.ranks(0)
def test_so_it_is_on_one_rank() -> None:
    taken("3")


# --- updates ---------------------------------------------------------------------------------------------------------


ADAM = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.0}}
COMPACT = {"type": "AdamW", "params": {"lr": 1e-4, "zero": {"moments": "8bit"}}}
PLACES = {str(stage): {"stage": stage} for stage in range(4)} | {
    "1, host": {"stage": 1, **OPTIMIZER},
    "2, half": {"stage": 2, **HALF},
    "3, host": {"stage": 3, **BOTH},
    "2, streamed from host": {"stage": 2, "offload_optimizer": GPU},
    "3, 8 bits": {"stage": 3, "zero_quantized_weights": True},
}


class Model(Net):
    """A Net with a tied head, a frozen block, a buffer, and a table of which few rows are read."""

    def __init__(self, width: int) -> None:
        super().__init__(vocabulary=97, width=width)
        self.head.weight = self.embed.weight
        self.rare = nn.Embedding(97, width)
        self.blocks[1].requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.embed.register_forward_hook(lambda module, args, out: out + self.rare(*args))


def start(where: str, dtype: str = "bf16", **more: Any) -> Any:
    torch.manual_seed(7)
    section, width = PLACES[where], WIDE if more.get("optimizer") is COMPACT else 12
    model = Model(width)
    settings = config(section["stage"], dist.get_world_size(), zero_optimization=section, **{"optimizer": ADAM, **more})
    settings |= {} if dtype == "fp32" else {dtype: {"enabled": True}}
    settings["zero"] = {"track_updates": True, **settings.get("zero", {})}
    made = None
    if more.get("optimizer", 1) is None:
        del settings["optimizer"]
        settings["zero_allow_untested_optimizer"] = True
        made = torch.optim.RMSprop([param for param in model.parameters() if param.requires_grad], lr=1e-5)
    with as_on_a_gpu("host" in where or "half" in where):
        return zero.initialize(model=model, optimizer=made, config=settings)[0]


def now(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.stream_weights()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(bits(one[name]), bits(two[name])) for name in one)


def apply(updates: Any, copy: dict[str, torch.Tensor]) -> dict[str, WeightUpdate]:
    """Bring a copy up to date; returns the updates, with values of their own."""
    found = {}
    for update in updates:
        update.apply_to(copy[update.name])
        found[update.name] = update._replace(values=update.values.clone())
    return found


def check_exact(found: dict[str, WeightUpdate], before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> int:
    """That an update of one step has what that step has changed and no more; how many came in parts."""
    parts = 0
    for name, old in before.items():
        changed = (old.view(-1) != after[name].view(-1)).nonzero().view(-1)
        if name not in found:
            assert not len(changed), name
            continue
        _, where, values = found[name]
        if name == "scale" or where is None:
            assert name == "scale" or len(changed) > 0.4 * old.numel(), name
            continue
        parts += 1
        assert 0 < len(changed) <= 0.4 * old.numel(), name
        got = where.long() if where.dtype == torch.int32 else unpack(where, old.numel()).nonzero().view(-1)
        assert torch.equal(got, changed), name
        assert torch.equal(values, after[name].view(-1)[changed])
        assert values.nbytes + where.nbytes <= (4 + old.element_size()) * len(changed)
    return parts


CASES = [("3, host", "bf16", {}), ("1", "fp32", {})]
MORE = [
    *((where, "bf16", {}) for where in ("0", "1, host", "2, half", "2, streamed from host", "3, 8 bits")),
    ("2", "fp16", {}),
    ("3, host", "fp32", {"optimizer": None}),
    ("3", "bf16", {"optimizer": COMPACT}),
]


@pytest.mark.parametrize(("where", "dtype", "more"), [*CASES, *longer(*MORE)])
def test_a_copy_that_takes_the_updates_of_random_steps_is_the_model(where: str, dtype: str, more: Any) -> None:
    engine = start(where, dtype, **more)
    copy, late, parts, at = now(engine), now(engine), 0, 0
    for count in (1, *random.Random(3).sample(range(1, 5), 3)):
        before = {name: tensor.clone() for name, tensor in copy.items()}
        since = engine.global_steps
        for _ in range(count):
            step(engine, at)
            at += 1
        found = apply(engine.weight_updates(since), copy)
        wanted = now(engine)
        assert same(copy, wanted)
        assert not any("blocks.1" in name for name in found), "the frozen ones stay"
        parts += check_exact(found, before, wanted) if count == 1 else 0
    assert parts > 0
    apply(engine.weight_updates(0), late)  # another consumer, who begins at the start
    assert same(late, now(engine))
    assert {update.name for update in engine.weight_updates(engine.global_steps)} <= {"scale"}
    assert engine.was_step_applied()
    engine.destroy()


@pytest.mark.parametrize("where", ["3", *longer("0", "1", "1, host", "3, host")])
def test_what_others_write_comes_too_and_what_is_not_known_comes_whole(where: str) -> None:
    engine, first = start(where, "fp16", zero={"track_updates": False}), dist.get_rank() == 0
    copy = {name: torch.empty_like(tensor) for name, tensor in now(engine).items()}

    def check(since: int | None) -> dict[str, WeightUpdate]:
        found = apply(engine.weight_updates(since), copy)
        assert same(copy, now(engine))
        return found

    assert all(update.where is None for update in check(None).values())  # the first call
    engine.backward(engine(*share(0)) * float("inf"))
    engine.step()
    assert not engine.was_step_applied()
    assert check(0).keys() <= {"scale"}  # nothing in a step that was skipped
    with zero.GatheredParameters(engine.module.blocks[1].up.weight, modifier_rank=0):
        nn.init.ones_(engine.module.blocks[1].up.weight)  # a frozen one
    assert check(1)["blocks.1.up.weight"].where is None
    step(engine, 1)
    engine.load_module_state_dict({name: tensor + 1 for name, tensor in engine.module_state_dict().items()})
    assert all(update.where is None for update in check(1).values())
    with listening(logging.INFO) as told:
        for index in range(3):
            step(engine, 2 + index)
        assert any(update.where is not None for update in check(2).values())
        assert not any("weight_updates" in text for text in told)
        engine.optimizer.zero_grad()
        assert check(4).keys() == copy.keys()
    if first:
        assert "weight_updates(since=4): marks begin at the steps [0, 1, 2, 5]; all weights come whole" in told
    if engine.zero_optimization_stage() < 3:
        with torch.no_grad():
            engine.module.embed.weight.mul_(2)  # as plain torch does, frozen or not
            engine.module.blocks[1].up.weight.mul_(2)
        assert {"embed.weight", "blocks.1.up.weight"} <= check(5).keys()
    for _ in engine.weight_updates(None):
        if first:
            break
    assert bool(list(engine.weight_updates(None, rank0_only=True))) == first
    with pytest.raises(RuntimeError, match=r"the ranks gave \[5, -1\]"):
        engine.weight_updates(5 if first else None)
    step(engine, 9)
    engine.destroy()


@pytest.mark.long
def test_a_load_is_seen(tmp_path: Any) -> None:
    """After a load the copy becomes the model of the checkpoint, wherever the counter goes."""
    engine = start("3")
    copy = now(engine)
    step(engine, 0)
    engine.save_checkpoint(tmp_path, tag="one")
    for index in range(3):
        step(engine, 1 + index)
    apply(engine.weight_updates(0), copy)
    engine.load_checkpoint(tmp_path, tag="one")
    for since in (4, engine.global_steps):
        apply(engine.weight_updates(since), copy)
        assert same(copy, now(engine))
        step(engine, 5)
    apply(engine.weight_updates(2), copy)
    assert same(copy, now(engine))
    engine.destroy()
