import csv
import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import zero

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpt"


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


@pytest.fixture(scope="module")
def gpt(parts):
    torch.manual_seed(0)
    model = parts[0]
    return model.GPT(model.Shape(width=16, layers=2, heads=2, context=12)).eval()


def bytes_of(count, batch=2, seed=0):
    return torch.randint(256, (batch, count), generator=torch.Generator().manual_seed(seed))


def test_shapes_of_the_model(parts, gpt):
    logits = gpt(bytes_of(12))
    assert logits.shape == (2, 12, 256)
    loss = gpt(bytes_of(12), bytes_of(12, seed=1))
    assert loss.shape == ()
    # A model that has learnt nothing gives every byte the same chance.
    assert loss.item() == pytest.approx(math.log(256), rel=0.05)
    assert [type(block).__name__ for block in gpt.blocks] == ["Block", "Block"]
    width, layers = 16, 2
    block = 12 * width**2 + 5 * width + 4 * width
    assert sum(p.numel() for p in gpt.parameters()) == 2 * 256 * width + layers * block + 2 * width


def test_loss_is_the_mean_cross_entropy(gpt):
    x, y = bytes_of(12), bytes_of(12, seed=1)
    chosen = gpt(x).log_softmax(dim=-1).gather(2, y[..., None])
    assert gpt(x, y).item() == pytest.approx(-chosen.mean().item(), rel=1e-5)


def test_no_position_sees_what_comes_after_it(gpt):
    tokens = bytes_of(12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = gpt(tokens), gpt(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])
    assert not torch.equal(before[:, 11], after[:, 11]), "an earlier byte has to count"


def test_order_matters(gpt):
    one, other = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
    assert not torch.allclose(gpt(one)[0, 2], gpt(other)[0, 2])


def test_a_wrong_size_is_named(parts, gpt):
    with pytest.raises(ValueError, match="13 tokens do not fit into a context of 12"):
        gpt(bytes_of(13))
    with pytest.raises(ValueError, match="multiple of 2"):
        parts[0].Shape(width=10, heads=4)
    with pytest.raises(ValueError, match="at least 1"):
        parts[0].Shape(layers=0)


