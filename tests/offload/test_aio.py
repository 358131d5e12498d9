"""The promise: what is written into a scratch file is read back, on every backend; what fails says where and why.

Nothing is left behind, not even by a process that is killed, and no request outlives its memory.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zero.kernels.aio import ALIGN, BACKENDS, Aio, Request, ScratchFile, aligned

BLOCK = 4 * ALIGN
LINUX = sys.platform == "linux"


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


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


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


def test_requests_nobody_keeps_are_done_all_the_same(aio: Aio, tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, 64 * BLOCK, "state")
    for index in range(64):
        aio.write(file, noise(BLOCK, index), index * BLOCK)  # the tensor has no other owner either
    aio.close()
    back = aligned(file.nbytes)
    again = Aio(block_size=BLOCK)
    again.read(file, back, 0).wait()
    again.close()
    assert digest(back) == digest(torch.cat([noise(BLOCK, index) for index in range(64)]))


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


def test_an_error_nobody_waited_for_is_raised_by_close(aio: Aio, tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, BLOCK, "state")
    os.ftruncate(file.fd, 0)
    aio.read(file, aligned(BLOCK), 0)
    with pytest.raises(OSError, match=r"state failed at byte 0: the file ends there"):
        aio.close()
    aio.close()


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"threads": 0}, "threads: got 0"),
        ({"queue_depth": 0}, "queue_depth: got 0"),
        ({"queue_depth": 1 << 20}, "queue_depth: got 1048576; wanted 1 to 4096"),
        ({"block_size": 0}, "block_size: got 0"),
        ({"block_size": ALIGN + 512}, "block_size: got 4608; wanted a multiple of 4096 from 4096 to"),
        ({"block_size": 1 << 40}, "block_size: got 1099511627776"),
        ({"backend": "libaio"}, "backend: got 'libaio'"),
    ],
)
def test_wrong_arguments(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Aio(**arguments)


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


# Processes.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told(aio: Aio, tmp_path: Path) -> None:
    file, data = ScratchFile(tmp_path, 32 * BLOCK, "state"), noise(32 * BLOCK)
    writing = aio.write(file, data, 0)
    child = os.fork()
    if child == 0:
        told = 0
        signal.alarm(60)  # rather than hang
        for call in (lambda: aio.read(file, data, 0), writing.wait):
            try:
                call()
            except RuntimeError as error:
                told += "forked from it" in str(error)
        aio.close()
        aio._pool = None  # the compiled pool goes, without workers to wait for
        gc.collect()
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    writing.wait()
    back = aligned(data.nbytes)
    aio.read(file, back, 0).wait()
    assert digest(back) == digest(data)


@pytest.mark.skipif(not LINUX, reason="counts descriptors in /proc")
def test_descriptors_are_closed(tmp_path: Path) -> None:
    gc.collect()
    for backend in BACKENDS:
        before = open_fds()
        aio = make(backend)
        files = [ScratchFile(tmp_path, BLOCK, str(index)) for index in range(5)]
        for file in files:
            aio.write(file, aligned(BLOCK), 0)
        files[0].close()
        aio.close()
        del aio, files, file
        assert open_fds() == before, backend


KILLED = """
import sys
from pathlib import Path
from zero.kernels.aio import Aio, ScratchFile, aligned
file = ScratchFile(Path(sys.argv[1]), 64 << 20, "state")
aio, data = Aio(block_size=1 << 16), aligned(64 << 20).fill_(1)
while True:
    request = aio.write(file, data, 0)
    sys.stdout.write("writing\\n")
    sys.stdout.flush()
    request.wait()
"""


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(2):
            assert process.stdout is not None and process.stdout.readline() == "writing\n"
        assert os.listdir(tmp_path) == []
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


# Files.


def test_a_scratch_file_has_no_name_and_its_space_is_reserved(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, 1_000_000, "state")
    assert os.listdir(tmp_path) == []
    assert (file.path, file.nbytes) == (tmp_path / "state", 245 * ALIGN)
    assert os.fstat(file.fd).st_size == file.nbytes
    if LINUX:
        assert os.fstat(file.fd).st_blocks * 512 >= file.nbytes
        assert os.get_inheritable(file.fd) is False


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    system = os.statvfs(tmp_path)
    free = system.f_bavail * system.f_frsize
    wanted = 2 * free + (1 << 40)
    with pytest.raises(OSError, match=rf"wants {wanted} bytes, \d+ are free") as caught:
        ScratchFile(tmp_path, wanted, "state")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path))
