"""Which cores each rank of a host is bound to."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zero.launch.messages import LaunchError

_SPAN = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


def parse(text: str) -> tuple[int, ...]:
    """The cores that a list such as 1,3-5,7 names: from low to high, none twice."""
    cores: list[int] = []
    for word in text.split(","):
        ends = _SPAN.fullmatch(word.strip())
        low, high = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if low > high:
            raise LaunchError(f"--bind_core_list: got {word!r} in {text!r}, wanted a core or first-last")
        if cores and low <= cores[-1]:
            raise LaunchError(f"--bind_core_list: got {text!r}; wanted cores from low to high, and none twice")
        cores += range(low, high + 1)
    return tuple(cores)


def shared(cores: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """An equal part of `cores` for each rank, of neighbours; what is left over is used by nobody."""
    each = len(cores) // ranks
    if not each:
        raise LaunchError(f"--bind_cores_to_rank: {len(cores)} cores are too few for {ranks} ranks")
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]
