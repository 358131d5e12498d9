"""This rank's piece of what belongs to a shared sequence, for what is computed outside of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad


def cut_sequence(engine: Any, whole: torch.Tensor, *, shift: bool = False, fill: float = -100) -> torch.Tensor:
    """This rank's positions of a tensor [rows, length, ...], cut as the inputs of the engine's last forward were.

    For a loss outside of the model, from outputs that are of this rank's piece: the labels of these. shift: by one
    position to the front, as labels of next tokens; fill: for what is behind them, by default what losses leave out.
    Without `sequence_parallel_size` it is the whole tensor. Raises RuntimeError before the first forward.
    """
    if shift:
        whole = pad(whole[:, 1:], (0, 0) * (whole.ndim - 2) + (0, 1), value=fill)
    sharing = engine._training.forms.sharing
    return whole if sharing is None else sharing.piece(whole, fill)
