"""The gather of new parameters behind a step, which stays in flight where whoever reads them waits for it."""

from __future__ import annotations

from typing import Any

from zero.core.param_buffer import ParamBuffer, State
from zero.memory.streams import current_stream, record_event


class LateGather:
    """Whether the gather of one unit may stay in flight, and who waits for it.

    Until its end the parameters look released, so readers wait. Two kinds of readers would not be noticed, and where
    they are known all is there at the step's end: views of the memory that somebody keeps, and what knows addresses.

    awaited: the modules that read the parameters wait for them, and none of them is compiled or in a CUDA graph;
    loop:    the stream that took the step, while the gather is in flight on a GPU.
    """

    def __init__(self, buffer: ParamBuffer) -> None:
        self.awaited = False
        self._buffer = buffer
        self._lent = False
        self.loop: Any = None

    def step_begins(self) -> None:
        """The parameters are about to be outdated: see who has views of them, before a message has one, too."""
        self._lent = self.awaited and self._buffer.lent

    def step_ends(self) -> bool:
        """Have the parameters look released until their gather has ended; False where it must be waited for now."""
        with self._buffer.lock:
            late = self.awaited and not self._lent and self._buffer.state is State.GATHERING
            if late:
                self.loop = current_stream(self._buffer.full.device)
                self._buffer.look_released()
        return late

    def received(self) -> None:
        """The current stream has waited for the gather."""
        loop, self.loop = self.loop, None
        device = self._buffer.full.device
        if loop is not None and loop != current_stream(device):
            # Only this stream has waited, but the loop's may read as soon as the parameters look full.
            loop.wait_event(record_event(device).recorded)
            self.awaited = False  # other streams may read without being noticed, too
