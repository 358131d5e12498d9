"""The process group's store with signed values: any program that reaches its port can write to it."""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from zero.launch.contract import SECRET_VARIABLE, signature
from zero.log import logger

_LENGTH = len(signature(b""))


class SignedStore:
    """Keys of the store below `prefix`, with values signed with the job's secret; `rank` is for messages.

    Only one thread may use it; it blocks if the store's process is stopped. Signatures of one attempt of a job are
    invalid in the next one. If the ranks have no secret, because another launcher started them, values are only known
    to be complete.

    keeper: the rank whose process runs the store, None if it is no rank's.
    """

    def __init__(self, prefix: str, rank: int) -> None:
        # The original store ends with the process group, and with it, on the rank that runs it, the server.
        self._original = dist.distributed_c10d._get_default_store()
        self._store = self._original.clone() if hasattr(self._original, "clone") else self._original
        self.keeper = _keeper(self._original)
        self._prefix = prefix
        self._rank = rank
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._secret = signature(os.environ.get(SECRET_VARIABLE, "").encode(errors="surrogateescape"), attempt.encode())
        self._doubted: set[str] = set()

    def set(self, key: str, value: bytes) -> None:
        """Sign `value` and write it under `key`."""
        key = self._prefix + key
        self._store.set(key, signature(self._secret, key.encode(), value) + value)

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of existing keys; None, and one log line, for a value that no rank of this job wrote."""
        values = self._store.multi_get([self._prefix + key for key in keys]) if keys else []
        return [self._checked(key, bytes(value)) for key, value in zip(keys, values, strict=True)]

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all of these keys exist."""
        return self._store.check([self._prefix + key for key in keys])

    def add(self, key: str, number: int) -> int:
        """Add to a counter, and return its new value; counters are not signed."""
        return self._store.add(self._prefix + key, number)

    def delete(self, key: str) -> None:
        """Remove a key."""
        self._store.delete_key(self._prefix + key)

    def doubt(self, key: str) -> None:
        """Log, once, that no rank of this job wrote the value under `key`."""
        if key not in self._doubted:
            self._doubted.add(key)
            text = "rank %d leaves out '%s' in the store of the process group, which somebody else has written"
            text += " who reaches its port; see docs/launching.md"
            logger.log(logging.WARNING, text, self._rank, self._prefix + key)

    def close(self) -> None:
        """Release the store; if this process runs it, it may end now."""
        self._original = self._store = None

    def _checked(self, key: str, signed: bytes) -> bytes | None:
        value = signed[_LENGTH:]
        if hmac.compare_digest(signed[:_LENGTH], signature(self._secret, (self._prefix + key).encode(), value)):
            return value
        self.doubt(key)
        return None


def _keeper(store: dist.Store) -> int | None:
    """The rank whose process runs the store: 0, as torch makes it, unless a launcher or a file does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, dist.TCPStore) and not launched else None
