"""The cost of a model, found by running it on the meta device: nothing is computed, and no memory is taken.

A unit runs by itself, forward and backward, once for each policy of recomputation, by the code that the engine runs
(zero/recompute/call.py). What its graph holds in between is what it keeps. In the run of the whole model it is a call
that gives tensors of the right shapes, so a unit like another one costs no second run.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from zero.config import Config
from zero.config.sections import ActivationCheckpointing
from zero.core.mixed_precision import DTYPES
from zero.core.replaced_forward import ReplacedForward
from zero.plan.patterns import outermost
from zero.recompute.call import recomputed
from zero.recompute.saved_inputs import ALONE, InputStore, made_by_graph
from zero.recompute.selective import Selective
from zero.sizes.cost import POLICIES, ModelCost, UnitCost
from zero.sizes.estimate import units_of
from zero.sizes.recorder import DeviceKernels, OperatorRecorder

Inputs = Sequence[Any] | Mapping[str, Any]
_META = torch.device("meta")


def trace(model: nn.Module, inputs: Inputs, settings: Config, device: str = "cuda") -> ModelCost:
    """Run forward and backward of a model on the meta device; the cost of one sample of `inputs`.

    model: on the meta device; it is left as it was. Counted is in the dtype that the configuration computes in.
    inputs: arguments of its forward, in order or by name; tensors on whatever device, samples along their first
    dimension. settings: as `zero.config.load` gives; of `zero.recompute` it is `products` that counts. device: "cuda"
    or "cpu", by whose kernels is counted. Units in lists of modules, or those that `zero.units` names, are the blocks,
    which can be recomputed. Raises ValueError for a model that is elsewhere, and for one that asks for values, which no
    tensor has here.
    """
    if elsewhere := [name for name, param in model.named_parameters() if not param.is_meta]:
        raise ValueError(f"model: parameter '{elsewhere[0]}' is not on the meta device; build the model there")
    dtype = settings.autocast_dtype or settings.compute_dtype
    kind = None if dtype == "fp32" else DTYPES[dtype]
    positional, named = arguments(inputs, _META, kind)
    tracer, before = _Tracer(model, settings, device), [(param, param.data) for param in model.parameters()]
    for param, values in before:
        param.data = _moved(values, _META, kind)
    try:
        with tracer.stubs():
            cost = tracer.run(positional, named, samples_in(inputs))
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
        raise ValueError(
            f"{type(model).__name__} asks for values while it runs, which a model without memory has not: {error}; "
            "leave out of the model's forward what depends on values, or give --params, --layers and --width"
        ) from error
    finally:
        for param, values in before:
            param.data = values
    note = f"Under torch.autocast all is counted in {dtype}; what it leaves in fp32, such as norms, takes twice that."
    return replace(cost, notes=(*cost.notes, note)) if settings.autocast_dtype else cost


def inputs_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
    """The arguments of a call, as `trace` takes them."""
    return inspect.signature(model.forward).bind(*args, **kwargs).arguments if args and kwargs else kwargs or args


def arguments(
    inputs: Inputs, device: torch.device, dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of a forward, in order and by name: on this device, numbers with a fraction in this dtype."""
    given = tree_map_only(torch.Tensor, partial(_moved, device=device, dtype=dtype), inputs)
    return ((), dict(given)) if isinstance(given, Mapping) else (tuple(given), {})


def _moved(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)


