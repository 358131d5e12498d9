"""What ranks tell each other about a save: short texts through the process group's store, and no collective.

So a thread beside the training loop can do it, and a rank that writes for an hour runs into no time-out of a
communication library.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist

POLL = 0.02  # seconds between two looks at the store


class Exchange:
    """Rounds of texts among the ranks of one engine. Of a single rank nothing leaves the process."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._round = 0
        if world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            self._store = store.clone() if hasattr(store, "clone") else store
            # Engines are made in one order on all ranks, so the n-th of each rank belong together.
            self._prefix = f"zero/saves/{self._store.add(f'zero/saves/{rank}', 1)}"

    def all(self, value: Any) -> list[Any]:
        """What each rank says in this round (anything that JSON holds), in their order; waits for all."""
        if self.world_size == 1:
            return [value]
        self._round += 1
        keys = [f"{self._prefix}/{self._round}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], json.dumps(value))
        while not self._store.check(keys):
            time.sleep(POLL)
        found = [json.loads(text) for text in self._store.multi_get(keys)]
        if self._round > 1:  # all have said something in this round, so all have heard those of the last
            self._store.delete_key(f"{self._prefix}/{self._round - 1}/{self.rank}")
        return found
