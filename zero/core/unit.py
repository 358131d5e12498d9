"""A unit: parameters that are gathered, reduced and released together, as a small state machine.

    SHARDED --gather--> GATHERING --wait--> FULL --release / invalidate--> SHARDED

The fifth verb, reduce, concerns the gradient and is legal in every state.

Storage is flat, parameters are not: the module keeps its own `nn.Parameter` objects, which become views of
the unit's flat buffer. Releasing resizes that buffer's storage to 0 and gathering resizes it back, so that
views which autograd saved in between are valid again when backward reaches them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from zero.core import comm
from zero.core.comm import Transfer
from zero.core.gradients import GradientDtypes, Gradients
from zero.core.master import Master, rounded
from zero.core.mesh import Mesh
from zero.core.owner import Owner, owner_of
from zero.core.released import absent, released_class
from zero.core.tensors import different, holders_of, memory_of
from zero.plan.layout import Fragment, Span
from zero.plan.units import UnitPlan


class State(enum.Enum):
    """What is in memory of a unit's parameters.

    SHARDED:   the own shard. Where parameters are cut, nothing else; where they are not, a full copy that
               the optimizer has outdated.
    GATHERING: the shard, and a full buffer that is being filled.
    FULL:      the shard and a valid full buffer; parameters may be read.
    AWAY:      nothing; somebody keeps the values elsewhere and resized the storages to 0.
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"
    AWAY = "away"


LEGAL = {
    (State.SHARDED, "gather"): State.GATHERING,
    (State.GATHERING, "wait"): State.FULL,
    (State.FULL, "release"): State.SHARDED,
    (State.FULL, "invalidate"): State.SHARDED,
    (State.SHARDED, "put away"): State.AWAY,
    (State.FULL, "put away"): State.AWAY,
    (State.AWAY, "take back"): State.SHARDED,
    (State.AWAY, "show"): State.FULL,
}


