"""What a run leaves behind to be compared: losses, gradient norms, and the exact weights at the end."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zero.core import comm
from zero.core.access import GatheredParameters
from zero.core.unit import Unit
from zero.engine.check.plain import PlainEngine

Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """Of one run: losses[rank][micro-step], norms[step], and the exact weights by name.

    stray: the first weight that is not the same on all ranks; dtype: what forward and backward computed in.
    begin: checksums of the weights before the first step, where they were taken.
    """

    losses: list[list[float]]
    norms: list[float]
    params: Values
    stray: str | None
    dtype: str
    begin: dict[str, int] = field(default_factory=dict)


class Recorder:
    """Listens to an engine: the loss of each backward and the norm of each step.

    Losses are what `engine.backward` got; where it is never called, what the engine returned.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.norms: list[float] = []
        self._losses: list[float] = []
        self._returned: list[float] = []
        self._backward, self._step = engine.backward, engine.step
        # On the object, in front of the methods of its class: the user's loop must not see a difference.
        engine.backward, engine.step = self._heard_backward, self._heard_step
        engine.register_forward_hook(self._heard_forward)
        self.after_step: Any = None
        self.begin: dict[str, int] = {}

    def look_at_begin(self) -> None:
        """Remember the weights of now, as the model computes with them: masters may hold more; collective."""
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.engine._config.compute_dtype, torch.float32)
        self.begin = hashes({name: value.to(dtype) for name, value in weights(self.engine).items()})

    @property
    def losses(self) -> list[float]:
        """The loss of each micro-step on this rank."""
        return self._losses or self._returned

    @property
    def dtype(self) -> str:
        """What forward and backward compute in: fp32, bf16 or fp16."""
        settings = self.engine._config
        if not settings.torch_autocast.enabled:
            return settings.compute_dtype
        return {"fp16": "fp16", "float16": "fp16"}.get(str(settings.torch_autocast.dtype), "bf16")

    def _heard_forward(self, module: Any, args: Any, output: Any) -> None:
        loss = find_loss(output)
        if loss is not None and loss.requires_grad:
            self._returned.append(float(loss.detach()))

    def _heard_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(float(loss.detach()))
        return self._backward(loss, *args, **kwargs)

    def _heard_step(self, *args: Any, **kwargs: Any) -> Any:
        before = self.engine.global_steps
        result = self._step(*args, **kwargs)
        if self.engine.global_steps > before:
            norm = self.engine.get_global_grad_norm()
            self.norms.append(float("nan") if norm is None else float(norm))
            if self.after_step is not None:
                self.after_step()
        return result


def find_loss(output: Any) -> torch.Tensor | None:
    """The loss in what a model returned: the scalar itself, `.loss`, `["loss"]` or `[0]`; None if there is none."""
    found = output
    if isinstance(output, dict):
        found = output.get("loss")
    elif not isinstance(output, torch.Tensor):
        found = getattr(output, "loss", None)
        if found is None and isinstance(output, (tuple, list)) and output:
            found = output[0]
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def weights(engine: Any) -> Values:
    """The exact weights by name, on the CPU: masters where there are such; collective, one unit at a time."""
    if isinstance(engine, PlainEngine):
        return {name: master.detach().cpu().clone() for name, master in engine.masters.items()}
    found: Values = {}
    for unit in engine._sharded.units:
        found |= _of_unit(unit, engine._sharded.mesh.shard)
    return {name: found[name] for name, _ in engine.module.named_parameters()}


def _of_unit(unit: Unit, axis: Any) -> Values:
    names = [spec.name for spec in unit.plan.params]
    if unit.master is None:
        with torch.no_grad(), GatheredParameters(unit.params):
            return {name: param.detach().cpu().clone() for name, param in zip(names, unit.params, strict=True)}
    layout = unit.plan.layout
    full = torch.empty(layout.numel, dtype=torch.float32, device=unit.full.device)
    full.narrow(0, *unit.window).copy_(unit.exact())
    comm.gather(full, axis, 3 * unit.index).wait()
    shapes = [param.shape for param in unit.params]
    pairs = zip(names, layout.spans.values(), shapes, strict=True)
    return {name: full.narrow(0, *span).view(shape).cpu().clone() for name, span, shape in pairs}


def hashes(values: Values) -> dict[str, int]:
    """A checksum of each tensor's bytes."""
    return {
        name: zlib.crc32(value.contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        for name, value in ((name, value.reshape(-1)) for name, value in values.items())
    }


def stray(of_ranks: list[dict[str, int]]) -> str | None:
    """The first parameter whose checksum is not the same on all ranks, with the first such rank."""
    for name, wanted in of_ranks[0].items():
        for rank, found in enumerate(of_ranks):
            if found.get(name) != wanted:
                return f"'{name}' on rank {rank}"
    return None


def save(folder: Path, rank: int, recorders: list[Recorder]) -> None:
    """Write this rank's part of the outcome, and on rank 0 the weights; collective."""
    from safetensors.torch import save_file

    values: Values = {}
    begin: dict[str, int] = {}
    for index, recorder in enumerate(recorders):
        prefix = f"engine {index}: " if len(recorders) > 1 else ""
        values |= {prefix + name: value for name, value in weights(recorder.engine).items()}
        begin |= {prefix + name: value for name, value in recorder.begin.items()}
    if rank == 0:
        save_file(values, folder / "weights.safetensors")
    record = {
        "losses": [loss for recorder in recorders for loss in recorder.losses],
        "norms": [norm for recorder in recorders for norm in recorder.norms],
        "hashes": hashes(values),
        "dtype": recorders[0].dtype,
        "begin": begin,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(record))


def load(folder: Path) -> Outcome | None:
    """What `save` wrote; None where a rank's part is missing."""
    from safetensors.torch import load_file

    paths = [folder / f"rank{rank}.json" for rank in range(len(list(folder.glob("rank*.json"))))]
    if not paths or not all(path.exists() for path in paths) or not (folder / "weights.safetensors").exists():
        return None
    records = [json.loads(path.read_text()) for path in paths]
    params = load_file(folder / "weights.safetensors")
    # In the model's order, so that "first" means what the user thinks.
    params = {name: params[name] for name in records[0]["hashes"]}
    losses = [record["losses"] for record in records]
    first, strayed = records[0], stray([record["hashes"] for record in records])
    return Outcome(losses, first["norms"], params, strayed, first["dtype"], first["begin"])
