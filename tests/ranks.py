"""A pool of real worker processes that tests run ranks in: started when first needed, reused by every test.

`pool.run(world_size, function, *args)` calls `function(*args)` on ranks 0..world_size-1 inside a fresh gloo
process group and returns the results in order of ranks. Functions are sent by name, so they must stand at
the top level of a test module. A rank that raises, dies or stalls fails the call with what it said, and the
pool starts anew. A test that is marked `ranks(world_size)` runs so itself (conftest.py).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SECONDS = 120  # a test that takes longer than this hangs
# Imported once, in a process without threads from which all ranks are forked: for each it takes four seconds.
PRELOADED = ["torch._dynamo", "_pytest.assertion", "hypothesis", "zero.engine.initialize"]


class RankError(AssertionError):
    """What went wrong on a rank, with its traceback."""


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config
    from device import feed, on_host

    feed()
    install_importhook(get_config())  # so that an assertion on a rank shows its values
    while True:
        if not gc.get_freeze_count():  # at first, and behind a test that counts objects
            gc.collect()
            gc.freeze()  # torch has hundreds of thousands, which no collection need look at
        try:
            job = connection.recv()
        except EOFError:
            return
        module, name, args, kwargs, rank, world_size, store_file = job
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        try:
            # Collectives that wait for a dead or diverging peer give up well before the pool does.
            store = dist.FileStore(store_file, world_size)
            timeout = timedelta(seconds=30)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
            torch.manual_seed(0)
            torch.set_num_threads(1)  # Accelerate gives others to one rank alone, and sums of LayerNorm go by threads
            result = getattr(importlib.import_module(module), name)(*args, **kwargs)
            connection.send((True, on_host(result)))
        except BaseException:
            reply = traceback.format_exc()
            _leave()  # first, so that ranks that wait for this one see it go
            connection.send((False, reply))
            continue
        # Another rank may still be connecting to this one: the parent says when all have answered.
        try:
            connection.recv()
        except EOFError:
            return
        _leave()


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def said_by(call: Callable[[], object]) -> str:
    """The type and text of the error that a call raises; "nothing" if it raises none."""
    try:
        call()
    except (RuntimeError, TypeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextlib.contextmanager
def listening(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What zero says on this rank inside, from a level up, as if it had said nothing before."""
    from zero.log import _said

    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero").addHandler(handler)
    _said.cache_clear()
    try:
        yield said
    finally:
        logging.getLogger("zero").removeHandler(handler)


class Pool:
    """Up to `size` ranks; see the module's docstring."""

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._workers: list[tuple[mp.process.BaseProcess, Connection]] = []
        # Stores outlive their jobs: whoever still reads one whose file is gone waits for the file.
        self._folder = tempfile.TemporaryDirectory()
        self._jobs = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The results of `function(*args, **kwargs)` on `world_size` ranks, by rank; raises RankError."""
        if world_size > self._size:
            raise ValueError(f"world_size: got {world_size}, the pool has {self._size} ranks")
        self._start(world_size)
        self._jobs += 1
        store = str(Path(self._folder.name) / f"store-{self._jobs}")
        for rank in range(world_size):
            job = (function.__module__, function.__name__, args, kwargs, rank, world_size, store)
            self._workers[rank][1].send(job)
        replies = self._collect(world_size)
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(replies) if not good]
        if failed:
            self.close()
            raise RankError("\n".join(failed))
        for _, connection in self._workers[:world_size]:
            connection.send(None)
        return [result for _, result in replies]

    def close(self) -> None:
        """End all workers."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []

    def _start(self, count: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        while len(self._workers) < count:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def _collect(self, world_size: int) -> list[tuple[bool, Any]]:
        replies: dict[int, tuple[bool, Any]] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers[:world_size])}
        end = time.monotonic() + SECONDS
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    replies[rank] = (False, f"gave no answer in {SECONDS} s")
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    replies[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    process = self._workers[rank][0]
                    with contextlib.suppress(Exception):
                        process.join(5)
                    replies[rank] = (False, f"the process died with exit code {process.exitcode}")
        return [replies[rank] for rank in range(world_size)]
