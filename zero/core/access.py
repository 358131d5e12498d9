"""Reading and writing whole parameters between steps."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn

from zero.core.unit import State, owner_of


class GatheredParameters:
    """Inside the block, the given parameters may be read whole; with `modifier_rank`, that rank may change them.

    `params` is one parameter or any iterable of them; what no engine manages is passed over. A collective:
    every rank must enter and leave with the same parameters. On leaving with `modifier_rank` the values of that rank
    replace everyone's, masters included. Without it, a parameter that was changed raises RuntimeError,
    because the change would be lost or would differ between ranks.

    Where parameters are not cut (stages 0 to 2), a write in place outside of such a block is taken as well, if all
    ranks make it: `param.copy_`, `nn.init`, `load_state_dict`. What goes through `param.data` there is not seen,
    and fp32 masters overwrite it at the next step.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        found = [owner for owner in map(owner_of, given) if owner is not None] if enabled else []
        # By identity: two engines may hold parameters of the same name and index.
        owners = {(id(owner.unit), owner.index): owner for owner in found}
        # One order on all ranks, whatever order an engine's parameters were given in.
        self._owners = sorted(owners.values(), key=lambda owner: (owner.unit.index, owner.index))
        self._units = list({id(owner.unit): owner.unit for owner in self._owners}.values())
        self._modifier_rank = modifier_rank
        self._were_full: list[bool] = []
        self._versions: list[int] = []

    def __enter__(self) -> None:
        self._were_full = [unit.state is not State.SHARDED for unit in self._units]
        for unit in self._units:
            unit.gather()  # may refuse; then nobody holds it
            unit.holds += 1
        for unit in self._units:
            unit.wait()
        self._versions = [owner.param._version for owner in self._owners]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before = zip(self._owners, self._versions, strict=True)
        changed = [owner.name for owner, version in before if owner.param._version != version]
        for owner in self._owners if self._modifier_rank is not None else ():
            owner.unit.overwrite(owner.index, self._modifier_rank)
        for unit, was_full in zip(self._units, self._were_full, strict=True):
            unit.holds -= 1
            if not was_full:
                unit.release()
        if kind is None and changed and self._modifier_rank is None:
            raise RuntimeError(
                f"{changed} changed inside GatheredParameters without modifier_rank, so the change would be lost; "
                "pass modifier_rank=0 to keep rank 0's values"
            )
