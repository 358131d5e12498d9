"""The promise: what users do by habit to a model is right, or an error that says what to do; never silently wrong.

Models here go through torch's own machinery: parametrizations, recurrent layers, fused attention, functional calls.
Each gives on stage 3, bitwise, what it gives on stage 0, evaluation between steps included.
"""

from __future__ import annotations

import copy
import io
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from device import moved
from models import WIDTH, config
from ranks import said_by
from scenario import Model, Record, differences, run, seeded
from torch import multiprocessing, nn
from torch.nn.utils import parametrizations, parametrize

import zero

pytestmark = pytest.mark.ranks(2)


class Layers(nn.Module):
    """Three layers of one kind; where a layer returns a tuple, its first part goes on."""

    def __init__(self, make: Callable[[], nn.Module], dims: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))
        self._dims = dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self._dims == 2 else x[:, None].expand(-1, 3, -1)
        for layer in self.layers:
            x = layer(x)
            x = torch.tanh(x[0] if isinstance(x, tuple) else x)
        return x.square().mean()


class Symmetric(nn.Module):
    def forward(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.triu() + raw.triu(1).T


class Cached(Layers):
    """Runs every layer twice on one parametrized weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            for layer in [*self.layers, *self.layers]:
                x = torch.tanh(layer(x))
        return x.square().mean()


class Functional(Layers):
    """Calls its layers with parameters by name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(torch.func.functional_call(layer, dict(layer.named_parameters()), (x,)))
        return x.square().mean()


class Containers(nn.Module):
    """Parameters in a list and a dict, one without dimensions and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(2))
        self.dict = nn.ParameterDict({"scale": torch.tensor(0.5), "empty": torch.empty(0, 3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for matrix in self.list:
            x = torch.tanh(x @ matrix * self.dict["scale"])
        return x + self.dict["empty"].sum()


class Flattening(nn.LSTM):
    """Flattens its weights in forward, as old code does."""

    def forward(self, x: torch.Tensor) -> Any:
        self.flatten_parameters()
        return super().forward(x)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def symmetric() -> nn.Module:
    return parametrize.register_parametrization(linear(), "weight", Symmetric())


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Layers(linear),
    "weight norm": lambda: Layers(lambda: parametrizations.weight_norm(linear())),
    "spectral norm": lambda: Layers(lambda: parametrizations.spectral_norm(linear())),
    "parametrization": lambda: Layers(symmetric),
    "cached parametrization": lambda: Cached(symmetric),
    "functional call": lambda: Functional(linear),
    "containers": lambda: Layers(Containers),
    "lstm": lambda: Layers(lambda: Flattening(WIDTH, WIDTH, 2, batch_first=True), 3),
    "gru": lambda: Layers(lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), 3),
    "encoder, fused in eval": lambda: Layers(encoder, 3),
    "batch norm": lambda: Layers(lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))),
}


def inputs(number: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def train(name: str, stage: int, **more: Any) -> Record:
    return run(Model(seeded(MODELS[name]), lambda number, part: (inputs(number),)), stage, **more)


def start(stage: int, make: Callable[[], nn.Module] = MODELS["linear"], **more: Any) -> Any:
    torch.manual_seed(0)
    return zero.initialize(model=make(), config=config(stage, dist.get_world_size(), **more))[0]


def step(engine: Any, number: int) -> float:
    loss = engine(inputs(number))
    engine.backward(loss)
    engine.step()
    return loss.item()


def whole(engine: Any) -> Any:
    return zero.GatheredParameters(list(engine.module.parameters()))


@pytest.mark.parametrize("name", MODELS)
def test_models_made_of_torch_machinery_give_the_same_bits_on_every_stage(name):
    evaluated = []

    def loop(engine: Any, number: int, given: Any) -> torch.Tensor:
        engine.eval()
        with torch.inference_mode(number == 1), torch.no_grad():
            evaluated.append(engine(*given).item())
        engine.train()
        engine.backward(loss := engine(*given))
        return loss

    plain, cut = (
        train(name, stage, loop=loop, keep=lambda engine: engine.module_state_dict(keep_vars=False).copy())
        for stage in (0, 3)
    )
    assert differences(cut, plain) == []
    assert evaluated[:3] == evaluated[3:] and len({*evaluated}) == 3
    for key, value in plain.seen[0].items():
        assert torch.equal(cut.seen[0][key], value), key


def test_habits_of_a_training_loop_change_nothing():
    def loop(engine: Any, number: int, given: Any) -> torch.Tensor:
        engine.to(engine.device).float()
        engine.module.to(engine.device).layers[1].float()
        engine.module.zero_grad()
        engine.optimizer.zero_grad()
        engine.backward(loss := engine(*given))
        assert all(param.grad is None for param in engine.parameters())
        nn.utils.clip_grad_norm_(engine.parameters(), 1e-3)
        return loss

    plain = train("linear", 0)
    for stage in (0, 2, 3):
        assert differences(train("linear", stage, loop=loop), plain, "losses", "weights") == []


def copies(stage: int) -> list[float]:
    """An averaged copy, made and updated while parameters are whole, and evaluated by one rank alone."""
    engine = start(stage)
    losses = [step(engine, 0)]
    with whole(engine):
        average = copy.deepcopy(engine.module)
        assert copy.deepcopy(average).half().layers[1].weight.dtype == torch.float16
        saved = io.BytesIO()
        torch.save(engine.module, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    losses.append(step(engine, 1))
    with whole(engine), torch.no_grad():
        for mine, theirs in zip(average.parameters(), engine.module.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)
    if dist.get_rank() == 0:
        for model in (average, loaded):
            loss = model(moved(inputs(2), next(model.parameters()).device))
            loss.backward()
            losses.append(loss.item())
            assert all(param.grad is not None for param in model.parameters())
    return [*losses, step(engine, 2)]


def test_a_copy_lives_on_its_own():
    found = [copies(stage) for stage in (0, 1, 3)]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == len(found[0])


GRABS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda values: values.numpy(),
    "numpy, let go at once": lambda values: values.numpy() is None,
    "memoryview": lambda values: memoryview(values.numpy()),
    "dlpack": lambda values: np.from_dlpack(values),
    "view": lambda values: values[1:],
    "storage": lambda values: values.untyped_storage(),
    "share_memory_": lambda values: values.share_memory_(),
    "queue": lambda values: multiprocessing.reductions.reduce_tensor(values),
}
BY_HOOKS = ("numpy", "numpy, let go at once", "memoryview", "share_memory_", "queue")


def read(got: Any) -> Any:
    """The values in what one of `GRABS` has given."""
    if isinstance(got, torch.UntypedStorage):
        return torch.empty(0).set_(got).tolist()
    return got.tolist() if hasattr(got, "tolist") else None


def grabbed(stage: int, by_hooks: bool) -> tuple[list[float], list[str]]:
    """Losses, and what was got from the memory of a parameter and is something else two steps later."""
    engine, losses, held = start(stage), [], {}
    layer = engine.module.layers[1]
    for number, name in enumerate(BY_HOOKS if by_hooks else GRABS):

        def grab(*args: Any, name: str = name) -> None:
            got = GRABS[name](layer.weight.detach())
            held[name] = got, copy.deepcopy(read(got))

        hook = layer.register_forward_hook(grab) if by_hooks else None
        if hook is None:
            with whole(engine):
                grab()
        losses.append(step(engine, number))
        if hook is not None:
            hook.remove()
        losses.append(step(engine, number + 1))
    with whole(engine):
        engine.module.share_memory()
        layer.bias.detach().numpy()
    engine.offload_states()
    engine.reload_states()
    return [*losses, step(engine, 0)], [name for name, (got, wanted) in held.items() if read(got) != wanted]


def test_memory_that_somebody_was_given_stays_his():
    found = [[grabbed(stage, by_hooks) for stage in (0, 3)] for by_hooks in (False, True)]
    for (plain, _), (cut, lost) in found:
        assert cut == plain
        assert lost == []


REFUSED = {
    "engine.half": r"keeps parameters as torch.float32 .* asked for torch.float16",
    "engine.bfloat16": r"sections of the JSON",
    "engine.double": r"before initialize\(\)",
    "module.half": r"parameter 'layers.0.weight': .* asked for torch.float16",
    "layer.half": r"parameter 'layers.1.weight': .* asked for torch.float16",
    "to_empty": r"keeps parameters .* in memory of its own",
    "while gathered": r"parameter 'layers.0.weight': .* asked for torch.bfloat16",
    "channels_last": r"keeps parameters",
    "pickled": r"an engine cannot be copied or pickled; copy or save engine.module",
    "replaced": r"parameter 'layers.1.weight' came into the model after initialize\(\), .* destroy\(\) the engine",
    "load_state_dict": r"parameter 'layers.1.weight' came into the model",
    "DataParallel": r"model is a .*; pass what it wraps",
    "DistributedDataParallel": r"model is a .*; pass what it wraps",
    "complex": r"parameter 'weight' is torch.complex64",
    "frozen": r"parameter 'layers.1.bias' .* requires_grad was True at initialize\(\) and is now False; .* lr is 0",
    "thawed": r"parameter 'layers.2.bias' .* requires_grad was False at initialize\(\) and is now True; set it",
    "assigned": r"parameter 'layers.0.weight' .* its .grad was assigned, .* call zero.utils.safe_set_full_grad",
    "sparse": r"parameter 'weight' has a torch.sparse_coo gradient",
}


def conversions(stage: int) -> dict[str, str]:
    engine = start(stage)
    said = {f"engine.{verb}": said_by(getattr(engine, verb)) for verb in ("half", "bfloat16", "double")}
    said["module.half"] = said_by(engine.module.half)
    said["layer.half"] = said_by(engine.module.layers[1].half)
    said["to_empty"] = said_by(lambda: engine.module.to_empty(device="cpu"))
    with whole(engine):
        said["while gathered"] = said_by(engine.module.bfloat16)
    said["pickled"] = said_by(lambda: copy.deepcopy(engine))
    step(engine, 0)  # nothing happened to it
    filters = start(stage, lambda: nn.Conv2d(2, 2, 3))
    said["channels_last"] = said_by(lambda: filters.to(memory_format=torch.channels_last))
    for wrapper in (nn.DataParallel, nn.parallel.DistributedDataParallel):
        said[wrapper.__name__] = said_by(lambda wrapper=wrapper: start(stage, lambda: wrapper(linear())))
    said["complex"] = said_by(lambda: start(stage, lambda: nn.Linear(2, 2, dtype=torch.complex64)))
    table = start(stage, lambda: nn.Embedding(5, WIDTH, sparse=True))
    said["sparse"] = said_by(lambda: table.backward(table((inputs(0) > 0).long()[:, 0]).sum()))
    return said


def added(stage: int) -> dict[str, str]:
    """Parameters that came in after `initialize` in the place of others: trained ones would stay as they are."""
    said, state = {}, linear().state_dict()
    for what, change in {
        "replaced": lambda layers: layers.__setitem__(1, linear()),
        "load_state_dict": lambda layers: layers[1].load_state_dict(state, assign=True),
    }.items():
        engine = start(stage)
        change(engine.module.layers)
        said[what] = said_by(lambda engine=engine: step(engine, 0))
    frozen = start(stage)
    frozen.module.layers.append(linear().requires_grad_(False))
    step(frozen, 0)
    return said


def half_frozen() -> nn.Module:
    model = Layers(linear)
    model.layers[2].requires_grad_(False)
    return model


def between_backward_and_step(stage: int) -> dict[str, str]:
    """A parameter changes sides and back, or is given a gradient that no step would use; a step is good after that."""
    engine, said = start(stage, half_frozen), {}
    for what, layer in (("frozen", 1), ("thawed", 2)):
        changed = engine.module.layers[layer].bias
        engine.backward(engine(inputs(0)))
        changed.requires_grad_(what == "thawed")
        said[what] = said_by(engine.step)
        changed.requires_grad_(what == "frozen")
        engine.step()
    weight = engine.module.layers[0].weight
    engine.backward(engine(inputs(0)))
    weight.grad = torch.ones(weight.shape)
    said["assigned"] = said_by(engine.step)
    engine.zero_grad()
    engine.step()
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_what_cannot_be_right_is_refused_by_name(stage):
    said = conversions(stage) | added(stage) | between_backward_and_step(stage)
    assert {what: text for what, text in said.items() if not re.search(REFUSED[what], text)} == {}
    assert said.keys() == REFUSED.keys()


def test_a_tensor_put_into_param_data_counts_as_an_edit():
    found = []
    for stage, by_data in itertools.product((0, 1, 3), (False, True)):
        engine = start(stage)
        losses = [step(engine, 0)]
        param = engine.module.layers[1].weight
        with zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
            if by_data:
                param.data = param.data * 2
            else:
                param.mul_(2)
        if stage < 3:  # parameters are whole: no context needed
            param.data = param.data * 1
        found.append([*losses, *(step(engine, number) for number in (1, 2))])
    assert all(losses == found[0] for losses in found)
