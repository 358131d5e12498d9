"""The promise: what an optimizer does with a matrix does not depend on which ranks have which parts of it.

Parameters are cut by hand, in parts of unequal size: along rows, along columns, stacked projections, stacks of matrices
whole and within, filters. Each element has a loss of its own, so gradients do not depend on the cutting; then Muon,
NorMuon and LAMB have the bits of one process, and what they save goes on at any other cutting.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import cut_layers
import pytest
import torch
from cut_layers import WAYS, Layers
from fake_nccl import on_fake_nccl
from hypothesis import given
from hypothesis import strategies as st
from marks import longer
from offload_cases import OPTIMIZER
from torch import nn

import zero
from zero.checkpoint.verify import verify
from zero.config.optimizers import MuonParams
from zero.optim.muon_groups import muon_groups
from zero.plan.cut import Box, Cut, whole
from zero.plan.matrices import matrices_of, owners, shared_matrices
from zero.plan.units import ModuleNode, ParamSpec, plan_units

SHAPES = {
    "rows": (24, 40),
    "columns": (16, 48),
    "qkv": (32, 16),  # of 16, 8 and 8 rows
    "experts": (4, 8, 12),
    "stack": (3, 8, 20),
    "corners": (4, 6, 10),
    "filter": (8, 4, 3, 3),
    "all": (12, 10),
    "bias": (24,),
}
WIDE = {"rows": (24, 512), "columns": (16, 1024), "all": (8, 600), "bias": (24,)}
# Ends of the parts of a dim, of each number of ranks.
ENDS = {
    1: {4: (4,)},
    2: {4: (1, 4), 24: (16, 24)},
    4: {4: (1, 2, 3, 4), 24: (10, 16, 17, 24), 1024: (256, 512, 768, 1024), 1280: (256, 512, 700, 1280)},
}
DIMS = {"rows": 0, "bias": 0, "experts": 0, "columns": 1, "filter": 1, "stack": 2}  # along which each is cut


def part_of(size: int, part: int, of: int) -> tuple[int, int]:
    """First element and number of those along a dim, or along a part of it."""
    even = [size // 4 * (4 // of) * (at + 1) for at in range(of)]
    ends = (0, *ENDS[of].get(size, (even[0] - (of > 1) * (size // 8), *even[1:])))
    return ends[part], ends[part + 1] - ends[part]


def cut(name: str, shape: tuple[int, ...], part: int, of: int) -> Cut | None:
    """What part `part` of `of` has of it; None where it has all of it."""
    if of == 1 or name == "all":
        return None
    first, sizes = [0] * len(shape), list(shape)
    if name == "qkv":
        bands = ((0, 16), (16, 8), (24, 8))
        places = [(start + at, size) for start, rows in bands for at, size in [part_of(rows, part, of)]]
        return Cut(shape, tuple(Box((at, 0), (size, shape[1])) for at, size in places))
    if name == "corners":  # of each matrix two ranks have parts
        first[0], sizes[0] = part_of(4, part * 2 // of, 2)
        if of > 2:
            first[2], sizes[2] = 5 * (part % 2), 5
    else:
        dim = DIMS[name]
        first[dim], sizes[dim] = part_of(shape[dim], part, of)
    return Cut(shape, (Box(tuple(first), tuple(sizes)),))


def engine_of(way: Any, json: dict[str, Any]) -> Any:
    json = {**json, "cut": True, "zero": {"reduce": "tree"}}
    return cut_layers.engine_of(way, json, json.pop("shapes", SHAPES), cut)


def trained(way: Any, json: dict[str, Any], *how: Any) -> dict[str, torch.Tensor]:
    """Whole masters and momenta after some steps."""
    return cut_layers.trained(engine_of(way, json), *how)[1]


def over_nccl(*args: Any) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch, on_fake_nccl(patch):
        return trained(*args)


def differing(ranks: list[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert all(found.keys() == wanted.keys() for found in ranks)
    return sorted({name for found in ranks for name in wanted if not torch.equal(found[name], wanted[name])})


def of_type(kind: str, stage: int, **params: Any) -> dict[str, Any]:
    return {"stage": stage, "optimizer": {"type": kind, "params": {"lr": 1e-2, "weight_decay": 0.1, **params}}}


MUON = {"muon_lr": 2e-2, "ns_method": "standard"}
NORMUON = {"muon_lr": 2e-2, "beta2": 0.5, "adjust_lr_fn": "match_rms_adamw", "split": {"qkv": [16, 8, 8]}}
BF16 = {"precision": "bf16", "gradient_clipping": 0.5}
JSONS = [
    of_type("Muon", 1, **MUON),
    of_type("Muon", 3, **NORMUON) | BF16,
    of_type("Lamb", 3),
    *longer(
        of_type("Muon", 3, **MUON, split={"qkv": 4, "stack": 2, "filter": 2}),
        of_type("Muon", 2, **NORMUON) | {"section": OPTIMIZER},
        of_type("Lamb", 1) | BF16,
    ),
]
each_json = pytest.mark.parametrize("json", JSONS, ids=lambda json: f"{json['optimizer']['type']} {json['stage']}")


@each_json
def test_training_is_that_of_one_process(pool, json):
    (wanted,) = pool.run(1, trained, 1, json, range(4))
    for way in ("2 x 2", 4):
        assert differing(pool.run(4, trained, way, json, range(4)), wanted) == [], way


@pytest.mark.parametrize("stage", [3, *longer(1)])
def test_a_checkpoint_goes_on_at_any_other_cutting(pool, tmp_path, stage):
    """The one at "again" holds what was loaded, as no step has shared it out among the ranks yet."""
    json = of_type("Muon", stage, **NORMUON)
    (wanted,) = pool.run(1, trained, 1, json, range(5))
    for way, world in ((1, 1), ("2 x 2", 4), (4, 4)):
        pool.run(world, trained, way, json, range(3), "", str(tmp_path / str(way)))
        pool.run(world, trained, way, json, range(0), str(tmp_path / str(way)), str(tmp_path / f"{way} again"))
        assert [verify(folder) for folder in tmp_path.glob(f"{way}*/global_step*")] == [[], []]
    for save, load in (("2 x 2", 1), (4, "2 x 2"), ("2 x 2 again", 4), (1, 4), ("4 again", 1)):
        found = pool.run(WAYS[load][0], trained, load, json, range(3, 5), str(tmp_path / str(save)))
        assert differing(found, wanted) == [], (save, load)


def test_over_nccl_it_is_that_of_one_process(pool):
    json = of_type("Muon", 3, **MUON)
    (wanted,) = pool.run(1, trained, 1, json, range(2))
    assert differing(pool.run(4, over_nccl, "2 x 2", json, range(2)), wanted) == []


EIGHT = {"shapes": WIDE, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "zero": {"moments": "8bit"}}}}


@pytest.mark.parametrize("stage", [3, *longer(1)])
def test_moments_in_eight_bits_round_at_other_places_only(pool, stage):
    """The first update is made of moments that are not rounded yet; random bits depend on places in a rank's unit."""
    json = {"stage": stage, **EIGHT}
    (first,), (wanted,) = (pool.run(1, trained, 1, json, range(steps)) for steps in (1, 6))
    for way in ("2 x 2", 4):
        found = pool.run(4, trained, way, json, range(1))
        assert {name for name in differing(found, first) if " of " not in name} == set()
        for ranks in pool.run(4, trained, way, json, range(6)):
            for name in WIDE:
                moves = (wanted[name] - first[name]).norm()
                assert (ranks[name] - wanted[name]).norm() < 0.1 * moves, name


