"""What `zero consolidate`, `zero verify` and `zero import-deepspeed` do and print."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from zero.checkpoint import folder as folders

# What reads tensors imports torch, so each command looks at its arguments before it imports that.


def run(args: argparse.Namespace) -> int:
    """Do what the parsed arguments say; the exit status is 1 for what is wrong with files, 2 with arguments."""
    what = {"consolidate": _consolidate, "verify": _verify, "import-deepspeed": _import}[args.command]
    try:
        return what(args)
    except BrokenPipeError:  # of the standard output
        raise
    except (argparse.ArgumentError, OSError, ValueError) as error:
        print(f"zero {args.command}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, argparse.ArgumentError) else 1


def _refused(problem: object) -> argparse.ArgumentError:
    return argparse.ArgumentError(None, str(problem))


def _consolidate(args: argparse.Namespace) -> int:
    out, folder = Path(args.out), _chosen(args)
    from zero.checkpoint.model_files import consolidate, size_of

    if out.suffix == ".safetensors" and not args.hf and args.max_shard_size is not None:
        raise _refused(f"--max-shard-size is for a folder, and '{out}' is one file; give a folder, or --hf")
    try:
        limit = None if args.max_shard_size is None else size_of(args.max_shard_size, "--max-shard-size")
    except ValueError as error:
        raise _refused(error) from None
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
    if args.all and args.tag is not None:
        raise _refused("--all is of all tags; leave out --tag")
    checkpoints = [root / tag for tag in folders.tags(root)] if args.all else [_chosen(args)]
    if not checkpoints:
        raise _refused(f"{root} has no whole checkpoint")
    good = [_verify_one(folder) for folder in checkpoints]
    return 0 if all(good) else 1


def _verify_one(folder: Path) -> bool:
    from zero.checkpoint.verify import rubbish, verify

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
    folder = _chosen(args, "*_optim_states.pt")
    from zero.compat.import_deepspeed import import_deepspeed

    with bar("importing") as progress:
        target, left = import_deepspeed(folder, Path(args.out), progress)
    for text in left:
        print(f"not taken: {text}")
    print(f"{target}: engine.load_checkpoint('{args.out}') takes it at any world size and stage")
    return 0


def _chosen(args: argparse.Namespace, marker: str = folders.INDEX) -> Path:
    """The folder of one checkpoint, which has `marker` in it: DIR itself, or the one below it that is named."""
    root, tag, there = Path(args.folder), args.tag, "no whole checkpoint"
    if not os.path.isdir(root):
        raise _refused(f"there is no folder {root}")
    if tag is None and any(root.glob(marker)):
        return root
    if tags := folders.tags(root, marker):
        there = ", ".join(f"'{each}'" for each in tags)
    if tag is None and (tag := folders.latest(root)) is None:
        raise _refused(
            f"{root} has neither {marker}, as a checkpoint, nor {folders.LATEST}, as the folder of a run: "
            f"name a checkpoint with --tag; there is {there}"
        )
    if not os.path.isdir(root / tag):
        named = f", which {folders.LATEST} names" if args.tag is None else ""
        raise _refused(f"{root} has no checkpoint '{tag}'{named}; it has {there}")
    return root / tag


@contextmanager
def bar(about: str) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """Gives a function that is told a number of bytes, and returns what is told how many more of them are done.

    Nothing is shown where the standard error is no terminal.
    """
    with tqdm(desc=about, unit="B", unit_scale=True, leave=False, disable=None) as shown:

        def start(total: int) -> Callable[[int], None]:
            shown.reset(total)
            return shown.update

        yield start
