"""The promise: with `"zero": {"reduce": "tree"}` the bits of the weights do not depend on the number of ranks.

Worlds 1, 2 and 4, and a run that moves from 4 to 2 to 1 ranks, end with one state, on every stage, in fp32 and bf16,
with dropout and clipping. By default they do not. So it is in awkward steps: windows of any length, blocks that only
some micro-batches use, several backwards in a micro-batch, and recomputed dropout. The tree is as near to fp64 as plain
torch. Its norm has the same bits for any cut and order, is right to 1e-12, and finds inf and NaN.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import each_once, longer
from models import WIDTH, Block, Net, batch, config, make_net
from oracle import Training, near
from scenario import Record, differences, run, runs, same, scenario
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from zero.config import ConfigError, load
from zero.optim import norm as norms

TREE = {"reduce": "tree"}
CASES = [(0, "fp32"), (3, "fp32"), (1, "bf16")]
ENDS = CASES[1:2]
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


def ends(pool: Any, world: int, cases: list[Any], reduce: str = "tree", steps: int = 4, **more: Any) -> list[Record]:
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
    """What two ranks end with, by the tree on all cases, and in the order of ranks on one."""
    return {"tree": ends(pool, 2, CASES), "ranks": ends(pool, 2, ENDS, "ranks")}


def test_the_tree_gives_one_end_at_any_world_size_and_the_ranks_order_does_not(pool, at_two):
    found = [ends(pool, 1, CASES), at_two["tree"], ends(pool, 4, CASES)]
    for precision in ("fp32", "bf16"):
        chosen = [record for world in found for case, record in zip(CASES, world, strict=True) if case[1] == precision]
        for record in chosen:
            assert not differences(record, chosen[0], "losses", *WHAT)
        losses = chosen[0].losses
        assert sum(losses[-8:]) < sum(losses[:8]), "nothing was learnt"
    plain = [ends(pool, 1, ENDS, "ranks"), at_two["ranks"], ends(pool, 4, ENDS, "ranks")]
    for one, two, four in zip(*plain, strict=True):
        assert not (same(one, two, "weights") or same(two, four, "weights") or same(one, four, "weights"))


@pytest.mark.long
@pytest.mark.parametrize(("reduce", "cases"), [("tree", CASES), ("ranks", ENDS)])
def test_a_run_that_moves_from_four_ranks_to_two_to_one_ends_alike(pool, at_two, reduce, cases, tmp_path: Path):
    ends(pool, 4, cases, reduce, 2, save=str(tmp_path / "four"))
    ends(pool, 2, cases, reduce, 1, load=str(tmp_path / "four"), save=str(tmp_path / "two"), first=2)
    found = ends(pool, 1, cases, reduce, 1, load=str(tmp_path / "two"), first=3)
    for last, wanted in zip(found, at_two[reduce], strict=True):
        assert same(last, wanted, "weights", "exact", "moments") == (reduce == "tree")


@pytest.mark.parametrize("units", [["blocks.0", "embed"], *longer(["Dropped"], ["Linear", "LayerNorm"])])
def test_the_tree_does_not_depend_on_what_travels_together(pool, at_two, units):
    (found,) = ends(pool, 2, [(3, "fp32")], units=units)
    assert same(found, at_two["tree"][1], "losses", *WHAT)


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
        *(("recompute", (3,)), ("forgotten", (2,))),
        *longer(("recompute", (0, 2)), ("forgotten", (3,)), ("twice", (2, 3))),
    ],
)
def test_awkward_steps_have_the_same_bits_at_any_world_size(pool, how, stages):
    for stage, bf16 in ((stage, stage == 2) for stage in stages):
        found = [result for world in (1, 2, 4) for result in pool.run(world, routed, stage, bf16, how)]
        assert all(result == found[0] for result in found), f"stage {stage}"
        if how == "recompute":
            assert pool.run(2, routed, stage, bf16, "once")[0] == found[0]


@pytest.mark.parametrize(("world", "accumulation"), [(4, 1), *longer((1, 4), (2, 4))])
def test_the_error_is_at_most_twice_that_of_plain_torch(pool, world, accumulation):
    json = {"accumulation": accumulation, "gradient_clipping": 0.3, "zero": TREE}
    cases = [(("dealt", {"stage": stage, **json}), {"steps": 6}) for stage in (0, 3)]
    for record in pool.run(world, runs, cases)[0]:
        assert near(record.weights, Training(world, 6, accumulation, 0.3))


# --- random numbers and refused windows ------------------------------------------------------------------------------


class Draw(nn.Module):
    """Shows what it draws; `fail` raises in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, fail: bool = False) -> torch.Tensor:
        drawn = torch.rand(4)
        if fail:
            raise RuntimeError("in the middle")
        return self.weight.sum() * 0 + drawn


