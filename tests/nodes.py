"""The launchers of a job of several hosts, all on this machine and started by hand, as without ssh."""

from __future__ import annotations

import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from launching import Launched, Launchers
from ports import free_port

ROOT = Path(__file__).parent.parent
# What launchers tell their ranks.
LAUNCHERS = re.compile(r"(OMPI_|PMIX?_|MPI_|SLURM_|RANK$|LOCAL_|WORLD_SIZE$|MASTER_|ZERO_MET$|TORCHELASTIC_)")
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
_PATIENCE = 240  # seconds that nothing takes here, unless it hangs


class Nodes:
    """One launcher per host of `hosts`, such as {"a": 1, "b": 2} for two hosts with 1 and 2 ranks.

    `text` is the script; its first argument is the folder of the test, and `arguments` follow. Used in a with
    statement, which ends all.
    by_ssh: a host that hears its launcher on stdin.
    """

    def __init__(
        self,
        launchers: Launchers,
        folder: Path,
        hosts: dict[str, int],
        text: str,
        *flags: str,
        by_ssh: str | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self._launchers = launchers
        self.folder = folder
        (folder / "hosts").write_text("".join(f"{name} slots={count}\n" for name, count in hosts.items()))
        (folder / "script.py").write_text(textwrap.dedent(text))
        port = free_port()
        self._environment = environment(GLOO_SOCKET_IFNAME="lo", ZERO_SECRET="of the test")
        place = ["-H", str(folder / "hosts"), "--master_addr=127.0.0.1", f"--master_port={port}"]
        self._words = {
            name: [
                *["--no_ssh", f"--node_rank={node}", *place, *(["--stdin"] if name == by_ssh else []), *flags],
                *[str(folder / "script.py"), str(folder), *arguments],
            ]
            for node, name in enumerate(hosts)
        }
        self.processes = {name: self._start(*words) for name, words in self._words.items()}
        if by_ssh is not None:
            self.processes[by_ssh].stdin.write(b'{"ZERO_SECRET": "of the test"}\n')
        self.out: dict[str, str] = {}
        self.err: dict[str, str] = {}

    def _start(self, *words: str) -> Launched:
        return self._launchers.start("run", *words, environment=self._environment, stdin=True)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.close()

    def again(self, name: str) -> None:
        """Start the launcher of a host anew, behind one that was killed."""
        self.processes[name].close()
        self.processes[name] = self._start(*self._words[name])

    def cut(self, name: str) -> None:
        """Close the stdin of a launcher."""
        self.processes[name].stdin.close()

    def wait(self) -> list[int]:
        """The exit statuses, once all have ended; what they wrote is in `out` and `err` then. Closes their stdin."""
        statuses = []
        for name, process in self.processes.items():
            self.out[name], self.err[name] = process.communicate(_PATIENCE)
            statuses.append(process.returncode)
        return statuses

    def said(self) -> list[str]:
        """What the launchers themselves said, of all hosts, but for what they decided at the start."""
        lines = [line for text in self.err.values() for line in text.splitlines()]
        return [line for line in lines if line.startswith("zero run: ") and "OMP_NUM_THREADS" not in line]

    def files(self, pattern: str, count: int) -> list[Path]:
        """The files of the folder that match `pattern`, once there are `count`."""
        assert eventually(lambda: len(list(self.folder.glob(pattern))) >= count), f"no {count} files {pattern}"
        return sorted(self.folder.glob(pattern))


def environment(**extra: str) -> dict[str, str]:
    """This process's, without what a launcher sets, where this tree and its tests are imported from, and `extra`."""
    kept = {key: value for key, value in os.environ.items() if key not in OURS and key != "LOGLEVEL"}
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    # No GPU, so that the tests mean the same on every machine.
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **extra}


def eventually(holds: Callable[[], object], seconds: float = _PATIENCE) -> object:
    """Whether `holds` comes to be so."""
    end = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def alive(pid: int) -> bool:
    """Whether there is a process `pid`, other than as an entry that nobody has read."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def pids(files: list[Path]) -> Iterator[int]:
    """The numbers that `files` have in them."""
    for file in files:
        yield from map(int, file.read_text().split())
