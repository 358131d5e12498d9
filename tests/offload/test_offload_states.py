"""The promise: states that rested in host memory come back bit by bit, and nobody uses them in between."""

from __future__ import annotations

import enum
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import WIDE, batch, config, make_net, share, step
from ranks import said_by

import zero
from zero.utils import safe_get_full_fp32_param, safe_get_local_optimizer_state


class Named(enum.Enum):
    """As DeepSpeed's enum of states."""

    optim_states = "optim_states"
    hp_params = "hp_params"


def start(stage: int, kind: str) -> Any:
    moments = {"8bit": {"moments": "8bit"}, "torch": None}.get(kind, {})
    params: dict[str, Any] = {"lr": 1e-2}
    params |= {"torch_adam": True} if moments is None else {"zero": moments}
    settings = config(
        stage,
        dist.get_world_size(),
        accumulation=2,
        bf16={"enabled": kind != "fp32"},
        optimizer={"type": "AdamW", "params": params},
    )
    return zero.initialize(model=make_net(blocks=2, width=WIDE), config=settings)[0]


def alive(engine: Any) -> int:
    """Bytes of model state that have memory, by storage."""
    found = {}
    for unit in engine._sharded.units:
        tensors = [
            unit.buffer.full,
            unit.shard.values,
            unit.shard.master.tensor,
            unit.gradients.flat,
            unit.gradients.shard,
        ]
        for tensor in [*tensors, *(tensor for _, _, tensor in engine.optimizer.states.tensors(unit))]:
            if tensor is not None:
                found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def run(stage: int, kind: str, include: Any, when: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], list[int]]:
    engine = start(stage, kind)
    seen = []
    for index in range(6):
        step(engine, index)
        if index in when:
            before = alive(engine)
            engine.offload_states(include, pin_memory=False)
            engine.offload_states(include)
            seen.append((before, alive(engine)))
            engine.reload_states()
            engine.reload_states(non_blocking=True)
            seen.append((before, alive(engine)))
    engine.destroy()
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}, seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "kind"), [(0, "bf16"), (1, "8bit"), (2, "torch"), (3, "bf16"), (3, "fp32")])
def test_what_comes_back_is_what_went(stage, kind):
    wanted, _ = run(stage, kind, None, ())
    said = []
    for include in (None, ["lp_params"], list(Named)):
        # In the middle of a window, too; moments are there from the first step on.
        found, seen = run(stage, kind, include, (0, 1, 3) if include is None else (1, 2, 3))
        said += [torch.equal(wanted[name], value) for name, value in found.items()]
        small = [pair for index, pair in enumerate(seen) if index % 2 == 0]
        # Single numbers of torch's optimizers are in host memory anyway, but go along.
        said += [after == 0 if include is None else after < before for before, after in small]
        said += [after == before for index, (before, after) in enumerate(seen) if index % 2 == 1]
    assert all(said), said


def uses(stage: int) -> list[str]:
    engine = start(stage, "bf16")
    mine = share(0)
    loss = engine(*mine)
    param = engine.module.head.bias
    engine.offload_states()
    said = [
        said_by(lambda: engine(*mine)),
        said_by(lambda: engine.backward(loss)),
        said_by(engine.step),
        said_by(engine.optimizer.step),
        said_by(lambda: safe_get_full_fp32_param(param)),
        said_by(lambda: safe_get_local_optimizer_state(param, "exp_avg")),
        said_by(lambda: param + 1),
        said_by(lambda: engine.module(*mine)),
        said_by(lambda: zero.GatheredParameters(param).__enter__()),
        said_by(engine.module_state_dict),
        said_by(engine.module.state_dict),
    ]
    engine.reload_states()
    step(engine, 0)
    engine.offload_states()
    engine.destroy()  # brings everything back by itself
    return [*said, str(bool(torch.isfinite(param).all()))]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_nobody_uses_what_is_away(pool, stage):
    for *said, whole in pool.run(2, uses, stage):
        assert [text for text in said if "reload_states()" not in text or not text.startswith("RuntimeError")] == []
        assert whole == "True"


def inference(stage: int) -> bool:
    """With parameters on the device, the module itself may be used while the optimizer's state rests."""
    engine = start(stage, "bf16")
    tokens, targets = batch(0, 2)
    with torch.no_grad():
        wanted = engine(tokens, targets)
        engine.offload_states(["optim_states", "hp_params"])
        return torch.equal(engine.module(tokens, targets), wanted)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_module_computes_while_only_the_optimizers_state_rests(pool, stage):
    assert pool.run(2, inference, stage) == [True, True]


def test_what_cannot_be_offloaded_is_said(caplog):
    engine = zero.initialize(model=make_net(), config=config(0, 1))[0]
    sentence = "ValueError: NVMe offload is not supported for offloading states."
    assert said_by(lambda: engine.offload_states(device="nvme")) == sentence
    assert "unknown ['grads']; known: optim_states" in said_by(lambda: engine.offload_states(["grads"]))
    assert "wanted 'cpu'" in said_by(lambda: engine.offload_states(device="disk"))
    with caplog.at_level(logging.WARNING, logger="zero"):
        engine.offload_states(device="none")
    assert "nothing is offloaded" in caplog.text
    with zero.GatheredParameters(engine.module.head.bias):
        assert "call it outside" in said_by(engine.offload_states)
    engine.reload_states()
    settings = {key: value for key, value in config(0, 1).items() if key != "optimizer"}
    bare = zero.initialize(model=make_net(), config=settings)[0]
    assert "needs an optimizer" in said_by(bare.offload_states)
