"""What the launcher and the nodes that it starts on other hosts agree about, and exit statuses."""

from __future__ import annotations

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
