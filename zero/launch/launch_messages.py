"""The launcher's messages: errors before anything starts, and lines of its own on stderr."""

import os
import sys
from pathlib import Path


class LaunchError(ValueError):
    """What was asked for cannot be started; nothing has been."""


def raise_all(problems: list[str]) -> None:
    """Raise one `LaunchError` with all `problems`, a line each; nothing when there are none."""
    if problems:
        raise LaunchError("\n  ".join(problems))


def listed(words: list[str] | tuple[str, ...], most: int = 16) -> str:
    """`words` with commas between them, and the number of those left out when they are many."""
    left_out = len(words) - most
    return ", ".join(words[:most]) + (f" and {left_out} more" if left_out > 0 else "")


def text_of(path: str | Path) -> str:
    """The text of a file; `LaunchError` where it cannot be read or is none."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise LaunchError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LaunchError(f"{path}: is not text (byte {error.start} is not UTF-8)") from error


def check_writable(path: str, flag: str) -> None:
    """Raise `LaunchError` where no file can be written, before the work that it is for; a new one is deleted."""
    new = not os.path.lexists(path)
    try:
        with open(path, "ab"):
            pass
        if new:
            os.unlink(path)
    except OSError as error:
        raise LaunchError(f"{flag}: cannot write {path!r}: {error.strerror}") from error


def say(text: str) -> None:
    """One line of the launcher's own, on stderr."""
    # One write, as several launchers may share a terminal.
    sys.stderr.write(f"zero run: {text}\n")
    sys.stderr.flush()
