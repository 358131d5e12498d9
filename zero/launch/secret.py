"""The secret of a job, with which its launchers and ranks sign what they send to each other.

`zero run` makes one for each job. The launchers of the hosts get it on the stdin of ssh, or in the environment that
Slurm and MPI hand on; the ranks have it in theirs. It stands on no command line and in no file.
"""

from __future__ import annotations

import hmac
import os
import select
from collections.abc import Mapping

from zero.launch.messages import LaunchError

VARIABLE = "ZERO_SECRET"
_LINE = 128  # bytes of stdin within which a secret ends
_PATIENCE = 60.0  # seconds for the launcher to hand it over


def signature(secret: bytes, *parts: bytes) -> bytes:
    """The HMAC of `parts` with `secret` as its key; the parts are separated by their lengths.

    To be compared by `hmac.compare_digest`, in constant time.
    """
    text = b"".join(b"%d:%b" % (len(part), part) for part in parts)
    return hmac.digest(secret, text, "sha256").hex().encode()


def of_node(on_stdin: bool, environment: Mapping[str, str]) -> str:
    """The secret that a host's launcher was given: the first line of its stdin, or a variable; "" where there is none.

    What follows that line stays unread. Raises LaunchError where no line comes.
    """
    if not on_stdin:
        return environment.get(VARIABLE, "")
    line = b""
    while len(line) < _LINE and select.select([0], [], [], _PATIENCE)[0] and (byte := os.read(0, 1)):
        if byte == b"\n":
            return line.decode(errors="replace")
        line += byte
    raise LaunchError("the launcher that started this one did not hand over the secret of the job")
