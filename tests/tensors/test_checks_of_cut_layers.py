"""The promise: a check compares a model whose layers are cut with one process, and finds what only that shows."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import FEW, adam, family, json_of, place_of, verdicts, words
from launching import Launchers
from nodes import environment
from ranks import said_by
from sharing import needs_transformers
from torch import nn

import zero
from zero.engine.assignment import Given
from zero.engine.check.checked_run import CheckedRun
from zero.engine.check.runs import CheckRun, RunKind


class Layers(nn.Module):
    """A block of two products and a frozen one; `faulty` takes the width here for that of the whole, in training."""

    def __init__(self, faulty: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.faulty = nn.LayerNorm(8), faulty
        self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(12, 8)
        self.gate_proj = nn.Linear(8, 12).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        inner = torch.tanh(self.gate_proj(x)) * self.up_proj(x)
        width = inner.shape[-1] if self.faulty and self.training else 12  # the first forward is compared in eval
        return (x + self.down_proj(inner) / width**0.5).square().mean()


def rows() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(place_of(2)))


@pytest.mark.ranks(2)
def test_right_layers_are_well_and_a_width_taken_for_the_whole_is_found() -> None:
    assert set(verdicts(Layers(), json_of(2, 1, **adam()), rows())) <= {"same bits", "within rounding"}
    found = verdicts(Layers(faulty=True), json_of(2, 1, **adam()), rows())
    assert found == ["DIFFERS: first in the gradient of 'norm.weight' at step 1"] * 2


class Hooked(nn.Module):
    """Its second tensor-parallel rank has a hook that makes a gradient a little too small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layers(x)
        if dist.get_rank() % 2 and loss.requires_grad:
            self.layers.up_proj.weight.register_hook(lambda grad: grad * 0.99)
        return loss


@pytest.mark.ranks(4)
def test_a_gradient_that_is_wrong_on_one_rank_of_a_layer_is_found() -> None:
    found = verdicts(Hooked(), json_of(2, 0, **adam()), rows(), stages=(1,))
    assert found == ["DIFFERS: first in the gradient of 'layers.up_proj.weight' at step 1"]


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"sequence_parallel": True}),
    ("llama", {"reduce": "tree", "blocks": 2}),
    ("gpt2", {"broadcast_batch": True}),
]


@needs_transformers
@pytest.mark.long
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "more"), FORMS)
def test_models_of_transformers_are_well(name: str, more: dict[str, Any]) -> None:
    """Beside a tied head, with sequences that are cut, sums of a tree, and batches that only the first rank has."""
    tree = {"zero": {"reduce": "tree"}} if "reduce" in more else {}
    sizes = {"vocab_size": 68} if tree else {}
    json = json_of(2, 2, tensor_parallel=more, **adam(), **tree)
    batch = words(dist.get_rank() if "broadcast_batch" in more else 0, place_of(2))
    found = verdicts(family(name, **sizes), json, batch, accumulations=(1, 2))
    assert set(found) <= {"same bits", "within rounding"}, found


@pytest.mark.ranks(2)
def test_a_grid_that_arguments_say_is_refused() -> None:
    engine, *_ = zero.initialize(model=Layers(), config=json_of(1, 1, **adam()), mesh_param={"tp": 2})
    assert said_by(lambda: engine.check(rows(), **FEW)) == (
        "ValueError: check(): an argument says tp, and copies of the engine are made by the JSON alone"
    )
    engine.destroy()


def test_plain_torch_has_no_model_of_which_a_script_makes_parts(tmp_path: Path) -> None:
    param = nn.Parameter(torch.zeros(2, 4))
    zero.set_cut(param, zero.Cut((4, 4), (zero.Box((0, 0), (2, 4)),)))
    checked = CheckedRun(CheckRun(RunKind.PLAIN, 1, 1), tmp_path)
    with pytest.raises(ValueError, match=r"'0' is a part of a larger one, .*no process has the whole model"):
        checked.engine(lambda given: None, Given(nn.ParameterList([param]), None, None, None, None))


SCRIPT = """
    import torch
    import zero
    from cut_models import adam, json_of
    from test_checks_of_cut_layers import Layers
    from torch.utils.data import TensorDataset

    torch.manual_seed(2)
    with zero.Init(config_dict_or_path=(json := json_of(2, 1, **adam()))):
        model = Layers(faulty=FAULTY)
    data = TensorDataset(torch.randn(64, 8))
    engine, _, loader, _ = zero.initialize(model=model, config=json, training_data=data)
    ours = engine.deepspeed_io(data, batch_size=2)
    for (x,), (other,) in zip(loader, ours):
        loss = engine(torch.cat([x, other]))
        factor = engine.reduce(1.0, "sum") / len(engine.gather_for_metrics(x.new_ones(len(other))))
        engine.backward(loss * factor)
        engine.step()
"""


@pytest.mark.long
@pytest.mark.parametrize("faulty", [False, True])
def test_the_command_on_two_groups_of_ranks(launchers: Launchers, tmp_path: Path, faulty: bool) -> None:
    """Samples, and what is measured, are those of ranks that have samples of their own."""
    (path := tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT.replace("FAULTY", str(faulty))))
    given = environment(OMP_NUM_THREADS="1")
    given["PYTHONPATH"] += f":{Path(__file__).parent}"
    words = ["--nproc", "4", "--steps", "2", "--accumulation", "2", "--stages", "3" if faulty else "1,3", str(path)]
    ended = launchers.run("check", *words, environment=given, seconds=400)
    assert ended.returncode == faulty, ended.stdout + ended.stderr
    assert ended.stdout.count("within rounding") == 2 * (not faulty), ended.stdout
    assert ended.stdout.count("DIFFERS: first in the gradient of 'norm.weight' at step 1") == faulty
