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


def run(args: argparse.Namespace) -> int:
    """Do what the parsed arguments say; the exit status is 1 for what is wrong with files, 2 with arguments."""
    what = {"consolidate": _consolidate, "verify": _verify, "import-deepspeed": _import}[args.command]
    try:
        return what(args)
    except BrokenPipeError:  # of the standard output
        raise
    except (OSError, ValueError) as error:
        print(f"zero {args.command}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _refuse(args: argparse.Namespace, problem: str) -> int:
    print(f"zero {args.command}: error: {problem}", file=sys.stderr)
    return 2


def _consolidate(args: argparse.Namespace) -> int:
    out = Path(args.out)
    if out.suffix == ".safetensors" and not args.hf and args.max_shard_size is not None:
        return _refuse(args, f"--max-shard-size is for a folder, and '{out}' is one file; give a folder, or --hf")
    try:
        limit = None if args.max_shard_size is None else size_of(args.max_shard_size, "--max-shard-size")
        folder = chosen(Path(args.folder), args.tag)
    except ValueError as error:
        return _refuse(args, str(error))
    with bar("consolidating") as progress:
        files = consolidate(folder, out, args.dtype, limit, args.hf, progress)
    for path in files:
        print(f"{path}: {path.stat().st_size} bytes")
    index = folders.load_index(folder)
    if index.excluded:
        print(f"not in it, as frozen parameters were left out of the checkpoint: {', '.join(index.excluded)}")
    if index.stripped and args.dtype == "fp32":
        print("the values are those that the model computed with, as the masters were deleted (keep_optimizer)")
    return 0


def _verify(args: argparse.Namespace) -> int:
    root = Path(args.folder)
    try:
        if not args.all:
            checkpoints = [chosen(root, args.tag)]
        elif args.tag is not None:
            return _refuse(args, "--all is of all tags; leave out --tag")
        else:
            checkpoints = [root / tag for tag in folders.tags(root)]
            if not checkpoints:
                return _refuse(args, f"{root} has no whole checkpoint")
    except ValueError as error:
        return _refuse(args, str(error))
    good = [_verify_one(folder) for folder in checkpoints]
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


def _import(args: argparse.Namespace) -> int:
    from zero.checkpoint.import_deepspeed import find, import_deepspeed

    try:
        folder = find(Path(args.folder), args.tag)
    except ValueError as error:
        return _refuse(args, str(error))
    with bar("importing") as progress:
        target, left = import_deepspeed(folder, Path(args.out), progress)
    for text in left:
        print(f"not taken: {text}")
    print(f"{target}: engine.load_checkpoint('{args.out}') takes it at any world size and stage")
    return 0


def chosen(root: Path, tag: str | None = None) -> Path:
    """The folder of one checkpoint: `root` itself, or the one below it that `tag` or `latest` names.

    Raises ValueError where that says nothing.
    """
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}")
    if tag is not None:
        if not (root / tag).is_dir():
            raise ValueError(f"{root} has no checkpoint '{tag}'; it has {_there(root)}")
        return root / tag
    if (root / folders.INDEX).exists():
        return root
    named = folders.latest(root)
    if named is None:
        raise ValueError(
            f"{root} has neither {folders.INDEX}, as a checkpoint, nor {folders.LATEST}, as the folder of a run: "
            f"name a checkpoint with --tag; there is {_there(root)}"
        )
    if not (root / named).is_dir():
        raise ValueError(f"{root / folders.LATEST} names '{named}', which is not there; there is {_there(root)}")
    return root / named


def _there(root: Path) -> str:
    return ", ".join(f"'{tag}'" for tag in folders.tags(root)) or "no whole checkpoint"


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
