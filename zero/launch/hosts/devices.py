"""The devices and the cores of one host: which it has, by their names, and which of them each rank gets."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from zero.launch.launch_messages import LaunchError

_SPAN = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


def numbered(count: int) -> tuple[str, ...]:
    """The devices 0 to `count` - 1."""
    return tuple(str(number) for number in range(count))


def on_node(devices: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, ...]:
    """`devices` as a node that sees only some of its GPUs calls them: number i is the i-th that it sees.

    A scheduler gives a job a part of the node and says so in CUDA_VISIBLE_DEVICES; to count from 0 past that
    would reach for the GPUs of somebody else. Where it sees none, all ranks are on the CPU.
    """
    seen = visible(environment)
    if not seen:
        return devices if seen is None else ()
    outside = [device for device in devices if device.isdigit() and int(device) >= len(seen)]
    if outside:
        raise LaunchError(f"there is no device {outside[0]}: CUDA_VISIBLE_DEVICES has {len(seen)}: {','.join(seen)}")
    return tuple(seen[int(device)] if device.isdigit() else device for device in devices)


def visible(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The entries of CUDA_VISIBLE_DEVICES, as they are written; None where it is not set, which means all.

    As in the CUDA Programming Guide, entries count up to the first that is invalid: an empty one or a number below 0.
    """
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return None
    words = [word.strip() for word in environment["CUDA_VISIBLE_DEVICES"].split(",")]
    devices = tuple(itertools.takewhile(lambda word: word and not word.startswith("-") and word != "NoDevFiles", words))
    if len(set(devices)) < len(devices):
        raise LaunchError(f"CUDA_VISIBLE_DEVICES: got {','.join(devices)!r}, which names a device twice")
    return devices


def parse_cores(text: str) -> tuple[int, ...]:
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


def shared_cores(cores: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """An equal part of `cores` for each rank, of neighbours; what is left over is used by nobody."""
    each = len(cores) // ranks
    if not each:
        raise LaunchError(f"--bind_cores_to_rank: {len(cores)} cores are too few for {ranks} ranks")
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]
