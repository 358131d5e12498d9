"""The promise: who writes into the ranks' store without the job's secret is named, and ends nothing.

A job of `zero run` on one machine listens for this machine only, and its secret is where only its ranks read it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from launching import Launchers
from nodes import environment

PROGRAM = """
import os, sys, threading, time
from datetime import timedelta
from pathlib import Path
import psutil, torch
import torch.distributed as dist
import zero
from models import batch, config, make_net
from zero.watchdog.hang_report import Phase, Record

rank, folder, KEYS = int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2]
engine, *_ = zero.initialize(model=make_net(), config=config(3, 2))

def stranger():
    # Somebody who has found the port, and knows all but the secret.
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore("default_pg/0/", dist.TCPStore(*where, None, False, timedelta(seconds=30)))

def write():
    store = stranger()
    found = [store.get(f"{KEYS}status/{rank}") for rank in range(2)]
    forged = Record(1, beat=1 << 62, phase=Phase.ENDED, error="forged", fault=1, gave_up=True).to_json().encode()
    # No signature, one of another value, a record of another place, and an old one.
    values = [forged, b"\\xff", found[0][:64] + forged, *found]
    while not ended.wait(0.02):
        store.set(f"{KEYS}status/1", values[0])
        values.append(values.pop(0))

ended = threading.Event()
if rank == 0:
    writer = threading.Thread(target=write)
    writer.start()
for step in range(3):
    if step == 1 and rank == 1:
        time.sleep(4)  # the other waits, and looks at the records
    engine.backward(engine(*batch(step, 2)))
    engine.step()
if rank == 0:
    ended.set()
    writer.join()
    store = stranger()
    for number in range(1, 9):
        store.set(f"{KEYS}saves/{number}/1", b'1 1 {"value":"forged"}')
else:
    time.sleep(1)  # so that what is forged is seen first
engine.save_checkpoint(folder / "saved")

secret = os.environ["ZERO_SECRET"].encode()
lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
assert len(secret) == 64 and len(lines) > 3 and not any(secret in line for line in lines)
(folder / f"{rank}.secret").write_bytes(secret)
listening = {one.laddr.ip for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN}
sys.stdout.write(f"trained {engine.global_steps}, listening at {sorted(listening)}\\n")
engine.destroy()
"""


@pytest.mark.long
def test_what_is_forged_is_named_and_ends_nothing(launchers: Launchers, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    variables = environment()
    variables.pop("GLOO_SOCKET_IFNAME", None)
    keys = f"zero/{hashlib.blake2b(b'[0, 1]', digest_size=8).hexdigest()}/1/"  # of the first engine of these ranks
    words = ["--num_gpus", "2", "--log_dir", str(tmp_path / "logs"), str(program), str(tmp_path), keys]
    ended = launchers.run("run", *words, environment=variables)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert said.count("trained 3, listening at ['127.0.0.1']") == 2, said
    for key in (f"{keys}status/1", f"{keys}saves/1/1"):
        named = f"rank 0 leaves out '{key}' in the store of the process group, which somebody else has written"
        assert said.count(named) == 1, said
    assert f"{keys}status/0'" not in said
    secrets = {(tmp_path / f"{rank}.secret").read_text() for rank in range(2)}
    written = [path.read_text() for path in (tmp_path / "logs").rglob("*.log")]
    assert len(secrets) == 1 and len(written) >= 4
    assert not any(secrets.copy().pop() in text for text in [said, *written])
