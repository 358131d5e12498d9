"""The rates of this machine: what one of several ranks reaches while the others do the same.

Started as `-m zero.tools.plan.rank_rates DIR DTYPE WIDTH MODEL SEQUENCE`, each rank writes a JSON object with fields
of `Rates` to a file in DIR. MODEL, SEQUENCE: as `zero plan` is given them, "" for transformer blocks.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zero.config.sections import ActivationCheckpointing
from zero.core import comm
from zero.core.comm import Axis, local_device
from zero.core.mixed_precision import DTYPES
from zero.core.world import make_world
from zero.engine.joining import init_distributed
from zero.log import counted
from zero.recompute.modules import Recomputed
from zero.recompute.policy import Policy
from zero.recompute.saved_inputs import ALONE, InputStore
from zero.recompute.selective import Selective
from zero.sizes.model_trace import Inputs, arguments, blocks_of, ends
from zero.sizes.rates import Rates
from zero.sizes.recorder import FORMULAS
from zero.tools.plan.source import load_model
from zero.tools.report import speed
from zero.tools.started_ranks import SECONDS, run_on_ranks

_SECONDS = 0.6  # of each measurement
_TIMEOUT = 120.0  # seconds that ranks wait for each other

_SMALL, _LARGE = 1 << 12, 1 << 24  # bytes that a rank sends to each other one
_BLOCKS, _BATCH, _SEQUENCE, _HEAD = 4, 2, 256, 64  # of the transformer
_AGAIN = 4  # rounds of all policies of recomputation
_MESSAGES, _ROUNDS = 8, 16  # of each size between two waits for all ranks; and how often
_BESIDE = 256, 1, 1, 128  # width, blocks, batch, sequence of what is computed beside a message: some 10 ms

Build = Callable[[], tuple[nn.Module, Inputs]]
"""Makes a model with values in memory, and the arguments of its forward."""


def measured(ranks: int, dtype: str = "fp32", width: int = 512, model: str = "", sequence: int = 1) -> Rates:
    """The rates of this machine with `ranks` ranks on it, all of which compute and send at the same time.

    Takes some seconds. dtype: measured beside fp32; width: of the transformer block whose FLOP/s are taken (small ones
    reach less); model, sequence: as `load_model` takes them, whose own FLOP/s are taken then. Each figure is the median
    over ranks. `inter_host` is `intra_host`: there is one host. Raises RuntimeError that says why it could not be.
    """
    ended = run_on_ranks(ranks, "zero.tools.plan.rank_rates", dtype, str(width), model, str(sequence))
    if ended.status is None:
        raise RuntimeError(f"measuring {counted(ranks, 'rank')} of this machine took over {SECONDS} s")
    if ended.status or len(ended.wrote) < ranks:
        text = f"the rates of this machine could not be measured on {counted(ranks, 'rank')}:"
        raise RuntimeError(f"{text}\n{ended.said}")
    return Rates(name="measured", **middle([json.loads(text) for text in ended.wrote.values()]))


def middle(values: Sequence[Any]) -> Any:
    """The median of numbers, or of each number in mappings."""
    if isinstance(values[0], Mapping):
        return {key: middle([each[key] for each in values]) for key in values[0]}
    return statistics.median(values)


def run(answers: Path, dtype: str, width: int, model: str, sequence: int) -> None:
    """Join the ranks that were started together, measure, and write down what was found."""
    init_distributed()
    rates = measure(dtype, width, partial(load_model, model, sequence, local_device()) if model else None)
    (answers / str(dist.get_rank() if dist.is_initialized() else 0)).write_text(json.dumps(rates), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(dtype: str, width: int = 512, model: Build | None = None) -> dict[str, Any]:
    """The fields of `Rates` on this rank, while all others do the same; collective.

    FLOP/s are those of `model`, None for a transformer of this width.
    """
    device = local_device()
    # The fused step's are medians over two seconds in `zero report`; here the matter is what ranks take of each other.
    found = speed.measure(2 * _SECONDS, 1 << 23)
    step, copied = found["fp32" if dtype == "fp32" else "mixed"] * 1e9, found["copy"] * 1e9
    flops: dict[str, float] = {}
    for name in dict.fromkeys(("fp32", dtype)):
        module, turn = one_pass(name, width, device, model)
        flops[name] = flops_of(turn) / _median(turn, device)
    rates: dict[str, Any] = {
        "flops": flops,
        "recompute": {dtype: recomputing(module, turn, device)},
        "device_bandwidth": _copied(device, device) if device.type == "cuda" else step,
        "host_bandwidth": step,
        "host_link": _copied(torch.device("cpu"), device) if device.type == "cuda" else copied,
        **dict.fromkeys(("drive_read", "drive_write", "intra_host", "inter_host", "latency"), 0.0),
    }
    here = dist.get_world_size() if dist.is_initialized() else 1
    rates["host_memory"] = rates["device_memory"] = psutil.virtual_memory().total / here
    if device.type == "cuda":
        rates["device_memory"] = torch.cuda.get_device_properties(device).total_memory
    world = make_world(timeout=_TIMEOUT)
    if world.size > 1:
        rates |= _links(world, device)
    world.watchdog.close()
    return rates


def flops_of(turn: Callable[[], None]) -> int:
    """Those of one pass."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        turn()
    return counter.get_total_flops()


