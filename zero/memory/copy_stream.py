"""A stream of its own for copies between device and host, so that they overlap what is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class CopyStream:
    """Copies in one direction, one after the other. Without a GPU a copy is over when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

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
