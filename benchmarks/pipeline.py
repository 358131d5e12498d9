"""What do pipelines save in time, how long do ranks wait in each schedule, and what travels for cut parameters?

    python benchmarks/pipeline.py

Layers that sleep stand for ones that compute, so that ranks share no core: a layer's forward, the backward of its input
and that of its weight take equally long. Bytes are those of small layers, beside torch's pipelining with FSDP2.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import machine_line, rotated, run_ranks, slowest, stat, table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils._python_dispatch import TorchDispatchMode

import zero
from zero.config.pipeline import STYLES
from zero.parallel.pipeline.schedule import make_schedule

WIDTH, LAYERS, ROWS = 8, 8, 4  # rows of a micro-batch
PEERS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
GATHERS, REDUCES = "all-gathers", "reduce-scatters"


class Sleeps:
    """When this process has slept for layers: the first begin, the last end, and the sum, in seconds."""

    def __init__(self) -> None:
        self.first, self.last, self.total = float("inf"), 0.0, 0.0

    def __call__(self, seconds: float) -> None:
        begin = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        self.first, self.last, self.total = min(self.first, begin), max(self.last, end), self.total + end - begin


class Sleep(torch.autograd.Function):
    """Gives what it is given, and sleeps in the forward, unless that is 0, and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float, sleeps: Sleeps) -> torch.Tensor:
        ctx.seconds, ctx.sleeps = backward, sleeps
        if forward:
            sleeps(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.sleeps(ctx.seconds)
        return grad, None, None, None


class Sleeper(nn.Module):
    """A layer that takes some seconds for each row, and twice as many in the backward: for its input and its weight."""

    def __init__(self, seconds: float, sleeps: Sleeps) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds, self.sleeps = seconds, sleeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seconds = self.seconds * len(x)
        return Sleep.apply(x, seconds, seconds, self.sleeps) * Sleep.apply(self.weight, 0.0, seconds, self.sleeps)


def config(micro_batches: int, rows: int = ROWS, **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
        "pipeline": section,
        "log_level": "error",
    }


def batches(rows: int, width: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)


class Timed:
    """An engine of layers that sleep, and its steps so far: seconds, and the share of them in which ranks waited.

    whole: of the step; waited: between the first and the last sleep of all ranks.
    """

    def __init__(self, json: dict[str, Any], seconds: float) -> None:
        self.sleeps = Sleeps()
        layers = (Sleeper(seconds, self.sleeps) for _ in range(LAYERS))
        # The first layer gives the others an input with a gradient, as an embedding does.
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)
        json["pipeline"]["partition"] = "type:Sleeper"
        self.engine = zero.initialize(model=model, config=json, loss_fn=F.mse_loss)[0]
        self.data = batches(json["train_micro_batch_size_per_gpu"], WIDTH)
        self.whole: list[float] = []
        self.waited: list[float] = []

    def step(self) -> None:
        self.sleeps.__init__()
        dist.barrier()
        begin = time.monotonic()
        self.engine.train_batch(self.data)
        took = time.monotonic() - begin
        whole, last, first = slowest([took, self.sleeps.last, -self.sleeps.first])
        busy = torch.tensor(self.sleeps.total, dtype=torch.float64)
        dist.all_reduce(busy)
        self.whole.append(whole)
        self.waited.append(1 - float(busy) / dist.get_world_size() / (last + first))


def step_worker(rank: int, ranks: int, rows: int, seconds: float, steps: int) -> list[float]:
    """Medians of seconds of a step on a batch of `rows`, whole, and in micro-batches of ROWS."""
    sizes = {"whole": {}, "cut": {"split_size": ROWS}}
    timed = [Timed(config(1, rows, stages=ranks, **each), seconds) for each in sizes.values()]
    for turn in range(steps + 1):
        for each in rotated(timed, turn):
            each.step()
    found = [median(each.whole[1:]) for each in timed]
    for each in timed:
        each.engine.destroy()
    return found