@pytest.mark.parametrize("load", [1, *longer(4)])
def test_where_a_rank_cuts_through_blocks_all_have_one_format(pool, tmp_path, load):
    """Two of four parts are whole blocks. Moments of one matrix were in two formats, and no checkpoint was whole."""
    json = {"stage": 3, **EIGHT, "shapes": WIDE | {"columns": (16, 1280)}}
    saved, *_ = pool.run(4, trained, 4, json, range(2), "", str(tmp_path))
    for found in pool.run(WAYS[load][0], trained, load, json, range(0), str(tmp_path)):
        assert [name for name in differing([found], saved) if "columns" not in name] == []
        assert torch.equal(found["columns"], saved["columns"])
        assert torch.allclose(found["exp_avg of columns"], saved["exp_avg of columns"], rtol=0.2, atol=1e-3)


# --- decisions -------------------------------------------------------------------------------------------------------


def test_the_same_parameters_are_muons():
    """Also where a rank has one row of a matrix, as a vector."""

    def chosen(model: nn.Module) -> list[list[str]]:
        names = {param: name for name, param in model.named_parameters()}
        params = MuonParams(split={"qkv": [16, 8, 8]})
        found = muon_groups(model, [{"params": list(names)}], params)
        return [[names[param] for param in group["params"]] for group in found]

    model = Layers(SHAPES, cut, 3, 4)
    row = nn.Parameter(torch.ones(10))
    zero.set_cut(row, Cut((12, 10), (Box((11, 0), (1, 10)),)))
    model.all = row
    assert chosen(model) == chosen(Layers(SHAPES, cut))


