"""The promise: what ranks measure together is what one process measures, to the last sample and bit."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from models import config
from ranks import said_by
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import zero
from zero.tools.report.written_run import read

COUNT = 777


class Pair(NamedTuple):
    inputs: torch.Tensor
    labels: torch.Tensor | None


@dataclass
class Scores:
    right: torch.Tensor
    kept: dict[str, list[torch.Tensor]]


def data(count: int = COUNT) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator), torch.arange(count))


def engine_of(training_data: Any = None, **settings: Any) -> tuple[zero.Engine, Any]:
    torch.manual_seed(0)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    settings = config(0, ranks, micro=32, **settings)
    made = zero.initialize(model=nn.Linear(4, 3), config=settings, training_data=training_data)
    return made[0], made[2]


def right_of_one_process() -> int:
    torch.manual_seed(0)
    model, (inputs, labels, _) = nn.Linear(4, 3), data().tensors
    return int((model(inputs).argmax(-1) == labels).sum())


def measure(loader: Any, engine: zero.Engine) -> tuple[int, list[int]]:
    """How many guesses are right over all ranks, and which samples were seen."""
    right, seen = 0, []
    for inputs, labels, index in loader:
        with torch.no_grad():
            guess = engine(inputs).argmax(-1)
        guess, labels, index = engine.gather_for_metrics((guess, labels, index))
        right += int((guess == labels).sum())
        seen += index.tolist()
    return right, seen


def samples(loader: Any, engine: zero.Engine) -> list[int]:
    """Which samples come out of a loader of batches whose last part is the number of each."""
    return [n for batch in loader for n in engine.gather_for_metrics(batch[-1]).tolist()]


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_the_accuracy_over_an_uneven_dataset_is_that_of_one_process(world: int) -> None:
    engine, loader = engine_of(data())
    for _ in range(2):
        right, seen = measure(loader, engine)
        assert sorted(seen) == list(range(COUNT))
        assert seen != sorted(seen)
        assert right == right_of_one_process()
    right, seen = measure(engine.deepspeed_io(data(), route="eval"), engine)
    assert (right, seen) == (right_of_one_process(), list(range(COUNT))), "not in the order of the dataset"
    assert sorted(samples(engine.deepspeed_io(data(5), batch_size=1), engine)) == list(range(5))
    engine.destroy()


@pytest.mark.ranks(2)
def test_a_pass_that_is_resumed_and_one_of_whole_steps_know_their_padding_too() -> None:
    engine, loader = engine_of(data(), zero={"reduce": "tree"})
    for start in (0, 3, 12):  # batches
        seen = samples(zero.skip_first_batches(loader, start), engine)
        assert len(set(seen)) == len(seen) == COUNT - 64 * start
    engine.destroy()
    engine, loader = engine_of(data())
    loader.load_state_dict({**loader.state_dict(), "start": [3], "seen": [3]})  # as other ranks may leave it
    assert len(set(samples(loader, engine))) == COUNT - 3
    engine.destroy()


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(40))


@pytest.mark.ranks(2)
def test_streams_and_samplers_of_the_users() -> None:
    engine, loader = engine_of(Stream())
    assert [n for batch in loader for n in engine.gather_for_metrics(batch).tolist()] == list(range(40))
    own = range(dist.get_rank(), 17, 2)  # nine samples on one rank, eight on the other
    loader = engine.deepspeed_io(data(17), batch_size=9, data_sampler=own)
    assert samples(loader, engine) == list(range(17))
    for drop_last in (False, True):
        sampler = DistributedSampler(data(17), 2, dist.get_rank(), shuffle=False, drop_last=drop_last)
        loader = engine.deepspeed_io(data(17), batch_size=4, data_sampler=sampler)
        assert samples(loader, engine) == list(range(16 if drop_last else 17))
    engine.destroy()


@pytest.mark.ranks(2)
def test_values_of_another_loader_are_cut_to_the_total_that_is_given() -> None:
    engine, _ = engine_of()
    sampler = DistributedSampler(data(), 2, dist.get_rank(), shuffle=False)
    seen = torch.cat([index for *_, index in DataLoader(data(), 8, sampler=sampler)])
    assert engine.gather_for_metrics(seen, total=COUNT).tolist() == list(range(COUNT))
    text = said_by(lambda: engine.gather_for_metrics(seen[:8], total=COUNT))
    assert "gather_for_metrics: got 16 samples with total=777; wanted at least that many" in text
    assert "give total=" in said_by(lambda: engine.gather_for_metrics(seen))
    engine.destroy()


@pytest.mark.ranks(2)
def test_nested_values_of_any_dtype_keep_their_form() -> None:
    engine, _ = engine_of()
    label = torch.tensor([dist.get_rank(), 2 + dist.get_rank()])
    given = {
        "pair": Pair(label.to(torch.bfloat16), None),
        "scores": Scores(label > 1, {"all": [label.to(torch.complex64), label.float().requires_grad_()]}),
        "rows": torch.stack([label, label], 1)[:, :1],
    }
    found = engine.gather_for_metrics(given, total=4)
    assert isinstance(found["pair"], Pair)
    assert found["pair"].labels is None
    assert found["pair"].inputs.dtype == torch.bfloat16
    assert found["pair"].inputs.tolist() == [0, 1, 2, 3]
    assert found["scores"].right.tolist() == [False, False, True, True]
    complex_, floats = found["scores"].kept["all"]
    assert complex_.dtype == torch.complex64
    assert complex_.real.tolist() == floats.tolist() == [0, 1, 2, 3]
    assert not floats.requires_grad
    assert found["rows"].tolist() == [[0], [1], [2], [3]]
    assert given["pair"].inputs.numel() == 2, "the values that were given were changed"
    engine.destroy()


@pytest.mark.ranks(2)
def test_what_cannot_be_put_together_is_refused_on_all_ranks() -> None:
    engine, _ = engine_of()
    rank = dist.get_rank()
    *_, index = next(iter(engine.deepspeed_io(data(), 8)))
    for wrong, text in (
        ([index, "text"], "got str on rank 0"),
        (index if rank else "text", "got str on rank 0"),
        ([index] * (1 + rank), "got 2 values on rank 1 and 1 on the first"),
        (index.sum(), "has no dimension of samples; engine.reduce"),
        (torch.zeros(8, 2 + rank), "[8, 2] torch.float32, [8, 3] torch.float32; pad it to one shape"),
        (torch.zeros(8, dtype=(torch.float32, torch.int64)[rank]), "[8] torch.float32, [8] torch.int64"),
        (index[:5], "got 10 samples, and the last batch of this engine's loaders has 16 over all ranks"),
    ):
        assert text in said_by(lambda wrong=wrong: engine.gather_for_metrics(wrong))
    assert "value 0 differs between ranks" in said_by(lambda: engine.reduce(torch.zeros(1 + rank)))
    assert "got str on rank 0" in said_by(lambda: engine.reduce("text"))
    assert 'wanted "mean" or "sum"' in said_by(lambda: engine.reduce(1.0, "max"))
    engine.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        engine.reduce(1.0)


@pytest.mark.ranks(2)
def test_sums_and_means_over_ranks() -> None:
    engine, _ = engine_of()
    rank = dist.get_rank()
    assert engine.reduce(1.5 + rank) == 2.0
    assert engine.reduce(1.5 + rank, "sum") == 4.0
    assert engine.reduce(2**40 + rank, "sum") == 2**41 + 1
    assert engine.reduce(rank == 0, "sum") == 1
    total = engine.reduce({"loss": torch.full((2, 2), 1.0 + rank), "count": torch.tensor(3 + rank)}, "sum")
    assert total["loss"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert (total["count"].item(), total["count"].dtype) == (7, torch.int64)
    assert engine.reduce(torch.tensor([1, 2]) + rank).tolist() == [1.5, 2.5]
    half = engine.reduce(torch.tensor(60000.0, dtype=torch.float16))  # whose sum fp16 does not hold
    assert (half.item(), half.dtype) == (60000.0, torch.float16)
    engine.destroy()


@pytest.mark.ranks(2)
def test_only_the_first_rank_prints() -> None:
    engine, _ = engine_of()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        engine.print("loss", 0.5, sep="=", end=".")
    assert out.getvalue() == ("loss=0.5." if dist.get_rank() == 0 else "")
    engine.destroy()


def test_values_of_the_script_stand_in_the_line_of_the_step(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = engine_of(steps_per_print=2)
    moving = torch.tensor(0.25)
    engine.log({"accuracy": 0.125, "share": moving, "phase": "50% warm"})
    moving += 1
    engine.log({"accuracy": torch.tensor(0.5)})
    for _ in range(2):
        engine.backward(engine(torch.ones(8, 4)).sum())
        engine.step()
    (line,) = [record.getMessage() for record in caplog.records if "accuracy" in record.getMessage()]
    assert re.search(r"accuracy=0\.5\b.*share=0\.25\b.*phase=50% warm", line), line
    for wrong, text in (([1], "got list, wanted a mapping"), ({"a": torch.ones(2)}, "got shape (2,) for 'a'")):
        assert text in said_by(lambda wrong=wrong: engine.log(wrong))
    engine.destroy()


def test_values_may_be_of_a_step_that_has_ended_and_come_behind_the_last(tmp_path: Path) -> None:
    engine, _ = engine_of(zero={"report": str(tmp_path / "run")})
    told: list[tuple[str, float, int]] = []
    engine.monitor.add(SimpleNamespace(write_events=told.extend))
    for _ in range(2):
        engine.backward(engine(torch.ones(8, 4)).sum())
        engine.step()
    engine.log({"accuracy": 0.25}, step=1)
    engine.log({"accuracy": 0.5}, step=2)
    assert "log(step=4): wanted the number of a step that has ended, from 1 to 2" in said_by(
        lambda: engine.log({}, step=4)
    )
    engine.log({"final": torch.tensor(0.75)})
    per_step = engine.global_samples // 2
    engine.destroy()
    names = ("accuracy", "final")
    found = [(name.rpartition("/")[2], value, at) for name, value, at in told if name.endswith(names)]
    assert found == [("accuracy", 0.25, per_step), ("accuracy", 0.5, 2 * per_step), ("final", 0.75, 2 * per_step)]
    first, second = read(tmp_path / "run").ranks[0].steps()
    assert (first["values"], second["values"]) == ({"accuracy": 0.25}, {"accuracy": 0.5, "final": 0.75})
