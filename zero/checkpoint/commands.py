"""What `zero consolidate`, `zero verify` and `zero import-deepspeed` do and print."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zero.checkpoint import folder as folders
from zero.checkpoint.consolidate import consolidate
from zero.checkpoint.model_files import size_of
from zero.checkpoint.verify import rubbish, verify


def run(given: argparse.Namespace) -> int:
    """Do what the parsed arguments say; the exit status is 1 for what is wrong with files, 2 with arguments."""
    what = {"consolidate": _consolidate, "verify": _verify, "import-deepspeed": _import}[given.command]
    try:
        return what(given)
    except BrokenPipeError:  # of the standard output
        raise
    except (OSError, ValueError) as error:
        print(f"zero {given.command}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _refuse(given: argparse.Namespace, problem: str) -> int:
    print(f"zero {given.command}: error: {problem}", file=sys.stderr)
    return 2


def _consolidate(given: argparse.Namespace) -> int:
    out = Path(given.out)
    if out.suffix == ".safetensors" and not given.hf and given.max_shard_size is not None:
        return _refuse(given, f"--max-shard-size is for a folder, and '{out}' is one file; give a folder, or --hf")
    try:
        limit = None if given.max_shard_size is None else size_of(given.max_shard_size, "--max-shard-size")
        folder = chosen(Path(given.folder), given.tag)
    except ValueError as error:
        return _refuse(given, str(error))
    with bar("consolidating") as progress:
        files = consolidate(folder, out, given.dtype, limit, given.hf, progress)
    for path in files:
        print(f"{path}: {path.stat().st_size} bytes")
    index = folders.load_index(folder)
    if index.excluded:
        print(f"not in it, as frozen parameters were left out of the checkpoint: {', '.join(index.excluded)}")
    if index.stripped and given.dtype == "fp32":
        print("the values are those that the model computed with, as the masters were deleted (keep_optimizer)")
    return 0


def _verify(given: argparse.Namespace) -> int:
    root = Path(given.folder)
    try:
        if not given.all:
            found = [chosen(root, given.tag)]
        elif given.tag is not None:
            return _refuse(given, "--all is of all tags; leave out --tag")
        else:
            found = [root / tag for tag in folders.tags(root)]
            if not found:
                return _refuse(given, f"{root} has no whole checkpoint")
    except ValueError as error:
        return _refuse(given, str(error))
    good = [_verify_one(folder) for folder in found]
    return 0 if all(good) else 1


def _verify_one(folder: Path) -> bool:
    begin = time.perf_counter()
    with bar(f"verifying {folder.name}") as progress:
        problems = verify(folder, progress)
    seconds = time.perf_counter() - begin
    for name in rubbish(folder):
        print(f"{folder / name}: belongs to no checkpoint")
    for problem in problems:
        print(f"{folder}: {problem}")
    if problems:
        return False
    index = folders.load_index(folder)
    nbytes = sum(index.files.values())
    step = index.shared.get("global_steps", "unknown") if isinstance(index.shared, dict) else "unknown"
    print(
        f"{folder}: whole; tag {index.tag}, step {step}, world size {index.world_size}, {nbytes} bytes, "
        f"{nbytes / seconds / 1e9:.2f} GB/s"
    )
    return True


def _import(given: argparse.Namespace) -> int:
    from zero.checkpoint.import_deepspeed import find, import_deepspeed

    try:
        folder = find(Path(given.folder), given.tag)
    except ValueError as error:
        return _refuse(given, str(error))
    with bar("importing") as progress:
        made, left = import_deepspeed(folder, Path(given.out), progress)
    for text in left:
        print(f"not taken: {text}")
    print(f"{made}: engine.load_checkpoint('{given.out}') takes it at any world size and stage")
    return 0


def chosen(given: Path, tag: str | None = None) -> Path:
    """The folder of one checkpoint: `given` itself, or the one below it that `tag` or `latest` names.

    Raises ValueError where that says nothing.
    """
    if not given.is_dir():
        raise ValueError(f"there is no folder {given}")
    if tag is not None:
        if not (given / tag).is_dir():
            raise ValueError(f"{given} has no checkpoint '{tag}'; it has {_there(given)}")
        return given / tag
    if (given / folders.INDEX).exists():
        return given
    named = folders.latest(given)
    if named is None:
        raise ValueError(
            f"{given} has neither {folders.INDEX}, as a checkpoint, nor {folders.LATEST}, as the folder of a run: "
            f"name a checkpoint with --tag; there is {_there(given)}"
        )
    if not (given / named).is_dir():
        raise ValueError(f"{given / folders.LATEST} names '{named}', which is not there; there is {_there(given)}")
    return given / named


def _there(given: Path) -> str:
    return ", ".join(f"'{tag}'" for tag in folders.tags(given)) or "no whole checkpoint"


@contextmanager
def bar(about: str) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """Gives a function that is told a number of bytes, and returns what is told how many more of them are done.

    Nothing is shown where the standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield lambda total: _nothing
        return
    from tqdm import tqdm

    with tqdm(desc=about, unit="B", unit_scale=True, leave=False) as shown:

        def start(total: int) -> Callable[[int], None]:
            shown.reset(total)
            return shown.update

        yield start


def _nothing(nbytes: int) -> None:
    """Shows nothing."""
