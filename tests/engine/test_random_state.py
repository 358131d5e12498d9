"""The promise: a rank draws on where a saved one was, and ranks that were not there draw what no other rank draws."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from zero.checkpoint.plain import decode, encode
from zero.engine.checkpoint import random_state
from zero.recompute.holder import HOLDER

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the named streams


@pytest.fixture(autouse=True)
def no_streams() -> Iterator[None]:
    HOLDER.seeds.reset()
    yield
    HOLDER.seeds.reset()


def through_json(value: Any) -> Any:
    made, tensors = encode(value, "state")
    return decode(json.loads(json.dumps(made, allow_nan=False)), tensors)


def streamed(name: str) -> list[float]:
    with HOLDER.seeds.fork(name):
        return torch.rand(2, device=DEVICE).tolist()


def draws() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.randn(), np.random.bytes(3)


def test_random_numbers_go_on():
    cpu = torch.device("cpu")
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    HOLDER.seeds.add("stream", 7)
    draws(), streamed("stream")
    state = through_json(random_state.capture(cpu))
    wanted = draws(), streamed("stream")
    draws(), HOLDER.seeds.reset()
    random_state.restore(state, cpu)
    assert (draws(), streamed("stream")) == wanted
    with pytest.raises(ValueError, match="another stream has 7"):
        HOLDER.seeds.add("other", 7)
    HOLDER.seeds.reset()


def test_ranks_that_were_not_there_draw_what_no_other_draws():
    cpu = torch.device("cpu")
    HOLDER.seeds.add("alike", 7)
    HOLDER.seeds.add("apart", 8)
    saved = []
    for rank in range(2):
        torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)
        saved.append(through_json(random_state.capture(cpu)))
        streamed("apart")

    def of(rank: int, step: int, states: list[Any]) -> tuple[Any, ...]:
        random_state.restore(through_json(random_state.for_rank(states, rank, step)), cpu)
        return (*draws(), streamed("alike"), streamed("apart"))

    first = [of(rank, 10, saved) for rank in range(4)]
    assert first == [of(rank, 10, saved) for rank in range(4)]
    for index in (0, 1, 3, 6):  # torch, Python, NumPy, the stream that ranks have apart
        assert len({repr(rank[index]) for rank in first}) == 4
    assert len({repr(rank[5]) for rank in first}) == 1
    assert of(1, 11, saved) == first[1]
    assert of(2, 11, saved)[0] != first[2][0]
    assert of(1, 10, [saved[0], None])[0] != first[1][0]
    HOLDER.seeds.reset()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_generator_of_the_device_goes_on():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.manual_seed(3)
    torch.rand(5, device=device)
    state = through_json(random_state.capture(device))
    wanted = torch.rand(5, device=device).tolist()
    torch.cuda.manual_seed(4)
    random_state.restore(state, device)
    assert torch.rand(5, device=device).tolist() == wanted
    found = []
    for rank in (0, 1, 2, 1):
        random_state.restore(through_json(random_state.for_rank([state], rank, 5)), device)
        found.append(torch.rand(5, device=device).tolist())
    assert found[0] == wanted and found[1] == found[3] and len({str(draw) for draw in found}) == 3
