"""Which of the hosts and slots that there are take part: --include, --exclude, --num_nodes and --num_gpus."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from zero.launch.hosts.host_world import Host
from zero.launch.launch_messages import LaunchError, listed, raise_all
from zero.log import counted

_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_WANTED = "wanted host, host:slot,slot or host:first-last, with @ between hosts, such as worker-0@worker-1:0,2"


class SlotChoice(NamedTuple):
    """The flags that choose; None or an empty text: not given."""

    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    num_gpus: int | None = None


def select(hosts: Sequence[Host], choice: SlotChoice) -> tuple[Host, ...]:
    """Those of `hosts` that `choice` leaves, with the slots that it leaves; both in the order of `hosts`."""
    check(choice)
    if choice.include:
        wanted = _slots(choice.include, hosts, "--include")
        kept = {host.name: wanted.get(host.name, frozenset()) for host in hosts}
    elif choice.exclude:
        unwanted = _slots(choice.exclude, hosts, "--exclude")
        kept = {host.name: frozenset(host.devices) - unwanted.get(host.name, frozenset()) for host in hosts}
    else:
        return _first(hosts, choice)
    left = [Host(host.name, tuple(slot for slot in host.devices if slot in kept[host.name])) for host in hosts]
    left = [host for host in left if host.devices]
    if not left:
        raise LaunchError(f"--exclude: {choice.exclude!r} leaves nothing of {described(hosts)}")
    return tuple(left)


def described(hosts: Sequence[Host]) -> str:
    """`hosts` and their slots in words."""
    return listed([f"{host.name}:{','.join(host.devices)}" for host in hosts])


def check(choice: SlotChoice) -> None:
    """Raise `LaunchError` for flags that cannot stand together, whatever hosts there are."""
    if choice.include and choice.exclude:
        raise LaunchError("--include and --exclude: give one of them")
    spec = "--include" if choice.include else "--exclude" if choice.exclude else None
    counts = {"--num_nodes": choice.num_nodes, "--num_gpus": choice.num_gpus}
    if spec and (given := [name for name, value in counts.items() if value is not None]):
        raise LaunchError(f"{' and '.join(given)}: cannot be given with {spec}, which says the same by names")


def _first(hosts: Sequence[Host], choice: SlotChoice) -> tuple[Host, ...]:
    """The first `num_nodes` hosts, and the first `num_gpus` slots of each."""
    count = len(hosts) if choice.num_nodes is None else choice.num_nodes
    if count > len(hosts):
        there = f"{'is' if len(hosts) == 1 else 'are'} {counted(len(hosts), 'host')}"
        names = listed([host.name for host in hosts])
        raise LaunchError(f"--num_nodes: got {count}, but there {there}: {names}")
    chosen = tuple(hosts[:count])
    if choice.num_gpus is None:
        return chosen
    if short := [host for host in chosen if len(host.devices) < choice.num_gpus]:
        has = listed([f"{host.name} has {len(host.devices)}" for host in short])
        raise LaunchError(f"--num_gpus: got {choice.num_gpus}, but {has}")
    return tuple(Host(host.name, host.devices[: choice.num_gpus]) for host in chosen)


def _slots(spec: str, hosts: Sequence[Host], flag: str) -> dict[str, frozenset[str]]:
    """The slots that `spec` names, per host; a host that is named twice has both. All that is wrong at once."""
    pool = {host.name: host for host in hosts}
    chosen: dict[str, frozenset[str]] = {}
    problems: list[str] = []
    for part in spec.split("@"):
        name, slots = part.strip(), None
        if name not in pool and ":" in name:  # a name may have colons of its own, as an IPv6 address has
            name, _, slots = name.rpartition(":")
            name = name.strip()
        if not name or (slots is not None and not all(word.strip() for word in slots.split(","))):
            problems.append(f"{flag}: got {part!r} in {spec!r}; {_WANTED}")
        elif name not in pool:
            problems.append(f"{flag}: there is no host {name!r}; there is {listed(list(pool))}")
        else:
            named, wrong = _named(slots, pool[name])
            chosen[name] = chosen.get(name, frozenset()) | named
            problems += [f"{flag}: {text}" for text in wrong]
    raise_all(list(dict.fromkeys(problems)))
    return chosen


def _named(slots: str | None, host: Host) -> tuple[frozenset[str], list[str]]:
    """The slots of `host` that `slots` names, and what is wrong with the others."""
    if slots is None:
        return frozenset(host.devices), []
    named: set[str] = set()
    wrong: list[str] = []
    for word in (text.strip() for text in slots.split(",")):
        ends = _RANGE.fullmatch(word)
        if ends is None or word in host.devices:
            wanted = {str(int(word)) if word.isascii() and word.isdigit() and len(word) < 10 else word}
        elif int(ends[1]) > int(ends[2]):
            wrong.append(f"got the slots {word!r} of host {host.name!r}, which go down; wanted first-last")
            continue
        else:
            # The ends may be far apart: those in between are looked for among what there is, not counted out.
            wanted = {str(int(ends[1])), str(int(ends[2]))} | {
                slot for slot in host.devices if slot.isdigit() and int(ends[1]) <= int(slot) <= int(ends[2])
            }
            if len(wanted) < int(ends[2]) - int(ends[1]) + 1:
                wanted.add(word)
        if missing := sorted(wanted - set(host.devices), key=lambda slot: (len(slot), slot)):
            wrong.append(f"host {host.name!r} has no slot {missing[0]!r}; it has {listed(host.devices)}")
        named |= wanted
    return frozenset(named), wrong
