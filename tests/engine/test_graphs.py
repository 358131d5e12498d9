"""The promise: with `graph_harvesting` micro-batches run as CUDA graphs, and come to the bits of those that do not.

No GPU is here: what is captured are the operators with the memory that they worked on. As a CUDA graph does, a replay
runs them on the same addresses, whatever tensors are there meanwhile, and nothing of the Python around them. What a
capture computes counts for nothing: floating-point results are NaN until the first replay. What the host reads cannot
be captured. What this cannot see: streams, the memory that captures share, generators.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import longer
from models import Net, config, make_net, share
from scenario import seeded, settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import zero
from zero.engine.graphs import LIMIT, GraphedModule

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")


def _there(value: Any) -> Any:
    """The same with tensors that stay at their addresses."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), value)


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph."""

    made: list[FakeGraph]  # all of a test

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        self.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                found = func(*args, **kwargs)
                for there, values in zip(_tensors(out), _tensors(found), strict=True):
                    if there.data_ptr() != values.data_ptr():  # else it is a view, or was written in place
                        there.copy_(values)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in (value if isinstance(value, (tuple, list)) else [value]) if torch.is_tensor(each)]


class FakeCapture(TorchDispatchMode):
    """Stands for torch.cuda.graph."""

    def __init__(self, graph: FakeGraph, pool: Any = None) -> None:
        super().__init__()
        self._graph = graph
        self._made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name().startswith(READS):
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({func})")
        out = func(*args, **kwargs)
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        for each in _tensors(out):
            if each.is_floating_point() and each.untyped_storage().data_ptr() not in given:
                self._made.append(each.detach())
        self._graph.calls.append((func, _there(args), _there(kwargs), _there(out)))
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor in self._made:
            tensor.fill_(float("nan"))


def fake_graphs(patch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """From here on torch captures such graphs; returns all that will be made."""
    made: list[FakeGraph] = []
    patch.setattr(FakeGraph, "made", made, raising=False)
    patch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    patch.setattr(torch.cuda, "graph", FakeCapture)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    patch.setattr(torch.cuda, "Stream", object)
    patch.setattr(torch.cuda, "graph_pool_handle", object)
    patch.setattr("zero.engine.step.graphed", GraphedModule)
    return made


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


class Training:
    """An engine in training; `seen` is what its forwards returned, as it is at the end."""

    def __init__(self, make: Callable[[], nn.Module], json: dict[str, Any]) -> None:
        self.engine = zero.initialize(model=seeded(make)(), config=json)[0]
        torch.manual_seed(11)
        self.seen: list[torch.Tensor] = []

    def call(self, number: int, rows: int = 2, **kwargs: Any) -> dict[str, Any]:
        tokens, targets = share(number)
        return self.engine({"tokens": tokens[:rows], "targets": targets[:rows]}, **kwargs)

    def step(self, output: dict[str, Any]) -> None:
        assert output["parts"][1] is None and set(output) == {"loss", "logits", "scale", "parts"}
        self.seen += [output["loss"], output["logits"], output["parts"][0]]
        self.engine.backward(output["loss"])
        self.engine.step()

    def end(self) -> list[torch.Tensor]:
        """What was returned, and what has become of the model."""
        norm = torch.tensor(self.engine.get_global_grad_norm())
        self.engine.destroy()
        random = torch.rand(3)  # as many numbers were drawn
        return [*(each.detach() for each in self.seen), norm, random, *self.engine.module.state_dict().values()]


def runs_of_graphs(
    steps: Callable[[Training], None], json: Any = 1, world: int = 1, make: Callable[[], nn.Module] = Odd
) -> list[int]:
    """Train without graphs and with them, to the same bits; how often each forward and backward ran as one."""
    results, graphs = [], []
    for graphed in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if graphed:
                graphs = fake_graphs(patch)
            given = settings(json, world, gradient_clipping=0.5, graph_harvesting=graphed)
            training = Training(make, given)
            steps(training)
            results.append(training.end())
    assert all(map(torch.equal, *results))
    assert all(each.isfinite().all() for each in results[0])
    return [graph.replays for graph in graphs]


HALF = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2}}  # some steps are skipped
ON_HOST = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "json",
    [
        {"stage": 2, "precision": "bf16", "data_types": {"buffer_dtype": "bf16"}, "accumulation": 2},
        *longer({"stage": 0, "torch_autocast": {"enabled": True}}, {"stage": 2, "section": ON_HOST}),
        *longer({"stage": 1, **HALF, "data_types": {"buffer_dtype": "fp16"}}),
    ],
)
def test_micro_batches_as_graphs_give_the_same_bits(json):
    count = 4 * json.get("accumulation", 1)

    def steps(training: Training) -> None:
        for number in range(count):
            training.step(training.call(number))

    assert runs_of_graphs(steps, json, world=2) == [count, count]


def test_there_is_a_graph_for_each_class_of_inputs_up_to_a_limit(caplog):
    """The order of classes comes back to those that have one."""
    cases = [(rows, scale) for scale in (1.0, 0.5, 2.0) for rows in (1, 2)]

    def steps(training: Training) -> None:
        for number, (rows, scale) in enumerate([*cases, *cases]):
            training.step(training.call(number, rows, scale=scale))

    assert runs_of_graphs(steps) == [2] * 2 * LIMIT
    assert "other shapes or values than those of the first 4" in caplog.text


def test_a_graph_is_captured_anew_where_the_module_is_another():
    """After memory came back elsewhere, and after a part of the model has gone into evaluation."""

    def steps(training: Training) -> None:
        engine = training.engine
        for number in range(6):
            if number == 2:
                engine.offload_states()
                filler = torch.empty(1 << 16)
                engine.reload_states()
                engine.module.embed.weight.data.add_(filler.zero_()[0])
            if number == 4:
                engine.module.dropout.eval()
            training.step(training.call(number))
            engine.eval()
            with torch.no_grad():
                training.seen.append(training.call(number)["loss"])
            engine.train()
            engine.module.dropout.train(number < 4)

    ran = runs_of_graphs(steps)
    assert len(ran) >= 4 and sum(ran) == 2 * 6


def test_a_number_that_is_changed_later_counts_and_so_does_a_hook(caplog):
    def steps(training: Training) -> None:
        for number in range(6):
            training.engine.module.dropout.p = 0.6 if number in (2, 3) else 0.3
            if number == 5:
                training.engine.module.norm.register_forward_hook(lambda module, args, output: output * 2)
            training.step(training.call(number))

    assert runs_of_graphs(steps) == [3, 3, 2, 2]
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


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Reads, "cannot be captured: RuntimeError: CUDA error: operation not permitted"),
        (Replaces, "puts another tensor in the place of the buffer 'seen'"),
        (Counts, "the forward changes 'forwards' of module ''"),
        (Hooked, "module 'head' has hooks"),
    ],
)
def test_what_cannot_be_captured_runs_as_it_is_and_says_why(kind, why, caplog):
    def steps(training: Training) -> None:
        for number in range(3):
            loss = training.engine(*share(number))
            training.seen.append(loss)
            training.engine.backward(loss)
            training.engine.step()

    assert not any(runs_of_graphs(steps, 0, make=kind))
    assert why in caplog.text


def test_two_forwards_before_their_backward_give_the_right_gradients(caplog):
    def steps(training: Training) -> None:
        for number in range(3):
            first, second = (training.call(2 * number + each) for each in range(2))
            training.step(second | {"loss": first["loss"] + second["loss"]})

    assert runs_of_graphs(steps) == [3, 3]
    assert "the backward of another has not come yet" in caplog.text


def test_a_backward_whose_forward_is_gone_is_refused():
    with pytest.MonkeyPatch.context() as patch:
        fake_graphs(patch)
        training = Training(Odd, settings(1, 1, graph_harvesting=True))
        first = training.call(0)["loss"]
        training.engine.backward(first, retain_graph=True)
        with pytest.raises(RuntimeError, match="room for one forward and its one backward"):
            training.engine.backward(first)
        training.step(training.call(1))
        training.end()


def test_without_a_gpu_it_changes_nothing(caplog):
    zero.initialize(model=make_net(), config=config(1, 1, graph_harvesting=True))[0].destroy()
    assert "there are no CUDA graphs on device 'cpu'; it changes nothing" in caplog.text
