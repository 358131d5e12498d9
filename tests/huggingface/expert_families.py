"""Tiny models of every family of Transformers with an expert-parallel plan, divided by two ranks, beside plain torch.

    python tests/huggingface/expert_families.py [--write] [FAMILY ...]

with `tests` on PYTHONPATH says what each family gives: "equal", "refused", with zero's reason, or "plain", where plain
Transformers does not build or run it here; anything else is a fault. `--write` puts it in expert_families.json.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from every_model import PlainCannot, _said, families
from tensor_families import (
    CLOSE,
    NEAR,
    OWN,
    ROUNDED,
    _apart,
    _default,
    _gradients,
    _loss,
    _norm,
    _worst,
    built,
    classes,
)

TABLE = Path(__file__).with_name("expert_families.json")
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
    "expert_parallel": {"enabled": True, "autoep_size": 2},
}
WITH_EXPERTS = {  # configurations that have them only if asked
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
}


def planned() -> list[str]:
    """All families with such a plan: of a configuration, or one below it."""
    return [family for family in sorted(families()) if _plans(_default(family))]


def _plans(config: Any) -> bool:
    below = [each for each in getattr(config, "__dict__", {}).values() if hasattr(each, "base_model_ep_plan")]
    plan = getattr(config, "base_model_ep_plan", None) or {}
    return "ep_dispatch_experts" in plan.values() or any(map(_plans, below))


def outcome(family: str) -> tuple[str, str, str]:
    """Class, what it gives and why; on both ranks."""
    torch.set_grad_enabled(True)
    said = []
    for kind in classes(family):
        try:
            with mock.patch.dict(OWN, WITH_EXPERTS):
                model, inputs = built(family, kind)
        except PlainCannot as error:
            said.append((kind.__name__, "plain", str(error)))
            continue
        try:
            return (kind.__name__, *_divided(model, inputs))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            at = " < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in reversed(frames[-5:]))
            return kind.__name__, "fault", f"{_said(error)} [{at}]"
    return said[0] if said else ("", "plain", "no class")


def of_rank(inputs: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Of the second rank, with the words turned round: each has other tokens."""
    return {
        name: each.flip(1) if rank and name.endswith(("ids", "labels")) and each.ndim == 2 else each
        for name, each in inputs.items()
    }


def plainly(model: Any, inputs: Mapping[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean over both ranks' inputs of the loss and of the gradients."""
    loss, grads = _gradients(model, of_rank(inputs, 0))
    model.zero_grad()
    other, more = _gradients(model, of_rank(inputs, 1))
    model.zero_grad()
    return (loss + other) / 2, {name: (grad + more[name]) / 2 for name, grad in grads.items()}


def _divided(model: Any, inputs: dict[str, Any]) -> tuple[str, str]:
    import zero
    from zero.utils import safe_get_full_grad

    exact, (wanted_loss, wanted) = copy.deepcopy(model), plainly(model, inputs)
    try:
        engine, *_ = zero.initialize(model=model, config=CONFIG)
    except ValueError as error:
        return "refused", str(error)
    try:
        loss = _loss(engine, of_rank(inputs, dist.get_rank()))
        engine.backward(loss)
        found = {name: safe_get_full_grad(param) for name, param in model.named_parameters() if name in wanted}
        engine.step()
        loss = _mean(loss)
        apart = _apart(loss, found, wanted_loss, wanted)
        apart["the norm"] = abs(float(engine.get_global_grad_norm()) / _norm(wanted) - 1)
        worst, error = _worst(apart)
        if CLOSE < error < NEAR:
            exactly = _apart_in_64_bits(exact, inputs, engine._sharded.meshes)
            worst, error = (worst, error * CLOSE / ROUNDED) if exactly is None else _worst(exactly)
        return ("equal", "") if error <= CLOSE else ("fault", f"{worst} {error} apart")
    except (RuntimeError, ValueError) as error:
        if not str(error).startswith("expert_parallel: "):
            raise
        return "refused", str(error)
    finally:
        engine.destroy()


def _mean(loss: torch.Tensor) -> float:
    dist.all_reduce(loss := loss.detach().double())
    return loss.item() / 2


def _apart_in_64_bits(model: Any, inputs: dict[str, Any], meshes: Any) -> dict[str, float] | None:
    """The same without an engine, which has no such numbers; None where plain torch fails."""
    from zero.config.expert_parallel import ExpertParallel
    from zero.parallel.experts.cutting import CutExperts
    from zero.parallel.experts.find import experts_of
    from zero.parallel.moves import assembled

    inputs = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch has no grouped product of such numbers
    try:
        wanted = plainly(model.double(), inputs)
    except RuntimeError:
        return None
    cut = CutExperts(model, experts_of(model, ExpertParallel(enabled=True, autoep_size=2), 2), meshes)
    loss, found = _gradients(model, of_rank(inputs, dist.get_rank()))
    placed = {param: place for param, place, _ in cut._placed if place.cut is not None}
    for name, param in model.named_parameters():
        if name in found and param not in placed:
            dist.all_reduce(found[name])
        elif name in found:
            found[name] = assembled(found[name], cut.axis, 0, placed[param].ranges)
    return _apart(_mean(torch.tensor(loss)), {name: grad / 2 for name, grad in found.items()}, *wanted)


def outcomes(tried: list[str]) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Families, and what each gives."""
    from ranks import Pool, RankError

    pool = Pool(2)
    for family in tried:
        try:
            first, second = pool.run(2, outcome, family)
            yield family, first if first == second else (first[0], "fault", f"ranks differ: {first}, {second}")
        except RankError as error:
            yield family, ("", "fault", str(error).strip().splitlines()[-1])
    pool.close()


if __name__ == "__main__":
    asked = [word for word in sys.argv[1:] if word != "--write"]
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for family, said in outcomes(asked or planned()):
        print(family, *said, flush=True)
        table[family] = [*said[:2], said[2][:150]]
        if "--write" in sys.argv:
            rows = (f"{json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table))
            TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
