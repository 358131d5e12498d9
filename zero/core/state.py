"""Where the parameters of a unit are, and which step may follow which: the only way from one state to another.

Only units whose parameters are cut are ever sharded, requested or concealed, and only others stale.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class State(enum.Enum):
    """What is in memory of a unit's parameters.

    SHARDED:   the own shard; the parameters look released.
    REQUESTED: the same. A gather was asked for while an update of the shard runs, and begins when that has ended:
               other ranks may have begun theirs, and wait for this one.
    GATHERING: the shard, and a full buffer that is being filled.
    FULL:      the shard and a valid full buffer. Parameters may be read.
    CONCEALED: the same, but the parameters look released, so that a read is noticed.
    STALE:     where parameters are not cut: a full buffer that the optimizer has outdated, but for the own shard.
    AWAY:      nothing. The values are kept elsewhere, and the storages have size 0.
    """

    SHARDED = "sharded"
    REQUESTED = "requested"
    GATHERING = "gathering"
    FULL = "full"
    CONCEALED = "concealed"
    STALE = "stale"
    AWAY = "away"


# (state, verb): the next state
TRANSITIONS: Mapping[tuple[State, str], State] = {
    (State.SHARDED, "request"): State.REQUESTED,
    (State.SHARDED, "gather"): State.GATHERING,
    (State.SHARDED, "offload"): State.AWAY,
    (State.REQUESTED, "gather"): State.GATHERING,
    (State.GATHERING, "wait"): State.FULL,
    (State.SHARDED, "complete"): State.FULL,
    (State.REQUESTED, "complete"): State.FULL,
    (State.GATHERING, "complete"): State.FULL,
    (State.STALE, "complete"): State.FULL,
    (State.FULL, "conceal"): State.CONCEALED,
    (State.FULL, "release"): State.SHARDED,
    (State.FULL, "invalidate"): State.STALE,
    (State.FULL, "offload"): State.AWAY,
    (State.CONCEALED, "reveal"): State.FULL,
    (State.STALE, "gather"): State.GATHERING,
    (State.AWAY, "reload"): State.SHARDED,
    (State.AWAY, "show"): State.FULL,
}


# Reading order, 2 of 7; next: zero/core/unit.py, what travels together, and the order in which its parts act.
