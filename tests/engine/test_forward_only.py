"""The promise: a program may make one more engine of a model that only runs forward, before or beside the one that
trains; it computes what that one would, and changes nothing of the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marks import longer
from models import config, make_net, share, step
from torch import nn

import zero
from zero.core.comm import local_device

STEPS = 3


def make(net: nn.Module, stage: int, trains: bool, **more: Any) -> Any:
    json = config(stage, 2, **more)
    if not trains:
        del json["optimizer"]
    return zero.initialize(model=net, config=json)[0]


def seen(model: nn.Module) -> torch.Tensor:
    """The loss of a batch that nothing trains on."""
    model.eval()
    with torch.no_grad():
        loss = model(*share(99))
    model.train()
    return loss


def built(stage: int) -> nn.Module:
    with zero.Init(config=config(stage, 2), enabled=stage == 3):
        return make_net()


def trained(stage: int, looks: int | None, first: bool = False, **more: Any) -> tuple[list[Any], list[Any]]:
    """Losses of the training, and of the looks at it: by an engine at stage `looks`, made first or after a step, or
    by the one that trains."""
    net = built(stage)
    looker = make(net, looks, False, **more) if first else None
    found = [seen(looker)] if first else []
    engine = make(net, stage, True, **more)
    losses = [step(engine, 0)]
    if looks is not None and not first:
        looker = make(net, looks, False, **more)
    found.append(seen(looker or engine))
    for number in range(1, STEPS):
        losses.append(step(engine, number))
        found.append(seen(looker or engine))
    if looker is not None:
        assert isinstance(looker, zero.Engine) and looker.module is net and looker.optimizer is None
        assert all(map(torch.equal, looker.module_state_dict().values(), engine.module_state_dict().values()))
        for call in (looker.step, lambda: looker.backward(losses[-1]), lambda: looker.save_checkpoint("never")):
            with pytest.raises(RuntimeError, match="this engine only runs forward; another one has its model by now"):
                call()
        looker.destroy()
    losses.append(step(engine, STEPS))
    engine.destroy()
    if looker is not None:
        with pytest.raises(RuntimeError, match="the engine that had this model is gone"):
            looker(*share(0))
    losses += [param.detach().clone() for param in net.parameters()]
    return losses, found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage,looks", [(2, 0), (3, 3), *longer((0, 0), (1, 3), (3, 0), (2, 2))])
@pytest.mark.parametrize("first", [True, False])
def test_it_computes_the_same_and_changes_nothing(stage, looks, first):
    plain, wanted = trained(stage, None)
    losses, found = trained(stage, looks, first)
    assert all(map(torch.equal, losses, plain))
    assert all(map(torch.equal, found[first:], wanted))
    assert not first or torch.equal(found[0], seen(make_net().to(local_device())))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_it_follows_the_next_engine_of_its_model_and_other_precisions_are_refused(stage):
    net = built(stage)
    looker = make(net, stage, False)
    again = make(net, stage, False)  # neither trains: the first keeps the parameters
    assert torch.equal(seen(again), seen(looker))
    for _ in range(2):
        engine = make(net, stage, True)
        step(engine, 0)
        assert torch.equal(seen(looker), seen(engine)) and torch.equal(seen(again), seen(engine))
        del engine  # dropped, not destroyed
    engine = make(net, stage, True)
    with pytest.raises(ValueError, match="belongs to another engine; call its destroy"):
        make(net, stage, False, bf16={"enabled": True})
    with pytest.raises(ValueError, match="belongs to another engine; call its destroy"):
        make(net, stage, True)
    step(engine, 1)
    engine.destroy()
