"""The promise: what is written into a scratch file is read back, on every backend; what fails says where and why.

What is put into a store comes back whenever it is lent, however few slots and however many threads. Nobody waits for
ever, and a tensor whose bytes are on the drive is empty instead of showing something else.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zero.kernels.aio import ALIGN, BACKENDS, Aio, Request, ScratchFile, aligned
from zero.memory.file_store import FileStore, SwapFile, close_all
from zero.memory.pinned_arena import PinnedArena

BLOCK = 4 * ALIGN


def make(backend: str, **arguments: int) -> Aio:
    try:
        return Aio(backend=backend, **{"queue_depth": 3, "block_size": BLOCK, **arguments})
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(params=BACKENDS)
def aio(request: pytest.FixtureRequest) -> Iterator[Aio]:
    made = make(request.param)
    yield made
    made.close()


def noise(nbytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return aligned(nbytes).random_(0, 256, generator=generator)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def content(fd: int, nbytes: int) -> str:
    """The digest of a file, read without what is tested here."""
    back = aligned(nbytes)
    assert os.preadv(fd, [back.numpy()], 0) == nbytes
    return digest(back)


# Bytes.


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "nbytes", [0, ALIGN, BLOCK - ALIGN, BLOCK, BLOCK + ALIGN, 7 * BLOCK, 50 * BLOCK + ALIGN, 1 << 22]
)
def test_what_is_written_is_read(aio: Aio, tmp_path: Path, nbytes: int, direct: bool) -> None:
    file = ScratchFile(tmp_path, nbytes + 2 * ALIGN, "state", direct=direct)
    data, back = noise(nbytes), noise(nbytes, 1)
    whole = aligned(file.nbytes).fill_(7)
    aio.write(file, data, ALIGN).wait()
    reading = aio.read(file, back, ALIGN)
    reading.wait()
    assert reading.done
    assert digest(back) == digest(data)
    aio.read(file, whole, 0).wait()  # and nothing else was written
    assert not whole[:ALIGN].any() and not whole[-ALIGN:].any()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_requests_in_flight_in_two_files(backend: str, threads: int, tmp_path: Path) -> None:
    aio = make(backend, threads=threads, queue_depth=2)
    sizes = [ALIGN * (1 + index * 7 % 13) for index in range(60)]
    offsets = [sum(sizes[:index]) for index in range(60)]
    files = [ScratchFile(tmp_path, sum(sizes), name) for name in ("even", "odd")]
    data = [noise(nbytes, index) for index, nbytes in enumerate(sizes)]
    writes = [aio.write(files[i % 2], data[i], offsets[i]) for i in range(60)]
    for request in reversed(writes):
        request.wait()
    back = [aligned(nbytes) for nbytes in sizes]
    reads = [aio.read(files[i % 2], back[i], offsets[i]) for i in range(60)]
    aio.close()  # waits for them
    assert all(request.done for request in reads)
    for request in reads:
        request.wait()
    assert list(map(digest, back)) == list(map(digest, data))


# Errors.


def failure(request: Request) -> OSError:
    with pytest.raises(OSError) as caught:
        request.wait()
    assert request.done
    return caught.value


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_drive_names_the_file(aio: Aio, tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, 8 * BLOCK, "blocks.3.moments")
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, file.fd)
    os.close(full)
    error = failure(aio.write(file, noise(4 * BLOCK), 2 * BLOCK))
    path = str(tmp_path / "blocks.3.moments")
    assert (error.errno, error.filename) == (errno.ENOSPC, path)
    where = f"write of bytes {2 * BLOCK} to {6 * BLOCK} of {path} failed at byte {2 * BLOCK}"
    assert f"{where}: {os.strerror(errno.ENOSPC)}" in str(error)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("end", [0, BLOCK, BLOCK + ALIGN, 2 * BLOCK + 100, 5 * BLOCK + ALIGN + 1])
def test_a_file_that_was_cut_says_where_it_ends(aio: Aio, tmp_path: Path, end: int, direct: bool) -> None:
    file = ScratchFile(tmp_path, 6 * BLOCK, "state", direct=direct)
    data, back = noise(6 * BLOCK), aligned(6 * BLOCK)
    aio.write(file, data, 0).wait()
    os.ftruncate(file.fd, end)
    error = failure(aio.read(file, back, 0))
    assert error.errno == errno.EIO
    assert f"read of bytes 0 to {6 * BLOCK} of {file.path} failed at byte {end}: the file ends there" in str(error)
    assert torch.equal(back[:end], data[:end]), "all before that byte is there"


@pytest.mark.parametrize(
    ("tensor", "offset", "words"),
    [
        (aligned(BLOCK)[:-1], 0, "tensor: got 16383 bytes"),
        (aligned(2 * BLOCK)[64 : 64 + BLOCK], 0, "an address 64 bytes past a multiple of 4096"),
        (aligned(BLOCK), 512, "offset: got 512"),
        (aligned(BLOCK), -ALIGN, "offset: got -4096"),
        (aligned(BLOCK), BLOCK + ALIGN, "within the 32768 bytes of the file"),
        (aligned(BLOCK).view(2, -1).t(), 0, "wanted cpu, a contiguous tensor with data"),
        (torch.empty(BLOCK, device="meta"), 0, "wanted cpu, a contiguous tensor with data"),
        (b"bytes", 0, "got bytes; wanted cpu, a contiguous tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused(aio: Aio, tmp_path: Path, tensor: Tensor, offset: int, words: str) -> None:
    file = ScratchFile(tmp_path, 2 * BLOCK, "state")
    for begin in (aio.read, aio.write):
        with pytest.raises(ValueError, match=words):
            begin(file, tensor, offset)


def test_closed_ones_are_refused(aio: Aio, tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, 64 * BLOCK, "state")
    data = noise(file.nbytes)
    writing = aio.write(file, data, 0)
    watched = os.dup(file.fd)
    file.close()  # the request goes on: nobody else may get its descriptor
    file.close()
    writing.wait()
    assert content(watched, data.nbytes) == digest(data)
    os.close(watched)
    with pytest.raises(ValueError, match=r"state, which is closed"):
        aio.read(file, data, 0)
    aio.close()
    with pytest.raises(RuntimeError, match="this Aio is closed"):
        aio.read(ScratchFile(tmp_path, BLOCK, "state"), aligned(BLOCK), 0)


# --- stores in a file ------------------------------------------------------------------------------------------------


PAGES = 8192  # bytes of each store
NUMEL = 1200
Make = Callable[..., tuple[SwapFile, list[FileStore], list[torch.Tensor]]]


@pytest.fixture
def lender(tmp_path: Path) -> Make:
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
def test_values_come_back_and_changes_stay(lender: Make, slots: int) -> None:
    _, stores, tensors = lender(slots, 5)
    for turn in range(3):
        for index, (store, tensor) in enumerate(zip(stores, tensors, strict=True)):
            assert tensor.shape == (0,)
            stores[(index + 1) % 5].fetch()
            store.acquire()
            assert torch.equal(tensor, torch.full((NUMEL,), index + 10.0 * turn))
            tensor += 10
            store.write_back()


def test_a_thread_that_has_all_slots_is_told_instead_of_waiting_for_ever(lender: Make) -> None:
    _, stores, _ = lender(2, 3)
    stores[0].acquire()
    stores[1].acquire()
    with pytest.raises(RuntimeError, match=r"unit 'u2' .* all 2 are in use by the code that asks .*buffer_count"):
        stores[2].acquire()
    stores[0].write_back()
    stores[2].acquire()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_threads_share_slots_without_waiting_for_each_other_for_ever(lender: Make, slots: int) -> None:
    _, stores, tensors = lender(slots, 6)
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


def test_a_request_that_failed_is_told_to_everybody_with_unit_and_file(lender: Make, tmp_path: Path) -> None:
    drive, stores, _ = lender(1, 2)
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
