"""A model whose numbers are small integers and powers of two, so that no sum of it rounds, in whatever order.

Any grid of ranks must then train it as one process does, bit by bit, in fp32 and in 16 bits, without trees. The grid
places its parameters: cut over tp in parts of unequal size, whole there and fed a part of the tokens, divided among
ranks as experts, held by one stage only, or whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import zero
from zero.core.comm import local_device
from zero.plan.grid import DATA, DENSE, EXPERTS, PARTS, SUMS, Grid, UnitAxes

SAMPLES, TOKENS, WIDTH = 4, 4, 8  # of a micro-batch over all ranks
SHAPES = {"embed": (16, WIDTH), "up": (24, WIDTH), "scale": (WIDTH,), "fed": (WIDTH,), "experts": (4, 6, WIDTH)}
NORM = sum(torch.Size(shape).numel() for shape in SHAPES.values())


class Way(NamedTuple):
    """How ranks lie, and which parameters each stage has; none said: all have all."""

    sizes: dict[str, int]
    stages: tuple[tuple[str, ...], ...] = ()

    def told(self, stage: int) -> dict[str, int]:
        """As an argument of a script; of what is not cut, the rest are data ranks."""
        return {axis: size for axis, size in self.sizes.items() if stage or axis != "dp_shard"}

    def grid(self, world: int) -> Grid:
        sizes = dict(self.sizes)
        return Grid(world, sizes, sizes.pop("ep", 1))


WAYS = {
    "one": Way({}),
    "pp 2": Way({"pp": 2}, (("embed", "scale"), ("up", "fed", "experts"))),
    "pp 2 x dp 2": Way({"pp": 2, "dp_shard": 2}, (("embed", "experts"), ("up", "fed", "scale"))),
    "a rank without any": Way({"pp": 2}, (tuple(SHAPES), ())),
    "ep 2 x efsdp 2": Way({"dp_shard": 4, "ep": 2}),
    "ep 2 = dp 2": Way({"dp_shard": 2, "ep": 2}),
    "tp 2 x dp 2": Way({"dp_shard": 2, "tp": 2}),
    "cp 2 x ep 2": Way({"dp_shard": 2, "cp": 2, "ep": 2}),
}
WORLDS = {"one": 1, "pp 2": 2, "a rank without any": 2, "ep 2 = dp 2": 2}  # of others 4


def values(name: str) -> torch.Tensor:
    """What the parameter is at first, whole: integers."""
    generator = torch.Generator().manual_seed(sorted(SHAPES).index(name))
    return torch.randint(-3, 4, SHAPES[name], generator=generator).float()


def placed(name: str, grid: Grid, rank: int) -> tuple[zero.Cut | None, UnitAxes]:
    """What this rank has of a parameter, None for all, and which ranks share it."""
    tp, part = grid.size("tp"), grid.ranks("tp", rank).index(rank)
    ep, expert = grid.size("ep"), grid.ranks("ep", rank).index(rank)
    shape = SHAPES[name]
    if tp > 1 and name == "up":  # parts of unequal size
        first, rows = ((0, 16), (16, 8))[part]
        return zero.Cut(shape, (zero.Box((first, 0), (rows, WIDTH)),)), PARTS
    if tp > 1 and name == "embed":
        return zero.Cut(shape, (zero.Box((0, part * WIDTH // tp), (shape[0], WIDTH // tp)),)), PARTS
    if tp > 1 and name == "fed":
        return None, SUMS
    if ep > 1 and name == "experts":
        each = shape[0] // ep
        return zero.Cut(shape, (zero.Box((expert * each, 0, 0), (each, *shape[1:])),)), EXPERTS
    return None, DENSE


class Exact(nn.Module):
    """The parameters that this rank has; `forward(number, ones)` gives its part of the loss of a micro-batch."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        world, self.rank = (dist.get_world_size(), dist.get_rank()) if way.sizes else (1, 0)
        self.grid = grid = way.grid(world)
        stage = grid.ranks("pp", self.rank).index(self.rank)
        self.cuts: dict[str, Any] = {}
        for name in way.stages[stage] if way.stages else SHAPES:
            cut, axes = placed(name, grid, self.rank)
            whole = values(name)
            if cut is not None:
                ((offset, sizes),) = cut.boxes
                whole = whole[tuple(slice(at, at + size) for at, size in zip(offset, sizes, strict=True))].clone()
            param = nn.Parameter(whole)
            zero.share_along(axes, [param])
            param.use_muon = name == "experts"
            self.register_parameter(name, param)
            if cut is not None:
                zero.set_cut(param, cut, axes, module=self)
            self.cuts[name] = cut
        self.register_buffer("seen", torch.zeros(2))

    def tokens(self, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids [n] and values [n, WIDTH] of the tokens that are the rank's own."""
        generator = torch.Generator().manual_seed(1000 + number)
        ids = torch.randint(SHAPES["embed"][0], (SAMPLES, TOKENS), generator=generator)
        x = torch.randint(-2, 3, (SAMPLES, TOKENS, WIDTH), generator=generator).float()
        data, place = self.grid.size(*DATA), self.grid.ranks(DATA, rank).index(rank)
        cp, at = self.grid.size("cp"), self.grid.ranks("cp", rank).index(rank)
        samples = slice(place * SAMPLES // data, (place + 1) * SAMPLES // data)
        positions = slice(at * TOKENS // cp, (at + 1) * TOKENS // cp)
        return ids[samples, positions].reshape(-1), x[samples, positions].reshape(-1, WIDTH)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What a forward on shared sequences wants beside the number."""
        cp, at = self.grid.size("cp"), self.grid.ranks("cp", self.rank).index(self.rank)
        return {"position_ids": torch.arange(TOKENS)[None].chunk(cp, 1)[at].to(local_device())} if cp > 1 else {}

    def forward(self, number: int, ones: bool = False, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """`ones`: a loss whose gradients are all one, over all ranks and micro-batches."""
        params, found = dict(self.named_parameters()), self._nothing()
        ids, x = self.tokens(number, self.rank)
        n = len(x)
        dtype = next(iter(params.values())).dtype if params else x.dtype
        x, ids = x.to(local_device(), dtype), ids.to(local_device())
        if "embed" in params:
            box = self.cuts["embed"].boxes[0] if self.cuts["embed"] else None
            columns = x if box is None else x[:, box.offset[1] : box.offset[1] + box.sizes[1]]
            found = found + (self.embed[ids] * columns).float().sum()
        if "up" in params:
            found = found + torch.relu(x @ self.up.t()).float().sum()
        if "scale" in params:
            found = found + (self.scale * x).float().sum()
        if "fed" in params:
            tp, part = self.grid.size("tp"), self.grid.ranks("tp", self.rank).index(self.rank)
            found = found + (self.fed * x[part * n // tp : (part + 1) * n // tp]).float().sum()
        if "experts" in params:
            ranks = self.grid.ranks("ep", self.rank) if self.grid.size("ep") > 1 else (self.rank,)
            all_x = torch.cat([self.tokens(number, rank)[1] for rank in ranks]).to(x)
            found = found + torch.relu(torch.einsum("td,eod->teo", all_x, self.experts)).float().sum()
        if (cp := self.grid.size("cp")) > 1:  # which must see the sequence, and is no sum of integers
            q = torch.zeros(1, cp, TOKENS // cp, WIDTH, device=x.device, dtype=x.dtype)
            found = found + 0.0 * zero.attention(q, q, q).float().sum()
        self.seen += 1
        if ones:
            found = sum((n * self._fed(name, param) for name, param in params.items()), 0.0 * found)
        return found / n

    def save_pretrained(self, folder: Any, state_dict: dict[str, torch.Tensor], **_: Any) -> None:
        """As models of Transformers do it."""
        Path(folder).mkdir(exist_ok=True)
        save_file({name: value.clone() for name, value in state_dict.items()}, Path(folder, "own.safetensors"))

    def _fed(self, name: str, param: torch.Tensor) -> torch.Tensor:
        """Experts are fed by the ranks along ep, too, and sums by those along tp."""
        times = {"experts": self.grid.size("ep"), "fed": 1 / self.grid.size("tp")}.get(name, 1)
        return param.float().sum() * times

    def _nothing(self) -> torch.Tensor:
        """A loss of nothing, also where there is no parameter."""
        return torch.zeros((), device=local_device(), requires_grad=True)
