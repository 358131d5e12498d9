"""Jobs over the hosts of `real_nodes.py`: how the tests start them, wait for them and see them end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from real_nodes import NAMES, ROOT, SECONDS, Nodes, until

RANK = ROOT / "tests" / "real_rank.py"


class End(NamedTuple):
    """How a job ended."""

    status: int
    out: str
    err: str

    def lines(self, *words: str) -> list[str]:
        """The lines of the launcher's stderr that have all of `words`."""
        return [line for line in self.err.splitlines() if all(word in line for word in words)]

    def says(self, *words: str) -> bool:
        """Whether it says so, and only once."""
        return len(self.lines(*words)) == 1


class Job:
    """`zero run` on the hub, with `slots[i]` slots on host number i, and no hosts after those."""

    def __init__(self, hosts: Nodes, folder: Path, *options: str, slots: tuple[int, ...] = (1, 1)) -> None:
        self.hosts = hosts
        self.folder = folder
        self._options = options
        self._slots = slots

    def start(self, *args: str, script: Path = RANK, **variables: str) -> Job:
        """Start it; `RANK` gets the job's folder as its first argument."""
        self.process = self.hosts.start(*self._words(script, args), **variables)
        return self

    def part(self, number: int, *args: str) -> subprocess.Popen:
        """Start only what belongs to host `number`, there, as a user would by hand."""
        words = self._words(RANK, args, "--no_ssh", f"--node_rank={number}")
        self.process = self.hosts.start(*words, host=NAMES[number])
        return self.process

    def _words(self, script: Path, args: tuple[str, ...], *options: str) -> list[str]:
        self.folder.mkdir(exist_ok=True)
        file = self.folder / "hostfile"
        file.write_text("".join(f"{name} slots={slots}\n" for name, slots in zip(NAMES, self._slots, strict=False)))
        first = [str(self.folder)] if script == RANK else []
        return [*command("run"), "--hostfile", str(file), *self._options, *options, str(script), *first, *args]

    def started(self, ranks: int, attempt: int = 0) -> dict[int, str]:
        """Wait until all ranks run, and return what each says of itself."""
        files = {rank: self.folder / f"started-{attempt}-{rank}" for rank in range(ranks)}

        def ready() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return all(file.exists() for file in files.values())

        until(ready)
        return {rank: file.read_text() for rank, file in files.items()}

    def kill(self, rank: int) -> None:
        """As the kernel does when memory runs out."""
        os.kill(self.hosts.rank(rank).pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send the launcher a signal."""
        self.process.send_signal(number)

    def ended(self, seconds: float = SECONDS) -> End:
        """Wait until it has ended by itself, and nothing of it runs on any host."""
        begin = time.monotonic()
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {seconds} s: {self.hosts.processes()}") from None
        launcher = time.monotonic() - begin
        left = nothing_left(self.hosts, max(0, seconds - launcher))
        print(f"the launcher ended after {launcher:.1f} s, everything after {launcher + left:.1f} s: {err}")
        return End(self.process.returncode, out, err)


def only_ranks_have_the_secret(hosts: Nodes, ranks: int) -> str:
    """See that all ranks have one secret, which is returned, and that no command line on any host shows it."""
    (secret,) = {hosts.rank(rank).environment["ZERO_SECRET"] for rank in range(ranks)}
    assert len(secret) == 64
    assert not [process for process in hosts.processes() if secret in process.words]
    return secret


def command(name: str) -> list[str]:
    """`zero NAME` as this Python runs it."""
    return [sys.executable, "-m", "zero", name]


def nothing_left(hosts: Nodes, seconds: float = SECONDS) -> float:
    """Wait until nothing runs on the hosts; how long that took."""
    try:
        return until(lambda: not hosts.processes(), seconds)
    except TimeoutError:
        left = [f"{process.host}: {process.words}" for process in hosts.processes()]
        raise AssertionError(f"left behind after {seconds} s: {left}") from None
