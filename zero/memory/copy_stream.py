"""A CUDA stream for copies between device and host, so that they overlap the computation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class CopyStream:
    """Copies in one direction, in order. Without a GPU a copy is complete when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def after_current(self) -> Iterator[None]:
        """Work queued inside runs on this stream, after all that the current stream has queued so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self.entered():
            yield

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Work queued inside runs on this stream, after what was queued on it before."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def record_event(self) -> torch.cuda.Event | None:
        """An event after all that was queued on this stream; None without a GPU."""
        return None if self._stream is None else self._stream.record_event()

    def synchronize(self) -> None:
        """Wait until all that was queued on this stream is complete."""
        if self._stream is not None:
            self._stream.synchronize()

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a device tensor from being reused before this stream has finished with it."""
        if self._stream is not None and tensor.is_cuda:
            tensor.record_stream(self._stream)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """An event after all that the current stream of `device` has queued; None without a GPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_event(event: torch.cuda.Event | None, device: torch.device) -> None:
    """Have the current stream of `device` wait for `event`, where there is one."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