def recomputing(module: nn.Module, turn: Callable[[], None], device: torch.device) -> dict[str, float]:
    """How many times as long a pass takes longer, where all blocks recompute, by policy; {} without."""
    store = InputStore(ActivationCheckpointing(), ALONE, device)
    rules = {Policy.SELECTIVE: Selective(), Policy.FULL: None}
    blocks = [Recomputed(module.get_submodule(name), 0, rules, store) for name in sorted(blocks_of(module, ()))]
    if not blocks:
        return {}

    def seconds(policy: Policy) -> float:
        for block in blocks:
            block.policy = policy
        return _median(turn, device, 1)

    policies = Policy.NONE, Policy.SELECTIVE, Policy.FULL
    rounds = [[seconds(policy) for policy in policies] for _ in range(1 + _AGAIN)][1:]  # the first finds its way
    each = {policy.value: statistics.median(row[at] / row[0] for row in rounds) for at, policy in enumerate(policies)}
    return {policy: max(0.0, times - 1.0) for policy, times in each.items()}


def one_pass(dtype: str, width: int, device: torch.device, model: Build | None) -> tuple[nn.Module, Callable[[], None]]:
    """A model, and a forward and backward of it, behind which ranks wait for each other: the slowest one counts."""
    kind = DTYPES[dtype]
    module, inputs = (partial(_blocks, width) if model is None else model)()
    module = module.to(device, kind).train()
    args, kwargs = arguments(inputs, device, kind)

    def turn() -> None:
        module.zero_grad()  # gradients are new ones each time, as in the engine
        found = ends(module(*args, **kwargs))
        torch.autograd.backward(found, list(map(torch.ones_like, found)))
        _meet()

    return module, turn


def _blocks(
    width: int, count: int = _BLOCKS, batch: int = _BATCH, sequence: int = _SEQUENCE
) -> tuple[nn.Module, Inputs]:
    """Of a transformer: several, so that weights come from memory, as in a model."""
    heads = max(1, width // _HEAD)
    sizes = heads * max(1, width // heads), heads, 4 * width, 0.0, "gelu"
    blocks = (nn.TransformerEncoderLayer(*sizes, batch_first=True) for _ in range(count))
    return nn.Sequential(*blocks), (torch.randn(batch, sequence, sizes[0]),)


def _meet() -> None:
    """Wait for the other ranks: they are never quite in step, and the slowest one counts."""
    if dist.is_initialized():
        dist.barrier()


def _copied(source: torch.device, target: torch.device) -> float:
    """Bytes/s that leave `source`; twice as many move where it is `target`."""
    values = torch.ones(1 << 28 if target.type == "cuda" else 1 << 25, dtype=torch.uint8, device=source)
    there = torch.empty_like(values, device=target)
    return values.nbytes * (2 if source == target else 1) / _median(lambda: there.copy_(values), target)


def _links(axis: Axis, device: torch.device) -> dict[str, float]:
    """What a rank sends per second, and what a message takes with next to nothing in it, a gather or a reduction.

    Where cores carry messages, both are what computing takes longer beside one: a thread that sends waits for a core
    that computes, and a rank for one that was late, many times as long as while nobody computes. The second is never
    less than then: where next to nothing is computed, the difference of two times may come out as nothing at all.
    """
    block, inputs = _blocks(*_BESIDE)

    def turns(nbytes: int, computes: bool = device.type == "cpu") -> Callable[[], None]:
        # Not zeros: pages of zeros that were never written are one page of memory, and sending them is cheap.
        full, gradient = (torch.ones(axis.size * nbytes // 4, device=device) for _ in range(2))
        total = torch.empty(nbytes // 4, device=device)

        def begin(index: int) -> Callable[[], None]:
            if index % 2:
                return partial(comm.scatter(gradient, axis, 1).sum, total, False)
            return comm.gather(full, axis, 0).wait

        def turn() -> None:
            for index in range(_MESSAGES):
                end = begin(index) if nbytes else None
                if computes:
                    block(*inputs).sum().backward()
                if end is not None:
                    end()
            _meet()

        return turn

    kinds = [*(turns(nbytes) for nbytes in (0, _SMALL, _LARGE)), turns(_SMALL, computes=False)]
    rounds = [[_median(turn, device, 1) / _MESSAGES for turn in kinds] for _ in range(_ROUNDS)]
    late = statistics.median(small - none for none, small, _, _ in rounds)
    more = statistics.median(large - small for _, small, large, _ in rounds)
    alone = statistics.median(alone for *_, alone in rounds)
    link = (axis.size - 1) * _LARGE / max(more, 1e-9)
    return {"latency": max(late, alone), "intra_host": link, "inter_host": link}


def _median(turn: Callable[[], object], device: torch.device, rounds: int = 0) -> float:
    """Seconds of a turn, of `rounds`, or of as many as take `_SECONDS`; alike on all ranks, which it asks for that."""
    times: list[float] = []
    if not rounds:
        turn()
    while len(times) < max(1, rounds):
        begin = time.perf_counter()
        turn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
        if not rounds:
            wanted = torch.tensor(_SECONDS / times[0], device=device)
            if dist.is_initialized():
                dist.all_reduce(wanted, dist.ReduceOp.MAX)
            rounds = math.ceil(wanted.item())
    return statistics.median(times)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
