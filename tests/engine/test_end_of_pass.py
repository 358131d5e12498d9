"""The promise: where the data ends inside of a step, the script decides what becomes of its micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import batch, config, make_net
from ranks import listening
from scenario import run, settings

import zero

Sample = tuple[torch.Tensor, torch.Tensor]


def samples(count: int) -> list[Sample]:
    tokens, targets = batch(0, count)
    return list(zip(tokens, targets.view(count, -1), strict=True))


def passes(stage: int, epochs: int, partial: bool = False, **more: Any) -> dict[str, Any]:
    """Epochs of 20 samples on two ranks: 5 micro-batches, of which a step takes two."""
    json = settings({"stage": stage, **more}, 2, accumulation=2)
    engine, _, loader, _ = zero.initialize(model=make_net(), config=json, training_data=samples(20))
    with listening() as said:
        for _ in range(epochs):
            for inputs in loader:
                engine.backward(engine(*inputs))
                engine.step()
            if partial:
                engine.step(partial=True)
    found = {"steps": engine.global_steps, "samples": engine.global_samples, "norm": engine.get_global_grad_norm()}
    engine.destroy()
    return found | {"said": said, "weights": [param.detach().clone() for param in engine.module.parameters()]}


@pytest.mark.ranks(2)
def test_it_is_said_once_and_the_next_pass_completes_the_step():
    found = passes(1, 3)
    assert (found["steps"], found["samples"]) == (7, 56)  # 15 micro-batches
    said = [line for line in found["said"] if "a pass over the training data ended" in line]
    assert len(said) == (1 if torch.distributed.get_rank() == 0 else 0)
    assert not said or ("after 1 of 2 micro-batches" in said[0] and "engine.step(partial=True)" in said[0])


@pytest.mark.ranks(2)
def test_it_may_be_dropped():
    found = passes(2, 3, zero={"drop_last_window": True})
    assert (found["steps"], found["samples"], found["said"]) == (6, 48, [])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_partial_step_is_the_mean_of_what_there_was(stage):
    """One of four micro-batches, and then two of four, against steps that have so many."""
    for count in (1, 2):
        torch.manual_seed(0)
        engine, *_ = zero.initialize(model=make_net(), config=config(stage, 2, accumulation=4))
        rank = torch.distributed.get_rank()
        for number in range(count):
            engine.backward(engine(*batch(1000 * rank + number, 2)))
            engine.step()
        engine.step(partial=True)
        found = run("net", {"stage": stage, "accumulation": count}, 1)
        assert engine.get_global_grad_norm() == pytest.approx(found.norms[0], rel=1e-6)
        assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (1, 4 * count, count)
        assert not engine.is_gradient_accumulation_boundary()
        engine.destroy()


def test_without_a_micro_batch_there_is_no_partial_step():
    engine, *_ = zero.initialize(model=make_net(), config=config(0, 1, accumulation=4))
    with pytest.raises(RuntimeError, match="without a backward since the last step"):
        engine.step(partial=True)
