"""The promise: with `graph_harvesting` micro-batches run as CUDA graphs, and come to the bits of those that do not.

No GPU is here: graphs are those of tests/fake_graphs.py, which run on the addresses that they were captured with.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_graphs import FakeCapture, FakeGraph, fake_graphs
from marks import longer
from models import Net, config, make_net, share
from torch import nn

import zero
from zero.config.errors import ConfigError
from zero.engine.graphs import LIMIT, GraphedModule
from zero.watchdog.device_waits import DeviceWaits


class Odd(Net):
    """With dropout, batch norm, a part that no loss reaches, and several things to take and to return."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(blocks=2, **kwargs)
        self.dropout = nn.Dropout(0.3)
        self.batch_norm = nn.BatchNorm1d(self.head.in_features)
        self.unused = nn.Linear(3, 3)

    def forward(self, batch: dict[str, torch.Tensor], scale: float = 1.0) -> dict[str, Any]:
        x = self.embed(batch["tokens"])
        for block in self.blocks:
            x = self.dropout(block(x))
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, batch["targets"].flatten()) * scale
        return {"loss": loss, "logits": logits.detach(), "scale": scale, "parts": (loss.detach() * 2, None)}


def make_odd() -> Odd:
    torch.manual_seed(5)
    return Odd()


def call(engine: Any, number: int, rows: int = 2, **kwargs: Any) -> dict[str, Any]:
    tokens, targets = share(number)
    return engine({"tokens": tokens[:rows], "targets": targets[:rows]}, **kwargs)


class Trained:
    """Trains with graphs or without them; `graphs` are those that were made."""

    def __init__(self, model: nn.Module, settings: dict[str, Any], graphs: list[FakeGraph] | None) -> None:
        self.engine = zero.initialize(model=model, config=settings)[0]
        self.graphs = graphs
        if graphs is not None:
            self.engine._training.model = GraphedModule(self.engine._sharded)
        torch.manual_seed(11)
        self.seen: list[torch.Tensor] = []

    def step(self, output: Any) -> None:
        self.seen += [output["loss"], output["logits"], *output["parts"][:1]]
        assert output["parts"][1] is None and set(output) == {"loss", "logits", "scale", "parts"}
        self.engine.backward(output["loss"])
        self.engine.step()

    def found(self) -> list[torch.Tensor]:
        """What was returned, seen as it is at the end, and what has become of the model."""
        norm = torch.tensor(self.engine.get_global_grad_norm())
        self.engine.destroy()
        random = torch.rand(3)  # as many numbers were drawn
        return [*(each.detach() for each in self.seen), norm, random, *self.engine.module.state_dict().values()]

    @property
    def ran(self) -> list[int]:
        """How often each forward and backward ran."""
        return [graph.replays for graph in self.graphs]


def settings(stage: int, world: int, **more: Any) -> dict[str, Any]:
    return config(stage, world, gradient_clipping=0.5, **more)


HALF = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2}}  # some steps are skipped
HALF["data_types"] = {"buffer_dtype": "fp16"}
ON_HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
CODED = {"zero_optimization": {"zero_quantized_gradients": True}}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (2, {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}, "accumulation": 2}),
        *longer((0, {}), (1, {"accumulation": 2}), (1, HALF), (2, ON_HOST), (2, CODED)),
        *longer((1, {"torch_autocast": {"enabled": True}})),
    ],
)
def test_micro_batches_as_graphs_give_the_same_bits(stage, more):
    results = []
    for graphs in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            given = settings(stage, dist.get_world_size(), **more)
            given["zero_optimization"]["stage"] = stage
            trained = Trained(make_odd(), given, fake_graphs(patch) if graphs else None)
            count = 4 * given["gradient_accumulation_steps"]
            for number in range(count):
                trained.step(call(trained.engine, number))
            if graphs:
                assert trained.ran == [count, count]
            results.append(trained.found())
    assert all(map(torch.equal, *results))
    assert all(each.isfinite().all() for each in results[0])


def test_there_is_a_graph_for_each_class_of_inputs_up_to_a_limit(caplog):
    """The order of classes comes back to those that have one."""
    cases = [(rows, scale) for scale in (1.0, 0.5, 2.0) for rows in (1, 2)]
    results = []
    for graphs in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            trained = Trained(make_odd(), settings(1, 1), fake_graphs(patch) if graphs else None)
            for number, (rows, scale) in enumerate([*cases, *cases]):
                trained.step(call(trained.engine, number, rows, scale=scale))
            if graphs:
                assert trained.ran == [2] * 2 * LIMIT
            results.append(trained.found())
    assert all(map(torch.equal, *results))
    assert "other shapes or values than those of the first 4" in caplog.text


def test_a_graph_is_captured_anew_where_the_module_is_another():
    """After memory came back elsewhere, and after a part of the model has gone into evaluation."""
    results = []
    for graphs in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            trained = Trained(make_odd(), settings(1, 1), fake_graphs(patch) if graphs else None)
            for number in range(6):
                if number == 2:
                    trained.engine.offload_states()
                    filler = torch.empty(1 << 16)
                    trained.engine.reload_states()
                    trained.engine.module.embed.weight.data.add_(filler.zero_()[0])
                if number == 4:
                    trained.engine.module.dropout.eval()
                trained.step(call(trained.engine, number))
                trained.engine.eval()
                with torch.no_grad():
                    trained.seen.append(call(trained.engine, number)["loss"])
                trained.engine.train()
                trained.engine.module.dropout.train(number < 4)
            if graphs:
                assert len(trained.ran) >= 4 and sum(trained.ran) == 2 * 6
            results.append(trained.found())
    assert all(map(torch.equal, *results))


