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
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zero.config.optimizers import MuonParams
from zero.core.comm import exchange
from zero.core.owner import cut_of
from zero.core.torch_private import muon_learning_rate, torch_newton_schulz
from zero.core.unit import Unit
from zero.core.world import Axis, World
from zero.kernels.formulas import formats_of
from zero.kernels.moments import random_bits
from zero.kernels.newton_schulz import newton_schulz
from zero.optim.fused import FusedShardOptimizer
from zero.optim.shard_optimizer import Group, Rows, Update
from zero.plan.cut import Cut
from zero.plan.layout import Fragment
from zero.plan.matrices import Matrix, assign, matrices_of, pieces

Matrices = Mapping[int, torch.Tensor]  # [rows, cols] by number

# Elements of the units in one message: enough to give each rank a share, and little memory beside the model.
TOGETHER = 1 << 28
ROWS_EPS = 1e-10  # added to roots and norms that NorMuon divides by


class MatrixShardOptimizer(FusedShardOptimizer):
    """Muon for groups with `use_muon`, AdamW for others; NorMuon if such a group has a `beta2`.

    `params`: the checked arguments; `groups`: all parameter groups, with their hyperparameters.
    """

    marks_changes = False

    def __init__(self, params: MuonParams, compute_dtype: str, groups: Sequence[Group]) -> None:
        if not all(has_whole_matrices(param) for group in groups if uses_muon(group) for param in group["params"]):
            raise ValueError(
                "Muon wants whole matrices, and this model has parts of some; set use_muon to false for these"
            )
        super().__init__("muon", params, compute_dtype)
        self.defaults = {"lr": params.lr, "weight_decay": params.weight_decay}
        self.formats = formats_of("muon", params, compute_dtype, groups)
        self._split, self._one_by_one = params.split, params.ns_method == "standard"
        self._directions: dict[int, torch.Tensor] = {}  # bf16 [n], of units not yet updated in this step
        self._rows: dict[str, torch.Tensor] = {}  # NorMuon's means of squares, fp32 [rows], by names of matrices
        self._loaded = False  # whether all ranks have all rows, until the next step; else only the ranks that use them

    @torch.no_grad()
    def prepare(self, updates: Sequence[Update], world: World) -> None:
        """See `ShardOptimizer.prepare`; computes the directions of all matrices."""
        together: dict[tuple[int, ...], list[Update]] = {}  # by the ranks that share the matrices
        for each in (each for each in updates if uses_muon(each.group)):
            ranks = each.unit.mesh.shard.ranks
            work = together.setdefault(ranks, [])
            work.append(each)
            if sum(one.unit.plan.layout.numel for one in work) >= TOGETHER:
                self._orthogonalize(together.pop(ranks))
        for work in together.values():
            self._orthogonalize(work)
        self._loaded = False

    def update(
        self, unit: Unit, grad: torch.Tensor, group: Group, factor: float | torch.Tensor, threads: int | None = None
    ) -> None:
        """See `ShardOptimizer.update`; applies the direction that `prepare` computed from gradient and momentum."""
        if not uses_muon(group):
            super().update(unit, grad, group, factor, threads)
            return
        states = self.states(unit, group)
        self._states[unit.index] = states._replace(steps=states.steps + 1)
        direction, lr = self._directions.pop(unit.index), float(group["lr"])
        if unit.shard.placement.streamed:  # the update runs on another stream than the one that made the direction
            unit.shard.placement.streams.up.record_stream(direction)
        with undone_where_nan(factor, {unit.shard.master.shard, unit.shard.master.tensor}):
            for matrix in self._matrices(unit, 0):
                start, numel = matrix.span.intersect(unit.shard.window)  # may be empty
                at = start - unit.shard.window.start
                step = muon_learning_rate(lr, group["adjust_lr_fn"], (matrix.rows, matrix.cols))
                values = unit.shard.master.values(at, numel).mul(1 - lr * group["weight_decay"])
                unit.shard.master.write(at, values.add_(direction[at : at + numel], alpha=-step))

    def _orthogonalize(self, work: Sequence[Update]) -> None:
        """Compute the directions of some units, with their matrices divided among the ranks."""
        first = work[0].unit
        shards = [self._look_ahead(each) for each in work]
        matrices = [matrix for number, each in enumerate(work) for matrix in self._matrices(each.unit, number)]

        def orthogonal(whole: Matrices) -> Matrices:
            groups = {index: work[matrices[index].unit].group for index in whole}
            found = orthogonalized(whole, groups, self._one_by_one)
            for index, group in groups.items():
                if group.get("beta2") is not None:
                    found[index] = self._normalized(matrices[index], found[index], group["beta2"], work[0].factor)
            for matrix in (matrix for index, matrix in enumerate(matrices) if index not in whole):
                self._rows.pop(matrix.name, None)
            return found

        replace_matrices(shards, matrices, first.mesh.shard, first.buffer.full.device, orthogonal)
        for each, shard in zip(work, shards, strict=True):
            self._directions[each.unit.index] = shard

    def _normalized(self, matrix: Matrix, update: torch.Tensor, decay: float, factor: Any) -> torch.Tensor:
        """Divide rows by the root of their mean square over steps, and keep the norm of the whole [rows, cols].

        Z. Li et al., "NorMuon", 2025 (arXiv:2510.05491), algorithm 1, as its authors' code has it.
        """
        values = update.float()
        rows = self._rows.setdefault(matrix.name, values.new_zeros(matrix.rows))
        with undone_where_nan(factor, [rows]):
            rows.lerp_(values.square().mean(1), 1 - decay)
        scaled = values / (rows.sqrt() + ROWS_EPS)[:, None]
        return scaled * (values.norm() / (scaled.norm() + ROWS_EPS))

    def rows(self, unit: Unit, group: Group, load: bool = False) -> Iterator[Rows]:
        """See `ShardOptimizer.rows`."""
        if not uses_muon(group) or group.get("beta2") is None:
            return
        self._loaded = self._loaded or load
        mine = unit.mesh.replica.rank == 0 and (unit.mesh.shard.rank == 0 or not self._loaded)
        for spec, param in zip(unit.plan.params, unit.params, strict=True):
            for matrix in matrices_of(spec.name, param.shape, self._split):
                if load:
                    self._rows[matrix.name] = torch.zeros(matrix.rows, device=unit.buffer.full.device)
                if load or (mine and matrix.name in self._rows):
                    first, of = matrix.start // matrix.cols, spec.numel // matrix.cols
                    if spec.cut is not None:
                        first, of = _in_full_stack(spec.cut, first), math.prod(spec.cut.shape) // matrix.cols
                    yield Rows(spec.name, first, of, self._rows[matrix.name])

    def nbytes(self, unit: Unit, group: Group) -> int:
        """See `ShardOptimizer.nbytes`."""
        means = (self._rows.get(matrix.name) for matrix in self._matrices(unit, 0)) if uses_muon(group) else ()
        return super().nbytes(unit, group) + sum(each.nbytes for each in means if each is not None)

    def restart(self, unit: Unit, group: Group, part: Fragment | None = None) -> None:
        """See `ShardOptimizer.restart`."""
        super().restart(unit, group, part)
        for matrix in self._matrices(unit, 0) if uses_muon(group) else ():
            self._rows.pop(matrix.name, None)

    def _look_ahead(self, update: Update) -> torch.Tensor:
        """Update the momentum of a unit's shard, and return the values to orthogonalise, bf16 [n]."""
        unit, group = update.unit, update.group
        placement, decay = unit.shard.placement, float(group["momentum"])
        with unit.shard.acquired(changed=True):
            states = self.states(unit, group)
            ahead = torch.empty(unit.shard.window.numel, dtype=torch.bfloat16, device=placement.update_device)
            with undone_where_nan(update.factor, [tensor for _, _, tensor in self.tensors(unit)]):
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

    def _matrices(self, unit: Unit, number: int) -> Iterator[Matrix]:
        """The matrices of a unit, as those of unit `number`."""
        for spec, param in zip(unit.plan.params, unit.params, strict=True):
            start = unit.plan.layout.spans[spec.name].start
            yield from matrices_of(spec.name, param.shape, self._split, number, start)


