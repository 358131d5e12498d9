"""What a host says of itself before a job starts there: `python -m zero.launch.remote.probe JSON` prints JSON.

It imports no torch, so that many hosts answer within a second or two.
"""

from __future__ import annotations

import json
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from zero.launch.args.run import check_script
from zero.launch.hosts import addresses
from zero.launch.messages import LaunchError

MARK = "zero_probe"  # so that nothing that a login prints is taken for the answer


def versions() -> dict[str, str]:
    """What has to be the same on all hosts."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "(not installed)"
    zero = sys.modules["zero"].__version__  # of the package that this module is in
    return {"Python": platform.python_version(), "zero": zero, "torch": torch}


def look(script: str, module: bool, no_python: bool, address: str | None, port: int | None) -> dict[str, Any]:
    """The versions here and what would keep a job from starting; `port` is for the first host only."""
    problems = []
    try:
        check_script(script, module, no_python)
    except LaunchError as error:
        problems.append(str(error))
    if address is not None:
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            problems.append(f"does not know the first host as {address!r} ({error.strerror}); --master_addr names it")
    if port is not None and (why := addresses.port_problem(port)):
        problems.append(f"cannot listen on port {port}, where the hosts meet ({why}); --master_port names another")
    return {"versions": versions(), "problems": problems}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps({MARK: look(**json.loads(sys.argv[1]))}) + "\n")
