"""What is recorded of a run to be compared: losses, gradient norms, and gradients and exact weights of each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zero.core.access import GatheredParameters
from zero.core.agree import agree
from zero.core.hashing import hash_tensor
from zero.core.owner import owner_of
from zero.core.values import assemble, exact_piece, gradient
from zero.tools.check.plain_engine import PlainEngine, Step, Values


@dataclass(frozen=True)
class Outcome:
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


class Recorder:
    """Records an engine: the loss of each backward; norm, gradient and weights of each step.

    Losses are what `engine.backward` got; where it is never called, what the engine returned.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.norms: list[float] = []
        self.steps: list[Step] = []
        self._losses: list[float] = []
        self._returned: list[float] = []
        self._backward, self._step = engine.backward, engine.step
        # On the object, in front of the methods of its class: the user's loop must not see a difference.
        engine.backward, engine.step = self._record_backward, self._record_step
        engine.register_forward_hook(self._record_forward)
        self.after_step: Any = None
        self.begin: dict[str, int] = {}

    def record_begin(self) -> None:
        """Remember the weights of now, as the model computes with them: masters may hold more; collective."""
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.engine._config.compute_dtype, torch.float32)
        self.begin = hashes({name: value.to(dtype) for name, value in weights(self.engine).items()})

    @property
    def losses(self) -> list[float]:
        """The loss of each micro-step on this rank."""
        return self._losses or self._returned

    @property
    def dtype(self) -> str:
        """The coarsest of the dtypes that losses and gradients are computed, sent and added up in."""
        settings = self.engine._config
        dtypes = {settings.compute_dtype, settings.autocast_dtype, settings.communication_data_type}
        dtypes.add(settings.data_types.grad_accum_dtype)
        return next((dtype for dtype in ("bf16", "fp16") if dtype in dtypes), "fp32")

    @property
    def rules(self) -> str:
        """See `Outcome`."""
        return self.engine.rules if isinstance(self.engine, PlainEngine) else ""

    def _record_forward(self, module: Any, args: Any, output: Any) -> None:
        loss = find_loss(output)
        if loss is not None and loss.requires_grad:
            self._returned.append(float(loss.detach()))

    def _record_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(float(loss.detach()))
        return self._backward(loss, *args, **kwargs)

    def _record_step(self, *args: Any, **kwargs: Any) -> Any:
        before, plain = self.engine.global_steps, isinstance(self.engine, PlainEngine)
        grads = {} if plain or not self.engine.is_gradient_accumulation_boundary() else gradients(self.engine)
        result = self._step(*args, **kwargs)
        if self.engine.global_steps > before:
            norm = self.engine.get_global_grad_norm()
            self.norms.append(float("nan") if norm is None else float(norm))
            self.steps.append(self.engine.last if plain else Step(grads, weights(self.engine), {}))
            if self.after_step is not None:
                self.after_step()
        return result


def find_loss(output: Any) -> torch.Tensor | None:
    """The loss in what a model returned: the scalar itself, `.loss`, `["loss"]` or `[0]`; None if there is none."""
    loss = output
    if isinstance(output, dict):
        loss = output.get("loss")
    elif not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
        if loss is None and isinstance(output, (tuple, list)) and output:
            loss = output[0]
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


@torch.no_grad()
def weights(engine: Any) -> Values:
    """The exact weights by name, on the CPU: masters where there are such; collective, one at a time."""
    if isinstance(engine, PlainEngine):
        return engine.weights()
    values: Values = {}
    for name, param in engine.module.named_parameters():
        owner = owner_of(param)
        if owner is not None and owner.unit.shard.master is not None:
            values[name] = assemble(owner, exact_piece(owner)).view(param.shape).cpu()
        else:
            with GatheredParameters(param):
                values[name] = param.detach().cpu().clone()
    return values


@torch.no_grad()
def gradients(engine: Any) -> Values:
    """The gradient of each trained parameter as the step will take it, before it is clipped, on the CPU; collective.

    What the step would reduce first is reduced now.
    """
    values: Values = {}
    if engine.optimizer is None:
        return values
    sharded = engine._sharded
    sharded.reducer.before_step()
    if any(agree(bool(sharded.reducer.late), sharded.world)):
        sharded.reducer.end(force=True)
    for name, param in engine.module.named_parameters():
        owner = owner_of(param)
        if owner is not None and owner.unit.gradients is not None:
            whole = gradient(owner, "zero check")
            values[name] = whole.mul_(engine.optimizer.gradient_factor).view(param.shape).cpu()
    return values


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


def save(folder: Path, rank: int, recorders: list[Recorder]) -> None:
    """Write this rank's part of the outcome; rank 0's has the steps."""
    begin: dict[str, int] = {}
    last: dict[str, int] = {}
    steps = [Step({}, {}, {}) for _ in range(max(len(recorder.steps) for recorder in recorders))]
    for index, recorder in enumerate(recorders):
        prefix = _prefix(index) if len(recorders) > 1 else ""
        begin |= {prefix + name: value for name, value in recorder.begin.items()}
        last |= {prefix + name: value for name, value in hashes(recorder.steps[-1].params).items()}
        for step, own in zip(steps, recorder.steps, strict=False):
            for values, news in zip(step, own, strict=True):
                values |= {prefix + name: value for name, value in news.items()}
    record = {
        "losses": [loss for recorder in recorders for loss in recorder.losses],
        "norms": [norm for recorder in recorders for norm in recorder.norms],
        "steps": [step._asdict() for step in steps] if rank == 0 else [],
        "hashes": last,
        "dtype": recorders[0].dtype,
        "begin": begin,
        "rules": "; ".join(filter(None, (recorder.rules for recorder in recorders))),
    }
    torch.save(record, folder / f"rank{rank}.pt")


def load(folder: Path) -> Outcome | None:
    """What `save` wrote on all ranks; None where a rank's part is missing."""
    paths = [folder / f"rank{rank}.pt" for rank in range(len(list(folder.glob("rank*.pt"))))]
    if not paths or not all(path.exists() for path in paths):
        return None
    records = [torch.load(path, weights_only=True) for path in paths]
    first = records[0]
    return Outcome(
        losses=[record["losses"] for record in records],
        norms=first["norms"],
        steps=[Step(**step) for step in first["steps"]],
        stray=stray([record["hashes"] for record in records]),
        dtype=first["dtype"],
        begin=first["begin"],
        folder=folder,
        rules=first["rules"],
    )


def _prefix(index: int) -> str:
    return f"engine {index}: "


def _without(prefix: str, values: Values) -> Values:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
