"""The promise: FLOPs are those of the model, by module, whatever the stage, and what is recomputed is told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import WIDTH, batch, config, make_net, step
from torch.utils.flop_counter import FlopCounterMode

import zero

TOKENS = 10  # of a rank in a step: two samples of five
INNER = 2 * WIDTH + 1  # of a block


def profile(stage: int, world: int, **more: Any) -> tuple[Any, Any]:
    """The engine after four steps, the second of which is counted, and what was found."""
    section = {"enabled": True, **more.pop("section", {})}
    engine: Any = zero.initialize(model=make_net(), config=config(stage, world, flops_profiler=section, **more))[0]
    found = engine._training.profiles._flops
    for number in range(4):
        step(engine, number)
    return engine, found


def check(stage: int, world: int) -> None:
    engine, found = profile(stage, world, accumulation=2, zero={"recompute": {"modules": ["Block"]}})
    engine.destroy()
    if engine.global_rank:
        assert found is None  # rank 0 tells
        return
    block, head = 2 * WIDTH * INNER, WIDTH * 17
    assert found.forward == 2 * 2 * TOKENS * (3 * block + head)  # of two micro-batches
    assert found.model == 6 * 2 * TOKENS * (3 * block + head)
    assert found.rows["blocks.1"].forward == 2 * 2 * TOKENS * block
    assert found.rows["blocks.1.up"].forward == 2 * 2 * TOKENS * WIDTH * INNER
    assert found.rows[""].params == sum(param.numel() for param in make_net().parameters())
    # Torch ends a recomputation at the last tensor that backward wants, in front of the block's last product.
    assert found.recomputed == 3 * 2 * 2 * TOKENS * WIDTH * INNER


def test_flops_are_six_for_each_parameter_of_a_product_and_token() -> None:
    check(0, 1)


@pytest.mark.long
@pytest.mark.ranks(2)
def test_so_they_are_where_parameters_are_cut() -> None:
    check(3, 2)


def test_the_total_is_what_torch_counts_of_the_plain_model() -> None:
    engine, found = profile(0, 1)
    engine.destroy()
    model = make_net()
    with FlopCounterMode(display=False) as counter:
        model(*batch(0, 2)).backward()
    assert found.total == counter.get_total_flops()
    assert found.recomputed == found.apart == 0


def test_the_table_is_written_with_times_and_mfu(tmp_path: Path) -> None:
    path = tmp_path / "flops.txt"
    engine, found = profile(0, 1, section={"output_file": str(path), "module_depth": 2})
    text = path.read_text()
    assert "FLOPs of step 2 on this rank" in text
    assert "MFU" in text
    assert "1 (Block)" in text
    assert found.rows["blocks"].forward == sum(found.rows[f"blocks.{index}"].forward for index in range(3)) > 0
    assert "up (Linear)" not in text  # lies deeper
    assert found.rows["blocks.1"].seconds > 0
    said = engine._training.progress._logged["MFU"]
    engine.destroy()
    assert 0 < said < 1


def test_the_largest_modules_of_each_depth(tmp_path: Path) -> None:
    path = tmp_path / "flops.txt"
    engine, _ = profile(0, 1, section={"output_file": str(path), "detailed": False, "top_modules": 2})
    engine.destroy()
    rows = [line.split("  ")[0] or line.strip().partition(" (")[0] for line in path.read_text().splitlines()[4:]]
    assert len(rows) == 1 + 2 + 2 + 2


def test_what_was_counted_is_told_although_no_step_follows(tmp_path: Path) -> None:
    path = tmp_path / "flops.txt"
    section = {"enabled": True, "profile_step": 0, "output_file": str(path)}
    engine: Any = zero.initialize(model=make_net(), config=config(0, 1, flops_profiler=section))[0]
    step(engine, 0)
    engine.destroy()
    assert "forward 40.1 kFLOP, backward 80.2 kFLOP" in path.read_text()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


class Attention(torch.nn.Module):
    """One head over five tokens, without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_attention_on_a_cpu_counts() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Attention())
    sections = {
        "flops_profiler": {"enabled": True, "profile_step": 0},
        "zero": {"recompute": {"modules": ["Attention"]}},
    }
    engine: Any = zero.initialize(model=model, config=config(0, 1, **sections))[0]
    found = engine._training.profiles._flops
    engine.backward(engine(torch.ones(2, 1, 5, 8)).sum())
    engine.step()
    engine.destroy()
    assert found.rows["1"].forward == found.recomputed == 2 * 2 * 2 * 5 * 5 * 8  # two products, of two samples
    assert found.rows["0"].forward == 2 * TOKENS * 8 * 8
