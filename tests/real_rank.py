"""A rank that needs no torch: it says where it runs, and waits to be told what to do; for the tests over real nodes.

    zero run --hostfile FILE real_rank.py FOLDER [stubborn]

In FOLDER it writes `started-ATTEMPT-RANK`: its host, LOCAL_RANK, LOCAL_WORLD_SIZE and WORLD_SIZE. It ends well when
there is a file `finish`, and with exit code 7 and a message when there is a file `fail-RANK`. stubborn: it has a child
in a session of its own, and neither of them ends when asked to.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 600  # seconds, so that nothing is left for long where a test goes wrong
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def main() -> int:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    if sys.argv[2:] == ["stubborn"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    said = " ".join([socket.gethostname(), *(os.environ[name] for name in names)])
    print(f"rank {rank} is on {said}", flush=True)
    new = folder / f"new-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}"
    new.write_text(said)
    new.rename(folder / new.name.replace("new", "started"))
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if (folder / "finish").exists():
            return 0
        if (folder / f"fail-{rank}").exists():
            print("before the end\nOhNo: the disk is on fire", file=sys.stderr, flush=True)
            return 7
        time.sleep(0.05)
    return 1


if __name__ == "__main__":
    sys.exit(main())