def test_generate_goes_beyond_the_context_and_repeats_itself(gpt):
    prompt = bytes_of(5)
    greedy = gpt.generate(prompt, 20, temperature=0)
    assert greedy.shape == (2, 25) and torch.equal(greedy[:, :5], prompt)
    assert torch.equal(greedy, gpt.generate(prompt, 20, temperature=0))
    assert torch.equal(greedy[:, 5], gpt(prompt)[:, -1].argmax(dim=-1))
    drawn = [gpt.generate(prompt, 20, 1.0, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


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
    assert list(split.train_files) == sorted(split.train_files)
    assert all(text.is_validation(name) for name in split.validation_files)
    for tensor, names in ((split.train, split.train_files), (split.validation, split.validation_files)):
        assert tensor.dtype == torch.uint8
        assert bytes(tensor.tolist()) == b"".join((tmp_path / name).read_bytes() for name in names)
    again = text.read_split(tmp_path)
    assert torch.equal(again.train, split.train) and again.train_files == split.train_files
    (tmp_path / "new.txt").write_text("new")
    more = text.read_split(tmp_path)
    assert set(split.train_files) <= set(more.train_files)
    assert set(split.validation_files) <= set(more.validation_files)


def test_a_few_files_are_enough(parts, tmp_path):
    text = parts[1]
    (tmp_path / "0.txt").write_text("0123456789" * 10)
    alone = text.read_split(tmp_path)
    assert bytes([*alone.train.tolist(), *alone.validation.tolist()]) == b"0123456789" * 10
    assert alone.validation.numel() == 10
    for names in (["0.txt", "1.txt"], [f"{i}.txt" for i in range(200) if text.is_validation(f"{i}.txt")]):
        (tmp_path / str(len(names))).mkdir()
        for name in names:
            (tmp_path / str(len(names)) / name).write_text(name)
        split = text.read_split(tmp_path / str(len(names)))
        assert split.train_files and split.validation_files
        assert sorted([*split.train_files, *split.validation_files]) == sorted(names)


def test_a_folder_that_cannot_be_split_is_an_error(parts, tmp_path):
    with pytest.raises(ValueError, match="there is no file with UTF-8 text"):
        parts[1].read_split(tmp_path)
    (tmp_path / "only.txt").write_text("t")
    with pytest.raises(ValueError, match="a single file of 1 bytes is too short"):
        parts[1].read_split(tmp_path)
    with pytest.raises(ValueError, match="wanted a folder"):
        parts[1].read_split(tmp_path / "nothing")


def test_the_standard_library_is_the_text_by_default(parts):
    names = [name for name, _ in parts[1].standard_library()]
    assert names == sorted(names) and {"argparse.py", "json/decoder.py"} <= set(names)
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    assert not any(skipped & set(name.split("/")[:-1]) for name in names)


def test_a_window_is_the_same_for_the_same_index(parts):
    text = torch.arange(200, dtype=torch.uint8)
    windows, again, other = (parts[1].Windows(text, 8, 50, seed) for seed in (0, 0, 1))
    assert len(windows) == 50
    for i in range(50):
        x, y = windows[i]
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (8,)
        assert torch.equal(x + 1, y) and torch.equal(x, again[i][0])
    assert any(not torch.equal(windows[i][0], other[i][0]) for i in range(50))
    even = parts[1].Windows(text, 8, 4, seed=None)
    assert [int(even[i][0][0]) for i in range(4)] == [0, 48, 96, 144]
    with pytest.raises(ValueError, match="too short"):
        parts[1].Windows(text[:8], 8, 1)


def test_bigram_loss_of_a_small_text(parts):
    # "abab": a is followed by b twice, b by a once. With one added: P(b|a) = 3/258, P(a|b) = 2/257, P(a|a) = 1/258.
    text = torch.tensor(list(b"abab"), dtype=torch.uint8)
    counts = parts[1].bigram_counts(text)
    a, b = b"ab"
    assert counts[a, b] == 2 and counts[b, a] == 1 and counts.sum() == 3
    loss = parts[1].bigram_loss(counts, torch.tensor([a, b, a]), torch.tensor([b, a, a]))
    assert loss == pytest.approx(-(math.log(3 / 258) + math.log(2 / 257) + math.log(1 / 258)) / 3)


@pytest.mark.parametrize("extra", [-1, 0, 1, 2])
def test_bigram_counts_of_a_text_of_several_pieces(parts, extra):
    count = 2 * (1 << 20) + extra
    text = torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pairs = text[:-1].long() * 256 + text[1:].long()
    assert torch.equal(parts[1].bigram_counts(text).flatten(), torch.bincount(pairs, minlength=65536))


def test_the_table_of_bytes(parts):
    from zero.plan.memory import StateBytes

    report = parts[2]
    state = (StateBytes(60, 100, 100), StateBytes(100, 100, 200), StateBytes(50, 100, 100))
    assert report.bytes_rows(*state) == [
        ("parameters", 60, 100, 50, 20.0),
        ("gradients", 100, 100, 100, 0.0),
        ("optimizer", 100, 200, 100, 0.0),
        ("total", 260, 400, 250, 4.0),
    ]
    table = report.bytes_table("rank 0", *state)
    assert max(map(len, table.splitlines())) <= 80
    for word in ("rank 0", "one replica", "formula", "total", "260", "+4.00 %"):
        assert word in table


def test_the_files_of_a_run(parts, tmp_path):
    report = parts[2]
    points = [report.Point(step, 5 / step, 0.1, 0.5 * step) for step in (1, 2, 3)]
    report.write_csv(tmp_path / "loss.csv", points)
    report.write_curve(tmp_path / "loss.png", points, 1.5, 2.5)
    with (tmp_path / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [5.0, 2.5, 5 / 3]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert report.smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert report.smooth([5.0, 1.0, 1.0])[0] == pytest.approx(5.0), "the curve begins at the first point"


@pytest.mark.parametrize("count", [1, 2, 31])
def test_a_curve_of_any_number_of_steps_is_drawn(parts, tmp_path, monkeypatch, count):
    report, kept = parts[2], []
    monkeypatch.setattr(report.pyplot, "close", kept.append)
    report.write_curve(tmp_path / "loss.png", [report.Point(n, 5 / n, 0.1, n) for n in range(1, count + 1)], 1.5, 2.5)
    each, smoothed = kept[0].axes[0].lines[:2]
    assert smoothed.get_ydata()[0] == pytest.approx(each.get_ydata()[0])
    assert count > 2 or smoothed.get_marker() == ".", "one point of a line without markers cannot be seen"


def test_the_configs_differ_in_the_stage_only():
    configs = [json.loads((EXAMPLE / f"zero{stage}.json").read_text()) for stage in (1, 2, 3)]
    assert [config["zero_optimization"].pop("stage") for config in configs] == [1, 2, 3]
    assert configs[0] == configs[1] == configs[2]
    offload = json.loads((EXAMPLE / "offload.json").read_text())
    assert offload.pop("zero_optimization")["offload_param"] == {"device": "cpu"}
    assert offload == {key: value for key, value in configs[2].items() if key != "zero_optimization"}


def example(launchers, folder, name, steps=12, more=()):
    """Run the example with tiny sizes on two processes; return its output."""
    config = json.loads((EXAMPLE / f"{name}.json").read_text())
    config["train_micro_batch_size_per_gpu"] = 4
    config["scheduler"]["params"] |= {"total_num_steps": steps, "warmup_num_steps": 3}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for i in range(40):
        (text / f"{i}.txt").write_text("".join(f"def name{i}_{j}(x):\n    return x + {j}\n" for j in range(40)))
    sizes = ["--width", "32", "--layers", "2", "--heads", "2", "--context", "32"]
    arguments = [
        EXAMPLE / "train.py",
        "--config",
        folder / "config.json",
        "--data",
        text,
        "--out",
        folder / "out",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    words = ("run", "--num_gpus", "2", *map(str, arguments), *sizes, *more)
    done = launchers.run(*words, environment=environment, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr  # also where --save finds nothing yet
    return done.stdout


def test_a_tiled_loss_is_the_loss(parts):
    model, made = parts[0], []
    for loss in (None, zero.tiled_cross_entropy):
        torch.manual_seed(0)
        made.append(model.GPT(model.Shape(width=16, layers=1, heads=2, context=12), loss))
        made[-1](bytes_of(12), bytes_of(12, seed=1)).backward()
    plain, tiled = (dict(gpt.named_parameters()) for gpt in made)
    assert all(torch.equal(param.grad, tiled[name].grad) for name, param in plain.items())
    assert torch.equal(made[0](bytes_of(12)), made[1](bytes_of(12)))


def losses(output):
    """The lines `step N loss X` without what a launcher may put before them."""
    return re.findall(r"step \d+ loss [\d.e+-]+", output)


@pytest.fixture(scope="module")
def runs(launchers, tmp_path_factory):
    """The folder of a run of 12 steps under stage 1, of one that another took over after 6, and what each printed."""
    folder = tmp_path_factory.mktemp("runs")
    whole, parted = folder / "whole", folder / "parted"
    printed = [example(launchers, whole, "zero1")]
    saving = ("--save", str(folder / "checkpoints"), "--save-every", "4")
    # It ends after step 6, with the learning rates of the longer run; what it saved is read at another stage.
    printed.append(example(launchers, parted, "zero2", more=(*saving, "--steps", "6")))
    printed.append(example(launchers, parted, "offload", more=saving))
    return whole, parted, printed


def rows(folder):
    with (folder / "out" / "loss.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.long
def test_a_short_run_gives_the_same_losses_under_each_stage_and_with_offload(runs):
    _, _, (first, second, third) = runs
    printed = losses(first)
    assert len(printed) == 12 and len({line.split()[-1] for line in printed}) == 12
    assert losses(second) == printed[:6] and losses(third) == printed[6:]
    begin, end = (float(printed[i].split()[-1]) for i in (0, -1))
    assert end < begin - 0.5, "it does not learn"


@pytest.mark.long
def test_a_run_says_what_it_did_and_leaves_its_curve(runs):
    whole, parted, (first, _, third) = runs
    for stage, output, folder in ((1, first, whole), (3, third, parted)):
        assert (folder / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert len(rows(folder)) == 12
        assert f"rank 0 of 2, stage {stage}" in output
        for word in ("one replica", "formula", "parameters", "gradients", "optimizer", "total"):
            assert word in output
        told = re.search(r"validation loss ([\d.]+) nats/byte, (.*) the bigram model's ([\d.]+)", output)
        loss, said, bigram = told.groups()
        assert said == ("after 12 steps below" if float(loss) < float(bigram) else "after 12 steps not yet below")
        assert "sample, from the prompt b'def '" in output


@pytest.mark.long
def test_a_run_that_is_started_again_goes_on_with_the_same_losses(runs):
    whole, parted, (first, _, third) = runs
    assert re.search(r"goes on from \S+, after step 6", third)
    tables = [[(row["step"], row["loss"], row["lr"]) for row in rows(folder)] for folder in (parted, whole)]
    assert len(tables[0]) == 12 and tables[0] == tables[1]
    validation = [re.search(r"validation loss \S+", text).group() for text in (third, first)]
    assert validation[0] == validation[1]
