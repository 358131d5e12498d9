"""What is recorded of a run to be compared: losses, gradient norms, and gradients and exact weights of each step."""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zero.core.access import GatheredParameters
from zero.core.agree import agree
from zero.core.owner import owner_of
from zero.core.tensors import find_loss
from zero.core.values import full_shape, is_part, with_parts
from zero.engine.assignment import wrap
from zero.engine.check.plain_engine import PlainEngine, Step, Values
from zero.engine.hashing import hash_tensor
from zero.utils.full import safe_get_full_fp32_param, safe_get_full_grad


@dataclass(frozen=True)
class RunRecord:
    """Of one run: losses[rank][micro-step], norms[step], and the steps.

    stray: the first weight that is not the same on all ranks; dtype: the coarsest that gradients go through.
    begin: checksums of the weights before the first step, where they were taken; folder: where it was read from;
    rules: of a run of plain torch, which parameter gets which rule, where there are two.
    """

    losses: list[list[float]]
    norms: list[float]
    steps: list[Step]
    stray: str | None
    dtype: str
    begin: dict[str, int] = field(default_factory=dict)
    folder: Path | None = None
    rules: str = ""

    def of_engine(self, index: int) -> list[Step]:
        """The steps of one of the engines of a script, under the names of its parameters."""
        prefix = _prefix(index)
        cut = [Step(*(_without(prefix, values) for values in step)) for step in self.steps]
        return [step for step in cut if step.params] or self.steps

    @property
    def bits(self) -> tuple[Any, ...]:
        """Equal for runs with the same losses, gradients and weights, bit by bit."""
        return self.losses, [(hashes(step.grads), hashes(step.params)) for step in self.steps]


class RunRecorder:
    """Records an engine: the loss of each backward; norm, gradient and weights of each step.

    Where the engine's `backward` is never called, the losses are what it returned.
    """

    def __init__(self, engine: Any, stepped: Callable[[], object] | None = None) -> None:
        """`stepped`: called behind each step of the optimizer that is recorded."""
        self.engine = engine
        self._stepped = stepped
        self.steps: list[Step] = []
        self._norms: list[float] = []
        self._losses: list[float] = []
        self._returned: list[float] = []
        self._begin: dict[str, int] = {}
        self._plain = isinstance(engine, PlainEngine)
        engine.register_forward_hook(self._record_forward)
        wrap(engine, "backward", self._record_backward)
        wrap(engine, "step", self._before_step, self._after_step)
        if not self._plain and engine.optimizer is not None and not engine.managed_gradient_accumulation():
            # Only inside of a step is it known that it is one, and that other ranks have run what they have.
            engine.optimizer.register_step_pre_hook(self._read_gradients)

    def record_begin(self) -> None:
        """Remember the weights of now, as the model computes with them: masters may hold more; collective."""
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.engine._config.compute_dtype, torch.float32)
        self._begin = hashes({name: value.to(dtype) for name, value in weights(self.engine).items()})

    def _record_forward(self, module: Any, args: Any, output: Any) -> None:
        loss = find_loss(output)
        if loss is not None and loss.requires_grad:
            self._returned.append(float(loss.detach()))

    def _record_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(float(loss.detach()))

    def _before_step(self, *args: Any, **kwargs: Any) -> None:
        self._grads = {}
        if not self._plain and self.engine.is_gradient_accumulation_boundary():
            self._read_gradients()

    def _read_gradients(self, *args: Any) -> None:
        self._grads = gradients(self.engine)

    def _after_step(self) -> None:
        norm = self.engine.get_global_grad_norm()
        self._norms.append(float("nan") if norm is None else float(norm))
        self.steps.append(self.engine.last if self._plain else Step(self._grads, weights(self.engine), {}))
        if self._stepped is not None:
            self._stepped()

    def part(self, prefix: str = "") -> dict[str, Any]:
        """What this rank knows of the run, with `prefix` before the names of parameters."""
        settings = self.engine._config
        dtypes = {settings.compute_dtype, settings.autocast_dtype, settings.communication_data_type}
        dtypes.add(settings.data_types.grad_accum_dtype)
        return {
            "losses": self._losses or self._returned,
            "norms": self._norms,
            "steps": [[_with(prefix, values) for values in step] for step in self.steps],
            "hashes": _with(prefix, hashes(self.steps[-1].params)),
            "dtype": next((dtype for dtype in ("bf16", "fp16") if dtype in dtypes), "fp32"),
            "begin": _with(prefix, self._begin),
            "rules": self.engine.rules if self._plain else "",
        }


