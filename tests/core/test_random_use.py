"""The promise: whatever a script does between steps, in whatever order, it finds the weights of an engine at stage 0.

Two real ranks do the same things at random to both engines: they train, evaluate, fail, read, write, and move states.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import make_net, share
from scenario import settings
from torch import nn

import zero
from zero.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

DEEDS = 60
CPU, FILES = {"device": "cpu"}, {"device": "nvme"}
PERSISTENT = {"stage3_param_persistence_threshold": 10**6}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 1": (1, {}),
    "stage 2": (2, {}),
    "stage 3": (3, {}),
    "stage 3, persistent": (3, PERSISTENT),
    "stage 1, state on the host": (1, {"offload_optimizer": CPU}),
    "stage 2, state on the host": (2, {"offload_optimizer": CPU}),
    "stage 3, state on the host": (3, {"offload_optimizer": CPU}),
    "stage 3, persistent, state on the host": (3, {"offload_optimizer": CPU, **PERSISTENT}),
    "stage 3, all on the host": (3, {"offload_optimizer": CPU, "offload_param": CPU}),
    "stage 1, state in files": (1, {"offload_optimizer": FILES}),
    "stage 3, all in files": (3, {"offload_optimizer": FILES, "offload_param": FILES}),
}


class Script:
    """Does the same to an engine of a kind and to one at stage 0; each deed compares what it finds."""

    def __init__(self, ours: Any, wanted: Any, kind: str) -> None:
        self.pair, self.kind = (ours, wanted), kind
        self.draw = random.Random(kind)
        self.number = 0

    def both(self, deed: Any) -> None:
        """What `deed(engine)` gives is the same of both."""
        ours, wanted = (deed(engine) for engine in self.pair)
        assert torch.equal(ours, wanted), self.number

    def some(self) -> list[str]:
        names = [name for name, _ in self.pair[1].module.named_parameters()]
        return self.draw.sample(names, self.draw.choice((1, 2, len(names))))

    def step(self) -> None:
        def train(engine: Any) -> torch.Tensor:
            engine.backward(loss := engine(*share(self.number)))
            engine.step()
            return loss.detach()

        self.both(train)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.both(lambda engine: engine(*share(self.number)))

    def fail(self) -> None:
        """In the loss, after all blocks; or in the middle."""
        tokens, targets = share(self.number)
        inputs = (tokens, targets[:, :1]) if self.draw.random() < 0.5 else (tokens + 17, targets)
        for engine in self.pair:
            with pytest.raises((ValueError, IndexError)):
                engine(*inputs)

    def forget(self) -> None:
        def drop(engine: Any) -> torch.Tensor:
            engine.backward(loss := engine(*share(self.number)))
            engine.zero_grad()
            engine.step()
            return loss.detach()

        self.both(drop)

    def gather(self) -> None:
        """And again inside, as functions of a library do."""
        names, inner = self.some(), self.some()

        def read(engine: Any) -> torch.Tensor:
            params = [[engine.module.get_parameter(name) for name in each] for each in (names, inner)]
            with zero.GatheredParameters(params[0]):
                with zero.GatheredParameters(params[1]), torch.no_grad():
                    engine(*share(self.number))
                    found = [param.detach().clone().view(-1) for param in params[1]]
                return torch.cat([*found, *(param.detach().clone().view(-1) for param in params[0])])

        self.both(read)

    def write(self) -> None:
        names, by_value = self.some(), self.draw.random() < 0.5

        def add(engine: Any) -> torch.Tensor:
            params = [engine.module.get_parameter(name) for name in names]
            with zero.GatheredParameters(params, modifier_rank=None if by_value else 0):
                for param in params if not by_value and dist.get_rank() == 0 else ():
                    param.data.add_(0.125)
            for param in params if by_value else ():
                safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 0.5)
            return torch.cat([safe_get_full_fp32_param(param).view(-1) for param in params])

        self.both(add)

    def look(self) -> None:
        """At a parameter as it lies there; one that stays whole at stage 3 is there only from a forward on."""
        name = self.some()[0]
        param = self.pair[0].module.get_parameter(name)
        if "stage 3" in self.kind and "persistent" not in self.kind:
            with pytest.raises(RuntimeError, match=f"'{name}' is released"):
                param.sum()
        elif "stage 3" not in self.kind:
            self.both(lambda engine: engine.module.get_parameter(name) + 0)

    def save(self) -> None:
        self.both(lambda engine: nn.utils.parameters_to_vector(engine.module_state_dict().values()))

    def move(self) -> None:
        ours = self.pair[0]
        if "all" in self.kind:
            return
        ours.offload_states()
        with pytest.raises(RuntimeError, match="offloaded"):
            ours(*share(self.number))
        ours.reload_states()


def used(kind: str, folder: str) -> None:
    stage, section = KINDS[kind]
    section = {name: {**value, "nvme_path": folder} if value is FILES else value for name, value in section.items()}
    section = {"stage3_param_persistence_threshold": 0, **section}
    jsons = {"stage": stage, "section": section}, 0
    engines = [zero.initialize(model=make_net(blocks=2), config=settings(json, 2))[0] for json in jsons]
    script = Script(*engines, kind)
    deeds = [script.step, script.step, script.evaluate, script.fail, script.forget, script.gather]
    deeds += [script.write, script.look, script.save, script.move]
    for script.number in range(DEEDS):
        script.draw.choice(deeds)()
    for engine in engines:
        engine.destroy()
    script.both(lambda engine: nn.utils.parameters_to_vector(engine.module.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_of_stage_0(pool: Any, kind: str, tmp_path: Path) -> None:
    pool.run(2, used, kind, str(tmp_path))
