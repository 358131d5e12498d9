"""The first program of a rank: it binds the process to its cores, has it end with its launcher, and becomes the script.

A file that is run by its path, with nothing imported but what Python has loaded anyway, so that it costs little.
"""

import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def main(ends: str, cores: str, *program: str) -> None:
    """Become `program`.

    cores: 0,1;2,3 for two local ranks, or empty. ends: the process id of the launcher, to end with it, or empty.
    """
    if cores:
        mine = cores.split(";")[int(os.environ["LOCAL_RANK"])]
        os.sched_setaffinity(0, [int(core) for core in mine.split(",")])
    if ends and sys.platform == "linux":
        import ctypes

        # A launcher that is killed cannot end its ranks; they would go on on this host while the others start again.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != int(ends):  # it was killed before that
            os.kill(os.getpid(), _SIGKILL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.stderr.write(f"zero run: cannot start {program[0]!r}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(*sys.argv[1:])
