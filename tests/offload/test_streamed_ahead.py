"""The promise: what the step updates first streams in under the last backward, and nothing changes before the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import WIDE, config, make_net, share
from offload_cases import BOTH, GPU, as_on_a_gpu
from test_exceptions import in_backward
from test_offload_numbers import BF16

import zero
from zero.memory.host_bytes import SLOTS
from zero.memory.streamed_store import StreamedStore

STREAMED = {"offload_optimizer": GPU}
KEYS = ("exp_avg", "exp_avg_sq")


def start(stage: int, section: dict[str, Any], accumulation: int = 1) -> Any:
    world = dist.get_world_size() if dist.is_initialized() else 1
    given = config(stage, world, accumulation=accumulation, **BF16, zero_optimization={"stage": stage, **section})
    return zero.initialize(model=make_net(blocks=3, width=WIDE), config=given)[0]


def filed(folder: Any, **more: Any) -> dict[str, Any]:
    return {"offload_optimizer": {**GPU, "device": "nvme", "nvme_path": str(folder), **more}}


class Watch:
    """Notes which units' state comes to the device, and what is there then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.came: list[str] = []
        self.most = 0
        self._stores: dict[StreamedStore, None] = {}
        come, attach = StreamedStore._come, StreamedStore.attach
        patch.setattr(StreamedStore, "_come", lambda store, *args: self._look(store, come, *args))
        patch.setattr(StreamedStore, "attach", lambda store: self._look(store, attach))
        patch.setattr(StreamedStore, "_copy", lambda *args, copy=StreamedStore._copy: self._copied(copy, *args))

    def _look(self, store: StreamedStore, act: Callable[..., None], *args: Any) -> None:
        act(store, *args)
        self._stores[store] = None
        there = {str(each) for each in self._stores if each.attached} | {slot.ahead for slot in store._slots._all}
        self.most = max(self.most, len(there - {""}))

    def _copied(self, copy: Callable[..., None], store: StreamedStore, target: torch.Tensor, source: Any) -> None:
        if store._rests.place is source:
            self.came.append(store._unit)
        copy(store, target, source)

    def take(self) -> list[str]:
        """Those since the last call."""
        came, self.came = self.came, []
        return came


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_the_first_two_come_with_the_last_backward_of_a_step(monkeypatch, tmp_path, device):
    watch = Watch(monkeypatch)
    with as_on_a_gpu():
        engine = start(2, STREAMED if device == "cpu" else filed(tmp_path), accumulation=2)
    updater = engine.optimizer._updater
    order = [unit.plan.name for unit in updater._units]
    assert len(order) > SLOTS + 1
    masters = [zero.utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    watch.take()
    for number in range(4):
        engine.backward(engine(*share(number)))
        updater._worker.submit(bool).result()  # what it was asked for is done
        assert watch.take() == (order[:SLOTS] if number % 2 else []), "not at the first micro-batch of two"
        if number == 1:
            now = [zero.utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
            assert all(map(torch.equal, masters, now)), "a value has changed before the step"
            engine.backward(engine(*share(number)))  # another of the same step; the edits have used the places since
            updater._worker.submit(bool).result()
            assert watch.take()[-SLOTS:] == order[:SLOTS]
        if number == 3:
            engine.backward(engine(*share(number)))
            updater._worker.submit(bool).result()
            assert watch.take() == [], "it is there"
        engine.step()
        engine.optimizer.settle()
        assert watch.take() == (order[SLOTS:] if number % 2 else [])
    assert watch.most == SLOTS
    engine.destroy()


def whatever_comes(stage: int, section: dict[str, Any], folder: str) -> list[torch.Tensor]:
    """Weights and moments after steps between whose backward and update something else happens."""
    engine = start(stage, section)
    params = list(engine.module.parameters())

    def edit(index: int) -> None:
        for key in KEYS:
            state = zero.utils.safe_get_full_optimizer_state(params[index], key)
            zero.utils.safe_set_full_optimizer_state(params[index], state * 2, key)
        exact = zero.utils.safe_get_full_fp32_param(params[index])
        zero.utils.safe_set_full_fp32_param(params[index], exact + 2**-12)

    def edit_all() -> None:
        for index in reversed(range(len(params))):
            edit(index)

    between = [
        lambda: None,
        lambda: edit(0),  # brought already
        edit_all,  # more than there are places
        engine.zero_grad,
        lambda: in_backward(engine, RuntimeError("in the middle")),
    ]
    for number, what in enumerate(between):
        engine.backward(engine(*share(number)))
        what()
        if number == len(between) - 1:
            engine.backward(engine(*share(number)))  # the gradients went with the exception
        engine.step()
        engine.backward(engine(*share(number)) * float("inf"))  # brought for a step that is skipped
        engine.step()
        assert engine.skipped_steps == number + 1
        if number == 1:
            engine.save_checkpoint(folder, tag="between")  # of what has been brought, too
    engine.load_checkpoint(folder, tag="between")
    engine.backward(engine(*share(100)))
    engine.step()
    found = [zero.utils.safe_get_full_fp32_param(param) for param in params]
    found += [zero.utils.safe_get_full_optimizer_state(param, key) for param in params for key in KEYS]
    engine.destroy()
    return found


def differing(stage: int, folder: str) -> list[int]:
    """Which of the sections come to other bits than that without offload."""
    sections = [{}, STREAMED, {"offload_optimizer": {**GPU, "ratio": 0.5}}]
    sections += [filed(folder, buffer_count=1), filed(folder)]
    if stage == 3:
        sections += [{**BOTH, **STREAMED}, {**BOTH, **filed(folder)}]
    with as_on_a_gpu():
        wanted, *found = (whatever_comes(stage, section, f"{folder}/{at}") for at, section in enumerate(sections))
    return [at for at, values in enumerate(found) if not all(map(torch.equal, wanted, values))]


@pytest.mark.parametrize(
    ("stage", "world"), [(2, 1), *longer((2, 2), *((stage, world) for stage in (1, 3) for world in (1, 2)))]
)
def test_what_happens_before_the_step_counts(pool, tmp_path: Path, stage: int, world: int) -> None:
    """Edits, a checkpoint, gradients that are dropped, an exception in the backward, steps that are skipped."""
    assert pool.run(world, differing, stage, str(tmp_path)) == [[]] * world
