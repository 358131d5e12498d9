"""The promise: what is cast is what the JSON says, inputs, arithmetic and buffers, and nothing else is."""

from __future__ import annotations

import collections
import dataclasses
import logging
from typing import Any, NamedTuple

import pytest
import torch
from models import config
from torch import nn

import zero
from zero import log

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


class Pair(NamedTuple):
    """A named tuple of tensors."""

    first: torch.Tensor
    second: Any


@dataclasses.dataclass(frozen=True)
class Record:
    """A frozen dataclass, with a field that __init__ does not take."""

    x: torch.Tensor
    name: str
    made: int = dataclasses.field(default=3, init=False)


class Output(collections.OrderedDict):
    """A dict whose items are attributes too, as libraries have them."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


class Probe(nn.Module):
    """Keeps what it was called with, and the dtypes it computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("small", torch.ones(4, dtype=torch.float16), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.seen: Any = None
        self.computed: torch.dtype | None = None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.seen = (args, kwargs)
        product = self.linear(torch.ones(2, 4, dtype=self.linear.weight.dtype))
        self.computed = product.dtype
        return product.float().sum()


def engine_of(stage: int = 0, **more: Any) -> Any:
    return zero.initialize(model=Probe(), config=config(stage, 1, **more))[0]


def nested() -> dict[str, Any]:
    x = torch.ones(2)
    output = Output()
    output["logits"] = x
    return {
        "plain": x,
        "ids": torch.ones(2, dtype=torch.long),
        "half": x.half(),
        "pair": Pair(x, [x.double(), None]),
        "record": Record(x, "r"),
        "output": output,
        "left": ({"n": 1}, "text", (torch.ones(1, dtype=torch.bool),)),
    }


def test_auto_cast_reaches_every_float():
    given = nested()
    engine = engine_of(fp16={**FP16["fp16"], "auto_cast": True})
    engine(given["plain"], **given)
    (first,), seen = engine.module.seen
    half = torch.float16
    assert (first.dtype, seen["plain"].dtype, seen["ids"].dtype) == (half, half, torch.long)
    assert isinstance(seen["pair"], Pair)
    assert (seen["pair"].first.dtype, seen["pair"].second[0].dtype, seen["pair"].second[1]) == (half, half, None)
    assert isinstance(seen["record"], Record)
    assert (seen["record"].x.dtype, seen["record"].name, seen["record"].made) == (half, "r", 3)
    assert isinstance(seen["output"], Output)
    assert seen["output"]["logits"].dtype == seen["output"].logits.dtype == half
    assert seen["left"] is given["left"], "what holds no float is handed on as it is"
    assert seen["half"] is given["half"], "and so is what has the dtype"
    # What the caller has is untouched.
    assert given["plain"].dtype == given["pair"].first.dtype == given["record"].x.dtype == torch.float32
    assert given["output"].logits.dtype == torch.float32


@pytest.mark.parametrize("more", [FP16, {"fp16": {"enabled": False, "auto_cast": True}}, BF16])
def test_inputs_are_left_alone_otherwise(more):
    given = nested()
    engine = engine_of(**more)
    engine(**given)
    assert all(engine.module.seen[1][key] is value for key, value in given.items())


@pytest.mark.parametrize("section", [{}, {"dtype": "bf16"}, {"dtype": "float16"}])
@pytest.mark.parametrize("stage", [0, 3])
def test_autocast_computes_low_and_keeps_parameters(stage, section):
    dtype = torch.float16 if section.get("dtype") == "float16" else torch.bfloat16
    engine = engine_of(stage, torch_autocast={"enabled": True, **section})
    engine(1)
    assert engine.module.computed == dtype
    assert engine.module.linear.weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu"), "it ends with the forward"
    assert engine.torch_autocast_enabled()
    assert engine.optimizer.loss_scale == (65536.0 if dtype == torch.float16 else 1.0)
    assert engine.optimizer.dynamic_loss_scale == engine.dynamic_loss_scale() == (dtype == torch.float16)


class Squares(nn.Module):
    """A product, which autocast computes in 16 bits, and a loss that it computes in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.linear(x), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_autocast_of_parameters_in_16_bits(stage, dtype):
    x, plain = torch.linspace(-1, 1, 8).view(2, 4), Squares().to(dtype)
    with torch.autocast("cpu", dtype):
        wanted = plain(x)
    mode = {"bf16" if dtype == torch.bfloat16 else "fp16": {"enabled": True}}
    engine, *_ = zero.initialize(model=Squares(), config=config(stage, 1, torch_autocast={"enabled": True}, **mode))
    assert engine.module.linear.weight.dtype == dtype
    found = engine(x)
    assert found.dtype == wanted.dtype == torch.float32 and torch.equal(found, wanted)
    (wanted * engine.optimizer.loss_scale).backward()
    grad = plain.linear.weight.grad.float() / engine.optimizer.loss_scale
    engine.backward(found)
    assert torch.equal(zero.utils.safe_get_full_grad(engine.module.linear.weight), grad)


@pytest.mark.parametrize("more", [{}, BF16, FP16])
def test_an_outer_autocast_is_switched_off_inside(caplog, more):
    log._said.cache_clear()
    engine = engine_of(**more)
    dtype = engine.module.linear.weight.dtype
    other = torch.bfloat16 if more is FP16 else torch.float16
    with caplog.at_level(logging.WARNING, logger="zero"), torch.autocast("cpu", other):
        for _ in range(2):
            engine(1)
        assert torch.is_autocast_enabled("cpu"), "outside it is what it was"
    assert engine.module.computed == dtype
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == [
        "torch.autocast around the engine is switched off inside it; "
        "set torch_autocast.enabled to true in the JSON to have it"
    ]


@pytest.mark.parametrize("more", [{}, FP16, BF16])
@pytest.mark.parametrize("wanted", [None, "fp32", "bf16", "fp16"])
def test_buffers_keep_their_dtype_unless_told(more, wanted):
    module = engine_of(**more, data_types={"buffer_dtype": wanted} if wanted else {}).module
    low = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(wanted)
    assert module.mean.dtype == (low or torch.float32)
    assert module.small.dtype == (low or torch.float16)
    assert module.count.dtype == torch.long


class Scaled(nn.Module):
    """Multiplies by an fp32 buffer before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("low", torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.dtype) * self.mean).sum()


@pytest.mark.parametrize("more", [FP16, BF16])
def test_a_buffer_that_meets_a_parameter_of_16_bits_is_named(more):
    dtype = next(iter(more))
    engine = zero.initialize(model=Scaled(), config=config(3, 1, **more))[0]
    with pytest.raises(RuntimeError, match="must have the same dtype") as raised:
        engine(torch.ones(2, 4))
    assert "'mean' (torch.float32), 'low' (torch.float64). If one" in str(raised.value)
    assert f'set data_types.buffer_dtype to "{dtype}" in the JSON' in str(raised.value)
    assert str(raised.value).startswith(str(raised.value.__cause__))
    engine = zero.initialize(model=Scaled(), config=config(3, 1, **more, data_types={"buffer_dtype": dtype}))[0]
    engine(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="size of tensor") as other:
        engine(torch.ones(2, 3))  # another error stays as it is
    assert other.value.__cause__ is None
