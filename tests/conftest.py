"""Shared by all tests: one thread for torch, and the pool of ranks.

    make test                                       everything but the tests marked `long`
    make test-long                                  those that are
    .venv/bin/python -m pytest tests/core           a topic, or a file, in one process; without the long ones
    .venv/bin/python -m pytest -m "" tests/core     with them

`make test` has one case for each promise; further cases, and what takes minutes, are marked `long`.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device import feed, why_not_here
from hypothesis import HealthCheck, settings
from launching import Launchers
from nodes import LAUNCHERS
from ranks import Pool
from real_nodes import Nodes, reason
from slurm import Slurm
from slurm import reason as no_slurm

pytest_plugins = ["turns"]
STDERR = pytest.StashKey[int]()
# Skips that begin so are said again at the end of the run.
UNTESTED = "real nodes: not tested here, because "
UNTESTED_SLURM = "Slurm: not tested here, because "

# What torch takes at its word: on a CPU without them its kernels end the process.
FLAGS = {"avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"}}

QUICK = {"kernels", "plan", "config"}  # folders
TOGETHER = {"huggingface"}  # too

SECONDS = 600.0  # that no single test takes, however busy the machine is; the longest takes one of these minutes
LONG_SECONDS = 3600.0  # the same of a test that is marked `long`
LATE = 600.0  # the same of what has begun shortly before the run's time was over (turns.py)

os.environ["HF_HUB_OFFLINE"] = "1"  # models are made, none is loaded from elsewhere

# A shell of Slurm, or one that another launcher has started, would have engines of this process join its job.
for name in filter(LAUNCHERS.match, [*os.environ]):
    del os.environ[name]

# As in the ranks: on a busy machine, more threads than one stall thousands of small operations.
torch.set_num_threads(1)


# Nor does a property depend on how fast examples of it are drawn and tried.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


# A run in the background of a shell, or under nohup, would have all programs that tests start ignore these.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def skip_all_without(asked: str, cpuinfo: str) -> None:
    """End the run well where `asked`, as ATEN_CPU_CAPABILITY says it, is more than the CPU of /proc/cpuinfo has."""
    has = re.search(r"^flags\s*:(.*)", cpuinfo, re.MULTILINE)
    if missing := FLAGS.get(asked, set()) - set(has[1].split() if has else ()):
        why = f"ATEN_CPU_CAPABILITY={asked}, and this CPU lacks {', '.join(sorted(missing))}"
        pytest.exit(f"all tests are skipped: {why}", returncode=0)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # as it is before pytest puts files in its place
    feed()
    told = Path("/proc/cpuinfo")
    skip_all_without(os.environ.get("ATEN_CPU_CAPABILITY", ""), told.read_text() if told.exists() else "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take little time come last, so that two processes end together; on a GPU some tests are left out."""
    items.sort(key=lambda item: item.path.parent.name in QUICK)
    for item in items:
        if why := why_not_here(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deals files to processes, but a folder of `TOGETHER` to one: its ranks import libraries for seconds each."""
    from xdist.scheduler.loadfile import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            folder = file.rpartition("/")[0]
            return folder if folder.rpartition("/")[2] in TOGETHER else file

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that hangs ends its process, with a traceback of each thread; pytest-xdist then names the test."""
    if not item.config.getoption("usepdb"):
        seconds = LONG_SECONDS if item.get_closest_marker("long") else SECONDS
        if until := item.config.getoption("until"):
            seconds = max(60.0, min(seconds, until + LATE - time.time()))
        faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is marked `ranks` runs on so many ranks, or on `world` of them, each of which must pass.

    In a file that is marked so, one that takes the pool runs functions on ranks itself, and `ranks(0)` is none.
    """
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None or marker.args == (0,) or {"pool", "door"} & set(pyfuncitem.fixturenames):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.function).parameters}
    world = marker.args[0] if marker.args else arguments["world"]
    pyfuncitem._request.getfixturevalue("pool").run(world, pyfuncitem.function, **arguments)
    return True


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to four gloo ranks for the whole session."""
    made = Pool(4)
    yield made
    made.close()


@pytest.fixture(scope="session")
def door() -> Iterator[Pool]:
    """Two ranks whose libraries find zero as deepspeed; those of `pool` must not."""
    for library in ("accelerate", "datasets", "peft", "trl"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    made = Pool(2)
    yield made
    made.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model of Transformers."""
    from huggingface_cases import make_model

    folder = tmp_path_factory.mktemp("tiny")
    make_model(folder)
    return folder


@pytest.fixture(scope="session")
def launchers() -> Iterator[Launchers]:
    """What starts `zero run` without waiting for torch."""
    made = Launchers()
    yield made
    made.close()


@pytest.fixture(scope="module")
def real_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Three hosts for a file of tests; a skip with the reason where there can be none."""
    if why := reason():
        pytest.skip(UNTESTED + why)
    with Nodes(tmp_path_factory.mktemp("nodes")) as made:
        yield made


@pytest.fixture
def hosts(real_nodes: Nodes) -> Iterator[Nodes]:
    """Those hosts, connected, with nothing running on them, whatever the test before has left."""
    yield real_nodes
    real_nodes.clear()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster of Slurm for a file of tests; a skip with the reason where there can be none."""
    if why := no_slurm():
        pytest.skip(UNTESTED_SLURM + why)
    with Slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say once, at the end, what torch computed with, and why nothing ran over real nodes or under Slurm."""
    asked = os.environ.get("ATEN_CPU_CAPABILITY")
    how = f"ATEN_CPU_CAPABILITY={asked}" if asked else "ATEN_CPU_CAPABILITY is not set"
    terminalreporter.write_line(f"torch's CPU kernels: {torch.backends.cpu.get_cpu_capability()} ({how})")
    said = {str(report.longrepr[-1]).removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())}
    for line in sorted(said):
        if line.startswith((UNTESTED, UNTESTED_SLURM)):
            terminalreporter.write_line(line, yellow=True)
