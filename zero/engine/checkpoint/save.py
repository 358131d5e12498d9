"""Saving an engine: the call, what must be right before anything is written, and the save beside the training loop."""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zero.checkpoint.folder import LATEST, check_folder
from zero.checkpoint.retention import Retention
from zero.checkpoint.safe_file import TensorChunk
from zero.checkpoint.writer import CheckpointWriter, SavePlan, Snapshot
from zero.config import Config
from zero.core.agree import agree
from zero.core.sharded_module import ShardedModule
from zero.engine.checkpoint.saved_state import SavedState
from zero.engine.signals import Signals
from zero.launch.contract import SAVED
from zero.log import logger, rank_zero
from zero.watchdog.hang_report import Phase, difference_text

SLACK = 1 << 16  # bytes of each rank's share that headers and the index may take
CHECKS = "the checks before a checkpoint is written"
REST = "writing the part of a checkpoint that rests in files"
AGREED = (OSError, ValueError, RuntimeError)  # what all ranks raise alike


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


class Beside(enum.IntEnum):
    """Of the save beside the training loop, as numbers that ranks tell each other.

    NONE: there is none, or all ranks know how it ended; ENDED: it was saved, or this rank's program knows that it was
    not.
    """

    NONE = 0
    RUNS = 1
    ENDED = 2
    FAILED = 3


