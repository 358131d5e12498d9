"""Reality beside the plan: the most of each kind that was alive in the third step, compared with what was estimated."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero.config import Config
from zero.core.sharded_module import ShardedModule
from zero.core.tensors import map_leaves
from zero.core.torch_private import is_compiled
from zero.log import logger
from zero.optim.optimizer import ZeroOptimizer
from zero.plan.formats import ITEMSIZE
from zero.sizes.choice import own_choice, scheme_of
from zero.sizes.cut_layers import meta_copy
from zero.sizes.estimate import DeviceBytes, PlanRow, state_row
from zero.sizes.model_trace import inputs_of, samples_in, trace
from zero.sizes.recorder import OperatorRecorder

STEP = 3  # in the first one memory is taken that stays, and in the second one the order of uses is learnt
_TOLERATED = 0.05
_LEAST = 1e-3  # of all: what is smaller is not spoken of
_WHY = {
    "parameters": "some rest elsewhere, or `stage3_param_persistence_threshold` keeps others whole than was thought",
    "gradients": "some parameters were not used, or micro-batches did not add up as the configuration says",
    "masters": "some state rests elsewhere",
    "moments": "the optimizer is one of torch's own, or the script's, or some state rests elsewhere",
    "gathered": "modules ran in another order than they are registered in, or something else read their parameters",
    "reduction": "gradients came in another order than that of the modules, or some parameters were not used",
    "activations": "the model keeps tensors itself, batches differ in size, or `recompute` chose by itself",
    "host": "some state rests elsewhere",
    "drive": "some state rests elsewhere",
}
_AUTO = "offload_optimizer.ratio 'auto' has looked at free memory"


class Observed:
    """Inside the block: the most of each kind on this rank's device, looked at whenever a unit begins to travel.

    That is when memory is taken: for a gather, and for the messages of a reduction. Outside of the block nothing is
    looked at, and nothing is left of it. most: bytes by kind.
    """

    def __init__(self, sharded: ShardedModule, optimizer: ZeroOptimizer | None) -> None:
        self.most = DeviceBytes(*[0] * len(DeviceBytes._fields))
        self._sharded = sharded
        self._optimizer = optimizer
        self._sizes = {
            unit.plan.name: [ITEMSIZE[unit.plan.dtype] * spec.numel for spec in unit.plan.params]
            for unit in sharded.units
        }

    def __enter__(self) -> Observed:
        self._end = self._sharded.world.watchdog.events.subscribe(self._work)
        self._sharded.reducer.on_flush.append(self.look)
        self.look()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end()
        self._sharded.reducer.on_flush.remove(self.look)

    def look(self, landing: int = 0) -> None:
        """Look at the bytes that are alive now; `landing`: bytes of the gradient that autograd hands over."""
        now = alive_now(self._sharded, self._optimizer)
        self.most = DeviceBytes(*map(max, self.most, now._replace(reduction=now.reduction + landing)))

    @contextlib.contextmanager
    def _work(self, verb: str, unit: str) -> Iterator[None]:
        sizes = self._sizes.get(unit, [0]) if verb == "reduce" else [0]
        if verb == "reduce":
            self.look(max(sizes))  # when the largest gradient came, the messages before were there, too
        yield
        if verb in ("gather", "reduce"):
            self.look(sizes[0])  # of the module that runs first the gradient comes last


def alive_now(sharded: ShardedModule, optimizer: ZeroOptimizer | None) -> DeviceBytes:
    """Bytes of each kind on this rank's device at this moment; without the one gradient that autograd hands over."""
    held = sharded.nbytes()
    whole = [unit.buffer.full for unit in sharded.units if unit.resharded and not unit.persistent]
    gathered = sum(full.untyped_storage().nbytes() for full in whole)
    collects = sharded.numerics.accumulation > 1 and not sharded.sharding.grads
    gradients = [unit.gradients.alive_nbytes(collects) for unit in sharded.trained]
    return DeviceBytes(
        held.parameters - gathered,
        sum(sums for sums, _ in gradients),
        held.optimizer,
        optimizer.nbytes() if optimizer is not None else 0,
        gathered,
        sum(moving for _, moving in gradients),
    )


def planned(config: Config, sharded: ShardedModule) -> PlanRow:
    """The estimate for this engine, without activations."""
    units, formats = [unit.plan for unit in sharded.units], sharded.numerics.formats
    choice, mirrored = own_choice(config), sharded.device.type != "cpu"
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # as zero/core/world.py sees them
    streamed = any(unit.shard.placement.streamed for unit in sharded.units)
    steps = config.gradient_accumulation_steps
    scheme = scheme_of(units, config, choice, formats, steps, mirrored, per_host, streamed)
    return state_row(units, config, scheme, choice)


