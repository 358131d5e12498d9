"""The promise: layers that are cut go together with data ranks, shared sequences and stages, all of them at a time.

One process of plain torch, which has the same samples, gives the losses, norms and weights to compare with; of integers
all is equal to the bit.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cut_models import Integers, family, full, integers, json_of, words
from marks import longer
from pipelines import stepped
from ranks import Pool, said_by
from sharing import needs_transformers
from torch import nn

import zero

CLOSE, RATE = 1e-6, 0.125
SIZES = {"num_hidden_layers": 4, "num_key_value_heads": 4}  # heads that all of the ranks divide


class Way(NamedTuple):
    """Sizes of axes; what is left of the ranks has samples of its own. sequences: cut between layers, too."""

    stage: int
    pp: int = 1
    cp: int = 1
    tp: int = 2
    gas: int = 2
    sequences: bool = False
    name: str = "llama"
    mode: str = "ulysses"
    schedule: str = "1f1b"

    @property
    def exact(self) -> bool:
        """Whether no sum rounds, as long as the weights are integers: in one step."""
        return self.name == "integers"

    @property
    def steps(self) -> int:
        return 1 if self.exact else 3

    @property
    def json(self) -> dict[str, Any]:
        found = json_of(self.tp, self.stage, self.gas)
        found["tensor_parallel"]["sequence_parallel"] = self.sequences
        if self.pp > 1:
            found["pipeline"] = {"stages": self.pp, "schedule": self.schedule}
        if self.cp > 1:
            found |= {"sequence_parallel_size": self.cp, "zero": {"context": {"mode": self.mode}}}
        return found

    def make(self) -> nn.Module:
        return Integers() if self.exact else family(self.name, **SIZES)

    def batch(self, number: int, place: int) -> dict[str, torch.Tensor]:
        return (integers if self.exact else words)(number, place)


def loss_of(out: Any) -> torch.Tensor:
    return getattr(out, "loss", out)


@functools.cache
def one_process(way: Way, data: int) -> dict[str, Any]:
    """Of plain torch: the losses and norms of all steps, and the weights at last."""
    model, losses, norms = way.make(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(way.steps):
        total = 0.0
        for place in range(data):
            for micro in range(way.gas):
                loss = loss_of(model(**way.batch(step * way.gas + micro, place))) / (data * way.gas)
                loss.backward()
                total += loss.item()
        losses.append(total)
        norms.append(float(sum(param.grad.double().square().sum() for param in model.parameters())) ** 0.5)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: param.detach() for name, param in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}


def trained(way: Way) -> dict[str, Any]:
    """The same on this rank, of the weights those of its stage."""
    engine, *_ = zero.initialize(model=way.make(), config=way.json)
    assert engine.dp_world_size == dist.get_world_size() // (way.pp * way.cp * way.tp)
    feed = (way.batch(number, engine.get_data_parallel_rank()) for number in range(way.steps * way.gas))
    losses, norms = stepped(
        engine, feed, way.steps, None if way.pp > 1 else lambda engine, batch: loss_of(engine(**batch))
    )
    shapes = {name: tuple(param.shape) for name, param in engine.module.named_parameters()}
    found = {"losses": losses, "norms": norms, "weights": full(engine), "shapes": shapes}
    engine.destroy()
    return found


def check(pool: Pool, world: int, way: Way) -> None:
    """All ranks have the losses and norms of one process, and of their stage its weights; together they have all."""
    plain = one_process(Way(0, gas=way.gas, name=way.name), world // (way.pp * way.cp * way.tp))
    names: set[str] = set()
    for rank, found in enumerate(pool.run(world, trained, way)):
        assert found["losses"] == (plain["losses"] if way.exact else pytest.approx(plain["losses"], rel=CLOSE)), rank
        assert found["norms"] == pytest.approx(plain["norms"], rel=1e-12 if way.exact else CLOSE), rank
        for name, value in found["weights"].items():
            apart = float((value - plain["weights"][name]).abs().max())
            assert apart <= (0 if way.exact else CLOSE), (rank, name)
            assert "down_proj.weight" not in name or found["shapes"][name] != tuple(value.shape), "it is cut"
        names |= found["weights"].keys()
    assert names == plain["weights"].keys()


SHORT = [Way(3, pp=2, sequences=True), Way(0, cp=2), Way(1, sequences=True)]
LONGER = [
    Way(0, pp=2, schedule="interleaved", gas=4, sequences=True),
    Way(3, cp=2, sequences=True),
    *(Way(stage, pp=2, sequences=bool(stage % 2)) for stage in range(3)),
    *(Way(stage, cp=2, mode="ring", sequences=not stage % 2) for stage in range(4)),
    *(Way(stage, sequences=not stage % 2) for stage in range(4)),
    *(Way(2, pp=2, gas=4, schedule=each, sequences=True) for each in ("gpipe", "zero_bubble", "zbv", "dualpipev")),
    # Embedding and head are one weight; norms of heads; experts; latent keys and values, whole in one of the plans.
    *(Way(at % 4, pp=2, name="qwen3", sequences=bool(at % 2)) for at in range(4)),
    Way(3, pp=2, gas=4, name="qwen3", schedule="zbv", sequences=True),
    Way(2, cp=2, name="qwen3", mode="ring", sequences=True),
    Way(1, cp=2, name="mixtral", sequences=True),
    Way(3, pp=2, name="mixtral", sequences=True),
    Way(0, pp=2, name="gpt_oss"),
    *(Way(1, **axes, name=name) for name in ("deepseek_v2", "deepseek_v3") for axes in ({"cp": 2}, {"pp": 2})),
    Way(2, pp=2, name="deepseek_v3", sequences=True),
]


@needs_transformers
@pytest.mark.parametrize("way", [*SHORT, *longer(*((way,) for way in LONGER))])
def test_two_axes_on_four_ranks(pool: Pool, way: Way) -> None:
    check(pool, 4, way)


EXACT = [(stage, pp, sequences) for stage in range(4) for pp in (1, 2) for sequences in (False, True)]
SHORT_OF_EXACT = [(3, 1, True), (1, 2, False), (2, 2, True)]


@pytest.mark.parametrize(
    ("stage", "pp", "sequences"), [*SHORT_OF_EXACT, *longer(*(each for each in EXACT if each not in SHORT_OF_EXACT))]
)
def test_integers_are_equal_to_the_bit(pool: Pool, stage: int, pp: int, sequences: bool) -> None:
    """With a tied embedding and head, cut by vocabulary, on the first and the last stage."""
    check(pool, 4, Way(stage, pp=pp, sequences=sequences, name="integers"))


EIGHT = [
    *(Way(stage, pp=2, cp=2, sequences=bool(stage % 2)) for stage in range(4)),
    *(Way(stage, pp=2, sequences=not stage % 2) for stage in range(4)),
    *(Way(stage, cp=2, sequences=bool(stage % 2), mode="ring") for stage in range(4)),
    Way(2, pp=2, cp=2, gas=4, schedule="zbv", sequences=True, name="qwen3", mode="ring"),
    Way(3, pp=2, gas=4, schedule="interleaved", sequences=True, name="qwen3"),
    Way(1, cp=2, sequences=True, name="qwen3"),
    Way(1, pp=2, tp=4, sequences=True),
    Way(3, cp=2, tp=4, mode="ring"),
    Way(2, pp=2, name="integers"),
    Way(3, pp=2, tp=4, sequences=True, name="integers"),
]


@needs_transformers
@pytest.mark.long
def test_three_axes_on_eight_ranks() -> None:
    eight = Pool(8)
    try:
        for way in EIGHT:
            check(eight, 8, way)
    finally:
        eight.close()


def refused(**more: Any) -> str:
    json = json_of(2, 1, 2, **more)
    return said_by(lambda: zero.initialize(model=family("llama", **SIZES), config=json))


@needs_transformers
@pytest.mark.ranks(4)
def test_sizes_that_the_ranks_do_not_make_up_are_refused() -> None:
    said = refused(sequence_parallel_size=2, pipeline={"stages": 2})
    assert "pp 2 x cp 2 x tp 2 = 8 does not divide the 4 ranks there are" in said


def sinks() -> str:
    engine, *_ = zero.initialize(model=family("gpt_oss"), config=Way(1, cp=2).json)
    said = said_by(lambda: engine(**words(0, 0)))
    engine.destroy()
    return said


@needs_transformers
def test_attention_that_shared_sequences_do_not_have_is_refused(pool: Pool) -> None:
    assert all("attention over a shared sequence: got s_aux" in said for said in pool.run(4, sinks))