class CheckpointSaver:
    """Saves an engine, at once or beside its training loop, where at most one save runs.

    asynchronous: whether saves run beside the loop, from the snapshot. signals: at which it saves and ends the run.
    """

    def __init__(self, engine: Any, config: Config, sharded: ShardedModule) -> None:
        section = config.zero.checkpoint
        self.barrier = sharded.world.watchdog.barrier
        self.asynchronous = section.asynchronous
        self.snapshot = Snapshot(pinned=sharded.device.type == "cuda")
        self._retention = Retention(section.keep, section.keep_optimizer)
        self._began = time.time()
        self._engine = weakref.proxy(engine)  # it holds this object, and is freed without the garbage collector
        self._sharded = sharded
        self._validation = TagValidation(config.checkpoint.tag_validation)
        self._thread: threading.Thread | None = None
        self._ended = Beside.NONE
        self._error: Exception | None = None
        self.signals = Signals()
        self._at_signal: tuple[str | Path, int, Mapping[str, Any] | None] = ("", SAVED, None)

    def save_on_signal(
        self,
        signals: str | int | Sequence[str | int],
        folder: str | Path,
        status: int = SAVED,
        client_state: Mapping[str, Any] | None = None,
    ) -> None:
        """At a signal to any rank, "SIGUSR1" or several, save to `folder` at the end of the step, and exit all ranks.

        status: of the exit; by default 75, after which `zero run` starts no ranks again. client_state: as for
        `save_checkpoint`, with what is in it by then. What the signals did before they do no more until `destroy()`;
        from the save on SIGTERM does nothing any more, by which srun would change the status. Raises ValueError for
        what is no signal, RuntimeError outside of the main thread.
        """
        self.signals.watch(signals)
        self._at_signal = folder, status, client_state

    def end_at_signal(self) -> None:
        """Behind a step: where a signal has come, save and raise SystemExit."""
        if self.signals.due:
            folder, status, client_state = self._at_signal
            rank_zero(logging.INFO, "a signal has come: saving to %s, and ending with status %d", folder, status)
            self.signals.leave()
            self.save_checkpoint(folder, client_state=client_state)
            self.wait_for_checkpoint()
            raise SystemExit(status)

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
        self.join()
        options = [bool(save_latest), bool(exclude_frozen_parameters)]
        self.barrier.start()
        try:
            with self._sharded.world.watchdog.call(Phase.SAVE):
                error = self._save(save_dir, tag, client_state, options)
        finally:
            if not self._running:
                self.barrier.shut()
        if error is not None:
            # Not inside of the watched call: the engine is sound, and no other rank must take this one for lost.
            raise error
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the save that runs beside the training loop, if any, has ended; raises what it failed with."""
        self.join()
        if (error := self.error()) is not None:
            raise error

    def join(self) -> None:
        """Wait until nothing runs beside the caller."""
        # Not forgotten then: while one thread waits here, another may begin the next.
        while self._running:
            self._thread.join()

    def error(self) -> Exception | None:
        """What the last save beside the loop failed with, once; None if it did not, or runs."""
        if self._running or self._ended is not Beside.FAILED:
            return None
        self._ended = Beside.ENDED
        return _failure("the last checkpoint", self._error)

    def raise_failure(self) -> None:
        """At the end of a step, on all ranks: raise what a save beside the training loop has failed with.

        A collective while any rank has not heard how the save ended.
        """
        beside = Beside.RUNS if self._running else self._ended
        if beside is Beside.NONE:
            return
        told = agree(int(beside), self._sharded.world)
        if Beside.RUNS in told:
            return
        error, self._ended, self._error = self._error, Beside.NONE, None
        if Beside.FAILED in told:
            raise _failure("a checkpoint", error, f"; step {self._engine.global_steps} itself is done") from error

    @property
    def _running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _save(self, save_dir: Any, tag: Any, client: Any, options: list[bool]) -> Exception | None:
        """Save, up to where it may go on beside the training loop; returns what failed, the same on all ranks.

        options: whether `latest` will name it, and whether frozen parameters are left out.
        """
        engine, barrier = self._engine, self.barrier
        asked: Any = None
        try:
            if (error := self.error()) is not None:
                raise error
            engine._status.check()
            if count := engine._accumulation.pending():
                steps = engine.gradient_accumulation_steps()
                raise RuntimeError(
                    f"save_checkpoint() in the middle of an accumulation window: {count} of {steps} micro-batches are "
                    "in, and their gradients would be lost; call it after the step() at the boundary"
                )
            root = os.path.abspath(check_folder(save_dir, "save_checkpoint(): save_dir"))
            tag = _tag_of(f"global_step{engine.global_steps}" if tag is None else tag)
            state = SavedState(engine, self._sharded.units, client or {}, skip_frozen=options[1])
            asked = {"dir": root, "tag": tag, "options": options, **state.request()}
        except Exception as error:
            asked = error
        begin = partial(_begin, self._validation, barrier.ranks)
        try:
            answer = barrier.settle(asked, begin, CHECKS, in_call=True)
        except AGREED as error:
            return error
        self._ended, self._error = Beside.NONE, None  # all ranks know how the last one ended
        engine._training.means.average_replicas()
        small, own, extra = state.small(answer["differ"], answer["first"])
        units = [form for forms in state.forms.values() for form in forms]
        fields = state.fields(answer["save"], answer["tag"], options[0]) if barrier.rank == 0 else {}
        plan = SavePlan(
            place=Path(answer["dir"], answer["tag"]),
            save=answer["save"],
            latest=options[0],
            forms=[*units, *small],
            own=own,
            model={**state.model(), "extra_state": extra},
            fields=fields,
            retention=self._retention,
            began=self._began,
        )
        return self._write(CheckpointWriter(plan, barrier), state, small, answer["files"])

    def _write(
        self, writer: CheckpointWriter, state: SavedState, small: list[TensorChunk], files: bool
    ) -> Exception | None:
        """Write, or have written from the snapshot; `files`: part of it rests in files, on some rank."""
        try:
            writer.begin()
            if self.asynchronous:
                there = [forms for unit, forms in state.forms.items() if unit.shard.placement.resident]
                self.snapshot.begin([*small, *itertools.chain(*there)])  # what rests in files is written in the call
            with contextlib.closing(state.chunks(small)) as chunks:
                for chunk, resident in chunks:
                    (self.snapshot.take if self.asynchronous and resident else writer.put)(chunk)
                    writer.moved(1)
        except BaseException as error:
            writer.fail(error)  # the others must hear of it
        if self.asynchronous and files:
            try:
                # No rank goes on to a collective and waits there for one that still writes.
                self.barrier.settle(writer.failure, lambda told: None, REST, in_call=True)
            except AGREED as error:
                writer.fail(error)
        # Ctrl-C and the like must reach the caller at once; the others may go on beside their loops.
        if self.asynchronous and (writer.failure is None or isinstance(writer.failure, Exception)):
            self._ended, self._error = Beside.FAILED, RuntimeError("its thread has ended")  # unless it says otherwise
            # Not a daemon: the interpreter joins it before it takes anything apart, after an exception, too.
            self._thread = threading.Thread(target=self._finish, args=(writer,), name="zero-save")
            self._thread.start()
            return None
        if self.asynchronous:
            self._ended, self._error = Beside.ENDED, None
        try:
            writer.finish(in_call=True)
        except AGREED as error:
            return error
        return None

    def _finish(self, writer: CheckpointWriter) -> None:
        """In a thread of its own: write the snapshot, and end the save."""
        try:
            writer.finish(self.snapshot.copies())
            self._ended, self._error = Beside.ENDED, None
        except Exception as error:
            self._error = error
            place, rank = writer.plan.place, self._sharded.world.global_rank
            text = "rank %d: checkpoint '%s' in %s could not be saved: %s"
            logger.error(text, rank, place.name, place.parent, error)
        finally:
            self.barrier.shut()
            self.snapshot.clear()


def _failure(what: str, error: Exception | None, when: str = "") -> Exception:
    """An exception of the kind of `error`, which another rank has where it is None."""
    # Without the number of an OSError, which stands in front again.
    reason = getattr(error, "strerror", None) or error or "another rank failed"
    text = f"{what} could not be saved beside the training loop: {reason}{when}"
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, text)
    return RuntimeError(text)


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
    differ, first = _first_holders(requests, ranks)
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
    files = any(one["files"] for one in requests)
    return {"dir": root, "tag": tag, "save": secrets.token_hex(4), "differ": differ, "first": first, "files": files}


def _first_holders(requests: list[dict[str, Any]], ranks: Sequence[int]) -> tuple[list[str], dict[str, int]]:
    """Names of the buffers that differ between ranks; and the first place that has a name which the first has not.

    Raises RuntimeError where ranks with the same modules have different buffers, or one name is of two shapes.
    """
    found: dict[str, list[Any]] = {}
    first: dict[str, int] = {}
    for place, one in enumerate(requests):
        kinds = {name: kind[:2] for name, kind in one["buffers"].items()}
        alike = next(other for other in requests if other["alike"] == one["alike"])
        same = {name: kind[:2] for name, kind in alike["buffers"].items()}
        if kinds != same or any(found[name][0][:2] != kind for name, kind in kinds.items() if name in found):
            texts = [
                ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape, _) in each["buffers"].items())
                for each in requests
            ]
            text = difference_text(texts, "none", ranks)
            raise RuntimeError(f"save_checkpoint(): the ranks have different buffers: {text}")
        for name, digest in one["buffers"].items():
            found.setdefault(name, []).append(digest)
        for name in (*one["buffers"], *one["extra"]):
            first.setdefault(name, place)
    differ = [name for name, digests in found.items() if any(each != digests[0] for each in digests)]
    return differ, {name: place for name, place in first.items() if place}


def _check_room(place: Path, needed: int) -> None:
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    system = os.statvfs(place)
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and free < needed:  # of no blocks at all: the file system does not say
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed} bytes are needed and {free} are free")
