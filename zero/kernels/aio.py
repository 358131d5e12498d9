"""Asynchronous reads and writes of scratch files: through io_uring, C++ threads or Python threads."""

from __future__ import annotations

import errno
import logging
import os
import threading
import weakref
from typing import Any

from torch import Tensor

from zero.kernels.aio_plain import SHORT, PlainPool
from zero.kernels.checks import CPU, address_of
from zero.kernels.native import load
from zero.kernels.scratch import ALIGN, Descriptor, ScratchFile, aligned

__all__ = ["ALIGN", "BACKENDS", "Aio", "Request", "ScratchFile", "aligned"]

BACKENDS = ("io_uring", "threads", "python")  # best first
MAX_THREADS, MAX_DEPTH, MAX_BLOCK = 256, 4096, 1 << 30


class Request:
    """A read or write in flight. Keeps its tensor and its file alive, and in place, until it is done.

    Dropping it does not stop it.
    """

    def __init__(self, aio: Aio, pool_request: Any, what: str, file: ScratchFile, tensor: Tensor, offset: int) -> None:
        self._aio = weakref.ref(aio)  # weak: its list holds this object
        self._process, self._pool_request, self._what = aio._process, pool_request, what
        self._path, self._nbytes, self._offset = str(file.path), tensor.nbytes, offset
        self._held: tuple[Tensor, Descriptor] | None = (tensor, file.descriptor)

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return bool(self._pool_request.done())

    def wait(self) -> None:
        """Wait until the request is complete; may be called again, and by several threads.

        Raises OSError with the errno, the requested bytes of the file, the byte reached, and the path: all bytes before
        that point were moved, later ones perhaps; a file that ends before a read does gives EIO. RuntimeError in a
        process forked from the one that began it.
        """
        _check_process(self._process)
        self._pool_request.wait()
        if (aio := self._aio()) is not None:
            with aio._lock:
                aio._flying.pop(self, None)
                aio._raised |= self._pool_request.outcome()[0] != 0  # the caller gets its error
        self._held = None
        self.check()

    def check(self) -> None:
        """Raise the error of :meth:`wait` if the request has failed by now."""
        error, reached = self._pool_request.outcome()
        if error == 0:
            return
        first, last, at = self._offset, self._offset + self._nbytes, self._offset + reached
        if error == SHORT:
            reason = "the file ends there" if self._what == "read" else "the file takes no more"
        else:
            reason = os.strerror(error)
        text = f"{self._what} of bytes {first} to {last} of {self._path} failed at byte {at}: {reason}"
        raise OSError(errno.EIO if error == SHORT else error, text, self._path)


