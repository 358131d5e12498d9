"""What is printed of the exception that ends a rank: once where all end alike, and without the frames of libraries.

`zero run` and torchrun give each rank a file for its error, beside those of the other ranks of its host. There a rank
sees who else has ended, and of what; no collective and no store is needed, so that errors before the process group
count, too.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import linecache
import logging
import os
import re
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from zero.log import logger

VARIABLE = "TORCHELASTIC_ERROR_FILE"
_PATIENCE = 2.0  # seconds for other ranks to end of the same
_POLL = 0.02
_PYTHONS = ("sys", "torch.distributed.distributed_c10d")  # modules of hooks that only print the traceback
_TOLD = re.compile(r"(.*: )?ranks? [\d, -]+: ", re.DOTALL)  # what goes in front when ranks tell others of an error
# Of these, where zero does not raise them by a statement, its frames are wanted: they may be an error in zero.
_UNFORESEEN = (AttributeError, TypeError, LookupError, NameError, AssertionError, ArithmeticError)


class Parted(RuntimeError):
    """This rank has given up waiting for others; the message says for which, and why."""


class _Exit(SystemExit):
    """What `sys.exit("text")` raises in a rank: where nothing catches it, Python asks for its `code`, to print that."""

    @property
    def code(self) -> Any:  # type: ignore[override]
        """The text, and once that is printed the exit status."""
        try:
            sys._getframe(1)
        except ValueError:  # it is Python that asks, and no code
            _end(str(self.args[0]), f"{self.args[0]}\n")
            return 1
        return self.args[0]


def install() -> None:
    """Print what ends this process as said above: an exception, `sys.exit("text")`, an error of a command line.

    A hook of the script's own stays.
    """
    if VARIABLE in os.environ and getattr(sys.excepthook, "__module__", "") in _PYTHONS:
        sys.excepthook = _say
        sys.exit = _exit
        argparse.ArgumentParser.error = _refuse


def _exit(status: Any = None) -> NoReturn:
    raise (_Exit if isinstance(status, str) else SystemExit)(status)


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    text = f"{parser.format_usage()}{parser.prog}: error: {message}\n"
    _end(text, text)
    parser.exit(2)


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    try:
        text = _parted(error, trace) if isinstance(error, Parted) else shown(error)
        _end(f"{kind.__name__}: {error}", text, isinstance(error, Parted))
    except Exception:  # whatever keeps us from comparing: the error itself must not be lost
        _print(_named("".join(traceback.format_exception(error))))


def _end(message: str, text: str, parted: bool = False) -> None:
    """Print `text`, of which this rank ends, where no other rank of this host has said the same."""
    try:
        own = Path(os.environ[VARIABLE])
        _record(own, message, text, alike=False)
        others = _others(own, parted)
        alike = 0 < len(others) == _ranks_here() - 1 and all(_alike(message, other) for other in others)
        with (own.parents[1] / "said").open("a+b") as said:
            fcntl.flock(said, fcntl.LOCK_EX)  # until it is printed: then other ranks may end, and the launcher end us
            said.seek(0)
            if not any(_alike(message, json.loads(line)) for line in said):
                _print(text if alike or os.environ.get("WORLD_SIZE", "1") == "1" else _named(text))
                said.write(json.dumps(message).encode() + b"\n")
                said.flush()
            _record(own, message, text, alike)
    except Exception:  # whatever keeps us from comparing: the error itself must not be lost
        _print(_named(text))


def shown(error: BaseException) -> str:
    """The traceback of `error` without frames of zero and torch; with them where they are wanted, and at level debug.

    An error that zero has raised itself says all there is to say: of what led to it nothing is shown either.
    """
    told = traceback.TracebackException.from_exception(error)
    if not logger.isEnabledFor(logging.DEBUG):
        _strip(told, error)
    text = "".join(told.format())
    module, name = type(error).__module__, type(error).__qualname__
    return text.replace(f"{module}.{name}", name) if module.partition(".")[0] == "zero" else text


def _strip(told: traceback.TracebackException | None, error: BaseException | None) -> None:
    if told is None or error is None or not told.stack:
        return
    last = told.stack[-1]
    raised = _inside(last, "zero") and linecache.getline(last.filename, last.lineno or 0).lstrip().startswith("raise")
    kept = [frame for frame in told.stack if not _inside(frame, "zero", "torch")]
    through = any(_inside(frame, "zero") for frame in told.stack[told.stack.index(kept[-1]) if kept else 0 :])
    if not kept or (through and not raised and isinstance(error, _UNFORESEEN)):
        return
    told.stack = traceback.StackSummary.from_list(kept)
    if raised:
        told.__cause__ = told.__context__ = None
    _strip(told.__cause__, error.__cause__)
    _strip(told.__context__, error.__context__)


def _inside(frame: traceback.FrameSummary, *packages: str) -> bool:
    """Whether it is of one of these packages, or of what Python starts programs with."""
    folders = tuple(str(Path(sys.modules[name].__file__).parent) + os.sep for name in packages if name in sys.modules)
    return frame.filename.startswith((*folders, "<frozen "))


def _parted(error: BaseException, trace: TracebackType | None) -> str:
    """Why this rank does not wait any more, for what it has waited, and where in the script: a line each."""
    frames = [frame for frame in traceback.extract_tb(trace) if not _inside(frame, "zero", "torch")]
    where = f"\n  at {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return "\n  ".join(str(error).split("; ")) + where + "\n"


def _others(own: Path, parted: bool) -> list[str]:
    """The errors that other ranks of this host end with, in the time that they get for it.

    `parted`: what this one ends of is another's error, which is to be printed first.
    """
    end = time.monotonic() + _PATIENCE
    while True:
        files = [file for file in own.parents[1].glob(f"*/{own.name}") if file != own]
        said = own.parents[1] / "said"
        if time.monotonic() > end or (len(files) >= _ranks_here() - 1 and not (parted and not said.exists())):
            return [json.loads(file.read_text())["message"]["message"] for file in files]
        time.sleep(_POLL)


def _alike(one: str, other: str) -> bool:
    """Whether they are one error: the same, or one of them is what the other rank was told of it."""
    short, long = sorted((one, other), key=len)
    text = short.partition(": ")[2]  # it may have another type there
    return one == other or (bool(text) and long.endswith(text) and bool(_TOLD.fullmatch(long.removesuffix(text))))


def _record(own: Path, message: str, text: str, alike: bool) -> None:
    """Write what torch.distributed.elastic's `record` does, and whether all ranks of this host end of it."""
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    beside = own.with_suffix(".partial")
    beside.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}, "alike": alike}))
    beside.replace(own)


def _print(text: str) -> None:
    """In one write, and not through the hook that torch wraps around ours to name the rank of every line."""
    sys.__stderr__.write(text)
    sys.__stderr__.flush()


def _named(text: str) -> str:
    return "".join(f"[rank{os.environ.get('RANK', '0')}]: {line}" for line in text.splitlines(keepends=True))


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
