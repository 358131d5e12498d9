"""What users write into parameters between steps, and how it reaches the shard and the exact values behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zero.core import comm
from zero.core.master import Master
from zero.core.mesh import Axis, Mesh
from zero.core.state import State
from zero.core.tensors import different
from zero.memory.copy_stream import record_event
from zero.memory.state_placement import StatePlacement
from zero.plan.layout import Fragment, Span
from zero.plan.units import UnitPlan


class MasterSync:
    """Mixed into `Unit`."""

    plan: UnitPlan
    params: list[nn.Parameter]
    placement: StatePlacement
    cut: bool
    holds: int
    state: State
    shard: torch.Tensor
    master: Master | None
    window: Span
    _axis: Axis
    mesh: Mesh
    _versions: list[int]
    _views: list[torch.Tensor]
    _thawed: list[bool]
    full: torch.Tensor
    _filled: torch.cuda.Event | None
    _copied: torch.cuda.Event | None

    def check_parameters(self) -> None:
        """Raise RuntimeError, naming the parameter, where one has another shape, dtype, device or requires_grad.

        So too where one that is trained has a gradient of its own: ours are taken from there as they land.
        """
        for spec, param, thawed in zip(self.plan.params, self.params, self._thawed, strict=True):
            if self.master is not None and param.grad is not None:
                raise RuntimeError(
                    f"parameter '{spec.name}' of unit '{self.plan.name}' (rank {self._axis.rank}): its .grad was "
                    "assigned, and no step would use it; call zero.utils.safe_set_full_grad(param, value) between "
                    "backward() and step() on all ranks, or set .grad to None"
                )
            if param.requires_grad != thawed:
                # Thawed, it would silently not be trained; frozen, weight decay and momentum would still move it.
                raise RuntimeError(
                    f"parameter '{spec.name}' of unit '{self.plan.name}' (rank {self._axis.rank}): requires_grad was "
                    f"{thawed} at initialize() and is now {param.requires_grad}; set it before initialize(). To train "
                    "it in some steps only, give it a parameter group of its own, whose lr is 0 in the others"
                )
        if self.cut:
            return  # released ones refuse every change themselves
        for spec, param, view in zip(self.plan.params, self.params, self._views, strict=True):
            if param.dtype != view.dtype or param.device != view.device or param.shape != view.shape:
                raise RuntimeError(
                    f"parameter '{spec.name}' of unit '{self.plan.name}' (rank {self._axis.rank}) was {view.dtype} "
                    f"{tuple(view.shape)} on {view.device} and is now {param.dtype} {tuple(param.shape)} on "
                    f"{param.device}; move, convert and resize a model before initialize(), which then decides"
                )

    def take_edits(self) -> None:
        """Where parameters were written in place since we looked last, take what stands there as their exact values.

        It is seen by autograd's version counters, which `param.data` goes around: a write through that reaches an
        fp32 master never, one that is kept as remainders at once. Each rank looks at its own shard, so all ranks
        must write the same. While parameters are cut only GatheredParameters can write them; it calls `overwrite`.
        """
        if self.cut or (self.master is None and self.state is State.AWAY):
            return
        if self.state is not State.AWAY:
            self.wait()  # for an update that still runs
        for index in range(len(self.params)):
            self._put_back(index)
        if self.master is None:
            return
        versions = [param._version for param in self.params]
        both = zip(self.plan.params, versions, self._versions, strict=True)
        changed = {spec.name for spec, now, before in both if now != before}
        if changed:
            with self.borrow(written=True):
                for fragment in self._fragments():
                    if fragment.name in changed:
                        self._follow(fragment)
        self._versions = versions

    def keep_writes(self) -> None:
        """Where parameters are cut: before the full copy goes, take what a forward has written into it.

        As where they are not cut, each rank takes its own part, so all ranks must write the same. `nn.Embedding` with
        `max_norm` writes so, and momentum encoders do. Writes through `param.data` in place are not seen.
        """
        changed = set()
        both = zip(self.plan.params, self.params, self._views, self._versions, strict=True)
        for index, (spec, param, view, before) in enumerate(both):
            version = param._version
            replaced = param.data_ptr() != view.data_ptr()
            if replaced:
                self._put_back(index)
                # The graph that was built since has read these very values.
                torch._C._autograd._unsafe_set_version_counter((param,), (version,))
            if replaced or version != before:
                changed.add(spec.name)
        if not changed:
            return
        own = self.full.narrow(0, *self.window)
        with self.borrow(written=True):
            for piece in self._fragments():
                if piece.name in changed:
                    part = self.shard.narrow(0, piece.at, piece.numel)
                    values = own.narrow(0, piece.at, piece.numel).to(part.device)
                    where = different(values, part)
                    part.copy_(values)
                    self._follow(piece, where)
        self._versions = [param._version for param in self.params]

    def exact(self) -> torch.Tensor:
        """The masters of this rank's shard as fp32 [n], edits from outside included; to be read only."""
        self.take_edits()
        with self.borrow():
            values = self.master.values()
            return values if self.placement.state_store.resident else values.clone()

    @contextlib.contextmanager
    def borrow(self, written: bool = False, step: bool = False) -> Iterator[None]:
        """Inside, shard, master and moments may be read, and with `written` changed, wherever they rest.

        `step`: for the optimizer's step; see `acquired`.
        """
        self.settle()
        with self.acquired(written, step):
            yield

    @contextlib.contextmanager
    def acquired(self, written: bool, step: bool) -> Iterator[None]:
        """As `borrow`, for the update itself, which does not wait for itself.

        `step`: a shard that the master has a copy of is written as a whole and not read. After an exception nothing
        is written, so that what rests elsewhere is what it was.
        """
        self.land()
        with self.placement.acquired(written, step):
            yield

    def write_exact(self, start: int, values: torch.Tensor) -> None:
        """Replace the exact values from element `start` of the shard on by `values`, fp32 [k], and their roundings."""
        with self.borrow(written=True):
            self.master.write(start, values.to(self.placement.update_device))
            self.push(start, values.numel())

    def push(self, start: int = 0, numel: int | None = None) -> None:
        """Have the shard show what was written to the master, where that has a shard of its own."""
        part = slice(start, None if numel is None else start + numel)
        if self.placement.publish(self.master.shard, self.shard, part):
            self._copied = record_event(self.full.device)

    def land(self) -> None:
        """Wait until no copy between device and host reads or writes the shard in host memory any more."""
        for event in (self._filled, self._copied):
            if event is not None:
                event.synchronize()
        self._copied = None

    def known(self, index: int) -> list[torch.Tensor]:
        """What this rank's shard says of parameter `index` now, for `overwrite` to tell later what has changed."""
        with self.borrow():
            pieces = (piece for piece in self._fragments() if piece.name == self.plan.params[index].name)
            found = [self.shard.narrow(0, piece.at, piece.numel) for piece in pieces]
            # Where parameters are not cut, they are the shard: a write reaches it at once.
            fixed = self.cut and self.placement.shard_store.resident
            return found if fixed else [part.clone() for part in found]

    def overwrite(self, index: int, source: int, known: Sequence[torch.Tensor] | None = None) -> None:
        """Replace parameter `index` by its value on rank `source` everywhere: full copy, shard and master.

        With `known`, elements that still have those values keep their exact masters.
        """
        view = self._views[index]
        for axis in (self.mesh.shard, self.mesh.replica):
            comm.broadcast(view, source, axis, self.plan.name)
        name = self.plan.params[index].name
        pieces = [piece for piece in self._fragments() if piece.name == name]
        with self.borrow(written=True):
            for position, piece in enumerate(pieces):
                values = view.reshape(-1).narrow(0, piece.start, piece.numel).to(self.shard.device)
                changed = None if known is None else different(values, known[position])
                if self.cut:
                    self.shard.narrow(0, piece.at, piece.numel).copy_(values)
                self._follow(piece, changed)
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

    def _put_back(self, index: int) -> None:
        """As `reattach`; RuntimeError that names the parameter where that finds something wrong."""
        if wrong := self.reattach(index):
            raise RuntimeError(
                f"the data of parameter '{self.plan.params[index].name}' of unit '{self.plan.name}' (rank "
                f"{self._axis.rank}) was replaced by a tensor of another shape or dtype ({wrong}); the replacement is "
                "undone"
            )

    def forget_write(self, index: int) -> None:
        """What was written into parameter `index` until now is not to be taken."""
        self._versions[index] = self.params[index]._version

    def renew(self, index: int, values: torch.Tensor) -> None:
        """Take `values` [numel], in the unit's dtype, as parameter `index` in the full copy, where there is one.

        Shard and master hold them already. Autograd is told, so that a graph built before raises, as in plain torch.
        """
        self.settle()
        if self.state is State.GATHERING:
            self.wait()
        if not self.cut or self.state is State.FULL:
            self._views[index].view(-1).copy_(values)
        if self.cut and self.state is State.SHARDED:
            self.forget_graph()
            self._versions[index] += 1
        elif not self.holds:  # GatheredParameters would take it for a change that is lost
            torch.autograd.graph.increment_version((self.params[index],))
            self._versions[index] = self.params[index]._version

    def _fragments(self) -> tuple[Fragment, ...]:
        return self.plan.layout.fragments(self.window)

    def _follow(self, piece: Fragment, where: torch.Tensor | None = None) -> None:
        """Somebody wrote this piece of the shard (bool `where`: only those elements): take it as exact."""
        if self.master is None:
            return
        self.placement.follow_shard(self.master.shard, self.shard, slice(piece.at, piece.at + piece.numel))
        self.master.follow(piece.at, piece.numel, None if where is None else where.to(self.placement.update_device))
