"""State that rests in host memory or in a file and is used on the device, in one of two slots there.

While one unit is updated in one slot, the state of the next is copied into the other, and that of the previous one
back. The units that a step updates first may come earlier, during the backward. All work is queued: the host waits only
for a drive.
"""

from __future__ import annotations

import threading

import torch

from zero.memory.store import PassingStore, Store
from zero.memory.streams import Event, Streams, record_event, wait_event
from zero.plan.memory import SLOTS


class Slot:
    """Memory of the device, uint8 [nbytes], and its user.

    free: the event after which it may be used again; user: the thread that uses it now, or None; ahead: the unit whose
    state was copied here before its use, "" for none.
    """

    def __init__(self, nbytes: int, device: torch.device, streams: Streams) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.free: Event | None = None
        self.user: int | None = None
        self.ahead = ""
        for stream in (streams.up, streams.down):
            stream.record_stream(self.memory)


class Slots:
    """The slots that all units of an engine share, each as large as the largest state of a unit."""

    def __init__(self, nbytes: int, device: torch.device, streams: Streams) -> None:
        self.device, self.streams = device, streams
        self._all = [Slot(nbytes, device, streams) for _ in range(SLOTS)]  # the least recently used first
        self._given = threading.Condition()

    def claim(self, owner: str, wait: bool = True) -> Slot | None:
        """An unused slot, preferably the one with `owner`'s state; waits for other threads if there is none.

        None if there is none and not `wait`; RuntimeError if the calling thread uses all.
        """
        with self._given:
            while not (free := [slot for slot in self._all if slot.user is None]):
                if not wait:
                    return None
                if all(slot.user == threading.get_ident() for slot in self._all):
                    raise RuntimeError(
                        f"{owner} needs a place on the device, and both are in use by the code that asks for it; use "
                        "the state of at most two units at once, or set offload_optimizer.zero.update to 'host'"
                    )
                self._given.wait()
            slot = min(free, key=lambda slot: (slot.ahead != owner, slot.ahead != ""))
            slot.user = threading.get_ident()
            return slot

    def give(self, slot: Slot) -> None:
        """Free the slot: its last use is queued."""
        with self._given:
            slot.user = None
            self._all.remove(slot)
            self._all.append(slot)
            self._given.notify_all()


class StreamedStore(PassingStore):
    """A store whose tensors are on the device while they are acquired, and otherwise rest in another store.

    The stream that is current in `acquire` copies them in; `down` copies them out, after the current stream's work.
    """

    def __init__(self, backing: Store, unit: str, nbytes: int, slots: Slots) -> None:
        """`backing`: where the state rests; has `nbytes` bytes for the state of `unit`."""
        super().__init__(nbytes)
        self._backing = backing
        self._unit = unit
        self._slots = slots
        self._slot: Slot | None = None
        self._users = 0
        self._changed = False
        self._last: Event | None = None  # after the last copy from or to where they rest
        self._lock = threading.RLock()

    def __str__(self) -> str:
        return f"unit '{self._unit}'"

    @property
    def place(self) -> torch.Tensor:
        return self._slot.memory

    def fetch(self) -> bool:
        """See `Store.fetch`; it does not copy to the device, `bring` does."""
        return self._backing.fetch()

    def bring(self) -> None:
        """Copy the state to the device ahead of `acquire`, unless both slots are in use; waits only for a drive."""
        with self._lock:
            if self.attached or (slot := self._slots.claim(str(self), wait=False)) is None:
                return
            try:
                if slot.ahead != str(self):
                    self._load(slot)
                    slot.free = self._last = record_event(self._slots.device)
                    self._backing.write_back(changed=False, after=self._last)  # read by the copy until then
                    slot.ahead = str(self)
            finally:
                self._slots.give(slot)

    def cancel_fetch(self) -> None:
        self._backing.cancel_fetch()

    def acquire(self, overwrite: bool = False) -> None:
        """See `Store.acquire`: the current stream may use the tensors, the host perhaps not yet."""
        with self._lock:
            if not self.attached:
                slot = self._slots.claim(str(self))
                try:
                    self._load(slot, overwrite)
                except BaseException:
                    self._slots.give(slot)
                    raise
                self._slot = slot
                self.attach()
            self._users += 1

    def write_back(self, changed: bool = True, after: Event | None = None) -> None:
        """See `Store.write_back`; the host waits only if the state goes on to a drive."""
        with self._lock:
            self._changed = self._changed or changed
            self._users -= 1
            if self._users:
                return
            self.detach()
            slot, self._slot = self._slot, None
            changed, self._changed = self._changed, False
            wait_event(after, self._slots.device)
            if changed:
                down = self._slots.streams.down
                # After the update, which the current stream has queued. The slot's next user waits for this copy only.
                with down.after_current():
                    self._copy(self._backing.place, slot.memory)
                slot.free = self._last = down.record_event()
            else:
                slot.free = self._last = record_event(self._slots.device)
            self._slots.give(slot)
            if changed and self._last is not None and not self._backing.resident:
                self._last.synchronize()  # a drive reads host memory in the order of no stream
            self._backing.write_back(changed, self._last)

    def close(self) -> None:
        if self._last is not None:
            self._last.synchronize()  # host memory may be freed at any time after this
        super().close()
        self._backing.close()

    def _load(self, slot: Slot, overwrite: bool = False) -> None:
        """Acquire the state where it rests, and copy it to the slot unless it is there already, or not needed."""
        there = overwrite or slot.ahead == str(self)
        self._backing.acquire(overwrite=there)
        slot.ahead = ""
        # The slot's last user may still be copied out, and so may these bytes, out of the other slot.
        for event in (slot.free, self._last):
            wait_event(event, self._slots.device)
        if not there:
            self._copy(slot.memory, self._backing.place)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target[: self._used].copy_(source[: self._used], non_blocking=True)
