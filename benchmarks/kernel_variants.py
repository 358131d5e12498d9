"""What benchmarks/kernels.py measures: each kernel with its arrays, its reference, its targets, and its peers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import kernel_peers as peers
import torch
from kernel_peers import Make
from kernel_stream import Mix
from torch import Tensor

from zero.kernels import native
from zero.kernels.bucket import sum_rows, sum_rows_reference
from zero.kernels.formulas import Adagrad, Adam, Formula, Lion, Sgd
from zero.kernels.moments import Moment
from zero.kernels.norm import sum_squares, sum_squares_reference
from zero.kernels.step import step

PERIOD = 1 << 20  # random numbers repeat after as many: fresh ones would take longer than all that is measured
ADAMW = Adam(1e-3, 0.9, 0.999, 1e-8, 0.01)  # as kernel_peers.ADAMW
COUNT = 10  # of steps: all take the tenth
FP32, BF16 = torch.float32, torch.bfloat16


@dataclass
class Way:
    """One kernel over its arrays.

    Attributes:
        title: what it is.
        call: the kernel; `reference` takes the same arguments and gives the same bits.
        mix: the arrays it goes over.
        share: target, at least this part of the speed of the yardstick with the same mix; None for no target.
        ratio: target, at most this part of the time of each peer; None for no target.
        against: the peers that `ratio` is about; empty for all in the group.
    """

    title: str
    call: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: tuple[Any, ...]
    mix: Mix
    keywords: dict[str, Any] = field(default_factory=dict)
    share: float | None = None
    ratio: float | None = None
    against: tuple[str, ...] = ()

    def run(self) -> Any:
        return self.call(*self.arguments, **self.keywords)

    def check(self) -> None:
        """Raise RuntimeError unless kernel and reference, from the same start, end with the same bits."""
        ends, results = [], []
        for function in (self.call, self.reference):
            arguments = copy.deepcopy(self.arguments)
            results.append(function(*arguments, **self.keywords))
            ends.append(list(_tensors(arguments)))
        for ours, wanted in zip(*ends, strict=True):
            if not torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8)):
                raise RuntimeError(f"{self.title}: the kernel and its reference differ")
        if isinstance(results[0], float):
            _check_sum(self.title, *results, scalar=_on_scalar(self.run))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Moment):
        yield from _tensors((value.values, value.scales))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _on_scalar(function: Callable[[], Any]) -> Any:
    module = native.load()
    module.set_isa("scalar")
    try:
        return function()
    finally:
        module.set_isa("auto")


def _check_sum(title: str, ours: float, wanted: float, scalar: float) -> None:
    # Plain torch adds in an order of its own, the scalar kernel in ours.
    if ours != scalar or abs(ours - wanted) > 1e-12 * wanted:
        raise RuntimeError(f"{title}: {ours!r}; the scalar kernel gives {scalar!r}, plain torch {wanted!r}")


@dataclass
class Group:
    """Ways that take turns with each other, with their peers and with the yardsticks.

    `result` is the array in which, after one call from the same start, the peers and the first of our ways end with
    about the same numbers; `peer_mix` is what each peer reads and writes at least.
    """

    title: str
    ways: list[Way]
    peers: dict[str, Callable[[], Any]] = field(default_factory=dict)
    peer_mix: Mix = field(default_factory=Mix)
    result: Tensor | None = None


def filled(numel: int, scale: float, dtype: torch.dtype = FP32, square: bool = False) -> Tensor:
    """Normal numbers times `scale` (or their squares times that), the same at every call with these arguments."""
    base = torch.randn(min(numel, PERIOD), generator=torch.Generator().manual_seed(0))
    base = ((base * base if square else base) * scale).to(dtype)
    out = torch.empty(numel, dtype=dtype)
    for begin in range(0, numel, PERIOD):
        out[begin : begin + PERIOD] = base[: numel - begin]
    return out


def stepped(
    title: str,
    formula: Formula,
    master: Tensor,
    moments: Sequence[Moment],
    grad: Tensor,
    param: Tensor | None,
    **targets: Any,
) -> Way:
    """The way of one optimizer step. The scales of 8-bit moments, 1/64 byte per element each, are not counted."""
    updates, writes = [master, *(moment.values for moment in moments)], []
    if param is not None:  # beside a remainder it is read as well
        (updates if master.dtype == torch.int16 else writes).append(param)
    mix = Mix([grad], updates, writes)
    arguments = (formula, master, tuple(moments), grad, param)
    counters = {"step": COUNT, "grad_scale": 1.0, "key": 1}
    return Way(title, step, partial(step, compiled=False), arguments, mix, counters, **targets)


def adam_fp32(numel: int, made: dict[str, Make]) -> Group:
    master, grad = filled(numel, 1.0), filled(numel, 1e-2)
    first, second = filled(numel, 1e-2), filled(numel, 1e-4, square=True)
    moments = (Moment(first), Moment(second))
    targets = {"share": 0.9, "ratio": 1.0, "against": (peers.TORCH,)}
    way = stepped("zero", ADAMW, master, moments, grad, None, **targets)
    others = {title: peers.fp32_step(make, master, first, second, grad) for title, make in made.items()}
    return Group("Adam step, fp32", [way], others, way.mix, master)


def adam_mixed(numel: int, made: dict[str, Make]) -> Group:
    """All share the bf16 gradient; the peers and the fp32 master share master, moments and parameter too."""
    grad16, grad = filled(numel, 1e-2, BF16), filled(numel, 0.0)
    master, out = filled(numel, 1.0), filled(numel, 1.0, BF16)
    param, remainder = filled(numel, 1.0, BF16), torch.zeros(numel, dtype=torch.int16)
    moments = {}
    for format in ("fp32", "bf16", "8bit"):
        first, second = Moment.filled(numel, format), Moment.filled(numel, format, signed=False)
        _fill(first, filled(min(numel, PERIOD), 1e-2), signed=True)
        _fill(second, filled(min(numel, PERIOD), 1e-4, square=True), signed=False)
        moments[format] = (first, second)
    ways = [
        stepped("zero, fp32 master", ADAMW, master, moments["fp32"], grad16, out, ratio=0.55),
        stepped("zero, remainder", ADAMW, remainder, moments["fp32"], grad16, param, ratio=0.55),
        stepped("zero, remainder, bf16 moments", ADAMW, remainder, moments["bf16"], grad16, param),
        stepped("zero, remainder, 8bit moments", ADAMW, remainder, moments["8bit"], grad16, param, ratio=0.45),
    ]
    first, second = (moment.values for moment in moments["fp32"])
    others = {title: peers.mixed_step(make, master, first, second, grad, grad16, out) for title, make in made.items()}
    # Bytes that the peers move by their nature: 6 to cast the gradient, 28, 6 to cast the parameter.
    mix = Mix([grad16, grad, master], [master, first, second], [grad, out])
    return Group("Adam step, bf16 gradient and parameter", ways, others, mix, out)


def _fill(moment: Moment, base: Tensor, signed: bool) -> None:
    for begin in range(0, moment.numel, PERIOD):
        size = min(PERIOD, moment.numel - begin)
        moment.narrow(begin, size).write(base[:size], signed)


def other_formulas(numel: int, _: dict[str, Make]) -> Group:
    grad16, param = filled(numel, 1e-2, BF16), filled(numel, 1.0, BF16)
    remainder, state = torch.zeros(numel, dtype=torch.int16), filled(numel, 1e-4, square=True)
    formulas = {"Lion": Lion(1e-4, 0.9, 0.99, 0.1), "SGD, momentum": Sgd(1e-3, 0.9), "Adagrad": Adagrad(1e-3)}
    ways = [
        stepped(f"zero, {name}", formula, remainder, (Moment(state),), grad16, param)
        for name, formula in formulas.items()
    ]
    return Group("other steps, bf16 with remainder", ways)


def norms(numel: int, _: dict[str, Make]) -> Group:
    ways = [
        Way(f"zero, {name}", sum_squares, sum_squares_reference, (x,), Mix([x]), share=0.85)
        for name, x in (("fp32", filled(numel, 1e-2)), ("bf16", filled(numel, 1e-2, BF16)))
    ]
    return Group("sum of squares", ways)


def _short(dtype: torch.dtype) -> str:
    return {FP32: "fp32", BF16: "bf16"}[dtype]


def sums_of_rows(numel: int, _: dict[str, Make]) -> Group:
    rows = [filled(numel, 1.0 + index) for index in range(4)]
    out = filled(numel, 0.0)
    ways = []
    for count in (2, 4):
        arguments, mix = (rows[:count], out, False), Mix(reads=rows[:count], writes=[out])
        ways.append(Way(f"zero, {count} rows of fp32", sum_rows, sum_rows_reference, arguments, mix))
    return Group("sum of rows", ways)


GROUPS: dict[str, Callable[[int, dict[str, Make]], Group]] = {
    "fp32": adam_fp32,
    "mixed": adam_mixed,
    "others": other_formulas,
    "norm": norms,
    "rows": sums_of_rows,
}