@contextlib.contextmanager
def undone_where_nan(factor: float | torch.Tensor, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Writes to these tensors inside are undone if a `factor` on the device is NaN; the host does not wait for it."""
    before = [(each, each.clone()) for each in tensors] if isinstance(factor, torch.Tensor) else []
    yield
    for each, old in before:
        each.copy_(torch.where(factor.isnan(), old, each))


def has_whole_matrices(param: torch.Tensor) -> bool:
    """Whether it is no part of a larger parameter, or some whole matrices of a stack of them."""
    cut = cut_of(param)
    return cut is None or (param.ndim == 3 and all(box.sizes[1:] == cut.shape[1:] for box in cut.boxes))


def _in_full_stack(cut: Cut, row: int) -> int:
    """The row in the full stack of matrices of a row of the local one."""
    matrix, at = divmod(row, cut.shape[1])
    here = [box.offset[0] + index for box in cut.boxes for index in range(box.sizes[0])]
    return here[matrix] * cut.shape[1] + at


def uses_muon(group: Group) -> bool:
    """Whether Muon updates the parameters of a group."""
    return group["use_muon"]


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
    matrices: Sequence[Matrix],
    axis: Axis,
    device: torch.device,
    work: Callable[[Matrices], Matrices],
) -> None:
    """Replace each matrix by its result, in this rank's `shards` of the units, [n] each, of one dtype; collective.

    `work` gets the matrices assigned to this rank, on the `device`. One message goes to each rank and one back,
    whatever the number of matrices. A rank sends nothing of a matrix that it works on itself.
    """
    rank_of = assign(matrices, axis.size)
    numels = [shard.numel() for shard in shards]
    every = pieces(matrices, numels, axis.size)
    leaving = sorted((one for one in every if one.rank == axis.rank), key=lambda one: rank_of[one.index])
    coming = sorted((one for one in every if rank_of[one.index] == axis.rank), key=lambda one: one.rank)
    sends, receives = [0] * axis.size, [0] * axis.size
    here, there = [], []
    for one in leaving:
        unit = matrices[one.index].unit
        sends[rank_of[one.index]] += one.span.numel
        here.append(shards[unit].narrow(0, one.span.start - axis.rank * numels[unit], one.span.numel))
    none = shards[0].new_empty(0)
    whole = {
        index: torch.empty(matrix.rows, matrix.cols, dtype=none.dtype, device=device)
        for index, matrix in enumerate(matrices)
        if rank_of[index] == axis.rank
    }
    for one in coming:
        receives[one.rank] += one.span.numel
        there.append(whole[one.index].view(-1).narrow(0, one.span.start - matrices[one.index].start, one.span.numel))
    _fill(there, exchange(torch.cat([none, *here]).to(device), sends, receives, axis, "matrices to their ranks"))
    for index, result in work(whole).items():
        whole[index].copy_(result)
    back = torch.cat([none.to(device), *there])
    _fill(here, exchange(back, receives, sends, axis, "matrices from their ranks"))


def _fill(parts: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    for part, value in zip(parts, values.split([part.numel() for part in parts]), strict=True):
        part.copy_(value)
