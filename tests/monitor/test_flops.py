"""The promise: FLOPs are those of the model, by module, whatever the stage, and what is recomputed is told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import WIDTH, batch, make_net
from scenario import Model, run, seeded
from torch.utils.flop_counter import FlopCounterMode

TOKENS = 10  # of a rank in a step: two samples of five
INNER = 2 * WIDTH + 1  # of a block


def profile(stage: int, steps: int = 4, model: Any = "net", section: Any = None, **more: Any) -> Any:
    """What was found in the second of some steps, or as the section says."""
    counted: list[Any] = []

    def loop(engine: Any, number: int, inputs: Any) -> torch.Tensor:
        counted[:] = counted or [engine._training.profiles._flops]
        engine.backward(loss := engine(*inputs).sum())
        return loss

    run(model, stage, steps, loop=loop, flops_profiler={"enabled": True, **(section or {})}, **more)
    return counted[0]


def check(stage: int) -> None:
    found = profile(stage, accumulation=2, zero={"recompute": {"modules": ["Block"]}})
    if dist.is_initialized() and dist.get_rank():
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
    check(0)


@pytest.mark.long
@pytest.mark.ranks(2)
def test_so_they_are_where_parameters_are_cut() -> None:
    check(3)


def test_the_total_is_what_torch_counts_of_the_plain_model() -> None:
    found = profile(0)
    with FlopCounterMode(display=False) as counter:
        make_net()(*batch(0, 2)).backward()
    assert found.total == counter.get_total_flops()
    assert found.recomputed == found.apart == 0


def test_the_table_is_written_with_times_and_mfu(tmp_path: Path) -> None:
    path = tmp_path / "flops.txt"
    profile(0, section={"output_file": str(path), "module_depth": 2})
    text = path.read_text()
    assert "FLOPs of step 2 on this rank" in text and "MFU" in text
    assert "1 (Block)" in text
    assert "up (Linear)" not in text  # lies deeper


def test_the_largest_modules_of_each_depth_and_no_step_need_follow(tmp_path: Path) -> None:
    path = tmp_path / "flops.txt"
    section = {"output_file": str(path), "profile_step": 0, "detailed": False, "top_modules": 2}
    found = profile(0, 1, section=section)
    text = path.read_text()
    assert "forward 40.1 kFLOP, backward 80.2 kFLOP" in text
    assert len(text.splitlines()[3:]) == 1 + 2 + 2 + 2
    assert found.rows["blocks"].forward == sum(found.rows[f"blocks.{index}"].forward for index in range(3)) > 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


class Attention(torch.nn.Module):
    """One head over five tokens, without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_attention_on_a_cpu_counts() -> None:
    make = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), Attention()))
    model = Model(make, lambda number, part: (torch.ones(2, 1, 5, 8),))
    found = profile(0, 1, model, {"profile_step": 0}, zero={"recompute": {"modules": ["Attention"]}})
    assert found.rows["1"].forward == found.recomputed == 2 * 2 * 2 * 5 * 5 * 8  # two products, of two samples
    assert found.rows["0"].forward == 2 * TOKENS * 8 * 8
