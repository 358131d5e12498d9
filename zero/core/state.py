"""Where a unit's parameters are, and which step may come after which."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """What is in memory of a unit's parameters.

    SHARDED:   the own shard. Where parameters are cut, nothing else; where they are not, a full copy that
               the optimizer has outdated.
    GATHERING: the shard, and a full buffer that is being filled.
    FULL:      the shard and a valid full buffer; parameters may be read.
    AWAY:      nothing; somebody keeps the values elsewhere and resized the storages to 0.
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"
    AWAY = "away"


LEGAL = {
    (State.SHARDED, "gather"): State.GATHERING,
    (State.GATHERING, "wait"): State.FULL,
    (State.FULL, "release"): State.SHARDED,
    (State.FULL, "invalidate"): State.SHARDED,
    (State.SHARDED, "put away"): State.AWAY,
    (State.FULL, "put away"): State.AWAY,
    (State.AWAY, "take back"): State.SHARDED,
    (State.AWAY, "show"): State.FULL,
}