def samples_in(inputs: Any) -> int:
    """How many: of the first tensor, along its first dimension. Raises ValueError where there is none."""
    sizes = [leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not sizes:
        raise ValueError("inputs: there is no tensor among them; wanted the arguments of the model's forward")
    return sizes[0]


class _UnitRun(NamedTuple):
    """One forward and backward of a unit under one policy, of all samples of the inputs.

    own: bytes of what its graph holds of the tensors that were made inside; inputs, outputs: which of the tensors that
    came from the graph of the model, and of those that it gave, it holds; working: as of `UnitCost`; out, structure:
    what it gave.
    """

    forward_flops: float
    backward_flops: float
    own: int
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    working: int
    out: list[Any]
    structure: TreeSpec


class _Call(NamedTuple):
    """One call of a unit: its run under each policy, and the numbers of storages that came and that it gave."""

    anchor: str
    runs: dict[str, _UnitRun]
    inputs: list[int | None]
    outputs: list[int | None]


class _Like(NamedTuple):
    """A tensor but for its memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Like:
        """What it is like."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        """A new one, without a graph."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


_SCALAR = _Like(torch.Size(), (), torch.float32, True)


class _Made(torch.autograd.Function):
    """Tensors like others, from nothing: what a unit is given, and what it gives. Keeps `kept` for its backward."""

    @staticmethod
    def forward(ctx: Any, like: list[_Like], kept: list[torch.Tensor], *inputs: torch.Tensor) -> Any:
        """Make them; the gradients of `inputs` are made in the backward."""
        ctx.inputs = [_Like.of(each) for each in inputs]
        ctx.save_for_backward(*kept)
        made = tuple(each.empty() for each in like)
        ctx.mark_non_differentiable(*(new for new, each in zip(made, like, strict=True) if not each.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """For each input that wants one."""
        wanted = zip(ctx.inputs, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(each.empty() if wants else None for each, wants in wanted)


class _Tracer:
    """One run of a model whose units are stubs."""

    def __init__(self, model: nn.Module, settings: Config, device: str) -> None:
        self._model = model
        self._kernels = DeviceKernels(device)
        self._every = settings.zero.recompute.products
        self._recorder = self._outer = OperatorRecorder()
        self._known: dict[Hashable, dict[str, _UnitRun]] = {}
        self._calls: list[_Call] = []
        self._anchor = torch.empty(0, device=_META, requires_grad=True)  # what is made from nothing hangs on it
        self._end = 0  # the first storage that was made after the last block had run
        anchors = dict.fromkeys(unit.anchor for unit in units_of(model, settings) if unit.anchor)
        self._anchors = [each for each in anchors if not any(each.startswith(f"{other}.") for other in anchors)]
        self._blocks = blocks_of(model, settings.zero.units).intersection(self._anchors)

    @contextmanager
    def stubs(self) -> Iterator[None]:
        """Inside, units are measured and stubbed, and gradients of parameters do not stay."""
        trained = [param for param in self._model.parameters() if param.requires_grad]
        hooks = [param.register_post_accumulate_grad_hook(self._drop) for param in trained]
        modules = {anchor: self._model.get_submodule(anchor) for anchor in self._anchors}
        own = {anchor: module.__dict__.get("forward") for anchor, module in modules.items()}
        for anchor, module in modules.items():
            module.forward = partial(self._stub, anchor, module, module.forward)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for anchor, module in modules.items():
                del module.forward
                if own[anchor] is not None:
                    module.forward = own[anchor]

    def _drop(self, param: torch.Tensor) -> None:
        self._recorder.ignore(param.grad)
        param.grad = None

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], samples: int) -> ModelCost:
        """The model's own forward and backward, beside those of its units."""
        with self._outer as recorder:
            with self._kernels:
                out = self._model(*args, **kwargs)
            loss, notes = _loss(out)
            del out
            kept, forward_flops = recorder.alive(), recorder.flops
            torch.autograd.backward([loss])
        before, last = (
            sum(recorder.nbytes(each) for each in kept if (each >= self._end) is late) / samples
            for late in (False, True)
        )
        flops = forward_flops / samples, (recorder.flops - forward_flops) / samples
        saved, nothing = dict.fromkeys(POLICIES, before), dict.fromkeys(POLICIES, 0.0)
        root = UnitCost("", type(self._model).__name__, False, *flops, saved, nothing, 0.0)
        shapes = [leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return ModelCost(
            (*self._units(kept, samples), root),
            recorder.peak(self._end) / samples,
            last,
            next((shape[1] for shape in shapes if len(shape) > 1), 1),
            notes,
        )

    def _units(self, kept: set[int], samples: int) -> Iterator[UnitCost]:
        """In the order of their first calls. Each storage counts once: for what holds it first, under each policy."""
        counted = {policy: set(kept) for policy in POLICIES}
        saved: dict[str, dict[str, float]] = {}
        runs = defaultdict(list)
        for call in self._calls:
            runs[call.anchor].append(call.runs)
            sums = saved.setdefault(call.anchor, dict.fromkeys(POLICIES, 0.0))
            for policy in POLICIES if call.anchor in self._blocks else ():
                run = call.runs[policy]
                held = set(compress(call.inputs, run.inputs)) - {None}
                given = set(compress(call.outputs, run.outputs))
                sums[policy] += (run.own + sum(map(self._outer.nbytes, held - counted[policy]))) / samples
                sums[policy] -= sum(map(self._outer.nbytes, given & kept)) / samples  # the root keeps it, too
                counted[policy] |= held | given
        for anchor, each in runs.items():
            backward = {policy: sum(run[policy].backward_flops for run in each) / samples for policy in POLICIES}
            yield UnitCost(
                anchor,
                type(self._model.get_submodule(anchor)).__name__,
                anchor in self._blocks,
                sum(run["none"].forward_flops for run in each) / samples,
                backward["none"],
                saved[anchor],
                {policy: flops - backward["none"] for policy, flops in backward.items()},
                max(run["none"].working for run in each) / samples,
            )

    def _stub(self, anchor: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a call of the unit gives, from nothing."""
        leaves, structure = tree_flatten((args, kwargs))
        block = anchor in self._blocks and torch.is_grad_enabled()
        how = block, torch.is_grad_enabled(), str(structure), *map(_described, leaves)
        kind = _kind(module), _replacing(forward), *how
        if kind not in self._known:
            self._outer.paused = True
            self._known[kind] = self._measured(module, forward, leaves, structure, block)
            self._outer.paused = False
        runs = self._known[kind]
        plain = runs["none"]
        inputs = [leaf for leaf in leaves if made_by_graph(leaf)]
        # What does not come from the graph stays for the backward, whoever holds it, and so does all of what is no
        # block: in the run of the model each storage counts once.
        others = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not made_by_graph(leaf)]
        kept = [tensor for tensor in others if not isinstance(tensor, nn.Parameter)]
        if not block:
            own = torch.empty(plain.own, dtype=torch.uint8, device=_META)
            kept += [own, *compress(inputs, plain.inputs)]
        else:
            self._end = self._outer.made
        like = [leaf for leaf in plain.out if isinstance(leaf, _Like)]
        made = list(_Made.apply(like, kept, self._anchor, *inputs)) if like else []
        numbers = [self._outer.number(each) for each in made if each.requires_grad]
        self._calls.append(_Call(anchor, runs, [self._outer.number(each) for each in inputs], numbers))
        return tree_unflatten([made.pop(0) if isinstance(leaf, _Like) else leaf for leaf in plain.out], plain.structure)

    def _measured(
        self, module: nn.Module, forward: Callable[..., Any], leaves: list[Any], structure: TreeSpec, block: bool
    ) -> dict[str, _UnitRun]:
        """Run the unit under each policy."""
        computed, run = self._kernels.around(forward), partial(self._run, leaves, structure)
        plain = run(computed)
        if not block:
            return dict.fromkeys(POLICIES, plain)
        store = InputStore(ActivationCheckpointing(), ALONE, _META)
        selective = Selective(self._every)

        def again(contexts: Any) -> _UnitRun:
            return run(lambda *args, **kwargs: recomputed(computed, args, kwargs, store, contexts, module))

        again(selective.contexts)  # the first recomputation finds out which products are needed
        full = again(None)
        host = full._replace(inputs=(False,) * len(full.inputs))
        return {"none": plain, "selective": again(selective.contexts), "full": full, "host": host}

    def _run(self, leaves: list[Any], structure: TreeSpec, forward: Callable[..., Any]) -> _UnitRun:
        """Run forward and backward once, apart from the graph of the model."""
        with OperatorRecorder() as recorder:
            self._recorder = recorder
            like = [_Like.of(leaf) for leaf in leaves if made_by_graph(leaf)]
            fresh = iter(_Made.apply(like, [], self._anchor) if like else ())
            given = [next(fresh) if made_by_graph(leaf) else leaf for leaf in leaves]
            numbers = [recorder.number(each) for each in given if made_by_graph(each)]
            args, kwargs = tree_unflatten(given, structure)
            del fresh, given
            out, form = tree_flatten(forward(*args, **kwargs))
            del args, kwargs
            graph = [leaf for leaf in out if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            results = [recorder.number(each) for each in graph]
            specs = [_Like.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in out]
            end = _Made.apply([_SCALAR], [], *graph)[0] if graph else None
            del out, graph
            kept, forward_flops = recorder.alive(), recorder.flops
            if end is not None:
                kept.discard(recorder.number(end))
                torch.autograd.backward([end])
        self._recorder = self._outer
        return _UnitRun(
            forward_flops,
            recorder.flops - forward_flops,
            sum(map(recorder.nbytes, kept.difference(numbers))),
            tuple(each in kept for each in numbers),
            tuple(each in kept for each in results),
            max(0, recorder.peak() - sum(map(recorder.nbytes, kept))),
            specs,
            form,
        )


def _loss(out: Any) -> tuple[torch.Tensor, tuple[str, ...]]:
    """What backward begins at, or something that takes all of it."""
    found = ends(out)
    if found[0].dim() == 0:
        return found[0], ()
    note = "The model gives no loss: what comes after its result is not counted; give it targets to have that, too."
    return _Made.apply([_SCALAR], [], *found)[0], (note,)


def ends(out: Any) -> list[torch.Tensor]:
    """What backward begins at: the loss among what a model gives; else all that has a graph. ValueError for nothing."""
    named = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if isinstance(named, torch.Tensor):
        return [named]
    if not tensors:
        raise ValueError("model: nothing that it gives depends on a parameter that is trained")
    return tensors[: 1 if tensors[0].dim() == 0 else None]


def blocks_of(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Names of modules that follow each other in lists, or that the patterns name."""
    modules = dict(model.named_modules())
    if patterns:
        return set(outermost("zero.units", [(name, type(each).__name__) for name, each in modules.items()], patterns))
    lists = {name for name, each in modules.items() if isinstance(each, (nn.ModuleList, nn.Sequential))}
    return {name for name in modules if name.rpartition(".")[0] in lists} - lists


_NUMBERS = ("idx", "index", "number", "_id")  # ends of names of what only tells a block from its neighbours


def _kind(module: nn.Module) -> Hashable:
    """Equal for modules that cost the same: classes, plain attributes, and shapes of parameters and buffers."""
    parts: list[Hashable] = []
    for child in module.modules():
        plain = {name: value for name, value in vars(child).items() if isinstance(value, (bool, int, float, str))}
        parts.append((type(child), *sorted((k, v) for k, v in plain.items() if not k.endswith(_NUMBERS))))
        parts += [(name, _described(each)) for name, each in (*child._parameters.items(), *child._buffers.items())]
    return tuple(parts)


def _replacing(forward: Any) -> tuple[type, ...]:
    """What stands in place of a forward, as of the blocks that sequences are cut and made whole at."""
    return (type(forward), *_replacing(forward.plain)) if isinstance(forward, ReplacedForward) else ()


def _described(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return _Like.of(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value)
