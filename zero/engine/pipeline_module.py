"""Models that are lists of layers, by DeepSpeed's names: `PipelineModule`, `LayerSpec` and `TiedLayerSpec`."""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero.core.hooks import as_forward
from zero.core.init.builder import running
from zero.data import seed_everything
from zero.parallel.pipeline.partition import starts_of, times_of
from zero.parallel.pipeline.stage import Batch
from zero.recompute.call import recomputed
from zero.recompute.holder import HOLDER


class LayerSpec:
    """A layer, `typename(*args, **kwargs)`, that is built only on the ranks that run it."""

    def __init__(self, typename: Callable[..., nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Make the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that is one module wherever the same `key` stands: all of its parameters are equal on all stages.

    forward_fn: is called with the module and the input, instead of the module; tied_weight_attr: names of what must be
    there.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else [*tied_weight_attr]


class PipelineModule(nn.Module):
    """Layers that are called one after the other, each with what the one before returned, and divided among ranks.

    layers: an nn.Sequential, or modules, `LayerSpec`s and functions; their numbers are their names. num_stages, or
    `topology` with an axis `pipe`: this rank has the layers of its stage only; without both it has all, until
    `initialize` divides them by `pipeline.stages` of the JSON. loss_fn: of the output and a target. seed_layers:
    `seed_fn(base_seed + number)` before a layer is built, and so for each forward with another base, so that random
    numbers do not depend on the stages. partition_method: as `pipeline.partition` of the JSON.
    activation_checkpoint_interval: recompute runs of so many layers, by `activation_checkpoint_func(function,
    *inputs)`, checkpointable_layers: where all are of these classes. dynamic_shape: shapes may always change.
    """

    children_repeat, every_stage_reads = True, False

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
            raise ValueError("PipelineModule(loss_fn=...): got a module with parameters; make it the last layer")
        self.loss_fn, self.partition_method = loss_fn, partition_method
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn or seed_everything, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.checkpointable_layers = checkpointable_layers
        self.activation_checkpoint_func = activation_checkpoint_func or _recomputed
        self._sizes, self.stage_id = _place(num_stages, topology)
        self.num_stages, self._stages = self._sizes.get("pp"), (self.stage_id,)
        self.tied_modules = nn.ModuleDict()
        self.tied_modules.children_repeat = True
        self._runs: dict[int, int] = {}  # forwards so far, by the first layer
        layers = list(layers)
        self._layers = [type(each) if isinstance(each, nn.Module) else each for each in layers]
        self._stage_of = self._divided(layers, self.num_stages or 1, partition_method)
        for number in self.numbers(*self._stages):
            self._add(number, layers[number])

    def _add(self, number: int, layer: Any) -> None:
        """Have a layer here; one that is none yet is built."""
        if self.seed_layers:
            self.seed_fn(self.base_seed + number)
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            for name in layer.tied_weight_attr:  # AttributeError where it is not there
                functools.reduce(getattr, name.split("."), self.tied_modules[layer.key])
        elif isinstance(layer, (LayerSpec, nn.Module)):
            self.add_module(str(number), layer.build() if isinstance(layer, LayerSpec) else layer)
        elif not callable(layer):
            raise TypeError(f"PipelineModule: layer {number} is of {type(layer).__name__}; wanted what can be called")

    def _divided(
        self, layers: Sequence[Any], stages: int, partition: Any, call: Callable[[], Any] | None = None
    ) -> list[int]:
        """The stage of each of these."""
        modules = [each if isinstance(each, nn.Module) else None for each in layers]
        kinds = [*map(_kind, self._layers)]
        how = (lambda: [*map(_numel, layers)]), stages, partition, lambda: times_of(modules, self, call)
        starts = starts_of(kinds, *how) if stages > 1 else [0]
        stage_of = [bisect(starts, number) - 1 for number in range(len(layers))]
        seen: dict[nn.Parameter, int] = {}
        for number, layer in enumerate(layers):
            of_one = isinstance(layer, nn.Module) and not isinstance(self._layers[number], TiedLayerSpec)
            for param in layer.parameters() if of_one else ():
                if stage_of[other := seen.setdefault(param, number)] != stage_of[number]:
                    raise ValueError(
                        f"PipelineModule: layers {other} and {number} share a parameter, and are of two stages; give "
                        "both as TiedLayerSpec with one key"
                    )
        return stage_of

    def in_stages(
        self, stages: int, partition: Any, said: Mapping[str, int], call: Callable[[], Any] | None
    ) -> PipelineModule:
        """Divide it, if it is not; ValueError where it is, in another way."""
        if said:
            raise ValueError("pipeline.stage_map: not for a PipelineModule; pipeline.partition divides its layers")
        if self.num_stages is None:
            layers = [self._module(number) for number in range(len(self._layers))]
            how = self.partition_method if partition is None else partition
            self._stage_of = self._divided(layers, stages, how, call)
        elif self.num_stages != stages or partition not in (None, "parameters", self.partition_method):
            raise ValueError(
                f"PipelineModule: it was made with {self.num_stages} stages by {self.partition_method!r}, and the JSON "
                f"wants {stages} by {partition or 'parameters'!r}; leave num_stages and topology out, or that"
            )
        return self

    @property
    def stage_of(self) -> dict[str, int]:
        """The stage of each layer, by its name."""
        return {str(number): stage for number, stage in enumerate(self._stage_of)}

    def numbers(self, *stages: int) -> list[int]:
        """Those of the layers of these stages."""
        return [number for number, stage in enumerate(self._stage_of) if stage in stages]

    def prune(self, stages: Sequence[int]) -> None:
        """Take out what is of none of these stages."""
        self._pruned = self._stages, dict(self._modules), dict(self.tied_modules._modules)
        self._stages, here = tuple(stages), self.numbers(*stages)
        keys = {getattr(self._layers[number], "key", None) for number in here}
        for number in {*range(len(self._layers))} - {*here}:
            self._modules.pop(str(number), None)
        for key in {*self.tied_modules} - keys:
            del self.tied_modules[key]

    def restore(self) -> None:
        """Put back what was taken out."""
        self._stages, modules, tied = self._pruned
        self._modules.update(modules)
        self.tied_modules._modules.update(tied)

    def settle(self) -> None:
        """Let go of what was taken out."""
        self._pruned = None

    @property
    def stands_for(self) -> list[tuple[str, str]]:
        """Layers of other ranks, by number and class; see `kinds_of`."""
        return [(str(at), _kind(each)) for at, each in enumerate(self._layers) if self._module(at) is None]

    def prepare(self, batch: Batch) -> None:
        """Do nothing: whatever a batch has, the layers are the same."""

    def readers(self) -> dict[nn.Parameter, set[int]]:
        """The stages that have each parameter that is here."""
        found: dict[nn.Parameter, set[int]] = {}
        for number, stage in enumerate(self._stage_of):
            layer = self._module(number)
            for param in layer.parameters() if layer is not None else ():
                found.setdefault(param, set()).add(stage)
        return found

    def _module(self, number: int) -> nn.Module | None:
        """The module of a layer; None where there is none here."""
        layer = self._layers[number]
        if isinstance(layer, TiedLayerSpec):
            return self.tied_modules._modules.get(layer.key)
        return self._modules.get(str(number))

    def _call(self, number: int) -> Callable[[Any], Any]:
        """What is called for a layer that is here."""
        layer, module = self._layers[number], self._module(number)
        if module is None or getattr(layer, "forward_fn", None) is None:
            return layer if module is None else module
        return functools.partial(as_forward, module, functools.partial(layer.forward_fn, module))

    def name_of(self, name: str) -> str | None:
        """The name here of what DeepSpeed's files of layers have; None for tied ones, but the first."""
        number, _, rest = name.partition(".")
        keys = [getattr(each, "key", None) for each in self._layers]
        key = keys[int(number)] if number.isdigit() and int(number) < len(keys) else None
        if key is None:
            return name
        return f"tied_modules.{key}.{rest}" if keys.index(key) == int(number) else None

    @property
    def forward_funcs(self) -> list[Callable[[Any], Any]]:
        """What is called for each layer of this rank."""
        return [self._call(number) for number in self.numbers(*self._stages)]

    def forward(self, forward_input: Any) -> Any:
        """Run the layers of this rank."""
        return self._through(self.numbers(*self._stages), forward_input)

    def run(self, stage: int, values: Any, batch: Batch) -> Any:
        """The layers of a stage, from what the one before has given."""
        first = batch.args[0] if batch.args else batch.kwargs
        return self._through(self.numbers(stage), values if stage else first)

    def _through(self, numbers: Sequence[int], value: Any) -> Any:
        every, kinds = self.activation_checkpoint_interval, self.checkpointable_layers
        runs = self._runs[numbers[0]] = self._runs.get(numbers[0], 0) + 1
        for at in range(0, len(numbers), every or len(numbers)):
            some = numbers[at : at + (every or len(numbers))]
            call = functools.partial(self._some, some, self.base_seed * (runs + 1))
            known = kinds is None or all(_kind(self._layers[number]) in kinds for number in some)
            if every and known and torch.is_grad_enabled():
                value = self.activation_checkpoint_func(call, *(value if isinstance(value, tuple) else (value,)))
            else:
                value = call(value)
        return value

    def _some(self, numbers: Sequence[int], seed: int, *inputs: Any) -> Any:
        value = inputs[0] if len(inputs) == 1 else inputs
        for number in numbers:
            if self.seed_layers:
                self.seed_fn(seed + number)
            value = self._call(number)(value)
        return value

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer that is a module by itself."""
        for module in filter(None, map(self._module, self.numbers(*self._stages))):
            module.compile(*args, **kwargs)


def _place(num_stages: int | None, topology: Any) -> tuple[dict[str, int], int]:
    """The sizes along axes that the arguments say, and the stage of this rank; ValueError for what does not fit."""
    sizes = {} if num_stages is None else {"pp": num_stages}
    if topology is not None:
        sizes = {"pp": max(1, topology.get_dim("pipe")), "tp": max(1, topology.get_dim("model"))}
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    stages, said = sizes.get("pp", 1), world if topology is None else topology.world_size()
    if said != world or world % stages:
        ranks = f"{world}{'' if dist.is_initialized() else ' before zero.init_distributed()'}"
        raise ValueError(
            f"PipelineModule: got {stages} stages of {said} ranks; wanted a multiple, and there are {ranks}"
        )
    if stages > 1 and running() is not None:  # it would wait for the other ranks, which build other layers
        raise ValueError("PipelineModule inside zero.Init: a rank builds its own layers only; build it outside")
    if topology is not None and topology.get_axis_list("pipe", 0) != [*range(world // stages)]:
        raise ValueError(f"PipelineModule: got a topology of {topology.get_axis_names()}; pipe must be its first axis")
    return sizes, rank // (world // stages)


def _kind(layer: Any) -> str:
    """The name of its class, or of the function."""
    return getattr(getattr(layer, "typename", layer), "__name__", type(layer).__name__)


def _numel(layer: Any) -> float:
    """How many parameters it trains; a spec is built for that, without memory where its class lets that be."""
    if isinstance(layer, LayerSpec):
        with torch.random.fork_rng(devices=[]):
            with contextlib.suppress(Exception), torch.device("meta"):
                return _numel(layer.build())
            return _numel(layer.build())
    params = layer.parameters() if isinstance(layer, nn.Module) else ()
    return float(sum(param.numel() for param in params if param.requires_grad))


def _recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    return recomputed(function, inputs, {}, HOLDER.scope.inputs)
