"""The hostfile: a line `NAME slots=N` for each host, in the order of the ranks."""

from __future__ import annotations

import re
from pathlib import Path

from zero.launch.hosts.devices import numbered
from zero.launch.hosts.host_world import Host
from zero.launch.launch_messages import LaunchError, raise_all, text_of

DEFAULT = "/job/hostfile"
MOST = 1024  # more processes on one host is a slip of the finger, and would be started in earnest
_NAME = re.compile(r"[A-Za-z0-9_:.][A-Za-z0-9_.:-]*")
_SLOTS = re.compile(r"slots=([0-9]+)")
# What Open MPI reads in the same file, and what means nothing to us.
_KNOWN = re.compile(r"max[-_]slots=[0-9]+")
_WANTED = "wanted NAME slots=N"


def read(path: str) -> tuple[Host, ...]:
    """The hosts of the file at `path`, in its order; all that is wrong with it at once, with line numbers."""
    if not Path(path).exists():
        raise LaunchError(f"--hostfile: there is no file {path!r}; leave it out to run on this machine only")
    return parse(text_of(path), path)


def parse(text: str, path: str) -> tuple[Host, ...]:
    """The hosts that `text` lists; `path` is for messages. Blank lines and what follows a # are skipped."""
    problems: list[str] = []
    lines: dict[str, int] = {}
    hosts: list[Host] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words)
        if isinstance(host, str):
            problems.append(f"{path}:{number}: {line.strip()!r}: {host}")
        elif host.name in lines:
            problems.append(f"{path}:{number}: host {host.name!r} is there already, in line {lines[host.name]}")
        else:
            lines[host.name] = number
            hosts.append(host)
    if not hosts and not problems:
        problems.append(f"{path}: no hosts; wanted a line NAME slots=N for each")
    raise_all(problems)
    return tuple(hosts)


def _host(words: list[str]) -> Host | str:
    """The host of one line, or what is wrong with it."""
    name, rest = words[0], words[1:]
    slots = _SLOTS.fullmatch(rest[0]) if rest else None
    if slots is None:
        return _WANTED
    if not _NAME.fullmatch(name):
        # The characters that --include gives a meaning, and those that would make an option or a list of a name.
        return "a host's name has letters, digits, '.', '_', '-' and ':' only; a user's name goes to ~/.ssh/config"
    if unknown := [word for word in rest[1:] if not _KNOWN.fullmatch(word)]:
        return f"{unknown[0]!r} means nothing here; {_WANTED}"
    digits = slots[1].lstrip("0")
    if not digits:
        return "slots=0: leave the host out instead"
    if len(digits) > len(str(MOST)) or int(digits) > MOST:
        return f"more than {MOST} slots"
    return Host(name, numbered(int(digits)))
