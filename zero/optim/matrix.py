"""Muon on the shards of units: momentum stays cut, and each matrix is orthogonalised by one rank.

Once per step, after the norm, every rank updates its shard of the momentum. The matrices to orthogonalise are sent to
the ranks that do so, and return as the directions of the update, both in bf16, which loses nothing: torch rounds to it
before Newton-Schulz, too. Decay, learning rate and master follow in the unit's update. AdamW updates all other
parameters, in separate parameter groups.

The arithmetic is that of `torch.optim.Muon`, with one exception: with bf16 parameters and without Nesterov, torch's
divides its own momentum by the norm, in place. Ours stays unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zero.config.optimizers import MuonParams
from zero.core.comm import Axis, exchange
from zero.core.mesh import Mesh
from zero.core.torch_private import muon_learning_rate, torch_newton_schulz
from zero.core.unit import Unit
from zero.core.world import World
from zero.kernels.formulas import Formula, formats_of
from zero.kernels.moments import random_bits
from zero.kernels.newton_schulz import newton_schulz
from zero.optim.fused import FusedShardOptimizer
from zero.optim.fused_states import FusedStates
from zero.optim.shard_optimizer import Group, Rows, Update
from zero.plan.cut import Cut, whole
from zero.plan.formats import Formats
from zero.plan.grid import UnitAxes
from zero.plan.layout import Fragment
from zero.plan.matrices import Matrix, SharedMatrix, owners, pieces, shared_matrices

Matrices = Mapping[int, torch.Tensor]  # [rows, cols] by number
Views = Sequence[Sequence[torch.Tensor]]  # by rank

# Elements of the units in one message: enough to give each rank a share, and little memory beside the model.
TOGETHER = 1 << 28
ROWS_EPS = 1e-10  # added to roots and norms that NorMuon divides by


class MatrixStates(FusedStates):
    """The moments, and of NorMuon the means of squares of rows.

    split: patterns of parameters that are several matrices; see `MuonParams`;
    by_matrix: these means, fp32 [rows], by names of matrices;
    loaded: whether all ranks have all of them, until the next step; else only the ranks that use them.
    """

    def __init__(self, formula: Callable[[Group], Formula], formats: Formats, split: Sequence[str]) -> None:
        super().__init__(formula, formats)
        self.by_matrix: dict[str, torch.Tensor] = {}
        self.loaded = False
        self._split = split
        self._known: dict[int, list[SharedMatrix]] = {}  # by unit

    def rows(self, unit: Unit, group: Group, load: bool = False) -> Iterator[Rows]:
        if not group["use_muon"] or group.get("beta2") is None:
            return
        self.loaded, mesh = self.loaded or load, unit.mesh
        mine = mesh.counts and mesh.replica.rank == 0 and (mesh.shard.rank == 0 or not self.loaded)
        for each in (each for each in self.matrices(unit) if each.spans):
            matrix, first = each.matrix, mesh.peers.rank == next(iter(each.boxes))
            if load:
                self.by_matrix[matrix.name] = torch.zeros(matrix.rows, device=unit.buffer.full.device)
            if load or (mine and matrix.name in self.by_matrix and (first or not self.loaded)):
                yield Rows(each.param, matrix.start // matrix.cols, each.rows, self.by_matrix[matrix.name])

    def nbytes(self, unit: Unit, group: Group) -> int:
        means = (self.by_matrix.get(each.matrix.name) for each in self.matrices(unit)) if group["use_muon"] else ()
        return super().nbytes(unit, group) + sum(each.nbytes for each in means if each is not None)

    def restart(self, unit: Unit, group: Group, part: Fragment | None = None) -> None:
        super().restart(unit, group, part)
        for each in self.matrices(unit) if group["use_muon"] else ():
            self.by_matrix.pop(each.matrix.name, None)

    def matrices(self, unit: Unit) -> list[SharedMatrix]:
        """The matrices of a unit's parameters; of one that is cut also those of which only others have parts."""
        if unit.index not in self._known:
            found = self._known[unit.index] = []
            for spec, param in zip(unit.plan.params, unit.params, strict=True):
                if not spec.full_numel:
                    continue
                cut, rank = spec.cut or Cut(tuple(param.shape), (whole(param.shape),)), unit.mesh.peers.rank
                boxes = dict(enumerate(cut.every)) or {rank: cut.boxes}
                start = unit.plan.layout.spans[spec.name].start
                found += shared_matrices(spec.name, cut.shape, self._split, boxes, rank, start)
        return self._known[unit.index]


