"""The promise: what no engine can train, `initialize` refuses on all ranks by name and with the remedy, untouched.

What looks alike and is right goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import WIDTH, Block, config
from scenario import Model, run, same, seeded
from torch import nn
from torch._subclasses import FakeTensorMode

import zero
from zero.core.owner import owner_of

Make = Callable[[], nn.Module]


class Chain(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](self.blocks[0](x))).square().mean()


def changed(change: Callable[[Chain], Any]) -> nn.Module:
    model = Chain()
    change(model)
    return model


def shared(model: Chain) -> None:
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data


def overlapping(model: Chain) -> None:
    memory = torch.randn(WIDTH + 1)
    model.blocks[0].norm.weight.data, model.head.bias.data = memory[1:], memory[:-1]


def interleaved(model: Chain) -> None:
    """Columns of one matrix, as of a fused one, and rows of one buffer."""
    columns = torch.randn(WIDTH, 2, WIDTH) / 8
    model.head.weight.data, model.extra = columns[:, 0], nn.Parameter(columns[:, 1])
    rows = torch.randn(2, WIDTH)
    model.head.bias.data, model.blocks[0].norm.bias.data = rows[0], rows[1]


def frozen(model: Chain) -> None:
    shared(model)
    model.blocks.requires_grad_(False)


def part(kind: Make) -> Make:
    return lambda: changed(lambda model: setattr(model, "head", kind()))


def under(context: Callable[[], Any]) -> Make:
    def make() -> nn.Module:
        with context():
            return Chain()

    return make


def placed(model: Chain) -> None:
    """On two GPUs, which need not be there: tensors without memory say so."""
    for number, layer in enumerate((model.blocks[1].up, model.head)):
        with FakeTensorMode():
            layer.weight = nn.Parameter(torch.empty(layer.weight.shape, device=f"cuda:{number}"))


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def scripted() -> nn.Module:
    return torch.jit.script(linear())


REFUSED: dict[str, tuple[Make, str]] = {
    "shared": (
        lambda: changed(shared),
        r"'blocks.0.up.weight' and 'blocks.1.up.weight' share memory .* tie the Parameter itself \(b = a\), or .*clone",
    ),
    "overlapping": (lambda: changed(overlapping), r"'head.bias' and 'blocks.0.norm.weight' share memory"),
    "buffer": (
        lambda: changed(lambda model: model.register_buffer("copy", model.head.bias.data)),
        "'head.bias' and 'copy' share memory",
    ),
    "lazy": (
        part(lambda: nn.LazyLinear(WIDTH)),
        r"parameter 'head.weight' of module 'head' \(LazyLinear\) has no shape .*; run .* once .* \(and 1 more\)",
    ),
    "lazy buffer": (part(lambda: nn.LazyBatchNorm1d(affine=False)), r"buffer 'head.running_mean' of module 'head'"),
    "meta": (under(lambda: torch.device("meta")), r"parameter 'blocks.0.norm.weight' is on meta .* zero.Init\(\)"),
    "meta buffer": (
        lambda: changed(lambda model: model.register_buffer("far", torch.ones(2, device="meta"))),
        "buffer 'far' is on meta",
    ),
    "inference": (
        under(torch.inference_mode),
        r"parameter 'blocks.0.norm.weight' was made under torch.inference_mode\(\), .* torch.no_grad\(\)",
    ),
    "placed": (
        lambda: changed(placed),
        r"2 devices \('blocks.1.up.weight' on cuda:0, 'head.weight' on cuda:1\), .* pipeline.stage_map .* device_map",
    ),
    "wrapped": (part(lambda: nn.DataParallel(linear())), "module 'head' is a DataParallel, .*; pass .* its .module"),
}
HOOKED: dict[str, tuple[Make, str]] = {
    "scripted part": (part(scripted), "module 'head' is a RecursiveScriptModule, .*; train it as the module"),
    "scripted": (lambda: torch.jit.script(Chain()), "model is a RecursiveScriptModule"),
}
RIGHT: dict[str, Make] = {
    "interleaved": lambda: changed(interleaved),
    "traced": part(lambda: torch.jit.trace(linear(), torch.ones(2, WIDTH))),
    "frozen and shared": lambda: changed(frozen),
}


def refusal(model: nn.Module, stage: int, **more: Any) -> str:
    """What `initialize` says of the model, which it must leave as it was; nothing if it takes it."""
    before = [(id(param), param.requires_grad) for param in model.parameters()]
    try:
        zero.initialize(model=model, config=config(stage, dist.get_world_size(), **more))[0].destroy()
    except (RuntimeError, ValueError) as error:
        assert before == [(id(param), param.requires_grad) for param in model.parameters()]
        assert all(owner_of(param) is None for param in model.parameters())
        return str(error)
    return ""


OFFLOAD = {"stage": 1, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "more"), [(0, {}), (3, {}), (1, {"zero_optimization": OFFLOAD})])
def test_what_no_engine_can_train_is_refused_by_name(stage: int, more: dict[str, Any]) -> None:
    cases = HOOKED if more else REFUSED | HOOKED if stage == 3 else REFUSED
    for name, (make, text) in cases.items():
        said = refusal(make(), stage, **more)
        assert re.search(text, said), f"{name}: {said}"


def given(number: int, part: int) -> tuple[torch.Tensor]:
    return (torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * number + part)),)


@pytest.mark.ranks(2)
def test_what_looks_alike_and_is_right_goes_on() -> None:
    """Each on stage 3 as on stage 0; and what is refused there only, below it as the plain module."""
    for make in RIGHT.values():
        whole, cut = (run(Model(seeded(make), given), stage) for stage in (0, 3))
        assert same(whole, cut) and len(set(whole.losses)) == 3
    compiled, plain = (run(Model(seeded(part(kind)), given), 2) for kind in (scripted, linear))
    assert same(compiled, plain, "losses", "weights")


def on_one_rank() -> str:
    return refusal(part(lambda: nn.LazyLinear(WIDTH))() if dist.get_rank() else Chain(), 3)


def test_what_one_rank_cannot_train_is_refused_on_all(pool: Any) -> None:
    said = pool.run(2, on_one_rank)
    assert said[0] == said[1]
    assert "rank 1: parameter 'head.weight' of module 'head' (LazyLinear)" in said[0]


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_inference_mode_and_construction(world: int) -> None:
    """Under inference mode: with an optimizer, and only to evaluate; and shared memory under `zero.Init`."""
    model = Chain()
    with torch.inference_mode():
        assert "called under torch.inference_mode()" in refusal(model, 3)
        engine = zero.initialize(model=model, config={**config(3, world), "optimizer": None})[0]
        assert engine(torch.ones(2, WIDTH)).isfinite()
        engine.destroy()
    wanted = r"zero\.Init: 'blocks.0.up.weight' and 'blocks.1.up.weight' share memory"
    with pytest.raises(ValueError, match=wanted), zero.Init():
        model = Chain()
        shared(model)


def convolutions(form: torch.memory_format) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 1), nn.Conv2d(5, 2, 3)).to(memory_format=form)
    x = torch.randn(2, 3, 8, 8)
    engine = zero.initialize(model=model, config=config(0, 1))[0]
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.destroy()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_channels_last_is_given_up_and_said_once(caplog: Any) -> None:
    plain = convolutions(torch.contiguous_format)
    assert "channels_last" not in caplog.text
    assert torch.equal(convolutions(torch.channels_last), plain)
    assert caplog.text.count("2 parameters in channels_last, the first '0.weight': made contiguous") == 1
