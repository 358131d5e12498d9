"""The promise: a checkpoint of a model that is cut goes on in any other grid, weights and moments bit by bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cut_models import adam, family, json_of, words
from marks import longer
from ranks import Pool
from sharing import needs_transformers
from states import state_of

import zero

pytestmark = needs_transformers


class Way(NamedTuple):
    world: int
    tp: int
    stage: int
    pp: int = 1


WAYS = {
    "one": Way(1, 1, 0),
    "dp 4": Way(4, 1, 2),
    "tp 2 x dp 2": Way(4, 2, 1),
    "tp 4": Way(4, 4, 3),
    "tp 3, parts of unequal size": Way(3, 3, 1),
    "pp 2 x tp 2": Way(4, 2, 1, 2),
}


def engine_of(way: Way, seed: int) -> Any:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 32, "num_hidden_layers": 2}
    more = {"pipeline": {"stages": way.pp}} if way.pp > 1 else {}
    json = json_of(way.tp, way.stage, gas=way.pp, **adam(), **more)
    return zero.initialize(model=family("llama", seed=seed, **sizes), config=json)[0]


def saved(way: Way, folder: Path) -> dict[str, torch.Tensor]:
    engine, place = engine_of(way, 0), dist.get_rank() // way.tp % (way.world // way.tp // way.pp)
    for step in range(2):
        if way.pp > 1:
            engine.train_batch(words(step * way.pp + micro, place) for micro in range(way.pp))
        else:
            engine.backward(engine(**words(step, place)).loss)
            engine.step()
    engine.save_checkpoint(folder)
    found = state_of(engine)
    engine.destroy()
    return found


def loaded(way: Way, folder: Path) -> dict[str, torch.Tensor]:
    engine = engine_of(way, 7)
    engine.load_checkpoint(folder)
    found = state_of(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("names", [["one", "tp 3, parts of unequal size"], *longer([*WAYS])], ids=len)
def test_deepspeed_8474_each_grid_into_every_other(pool: Pool, tmp_path: Path, names: list[str]) -> None:
    for number, first in enumerate(names):
        folder = tmp_path / str(number)
        wanted: dict[str, torch.Tensor] = {}
        for each in pool.run(WAYS[first].world, saved, WAYS[first], folder):
            wanted |= each  # of a pipeline each rank has some
        assert len(wanted) == 3 * 21
        for other in names:
            found: dict[str, torch.Tensor] = {}
            for each in pool.run(WAYS[other].world, loaded, WAYS[other], folder):
                found |= each
            wrong = [name for name in wanted if not torch.equal(found[name], wanted[name])]
            assert not wrong, (first, other, wrong[:3])


def tied(tp: int, folder: Path, saves: bool) -> dict[str, torch.Tensor]:
    make = functools.partial(family, "gpt2", seed=0 if saves else 7)
    engine, *_ = zero.initialize(model=make(), config=json_of(tp, 1, **adam()))
    if saves:
        engine.backward(engine(**words(0, 0)).loss)
        engine.step()
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    found = state_of(engine)
    engine.destroy()
    return found


@pytest.mark.long
def test_queries_keys_and_values_in_one_weight_with_a_tied_head(pool: Pool, tmp_path: Path) -> None:
    """Both were mixed up elsewhere: what is fused has boxes of its own, and the head is the embedding's."""
    wanted = pool.run(2, tied, 2, tmp_path, True)[0]
    for tp in (1, 4):
        found = pool.run(tp, tied, tp, tmp_path, False)[0]
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
