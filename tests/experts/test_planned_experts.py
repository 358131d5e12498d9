"""The promise: what `zero plan` says of experts that are divided is what an engine has and sends, to the byte."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import LENGTH, ROWS, VOCABULARY, WIDTH, adam, family, place_of, words
from expert_models import INNER, Experts, Mixture, json_with
from marks import longer
from sharing import needs_transformers

import zero
from zero.__main__ import main
from zero.config import load
from zero.sizes.cut_layers import CutCopy
from zero.sizes.layer_messages import messages

EVEN = 4 * LENGTH * 2 * WIDTH * 4  # bytes of the tokens of 4 samples, each to two experts


class Even(Mixture):
    """Each rank gives all four experts equally many tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        index = (torch.arange(2 * len(tokens), device=x.device) % 4).view(-1, 2)
        return self.experts(tokens, index, self.router(tokens).gather(1, index)).view_as(x)


def made() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """What `zero plan` is given; ids are zeros, as it has no values."""
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    model = Experts()
    for block in model.blocks:
        block.mix.__class__ = Even
    return model, {"ids": ids, "weights": torch.zeros(ROWS, LENGTH, VOCABULARY)}


@contextlib.contextmanager
def sent(engine: Any) -> Iterator[list[tuple[str, int]]]:
    """The collectives of layers and experts that this rank takes part in inside, with the bytes that leave it."""
    found, watchdog = [], engine._sharded.world.watchdog
    begin = watchdog.begin

    def noting(direction: str, unit: str = "", sent: int = 0, *args: Any, **kwargs: Any) -> Any:
        found.extend([(direction, sent)] * direction.startswith(("layer ", "expert ")))
        return begin(direction, unit, sent, *args, **kwargs)

    watchdog.begin = noting
    try:
        yield found
    finally:
        del watchdog.begin


TP = {"tensor_parallel": {"autotp_size": 2}}
FULL = {"zero": {"recompute": {"modules": ["Block"], "policy": "full"}}}
CASES = [
    (2, 2, 3, {}),
    (4, 2, 2, TP),
    *longer((4, 4, 3, TP), (2, 2, 0, {}), (2, 2, 1, FULL), (4, 2, 3, {}), (4, 4, 1, {}), (2, 2, 3, TP), (4, 2, 0, TP)),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "ep", "stage", "more"), CASES)
def test_bytes_and_messages_are_those_of_an_engine(world: int, ep: int, stage: int, more: dict[str, Any]) -> None:
    settings = json_with(ep, stage, **more, **adam())
    model, inputs = made()
    planned = zero.estimate(model, settings, world, device="cpu").configured.device
    noted = messages(CutCopy(model, load(settings, world)), inputs, "cpu")
    engine, *_ = zero.initialize(model=model, config=settings)
    for step in range(2):
        with sent(engine) as forward:
            loss = engine(**inputs)
        with sent(engine) as backward:
            engine.backward(loss)
        state = engine.state_nbytes()
        engine.step()
        for found, late in ((forward, False), (backward, True)) if step else ():
            wanted = [(each.what, each.nbytes) for each in noted if each.backward is late]
            assert found == wanted
    rest = engine.state_nbytes()
    engine.destroy()
    ours = rest.parameters, state.gradients, rest.optimizer
    said = planned.parameters, planned.gradients, planned.masters + planned.moments
    assert ours == said if dist.get_rank() == 0 else all(here <= most for here, most in zip(ours, said, strict=True))


@needs_transformers
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", longer("mixtral", "deepseek_v3", "gpt_oss"))
def test_messages_of_real_models_come_in_the_order_that_was_planned(name: str) -> None:
    """Their bytes are those of what routers choose."""
    settings = json_with(2, 3, **adam())
    model, inputs = family(name, use_cache=False), words(0, place_of(1))
    noted = messages(CutCopy(model, load(settings, 2)), inputs, "cpu")
    engine, *_ = zero.initialize(model=model, config=settings)
    with sent(engine) as found:
        engine.backward(engine(**inputs).loss)
    engine.destroy()
    assert [what for what, _ in found] == [each.what for each in noted]


