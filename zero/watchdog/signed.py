"""Values in the store of the process group, which anybody can write to who reaches its port."""

from __future__ import annotations

import logging
import os

from zero.launch.secret import VARIABLE, same, signature
from zero.log import logger

_LENGTH = len(signature(b""))


class Signed:
    """Signs what rank `rank` puts into the store, and knows again what ranks of this job have put there.

    What is signed in one attempt of a job means nothing in the next one. Where the ranks have no secret, because
    another launcher started them, a value is known to be whole, and no more than that.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._secret = signature(os.environ.get(VARIABLE, "").encode(errors="surrogateescape"), attempt.encode())
        self._doubted: set[str] = set()

    def sign(self, key: str, value: bytes) -> bytes:
        """What is to stand under `key`."""
        return signature(self._secret, key.encode(), value) + value

    def read(self, key: str, found: bytes) -> bytes | None:
        """The value of what was found under `key`; None, and a line once, where no rank of this job put it there."""
        value = found[_LENGTH:]
        if same(found[:_LENGTH], signature(self._secret, key.encode(), value)):
            return value
        self.doubt(key)
        return None

    def doubt(self, key: str) -> None:
        """Say, once, that what stands under `key` is not what a rank of this job has put there."""
        if key not in self._doubted:
            self._doubted.add(key)
            text = "rank %d leaves out '%s' in the store of the process group, which somebody else has written"
            logger.log(logging.WARNING, text + " who reaches its port; see docs/launching.md", self._rank, key)
