"""The promise: with `"zero": {"reduce": "tree"}` the bits of the weights do not depend on the number of ranks.

Worlds 1, 2 and 4 with accumulation 4, 2 and 1, and a run that moves from 4 to 2 to 1 ranks, end with one SHA-256 of
all weights, on every stage, in fp32 and bf16, with dropout, clipping and the loader's shuffle. By default they do not.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import WIDTH, Block, config
from torch import nn
from torch.utils.data import TensorDataset

import zero
from zero.data import RepeatingLoader
from zero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

TOGETHER = 4  # micro-batches of an optimizer step
MICRO = 2
STEPS = 6
STAGES = (0, 1, 2, 3)
MOMENTS = ("exp_avg", "exp_avg_sq")
State = dict[str, Any]


class Net(nn.Module):
    """Blocks with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = self.dropout(block(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


def settings(stage: int, reduce: str, bf16: bool, world: int, units: tuple[str, ...] = ()) -> dict[str, Any]:
    return config(
        stage,
        world,
        micro=MICRO,
        accumulation=TOGETHER // world,
        gradient_clipping=0.5,
        bf16={"enabled": bf16},
        zero={"reduce": reduce, "units": list(units)},
    )


def dataset() -> TensorDataset:
    # 30 samples are 3.75 global batches: the end of a pass is part of the promise.
    return TensorDataset(torch.randint(0, 11, (30, 6), generator=torch.Generator().manual_seed(5)))


def begin(stage: int, reduce: str, bf16: bool, units: tuple[str, ...], state: State | None) -> tuple[Any, Any]:
    """An engine and its loader, new or as `state` says."""
    torch.manual_seed(3)
    world = dist.get_world_size()
    made = zero.initialize(model=Net(), config=settings(stage, reduce, bf16, world, units), training_data=dataset())
    engine, _, loader, _ = made
    if state:
        engine.global_steps = state["step"]
        loader.load_state_dict(state["data"])
        for name, param in engine.module.named_parameters():
            safe_set_full_fp32_param(param, state["exact"][name])
            for key in MOMENTS:
                safe_set_full_optimizer_state(param, state[key][name], key)
            safe_set_full_optimizer_state(param, state["step"], "step")
    return engine, loader


def whole_state(engine: Any) -> State:
    """All that the run goes on from, whole on every rank."""
    named = dict(engine.module.named_parameters())
    found: State = {"exact": {name: safe_get_full_fp32_param(param) for name, param in named.items()}}
    for key in MOMENTS:
        found[key] = {name: safe_get_full_optimizer_state(param, key) for name, param in named.items()}
    return {**found, "step": engine.global_steps, "data": engine.training_dataloader.state_dict()}


def run(stage: int, reduce: str, bf16: bool, steps: int, units: tuple[str, ...], state: State | None) -> dict[str, Any]:
    """Train some steps more on this rank; the state, the rank's losses, and a SHA-256 of whole parameters."""
    engine, loader = begin(stage, reduce, bf16, units, state)
    batches, losses, norms = iter(RepeatingLoader(loader)), [], []
    for _ in range(steps * engine.gradient_accumulation_steps()):
        (tokens,) = next(batches)
        engine.backward(loss := engine(tokens))
        losses.append(loss.item())
        engine.step()
        norms.append(engine.get_global_grad_norm())
    found = whole_state(engine)
    engine.destroy()
    weights = digest({name: param.detach() for name, param in engine.module.named_parameters()})
    return {**found, "losses": losses, "norm": norms[-1], "weights": weights}


def runs(cases: list[tuple], states: list[State | None]) -> list[dict[str, Any]]:
    return [run(*case, state) for case, state in zip(cases, states, strict=True)]


def digest(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def merged(ranks: list[dict[str, Any]]) -> State:
    """The state, on which all ranks must agree, with the losses of all micro-batches in their order."""
    hashes = [(part["weights"], *(digest(part[key]) for key in ("exact", *MOMENTS))) for part in ranks]
    assert len(set(hashes)) == 1, "ranks ended with different states"
    losses = [loss for turn in zip(*(part["losses"] for part in ranks), strict=True) for loss in turn]
    return {**ranks[0], "losses": losses, "hash": hashes[0]}


def trained(pool: Any, world: int, cases: list[tuple], states: list[State] | None = None) -> list[State]:
    """The whole state after each of the cases."""
    by_rank = pool.run(world, runs, cases, states or [None] * len(cases))
    return [merged([results[index] for results in by_rank]) for index in range(len(cases))]


CASES = [*((stage, False) for stage in STAGES), (1, True), (3, True)]


def cases(reduce: str, steps: int = STEPS) -> list[tuple]:
    return [(stage, reduce, bf16, steps, ()) for stage, bf16 in CASES]


@pytest.fixture(scope="module")
def at_two(pool):
    """What two ranks end with, by the tree on all cases, and in the order of ranks on the first and the last."""
    return {"tree": trained(pool, 2, cases("tree")), "ranks": trained(pool, 2, ends())}


def ends() -> list[tuple]:
    return [cases("ranks")[0], cases("ranks")[-1]]


def test_the_tree_gives_one_hash_at_any_world_size_and_the_ranks_order_does_not(pool, at_two):
    found = {1: trained(pool, 1, cases("tree")), 2: at_two["tree"], 4: trained(pool, 4, cases("tree"))}
    for bf16 in (False, True):
        chosen = [index for index, case in enumerate(CASES) if case[1] == bf16]
        hashes = {found[world][index]["hash"] for world in found for index in chosen}
        assert len(hashes) == 1, f"{len(hashes)} different ends"
        first = found[1][chosen[0]]
        for world in found:
            for index in chosen:
                assert found[world][index]["losses"] == first["losses"]
                assert found[world][index]["norm"] == first["norm"]
        losses = first["losses"]
        assert sum(losses[-8:]) < sum(losses[:8]), "nothing was learnt"
    plain = {1: trained(pool, 1, ends()), 2: at_two["ranks"], 4: trained(pool, 4, ends())}
    for index in range(2):
        assert len({plain[world][index]["hash"] for world in plain}) == 3


@pytest.mark.long
def test_a_run_that_moves_from_four_ranks_to_two_to_one_ends_alike(pool, at_two):
    states = None
    for world, steps in ((4, 2), (2, 3), (1, 1)):
        states = trained(pool, world, cases("tree", steps), states)
    assert [state["hash"] for state in states] == [state["hash"] for state in at_two["tree"]]
    states = None
    for world, steps in ((4, 2), (2, 3), (1, 1)):
        states = trained(pool, world, cases("ranks", steps)[:1], states)
    assert states[0]["hash"] != at_two["ranks"][0]["hash"]


@pytest.mark.parametrize("units", [("blocks.0", "embed"), *longer((("Net",),), (("Linear", "LayerNorm"),))])
def test_the_tree_does_not_depend_on_what_travels_together(pool, units):
    wanted = trained(pool, 2, [(0, "tree", bf16, 3, ()) for bf16 in (False, True)])
    other = trained(pool, 2, [(3, "tree", bf16, 3, units) for bf16 in (False, True)])
    assert [state["hash"] for state in other] == [state["hash"] for state in wanted]
