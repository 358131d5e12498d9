"""The promise: what `zero plan` says of layers that are cut is what an engine has and sends, to the byte."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import LENGTH, ROWS, VOCABULARY, Integers, adam, family, json_of, place_of, words
from marks import longer
from ranks import listening
from sharing import needs_transformers
from torch import nn

import zero
from zero.__main__ import main
from zero.config import load
from zero.sizes.cut_layers import CutCopy, folded
from zero.sizes.layer_messages import messages


class Model(Integers):
    """Three heads over two ranks, and layers that no rule names."""

    def __init__(self) -> None:
        super().__init__(3, 3, 11)
        self.mixing, self.other = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return super().forward(ids, weights) + self.other(self.mixing(x, x, x)[0]).sum() / 1024


def made() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """What `zero plan` is given; ids are zeros, as it has no values."""
    weights = torch.zeros(ROWS, LENGTH, VOCABULARY)
    return Model(), {"ids": torch.zeros(ROWS, LENGTH, dtype=torch.long), "weights": weights}


def llama(**more: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return family("llama", **{"use_cache": False, **more}), words(0, place_of(2))


MODELS = {
    "integers": made,
    "llama": llama,
    "wide": lambda: llama(hidden_size=256, intermediate_size=256, vocab_size=128),
}
RECOMPUTE = {"recompute": {"modules": ["LlamaDecoderLayer"]}}


@contextlib.contextmanager
def sent(engine: Any) -> Iterator[list[tuple[str, int]]]:
    """The collectives of layers that this rank takes part in inside, with the bytes that leave it."""
    found, watchdog = [], engine._sharded.world.watchdog
    begin = watchdog.begin

    def noting(direction: str, unit: str = "", sent: int = 0, *args: Any, **kwargs: Any) -> Any:
        found.extend([(direction, sent)] * direction.startswith("layer "))
        return begin(direction, unit, sent, *args, **kwargs)

    watchdog.begin = noting
    try:
        yield found
    finally:
        del watchdog.begin


CASES = [
    ("integers", 1, {}, {}),
    pytest.param("llama", 3, {"sequence_parallel": True}, RECOMPUTE, marks=needs_transformers),
    *longer(
        ("integers", 0, {"sequence_parallel": True}, {}),
        ("integers", 3, {}, {}),
        ("llama", 0, {}, {}),
        ("llama", 1, {}, RECOMPUTE),
        ("llama", 2, {"sequence_parallel": True}, {}),
        ("wide", 1, {"reduce": "tree"}, {"reduce": "tree"}),
    ),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "stage", "section", "more"), CASES)
def test_bytes_and_messages_are_those_of_an_engine(name: str, stage: int, section: Any, more: Any) -> None:
    settings = json_of(2, stage, tensor_parallel=section, zero=more, **adam())
    model, inputs = MODELS[name]()
    planned = zero.estimate(model, settings, 2, device="cpu").configured.device
    noted = messages(CutCopy(model, load(settings, 2)), inputs, "cpu")
    engine, *_ = zero.initialize(model=model, config=settings)
    for step in range(2):  # from the second one on sums are scattered
        with sent(engine) as forward:
            out = engine(**inputs)
        with sent(engine) as backward:
            engine.backward(getattr(out, "loss", out))
        state = engine.state_nbytes()
        engine.step()
        assert step == 0 or forward == [(each.what, each.nbytes) for each in noted if not each.backward]
        assert step == 0 or backward == [(each.what, each.nbytes) for each in noted if each.backward]
    rest = engine.state_nbytes()
    engine.destroy()
    ours = rest.parameters, state.gradients, rest.optimizer
    said = planned.parameters, planned.gradients, planned.masters + planned.moments
    assert ours == said if dist.get_rank() == 0 else all(here <= most for here, most in zip(ours, said, strict=True))


@needs_transformers
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("stage", "sequences"), [(3, False), *longer((0, False), (1, False), (0, True), (1, True), (3, True))]
)
def test_reality_is_the_plan_where_layers_are_cut(stage: int, sequences: bool) -> None:
    """Activations are those of the cut model."""
    settings = json_of(2, stage, zero={"plan": True}, tensor_parallel={"sequence_parallel": sequences}, **adam())
    model, inputs = llama(hidden_size=64, intermediate_size=176)
    with listening(20) as lines:
        engine, *_ = zero.initialize(model=model, config=settings)
        for _ in range(3):
            engine.backward(engine(**inputs).loss)
            engine.step()
        engine.destroy()
    (*said,) = (line for line in lines if "plan" in line)
    assert len(said) == (dist.get_rank() == 0)
    assert all("activations" in line and line.endswith("each is within 5 % of the plan") for line in said)


def plan(folder: Path, section: dict[str, Any], *flags: str, world: int = 2) -> int:
    path = folder / "zero.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "tensor_parallel": section}))
    model = () if "--params" in flags else (f"{__name__}:made",)
    return main(["plan", *model, "--world", str(world), "--config", str(path), *flags])


def lines_of(text: str) -> list[str]:
    """With single spaces."""
    return [" ".join(line.split()) for line in re.sub(r"\n {4}(?=\S)", " ", text).splitlines()]


def test_a_plan_says_what_is_cut_and_what_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert plan(tmp_path, {}, "--tp", "2") == plan(tmp_path, {"autotp_size": 2}) == 0
    said = capsys.readouterr().out
    assert said[: len(said) // 2] == said[len(said) // 2 :]
    lines = lines_of(said)
    for line in (
        "embed.weight vocabulary (13, 8) -> (7, 8) or (6, 8)",
        "blocks.{0-1}.attn.q_proj.weight column (6, 8) -> (4, 8) or (2, 8)",
        "blocks.{0-1}.mlp.down_proj.weight row (8, 11) -> (8, 6) or (8, 5)",
        "blocks.{0-1}.mlp.down_proj.bias whole (8,), added once",
        "blocks.{0-1}.first.weight whole (8,)",
        "mixing.in_proj_weight whole (24, 8), nn.MultiheadAttention reads its weights itself",
        "other.weight whole (8, 8), no rule names it",
        f"blocks.{{0-1}}.mlp.down_proj forward layer sum 2 x {4 * LENGTH * 8 * 4:,} bytes",
        f"blocks.{{0-1}}.attn backward layer sum 2 x {4 * LENGTH * 8 * 4:,} bytes",
        f"lm_head forward layer gather 1 x {4 * LENGTH * 7 * 4:,} bytes",
    ):
        assert line in lines, line
    assert any(
        line.startswith("A micro-batch of 4 samples sends from each rank along tp 12 messages") for line in lines
    )
    assert plan(tmp_path, {"sequence_parallel": True}, "--tp", "2", "--cp", "2", world=4) == 0
    lines = lines_of(capsys.readouterr().out)
    assert "blocks.{0-1}.first.weight whole (8,), its gradient is summed over tp" in lines
    assert f"blocks.{{0-1}}.mlp forward layer scatter 2 x {4 * LENGTH // 4 * 8 * 4:,} bytes" in lines


@pytest.mark.parametrize(
    ("section", "words", "text"),
    [
        ({}, ["--tp", "3"], "nearest that fit: tp 2 x "),
        ({"autotp_size": 2}, ["--tp", "4"], "--tp: got 4, but tensor_parallel.autotp_size is 2 in "),
        ({}, ["--tp", "4"], "4 ranks do not divide the features that belong together: 'blocks.0.attn.q_proj' 3"),
        ({"tp": {"tp_size": 2}}, ["--pp", "2"], "is not planned together with pipeline.stages 2"),
        ({}, ["--tp", "2", "--device", "h100"], "--tp: got 2, wanted 1, as the time of layers that are cut is not"),
        ({"autotp_size": 2}, ["--json"], "tensor_parallel.autotp_size: got 2, wanted 1, as the time of layers"),
        ({}, ["--tp", "2", "--params", "1e7"], "of a number of parameters no layers are known; give a model"),
        (
            {"partition_config": {"strict_mode": True}},
            ["--tp", "2"],
            "tensor_parallel.autotp_size 2: tensor_parallel.partition_config.strict_mode: no pattern matches 'blocks.0",
        ),
    ],
)
def test_a_plan_that_cannot_be_says_why(tmp_path, capsys, section, words, text) -> None:
    assert plan(tmp_path, section, *words, world=4) == 2
    said = capsys.readouterr()
    assert text in said.err and not said.out


def test_a_plan_and_a_dry_run_warn_of_groups_on_several_hosts(tmp_path, capsys, monkeypatch) -> None:
    assert plan(tmp_path, {}, "--tp", "2", "--ranks-per-host", "3", world=6) == 0
    warning = "warning: tp is 2 with 3 ranks on each host: 1 of its groups cross hosts, the first with ranks 2 to 3, "
    assert warning in capsys.readouterr().err
    assert plan(tmp_path, {"autotp_size": 2}, world=6) == 0
    assert not capsys.readouterr().err
    (tmp_path / "t.py").touch()
    (tmp_path / "hosts").write_text("n1 slots=3\nn2 slots=1\n")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "-H", "hosts", "--dry-run", "--config", "zero.json", "t.py"]) == 0
    said = capsys.readouterr().out
    assert "# warning: tp is 2 with hosts of 3, 1 ranks: 1 of its groups cross hosts, the first with ranks 2" in said


def test_names_that_repeat_are_one() -> None:
    names = [f"h.{block}.experts.{expert}.up" for block in (1, 2, 4) for expert in range(2)]
    found = folded([("h.0.up", "a"), *((name, "a") for name in names), ("3", "a"), ("h.7.up", "b"), ("h.7.up", "b")])
    assert found == [("h.0.up", "a", 1), ("h.{1,2,4}.experts.{0-1}.up", "a", 6), ("3", "a", 1), ("h.7.up", "b", 2)]
    assert Counter(folded([("a.0.b.0", 1), ("a.1.b.1", 1)])) == Counter([("a.0.b.0", 1, 1), ("a.1.b.1", 1, 1)])
