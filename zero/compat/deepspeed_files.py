"""Where a checkpoint of DeepSpeed (ZeRO 1, 2, 3) has the elements of each parameter.

Each rank has a file of the optimizer, with one flat fp32 tensor per parameter group (ZeRO 3: per sub-group) and flat
tensors of moments like it. ZeRO 1 and 2 put the parameters of a group one behind the other, perhaps with padding
behind each, and cut the whole into ranges of one length, the last perhaps shorter. ZeRO 3 cuts each parameter into
ranges of ceil(numel / ranks), and a rank's flat tensors have its ranges one behind the other. Files of the model name
the parameters of the groups in that order, with their shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero.checkpoint.index import Damaged
from zero.checkpoint.torch_file import StandIn, load

_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


class Slice(NamedTuple):
    """Elements [start, start + numel) of a parameter: from element `at` on of flat tensor `flat` of a rank."""

    start: int
    numel: int
    rank: int
    flat: int
    at: int


@dataclass(frozen=True)
class Files:
    """What the files hold, tensors mapped.

    models: of rank 0 (ZeRO 1, 2) or of every rank (ZeRO 3). states: what the optimizer of each rank keeps.
    cut:    whether parameters are cut one by one (ZeRO 3).
    """

    folder: Path
    models: Sequence[Mapping[str, Any]]
    states: Sequence[Mapping[str, Any]]
    cut: bool

    @property
    def model(self) -> Mapping[str, Any]:
        """What rank 0 says of the model and of the run."""
        return self.models[0]

    def masters(self, rank: int) -> Sequence[torch.Tensor]:
        """The flat tensors of exact values."""
        return self.states[rank]["fp32_flat_groups" if self.cut else "single_partition_of_fp32_groups"]

    def master(self, rank: int, flat: int) -> torch.Tensor:
        """One of them, [n]."""
        return self.masters(rank)[flat].detach().view(-1)

    def moment(self, key: str, rank: int, flat: int) -> torch.Tensor:
        """State `key` of a flat tensor, [n]."""
        return self.state(rank, flat)[key].detach().view(-1)

    def state(self, rank: int, flat: int) -> Mapping[str, Any]:
        """What the optimizer keeps of a flat tensor, by torch's name of it."""
        base = self.base(rank)
        return (base[flat] if isinstance(base, list) else base["state"].get(flat, {})) if base else {}

    def base(self, rank: int) -> Any:
        """The state_dict of the optimizer inside; in elastic checkpoints, a list of the states of the flat tensors."""
        return self.states[rank]["optimizer_state_dict" if self.cut else "base_optimizer_state"]

    def group_of(self, flat: int) -> int:
        """The parameter group of a flat tensor."""
        base = self.base(0)
        if isinstance(base, Mapping):
            for index, group in enumerate(base.get("param_groups", ())):
                if flat in group["params"]:
                    return index
        return flat

    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Of the trained parameters, per flat tensor, in their order there."""
        return [{name: tuple(shape) for name, shape in group.items()} for group in self.model["param_shapes"]]


def open_files(folder: Path) -> Files:
    """Map the files of a checkpoint; raises Damaged where some are missing, and ValueError for other layouts."""
    names = sorted(path.name for path in folder.iterdir())
    _only_zero(folder, names)
    optim_files = {int(match[1]): match[0] for match in map(_OPTIM.fullmatch, names) if match}
    states = [load(folder / optim_files[rank])["optimizer_state_dict"] for rank in sorted(optim_files)]
    counts = states[0]["partition_count"]
    world = max(counts) if isinstance(counts, (list, tuple)) else int(counts)
    if sorted(optim_files) != list(range(world)):
        missing = sorted(set(range(world)) - optim_files.keys())
        raise Damaged(f"{folder}: {world} ranks wrote it, and the optimizer files of ranks {missing} are missing")
    if isinstance(counts, (list, tuple)) and min(counts) != world:
        raise ValueError(f"{folder}: parameter groups are cut among {list(counts)} ranks, as of experts; not read")
    if "zero_stage" not in states[0]:
        raise ValueError(f"{folder} was written by DeepSpeed's BF16_Optimizer, which is not ZeRO's own; not read")
    number = states[0]["zero_stage"]
    cut = int(number.args[0] if isinstance(number, StandIn) else number) == 3
    ranks = [f"zero_pp_rank_{rank}_" for rank in range(world)] if cut else [""]
    wanted = [f"{rank}mp_rank_00_model_states.pt" for rank in ranks]
    if missing := [name for name in wanted if name not in names]:
        raise Damaged(f"{folder}: {', '.join(missing)} missing")
    return Files(folder, [load(folder / name) for name in wanted], states, cut)


def _only_zero(folder: Path, names: Sequence[str]) -> None:
    layers = [name for name in names if name.startswith(("layer_", "expp_"))]
    if layers:
        raise ValueError(
            f"{folder} has {layers[0]}: checkpoints of pipelines and of experts are not converted; zero.load_weights "
            "takes the weights of a pipeline's layers into a PipelineModule"
        )
    parallel = [match[0] for match in map(_MODEL.fullmatch, names) if match and int(match[2])]
    if parallel:
        raise ValueError(f"{folder} has {parallel[0]}: checkpoints of tensor parallelism are not read yet")
    if not any(map(_OPTIM.fullmatch, names)):
        why = "so it is no checkpoint of ZeRO 1, 2 or 3"
        raise ValueError(f"{folder} has no files zero_pp_rank_*_optim_states.pt, {why}")


def slices(files: Files) -> dict[str, list[Slice]]:
    """Where the elements of each trained parameter are; raises Damaged where flat tensors are too short."""
    by_name = dict(_cut_each(files) if files.cut else _cut_group(files))
    for name, some in by_name.items():
        for one in some:
            size = files.masters(one.rank)[one.flat].numel()
            if one.at + one.numel > size:
                raise Damaged(f"'{name}': flat tensor {one.flat} of rank {one.rank} has {size} elements, too few")
    return by_name


def _cut_group(files: Files) -> Iterator[tuple[str, list[Slice]]]:
    paddings = files.states[0].get("param_alignment_paddings")
    world = len(files.states)
    for flat, shapes in enumerate(files.shapes()):
        # Of the last rank's tensor the padding is taken off; moments have it, and all other ranks' tensors are full.
        length = files.masters(0)[flat].numel()
        behind = paddings[flat] if paddings is not None else [0] * len(shapes)
        begin = 0
        for (name, shape), padding in zip(shapes.items(), behind, strict=True):
            end = begin + math.prod(shape)
            some = []
            for rank in range(world):
                low, high = max(begin, rank * length), min(end, (rank + 1) * length if rank < world - 1 else end)
                if low < high:
                    some.append(Slice(low - begin, high - low, rank, flat, low - rank * length))
            yield name, some
            begin = end + padding


def _cut_each(files: Files) -> Iterator[tuple[str, list[Slice]]]:
    world = len(files.states)
    sizes = [flat.numel() for flat in files.masters(0)]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    begin = 0  # in a rank's flat tensors, one behind the other
    for name, shape in (item for group in files.shapes() for item in group.items()):
        numel = math.prod(shape)
        each = -(-numel // world)
        some = []
        for rank in range(world):
            start, count = rank * each, min(each, numel - rank * each)
            for flat, end in enumerate(ends):
                low, high = max(begin, end - sizes[flat]), min(begin + count, end)
                if low < high:
                    some.append(Slice(start + low - begin, high - low, rank, flat, low - end + sizes[flat]))
        yield name, some
        begin += each
    if begin > ends[-1]:
        raise Damaged(f"{files.folder}: flat tensors have {ends[-1]} elements, and parameters need {begin}")