class MatrixShardOptimizer(FusedShardOptimizer):
    """Muon for groups with `use_muon`, AdamW for others; NorMuon if such a group has a `beta2`.

    `params`: the checked arguments; `groups`: all parameter groups, with their hyperparameters.
    """

    marks_changes = False

    def __init__(self, params: MuonParams, compute_dtype: str, groups: Sequence[Group]) -> None:
        super().__init__("muon", params, compute_dtype)
        self.defaults = {"lr": params.lr, "weight_decay": params.weight_decay}
        self.states = MatrixStates(self._formula, formats_of("muon", params, compute_dtype, groups), params.split)
        self._one_by_one = params.ns_method == "standard"
        self._directions: dict[int, torch.Tensor] = {}  # bf16 [n], of units not yet updated in this step

    @torch.no_grad()
    def prepare(self, updates: Sequence[Update], world: World) -> None:
        """See `ShardOptimizer.prepare`; computes the directions of all matrices."""
        together: dict[UnitAxes, list[Update]] = {}  # by the ranks that share the matrices
        for each in (each for each in updates if each.group["use_muon"]):
            axes = each.unit.mesh.axes
            work = together.setdefault(axes, [])
            work.append(each)
            # Of full parameters: ranks that have parts of one matrix begin it together.
            if sum(spec.full_numel for one in work for spec in one.unit.plan.params) >= TOGETHER:
                self._orthogonalize(together.pop(axes))
        for work in together.values():
            self._orthogonalize(work)
        self.states.loaded = False

    def update(
        self, unit: Unit, grad: torch.Tensor, group: Group, factor: float | torch.Tensor, threads: int | None = None
    ) -> None:
        """See `ShardOptimizer.update`; applies the direction that `prepare` computed from gradient and momentum."""
        if not group["use_muon"]:
            super().update(unit, grad, group, factor, threads)
            return
        self.states.begin(unit, group)
        self.states.count(unit, 1)
        direction, lr = self._directions.pop(unit.index), float(group["lr"])
        if unit.shard.placement.streamed:  # the update runs on another stream than the one that made the direction
            unit.shard.placement.streams.up.record_stream(direction)
        with undone_where_nan(factor, {unit.shard.master.shard, unit.shard.master.tensor}):
            for each in self.states.matrices(unit):
                step = muon_learning_rate(lr, group["adjust_lr_fn"], (each.matrix.rows, each.matrix.cols))
                for span in each.spans:
                    start, numel = span.intersect(unit.shard.window)  # may be empty
                    at = start - unit.shard.window.start
                    values = unit.shard.master.values(at, numel).mul(1 - lr * group["weight_decay"])
                    unit.shard.master.write(at, values.add_(direction[at : at + numel], alpha=-step))

    def _orthogonalize(self, work: Sequence[Update]) -> None:
        """Compute the directions of some units, with their matrices divided among the ranks."""
        first = work[0].unit
        shards = [self._look_ahead(each) for each in work]
        matrices = [(number, each) for number, update in enumerate(work) for each in self.states.matrices(update.unit)]

        def orthogonal(whole: Matrices) -> Matrices:
            groups = {index: work[matrices[index][0]].group for index in whole}
            found = orthogonalized(whole, groups, self._one_by_one)
            for index, group in groups.items():
                if group.get("beta2") is not None:
                    matrix = matrices[index][1].matrix
                    found[index] = self._normalized(matrix, found[index], group["beta2"], work[0].factor)
            for index, (_, each) in enumerate(matrices):
                if index not in whole:
                    self.states.by_matrix.pop(each.matrix.name, None)
            return found

        replace_matrices(shards, matrices, first.mesh, first.buffer.full.device, orthogonal)
        for each, shard in zip(work, shards, strict=True):
            self._directions[each.unit.index] = shard

    def _normalized(self, matrix: Matrix, update: torch.Tensor, decay: float, factor: Any) -> torch.Tensor:
        """Divide rows by the root of their mean square over steps, and keep the norm of the whole [rows, cols].

        Z. Li et al., "NorMuon", 2025 (arXiv:2510.05491), algorithm 1, as its authors' code has it.
        """
        values = update.float()
        rows = self.states.by_matrix.setdefault(matrix.name, values.new_zeros(matrix.rows))
        with undone_where_nan(factor, [rows]):
            rows.lerp_(values.square().mean(1), 1 - decay)
        scaled = values / (rows.sqrt() + ROWS_EPS)[:, None]
        return scaled * (values.norm() / (scaled.norm() + ROWS_EPS))

    def _look_ahead(self, update: Update) -> torch.Tensor:
        """Update the momentum of a unit's shard, and return the values to orthogonalise, bf16 [n]."""
        unit, group = update.unit, update.group
        placement, decay = unit.shard.placement, float(group["momentum"])
        with unit.shard.acquired(changed=True):
            states = self.states.of(unit, group)
            ahead = torch.empty(unit.shard.window.numel, dtype=torch.bfloat16, device=placement.update_device)
            with undone_where_nan(update.factor, [tensor for _, _, tensor in self.states.tensors(unit)]):
                for run, (moment,) in states.runs:
                    part = slice(run.start, run.start + run.numel)
                    grad = update.grad[part].to(placement.update_device, torch.float32) * update.factor
                    mean = moment.decode(True).lerp_(grad, 1 - decay)
                    ahead[part] = grad.lerp(mean, decay) if group["nesterov"] else mean
                    if run.format != "fp32":
                        where = {"key": unit.index, "first": states.first + run.start, "device": mean.device}
                        bits = random_bits(run.numel, step=states.steps + 1, **where)
                        moment.write(mean, True, bits & 0xFFFF)
        return ahead