def test_a_number_that_is_changed_later_counts_and_so_does_a_hook(caplog):
    results = []
    for graphs in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            trained = Trained(make_odd(), settings(1, 1), fake_graphs(patch) if graphs else None)
            for number in range(6):
                trained.engine.module.dropout.p = 0.6 if number in (2, 3) else 0.3
                if number == 5:
                    trained.engine.module.norm.register_forward_hook(lambda module, args, output: output * 2)
                trained.step(call(trained.engine, number))
            if graphs:
                assert trained.ran == [3, 3, 2, 2]
            results.append(trained.found())
    assert all(map(torch.equal, *results))
    assert "module 'norm' has hooks" in caplog.text


class Reads(Net):
    """Asks for a number in the middle of the forward."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens, targets)
        return loss * 2 if loss.item() > 100 else loss


class Replaces(Net):
    """Puts another buffer in the place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return super().forward(tokens, targets) * self.seen


class Wraps(Net):
    """Takes an object with tensors inside."""

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(*batch.tensors)


class Counts(Net):
    """Counts its forwards, and returns accordingly."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return super().forward(tokens, targets) * self.forwards


class Hooked(Net):
    """Has a hook that does other things each time."""

    def __init__(self) -> None:
        super().__init__()
        number = itertools.count(1)
        self.head.register_forward_hook(lambda module, args, output: output * next(number))


class Batch:
    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Reads, "cannot be captured: RuntimeError: CUDA error: operation not permitted"),
        (Replaces, "puts another tensor in the place of the buffer 'seen'"),
        (Wraps, "there are tensors inside of a Batch"),
        (Counts, "the forward changes 'forwards' of module ''"),
        (Hooked, "module 'head' has hooks"),
    ],
)
def test_what_cannot_be_captured_runs_as_it_is_and_says_why(kind, why, caplog):
    results = []
    for graphs in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            torch.manual_seed(3)
            trained = Trained(kind(), settings(0, 1), fake_graphs(patch) if graphs else None)
            for number in range(3):
                loss = trained.engine(*([Batch(*share(number))] if kind is Wraps else share(number)))
                trained.seen.append(loss)
                trained.engine.backward(loss)
                trained.engine.step()
            assert not graphs or not any(trained.ran)
            results.append(trained.found())
    assert all(map(torch.equal, *results))
    assert why in caplog.text


def test_two_forwards_before_their_backward_give_the_right_gradients(caplog):
    results = []
    for graphs in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            trained = Trained(make_odd(), settings(1, 1), fake_graphs(patch) if graphs else None)
            for number in range(3):
                first, second = (call(trained.engine, 2 * number + each) for each in range(2))
                trained.step(second | {"loss": first["loss"] + second["loss"]})
            if graphs:
                assert trained.ran == [3, 3]
            results.append(trained.found())
    assert all(map(torch.equal, *results))
    assert "the backward of another has not come yet" in caplog.text


def test_a_backward_whose_forward_is_gone_is_refused():
    with pytest.MonkeyPatch.context() as patch:
        trained = Trained(make_odd(), settings(1, 1), fake_graphs(patch))
        first = call(trained.engine, 0)["loss"]
        trained.engine.backward(first, retain_graph=True)
        with pytest.raises(RuntimeError, match="room for one forward and its one backward"):
            trained.engine.backward(first)
        trained.step(call(trained.engine, 1))
        trained.found()


def test_no_other_thread_asks_the_device_while_a_graph_is_captured():
    with pytest.MonkeyPatch.context() as patch:
        trained, held = Trained(make_odd(), settings(1, 1), fake_graphs(patch)), []
        waits = trained.engine._sharded.world.watchdog._device = DeviceWaits(object)
        enter = FakeCapture.__enter__
        patch.setattr(FakeCapture, "__enter__", lambda self: (held.append(waits.looking.locked()), enter(self))[1])
        trained.step(call(trained.engine, 0))
        assert held == [True, True] and not waits.looking.locked()
        trained.found()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"zero_optimization": {"stage": 3}}, "graph_harvesting: got true with zero_optimization.stage 3"),
        ({"zero": {"recompute": {"modules": ["Block"]}}}, "graph_harvesting: got true with zero.recompute"),
        ({"flops_profiler": {"enabled": True}}, "graph_harvesting: got true with flops_profiler.enabled"),
    ],
)
def test_what_has_no_graphs_is_refused(more, why):
    with pytest.raises(ConfigError, match=why):
        zero.initialize(model=make_net(), config=config(1, 1, graph_harvesting=True) | more)


def test_without_a_gpu_it_changes_nothing(caplog):
    engine = zero.initialize(model=make_net(), config=config(1, 1, graph_harvesting=True))[0]
    assert "there are no CUDA graphs on device 'cpu'; it changes nothing" in caplog.text
    assert engine._training.model is engine.module
    engine.destroy()