class Aio:
    """Workers that move data between memory and scratch files, several requests at once, first come, first served.

    A request is cut into blocks. May be used from several Python threads; waiting releases the GIL.

    threads: workers; "intra_op_parallelism" of the JSON;
    queue_depth: blocks in flight per worker. Backends "threads" and "python" have one thread for each, at most 64;
    block_size: bytes, a multiple of ALIGN, at most 1 GiB;
    backend: "io_uring", "threads" or "python"; None: the first of these that is available. As an attribute: the one in
    use, and `why` says why it is not an earlier one; empty if it was requested or is the first.
    Raises ValueError for an argument out of range, RuntimeError, with the reason, without the requested backend.
    """

    def __init__(
        self, threads: int = 1, queue_depth: int = 8, block_size: int = 1 << 20, backend: str | None = None
    ) -> None:
        for name, value, most in (("threads", threads, MAX_THREADS), ("queue_depth", queue_depth, MAX_DEPTH)):
            if not 1 <= value <= most:
                raise ValueError(f"{name}: got {value}; wanted 1 to {most}")
        if not ALIGN <= block_size <= MAX_BLOCK or block_size % ALIGN:
            raise ValueError(f"block_size: got {block_size}; wanted a multiple of {ALIGN} from {ALIGN} to {MAX_BLOCK}")
        if backend not in (None, *BACKENDS):
            raise ValueError(f"backend: got {backend!r}; wanted one of {', '.join(map(repr, BACKENDS))}, or None")
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._flying: dict[Request, None] = {}  # begun, not yet waited for; oldest first
        self._raised = self._closed = False  # raised: an error has reached the caller
        self._pool: Any = None
        self._pool, self.backend, self.why = _pool(threads, queue_depth, block_size, backend)

    def read(self, file: ScratchFile, tensor: Tensor, offset: int) -> Request:
        """Begin to fill a tensor from a file. The tensor must not be touched before :meth:`Request.wait` returned.

        tensor: contiguous, on the CPU, any dtype, address and nbytes multiples of ALIGN. Its storage may not be resized
        while the request is in flight. offset: in bytes, a multiple of ALIGN; the span must lie within the file.
        Raises ValueError for anything else, or a closed file, and begins nothing then; RuntimeError after
        :meth:`close`, or in a process forked from the one that made this object.
        """
        return self._begin(False, file, tensor, offset)

    def write(self, file: ScratchFile, tensor: Tensor, offset: int) -> Request:
        """Begin to write a tensor into a file; arguments and errors as :meth:`read`. The tensor may be read meanwhile.

        Requests that overlap in the file have no order.
        """
        return self._begin(True, file, tensor, offset)

    def close(self) -> None:
        """Wait for requests in flight and end the workers. A second call, or one in a forked process, does nothing.

        Raises the OSError of a failed request, if :meth:`Request.wait` has raised none.
        """
        if self._process != os.getpid() or self._pool is None:
            return
        with self._lock:
            self._closed = True
        # The list is kept until the end: an interrupt must not free memory that the workers still write into.
        for request in list(self._flying):
            request._pool_request.wait()
        self._pool.close()
        self._pool = None
        requests, self._flying = self._flying, {}
        for request in () if self._raised else requests:
            request.check()

    def __del__(self) -> None:
        # The workers write into memory that must not be freed before they end.
        try:
            self.close()
        except OSError as error:
            logging.getLogger("zero").warning("a request that was not waited for failed: %s", error)
        except AttributeError:  # __init__ raised
            pass

    def _begin(self, write: bool, file: ScratchFile, tensor: Tensor, offset: int) -> Request:
        _check_process(self._process)
        address = _check(file, tensor, offset)
        with self._lock:
            if self._closed:
                raise RuntimeError("this Aio is closed; nothing can be read or written with it any more")
            align = ALIGN if file.direct else 1
            begun = self._pool.submit(write, file.fd, address, tensor.nbytes, offset, align)
            request = Request(self, begun, "write" if write else "read", file, tensor, offset)
            self._flying[request] = None
        return request


def _check_process(process: int) -> None:
    if process != os.getpid():
        raise RuntimeError(
            f"this Aio was made in process {process}, and this is process {os.getpid()}, forked from it, "
            "which has none of its workers; make another one here"
        )


def _pool(threads: int, depth: int, block: int, backend: str | None) -> tuple[Any, str, str]:
    """The workers, their backend, and why it is not a better one."""
    if backend == "python":
        return PlainPool(threads, depth, block), backend, ""
    module = load()
    if module is None:
        why = "the compiled CPU kernels are missing"
        if backend is not None:
            raise RuntimeError(f"backend {backend!r}: {why}; use 'python', or install zero with a C++ compiler at hand")
        return PlainPool(threads, depth, block), "python", why
    if backend == "threads":
        return module.AioPool(threads, depth, block, False), backend, ""
    try:
        return module.AioPool(threads, depth, block, True), "io_uring", ""
    except RuntimeError as error:
        if backend is not None:
            raise RuntimeError(f"backend 'io_uring': not to be had here ({error}); use 'threads'") from error
        return module.AioPool(threads, depth, block, False), "threads", f"no io_uring ({error})"


def _check(file: ScratchFile, tensor: Tensor, offset: int) -> int:
    """Raise ValueError unless the tensor and its place in the file are valid; returns the address."""
    address, nbytes = address_of("tensor", tensor, device=CPU), tensor.nbytes
    if address % ALIGN or nbytes % ALIGN:
        raise ValueError(
            f"tensor: got {nbytes} bytes at an address {address % ALIGN} bytes past a multiple of {ALIGN}; wanted both "
            f"as multiples of {ALIGN}, as zero.kernels.aio.aligned({nbytes + -nbytes % ALIGN}) has them"
        )
    if offset % ALIGN or offset < 0 or offset + nbytes > file.nbytes:
        raise ValueError(
            f"offset: got {offset} for {nbytes} bytes of {file.path}; wanted a multiple of {ALIGN} with the span "
            f"within the {file.nbytes} bytes of the file"
        )
    return address