@pytest.mark.ranks(2)
def test_a_description_says_of_what_it_is_a_part():
    engine = engine_of(2, of_type("Muon", 1))
    text, part = str(engine.describe()), engine.module.cuts["columns"]
    shapes = {each.name: (each.shape, each.cut) for unit in engine.describe().units for each in unit.parameters}
    engine.destroy()
    assert shapes["columns"] == ((16, part.boxes[0].sizes[1]), part) and shapes["all"] == ((12, 10), None)
    assert f"16x{part.boxes[0].sizes[1]} of 16x48" in text and "12x10 of" not in text


def test_units_are_those_of_full_parameters():
    """Two ranks would else put the same layers in other units, and wait for each other's messages."""
    root = ModuleNode(
        "", "Net", children=(ModuleNode("a", "Linear", ("a.weight",)), ModuleNode("b", "Linear", ("b.weight",)))
    )
    shape, found = (1000, 150), []
    for first, rows in ((0, 800), (800, 200)):
        part = Cut(shape, (Box((first, 0), (rows, 150)),))
        specs = [ParamSpec(f"{name}.weight", part.numel, "fp32", True, 0, 2, cut=part) for name in "ab"]
        found.append([unit.name for unit in plan_units(root, specs, 1)])
    assert found == [["a", "b"]] * 2


# --- parts of matrices, and who works on them ------------------------------------------------------------------------


@st.composite
def cuttings(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[int, list[Box]], dict[str, int]]:
    """A shape, a cutting of it along up to two dims in boxes for up to three ranks, and rows that are split."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=4)))
    places = []
    for size in shape:
        inner = draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else set()
        places.append(list(itertools.pairwise([0, *sorted(inner), size])))
    boxes: dict[int, list[Box]] = {rank: [] for rank in range(3)}
    for ends in draw(st.permutations(list(itertools.product(*places)))):
        box = Box(tuple(first for first, _ in ends), tuple(stop - first for first, stop in ends))
        boxes[draw(st.integers(0, 2))].append(box)
    rows = shape[1] if len(shape) == 3 else shape[0]
    return shape, boxes, {"w": draw(st.sampled_from([each for each in range(1, rows + 1) if rows % each == 0]))}


@given(cuttings(), st.integers(1, 3))
def test_parts_of_all_ranks_make_up_each_matrix(case, ranks):
    shape, boxes, split = case
    full = torch.arange(math.prod(shape)).view(shape)
    start = 7
    local = {
        rank: torch.cat([full[box.slices].reshape(-1) for box in those] or [full[:0].reshape(-1)])
        for rank, those in boxes.items()
    }
    every = [shared_matrices("w", shape, split, boxes, rank, start) for rank in boxes]
    owned = [dict(zip(range(len(of)), owners(of, ranks), strict=True)) for of in every]
    wanted = matrices_of("w", shape, split)
    assert [[each.matrix for each in of] for of in every] == [wanted] * len(boxes)
    for index, matrix in enumerate(wanted):
        found = torch.full(every[0][index].shape, -1)
        for rank, of in enumerate(every):
            there = of[index].boxes.get(rank, [])
            for span, box in zip(of[index].spans, there, strict=True):
                found[box.slices] = local[rank][span.start - start : span.stop - start].view(box.sizes)
        assert torch.equal(found.view(-1), full.view(-1)[matrix.start : matrix.span.stop])
        shard, beside = owned[0][index]
        assert shard < ranks and every[beside][index].spans, "who works on it has a part of it"
        assert every[0][index].rows * matrix.cols == full.numel()


def test_all_ranks_have_a_share_of_the_work():
    shape, boxes = (8, 6), {rank: [Box((0, 3 * rank), (8, 3))] for rank in range(2)}
    cut_ones = [one for name in "abcdefgh" for one in shared_matrices(name, shape, {}, boxes, 0, 0)]
    assert sorted(owners(cut_ones, 2)) == sorted([(0, 0), (0, 1), (1, 0), (1, 1)] * 2)
    stack = {rank: [Box((4 * rank, 0, 0), (4, 8, 6))] for rank in range(2)}
    mine = [one for one in shared_matrices("stack", (8, 8, 6), {}, stack, 1, 0) if one.spans]
    assert sorted(owners(mine, 2)) == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert whole((8, 8, 6)).numel == 2 * sum(one.matrix.span.numel for one in mine)
