"""The promise: a model that is written as DeepSpeed's list of layers trains over stages to the bits of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelines import CLASSES, WIDTH, Found, compare, json_of, pipelined
from torch import nn

import zero

MICRO_BATCHES = 4


class Twice(nn.Module):
    """Takes a tuple and returns one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = x[0] + x[1] if isinstance(x, tuple) else x
        return self.dropout(torch.tanh(self.linear(x))), x


def transposed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Computes with the transposed weight of the first layer."""
    return F.linear(x, module.weight.t())


def kinds_of_layers(tied: bool) -> list[Any]:
    torch.manual_seed(5)
    first = zero.LayerSpec(nn.Linear, WIDTH, WIDTH)
    last = zero.LayerSpec(nn.Tanh)
    if tied:
        first = zero.TiedLayerSpec("in", nn.Linear, WIDTH, WIDTH)
        last = zero.TiedLayerSpec("in", nn.Linear, WIDTH, WIDTH, forward_fn=transposed, tied_weight_attr=["weight"])
    return [
        first,
        zero.LayerSpec(Twice, WIDTH),
        Twice(WIDTH),
        lambda pair: pair[0] * pair[1],
        torch.relu,
        zero.LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False),
        last,
        nn.Linear(WIDTH, CLASSES),
    ]


def names(engine: Any) -> list[str]:
    return [name for name, _ in engine.module.named_parameters()]


def trained(json: dict[str, Any], stages: int | None, tied: bool = False, watch: Any = names) -> Found:
    """With these layers, all of whose random numbers come from their numbers."""
    zero.init_distributed()

    def make() -> nn.Module:
        return zero.PipelineModule(kinds_of_layers(tied), stages, loss_fn=F.cross_entropy, seed_layers=True)

    return pipelined(json, make, loss_fn=None, watch=watch)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("gather", ["step", "use"])
@pytest.mark.parametrize("interval", [0, 2])
def test_layers_of_all_kinds_train_as_in_one_process(pool: Any, stage, gather, interval):
    section = {"gather": gather, "activation_checkpoint_interval": interval}
    alike = stage if gather == "use" else min(stage, 1)
    one = pool.run(1, trained, json_of(alike, 1, MICRO_BATCHES), 1)
    two = pool.run(2, trained, json_of(stage, 1, MICRO_BATCHES, pipeline=section), 2)
    compare(two, one[0])
    assert [each.seen for each in two] == [
        ["0.weight", "0.bias", "1.linear.weight", "1.linear.bias"],
        ["2.linear.weight", "2.linear.bias", "5.weight", "7.weight", "7.bias"],
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gather", ["step", "use"])
def test_a_tied_layer_is_one_module_on_all_its_stages(pool: Any, stage, gather):
    one = pool.run(1, trained, json_of(0, 1, MICRO_BATCHES), 1, True)[0]
    two = pool.run(2, trained, json_of(stage, 1, MICRO_BATCHES, pipeline={"gather": gather}), 2, True)
    for each in two:  # gradients of two places are added in another order
        torch.testing.assert_close([each.losses, each.norms], [one.losses, one.norms], rtol=1e-6, atol=1e-7)
        assert each.seen[:2] == ["tied_modules.in.weight", "tied_modules.in.bias"]
        for name, value in each.state.items():
            torch.testing.assert_close(value, one.state[name], rtol=1e-3, atol=1e-6)
    assert torch.equal(two[0].state["tied_modules.in.weight"], two[1].state["tied_modules.in.weight"])


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_the_json_divides_layers_that_nothing_else_has_divided(pool: Any, schedule):
    section = {"stages": 2, "schedule": schedule, "partition": "uniform"}
    one = pool.run(1, trained, json_of(0, 1, MICRO_BATCHES), None)
    two = pool.run(2, trained, json_of(1, 1, MICRO_BATCHES, pipeline=section), None)
    compare(two, one[0])
