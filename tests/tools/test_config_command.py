"""`zero config` writes a JSON that passes its own check, from answers, from defaults and from --set."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import zero
from zero.__main__ import main
from zero.config import load
from zero.config.override import override


class Terminal(io.StringIO):
    """What a user types."""

    def isatty(self) -> bool:
        return True


def written(path: Path, *words: str) -> dict[str, Any]:
    assert main(["config", "--output", str(path), *words]) == 0
    return json.loads(path.read_text())


def test_the_defaults_pass_the_check_and_say_their_memory(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    values = written(tmp_path / "zero.json", "--default", "--params", "70e9", "--world", "64")
    assert values["zero_optimization"] == {"stage": 3}  # the first that leaves room on 80 GB
    assert load(tmp_path / "zero.json", 64).bf16.enabled
    row = zero.estimate(70e9, values, 64).configured
    said = capsys.readouterr().err
    assert f"stage 3: {row.device.total / 1e9:,.2f} GB on device" in said.splitlines()[-1]
    assert said.count("GB on device") == 10  # nine choices, and the one that was made
    assert "Lion" in said and "fp32" in said


def test_the_place_follows_the_memory_of_the_device(tmp_path: Path) -> None:
    words = ("--default", "--params", "7e9", "--world", "16", "--memory")
    for memory, section in (("8", {"stage": 3, "offload_optimizer": {"device": "cpu"}}), ("40", {"stage": 1})):
        assert written(tmp_path / f"{memory}.json", *words, memory)["zero_optimization"] == section


def test_what_is_set_is_not_asked_and_nothing_contradicts_it(tmp_path: Path) -> None:
    sets = ["fp16.enabled=true", "train_batch_size=64", "zero_optimization.stage=2", "optimizer.type=Lion", "x.y=z w"]
    values = written(tmp_path / "zero.json", "--default", *(word for text in sets for word in ("--set", text)))
    assert "bf16" not in values and "gradient_accumulation_steps" not in values
    assert values["zero_optimization"] == {"stage": 2}
    assert values["optimizer"] == {"type": "Lion"}
    assert values["x"] == {"y": "z w"}
    assert load(values, 8).gradient_accumulation_steps == 8


def test_answers_are_taken_asked_again_when_wrong_and_empty_ones_are_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    typed = ["7e9", "16", "", "bf17", "fp32", "lion", "3e-4", "0", "2", "", "1", "9", "/one", "/two"]
    monkeypatch.setattr("sys.stdin", Terminal("\n".join(typed) + "\n"))
    values = written(tmp_path / "zero.json")
    said = capsys.readouterr().err
    assert "got 'bf17', wanted one of bf16, fp16, fp32" in said
    assert "got '0', wanted an integer of at least 1" in said
    drives = {"device": "nvme", "nvme_path": "/one"}, {"device": "nvme", "nvme_path": "/two"}
    assert values == {
        "optimizer": {"type": "Lion", "params": {"lr": 3e-4}},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_optimizer": drives[0], "offload_param": drives[1]},
    }


REFUSED = [
    ("", io.StringIO, "there is no terminal to ask at; pass --default"),
    ("", lambda: Terminal("7e9\n"), "nothing was written"),
    ("--default --set zero_optimization.stage=7", io.StringIO, "got 7, wanted an integer from 0 to 3"),
    ("--default --set stage", io.StringIO, "--set: got 'stage', wanted KEY=VALUE"),
    ("--default --params 3", io.StringIO, "number of parameters: got 3"),
]


def test_what_cannot_be_written_is_said_and_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "zero.json"
    for words, stdin, text in REFUSED:
        monkeypatch.setattr("sys.stdin", stdin())
        assert main(["config", "--output", str(path), *words.split()]) == 2
        assert text in capsys.readouterr().err
        assert not path.exists()


def test_a_file_that_is_there_stays_unless_it_is_forced(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "zero.json"
    path.write_text("mine")
    assert main(["config", "--default", "--output", str(path)]) == 2
    assert "--force to write over it" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert written(path, "--default", "--force")["optimizer"]["type"] == "AdamW"
    assert main(["config", "--default", "--output", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())


def test_one_value_is_set_by_its_path() -> None:
    values: dict[str, Any] = {"a": {"b": 1}, "list": [1]}
    texts = ("a.b=2", "a.c.d=null", "e=text=more", 'f=["x"]')
    assert [override(values, text) for text in texts] == ["a.b", "a.c.d", "e", "f"]
    assert values == {"a": {"b": 2, "c": {"d": None}}, "list": [1], "e": "text=more", "f": ["x"]}
    for wrong in ("a", "=1", "a..b=1", ".a=1"):
        with pytest.raises(ValueError, match="wanted KEY=VALUE"):
            override(values, wrong)
    with pytest.raises(ValueError, match="list is no object"):
        override(values, "list.x=1")