class Reality:
    """Watches the third step of an engine, and says on rank 0, once, where it differs from the plan."""

    def __init__(self, config: Config, sharded: ShardedModule, optimizer: ZeroOptimizer) -> None:
        self._config = config
        self._sharded = sharded
        self._optimizer = optimizer
        self._steps = 0
        self._watching = contextlib.ExitStack()

    def after_step(self) -> bool:
        """A step has ended; whether everything is said."""
        self._steps += 1
        if self._steps == STEP - 1:
            self._observed = self._watching.enter_context(Observed(self._sharded, self._optimizer))
            self._forward = _Forward(self._sharded.module, self._sharded.device.type)
            self._watching.callback(self._forward.close)
        elif self._steps == STEP:
            self.close()
            if self._sharded.world.global_rank == 0:
                self._say(self._pairs(self._observed.most, self._forward))
        return self._steps >= STEP

    def close(self) -> None:
        """Stop to watch."""
        self._watching.close()

    def _pairs(self, most: DeviceBytes, forward: _Forward) -> dict[str, tuple[float, float]]:
        """Bytes by kind: as planned, and as they were."""
        row, offload = planned(self._config, self._sharded), self._sharded.offload
        pairs = dict(zip(most._fields, zip(row.device, most, strict=True), strict=True))
        pairs = {kind: pair for kind, pair in pairs.items() if kind not in ("activations", "logits")}
        away = (0, 0) if offload is None else (offload.host.memory, offload.host.files)
        pairs |= {"host": (row.host.memory, away[0]), "drive": (row.host.files, away[1])}
        if (kept := forward.planned(self._config)) is not None:
            pairs["activations"] = kept, forward.kept
        return pairs

    def _say(self, pairs: Mapping[str, tuple[float, float]]) -> None:
        least = _LEAST * sum(was for _, was in pairs.values())
        differ, auto = [], self._config.zero_optimization.offload_optimizer.ratio == "auto"
        for kind, (said, was) in pairs.items():
            if abs(was - said) > max(_TOLERATED * said, least):
                off = f"{was / said - 1:+.0%}" if said else "none was planned"
                why = _AUTO if auto and kind not in ("gathered", "reduction", "activations") else _WHY[kind]
                differ.append(f"{kind}: {was / 1e6:,.1f} MB, planned were {said / 1e6:,.1f} ({off}); perhaps {why}")
        there = ", ".join(f"{kind} {was / 1e6:,.1f}" for kind, (_, was) in pairs.items() if was)
        text = f"plan and reality of step {STEP} (MB on rank 0): {there}"
        if differ:
            logger.warning("%s. More than 5 %% off the plan:\n  %s", text, "\n  ".join(differ))
        else:
            logger.log(logging.INFO, "%s; each is within 5 %% of the plan", text)


class _Forward:
    """What the next forward keeps for its backward, if nothing of it is compiled; kept: bytes alive at its end."""

    def __init__(self, module: nn.Module, device: str) -> None:
        self.kept = 0
        self._module = module
        self._device = device
        self._inputs: tuple[Sequence[Any], Mapping[str, Any]] | None = None
        self._recorder: OperatorRecorder | None = None
        self._handles: list[RemovableHandle] = []
        if not any(is_compiled(child) for child in module.modules()):
            self._handles.append(module.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._end, always_call=True))

    def _begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled() and self._recorder is None:
            meta = functools.partial(torch.empty_like, device="meta")
            self._inputs = map_leaves((args, kwargs), lambda leaf: meta(leaf) if torch.is_tensor(leaf) else leaf)
            self._recorder = OperatorRecorder().__enter__()

    def _end(self, *_: Any) -> None:
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self.kept = sum(map(self._recorder.nbytes, self._recorder.alive()))
            self.close()

    def close(self) -> None:
        """Look at no forward any more."""
        for handle in self._handles:
            handle.remove()

    def planned(self, config: Config) -> float | None:
        """The planned bytes of activations; None where nothing was seen, or the model cannot be traced."""
        section = config.zero.recompute
        if self._inputs is None or section.policy == "auto":
            return None
        policy = section.policy if section.modules else "none"
        try:
            inputs = inputs_of(self._module, *self._inputs)
            samples, cost = samples_in(inputs), trace(meta_copy(self._module), inputs, config, self._device)
        except Exception as error:  # whatever a model does on the meta device, the run goes on
            logger.info("activations are not planned: %s: %s", type(error).__name__, error)
            return None
        return cost.activations(policy, samples) + samples * cost.logits_saved
