"""Run Python with `deepspeed` being zero: `python -m zero.as_deepspeed script.py ...`, or `--shell` for what to set."""

import os
import shlex
import sys

from zero.launch.as_deepspeed import variables

_USAGE = "usage: python -m zero.as_deepspeed script.py ... | -m module ... | --shell"


def main(words: list[str]) -> int:
    """Print what a shell is to set, or become Python with these words. The package has opened the door already."""
    if words == ["--shell"]:
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables(os.environ).items()))
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    sys.stderr.flush()
    return os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
