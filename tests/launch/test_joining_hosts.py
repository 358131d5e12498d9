"""A run loses a host, goes on, and wins it back at the next restart: the bits of a run restarted by hand, so placed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from nodes import ROOT, Nodes, environment, eventually
from safetensors.numpy import load_file

from zero.checkpoint.model_files import consolidate

# The first two attempts hold behind three steps, until they are ended.
PROGRAM = """
import os, time
import recovering

train_step, calls = recovering.train_step, []

def held(*given):
    calls.append(1)
    while len(calls) > 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
        time.sleep(0.05)
    return train_step(*given)

recovering.train_step = held
recovering.main()
"""
STEPS = 24


def lines(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def weights(folder: Path) -> dict:
    made = consolidate(folder / "checkpoints" / f"global_step{STEPS}", folder / "model.safetensors")
    return load_file(made[0])


def trained(folder: Path, attempt: int, count: int = 2) -> bool:
    return sum(line[0] == str(attempt) for line in lines(folder / "losses")) >= count


def test_a_host_that_comes_back_has_the_run_end_as_one_restarted_by_hand(launchers, tmp_path):
    joined, by_hand = tmp_path / "joined", tmp_path / "by-hand"
    for folder in (joined, by_hand):
        folder.mkdir()
    flags = ("--min_nodes=1", "--max_nodes=2", "--max_restarts=1")
    with Nodes(launchers, joined, {"a": 1, "b": 1}, PROGRAM, *flags, arguments=(str(STEPS), "3")) as nodes:
        assert eventually(lambda: trained(joined, 0))
        nodes.processes["b"].kill()
        assert eventually(lambda: trained(joined, 1))
        nodes.again("b")
        assert eventually(lambda: "host b has come" in nodes.processes["a"].texts()[1])
        ((_, rank),) = lines(joined / "pids-1")
        os.kill(int(rank), signal.SIGKILL)
        assert nodes.wait() == [0, 0], nodes.said()
    assert [len(lines(joined / f"pids-{attempt}")) for attempt in range(3)] == [2, 1, 2]
    (_, first), (_, second), (_, third) = lines(joined / "begun")
    assert 0 == int(first) < int(second) < int(third) < STEPS

    for ranks, end in ((2, second), (1, third), (2, STEPS)):
        words = ["--num_gpus", str(ranks), str(ROOT / "tests" / "recovering.py"), str(by_hand), str(end), "3"]
        with launchers.start("run", *words, environment=environment(OMP_NUM_THREADS="1")) as process:
            process.communicate(240)
            assert process.returncode == 0
    assert [step for _, step in lines(by_hand / "begun")] == [first, second, third]
    last = {line[1]: line[2] for line in lines(joined / "losses")}
    assert last == {line[1]: line[2] for line in lines(by_hand / "losses")}
    found, wanted = weights(joined), weights(by_hand)
    assert found.keys() == wanted.keys() and all((found[key] == wanted[key]).all() for key in wanted)
