"""The promise: inside `engine.gathered_for_generation` the module is a plain one, gathered once, and is ours after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Net, share, step
from offload_cases import BOTH
from scenario import settings
from torch import nn

import zero
from zero.core.owner import is_released


class Speaker(Net):
    """A Net that generates."""

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, length: int = 3, synced_gpus: bool = False) -> torch.Tensor:
        self.synced = synced_gpus
        for _ in range(length):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            tokens = torch.cat([tokens, self.head(self.norm(x))[:, -1:].argmax(-1)], 1)
        return tokens


def hooks(module: nn.Module) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules())


def start(section: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    return zero.initialize(model=Speaker(), config=settings({"comms_logger": {"enabled": True}, **section}, 2))[0]


def gathers(engine: Any) -> int:
    return engine.log_comms_summary()["gather"].count


@pytest.mark.ranks(2)
@pytest.mark.parametrize("section", [{"stage": 3, "section": BOTH}, {"stage": 1}], ids=["3, host", "1"])
def test_generation_gathers_once_and_training_goes_on_as_without(section: dict[str, Any]) -> None:
    engine, other = start(section), start(section)
    prompt, hooked = share(9)[0], hooks(engine.module)
    step(engine, 0)
    step(other, 0)
    wanted = other.generate(prompt)
    with engine.gathered_for_generation() as module:
        before = gathers(engine)
        assert module is engine.module
        assert hooks(module) == 0
        for length in range(1, 2 + dist.get_rank()):  # as often as each rank likes
            module.generate(prompt, length)
        assert torch.equal(engine.generate(prompt), wanted)
        assert not module.synced
        with engine.gathered_for_generation():
            assert torch.equal(module.generate(prompt), wanted)
        assert hooks(module) == 0
        loss = engine(*share(1))
        with pytest.raises(RuntimeError, match=r"step\(\) inside engine.gathered_for_generation\(\).* after the block"):
            engine.step()
        assert gathers(engine) == before
    assert hooks(engine.module) == hooked
    engine.backward(loss)  # of a graph that was built inside
    engine.step()
    step(other, 1)
    ours, theirs = engine.module_state_dict(), other.module_state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    engine.destroy()
    other.destroy()


@pytest.mark.ranks(2)
def test_an_error_inside_leaves_the_engine_as_it_was() -> None:
    engine = start({"stage": 3, "cut": True})
    hooked = hooks(engine.module)
    with pytest.raises(KeyError, match="inside"), engine.gathered_for_generation():
        raise KeyError("inside")
    with (
        pytest.raises(RuntimeError, match="changed inside GatheredParameters"),
        engine.gathered_for_generation() as net,
    ):
        nn.init.zeros_(net.head.bias)
    assert hooks(engine.module) == hooked
    assert all(map(is_released, engine.module.parameters()))
    refused = []

    def enter(module: nn.Module, args: Any) -> None:
        with pytest.raises(RuntimeError, match="inside a forward or a backward"), engine.gathered_for_generation():
            pass
        refused.append(module)

    handle = engine.module.norm.register_forward_pre_hook(enter)
    step(engine, 0)
    handle.remove()
    assert len(refused) == 1
    assert engine.was_step_applied()
    engine.destroy()
