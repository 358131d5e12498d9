"""The hosts of a Slurm allocation, from the variables that Slurm sets in it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from zero.launch.hosts.devices import numbered
from zero.launch.hosts.host_world import Host
from zero.launch.launch_messages import LaunchError, listed

LIST = "SLURM_JOB_NODELIST"
_GROUP = re.compile(r"\[([^\[\]]*)\]")
_SPAN = "[0-9]{1,6}(?:-[0-9]{1,6})?"
_PART = re.compile(rf"(?:[^\[\],\s]|\[{_SPAN}(?:,{_SPAN})*\])+")
_REPEATED = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
_LAST_NUMBER = re.compile(r"\b([0-9]{1,6})(?:,|$)")
# A number for each host, in Slurm's short form 2(x3),1, is the most that is known; the others are the same on all.
_SLOTS = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


def allocation(environment: Mapping[str, str], num_gpus: int | None = None) -> tuple[Host, ...] | None:
    """The hosts of the allocation that this process runs in; None outside of one.

    Slots are the GPUs per host that the job asked for; without GPUs, its tasks per host; `num_gpus` goes before both.
    """
    if not environment.get(LIST):
        return None
    names = expand(environment[LIST])
    slots = [num_gpus] * len(names) if num_gpus is not None else _slots(environment, len(names))
    return tuple(Host(name, numbered(count)) for name, count in zip(names, slots, strict=True))


def expand(text: str, name: str = LIST) -> list[str]:
    """The names that a list such as n[1-3,07-09],m5 stands for, in its order; leading zeros are kept.

    `name`: the variable that it is from, for what is said about it.
    """
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        if not _PART.fullmatch(part):
            raise LaunchError(f"{name}: got {text!r}, wanted names such as n[1-3,7],m5")
        pieces = _GROUP.split(part)  # plain text and the insides of brackets, by turns
        spans = [_numbers(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        names += ("".join(words) for words in itertools.product(*spans))
    return names


def _numbers(inside: str) -> list[str]:
    numbers: list[str] = []
    for word in inside.split(","):
        low, _, high = word.partition("-")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return numbers


def _slots(environment: Mapping[str, str], hosts: int) -> list[int]:
    for key in _SLOTS:
        text = environment.get(key, "")
        if not text:
            continue
        counts = per_host(text, hosts) if key == "SLURM_TASKS_PER_NODE" else _same(text, hosts)
        if counts is None:
            raise LaunchError(f"{key}: got {text!r}, which is no number of slots for {hosts} hosts; give --num_gpus")
        return counts
    raise LaunchError(f"--launcher slurm: none of {listed(_SLOTS)} is set; say with --num_gpus how many on each host")


def per_host(text: str, hosts: int) -> list[int] | None:
    """The number for each of the hosts, from Slurm's short form 2(x3),1; None where it is not that."""
    counts: list[int] = []
    for count, times in _REPEATED.findall(text):
        counts += [int(count)] * int(times or 1)
    return counts if len(counts) == hosts and all(counts) else None


def _same(text: str, hosts: int) -> list[int] | None:
    """As Slurm's options take it: 4, a100:4 or a100:2,h100:2."""
    total = sum(map(int, _LAST_NUMBER.findall(text)))
    return [total] * hosts if total else None
