"""The promise: experts that ranks divide give the bits of one process, on any grid and at any stage.

The numbers are integers and powers of two, so that no sum rounds in any order: each missing or double factor shows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import integers, place_of, plain, trained
from expert_models import Experts, Stacks, json_with
from marks import longer

import zero

GRIDS: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks, ep, and what else the JSON says
    "ep 2": (2, 2, {}),
    "ep 4": (4, 4, {}),
    "ep 2 x efsdp 2": (4, 2, {}),
    "ep 2 x replicas 2": (4, 2, {"zero_optimization": {"mics_shard_size": 2}}),
    "ep 2 = tp 2": (2, 2, {"tensor_parallel": {"autotp_size": 2}}),
    "ep 2 x tp 2": (4, 2, {"tensor_parallel": {"autotp_size": 2}}),
    "ep 4 = dp 2 x tp 2": (4, 4, {"tensor_parallel": {"autotp_size": 2}}),
}
ROUTES = {"all": None, "some": (0, 3), "one": (2,)}  # the experts that get tokens


def one(grid: str, stage: int, routes: str, **more: Any) -> dict[str, Any]:
    """Train one step of two micro-batches, which must be that of one process."""
    _, ep, json = GRIDS[grid]
    tp = json.get("tensor_parallel", {}).get("autotp_size", 1)
    make = functools.partial(Experts, only=ROUTES[routes])
    dp = dist.get_world_size() // tp
    if not stage:
        json = {key: value for key, value in json.items() if key != "zero_optimization"}
    found = trained(make, json_with(ep, stage, 2, **json, **more), integers, place_of(tp))
    wanted, before = plain(make, integers, dp, 2), dict(make().named_parameters())
    for name, grad in wanted["grads"].items():
        assert torch.equal(found["grads"][name], grad), name
        assert torch.equal(found["weights"][name], before[name] - 0.125 * grad), name
        assert ("experts" not in name) or found["shapes"][name] == (4 // ep, *before[name].shape[1:])
    total = sum(float(grad.double().square().sum()) for grad in wanted["grads"].values()) ** 0.5
    assert found["norms"][0] == pytest.approx(total, rel=1e-12)
    losses = torch.tensor(found["losses"], dtype=torch.float64)
    dist.all_reduce(losses)
    assert losses.sum().item() / dist.get_world_size() / 2 == wanted["loss"]
    return found


SHORT = [("ep 2", 3, "some"), ("ep 2 x efsdp 2", 1, "all"), ("ep 4", 2, "one"), ("ep 4 = dp 2 x tp 2", 3, "all")]
REST = [each for each in itertools.product(GRIDS, range(4), ROUTES) if each not in SHORT]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "grid", "stage", "routes"),
    [*((GRIDS[each[0]][0], *each) for each in SHORT), *longer(*((GRIDS[each[0]][0], *each) for each in REST))],
)
def test_every_grid_and_stage_with_experts_that_get_no_token_and_one_that_gets_all(
    world: int, grid: str, stage: int, routes: str
) -> None:
    one(grid, stage, routes)


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "stage"), [(4, 3), *longer((4, 0), (4, 1), (4, 2))])
def test_experts_of_shared_sequences(world: int, stage: int) -> None:
    """Ranks that share a sequence send tokens of their pieces; the integers of their losses are the whole's."""
    found = trained(
        Experts,
        json_with(2, stage, sequence_parallel_size=2, zero={"context": {"reduction": "sum"}}),
        with_positions,
        place_of(1, 2),
    )
    wanted = plain(Experts, integers, 2)
    for name, grad in wanted["grads"].items():
        assert torch.equal(found["grads"][name], grad), name


def with_positions(number: int, place: int) -> dict[str, torch.Tensor]:
    batch = integers(number, place)
    return batch | {"position_ids": torch.arange(batch["ids"].shape[1])[None].expand_as(batch["ids"])}


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "policy"), [(2, "full"), *longer((4, "full"), (4, "selective"))])
def test_blocks_that_are_recomputed(world: int, policy: str) -> None:
    recompute = {"recompute": {"modules": ["Block"], "policy": policy}}
    one("ep 2" if world == 2 else "ep 4", 3, "all", zero=recompute)


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "stage"), longer((2, 1), (2, 3)))
def test_blocks_that_are_compiled(world: int, stage: int) -> None:
    """What is between the exchanges is; they are called as they are."""
    found = trained(Experts, json_with(2, stage), integers, place_of(1), steps=2, compiler="eager")
    for name, grad in plain(Experts, integers, 2)["grads"].items():
        assert torch.equal(found["grads"][name], grad), name


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "stage"), longer((2, 0), (2, 1), (2, 2), (2, 3)))
def test_stacks_of_which_one_is_frozen(world: int, stage: int) -> None:
    """The other one trains; ranks whose experts get no token exchange what the others do."""

    def make() -> Experts:
        model = Experts(only=(0, 3))
        for block in model.blocks:
            block.mix.experts.up.requires_grad_(False)
        return model

    found, wanted = trained(make, json_with(2, stage, 2), integers, place_of(1)), plain(make, integers, 2, 2)
    for name, grad in wanted["grads"].items():
        assert found["grads"][name] is grad is None or torch.equal(found["grads"][name], grad), name


@pytest.mark.ranks(2)
def test_more_than_tokens_experts_and_weights_is_refused() -> None:
    """What the model would do with it is not known."""

    class Scaled(Stacks):
        def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, scale: float = 1.0) -> Any:
            return super().forward(x, index, weights) * scale

    model = Experts()
    model.blocks[0].mix.experts.__class__ = Scaled
    engine, *_ = zero.initialize(model=model, config=json_with(2))
    engine(**integers(0, 0))
    plain = model.blocks[0].mix.experts
    x, index, weights = torch.ones(2, 8), torch.tensor([[0], [3]]), torch.ones(2, 1)
    assert torch.equal(plain(x, weights=weights, index=index), plain(x, index, weights))
    with pytest.raises(TypeError, match=r"'blocks\.0\.mix\.experts': .* no more"):
        plain(x, index, weights, scale=2.0)
    engine.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("says", "wanted"), [(4, ""), (5, "n_experts"), (None, "n_experts")])
def test_the_number_of_experts_is_that_of_the_config(says: int | None, wanted: str) -> None:
    model = Experts()
    if says is not None:
        model.config = SimpleNamespace(n_experts=says)
    json = json_with(2) | {"expert_parallel": {"enabled": True, "ep_size": 2, "num_experts_attr": "n_experts"}}
    with pytest.raises(ValueError, match=wanted) if wanted else contextlib.nullcontext():
        zero.initialize(model=model, config=json)[0].destroy()
