"""Lines of the launcher's own."""

import sys


def say(text: str) -> None:
    """One line of the launcher's own, on stderr."""
    # One write, as several launchers may share a terminal.
    sys.stderr.write(f"zero run: {text}\n")
    sys.stderr.flush()
