"""Bytes of text files: split by file, cut into windows, and a bigram model as the mark to beat."""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

VALIDATION_SHARE = 0.1
"""About this share of the files goes to validation."""

PIECE = 1 << 20


class Split(NamedTuple):
    """Two texts as flat uint8 tensors, and the relative paths of the files in each."""

    train: Tensor
    validation: Tensor
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]


def is_validation(relative: str) -> bool:
    """Say whether a file is for validation: a hash of its path decides, so a new file moves no other."""
    return _place(relative) < VALIDATION_SHARE


def _place(relative: str) -> float:
    """A number in [0, 1) that the path decides."""
    return int.from_bytes(hashlib.sha256(relative.encode()).digest()[:8], "big") / 2**64


def _is_skipped(folder: str) -> bool:
    # Installed packages differ from machine to machine, and tests are large tables of odd strings.
    installed = folder in ("site-packages", "dist-packages")
    return installed or folder.split("_")[-1] in ("test", "tests")


def standard_library() -> Iterator[tuple[str, Path]]:
    """Yield (relative path, path) of this Python's standard library without tests, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    yield from _walk(root, lambda name: name.endswith(".py"), _is_skipped)


def folder_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (relative path, path) of all files under a folder that are not hidden, sorted by path."""
    if not root.is_dir():
        raise ValueError(f"--data: wanted a folder of text files, got {root}")
    yield from _walk(root, lambda name: not name.startswith("."), lambda folder: folder.startswith("."))


def _walk(
    root: Path, takes_file: Callable[[str], bool], skips_folder: Callable[[str], bool]
) -> Iterator[tuple[str, Path]]:
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if not skips_folder(name)]
        found += [Path(folder, name) for name in names if takes_file(name)]
    relative = {path.relative_to(root).as_posix(): path for path in found}
    yield from sorted(relative.items())


def read_split(data: Path | None = None) -> Split:
    """Read a folder of text, by default the standard library's sources, into a train and a validation part.

    A file is in one part as a whole, so nothing that was trained on is measured; where that would leave a part empty,
    as with a few files, the nearest file goes there, and of a single file the last tenth is for validation. Files that
    are no UTF-8 are left out.
    """
    files = standard_library() if data is None else folder_files(Path(data))
    contents = {relative: content for relative, path in files if _is_text(content := path.read_bytes())}
    if not contents:
        raise ValueError(f"{data or 'standard library'}: there is no file with UTF-8 text")
    validation = {name for name in contents if is_validation(name)}
    if not validation:
        validation = {min(contents, key=_place)}
    elif len(validation) == len(contents):
        validation.discard(max(contents, key=_place))
    names = [tuple(name for name in contents if (name in validation) is where) for where in (False, True)]
    texts = [b"".join(contents[name] for name in part) for part in names]
    if len(contents) == 1:
        ((name, content),) = contents.items()
        cut = math.ceil((1 - VALIDATION_SHARE) * len(content))
        names, texts = [(name,), (name,)], [content[:cut], content[cut:]]
    if not all(texts):
        raise ValueError(f"{data}: a single file of {len(content)} bytes is too short to be cut in two")
    train, measured = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    return Split(train, measured, *names)


def _is_text(content: bytes) -> bool:
    try:
        return bool(content.decode())
    except UnicodeDecodeError:
        return False


class Windows(Dataset):
    """`count` windows of `length` bytes of a flat uint8 text; an item is (bytes, the bytes that follow each).

    Both are int64 of shape (length,). Where window i begins is drawn once from `seed`, so an item is the same
    on every rank and in every run; with `seed` None the windows are spread evenly.
    """

    def __init__(self, text: Tensor, length: int, count: int, seed: int | None = 0) -> None:
        room = text.numel() - length
        if room < 1:
            raise ValueError(f"a text of {text.numel()} bytes is too short for windows of {length} + 1 bytes")
        self.text = text
        self.length = length
        if seed is None:
            self.offsets = torch.arange(count) * room // count
        else:
            self.offsets = torch.randint(room, (count,), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return self.offsets.numel()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = int(self.offsets[index])
        window = self.text[start : start + self.length + 1].long()
        return window[:-1], window[1:]


def bigram_counts(text: Tensor) -> Tensor:
    """Return how often byte b follows byte a in a flat uint8 text: int64 of shape (256, 256)."""
    counts = torch.zeros(256 * 256, dtype=torch.int64)
    # In pieces, because the int64 copies would take sixteen times the memory of the text. They overlap by a byte.
    for begin in range(0, text.numel() - 1, PIECE):
        piece = text[begin : begin + PIECE + 1].long()
        counts += torch.bincount(piece[:-1] * 256 + piece[1:], minlength=256 * 256)
    return counts.view(256, 256)


def bigram_loss(counts: Tensor, previous: Tensor, following: Tensor) -> float:
    """Return the mean loss in nats per byte of a bigram model with add-one smoothing.

    `counts` is `bigram_counts` of the training text; the other two are integer tensors of one shape, byte by
    byte.
    """
    smoothed = counts.double() + 1
    log_probability = (smoothed / smoothed.sum(dim=1, keepdim=True)).log()
    return -log_probability[previous.long(), following.long()].mean().item()
