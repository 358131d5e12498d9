"""A unit moves only as its table says: random sequences of verbs, reads, writes, errors and threads, and a small model.

Two real ranks take the same sequences, since gathers are collectives.
"""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from models import config, make_net

import zero
from zero.core import comm, state
from zero.core.param_buffer import ParamBuffer
from zero.core.state import TRANSITIONS, State
from zero.core.unit import Unit
from zero.memory.pending_update import PendingUpdate, Waits

SEQUENCES = 250  # of each kind of unit
VERBS = 14  # of each sequence
CPU, PERSISTENT = {"device": "cpu"}, {"stage3_param_persistence_threshold": 10**6}
FILES = {"device": "nvme"}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (0, {}),
    "stage 1": (1, {}),
    "stage 2": (2, {}),
    "stage 3": (3, {}),
    "stage 3, persistent": (3, PERSISTENT),
    "stage 1, state on the host": (1, {"offload_optimizer": CPU}),
    "stage 2, state on the host": (2, {"offload_optimizer": CPU}),
    "stage 3, state on the host": (3, {"offload_optimizer": CPU}),
    "stage 3, persistent, state on the host": (3, {"offload_optimizer": CPU, **PERSISTENT}),
    "stage 3, all on the host": (3, {"offload_optimizer": CPU, "offload_param": CPU}),
    "stage 1, state in files": (1, {"offload_optimizer": FILES}),
    "stage 3, all in files": (3, {"offload_optimizer": FILES, "offload_param": FILES}),
}


DRAWN = (
    *("gather", "wait", "release") * 2,
    *("conceal", "offload", "reload", "step", "step beside", "read", "write", "enter", "leave"),
    *("fail to send", "fail to free", "thread"),
)