@contextlib.contextmanager
def undone_where_nan(factor: float | torch.Tensor, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Writes to these tensors inside are undone if a `factor` on the device is NaN; the host does not wait for it."""
    before = [(each, each.clone()) for each in tensors] if isinstance(factor, torch.Tensor) else []
    yield
    for each, old in before:
        each.copy_(torch.where(factor.isnan(), old, each))


def orthogonalized(whole: Matrices, groups: dict[int, Group], one_by_one: bool) -> Matrices:
    """Newton-Schulz of matrices [rows, cols] in bf16, each with its group's settings; may overwrite its inputs.

    `one_by_one`: as torch.optim.Muon; else all of one shape at once.
    """
    found, batches = {}, {}
    for index, matrix in whole.items():
        group = groups[index]
        numbers = (tuple(group["ns_coefficients"]), int(group["ns_steps"]), float(group["eps"]))
        if one_by_one:
            coefficients, steps, eps = numbers
            found[index] = torch_newton_schulz(matrix, coefficients, steps, eps)
        else:
            batches.setdefault((matrix.shape, *numbers), []).append(index)
    for (_, *numbers), batch in batches.items():
        # 16 bits are sure to be faster only on a GPU. fp16 has three bits more than bf16, and all values are small.
        dtype = torch.float32 if whole[batch[0]].device.type == "cpu" else torch.float16
        results = newton_schulz(torch.stack([whole[index] for index in batch]), *numbers, dtype)
        found |= dict(zip(batch, results, strict=True))
    return found


def replace_matrices(
    shards: Sequence[torch.Tensor],
    matrices: Sequence[tuple[int, SharedMatrix]],
    mesh: Mesh,
    device: torch.device,
    work: Callable[[Matrices], Matrices],
) -> None:
    """Replace each matrix by its result, in this rank's `shards` of the units, [n] each, of one dtype; collective.

    matrices: with the number of the unit. `work` gets those assigned to this rank, on the `device`. One message goes to
    each rank along shard and one back, whatever the number of matrices; and as many to its peers, if any matrix has
    parts there. A rank sends nothing of a matrix that it works on itself.
    """
    held = [index for index, (_, each) in enumerate(matrices) if each.spans]
    place_of = dict(zip(held, owners([matrices[index][1] for index in held], mesh.shard.size), strict=True))
    parts = [Matrix("", unit, span.start, 1, span.numel) for unit, each in matrices for span in each.spans]
    index_of = [index for index in held for _ in matrices[index][1].spans]
    none = shards[0].new_empty(0, device=device)
    own: dict[int, list[torch.Tensor]] = {}  # parts of matrices on which ranks at our place along shard work
    here, there = _views(mesh.shard), _views(mesh.shard)
    for at, rank, span in pieces(parts, [len(shard) for shard in shards], mesh.shard.size):
        index, unit, start = index_of[at], parts[at].unit, parts[at].start
        if rank == mesh.shard.rank:
            here[place_of[index][0]].append(shards[unit].narrow(0, span.start - rank * len(shards[unit]), span.numel))
        if place_of[index][0] == mesh.shard.rank:
            if span.start == start:  # the first of this part
                own.setdefault(index, []).append(none.new_empty(parts[at].span.numel))
            there[rank].append(own[index][-1].narrow(0, span.start - start, span.numel))
    # Without parts on several ranks, the peers are left alone.
    peers = mesh.peers if any(len(each.boxes) > 1 for _, each in matrices) else Axis(None, 1, 0, mesh.peers.native)
    ours = {index: (matrices[index][1], place_of[index][1] % peers.size, each) for index, each in own.items()}
    _there_and_back(here, there, mesh.shard, none, lambda: _replace_shared(ours, peers, none, work))


def _replace_shared(
    matrices: Mapping[int, tuple[SharedMatrix, int, Sequence[torch.Tensor]]],
    axis: Axis,
    none: torch.Tensor,
    work: Callable[[Matrices], Matrices],
) -> None:
    """The same of matrices by number, each with the rank along `axis` that works on it, and with this rank's parts."""
    here, there, full = _views(axis), _views(axis), {}
    for index, (matrix, owner, parts) in matrices.items():
        if len(matrix.boxes) == len(parts) == 1:  # it is all here
            full[index] = parts[0].view(matrix.shape)
            continue
        here[owner] += parts
        if owner == axis.rank:
            full[index] = none.new_empty(matrix.shape)
            for rank, boxes in matrix.boxes.items():
                there[rank % axis.size] += [full[index][box.slices] for box in boxes]

    def replace() -> None:
        flat = {index: each.view(matrices[index][0].matrix[3:]) for index, each in full.items()}
        for index, result in work(flat).items():
            flat[index].copy_(result)

    _there_and_back(here, there, axis, none, replace)


def _there_and_back(here: Views, there: Views, axis: Axis, none: torch.Tensor, work: Callable[[], None]) -> None:
    """Fill `there` with what is `here` on the ranks for this one, work, and fill `here` with what became of it."""
    sends, receives = ([sum(part.numel() for part in parts) for parts in views] for views in (here, there))
    flat = torch.cat([part for parts in here for part in parts] or [none]).to(none.device)
    _fill(there, exchange(flat, sends, receives, axis, "matrices to their ranks"))
    work()
    flat = torch.cat([none, *(part.reshape(-1) for parts in there for part in parts)])
    _fill(here, exchange(flat, receives, sends, axis, "matrices from their ranks"))


def _views(axis: Axis) -> list[list[torch.Tensor]]:
    return [[] for _ in range(axis.size)]


def _fill(views: Views, values: torch.Tensor) -> None:
    every = [part for parts in views for part in parts]
    for part, value in zip(every, values.split([part.numel() for part in every]), strict=True):
        part.copy_(value.view(part.shape))
