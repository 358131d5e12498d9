"""The promise: what cannot be divided, or is fed wrongly, is an error by name on all ranks, and nobody waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pipelines import WIDTH, batches, chain, json_of, samples
from ranks import said_by
from torch import nn

import zero
from zero.core import torch_private

pytestmark = pytest.mark.ranks(2)
TWO = {"pipeline": {"stages": 2}}


def engine_of(make: Any = chain, **section: Any) -> Any:
    json = json_of(1, 1, section.pop("micro_batches", 4), pipeline={"stages": 2, **section})
    return zero.initialize(model=make(), config=json, loss_fn=F.cross_entropy)[0]


def marked() -> nn.Sequential:
    model = chain(4)
    for layer, stage in zip(model, (0, 1, 0, 1), strict=True):
        layer.pipeline_stage = stage
    return model


class Branches(nn.Module):
    """What stands between the layers asks for values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if x.sum() > 0 else x


class Backwards(nn.Module):
    """Calls its layers in another order than it registers them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.layers[1](x))


WRONG = [
    ({"make": lambda: chain(1)}, "pipeline: Sequential has 1 layers, and there are 2 stages"),
    ({"make": marked}, "pipeline: '2' is said to be of stage 0, and what is before it of stage 1"),
    ({"partition": [3, 4]}, "pipeline.partition: got [3, 4]; wanted 2 numbers of layers"),
    ({"partition": "type:conv"}, "pipeline.partition: 'type:conv' finds 0 layers"),
    ({"stage_map": {"nine": 1}}, "pipeline.stage_map: Sequential has no module 'nine'"),
    ({"stage_map": {"3": 2}}, "pipeline.stage_map of '3': got 2, wanted one of 0 to 1"),
    (
        {"schedule": "dualpipev", "micro_batches": 2},
        "pipeline.schedule: 'dualpipev' over 2 ranks of 2 stages cannot run 2",
    ),
    (
        {"schedule": "interleaved", "micro_batches": 7},
        "pipeline.schedule: 'interleaved' over 2 ranks of 2 stages cannot",
    ),
    ({"schedule": "zbv", "stages_per_rank": 3}, "pipeline.stages_per_rank: got 3, and zbv has 2"),
    ({"split_size": 2, "micro_batches": 4, "x": 1}, "pipeline: unknown key 'x'"),
]


def test_what_cannot_be_divided_is_refused_and_left_whole():
    for how, text in WRONG:
        model = how["make"]() if "make" in how else chain()
        section = {key: value for key, value in how.items() if key != "make"}
        said = said_by(lambda: engine_of(lambda: model, **section))  # noqa: B023
        assert text in said, said
        assert sum(1 for _ in model.parameters()) == 2 * sum(isinstance(each, nn.Linear) for each in model.modules())


def test_a_forward_that_cannot_be_divided_is_named_at_the_first_batch():
    for make, text in (
        (Branches, "the forward of Branches cannot be divided"),
        (Backwards, "is called behind what stage 1"),
    ):
        engine = engine_of(make)
        assert text in said_by(lambda: engine.train_batch(batches(0)))  # noqa: B023
        engine.destroy()


@pytest.mark.ranks(0)
def test_a_model_in_one_piece_is_not_traced():
    json = json_of(1, 1, 4, pipeline={"stages": 1})
    engine = zero.initialize(model=Branches(), config=json, loss_fn=F.cross_entropy)[0]
    assert engine.train_batch(batches(0)) > 0
    x, y = samples(0, 0)
    engine.backward(F.cross_entropy(engine(x), y))
    engine.destroy()


def test_calls_that_are_for_models_in_one_piece():
    engine = engine_of()
    assert "call engine.train_batch(data_iter)" in said_by(lambda: engine(torch.zeros(1, WIDTH)))
    engine.destroy()
    whole = zero.initialize(model=chain(), config=json_of(1, 2, 1))[0]
    with pytest.raises(AttributeError, match=r"'train_batch'.*pipeline\.stages in the JSON, or loss_fn"):
        whole.train_batch(batches(0))
    whole.destroy()


def test_deepspeed_5729_ranks_of_a_replica_with_other_samples():
    engine, rank = engine_of(), dist.get_rank()
    engine.train_batch(batches(0))

    def shifted() -> Any:
        for number in range(4):
            yield samples(number + (rank if number >= 2 else 0), 0)

    said = said_by(lambda: engine.train_batch(shifted()))
    assert "ranks 0, 1 have stages of one replica, and were given different samples, in micro-batch 2 first" in said
    engine.train_batch(batches(0))
    engine.destroy()


def test_an_iterator_that_ends_early_or_raises_does_so_on_all_ranks():
    engine, rank = engine_of(), dist.get_rank()

    def ends(count: int) -> Any:
        yield from (samples(number, 0) for number in range(count))
        if count > 2:
            raise OSError("no such file")

    said = said_by(lambda: engine.train_batch(ends(2 if rank else 4)))
    assert "the iterator ended after 2 of 4 micro-batches" in said
    assert "no such file" in said_by(lambda: engine.eval_batch(ends(3 if rank else 9)))
    assert "without data, which the first and the last stage need" in said_by(lambda: engine.train_batch(None))
    engine.train_batch(batches(0))
    engine.destroy()


def drops(json: dict[str, Any]) -> str:
    class Drops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x[:, 0] > 0]

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Drops(), nn.Linear(WIDTH, WIDTH))
    engine = zero.initialize(model=model, config=json, loss_fn=lambda output, target: output.sum())[0]
    said = said_by(lambda: [engine.train_batch(batches(0)) for _ in range(3)])
    engine.destroy()
    return said


def test_a_form_that_depends_on_values_is_named(pool):
    first, second = pool.run(2, drops, json_of(1, 1, 2, pipeline={"stages": 2, "partition": [2, 1]}))
    assert "what stage 1 of the pipeline gets has another form than before, for inputs of the same shapes" in first
    assert "activations of micro-batch 1 for stage 1" in second


def test_an_older_torch_is_named():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private, "VERSION", (2, 12))
        assert "pipelines want torch 2.13" in said_by(lambda: engine_of(schedule="gpipe", micro_batches=5))


def fails_on_one(json: dict[str, Any]) -> str:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("of this layer")

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), Fails()))
    engine = zero.initialize(model=model, config=json, loss_fn=F.cross_entropy)[0]
    said = said_by(lambda: engine.train_batch(batches(0)))
    engine.destroy()
    return said


def test_the_rank_that_waits_names_the_stage_and_the_micro_batch(pool):
    here, there = pool.run(2, fails_on_one, json_of(1, 1, 4, **TWO))
    assert "of this layer" in there
    assert "rank 1 raised" in here
    assert "gradients of micro-batch 0 for stage 0" in here
