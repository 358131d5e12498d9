"""Saving an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero.checkpoint.job import Job
from zero.checkpoint.saver import Saver
from zero.config import Config
from zero.core import comm
from zero.core.sharded_module import ShardedModule
from zero.engine.accumulation import Window
from zero.engine.checkpoint.checks import Options, begin, check_folder, check_tag
from zero.engine.checkpoint.resume import rank_state, shared_state
from zero.engine.checkpoint.save_plan import Plain, SavePlan
from zero.optim.optimizer import ZeroOptimizer
from zero.watchdog.hang_report import Phase
from zero.watchdog.watchdog import Watchdog

CHECKS = "the checks before a checkpoint is written"
FILES = "writing the part of a checkpoint that rests in files"


class SaveCheckpoint:
    """`save_checkpoint` and `wait_for_checkpoint`; mixed into the engine."""

    module: nn.Module
    optimizer: ZeroOptimizer | None
    global_steps: int
    micro_steps: int
    device: torch.device
    config: Any
    _config: Config
    _sharded: ShardedModule
    _saver: Saver
    _watchdog: Watchdog
    _window: Window

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything that a run needs to go on to `save_dir`/`tag` (default: global_step<N>); on all ranks.

        Returns True when the checkpoint is whole; with `zero.checkpoint.async` when it is copied to host memory, from
        where it is written beside the training loop, while what rests in files is written during the call.
        `save_latest`: the file `latest` names it; one saved without is never deleted by a later save.
        `exclude_frozen_parameters`: leaves out parameters that are not trained.

        Raises the same on all ranks, and what was saved before is as it was: ValueError for a wrong argument or one
        that differs between ranks; RuntimeError inside an accumulation window, whose gradients would be lost, where a
        rank makes no progress for `zero.timeout` seconds, or when the engine is of no use; OSError that names rank
        and file; and, without another save, what the last one beside the training loop failed with.
        """
        saver = self._saver
        saver.join()
        options = Options(bool(save_latest), bool(exclude_frozen_parameters))
        saver.barrier.start()
        try:
            with self._watchdog.call(Phase.SAVE), self._watchdog.listening() as in_vain:
                error = self._save(save_dir, tag, client_state, options, in_vain)
        finally:
            if not saver.running:
                saver.barrier.shut()
        if error is not None:
            # Not inside of the watched call: the engine is sound, and no other rank must take this one for lost.
            raise error
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the save that runs beside the training loop, if any, has ended; raises what it failed with."""
        self._saver.join()
        if (error := self._saver.error()) is not None:
            raise error

    def _save(
        self, save_dir: Any, tag: Any, client: Any, options: Options, in_vain: Callable[[], str]
    ) -> Exception | None:
        """Save, up to where it may go on beside the training loop; returns what failed, the same on all ranks."""
        saver, plan, asked = self._saver, None, None
        try:
            if (error := saver.error()) is not None:
                raise error
            self._alive()
            self._check_window()
            root = Path(os.path.abspath(check_folder(save_dir, "save_checkpoint(): save_dir")))
            tag = check_tag(f"global_step{self.global_steps}" if tag is None else tag)
            plain = Plain(shared_state(self), client or {}, rank_state(self))
            units, rank = self._sharded.units, self.global_rank
            plan = SavePlan(self.module, units, self.optimizer, plain, rank, options.exclude_frozen)
            asked = {
                "dir": str(root),
                "tag": tag,
                "options": list(options),
                **plan.request(saver.barrier.world_size == 1),
            }
        except Exception as error:
            asked = error
        try:
            answer = saver.barrier.settle(asked, begin, CHECKS, in_vain)
        except (OSError, ValueError, RuntimeError) as error:
            return error
        saver.heard()
        job = saver.job(root, tag, answer["save"], options.latest)
        return self._write(job, plan, answer, in_vain)

    def _write(
        self, job: Job, plan: SavePlan, answer: Mapping[str, Any], in_vain: Callable[[], str]
    ) -> Exception | None:
        saver, rest = self._saver, []
        try:
            if self.global_rank == 0:
                plan.describe(job, self.config, self.global_steps)
            snapshot = saver.snapshot if saver.asynchronous else None
            rest = plan.write(job, self.global_rank, answer["differ"], snapshot)
        except BaseException as error:
            job.fail(error)  # the others must hear of it
        if saver.asynchronous and answer["files"]:
            try:
                # Nobody goes on to a collective in which it would wait for who still writes.
                saver.barrier.settle(job.failure, lambda told: None, FILES, in_vain)
            except (OSError, ValueError, RuntimeError) as error:
                job.fail(error)
        if saver.asynchronous and not job.interrupted:
            saver.begin(job)
            return None
        if saver.asynchronous:
            saver.missed()
        try:
            job.finish(rest, in_vain)
        except (OSError, ValueError, RuntimeError) as error:
            return error
        return None

    def _check_window(self) -> None:
        """Raise RuntimeError while gradients wait for a step."""
        window, reducer = self._window, self._sharded.reducer
        steps = self.gradient_accumulation_steps()
        managed = window.boundary is None and self._config.managed_gradient_accumulation
        counted = (self.micro_steps - window.start) % steps if managed else 0
        if reducer.holds_gradients or counted:
            count = max(counted, min(reducer.rounds - window.rounds, steps), 1)
            raise RuntimeError(
                f"save_checkpoint() in the middle of an accumulation window: {count} of {steps} micro-batches are in, "
                "and their gradients would be lost; call it after the step() at the boundary"
            )

    def _look_at_save(self) -> None:
        """At the end of a step, on all ranks: raise what a save beside the training loop has failed with."""
        axis = self._sharded.mesh.data

        def gather(number: int) -> list[int]:
            mine = torch.tensor([number], dtype=torch.int64, device=self.device)
            return comm.gather_scalars(mine, axis, "outcome of a checkpoint").view(-1).tolist()

        self._saver.look(gather, f"step {self.global_steps} itself is done")
