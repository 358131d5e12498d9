"""The promise: whatever a script does between steps, in whatever order, it finds the weights of an engine at stage 0.

Real ranks do the same things at random to both engines: they train, evaluate, fail, read, write, and move states.
Updates of the host are slowed down, so that whatever does not wait for them is found out.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import make_net, share
from offload_cases import CPU, as_on_a_gpu, slow_down
from scenario import settings
from torch import nn

import zero
from zero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

DEEDS = 40
FILES = {"device": "nvme"}
PERSISTENT = {"stage3_param_persistence_threshold": 10**6}
SHORT: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 1": (1, {}),
    "stage 3": (3, {}),
    "stage 3, persistent, state on the host": (3, {"offload_optimizer": CPU, **PERSISTENT}),
    "stage 2, half on the host apart": (2, {"offload_optimizer": {**CPU, "ratio": 0.5}}),
    "stage 3, all in files": (3, {"offload_optimizer": FILES, "offload_param": FILES}),
    "stage 3, hpZ": (3, {"zero_hpz_partition_size": 2}),
}
LONG: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 2": (2, {}),
    "stage 1, state in files": (1, {"offload_optimizer": FILES}),
    "stage 3, all on the host": (3, {"offload_optimizer": CPU, "offload_param": CPU}),
    "stage 3, all parameters on the host apart": (3, {"offload_param": CPU}),
    "stage 3, HSDP": (3, {}),
}
MESHES = "HSDP", "hpZ"  # of four ranks
# How a parameter that is there is read, beside what a script says of all of them.
READS: list[Callable[[nn.Parameter], torch.Tensor]] = [
    lambda param: param + 0,
    lambda param: torch.from_numpy(param.detach().cpu().numpy().copy()),
    lambda param: torch._foreach_norm([param.detach()])[0],
    lambda param: copy.deepcopy(param).detach(),
    lambda param: in_a_thread(param.detach().clone),
]


def in_a_thread(read: Callable[[], torch.Tensor]) -> torch.Tensor:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(read).result()


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
        # No token that is out of range: a GPU would not go on.
        inputs = (tokens, targets[:, :1]) if self.draw.random() < 0.5 else (tokens.double(), targets)
        for engine in self.pair:
            with pytest.raises((ValueError, RuntimeError), match=r"batch_size|scalar types"):
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
        """At a parameter as it lies there, maybe on one rank alone; at stage 3 it may be away until a forward."""
        name, alone = self.some()[0], self.draw.random() < 0.5
        param = self.pair[0].module.get_parameter(name)
        if "stage 3" in self.kind and "persistent" not in self.kind:
            with pytest.raises(RuntimeError, match=f"'{name}' is released"):
                param.sum()
        elif "stage 3" not in self.kind:
            read = self.draw.choice(READS)
            if not alone or dist.get_rank() == 1:
                self.both(lambda engine: read(engine.module.get_parameter(name)))

    def optimizer(self) -> None:
        """Its state is read and written, once there is any; and a gradient, before a step takes it."""
        names = self.some()

        def change(engine: Any) -> torch.Tensor:
            engine.backward(engine(*share(self.number)))
            found = []
            for param in map(engine.module.get_parameter, names):
                found += [safe_get_full_grad(param).view(-1), safe_get_full_optimizer_state(param, "exp_avg").view(-1)]
                safe_set_full_grad(param, found[-2].view(param.shape) * 2)
                safe_set_full_optimizer_state(param, found[-1].view(param.shape) * 0.5, "exp_avg")
            engine.step()
            return torch.cat(found)

        self.both(change)

    def load(self) -> None:
        for engine in self.pair:
            state = engine.module_state_dict()
            engine.load_module_state_dict({name: value * 0.9 for name, value in state.items()})

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
    stage, section = {**SHORT, **LONG}[kind]
    section = {name: {**value, "nvme_path": folder} if value is FILES else value for name, value in section.items()}
    section = {"stage3_param_persistence_threshold": 0, **section}
    tree = {"reduce": "tree"} if kind.endswith(MESHES) else {}  # in which the order of ranks does not matter
    own = {"stage": stage, "section": section, "zero": tree | ({"shard_size": 2} if "HSDP" in kind else {})}
    jsons = [settings(json, dist.get_world_size()) for json in (own, {"stage": 0, "zero": tree})]
    with as_on_a_gpu("apart" in kind):
        engines = [zero.initialize(model=make_net(blocks=2), config=json)[0] for json in jsons]
    slow_down(engines[0])
    script = Script(*engines, kind)
    deeds = [script.step, script.step, script.evaluate, script.fail, script.forget, script.gather]
    deeds += [script.write, script.look, script.optimizer, script.load, script.save, script.move]
    for script.number in range(DEEDS):
        script.draw.choice(deeds)()
    for engine in engines:
        engine.destroy()
    script.both(lambda engine: nn.utils.parameters_to_vector(engine.module.parameters()))


@pytest.mark.parametrize("kind", [*SHORT, *longer(*LONG)])
def test_the_weights_are_those_of_stage_0(pool: Any, kind: str, tmp_path: Path) -> None:
    pool.run(4 if kind.endswith(MESHES) else 2, used, kind, str(tmp_path))