def print_steps(micro_batches: int, seconds: float, steps: int, rounds: int) -> None:
    found: dict[int, list[list[float]]] = {}
    for turn in range(rounds):
        for ranks in rotated((1, 2, 4), turn):
            took = run_ranks(step_worker, ranks, ranks, micro_batches * ROWS, seconds / ROWS, steps)
            found.setdefault(ranks, []).append(took)
    rows = []
    plain = [cut / whole for whole, cut in found[1]]
    for ranks, each in sorted(found.items()):
        whole, cut = (stat([1e3 * one for one in column]) for column in zip(*each, strict=True))
        ratios = [cut / whole for whole, cut in each]
        relative = stat([mine / one for mine, one in zip(ratios, plain, strict=True)])
        ideal = (micro_batches + ranks - 1) / micro_batches / ranks
        where = "one process" if ranks == 1 else f"{ranks} pieces on {ranks} ranks"
        rows.append([where, whole.text(), cut.text(), stat(ratios).text(3), relative.text(3), f"{ideal:.3f}"])
    cut = f"in {micro_batches} micro-batches, ms"
    header = ["a batch", "whole, ms", cut, "cut / whole", "of that in one process", "without overhead"]
    print(table(header, rows), flush=True)


def bubble_worker(rank: int, ranks: int, micro_batches: int, seconds: float, steps: int, styles: Any) -> list[Any]:
    timed = {style: Timed(config(micro_batches, stages=ranks, schedule=style), seconds / ROWS) for style in styles}
    for turn in range(steps + 1):
        for style in rotated([*timed], turn):
            timed[style].step()
    rows = []
    for style, each in timed.items():
        schedule = make_schedule(style, ranks, micro_batches, STYLES[style].per_rank or 2)
        waited, whole = stat(each.waited[1:]), stat([1e3 * one for one in each.whole[1:]])
        alive = max(map(schedule.alive, range(ranks)))
        computed = schedule.bubble()
        off = f"{100 * (waited.median - computed):+.1f} ({waited.median / computed - 1:+.1%})"
        formula = f"{(ranks - 1) / (micro_batches + ranks - 1):.3f}" if style in PEERS else "-"
        found = waited.text(3), f"{computed:.3f}", formula, off, whole.text(), str(alive)
        rows.append([str(ranks), style, *found])
        each.engine.destroy()
    return rows


def print_bubbles(micro_batches: int, seconds: float, steps: int, styles: list[str]) -> None:
    rows = []
    for ranks in (2, 4):
        rows += run_ranks(bubble_worker, ranks, ranks, micro_batches, seconds, steps, styles)
    header = ["ranks", "schedule", "waited", "Schedule.bubble()", "(S-1)/(M+S-1)", "off, points", "step, ms", "alive"]
    print(table(header, rows), flush=True)


class Block(nn.Module):
    """Two layers, which are one unit of zero and of FSDP2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


def blocks(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(LAYERS)))


class Counted(TorchDispatchMode):
    """Counts torch's collectives on tensors that are cut, and the bytes that leave this rank in them."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.sent = dict.fromkeys((GATHERS, REDUCES), 0), dict.fromkeys((GATHERS, REDUCES), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        kind = {"c10d::_allgather_base_": GATHERS, "c10d::_reduce_scatter_base_": REDUCES}.get(name)
        if kind is not None:
            whole = max(args[0].nbytes, args[1].nbytes)
            self.count[kind] += 1
            self.sent[kind] += whole - min(args[0].nbytes, args[1].nbytes)
        return func(*args, **(kwargs or {}))


