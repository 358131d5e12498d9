"""The promise: what is put into a file comes back whenever it is lent, however few slots and however many threads.

Nobody waits for ever, and a tensor whose bytes are on the drive is empty instead of showing something else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zero.kernels.aio import Aio
from zero.memory.file_store import FileStore, SwapFile, close_all
from zero.memory.pinned_arena import PinnedArena

PAGES = 8192  # bytes of each store
NUMEL = 1200
Make = Callable[..., tuple[SwapFile, list[FileStore], list[torch.Tensor]]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(slots: int, units: int, **asked: bool) -> tuple[SwapFile, list[FileStore], list[torch.Tensor]]:
        aio = Aio(1, 4, 4096)
        arena = PinnedArena(slots * PAGES, torch.device("cpu"), False)
        memories = [arena.take(PAGES) for _ in range(slots)]
        drive = SwapFile(str(tmp_path), "optimizer", 0, units * PAGES, memories, aio, **asked)
        drives.append((drive, aio))
        stores = [drive.store(f"u{index}", PAGES) for index in range(units)]
        tensors = [torch.full((NUMEL,), float(index)) for index in range(units)]
        for store, tensor in zip(stores, tensors, strict=True):
            store.put([tensor])
        return drive, stores, tensors

    drives: list[tuple[SwapFile, Aio]] = []
    yield made
    for drive, aio in drives:
        close_all([drive], aio)


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
def test_values_come_back_and_changes_stay(make: Make, slots: int) -> None:
    _, stores, tensors = make(slots, 5)
    for turn in range(3):
        for index, (store, tensor) in enumerate(zip(stores, tensors, strict=True)):
            assert tensor.shape == (0,)
            stores[(index + 1) % 5].fetch()
            store.acquire()
            assert torch.equal(tensor, torch.full((NUMEL,), index + 10.0 * turn))
            tensor += 10
            store.write_back()


def test_a_thread_that_has_all_slots_is_told_instead_of_waiting_for_ever(make: Make) -> None:
    _, stores, _ = make(2, 3)
    stores[0].acquire()
    stores[1].acquire()
    with pytest.raises(RuntimeError, match=r"unit 'u2' .* all 2 are in use by the code that asks .*buffer_count"):
        stores[2].acquire()
    stores[0].write_back()
    stores[2].acquire()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_threads_share_slots_without_waiting_for_each_other_for_ever(make: Make, slots: int) -> None:
    _, stores, tensors = make(slots, 6)
    problems: list[BaseException] = []

    def work(mine: range) -> None:
        try:
            for turn in range(60):
                index = mine[turn % len(mine)]
                stores[mine[(turn + 1) % len(mine)]].fetch()
                stores[index].acquire()
                tensors[index] += 10
                stores[index].write_back()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(mine,), daemon=True) for mine in (range(3), range(3, 6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems
    assert not any(thread.is_alive() for thread in threads)
    for index, (store, tensor) in enumerate(zip(stores, tensors, strict=True)):
        store.acquire()
        assert torch.equal(tensor, torch.full((NUMEL,), index + 200.0))
        store.write_back(changed=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_instead_of_waiting_for_ever(make: Make) -> None:
    drive, (store,), _ = make(1, 1)
    with drive.pool.lock:  # as if another thread were at work in it
        child = os.fork()
        if child == 0:
            try:
                store.acquire()
            except RuntimeError as error:
                os._exit(7 if "forked" in str(error) else 8)
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_request_that_failed_is_told_to_everybody_with_unit_and_file(make: Make, tmp_path: Path) -> None:
    drive, stores, _ = make(1, 2)
    stores[0].acquire()
    stores[0].write_back(changed=False)
    os.ftruncate(drive.file.fd, PAGES)  # the place of u1 is gone
    text = (
        rf"unit 'u1' \(rank 0\) is lost: read of .*{tmp_path}/zero-optimizer-of-rank-0 .*the file ends there. Make sure"
    )
    with pytest.raises(RuntimeError, match=text):
        stores[1].acquire()
    for use in (stores[0].acquire, stores[0].fetch, stores[1].acquire):
        with pytest.raises(RuntimeError, match=text):
            use()


def test_a_file_that_was_cut_is_not_made_longer_again(make: Make) -> None:
    drive, stores, _ = make(2, 3)
    stores[2].acquire()
    os.ftruncate(drive.file.fd, 0)
    text = "unit 'u2' .*: the file was cut to 0. Make sure"
    with pytest.raises(RuntimeError, match=text):  # else u1 would be zeros from now on
        stores[2].write_back()
    with pytest.raises(RuntimeError, match=text):
        stores[1].acquire()