class Unit:
    """Parameters with one flat buffer, one shard, one gradient.

    full:   flat [layout.numel] in the unit's dtype; its storage has size 0 while released;
    shard:  this rank's slice [numel / shard axis]: a view of `full` unless parameters are cut;
    master: the exact values of that slice, for the optimizer; None when frozen;
    holds:  how many readers (`GatheredParameters`) keep it full for now;
    edited: indices of the parameters that such readers will write back, one entry for each reader;
    bring:  asked when somebody reads a parameter that is away; makes the unit full and says True, or False;
    whole:  stays full between uses although it is cut: only the optimizer's step takes its full copy away;
    optimizer: gives the optimizer that updates it, or None; weak, because parameters outlive engines.
    """

    _away = staticmethod(released_class)

    def __init__(self, plan: UnitPlan, params: Sequence[nn.Parameter], index: int, mesh: Mesh, cut: bool) -> None:
        self.plan = plan
        self.index = index
        self.params = list(params)
        self.cut = cut and mesh.shard.size > 1
        self.state = State.FULL
        self.gradients: Gradients | None = None
        self.holds = 0
        self.edited: list[int] = []
        self.bring: Callable[[Unit], bool] | None = None
        self.optimizer: Callable[[], Any] = no_optimizer
        self.whole = False
        self._covered = False  # full, but the parameters look released
        self._holders = 0  # of the full buffer's memory, before it was filled
        self._mesh = mesh
        self._axis = mesh.shard
        self._transfer: Transfer | None = None
        self._kinds = [type(param) for param in params]
        self._versions = [param._version for param in params]

    @property
    def mesh(self) -> Mesh:
        """The ranks that share it."""
        return self._mesh

    @property
    def window(self) -> Span:
        """This rank's shard as a span of the flat buffer."""
        return self.plan.layout.shard(self._axis.rank, self._axis.size)

    def adopt(
        self, dtype: torch.dtype, device: torch.device, gradient_dtypes: GradientDtypes, remainder: bool = False
    ) -> None:
        """Move the parameters into flat storage, with rank 0's values, and keep this rank's shard.

        The masters are cut from the values before they are rounded to a 16-bit `dtype`; with `remainder`, which
        needs bf16, what is kept of them is what the rounding took away. A parameter built under `zero.Init` is fetched
        from its ranks, one at a time, and is not sent again.
        """
        layout, trained = self.plan.layout, self.plan.requires_grad
        source = torch.float32 if trained and dtype.itemsize < 4 else dtype
        flat = torch.zeros(layout.numel, dtype=source, device=device)
        places = [flat.narrow(0, *span) for span in layout.spans.values()]
        unequal = [place for param, place in zip(self.params, places, strict=True) if not _copy(param, place)]
        for place in [flat] if len(unequal) == len(places) else unequal:
            for axis in (self._mesh.shard, self._mesh.replica):
                comm.broadcast(place, 0, axis, self.plan.name)
        self._kinds = [type(param) for param in self.params]  # of released ones, only now
        own = self.window
        self.full = flat if source == dtype else rounded(flat, dtype)
        self.shard = self.full.narrow(0, *own).clone() if self.cut else self.full.narrow(0, *own)
        self.master = Master(self.shard, flat.narrow(0, *own), remainder) if trained else None
        self._views = self._views_of(self.full)
        self._holders = holders_of(self.full)
        self._absent = [absent(param.shape, dtype, device) for param in self.params]
        for position, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            param.data = view
            param.grad = None
            param._zero_owner = Owner(self.plan.params[position].name, self, position)
        self._versions = [param._version for param in self.params]
        if trained:
            shapes = [param.shape for param in self.params]
            self.gradients = Gradients(self.plan, shapes, self._mesh, gradient_dtypes, device, 3 * self.index + 1)

    def gather(self) -> None:
        """Start to bring the full parameters; a no-op when they are there or on their way."""
        if self.state is State.AWAY:
            raise self.absence()
        if self.state is not State.SHARDED:
            return
        if self.cut:
            self._allocate()
            self.full.narrow(0, *self.window).copy_(self.shard)
        self._transfer = comm.gather(self.full, self._axis, 3 * self.index)
        self._move("gather")

    def wait(self) -> None:
        """Block until the full parameters may be read; a no-op when they are."""
        if self.state is State.FULL:
            self._uncover()
            return
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()
        self._move("wait")
        if self.cut:
            self._show()

    def release(self, spare: bool = True) -> None:
        """Give the memory of the full parameters back, where parameters are cut; else they stay.

        With `spare`, memory that somebody has come to hold a view of since it was filled is left to him, and the
        unit takes new memory next time. Only a graph that was built meanwhile must not count as somebody: its
        views are to find the parameters again where they were, so whoever builds one says `spare=False`.
        """
        if not self.whole:
            self._release(spare)

    def cover(self) -> None:
        """Keep the memory, but let the parameters look released, so that it is noticed when somebody reads them."""
        if self.cut and self.state is State.FULL and not (self.whole or self.holds or self._covered):
            self._covered = True
            for param, kind in zip(self.params, self._kinds, strict=True):
                param.__class__ = self._away(kind)

    def invalidate(self) -> None:
        """The shard is about to change: whatever full copy there is must be gathered again.

        Tells autograd too, so that a graph built before the change raises, as it does in plain torch. What the
        user wrote into parameters until now is in the masters afterwards.
        """
        if self.cut:
            if self.holds:
                raise RuntimeError(
                    f"unit '{self.plan.name}' is updated while GatheredParameters holds it open; step() outside of it"
                )
            self._release(True)
            self._versions = [version + 1 for version in self._versions]
            return
        self.wait()
        self.take_edits()
        torch.autograd.graph.increment_version(self.params)
        self._versions = [param._version for param in self.params]
        self._move("invalidate")

    def put_away(self) -> None:
        """Nobody may read parameters or shard until `take_back`; their storages may be given back between the two."""
        if self.holds:
            raise RuntimeError(f"unit '{self.plan.name}' is held open by GatheredParameters; leave that block first")
        self._release(True)
        if not self.cut:
            self.wait()
            self.take_edits()
            self._hide()
        self._move("put away")

    def take_back(self) -> None:
        """The storages hold what they held at `put_away`."""
        if self.cut:
            self._move("take back")
        else:
            self._show()
            self._move("show")

    def absence(self) -> RuntimeError | None:
        """Why values cannot be worked on now, or None: they, or the state of the optimizer, are in host memory."""
        if self.state is State.AWAY or getattr(self.optimizer(), "away", False):
            return RuntimeError(
                f"the states of unit '{self.plan.name}' are offloaded (rank {self._axis.rank}); "
                "call engine.reload_states() first"
            )
        return None

    def summon(self) -> bool:
        """Make the parameters readable because somebody is about to read them; False when nobody can now."""
        shown = self.state is State.FULL and not self._covered
        return shown or (self.bring is not None and self.bring(self))

    @property
    def memory(self) -> int | None:
        """What tells the memory of the full parameters from all other: equal for every view of it."""
        return memory_of(self.full)

    @staticmethod
    def summon_all(params: Sequence[nn.Parameter]) -> bool:
        """Summon the units of all these parameters so that bringing one does not send another away again."""
        units = list({id(owner.unit): owner.unit for owner in map(owner_of, params)}.values())
        for unit in units:
            unit.holds += 1
        try:
            return all(unit.summon() for unit in units)
        finally:
            for unit in units:
                unit.holds -= 1

    def reduce(self) -> None:
        """Start to turn the full gradient into its reduced shard."""
        self.gradients.reduce()

    def check_parameters(self) -> None:
        """Raise RuntimeError, naming the parameter, where one has another shape, dtype or device than we gave it."""
        if self.cut:
            return  # released ones refuse every change themselves
        for spec, param, view in zip(self.plan.params, self.params, self._views, strict=True):
            if param.dtype != view.dtype or param.device != view.device or param.shape != view.shape:
                raise RuntimeError(
                    f"parameter '{spec.name}' of unit '{self.plan.name}' (rank {self._axis.rank}) was {view.dtype} "
                    f"{tuple(view.shape)} on {view.device} and is now {param.dtype} {tuple(param.shape)} on "
                    f"{param.device}; move and convert a model before initialize(), which then decides"
                )

    def take_edits(self) -> None:
        """Where parameters were written in place since we looked last, take what stands there as their exact values.

        It is seen by autograd's version counters, which `param.data` goes around: a write through that reaches an
        fp32 master never, one that is kept as remainders at once. Each rank looks at its own shard, so all ranks
        must write the same. While parameters are cut only GatheredParameters can write them; it calls `overwrite`.
        """
        if self.cut or self.master is None:
            return
        for index, spec in enumerate(self.plan.params):
            if wrong := self.reattach(index):
                raise RuntimeError(
                    f"the data of parameter '{spec.name}' of unit '{self.plan.name}' (rank {self._axis.rank}) was "
                    f"replaced by a tensor of another shape or dtype ({wrong}); the replacement is undone"
                )
        versions = [param._version for param in self.params]
        both = zip(self.plan.params, versions, self._versions, strict=True)
        self._follow({spec.name for spec, now, before in both if now != before})
        self._versions = versions

    def exact(self) -> torch.Tensor:
        """The masters of this rank's shard as fp32 [n], edits from outside included; to be read only."""
        self.take_edits()
        return self.master.values()

    def known(self, index: int) -> list[torch.Tensor]:
        """What this rank's shard says of parameter `index` now, for `overwrite` to tell later what has changed."""
        pieces = (piece for piece in self._fragments() if piece.name == self.plan.params[index].name)
        found = [self.shard.narrow(0, piece.at, piece.numel) for piece in pieces]
        # Where parameters are not cut, they are the shard: a write reaches it at once.
        return found if self.cut else [part.clone() for part in found]

    def overwrite(self, index: int, source: int, known: Sequence[torch.Tensor] | None = None) -> None:
        """Replace parameter `index` by its value on rank `source` everywhere: full copy, shard and master.

        With `known`, elements that still have those values keep their exact masters.
        """
        view = self._views[index]
        for axis in (self._mesh.shard, self._mesh.replica):
            comm.broadcast(view, source, axis, self.plan.name)
        name = self.plan.params[index].name
        pieces = [piece for piece in self._fragments() if piece.name == name]
        for position, piece in enumerate(pieces):
            values = view.reshape(-1).narrow(0, piece.start, piece.numel)
            changed = None if known is None else different(values, known[position])
            if self.cut:
                self.shard.narrow(0, piece.at, piece.numel).copy_(values)
            if self.master is not None:
                self.master.follow(piece.at, piece.numel, changed)
        self._versions[index] = self.params[index]._version

    def written_back(self, index: int) -> int:
        """The version of parameter `index` when what stood in it was last taken as its exact value."""
        return self._versions[index]

    def reattach(self, index: int) -> str | None:
        """After a write from outside: have parameter `index` be our view again if `param.data` was replaced.

        Its values are taken. Returns what is wrong instead if it has another shape or dtype, which is undone.
        """
        param, view = self.params[index], self._views[index]
        same = param.shape == view.shape and param.dtype == view.dtype and param.device == view.device
        if same and param.data_ptr() == view.data_ptr() and param.stride() == view.stride():
            return None
        values, fits = param.detach(), param.shape == view.shape and param.dtype == view.dtype
        param.data = view
        if fits:
            view.copy_(values)
            torch.autograd.graph.increment_version(param)
            return None
        return f"{values.dtype} {tuple(values.shape)} where {view.dtype} {tuple(view.shape)} was"

    def renew(self, index: int, values: torch.Tensor) -> None:
        """Take `values` [numel], in the unit's dtype, as parameter `index` in the full copy, where there is one.

        Shard and master hold them already. Autograd is told, so that a graph built before raises, as in plain torch.
        """
        if self.state is State.GATHERING:
            self.wait()
        if not self.cut or self.state is State.FULL:
            self._views[index].view(-1).copy_(values)
        if self.cut and self.state is State.SHARDED:
            self._versions[index] += 1
        elif not self.holds:  # GatheredParameters would take it for a change that is lost
            torch.autograd.graph.increment_version((self.params[index],))
            self._versions[index] = self.params[index]._version

    def dissolve(self) -> None:
        """Give every parameter storage of its own again, with its current value, and forget the flat buffers."""
        self.gather()
        self.wait()
        for param in self.params:
            param.data = param.data.clone()
            del param._zero_owner
        if self.gradients is not None:
            self.gradients.drop()

    def _release(self, spare: bool) -> None:
        if not self.cut or self.holds or self.state in (State.SHARDED, State.AWAY):
            return
        self.wait()  # messages on their way still write into the buffer
        self._hide()
        self._free(spare)
        self._move("release")

    def _allocate(self) -> None:
        self._holders = holders_of(self.full)
        self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)

    def _free(self, spare: bool) -> None:
        if spare and holders_of(self.full) > self._holders:
            with torch.inference_mode(False):  # an inference tensor could not be written outside of that mode
                self.full = torch.empty_like(self.full)
                self._views = self._views_of(self.full)
        self.full.untyped_storage().resize_(0)

    def _fragments(self) -> tuple[Fragment, ...]:
        return self.plan.layout.fragments(self.window)

    def _follow(self, names: Collection[str]) -> None:
        if names and self.master is not None:
            for fragment in self._fragments():
                if fragment.name in names:
                    self.master.follow(fragment.at, fragment.numel)

    def _move(self, verb: str) -> None:
        after = LEGAL.get((self.state, verb))
        if after is None:
            raise RuntimeError(
                f"unit '{self.plan.name}' (rank {self._axis.rank}) cannot {verb} while it is {self.state.value}"
            )
        self.state = after

    def _views_of(self, full: torch.Tensor) -> list[torch.Tensor]:
        spans = self.plan.layout.spans.values()
        return [full.narrow(0, *span).view(param.shape) for param, span in zip(self.params, spans, strict=True)]

    def _uncover(self) -> None:
        if self._covered:
            self._covered = False
            for param, kind in zip(self.params, self._kinds, strict=True):
                param.__class__ = kind

    def _show(self) -> None:
        for param, view, kind in zip(self.params, self._views, self._kinds, strict=True):
            param.__class__ = kind
            param.data = view
        torch._C._autograd._unsafe_set_version_counter(tuple(self.params), tuple(self._versions))

    def _hide(self) -> None:
        self._versions = [param._version for param in self.params]
        torch.autograd.graph.increment_version(self.params)
        for param, nothing, kind in zip(self.params, self._absent, self._kinds, strict=True):
            param.data = nothing
            param.__class__ = self._away(kind)


def no_optimizer() -> None:
    """What `Unit.optimizer` is until one is bound."""


def _copy(param: nn.Parameter, place: torch.Tensor) -> bool:
    """Copy a parameter's values to its place [numel] in a flat buffer; True if all ranks have the same ones."""
    target, owner = place.view(param.shape), owner_of(param)
    if owner is not None:  # of a model under construction
        return owner.unit.hand_over(target)
    target.copy_(param.detach())
    return False
