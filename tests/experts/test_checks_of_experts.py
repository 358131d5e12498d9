"""The promise: a check compares experts that ranks divide with one process, and finds what only that shows."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import FEW, adam, family, verdicts, words
from expert_models import Experts, json_with
from launching import Launchers
from marks import longer
from nodes import environment
from sharing import needs_transformers

WELL = {"same bits", "within rounding"}


def batch(rank: int | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return {
        "ids": torch.randint(13, (2, 12), generator=generator),
        "weights": torch.randn(2, 12, 13, generator=generator),
    }


class Rough(Experts):
    """Not of integers, of which routers give many tokens equal scores: a nudge would choose others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(0.0, 0.5)


class Faulty(Rough):
    """Its second rank has a hook that makes the gradient of its experts a little too small."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().forward(*args, **kwargs)
        if dist.get_rank() % 2 and loss.requires_grad and self.blocks[0].mix.experts.num_experts < 4:
            self.blocks[0].mix.experts.up.register_hook(lambda grad: grad * 0.99)
        return loss


@pytest.mark.ranks(2)
def test_right_experts_are_well_and_a_gradient_that_is_wrong_on_one_rank_is_found() -> None:
    assert set(verdicts(Rough(), json_with(2, 1, **adam()), batch())) <= WELL
    found = verdicts(Faulty(), json_with(2, 1, **adam()), batch(), stages=(1,))
    assert found == ["DIFFERS: first in the gradient of 'blocks.0.mix.experts.up' at step 1"]


@needs_transformers
@pytest.mark.ranks
@pytest.mark.parametrize(("world", "name", "tp"), longer((4, "mixtral", 1), (4, "gpt_oss", 2), (2, "deepseek_v3", 1)))
def test_models_of_transformers_are_well(world: int, name: str, tp: int) -> None:
    """Beside data ranks, and beside layers that are cut."""
    more = {"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}
    json = json_with(2, 2, **adam(), **more)
    found = verdicts(family(name), json, words(0, dist.get_rank() // tp), **{**FEW, "accumulations": (1, 2)})
    assert set(found) <= WELL, found


SCRIPT = """
    import torch
    import zero
    from cut_models import adam
    from expert_models import json_with
    from test_checks_of_experts import Faulty, Rough, batch

    with zero.Init(config_dict_or_path=(json := json_with(2, 1, **adam()))):
        model = MODEL()
    engine, *_ = zero.initialize(model=model, config=json)
    for step in range(8):
        engine.backward(engine(**batch(10 * step + engine.global_rank)))
        engine.step()
"""


@pytest.mark.long
@pytest.mark.parametrize("model", ["Rough", "Faulty"])
def test_the_command(launchers: Launchers, tmp_path: Path, model: str) -> None:
    (path := tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT.replace("MODEL", model)))
    given = environment(OMP_NUM_THREADS="1")
    given["PYTHONPATH"] += f":{Path(__file__).parent}"
    arguments = ["--nproc", "2", "--steps", "2", "--accumulation", "2", "--stages", "1,3", str(path)]
    ended = launchers.run("check", *arguments, environment=given, seconds=400)
    assert ended.returncode == (model == "Faulty"), ended.stdout + ended.stderr
    assert ended.stdout.count("DIFFERS: first in the gradient of 'blocks.0.mix.experts.up'") == 2 * ended.returncode
