"""The promise: the example GPT is a language model, its text is split by file, and its runs agree, learn and resume."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT
from nodes import environment

EXAMPLE = ROOT / "examples" / "gpt"
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


@pytest.fixture(scope="module")
def parts():
    """The modules beside train.py, which imports them by their bare names as a script does."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import model
        import report
        import text
    finally:
        sys.path.remove(str(EXAMPLE))
    yield model, text, report
    for name in ("model", "text", "report"):
        sys.modules.pop(name, None)


def made(parts, loss=None):
    torch.manual_seed(0)
    return parts[0].GPT(parts[0].Shape(width=16, layers=2, heads=2, context=12), loss).eval()


@pytest.fixture(scope="module")
def gpt(parts):
    return made(parts)


def bytes_of(count, batch=2, seed=0):
    return torch.randint(256, (batch, count), generator=torch.Generator().manual_seed(seed))


def test_no_position_sees_what_comes_after_it(gpt):
    tokens = bytes_of(12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = gpt(tokens), gpt(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])
    assert not torch.equal(before[:, 11], after[:, 11]), "an earlier byte has to count"
    one, other = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
    assert not torch.allclose(gpt(one)[0, 2], gpt(other)[0, 2]), "so does the order"


def test_the_split_is_by_file_and_always_the_same(parts, tmp_path):
    text = parts[1]
    for folder in ("a", "a/deep", ".git"):
        (tmp_path / folder).mkdir()
    for i in range(60):
        (tmp_path / ("a/deep" if i % 2 else "a") / f"{i}.txt").write_text(f"<{i}>")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".git" / "hidden").write_text("hidden")
    split = text.read_split(tmp_path)
    assert len(split.train_files) + len(split.validation_files) == 60
    assert not set(split.train_files) & set(split.validation_files)
    for tensor, names in ((split.train, split.train_files), (split.validation, split.validation_files)):
        assert bytes(tensor.tolist()) == b"".join((tmp_path / name).read_bytes() for name in sorted(names))
    (tmp_path / "new.txt").write_text("new")
    more = text.read_split(tmp_path)
    assert set(split.train_files) <= set(more.train_files)
    assert set(split.validation_files) <= set(more.validation_files)


def test_the_configs_differ_in_the_stage_only():
    configs = [json.loads((EXAMPLE / f"zero{stage}.json").read_text()) for stage in (1, 2, 3)]
    assert [config["zero_optimization"].pop("stage") for config in configs] == [1, 2, 3]
    assert configs[0] == configs[1] == configs[2]
    offload = json.loads((EXAMPLE / "offload.json").read_text())
    assert offload.pop("zero_optimization")["offload_param"] == {"device": "cpu"}
    assert offload == {key: value for key, value in configs[2].items() if key != "zero_optimization"}


def train(launchers: Any, folder: Path, config: dict[str, Any], steps: int, width: int, *more: str) -> str:
    """Run the example with small sizes on two processes; its output."""
    config["scheduler"]["params"] |= {"total_num_steps": steps, "warmup_num_steps": max(3, steps // 10)}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    given = {"config": folder / "config.json", "out": folder / "out"}
    given |= {"width": width, "context": width, "layers": 2, "heads": 2}
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    words = ["run", "--num_gpus", "2", str(EXAMPLE / "train.py"), *words, *more]
    done = launchers.run(*words, environment=environment(OMP_NUM_THREADS="1"), folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stderr.lower().splitlines() if "has waited for" not in line]  # on a busy machine
    assert "warn" not in "\n".join(said), done.stderr  # also where --save finds nothing yet
    return done.stdout


def of(name: str, **section: Any) -> dict[str, Any]:
    config = json.loads((EXAMPLE / f"{name}.json").read_text())
    config["zero_optimization"] |= section
    return config


@pytest.fixture(scope="module")
def runs(launchers, tmp_path_factory):
    """The folder of a run of 12 steps under stage 1, of one that another took over after 6, and what each printed."""
    folder = tmp_path_factory.mktemp("runs")
    (text := folder / "text").mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text("".join(f"def name{i}_{j}(x):\n    return x + {j}\n" for j in range(40)))

    def run(name: str, place: str, *more: str) -> str:
        config = of(name) | {"train_micro_batch_size_per_gpu": 4}
        return train(launchers, folder / place, config, 12, 32, "--data", str(text), *more)

    saving = ("--save", str(folder / "checkpoints"), "--save-every", "4")
    # It ends after step 6, with the learning rates of the longer run; what it saved is read at another stage.
    printed = [
        run("zero1", "whole"),
        run("zero2", "parted", *saving, "--steps", "6"),
        run("offload", "parted", *saving),
    ]
    return folder / "whole", folder / "parted", printed


def rows(folder):
    with (folder / "out" / "loss.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.long
def test_a_short_run_gives_the_same_losses_under_each_stage_with_offload_and_resumed(runs):
    whole, parted, (first, second, third) = runs
    # The lines `step N loss X` without what a launcher may put before them.
    printed, *others = (re.findall(r"step \d+ loss [\d.e+-]+", text) for text in (first, second, third))
    assert len(printed) == 12 and len({line.split()[-1] for line in printed}) == 12
    assert others == [printed[:6], printed[6:]]
    begin, end = (float(printed[i].split()[-1]) for i in (0, -1))
    assert end < begin - 0.5, "it does not learn"
    assert re.search(r"goes on from \S+, after step 6", third)
    tables = [[(row["step"], row["loss"], row["lr"]) for row in rows(folder)] for folder in (parted, whole)]
    assert len(tables[0]) == 12 and tables[0] == tables[1]
    validation = [re.search(r"validation loss \S+", text).group() for text in (third, first)]
    assert validation[0] == validation[1]


@pytest.mark.long
def test_a_run_says_what_it_did_and_leaves_its_curve(runs):
    whole, parted, (first, _, third) = runs
    for stage, output, folder in ((1, first, whole), (3, third, parted)):
        assert (folder / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert f"rank 0 of 2, stage {stage}" in output
        for word in ("one replica", "formula", "parameters", "gradients", "optimizer", "total"):
            assert word in output
        told = re.search(r"validation loss ([\d.]+) nats/byte, (.*) the bigram model's ([\d.]+)", output)
        loss, said, bigram = told.groups()
        assert said == ("after 12 steps below" if float(loss) < float(bigram) else "after 12 steps not yet below")
        assert "sample, from the prompt b'def '" in output


@pytest.mark.long
def test_with_8_bits_on_the_wire_the_example_learns_as_well(launchers, tmp_path):
    exact, coded = (
        float(re.search(r"validation loss ([\d.]+)", train(launchers, tmp_path / name, config, 300, 64)).group(1))
        for name, config in (("exact", of("zero3")), ("coded", of("zero3", **QUANTIZED)))
    )
    assert exact != coded
    assert coded == pytest.approx(exact, rel=0.005)
