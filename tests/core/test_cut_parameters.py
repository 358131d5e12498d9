"""The promise: a parameter that is a slice of a larger one is known by the larger one, however it is sliced.

Layers are cut by hand along rows, along columns and along the stacked first dim of query, key and value, on 2 and 4
ranks. Norm, `safe_get_full_*`, checkpoints and what consolidates them have the bits of whole layers; a checkpoint
loads at any other cutting.
"""

from __future__ import annotations

from typing import Any

import cut_layers
import pytest
import torch
from cut_layers import WAYS, factors, taken, values
from hypothesis import given
from hypothesis import strategies as st
from marks import longer
from safetensors.torch import load_file
from torch import nn

from zero.checkpoint.model_files import consolidate
from zero.checkpoint.verify import verify
from zero.core.owner import set_cut
from zero.plan.cut import Box, Cut, places, whole
from zero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

# The last one is too narrow for blocks of 256 elements, so that its moments stay in fp32.
SHAPES = {"rows": (24, 512), "columns": (16, 1024), "stacked": (36, 256), "narrow": (20, 1200), "plain": (40,)}


def cut(name: str, shape: tuple[int, ...], part: int, of: int) -> Cut | None:
    """What part `part` of `of` has of a layer; None where it has all of it."""
    if of == 1 or name == "plain":
        return None
    if name == "rows":
        boxes = [Box((shape[0] // of * part, 0), (shape[0] // of, shape[1]))]
    elif name == "stacked":
        each = shape[0] // 3
        boxes = [Box((each * k + each // of * part, 0), (each // of, shape[1])) for k in range(3)]
    else:
        boxes = [Box((0, shape[1] // of * part), (shape[0], shape[1] // of))]
    return Cut(shape, tuple(boxes))


def engine_of(way: Any, json: dict[str, Any]) -> Any:
    return cut_layers.engine_of(way, json, SHAPES, cut)


def trained(way: Any, json: dict[str, Any], *how: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    return cut_layers.trained(engine_of(way, json), *how)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


EIGHT = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "zero": {"moments": "8bit"}}}}
JSONS = [
    {"stage": 3, "cut": True, "precision": "bf16", "gradient_clipping": 0.5},
    *longer({"stage": 1, "precision": "bf16"}),
]
PAIRS = [(1, 2), (2, 1), (4, 2), ("2 x 2", 4), (4, "2 x 2")]  # saved so, and loaded so


@pytest.mark.parametrize("json", JSONS, ids=str)
def test_training_norm_and_checkpoints_do_not_depend_on_how_layers_are_cut(pool, tmp_path, json):
    json = json | {"zero": {"reduce": "tree"}}

    def run(way: Any, numbers: range, load: str = "", save: str = "") -> list[Any]:
        return pool.run(WAYS[way][0], trained, way, json, numbers, load, save)

    first = {way: run(way, range(3), save=str(tmp_path / str(way))) for way in WAYS}
    norms, last = first[1][0]
    for way, ranks in first.items():
        for mine, found in ranks:
            assert mine == pytest.approx(norms, rel=1e-12)
            assert same(found, last), f"{way} ends with other bits than whole layers"
    ((norms, wanted),) = run(1, range(3, 5), load=str(tmp_path / "1"))
    for save, load in PAIRS:
        for mine, found in run(load, range(3, 5), load=str(tmp_path / str(save))):
            assert mine == pytest.approx(norms, rel=1e-12)
            assert same(found, wanted), f"saved at {save}, loaded at {load}"
    for way in WAYS:
        folder = next(path for path in (tmp_path / str(way)).iterdir() if path.is_dir())
        assert verify(folder) == []
        (file,) = consolidate(folder, tmp_path / f"{way}.safetensors")
        weights = load_file(file)
        assert all(torch.equal(weights[name], last[name]) for name in SHAPES)


@pytest.mark.parametrize(("save", "load"), [PAIRS[1], *longer(PAIRS[2], PAIRS[4])])
def test_moments_in_eight_bits_are_the_same_at_another_cutting(pool, tmp_path, save, load):
    json = {"stage": 3, "cut": True, **EIGHT}
    (_, saved), *_ = pool.run(WAYS[save][0], trained, save, json, range(2), "", str(tmp_path))
    for _, found in pool.run(WAYS[load][0], trained, load, json, range(0), str(tmp_path)):
        for name in found:
            if "narrow" in name and name != "narrow":  # in fp32 where it is cut
                assert torch.allclose(found[name], saved[name], rtol=0.2, atol=1e-3)
            else:
                assert torch.equal(found[name], saved[name]), name


def written(way: Any) -> list[bool]:
    """What is set as a whole is read as it was set, on all ranks; gradients are whole, too."""
    engine, found = engine_of(way, {"stage": 3, "cut": True}), []
    for name, param in engine.module.named_parameters():
        safe_set_full_fp32_param(param, values(SHAPES, name, 7))
        found.append(torch.equal(safe_get_full_fp32_param(param), values(SHAPES, name, 7)))
        safe_set_full_optimizer_state(param, values(SHAPES, name, 8), "exp_avg")
        found.append(torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), values(SHAPES, name, 8)))
    engine.backward(engine(1))
    for name, param in engine.module.named_parameters():
        wanted = 2 * (values(SHAPES, name, 7) * factors(SHAPES, name, 1) - 1) * factors(SHAPES, name, 1)
        found.append(torch.equal(safe_get_full_grad(param), wanted))
    engine.destroy()
    return found


@pytest.mark.parametrize("way", [2, "2 x 2", *longer(4)])
def test_whole_values_are_read_and_written_on_all_ranks(pool, way):
    for found in pool.run(WAYS[way][0], written, way):
        assert found == [True] * len(found)


def test_boxes_that_overlap_or_lie_outside_are_refused():
    with pytest.raises(ValueError, match="overlap"):
        Cut((4, 4), (Box((0, 0), (2, 4)), Box((1, 0), (1, 4))))
    with pytest.raises(ValueError, match="does not lie in"):
        Cut((4, 4), (Box((3, 0), (2, 4)),))
    with pytest.raises(ValueError, match="its boxes have 8 elements, and the parameter 4"):
        set_cut(nn.Parameter(torch.zeros(4)), Cut((4, 4), (Box((0, 0), (2, 4)),)))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    first = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, first, strict=True))
    box = Box(first, sizes)
    start = draw(st.integers(0, box.numel))
    return shape, box, start, draw(st.integers(0, box.numel - start))


@given(boxes())
def test_any_range_of_a_box_is_made_up_of_boxes(case):
    shape, box, start, numel = case
    full = torch.arange(whole(shape).numel).view(shape)
    local = taken(full, Cut(shape, (box,))).view(-1)
    parts = [(taken(full, Cut(shape, (piece,))).view(-1), at) for piece, at in places([box], start, numel)]
    assert torch.equal(torch.cat([part for part, _ in parts] or [local[:0]]), local[start : start + numel])
    sizes = [len(part) for part, _ in parts]
    assert [at for _, at in parts] == [sum(sizes[:index]) for index in range(len(sizes))]
