"""The promise: a TiledLinear computes what nn.Linear does, and under stage 3 one of its tiles is whole at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import WIDTH, Block, config
from scenario import settings
from stages import check
from torch import Tensor, nn

import zero
from zero.core.leaf import is_apart


def pair(inputs: int, outputs: int, bias: bool = True, **splits: Any) -> tuple[nn.Linear, zero.TiledLinear]:
    """A plain layer and a tiled one with the same values."""
    torch.manual_seed(inputs * 100 + outputs)
    plain = nn.Linear(inputs, outputs, bias)
    return plain, zero.TiledLinear(inputs, outputs, bias, init_linear=plain, **splits)


def gradients(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and the gradients of input, weight and bias (if there is one)."""
    x = x.clone().requires_grad_()
    output = module(x)
    output.backward(grad)
    found = [output.detach(), x.grad]
    if isinstance(module, nn.Linear):
        return [*found, *(param.grad for param in module.parameters())]
    found.append(torch.cat([torch.cat([tile.weight.grad for tile in row], 1) for row in module.linears]))
    last = [row[-1].bias for row in module.linears]
    return [*found, *([] if last[0] is None else [torch.cat([bias.grad for bias in last])])]


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 64), (7, 11), (13, 3)])
@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 3), (3, 1), (2, 2), (7, 3)])
def test_any_tiles_give_the_same_in_double_precision(
    inputs: int, outputs: int, in_splits: int, out_splits: int
) -> None:
    plain, tiled = pair(inputs, outputs, in_splits=in_splits, out_splits=out_splits)
    x, grad = torch.randn(9, inputs).double(), torch.randn(9, outputs).double()
    for ours, theirs in zip(gradients(tiled.double(), x, grad), gradients(plain.double(), x, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_inputs_and_outputs_in_parts() -> None:
    plain, tiled = pair(10, 7, in_splits=3, out_splits=2, input_is_already_split=True, combine_out_splits=False)
    x = torch.randn(4, 10)
    parts = tiled(x.split(tiled.in_parts, dim=1))
    assert [part.shape[1] for part in parts] == tiled.out_parts == [4, 3]
    torch.testing.assert_close(torch.cat(parts, 1), plain(x))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"in_splits": 0}, r"in_splits=.*got 0"),
        ({"out_splits": 5}, r"out_splits=.*got 5 for 4 features"),
        ({"in_features": 0}, r"in_features=.*got 0"),
        ({"out_features": 2.0}, r"out_features=.*got 2.0"),
        ({"init_linear": nn.Linear(4, 6)}, r"copy_params_from: got a weight \(6, 4\); wanted \(4, 6\)"),
        ({"init_linear": nn.Linear(6, 4, bias=False)}, "got a layer without a bias; this one has one"),
    ],
)
def test_sizes_that_do_not_fit_are_named(how: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        zero.TiledLinear(**{"in_features": 6, "out_features": 4, **how})


def test_inputs_that_do_not_fit_are_named() -> None:
    whole, split = zero.TiledLinear(6, 4, in_splits=2), zero.TiledLinear(6, 4, in_splits=2, input_is_already_split=True)
    for layer, x in ((whole, torch.zeros(2, 5)), (whole, [torch.zeros(2, 3)] * 2), (split, torch.zeros(2, 6))):
        with pytest.raises(ValueError, match="TiledLinear: got "):
            layer(x)


# Engines.


class TiledBlock(Block):
    """A block whose larger layers are tiled, in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = zero.TiledLinear(WIDTH, 2 * WIDTH + 1, in_splits=2, out_splits=3)
        self.down = zero.TiledLinear(2 * WIDTH + 1, WIDTH, out_splits=2)


class Tiled(nn.Module):
    """Blocks with tiles in them, and a tiled head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TiledBlock() for _ in range(2))
        self.head = zero.TiledLinear(WIDTH, 7, out_splits=2)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def test_every_stage_trains_as_plain_torch_does(pool) -> None:
    check(pool, Tiled)


@pytest.mark.ranks(2)
def test_one_tile_is_whole_at_a_time() -> None:
    """Under stage 3, where nothing is fetched ahead, when a tile runs forward or backward."""
    torch.manual_seed(3)
    model = Tiled()
    tiles = {name: module for name, module in model.named_modules() if is_apart(module)}
    json = settings(3, 2, section={"stage3_prefetch_bucket_size": 0})
    engine, *_ = zero.initialize(model=model, config=json)
    assert {unit.name for unit in engine.describe().units} == {*tiles, "blocks.0", "blocks.1"}
    forward: list[int] = []
    backward: list[int] = []

    def whole() -> int:
        return sum(unit.name in tiles and unit.state != "sharded" for unit in engine.describe().units)

    def ran(module: nn.Module, args: Any, output: Tensor) -> None:
        forward.append(whole())
        output.register_hook(lambda grad: backward.append(whole()))

    for tile in tiles.values():
        tile.register_forward_hook(ran, prepend=True)
    for step in range(3):  # the first one learns the order
        engine.backward(engine(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)), dist.get_rank()))
        engine.step()
    engine.destroy()
    # The last tile of the forward is the first of the backward, and is kept between the two.
    assert forward == backward == [1] * (3 * len(tiles))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_values_are_copied_between_layers_that_are_cut(stage: int) -> None:
    """From a layer that is cut into tiles that are: built under `zero.Init`, and of an engine."""
    torch.manual_seed(11 + dist.get_rank())  # rank 0's values count
    with zero.Init():
        built = nn.Sequential(nn.Linear(9, 10), zero.TiledLinear(9, 10, in_splits=2, out_splits=3))
        built[1].copy_params_from(built[0])
    with zero.GatheredParameters(built.parameters()):
        check_joined(built[1], built[0])
    model = nn.ModuleDict({"plain": nn.Linear(9, 10), "tiled": zero.TiledLinear(9, 10, in_splits=2, out_splits=3)})
    engine, *_ = zero.initialize(model=model, config=config(stage, 2))
    model["tiled"].copy_params_from(model["plain"])
    with zero.GatheredParameters(model.parameters()):
        check_joined(model["tiled"], model["plain"])
    engine.destroy()


def check_joined(tiled: zero.TiledLinear, plain: nn.Linear) -> None:
    weight = torch.cat([torch.cat([tile.weight for tile in row], 1) for row in tiled.linears])
    assert torch.equal(weight, plain.weight)
    assert torch.equal(torch.cat([row[-1].bias for row in tiled.linears]), plain.bias)
