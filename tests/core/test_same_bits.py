"""The promise: with `"zero": {"reduce": "tree"}` the bits of the weights do not depend on the number of ranks.

Worlds 1, 2 and 4, and a run that moves from 4 to 2 to 1 ranks, end with one state, on every stage, in fp32 and bf16,
with dropout and clipping. By default they do not. So it is in awkward steps: windows of any length, blocks that only
some micro-batches use, several backwards in a micro-batch, recomputed dropout, and exceptions. And the tree is as near
to fp64 as plain torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import WIDTH, Block, batch, config, make_net, share
from oracle import Training, near
from scenario import Record, differences, runs, same
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero

TREE = {"reduce": "tree"}
CASES = [*((stage, "fp32") for stage in range(4)), (1, "bf16"), (3, "bf16")]
WHAT = ("weights", "exact", "moments", "norms")


class Dropped(nn.Module):
    """Blocks with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, 17)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.dropout(block(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def ends(pool: Any, world: int, cases: list[Any], reduce: str = "tree", steps: int = 6, **more: Any) -> list[Record]:
    """What ranks end with, in which they agree, and the losses of four micro-batches of each step in their order."""
    given = []
    for index, (stage, precision) in enumerate(cases):
        folders = {name: f"{folder}/{index}" for name, folder in more.items() if name in ("load", "save")}
        section = {"reduce": reduce, "units": more.get("units", [])}
        json = {"stage": stage, "precision": precision, "gradient_clipping": 0.5, "zero": section}
        how = {"steps": steps, "parts": 4, "state": True, "first": more.get("first", 0), **folders}
        given.append(((Dropped, json), how))
    found = []
    for ranks in zip(*pool.run(world, runs, given), strict=True):
        assert all(same(record, ranks[0], *WHAT) for record in ranks), "ranks ended with different states"
        losses = [loss for turn in zip(*(record.losses for record in ranks), strict=True) for loss in turn]
        found.append(Record(losses, **{name: getattr(ranks[0], name) for name in WHAT}))
    return found


@pytest.fixture(scope="module")
def at_two(pool):
    """What two ranks end with, by the tree on all cases, and in the order of ranks on the first and the last."""
    return {"tree": ends(pool, 2, CASES), "ranks": ends(pool, 2, CASES[::5], "ranks")}


def test_the_tree_gives_one_end_at_any_world_size_and_the_ranks_order_does_not(pool, at_two):
    found = [ends(pool, 1, CASES), at_two["tree"], ends(pool, 4, CASES)]
    for precision in ("fp32", "bf16"):
        chosen = [record for world in found for case, record in zip(CASES, world, strict=True) if case[1] == precision]
        for record in chosen:
            assert not differences(record, chosen[0], "losses", *WHAT)
        losses = chosen[0].losses
        assert sum(losses[-8:]) < sum(losses[:8]), "nothing was learnt"
    plain = [ends(pool, 1, CASES[::5], "ranks"), at_two["ranks"], ends(pool, 4, CASES[::5], "ranks")]
    for one, two, four in zip(*plain, strict=True):
        assert not (same(one, two, "weights") or same(two, four, "weights") or same(one, four, "weights"))


@pytest.mark.long
@pytest.mark.parametrize(("reduce", "cases"), [("tree", CASES), ("ranks", CASES[::5])])
def test_a_run_that_moves_from_four_ranks_to_two_to_one_ends_alike(pool, at_two, reduce, cases, tmp_path: Path):
    ends(pool, 4, cases, reduce, 2, save=str(tmp_path / "four"))
    ends(pool, 2, cases, reduce, 3, load=str(tmp_path / "four"), save=str(tmp_path / "two"), first=2)
    found = ends(pool, 1, cases, reduce, 1, load=str(tmp_path / "two"), first=5)
    for last, wanted in zip(found, at_two[reduce], strict=True):
        assert same(last, wanted, "weights", "exact", "moments") == (reduce == "tree")


@pytest.mark.parametrize("units", [["blocks.0", "embed"], *longer(["Dropped"], ["Linear", "LayerNorm"])])
def test_the_tree_does_not_depend_on_what_travels_together(pool, at_two, units):
    (found,) = ends(pool, 2, [(3, "fp32")], units=units)
    assert same(found, at_two["tree"][0], "losses", *WHAT)


# --- awkward steps ------------------------------------------------------------------------------------------

WINDOWS = (4, 20, 12)  # micro-batches of all ranks in each optimizer step: not always a power of two


class Routed(nn.Module):
    """Blocks of which micro-batch `number` uses some: the second is for one in 16, or with `level` for four in a row.

    Where parameters are cut, ranks must gather them together, and so use the same blocks in a micro-step.
    """

    def __init__(self, recompute: bool, level: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.dropout = nn.Dropout(0.4)
        self.head = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.tensor([-0.0, 1.0]))
        self.recompute, self.level = recompute, level

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        chosen = number // 4 % 4 == 1 if self.level else number % 16 == 7
        for index, block in enumerate(self.blocks):
            if index != 1 or chosen:
                x = checkpoint(self._run, block, x, use_reentrant=False) if self.recompute else self._run(block, x)
        if number % 5 == 0:  # a gradient of -0.0 here, none elsewhere
            x = x + self.scale[1] + self.scale[0] * -0.0
        return self.head(x).square().mean()

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(block(x))


def routed(stage: int, bf16: bool, how: str) -> list[Any]:
    """Train on the windows; exact bits of what came out, and the norms."""
    rank, world = dist.get_rank(), dist.get_world_size()
    kind = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
    json = config(stage, world, accumulation=4 // world, bf16={"enabled": bf16}, zero=TREE, optimizer=kind)
    torch.manual_seed(11)
    model = Routed(how == "recompute", stage == 3)
    engine, *_ = zero.initialize(model=model, config=json)
    number, norms = rank, []
    for window in WINDOWS:
        for index in range(window // world):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number)).to(model.scale.dtype)
            engine.set_gradient_accumulation_boundary(index == window // world - 1)
            engine.backward(engine(x, number))
            if how == "twice":
                engine.backward(engine(x, number) * 0.5)
            if how == "forgotten" and window == 12 and index == 8 // world - 1:
                engine.zero_grad()
            engine.step()
            number += world
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    values = [param.detach().double().view(-1) for param in model.parameters()]
    return [norms, torch.cat(values).view(torch.int64).tolist()]


@pytest.mark.parametrize(
    ("how", "stages"),
    [
        *(("recompute", (3,)), ("forgotten", (0, 2, 3))),
        *longer(("recompute", (0, 2)), ("once", (0, 2, 3)), ("twice", (0, 2, 3))),
    ],
)
def test_awkward_steps_have_the_same_bits_at_any_world_size(pool, how, stages):
    for stage, bf16 in ((stage, stage == 2) for stage in stages):
        found = [result for world in (1, 2, 4) for result in pool.run(world, routed, stage, bf16, how)]
        assert all(result == found[0] for result in found), f"stage {stage}"
        if how == "recompute":
            assert pool.run(2, routed, stage, bf16, "once")[0] == found[0]


def after_an_exception(stage: int) -> list[Any]:
    engine, *_ = zero.initialize(model=make_net(), config=config(stage, 2, accumulation=2, zero=TREE))
    for step in range(5):
        if step == 1:  # the micro-batch before it is lost, too: the window begins anew
            tokens, targets = batch(step, 4)
            with pytest.raises(ValueError, match="batch_size"):
                engine(tokens, targets[:, :1])
        engine.backward(engine(*share(step)))
        engine.step()
    held = engine.state_nbytes().gradients
    engine.destroy()
    return [engine.global_steps, held, [param.sum().item() for param in engine.module.parameters()]]


def test_an_exception_leaves_it_usable(pool):
    results = [result for stage in (1, 3) for result in pool.run(2, after_an_exception, stage)]
    assert all(result == results[0] for result in results)
    assert results[0][:2] == [2, 0]


@pytest.mark.parametrize(("world", "accumulation"), [(4, 1), *longer((1, 4), (2, 4))])
def test_the_error_is_at_most_twice_that_of_plain_torch(pool, world, accumulation):
    json = {"accumulation": accumulation, "gradient_clipping": 0.3, "zero": TREE}
    cases = [(("dealt", {"stage": stage, **json}), {"steps": 6}) for stage in (0, 3)]
    for record in pool.run(world, runs, cases)[0]:
        assert near(record.weights, Training(world, 6, accumulation, 0.3))