def record_of(parts: Sequence[Mapping[str, Any]], folder: Path | None = None) -> RunRecord:
    """Of the parts of all ranks; rank 0's has the steps."""
    first = parts[0]
    losses, steps = [part["losses"] for part in parts], [Step(*step) for step in first["steps"]]
    found = stray([part["hashes"] for part in parts])
    return RunRecord(losses, first["norms"], steps, found, first["dtype"], first["begin"], folder, first["rules"])


@torch.no_grad()
def weights(engine: Any) -> Values:
    """The exact weights by name, on the CPU: masters where there are such; collective, one at a time."""
    if isinstance(engine, PlainEngine):
        return engine.weights()
    values: Values = {}
    for name, param in engine.module.named_parameters():
        exact = safe_get_full_fp32_param(param)
        if exact is None:
            with GatheredParameters(param):
                exact = param.detach().clone()
            if (owner := owner_of(param)) is not None and is_part(owner):
                exact = with_parts(owner, exact.reshape(-1)).view(full_shape(owner))
        values[name] = exact.cpu()
    return values


def gradients(engine: Any) -> Values:
    """The gradient of each trained parameter as the step will take it, before it is clipped, on the CPU; collective.

    What the step would reduce first is reduced now.
    """
    if engine.optimizer is None:
        return {}
    sharded = engine._sharded
    sharded.reducer.before_step()
    if any(agree(bool(sharded.reducer.late), sharded.world)):
        sharded.reducer.end(force=True)
    found = {name: safe_get_full_grad(param) for name, param in engine.module.named_parameters()}
    return {name: grad.cpu() for name, grad in found.items() if grad is not None}


def hashes(values: Values) -> dict[str, int]:
    """A hash of each tensor's bits."""
    return {name: int(hash_tensor(value)) for name, value in values.items()}


def stray(of_ranks: list[dict[str, int]]) -> str | None:
    """The first parameter whose checksum is not the same on all ranks, with the first such rank."""
    for name, wanted in of_ranks[0].items():
        for rank, hashes_there in enumerate(of_ranks):
            if hashes_there.get(name) != wanted:
                return f"'{name}' on rank {rank}"
    return None


def save(folder: Path, rank: int, recorders: list[RunRecorder]) -> None:
    """Write this rank's part of the record of a script with these engines."""
    parts = [recorder.part(_prefix(index) if len(recorders) > 1 else "") for index, recorder in enumerate(recorders)]
    of_steps = itertools.zip_longest(*(part["steps"] for part in parts), fillvalue=({}, {}, {}))
    steps = [[dict(ChainMap(*values)) for values in zip(*of_step, strict=True)] for of_step in of_steps]
    whole = parts[0] | {
        "losses": [loss for part in parts for loss in part["losses"]],
        "norms": [norm for part in parts for norm in part["norms"]],
        "steps": steps if rank == 0 else [],
        "hashes": dict(ChainMap(*(part["hashes"] for part in parts))),
        "begin": dict(ChainMap(*(part["begin"] for part in parts))),
        "rules": "; ".join(filter(None, (part["rules"] for part in parts))),
    }
    torch.save(whole, folder / f"rank{rank}.pt")


def load(folder: Path) -> RunRecord | None:
    """What `save` wrote on all ranks; None where a rank's part is missing."""
    paths = [folder / f"rank{rank}.pt" for rank in range(len(list(folder.glob("rank*.pt"))))]
    if not paths or not all(path.exists() for path in paths):
        return None
    return record_of([torch.load(path, mmap=True, weights_only=True) for path in paths], folder)


def _prefix(index: int) -> str:
    return f"engine {index}: "


def _with(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in values.items()}


def _without(prefix: str, values: Values) -> Values:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
