"""The promise: FLOPs are those of the model, by module, whatever the stage, and what is recomputed is told apart.

What ranks send is counted, by operation and unit, and is what ZeRO says: 2 Psi, at stage 3 3 Psi.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import WIDTH, batch, config, make_net
from ranks import listening
from scenario import Model, run, seeded
from torch.utils.flop_counter import FlopCounterMode

import zero

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


# --- bytes that are sent ---------------------------------------------------------------------------------------------


PER_STEP = {  # how often half of the bytes of all parameters leave each of two ranks
    0: {"reduce": 1, "replica gather": 1},
    1: {"reduce": 1, "gather": 1},
    2: {"reduce": 1, "gather": 1},
    3: {"reduce": 1, "gather": 2},
}
LAST = "<root>"  # what forward uses last is the first of backward, and stays


def sent(engine: Any, number: int) -> list[dict[str, tuple[int, int]]]:
    """Count and bytes so far, by operation and by unit."""
    every = [engine.log_comms_summary(by_unit) for by_unit in (False, True)]
    return [{name: (each.count, each.sent) for name, each in found.items()} for found in every]


def of_second_step(stage: int) -> list[dict[str, tuple[int, int]]]:
    first, second = run("net", stage, steps=2, watch=sent, comms_logger={"enabled": True}).seen
    return [
        {
            name: (count - before.get(name, (0, 0))[0], size - before.get(name, (0, 0))[1])
            for name, (count, size) in now.items()
        }
        for before, now in zip(first, second, strict=True)
    ]


@pytest.mark.ranks(2)
def test_a_step_sends_what_the_paper_says() -> None:
    _, units = of_second_step(2)
    sizes = {name: size for name, (_, size) in units.items() if name}  # half of them twice
    whole = 4 * sum(param.numel() for param in make_net().parameters())
    assert whole <= sum(sizes.values()) < whole + 4 * 1024 * len(sizes), "padded"
    for stage, times in PER_STEP.items():
        operations, units = of_second_step(stage)
        count, norm = operations.pop("gradient norm")
        assert count == 1 and 0 < norm < 1000
        wanted = {name: (each * len(sizes), each * sum(sizes.values()) // 2) for name, each in times.items()}
        stays = sizes[LAST] // 2 if stage == 3 else 0
        if stays:
            wanted["gather"] = wanted["gather"][0] - 1, wanted["gather"][1] - stays
        assert operations == wanted
        halves = {name: sum(times.values()) * size // 2 - (name == LAST) * stays for name, size in sizes.items()}
        assert {name: size for name, (_, size) in units.items()} == halves | {"": norm}


@pytest.mark.ranks(2)
def test_only_the_operations_that_were_asked_for() -> None:
    section = {"enabled": True, "prof_all": False, "prof_ops": ["reduce_scatter_tensor"], "verbose": True}
    with listening(logging.INFO) as lines:
        (traffic,) = run("net", 2, 1, comms_logger=section, keep=lambda engine: engine.log_comms_summary()).seen
    assert list(traffic) == ["reduce"]
    assert traffic["reduce"].bus == traffic["reduce"].sent / traffic["reduce"].seconds > 0
    assert any("reduce of unit 'blocks.0'" in line for line in lines)
    assert not any("gather of unit" in line for line in lines)


def test_without_the_log_there_is_no_summary() -> None:
    engine: Any = zero.initialize(model=make_net(), config=config(0, 1))[0]
    with pytest.raises(RuntimeError, match=r"set comms_logger\.enabled to true"):
        engine.log_comms_summary()
    engine.destroy()
