"""The process of a rank that stays for several runs of a script: it forks a process of its own for each.

A program, started by its path in front of the script's: what takes the time, importing torch and zero, is done once. A
run begins without threads, a CUDA context or a process group, and leaves nothing to the next one.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import os
import signal
import sys
import types
from multiprocessing.connection import Client, Connection

VARIABLE = "ZERO_SCRIPT_RUNS"
"""The socket of whoever asks for runs."""
_POLL = 0.01  # seconds between two looks at what is running


def main() -> None:
    """Import what runs share, then run the script, in a process of its own each time that it is asked for."""
    del sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))  # as Python does for a script
    _import()
    _serve(Client(os.environ.pop(VARIABLE)))
    _run(sys.argv[0])


def _import() -> None:
    gc.disable()  # nothing of it is garbage
    import torch._dynamo  # noqa: F401 - as the first optimizer of torch's does

    from zero.engine import initialize  # noqa: F401 - which imports the engine
    from zero.engine.check import checked_run  # noqa: F401

    gc.freeze()  # pages that no run writes to need no copy
    gc.enable()


def _serve(connection: Connection) -> None:
    """Fork for each run that is asked for, and tell its exit status. Returns in the process of a run only."""
    connection.send((int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            os._exit(0)
        if isinstance(asked, int):
            continue  # a signal for a run that has ended meanwhile
        if not (pid := os.fork()):
            connection.close()
            return _begin(*asked)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here as well as there: a signal may come before it does it
        connection.send(_status(pid, connection))


def _begin(variables: dict[str, str], output: str) -> None:
    """Be the process of a run: with variables, an output file and random numbers of its own."""
    os.setpgid(0, 0)
    handle = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    os.environ.update(variables)
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # as Python's own generator does after a fork: that a script sets no seed has to show


def _status(pid: int, connection: Connection) -> int:
    """The exit status of a run, as a shell says it. What comes meanwhile is a signal for it; it does not outlive us."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if connection.poll(_POLL):
            try:
                number = connection.recv()
            except EOFError:
                number = signal.SIGKILL
            os.killpg(pid, number)
    os.killpg(pid, signal.SIGKILL)  # what it has left, such as the workers of a loader
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return 128 - code if code < 0 else code


def _run(script: str) -> None:
    """Run the script as `python script` does."""
    module = types.ModuleType("__main__")
    vars(module).update(__file__=script, __builtins__=builtins)
    sys.modules["__main__"] = module
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    exec(code, vars(module))


if __name__ == "__main__":
    main()
