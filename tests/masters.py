"""The exact values of this rank's shards, by parameter."""

from __future__ import annotations

from typing import Any

import torch

from zero.core.owner import owner_of


def exact(engine: Any) -> dict[str, torch.Tensor]:
    """The masters of this rank's shards by parameter; a frozen one, or one that it has no part of, has none."""
    found = {}
    for unit in engine._sharded.trained:
        values = unit.exact()
        for piece in unit.plan.layout.fragments(unit.window):
            found[piece.name] = values[piece.at : piece.at + piece.numel].clone()
    return found


def part(engine: Any, name: str, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole value."""
    unit = owner_of(engine.module.get_parameter(name)).unit
    pieces = [piece for piece in unit.plan.layout.fragments(unit.window) if piece.name == name]
    return torch.cat(
        [value.flatten()[piece.start : piece.start + piece.numel] for piece in pieces] or [value.flatten()[:0]]
    )
