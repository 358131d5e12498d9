"""A stream of its own for copies between device and host, so that they overlap what is computed."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch


class Lane:
    """Copies in one direction, one after the other. Without a GPU a copy is over when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._later: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()
        self._collecting = threading.Lock()

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """What is queued inside comes after all that the current stream has queued so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """What is queued inside comes after what was queued on the lane only."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """The point that the lane has reached, for others to wait for."""
        return None if self._stream is None else self._stream.record_event()

    def after(self, call: Callable[[], None]) -> None:
        """Have `call` run when what was queued so far is over: now without a GPU, else by the next `collect`.

        For host memory that a copy still reads: waiting for the copy at once would keep the host from queueing more work.
        """
        event = self.mark()
        if event is None:
            call()
        else:
            self._later.append((event, call))

    def collect(self, wait: bool = True) -> None:
        """Run the calls that `after` has heard of, in any thread, after their copies; or of those that are over only.

        To be called before anything that may wait for such a call: for its host memory, or for somebody who does.
        """
        with self._collecting:
            while self._later and (wait or self._later[0][0].query()):
                event, call = self._later.popleft()
                event.synchronize()
                call()

    def drain(self) -> None:
        """Wait until all that was queued on it is over."""
        if self._stream is not None:
            self._stream.synchronize()

    def keep(self, tensor: torch.Tensor) -> None:
        """The memory of a device tensor must not be reused before the lane has done with it."""
        if self._stream is not None and tensor.is_cuda:
            tensor.record_stream(self._stream)


def reached(device: torch.device) -> torch.cuda.Event | None:
    """The point that the current stream of `device` has reached; None where nothing is queued."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def follow(event: torch.cuda.Event | None, device: torch.device) -> None:
    """What the current stream queues from now on comes after `event`."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
