"""The promise: what is decided of the whole model does not depend on which part of it a rank has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import longer
from pipelines import CLASSES, ROWS, WIDTH, accumulated, batches, compare, json_of, pipelined
from states import weights_of
from torch import nn

import zero
from zero.config import ConfigError, load

MICRO_BATCHES = 4
IN_STAGES = {"pipeline": {"stages": 2, "partition": [2, 3]}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "weight_decay": 0.0}}, "gradient_clipping": 0.0}


class Encoder(nn.Linear):
    """The class of the layers of the first stage."""


class Block(nn.Module):
    """That of the second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.inner(x)


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = Encoder(WIDTH, WIDTH), Encoder(WIDTH, WIDTH), Block(), Block()
    made = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES, bias=False))
    made.num_stages = 4  # a word of its own, as some models of pictures have; no PipelineModule
    return made


def rules(engine: Any) -> list[list[str]]:
    """The names of the parameters of each group."""
    named = {id(param): name for name, param in engine.module.named_parameters()}
    return [[named[id(param)] for param in group["params"]] for group in engine.optimizer.param_groups]


@pytest.mark.parametrize("stage", [1, *longer(0, 2, 3)])
def test_muon_takes_the_matrices_that_it_takes_in_one_process(pool: Any, stage):
    """The last linear layer of a stage is no head, and groups are the same on all ranks."""
    json = json_of(stage, 1, MICRO_BATCHES) | MUON
    found = pool.run(2, pipelined, json | IN_STAGES, model, state=weights_of, watch=rules)
    (wanted,) = pool.run(1, accumulated, json_of(min(stage, 1), 1, MICRO_BATCHES) | MUON, model, state=weights_of)
    compare([each._replace(seen=None) for each in found], wanted)
    first, second = (each.seen for each in found)
    assert [len(first), len(second)] == [2, 2]
    assert first[0] == ["0.weight", "1.weight"] and first[1] == ["0.bias", "1.bias"]
    assert "2.inner.0.weight" in second[0] and "4.weight" in second[1]


def patterned(json: dict[str, Any]) -> tuple[list[str], list[int], float]:
    engine = zero.initialize(model=model(), config=json, loss_fn=F.cross_entropy)[0]
    loss = float(engine.train_batch(batches(0)))
    runs = [each.runs for each in engine.module.modules() if isinstance(each, Block)]
    found = [each.name for each in engine.describe().units], runs, loss
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("schedule", "runs"), [("1f1b", 2), ("zero_bubble", 3), *longer(("gpipe", 2), ("interleaved", 2))]
)
def test_patterns_name_what_another_rank_has(pool: Any, schedule, runs):
    """And each module is run again once for a backward, or once for each part of it."""
    more = {"recompute": {"modules": ["Block"]}, "units": ["Block"]}
    per_rank = {"stages_per_rank": 1} if schedule in ("zero_bubble", "interleaved") else {}
    section = {"pipeline": IN_STAGES["pipeline"] | {"schedule": schedule, **per_rank}}
    first, second = pool.run(2, patterned, json_of(3, 1, MICRO_BATCHES, zero=more, **section))
    assert first[0] == ["<root>"] and second[0] == ["2", "3", "<root>"]
    assert first[1] == [] and second[1] == [runs * MICRO_BATCHES] * 2
    (wanted,) = pool.run(1, accumulated, json_of(1, 1, MICRO_BATCHES), model, 1)
    assert second[2] == pytest.approx(wanted.losses[0], rel=1e-6)


@pytest.mark.parametrize("key", ["units", "recompute"])
def test_a_pattern_that_names_nothing_anywhere_is_an_error_on_all_ranks(pool: Any, key):
    value = ["Blok"] if key == "units" else {"modules": ["Blok"]}
    json = json_of(1, 1, MICRO_BATCHES, zero={key: value}, **IN_STAGES)
    said = pool.run(2, refused, json)
    assert all("'Blok'] match no module of the model; did you mean 'Block'?" in each for each in said)


def refused(json: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        zero.initialize(model=model(), config=json, loss_fn=F.cross_entropy)
    return str(caught.value)


def test_a_choice_by_measured_memory_is_refused():
    json = json_of(1, 1, MICRO_BATCHES, zero={"recompute": {"modules": ["Block"], "policy": "auto"}}, **IN_STAGES)
    assert json["train_micro_batch_size_per_gpu"] == ROWS
    with pytest.raises(ConfigError, match=r"zero.recompute.policy: got 'auto' with pipeline.stages"):
        load(json, 2)