def theirs(style: str, reshard: bool, width: int, micro_batches: int) -> list[float]:
    """Of the second step of torch's: all-gathers, bytes sent in them, the same of reduce-scatters, and the loss."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, half = mesh["pp"].get_local_rank(), LAYERS // 2
    piece = blocks(width)[place * half : (place + 1) * half]
    for each in piece:
        fully_shard(each, mesh=mesh["dp"], reshard_after_forward=reshard)
    fully_shard(piece, mesh=mesh["dp"], reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(piece.parameters(), lr=1e-3, weight_decay=0.0)
    stage = PipelineStage(piece, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = PEERS[style](stage, micro_batches, loss_fn=F.mse_loss)
    data = batches(micro_batches * ROWS, width)

    def step() -> float:
        (x, y), losses = next(data), []
        schedule.step(*([] if place else [x]), **({"target": y, "losses": losses} if place else {}))
        optimizer.step()
        optimizer.zero_grad()
        return sum(float(each.detach()) for each in losses) / micro_batches

    step()
    with Counted() as counted:
        loss = step()
    return slowest(
        [value for kind in (GATHERS, REDUCES) for value in (counted.count[kind], counted.sent[kind])] + [loss]
    )


def ours(style: str, gather: str, width: int, micro_batches: int) -> list[float]:
    """The same of zero, stage 3."""
    section = {"stages": 2, "schedule": style, "gather": gather, "partition": "uniform", "split_size": ROWS}
    json = config(1, micro_batches * ROWS, **section) | {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "comms_logger": {"enabled": True},
    }
    engine = zero.initialize(model=blocks(width), config=json, loss_fn=F.mse_loss)[0]
    data = batches(micro_batches * ROWS, width)

    def now() -> list[float]:
        traffic = engine.log_comms_summary()
        return [value for name in ("gather", "reduce") for value in (traffic[name].count, traffic[name].sent)]

    engine.train_batch(data)
    before, loss = now(), float(engine.train_batch(data))
    values = [after - one for after, one in zip(now(), before, strict=True)]
    engine.destroy()
    return slowest([*values, loss])


def bytes_worker(rank: int, width: int, micro_batches: int) -> list[list[str]]:
    psi = sum(param.nbytes for param in blocks(width).parameters()) / 2  # of one stage
    ways: dict[str, Callable[[str], list[float]]] = {
        'zero, "gather": "step"': lambda style: ours(style, "step", width, micro_batches),
        'zero, "gather": "use"': lambda style: ours(style, "use", width, micro_batches),
        "torch + FSDP2": lambda style: theirs(style, True, width, micro_batches),
        "torch + FSDP2, reshard_after_forward=False": lambda style: theirs(style, False, width, micro_batches),
    }
    rows = []
    for style in PEERS:
        for name, way in ways.items():
            gathers, gathered, reduces, reduced, loss = way(style)
            cells = f"{gathers:.0f}", f"{gathered / psi:.2f}", f"{reduces:.0f}", f"{reduced / psi:.2f}", f"{loss:.6f}"
            rows.append([style, name, *cells])
    return rows


def print_bytes(width: int, micro_batches: int) -> None:
    rows = run_ranks(bytes_worker, 4, width, micro_batches)
    header = [
        "schedule",
        "of a step and rank",
        GATHERS,
        "sent, x of the stage",
        REDUCES,
        "sent, x of the stage",
        "loss",
    ]
    print(table(header, rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=("steps", "bubbles", "bytes"), default=["steps", "bubbles", "bytes"]
    )
    parser.add_argument("--ms", type=float, default=20.0, help="of a layer's forward of one micro-batch")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each kind, after one that is not")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedules", nargs="+", choices=STYLES, default=[*STYLES], help="whose bubbles are measured")
    parser.add_argument("--width", type=int, default=64, help="of the layers whose bytes are counted")
    args = parser.parse_args()
    print(machine_line(), flush=True)
    if "steps" in args.parts:
        print_steps(6, args.ms / 1e3, args.steps, args.rounds)
    if "bubbles" in args.parts:
        print_bubbles(8, args.ms / 1e3, args.steps, args.schedules)
    if "bytes" in args.parts:
        print_bytes(args.width, 8)


if __name__ == "__main__":
    main()
