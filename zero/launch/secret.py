"""The secret of a job, with which its launchers and ranks sign what they send to each other.

`zero run` makes one for each job. The launchers of the hosts get it on the stdin of ssh, or in the environment that
Slurm and MPI hand on; the ranks have it in theirs. It stands on no command line and in no file.
"""

from __future__ import annotations

import hmac

VARIABLE = "ZERO_SECRET"


def signature(secret: bytes, *parts: bytes) -> bytes:
    """The HMAC of `parts` with `secret` as its key; the parts are separated by their lengths.

    To be compared by `hmac.compare_digest`, in constant time.
    """
    text = b"".join(b"%d:%b" % (len(part), part) for part in parts)
    return hmac.digest(secret, text, "sha256").hex().encode()