def drawn() -> list[Any]:
    torch.manual_seed(4)
    engine, *_ = zero.initialize(model=Draw(), config=config(0, 1, accumulation=2, zero=TREE))
    found = []
    for _ in range(4):
        outputs = [engine() for _ in range(2)]
        found += [output.tolist() for output in outputs]
        engine.backward(outputs[-1].sum())
        engine.step()
    return found


def test_draws_differ_between_steps_micro_batches_and_forwards_and_repeat():
    found = drawn()
    assert len({tuple(values) for values in found}) == 8
    assert drawn() == found


def test_the_script_keeps_its_own_random_numbers():
    engine, *_ = zero.initialize(model=Draw(), config=config(0, 1, zero=TREE))
    torch.manual_seed(9)
    before = torch.get_rng_state()
    engine()
    with pytest.raises(RuntimeError, match="in the middle"):
        engine(fail=True)
    assert torch.equal(torch.get_rng_state(), before)
    engine.eval()
    assert torch.equal(engine(), torch.rand(4, generator=torch.Generator().manual_seed(9)) + 0 * engine.weight)


@pytest.mark.parametrize(
    ("world", "steps", "fix"), [(3, 4, "the number of ranks"), (2, 3, "gradient_accumulation_steps")]
)
def test_a_window_that_is_no_power_of_two_is_refused(world, steps, fix):
    json = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": steps, "zero": TREE}
    text = (
        f"zero.reduce: 'tree' wants powers of two; got world size {world} x gradient_accumulation_steps={steps} = "
        f"{world * steps} micro-batches per optimizer step; change {fix}, or use 'ranks'"
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        load(json, world)
    assert load({**json, "zero": {}}, world).zero.reduce == "auto"
    assert load({**json, "gradient_accumulation_steps": 4}, 2).zero.reduce == "tree"


# --- the exact norm --------------------------------------------------------------------------------------------------


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
NEAR = st.floats(-2.0, 2.0, width=32)


def norm(parts: list[torch.Tensor]) -> float:
    """The norm as ranks find it that hold one part each."""
    bound = max(norms.largest_of([part]) for part in parts)
    if bound == 0:
        return 0.0
    exponent = math.frexp(bound)[1]
    return norms.norm_of(sum(norms.sum_of_squares([part], exponent) for part in parts), exponent)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(FLOATS | NEAR, min_size=1, max_size=60), data=st.data())
def test_no_cut_and_no_order_changes_it_and_it_is_right(values, data):
    whole = norm([torch.tensor(values)])
    # Exact: squares of fp32 fit fp64 but where they fall below its range, and there is always a larger one then.
    true = math.sqrt(math.fsum(value * value for value in values))
    assert whole == pytest.approx(true, rel=1e-12, abs=0)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=5)))
    shuffled = data.draw(st.permutations(values))
    parts = [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True)]
    assert norm([torch.tensor(part) for part in parts]) == whole


def test_the_ends_of_fp32_and_a_whole_chunk_of_largest_elements():
    for scale in (2.0**-149, 1.0, torch.tensor(3e38).item()):
        assert norm([torch.full((4,), scale)]) == 2 * scale
    values = torch.full((norms.CHUNK + 3,), 1.0 - 2.0**-24)
    assert norm([values]) == pytest.approx(math.sqrt(norms.CHUNK + 3) * (1.0 - 2.0**-24), rel=1e-15)


class Spoilt(Net):
    """A Net with a parameter whose gradient is what the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(2))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, grad: tuple[float, ...] = ()) -> torch.Tensor:
        loss = super().forward(tokens, targets)
        for index, value in enumerate(grad):
            loss = loss + self.extra[index] * value - (self.extra[index] * value).detach()
        return loss


def spoil(values: tuple[float, ...], engine: Any, number: int, inputs: Any) -> torch.Tensor:
    """The last rank has these values in its gradient from the second step on."""
    spoilt = number > 0 and dist.get_rank() == dist.get_world_size() - 1
    engine.backward(loss := engine(*inputs, values if spoilt else ()))
    return loss


def applied(engine: Any, number: int) -> bool:
    return engine.was_step_applied()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "spoilt"), each_once([0, 1, 3], [(math.inf,), (math.nan,), (math.inf, math.nan)]))
def test_what_is_not_finite_skips_the_step(stage, spoilt):
    json = {"stage": stage, "zero": {"reduce": "tree"}}
    found = run(Spoilt, json, 2, loop=functools.partial(spoil, spoilt), watch=applied)
    good, bad = found.norms
    assert math.isfinite(good) and found.seen == [True, False]
    assert math.isnan(bad) if any(map(math.isnan, spoilt)) else bad == math.inf


def test_it_is_the_norm(pool):
    plain = make_net()
    plain(*batch(0, 4)).backward()
    squares = [value * value for p in plain.parameters() for value in p.grad.view(-1).double().tolist()]
    found = {
        record.norms[0]
        for stage in (0, 3)
        for record in scenario(pool, "dealt", {"stage": stage, "zero": {"reduce": "tree"}}, 2, 1)
    }
    assert len(found) == 1
    assert found.pop() == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-6)