class OwnedLock:
    """A lock that knows whether the calling thread holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owners: list[int] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owners.append(threading.get_ident())

    def __exit__(self, *_: Any) -> None:
        self._owners.pop()
        self._lock.release()

    @property
    def mine(self) -> bool:
        return threading.get_ident() in self._owners


class Model:
    """What a unit should be: its state, the values of its first parameter, and what readers hold it open."""

    def __init__(self, unit: Unit) -> None:
        self.cut, self.persistent = unit.cut, unit.persistent
        self.state = State.SHARDED if self.cut and not self.persistent else State.FULL
        self.value = unit.params[0].detach().clone() if self.state is State.FULL else None
        self.holds = 0

    def after(self, verb: str) -> State | None:
        """The state after a verb, or None where it must be refused."""
        now, moving = self.state, (State.SHARDED, State.REQUESTED, State.STALE)
        if verb == "gather":
            return None if now is State.AWAY else State.GATHERING if now in moving else now
        if verb == "wait":
            return None if now in (State.SHARDED, State.STALE, State.AWAY) else State.FULL
        if verb == "release":
            return now if self.persistent or not self._leaves else State.SHARDED
        if verb == "conceal":
            conceals = self.cut and now is State.FULL and not (self.persistent or self.holds)
            return State.CONCEALED if conceals else now
        if verb == "offload":
            return None if self.holds or now is State.AWAY else State.AWAY
        if verb == "reload":
            return None if now is not State.AWAY else State.SHARDED if self.cut else State.FULL
        raise AssertionError(verb)

    @property
    def _leaves(self) -> bool:
        return self.cut and not self.holds and self.state not in (State.SHARDED, State.AWAY)


class Driver:
    """Takes a unit and its model through one sequence after another."""

    def __init__(self, engine: Any, unit: Unit, seed: int) -> None:
        self.unit = unit
        self.draw = random.Random(seed)
        self.path: list[tuple[State, str, State]] = []  # every move that was made
        self.blocks: list[zero.GatheredParameters] = []
        self.worker = ThreadPoolExecutor(1)
        self.readers = ThreadPoolExecutor(2)
        unit.buffer.lock = OwnedLock()
        move = unit.buffer.move

        def noted(verb: str) -> None:
            before = unit.buffer.state
            if not unit.buffer.lock.mine:
                raise AssertionError(f"{verb}: the lock is not held")
            move(verb)
            self.path.append((before, verb, unit.buffer.state))

        unit.buffer.move = noted
        if unit.state is State.SHARDED:
            with zero.GatheredParameters(unit.params):
                value = unit.params[0].detach().clone()
            self.model = Model(unit)
            self.model.value = value
        else:
            self.model = Model(unit)

    def sequence(self) -> None:
        for _ in range(VERBS):
            verb = self.draw.choice(DRAWN)
            getattr(self, f"do_{verb.replace(' ', '_')}", lambda verb=verb: self._verb(verb))()
            self.check(verb)
        while self.blocks:
            self.do_leave()
        if self.model.state is State.AWAY:
            self._verb("reload")

    def check(self, verb: str) -> None:
        unit, model = self.unit, self.model
        if unit.masters.pending is None:
            assert unit.state is model.state, (verb, self.path[-5:])
        if model.state is State.FULL and unit.readable:
            assert torch.equal(unit.params[0], model.value), (verb, self.path[-5:])

    def _verb(self, verb: str) -> None:
        after = self.model.after(verb)
        call = getattr(self.unit, verb.replace(" ", "_"))
        if after is None:
            updating, before = self.unit.masters.pending is not None, self.unit.state
            with pytest.raises(RuntimeError, match=r"cannot|offloaded|held open"):
                call()
            assert updating or self.unit.state is before  # the update sends what it has written
        else:
            call()
            self.model.state = after

    def _update(self, gate: threading.Event | None) -> None:
        if gate is not None:
            gate.wait()
        with self.unit.acquired(changed=True, step=True, in_update=True):
            master = self.unit.master
            master.write(0, master.values() + 1)
            self.unit.masters.publish()
        self.unit.publish(after_update=gate is not None)

    def _step(self, beside: bool) -> None:
        unit, model = self.unit, self.model
        if model.state in (State.AWAY, State.STALE) or model.holds:
            return
        unit.invalidate()
        model.value = model.value + 1
        if beside:
            gate = threading.Event()
            unit.masters.defer(PendingUpdate(self.worker.submit(self._update, gate), os.getpid(), Waits()))
            if model.cut and not model.persistent and self.draw.random() < 0.5:
                unit.gather(deferred=True)
                assert unit.state is State.REQUESTED
                model.state = State.REQUESTED
            else:
                model.state = State.SHARDED
            gate.set()
            if self.draw.random() < 0.5:
                unit.settle()
        else:
            self._update(None)
            model.state = State.SHARDED
        if model.persistent or not model.cut:
            model.state = State.GATHERING

    def do_step(self) -> None:
        self._step(False)

    def do_step_beside(self) -> None:
        if self.unit.placement.updated_on_host:
            self._step(True)

    def do_read(self) -> None:
        unit, model = self.unit, self.model
        looked_released = unit.buffer.looks_released
        if not model.cut and not looked_released and model.state is not State.FULL:
            return  # inside the optimizer's step; nobody looks
        comes = model.state is State.FULL or (
            model.state is State.GATHERING and (model.persistent or (not model.cut and looked_released))
        )
        if comes:
            assert torch.equal(unit.params[0] + 0, model.value)
            model.state = State.FULL
        else:
            with pytest.raises(RuntimeError, match=r"is released|offloaded"):
                unit.params[0] + 0

    def do_write(self) -> None:
        if self.unit.readable and not self.model.holds:
            with torch.no_grad():
                self.unit.params[0].add_(1)
            self.model.value = self.model.value + 1

    def do_enter(self) -> None:
        if self.model.state is State.AWAY:
            return
        block = zero.GatheredParameters(self.unit.params)
        was_full = self.unit.state is not State.SHARDED
        block.__enter__()
        self.blocks.append((block, was_full))
        self.model.holds += 1
        self.model.state = State.FULL

    def do_leave(self) -> None:
        if self.blocks:
            block, was_full = self.blocks.pop()
            block.__exit__(None, None, None)
            self.model.holds -= 1
            if not was_full:
                self.model.state = self.model.after("release")

    def do_fail_to_send(self) -> None:
        if self.model.state not in (State.SHARDED, State.STALE) or self.unit.masters.pending is not None:
            return

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("cannot be sent")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm, "gather", fail)
            with pytest.raises(RuntimeError, match="cannot be sent"):
                self.unit.gather()

    def do_fail_to_free(self) -> None:
        if not self.unit.readable or self.model.after("release") is not State.SHARDED:
            return

        def fail(keep_if_referenced: bool) -> None:
            raise RuntimeError("the storage stays")

        self.unit.buffer._free = fail
        with pytest.raises(RuntimeError, match="the storage stays"):
            self.unit.release()
        del self.unit.buffer._free

    def do_thread(self) -> None:
        """Threads beside the loop wait for the parameters, as readers do, while the loop waits, too."""
        if self.model.state in (State.REQUESTED, State.GATHERING, State.CONCEALED, State.FULL):
            waits = [self.readers.submit(self.unit.wait) for _ in range(2)]
            self.unit.wait()
            for each in waits:
                each.result()
            self.model.state = State.FULL


def drive(kind: str, seed: int, sequences: int, folder: str) -> set[tuple[State, str, State]]:
    stage, section = KINDS[kind]
    section = {name: {**value, "nvme_path": folder} if value is FILES else value for name, value in section.items()}
    settings = config(stage, 2, zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0, **section})
    engine, *_ = zero.initialize(model=make_net(blocks=2), config=settings)
    driver = Driver(engine, engine._sharded.trained[0], seed)
    for _ in range(sequences):
        driver.sequence()
    driver.unit.settle()
    path = set(driver.path)
    driver.worker.shutdown()
    driver.readers.shutdown()
    engine.destroy()
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_random_sequences(pool: Any, kind: str, tmp_path: Path) -> None:
    for path in pool.run(2, drive, kind, 7, SEQUENCES, str(tmp_path)):
        assert {(before, verb) for before, verb, _ in path} <= TRANSITIONS.keys()
        assert all(TRANSITIONS[before, verb] is after for before, verb, after in path)
        verbs = {"gather", "wait", "offload"} | ({"release", "reload"} if "stage 3" in kind else {"invalidate", "show"})
        assert verbs | {"gather", "wait", "offload"} <= {verb for _, verb, _ in path}


def test_every_move_of_the_table_is_made(pool: Any, tmp_path: Path) -> None:
    made = set()
    for kind in ("stage 1", "stage 3, state on the host"):
        made |= pool.run(2, drive, kind, 8, SEQUENCES, str(tmp_path))[0]
    assert {(before, verb) for before, verb, _ in made} == TRANSITIONS.keys()


def test_the_table_in_the_docstring_is_the_table() -> None:
    assert state.transition_table() in state.__doc__


def test_a_write_is_seen_after_a_refused_reload() -> None:
    engine, *_ = zero.initialize(model=make_net(blocks=2), config=config(1, 1))
    unit = engine._sharded.trained[0]
    with torch.no_grad():
        unit.params[0].add_(1)
    with pytest.raises(RuntimeError, match="cannot show while it is full"):
        unit.reload()
    assert unit.buffer.written() == {0}
    engine.destroy()


@pytest.mark.parametrize("before", State)
def test_an_illegal_verb_changes_nothing(before: State) -> None:
    legal = {verb for start, verb in TRANSITIONS if start is before}
    for verb in {verb for _, verb in TRANSITIONS} - legal:
        buffer = ParamBuffer.__new__(ParamBuffer)
        buffer.name, buffer.state = "unit 'a' (rank 3)", before
        with pytest.raises(RuntimeError, match=rf"unit 'a' \(rank 3\) cannot {verb} while it is {before.value}"):
            buffer.move(verb)
        assert buffer.state is before
