"""Whole parameters for those who do not own them: GatheredParameters between steps, and modules that read others' ones.

A read inside a forward is noticed by itself; `register_external_parameter` is for code that reads past Python, as
kernels do that take a pointer, or that should find the parameters when the module begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero.core import comm
from zero.core.owner import owner_of
from zero.core.param_buffer import State
from zero.core.values import is_part

# What the modifier's rank tells the others of each parameter.
_SAME, _WRITTEN, _UNFIT = 0, 1, 2
_PARAMETERS = "_zero_external"
_HANDLE = "_zero_external_handle"


class LostWrite(RuntimeError):
    """Parameters changed in a block that takes no changes.

    resharded: some are, and so have their former values again.
    """

    def __init__(self, text: str, resharded: bool = False) -> None:
        super().__init__(text)
        self.resharded = resharded


class GatheredParameters:
    """Inside the block, the given parameters may be read whole; with `modifier_rank`, that rank may change them.

    `params` is one parameter or any iterable of them; None, and what no engine and no `zero.Init` manages, is passed
    over. A collective: every rank must enter and leave with the same parameters; with an exception, too, which goes on
    to the caller after that. On leaving with `modifier_rank` the values of that rank replace everyone's. What it wrote
    is exact from then on; elements that it did not change keep their exact masters. Without `modifier_rank`, a
    parameter that was changed raises RuntimeError, because the change would be lost or would differ between ranks.
    Of a part of a larger parameter each rank reads and writes its own: among ranks that do not share it with
    `modifier_rank`, the one in its place counts.
    `param.data` may be replaced by a tensor of the same shape and dtype; by another, every rank raises RuntimeError,
    and the parameter keeps its values.

    Blocks may be nested, also with the same parameters: one that writes inside one that reads is seen by the outer,
    and changes inside one that reads belong to the one around it that writes.

    Where parameters are not resharded (stages 0 to 2), a write in place outside of such a block is taken as well, if
    all ranks make it: `param.copy_`, `nn.init`, `load_state_dict`. What goes through `param.data` there is not seen,
    and fp32 masters overwrite it at the next step.

    fwd_module: a module that reads the parameters in its forward although they are not its own.
    Raises ValueError for a `modifier_rank` that is no rank, and for what are no parameters.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = _tensors(params)
        _check_rank(modifier_rank, range(dist.get_world_size() if dist.is_initialized() else 1))
        found = [owner for owner in map(owner_of, given) if owner is not None] if enabled else []
        # By identity: two engines may hold parameters of the same name and index.
        owners = {(id(owner.unit), owner.index): owner for owner in found}
        # One order on all ranks, whatever order an engine's parameters were given in.
        self._owners = sorted(owners.values(), key=lambda owner: (owner.unit.index, owner.index))
        self._units = list({id(owner.unit): owner.unit for owner in self._owners}.values())
        for unit in self._units:
            _check_rank(modifier_rank, unit.mesh.world.ranks)
        self._modifier_rank = modifier_rank
        self._were_full: list[bool] = []
        self._versions: list[int] = []
        self._references: list[tuple[int, ...]] = []
        self._before: list[torch.Tensor | None] = []
        for param in given if enabled and fwd_module is not None else ():
            register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        for unit in self._units:
            unit.shard.settle()  # may raise what an update has failed with, while nothing is held
        self._were_full = [unit.state is not State.SHARDED for unit in self._units]
        for unit in self._units:
            if not unit.shard.fetch():
                break
        held = 0
        try:
            for unit in self._units:
                unit.gather_exact()  # may refuse, and memory may end
                unit.holds, held = unit.holds + 1, held + 1
            for unit in self._units:
                unit.wait()
                unit.take_writes()  # writes before the block follow other rules
        except BaseException:
            for unit, was_full in zip(self._units[:held], self._were_full, strict=False):
                unit.holds -= 1
                if not was_full:
                    unit.release()
            raise
        self._versions = [owner.param._version for owner in self._owners]
        self._references = [unit.buffer.references() for unit in self._units]
        if self._modifier_rank is not None:
            self._before = [owner.unit.snapshot(owner.index) for owner in self._owners]
            for owner in self._owners:
                owner.unit.edited.append(owner.index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wrong = [owner.unit.buffer.reattach(owner.index) for owner in self._owners]
        states = []
        for owner, version, text in zip(self._owners, self._versions, wrong, strict=True):
            # Since it had this version, and since a block inside wrote it back.
            written = owner.param._version not in (version, owner.unit.buffer.versions[owner.index])
            states.append(_UNFIT if text else _WRITTEN if written else _SAME)
        if self._modifier_rank is not None:
            states = self._write_back(states)
        for owner, state in zip(self._owners, states, strict=True):
            if state == _WRITTEN and owner.index not in owner.unit.edited and owner.unit.resharded:
                owner.unit.buffer.note_versions([owner.index])  # what was written is not taken
        for unit, before in zip(self._units, self._references, strict=True):
            if unit.resharded and torch.is_grad_enabled():
                # A term of the loss, perhaps: its backward, outside, finds the values. Ranks need not agree on that.
                grown = any(now > then for now, then in zip(unit.buffer.references(), before, strict=True))
                unit.buffer.kept_for_graph |= grown
            unit.holds -= 1  # of all, before a release that may fail
        for unit, was_full in zip(self._units, self._were_full, strict=True):
            if not was_full:
                unit.release()
        if kind is None:
            self._complain(states, wrong)

    def _write_back(self, states: list[int]) -> list[int]:
        """Have the modifier's values on all ranks; returns what it says of each parameter."""
        if not self._owners:
            return states
        said = torch.tensor(states, dtype=torch.uint8)
        for mesh in {id(unit.mesh.data): unit.mesh for unit in self._units}.values():
            comm.broadcast(said, mesh.counterpart(self._modifier_rank), mesh.data)
        states = said.tolist()
        for owner, state, before in zip(self._owners, states, self._before, strict=True):
            mesh = owner.unit.mesh
            source, peers = mesh.counterpart(self._modifier_rank), mesh.peers
            if mesh.data.rank == source and not is_part(owner):
                first = peers.ranks.index(self._modifier_rank) if self._modifier_rank in peers.ranks else 0
                comm.broadcast(owner.param, first, peers, owner.unit.plan.name)
            owner.unit.edited.remove(owner.index)
            # Values travel in any case: what is written through `param.data` leaves no trace in the version.
            owner.unit.overwrite(owner.index, source, None if state == _WRITTEN else before)
        return states

    def _complain(self, states: list[int], wrong: list[str | None]) -> None:
        pairs = list(zip(self._owners, states, strict=True))
        if unfit := [owner.name for owner, state in pairs if state == _UNFIT]:
            how = "; ".join(text for text in wrong if text)
            raise RuntimeError(
                f"{unfit}: the data of these parameters was replaced inside GatheredParameters by tensors of another "
                f"shape or dtype{f' ({how})' if how else ''}; the replacement is undone. "
                "Resize a model before initialize(), and one built under zero.Init inside another such block"
            )
        changed = [owner.name for owner, state in pairs if state == _WRITTEN and owner.index not in owner.unit.edited]
        if changed and self._modifier_rank is None:
            resharded = any(owner.unit.resharded for owner, state in pairs if state == _WRITTEN)
            raise LostWrite(
                f"{changed} changed inside GatheredParameters without modifier_rank, so the change would be lost; "
                "pass modifier_rank=0 to keep rank 0's values",
                resharded,
            )


def _tensors(params: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(params, torch.Tensor):
        return [params]
    if isinstance(params, nn.Module) or not isinstance(params, Iterable):
        raise ValueError(
            f"GatheredParameters(params=...): got {type(params).__name__}; wanted parameters, like module.parameters()"
        )
    given = [item for item in params if item is not None]  # a bias that a layer has not
    for item in given:
        if not isinstance(item, torch.Tensor):
            raise ValueError(
                f"GatheredParameters(params=...): got a {type(item).__name__} among them; wanted parameters"
            )
    return given


def _check_rank(rank: int | None, ranks: Sequence[int]) -> None:
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank not in ranks):
        line = list(ranks) == list(range(len(ranks)))
        wanted = f"a rank from 0 to {len(ranks) - 1}" if line else f"one of the engine's ranks {list(ranks)}"
        raise ValueError(f"GatheredParameters(modifier_rank=...): got {rank!r}; wanted {wanted}, or None")


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Gather `parameter`, which belongs to another module, whenever `module` begins its forward.

    Before or after `zero.initialize`, in a constructor too; a second time for the same parameter does nothing. Raises
    TypeError for what is no module and RuntimeError for what is no parameter.
    """
    _check(module, parameter)
    known = module.__dict__.setdefault(_PARAMETERS, [])
    if not any(each is parameter for each in known):
        known.append(parameter)
    if _HANDLE not in module.__dict__:
        # The engine's own hook comes before it, so that the module is the one that reads.
        module.__dict__[_HANDLE] = module.register_forward_pre_hook(_ensure_gathered)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`. Raises RuntimeError for a parameter that was not registered there."""
    _check(module, parameter)
    known = module.__dict__.get(_PARAMETERS, [])
    rest = [each for each in known if each is not parameter]
    if len(rest) == len(known):
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} is not registered as external to {type(module).__name__}"
        )
    module.__dict__[_PARAMETERS] = rest
    if not rest:
        module.__dict__.pop(_HANDLE).remove()


def _ensure_gathered(module: nn.Module, args: Any) -> None:
    for parameter in module.__dict__.get(_PARAMETERS, ()):
        owner = owner_of(parameter)
        if owner is not None:
            owner.unit.ensure_gathered()


def _check(module: nn.Module, parameter: nn.Parameter) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"a parameter is external to a module; got {type(module).__name__}, wanted an nn.Module")
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"only a parameter can be external; got {type(parameter).__name__}, wanted an nn.Parameter")
