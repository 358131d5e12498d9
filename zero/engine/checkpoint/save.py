"""Saving an engine: what must be right before anything is written, on one rank and among all, and the call."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint.folder import LATEST, check_folder
from zero.checkpoint.job import Job
from zero.checkpoint.retention import Retention
from zero.checkpoint.saver import Saver
from zero.checkpoint.store_barrier import StoreBarrier
from zero.config import Config
from zero.core.sharded_module import ShardedModule
from zero.engine.checkpoint.save_plan import SavePlan
from zero.log import logger
from zero.watchdog.hang_report import Phase, difference_text

SLACK = 1 << 16  # bytes of each rank's share that headers and the index may take
CHECKS = "the checks before a checkpoint is written"
FILES = "writing the part of a checkpoint that rests in files"


class TagValidation:
    """Takes the first rank's of what ranks name a save by; the others, with a time stamp in it, may name it otherwise.

    how: `checkpoint.tag_validation`: "warn" says it the first time that it is so; "fail" raises; "ignore" does neither.
    """

    def __init__(self, how: str) -> None:
        self._how = how
        self._told: set[str] = set()

    def first_of(self, texts: Sequence[str], what: str, ranks: Sequence[int], speaks: bool = True) -> str:
        """The first of `texts`, which are those of `ranks`; `what` it is and who `speaks` is for the message.

        Raises ValueError where they may not differ.
        """
        if self._how != "ignore" and what not in self._told and len(set(texts)) > 1:
            text = f"{what} is not the same on all ranks: {difference_text(texts, 'nothing', ranks)}"
            if self._how == "fail":
                raise ValueError(f"{text}; give all ranks one, as checkpoint.tag_validation 'Fail' wants it")
            self._told.add(what)
            if speaks:
                logger.warning("%s; that of rank %d is taken, now and later", text, ranks[0])
        return texts[0]


class CheckpointSaver:
    """Saves an engine, and knows of the save that runs beside its training loop."""

    def __init__(self, engine: Any, config: Config, sharded: ShardedModule, device: torch.device) -> None:
        section = config.zero.checkpoint
        self.saver = Saver(
            StoreBarrier(sharded.world.watchdog, config.zero.timeout),
            Retention(section.keep, section.keep_optimizer),
            section.asynchronous,
            device.type == "cuda",
        )
        self._engine = weakref.proxy(engine)  # which has us, and is let go of without the garbage collector
        self._sharded = sharded
        self._validation = TagValidation(config.checkpoint.tag_validation)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything that a run needs to go on to `save_dir`/`tag` (default: global_step<N>); on all ranks.

        Where ranks give other folders or tags, rank 0's are taken, as `checkpoint.tag_validation` has it.
        Returns True when the checkpoint is whole; with `zero.checkpoint.async` when it is copied to host memory, from
        where it is written beside the training loop, while what rests in files is written during the call.
        `save_latest`: the file `latest` names it; one saved without is never deleted by a later save.
        `exclude_frozen_parameters`: leaves out parameters that are not trained.

        Raises the same on all ranks, and what was saved before is as it was: ValueError for a wrong argument or one
        that differs between ranks; RuntimeError inside an accumulation window, whose gradients would be lost, where a
        rank makes no progress for `zero.timeout` seconds, or when the engine is of no use; OSError that names rank
        and file; and, without another save, what the last one beside the training loop failed with.
        """
        saver = self.saver
        saver.join()
        options = [bool(save_latest), bool(exclude_frozen_parameters)]
        saver.barrier.start()
        try:
            with self._sharded.world.watchdog.call(Phase.SAVE):
                error = self._save(save_dir, tag, client_state, options)
        finally:
            if not saver.running:
                saver.barrier.shut()
        if error is not None:
            # Not inside of the watched call: the engine is sound, and no other rank must take this one for lost.
            raise error
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the save that runs beside the training loop, if any, has ended; raises what it failed with."""
        self.saver.join()
        if (error := self.saver.error()) is not None:
            raise error

    def _save(self, save_dir: Any, tag: Any, client: Any, options: list[bool]) -> Exception | None:
        """Save, up to where it may go on beside the training loop; returns what failed, the same on all ranks.

        options: whether `latest` will name it, and whether frozen parameters are left out.
        """
        engine, saver, plan, asked = self._engine, self.saver, None, None
        try:
            if (error := saver.error()) is not None:
                raise error
            engine._status.check()
            self._check_window()
            root = Path(os.path.abspath(check_folder(save_dir, "save_checkpoint(): save_dir")))
            tag = _tag_of(f"global_step{engine.global_steps}" if tag is None else tag)
            plan = SavePlan(engine, self._sharded.units, client or {}, saver.barrier, skip_frozen=options[1])
            asked = {"dir": str(root), "tag": tag, "options": options, **plan.request()}
        except Exception as error:
            asked = error
        try:
            begin = partial(_begin, self._validation, saver.barrier.ranks)
            answer = saver.barrier.settle(asked, begin, CHECKS, in_call=True)
        except (OSError, ValueError, RuntimeError) as error:
            return error
        saver.heard()
        job = saver.job(Path(answer["dir"]), answer["tag"], answer["save"], options[0])
        return self._write(job, plan, answer)

    def _write(self, job: Job, plan: SavePlan, answer: Mapping[str, Any]) -> Exception | None:
        saver, rest = self.saver, []
        try:
            rest = plan.write(job, answer["differ"], saver.snapshot if saver.asynchronous else None)
        except BaseException as error:
            job.fail(error)  # the others must hear of it
        if saver.asynchronous and answer["files"]:
            try:
                # Nobody goes on to a collective in which it would wait for who still writes.
                saver.barrier.settle(job.failure, lambda told: None, FILES, in_call=True)
            except (OSError, ValueError, RuntimeError) as error:
                job.fail(error)
        if saver.asynchronous and not job.interrupted:
            saver.begin(job)
            return None
        if saver.asynchronous:
            saver.missed()
        try:
            job.finish(rest, in_call=True)
        except (OSError, ValueError, RuntimeError) as error:
            return error
        return None

    def raise_failure(self) -> None:
        """At the end of a step, on all ranks: raise what a save beside the training loop has failed with."""
        engine = self._engine
        self.saver.look(self._sharded.world, f"step {engine.global_steps} itself is done")

    def _check_window(self) -> None:
        """Raise RuntimeError while gradients wait for a step."""
        if count := self._engine._accumulation.pending():
            steps = self._engine.gradient_accumulation_steps()
            raise RuntimeError(
                f"save_checkpoint() in the middle of an accumulation window: {count} of {steps} micro-batches are in, "
                "and their gradients would be lost; call it after the step() at the boundary"
            )


def _tag_of(tag: Any) -> str:
    """The tag as text; ValueError for what cannot be the name of a folder beside the file `latest`."""
    text = str(tag)
    plain = text.isprintable() and text.strip() == text and not {"/", "\\", os.sep} & set(text)
    if not text or not plain or text.startswith(".") or text == LATEST or len(os.fsencode(text)) > 200:
        raise ValueError(
            f"save_checkpoint(): tag must be the plain name of a folder, without separators or a leading dot, and not "
            f"'{LATEST}'; got {text!r}"
        )
    return text


def _begin(validation: TagValidation, ranks: Sequence[int], requests: list[dict[str, Any]]) -> dict[str, Any]:
    """On rank 0, with what all `ranks` ask for: make the folder, and answer what all need to know.

    Raises ValueError where they ask for different things, OSError where the folder cannot be written or has no room.
    """
    texts = [str(one["options"]) for one in requests]
    if len(set(texts)) > 1:
        text = difference_text(texts, "", ranks)
        raise ValueError(f"save_checkpoint(): options is not the same on all ranks: {text}")
    names = [[[name, *kind] for name, *kind, _ in one["buffers"]] for one in requests]
    if any(one != names[0] for one in names):
        texts = [", ".join(f"{name} {dtype} {shape}" for name, dtype, shape in one) for one in names]
        raise RuntimeError(f"save_checkpoint(): the ranks have different buffers: {difference_text(texts, 'none')}")
    root = validation.first_of([one["dir"] for one in requests], "save_checkpoint(): save_dir", ranks)
    tag = validation.first_of([one["tag"] for one in requests], "save_checkpoint(): tag", ranks)
    place = Path(root, tag)
    new = not place.exists()
    try:
        os.makedirs(place, exist_ok=True)
        _check_room(place, sum(one["nbytes"] + SLACK for one in requests))
    except OSError as error:
        if new:
            with contextlib.suppress(OSError):
                place.rmdir()
        raise OSError(error.errno, f"save_checkpoint() cannot write to {place}: {error.strerror}") from error
    buffers = zip(*(one["buffers"] for one in requests), strict=True)
    differ = [same[0][0] for same in buffers if any(one != same[0] for one in same)]
    files = any(one["files"] for one in requests)
    return {"dir": root, "tag": tag, "save": secrets.token_hex(4), "differ": differ, "files": files}


def _check_room(place: Path, needed: int) -> None:
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    system = os.statvfs(place)
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and free < needed:  # of no blocks at all: the file system does not say
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed} bytes are needed and {free} are free")
