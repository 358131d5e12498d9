"""The promise: a signal to any rank has all of them save at the end of its step, and end with one status."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import make_net, share
from scenario import settings

import zero

STEPS, SIGNALLED = 5, 2


def train(engine: Any, steps: range, signalled: int | None = None, number: int = signal.SIGUSR1) -> None:
    for step in steps:
        if step == signalled and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), number)
        engine.backward(engine(*share(step)))
        engine.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "name"), [(3, "SIGUSR1"), *longer((0, "SIGTERM"), (1, "SIGUSR2"), (2, "SIGHUP"))])
def test_all_ranks_save_and_end_and_go_on_with_the_unbroken_bits(stage: int, name: str, tmp_path: Any) -> None:
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    before, term = signal.getsignal(signal.Signals[name]), signal.getsignal(signal.SIGTERM)
    whole = zero.initialize(model=make_net(), config=settings(stage, 2))[0]
    train(whole, range(STEPS))
    wanted = whole.module_state_dict()
    whole.destroy()

    engine = zero.initialize(model=make_net(), config=settings(stage, 2))[0]
    client = {"epoch": 0}
    engine.save_on_signal(name, folder[0], client_state=client)
    client["epoch"] = 3
    with pytest.raises(SystemExit) as ended:
        train(engine, range(STEPS), SIGNALLED, signal.Signals[name])
    assert ended.value.code == 75
    assert engine.global_steps == SIGNALLED + 1
    engine.destroy()
    # Its status stays what it is, whatever ends the other ranks when the first one has ended.
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN != term
    signal.signal(signal.SIGTERM, term)
    assert signal.getsignal(signal.Signals[name]) is before

    later = zero.initialize(model=make_net(), config=settings(stage, 2))[0]
    path, found = later.load_checkpoint(folder[0])
    assert found == {"epoch": 3}
    assert path.endswith(f"global_step{SIGNALLED + 1}")
    train(later, range(later.global_steps, STEPS))
    found = later.module_state_dict()
    later.destroy()
    for key in found if dist.get_rank() == 0 else ():
        assert torch.equal(found[key], wanted[key]), key


@pytest.mark.ranks(2)
def test_what_is_no_signal_and_threads_that_hear_none() -> None:
    engine = zero.initialize(model=make_net(), config=settings(1, 2))[0]
    for wrong in ("USR1", "SIGKILL", 0, ["SIGTERM", "SIGSTOP"]):
        with pytest.raises(ValueError, match=r"save_on_signal\(\): "):
            engine.save_on_signal(wrong, "folder")
    said: list[str] = []

    def elsewhere() -> None:
        try:
            engine.save_on_signal("SIGUSR1", "folder")
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "in the main thread only" in said[0]
    train(engine, range(1))
    engine.destroy()