def plan(folder: Path, section: dict[str, Any], *flags: str, world: int = 2) -> int:
    path = folder / "zero.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "expert_parallel": section}))
    model = () if "--params" in flags else (f"{__name__}:made",)
    return main(["plan", *model, "--world", str(world), "--config", str(path), *flags])


def lines_of(text: str) -> list[str]:
    """With single spaces."""
    return [" ".join(line.split()) for line in re.sub(r"\n {4}(?=\S)", " ", text).splitlines()]


def test_a_plan_says_what_a_rank_has_sends_and_receives(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    section = {"enabled": True, "ep_size": 2}
    assert plan(tmp_path, {}, "--ep", "2") == plan(tmp_path, section) == 0
    said = capsys.readouterr().out
    assert said[: len(said) // 2] == said[len(said) // 2 :]
    lines = lines_of(said)
    nbytes = 4 * 2 * 4 * INNER * WIDTH
    for line in (
        f"blocks.{{0-1}}.mix.experts 2 of 4 experts, {nbytes // 2:,} bytes of {nbytes:,} each",
        "A micro-batch of 4 samples sends from each rank along ep 10 messages, "
        f"{(8 * EVEN // 2 + 2 * 16) / 1e6:.3f} MB:",
        "blocks.{0-1}.mix.experts forward expert counts 2 x 16 bytes",
        f"blocks.{{0-1}}.mix.experts backward expert exchange 4 x {EVEN // 2:,} bytes",
        f"In a step each rank sends {4 * 4 * LENGTH} tokens to experts, {2 * 4 * LENGTH} of them to other ranks if "
        "routers give all experts equally many; they go there and back, and so do their gradients.",
        "The largest buffer of tokens that arrive, by imbalance (tokens of the fullest rank beside the mean): "
        f"{EVEN / 1e6:.3f} MB at 1, {2 * EVEN / 1e6:.3f} MB at 2; {2 * EVEN / 1e6:.3f} MB at worst, where all ranks "
        "send all tokens to one.",
    ):
        assert line in lines, line
    assert plan(tmp_path, {"enabled": True, "autoep_size": 4}, "--tp", "2", world=4) == 0
    lines = lines_of(capsys.readouterr().out)
    assert any("sends from each rank along tp and ep" in line for line in lines)
    worst = 4 * 2 * LENGTH * WIDTH * 4  # of two experts that a token wants, a rank has one; each sends half its tokens
    assert any(f"; {worst / 1e6:.3f} MB at worst" in line for line in lines)


@pytest.mark.parametrize(
    ("section", "words", "text"),
    [
        ({}, ["--ep", "3"], "expert_parallel.autoep_size: ep 3 does not divide dp_shard x cp x tp = 8"),
        ({"enabled": True, "autoep_size": 2}, ["--ep", "4"], "--ep: got 4, but expert_parallel.autoep_size is 2 in "),
        ({}, ["--ep", "8"], "expert_parallel.autoep_size 8 does not divide the 4 experts of 'blocks.0.mix.experts'"),
        ({}, ["--ep", "2", "--pp", "2"], "expert_parallel.autoep_size: is not planned together with pipeline.stages 2"),
        ({}, ["--ep", "2", "--device", "h100"], "--ep: got 2, wanted 1, as the time of experts that are divided is"),
        ({"enabled": True, "ep_size": 2}, ["--json"], "expert_parallel.ep_size: got 2, wanted 1, as the time of"),
        ({}, ["--ep", "2", "--params", "1e7"], "of a number of parameters no layers are known; give a model"),
    ],
)
def test_a_plan_that_cannot_be_says_why(tmp_path, capsys, section, words, text) -> None:
    assert plan(tmp_path, section, *words, world=8) == 2
    said = capsys.readouterr()
    assert text in said.err and not said.out
