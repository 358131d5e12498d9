"""The logger of the package, messages that only rank 0 logs, and counts in words.

The rank is read from the environment (`RANK`), so that this works before torch is imported; and so is the level
(`ZERO_LOG`, which `zero run -q` sets), which goes before the `log_level` of the JSON.
"""

import contextlib
import functools
import logging
import os
import sys

NAME = "zero"
VARIABLE = "ZERO_LOG"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class _Console(logging.StreamHandler):
    """Writes to stderr as long as the program has set up no logging of its own.

    Once the root logger has a handler, the record reaches that one, and a copy from here would be noise.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record to the stderr of this moment (a test may have replaced it), above a bar of tqdm's."""
        if logging.getLogger().handlers:
            return
        self.stream = sys.stderr
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        with contextlib.nullcontext() if bars is None else bars.external_write_mode(self.stream):
            super().emit(record)


class _Format(logging.Formatter):
    """`[zero] text`, with the level in front of anything above INFO."""

    def format(self, record: logging.LogRecord) -> str:
        """The text of one record."""
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        return f"[{NAME}] {level}{record.getMessage()}"


def _configured() -> logging.Logger:
    package = logging.getLogger(NAME)
    if package.level == logging.NOTSET:
        package.setLevel(LEVELS.get(_asked(), logging.INFO))
    if not any(isinstance(handler, _Console) for handler in package.handlers):
        handler = _Console()
        handler.setFormatter(_Format())
        package.addHandler(handler)
    if _asked() and _asked() not in LEVELS and rank() == 0:
        package.warning("%s: got %r, wanted one of %s", VARIABLE, _asked(), ", ".join(LEVELS))
    return package


def _asked() -> str:
    return os.environ.get(VARIABLE, "").lower()


def rank() -> int:
    """The rank of this process as the launcher gave it; 0 where there is no launcher."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


logger = _configured()


def rank_zero(level: int, message: str, *args: object) -> None:
    """Log `message % args` on rank 0; the other ranks stay silent."""
    if rank() == 0:
        logger.log(level, message, *args)


@functools.cache
def _said(level: int, message: str) -> None:
    rank_zero(level, "%s", message)


def log_once(level: int, message: str) -> None:
    """Log `message` on rank 0, once in the life of this process however often it is asked for."""
    _said(level, message)


def counted(count: int, one: str) -> str:
    """A count with its noun: "1 rank", "2,000 steps"."""
    return f"{count:,} {one}{'s' * (count != 1)}"


def set_level(name: str) -> None:
    """Set the level of the package's logger, debug, info, warning, error or critical, unless ZERO_LOG says one."""
    if name.lower() not in LEVELS:
        raise ValueError(f"log_level: got {name!r}, wanted one of {', '.join(LEVELS)}")
    if _asked() not in LEVELS:
        logger.setLevel(LEVELS[name.lower()])
