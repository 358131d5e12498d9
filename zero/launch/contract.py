"""The contract of launcher, nodes on other hosts and ranks: names, and exit statuses."""

from __future__ import annotations

import hmac

SHUTDOWN = 4
"""Seconds that ranks have to end when they are asked to, before SIGKILL."""
SILENCE = 6
"""Seconds without a heartbeat, after which whoever should give one counts as lost."""
HEARTBEAT = 1.0
"""Seconds between two heartbeats."""
CONFIG, SETS = "ZERO_CONFIG", "ZERO_SET"
"""The variables with --config and, as a JSON list, --set of `zero run`, for `initialize` in the ranks."""
LOST = 129
"""The exit status of a node whose launcher, or network, is gone; as if it had been hung up on."""
CLOSED_PIPE = 128 + 13
"""The exit status where nobody reads the output any more; as a shell says it of a program that SIGPIPE ended."""
WRITE_ERROR = 74
"""The exit status where the output cannot be written for another reason; EX_IOERR of sysexits.h."""
NO_CONNECTION = 255
"""The exit status of an ssh that has no connection, or no longer one."""
INITIALIZED = "ZERO_INITIALIZED"
"""The variable with the path of a file that a rank makes in `zero.initialize`; the launcher looks whether it did."""
ASSIGNED = "ZERO_ASSIGNED"
"""The variable by which `zero check` and `zero tune` tell a script, as JSON, which run they want of it."""
SAVED = 75
"""The exit status of ranks that have saved at a signal, and end to go on later; EX_TEMPFAIL of sysexits.h."""
SECRET_VARIABLE = "ZERO_SECRET"
"""The variable with the secret of a job, with which its launchers and ranks sign what they send to each other.

`zero run` makes one for each job. The launchers of the hosts get it on the stdin of ssh, or in the environment that
Slurm and MPI hand on; the ranks have it in theirs. It stands on no command line and in no file.
"""


def signature(secret: bytes, *parts: bytes) -> bytes:
    """The HMAC of `parts` with `secret` as its key; the parts are separated by their lengths.

    To be compared by `hmac.compare_digest`, in constant time.
    """
    text = b"".join(b"%d:%b" % (len(part), part) for part in parts)
    return hmac.digest(secret, text, "sha256").hex().encode()
