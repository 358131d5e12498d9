"""A model in pieces: which module belongs to which stage, and the part of the model's forward that each stage runs.

Modules that lie in one stage are called as they are, with their hooks. What is between them, the forward of the model
and of modules that several stages have a part of, is traced by torch.fx: it may not branch on values of tensors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from zero.core.hooks import as_forward
from zero.core.kinds import kinds_of
from zero.core.tensors import map_leaves
from zero.parallel.pipeline.partition import params_of
from zero.parallel.pipeline.stage import Batch

# Functions that give another value each time: they run on the stage that first uses them, and nowhere again.
_RANDOM = re.compile("rand|dropout|bernoulli|multinomial|normal")


class Elsewhere(nn.Module):
    """Stands for a module of another stage."""

    def __init__(self, name: str, stage: int, stands_for: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._name, self._stage = name, stage
        self.stands_for = stands_for  # see `kinds_of`

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: it is not here."""
        raise RuntimeError(
            f"module '{self._name}' is called on a rank that does not have it: it is of stage {self._stage} of the "
            "pipeline; engine.train_batch() and engine.eval_batch() run all stages"
        )

    def extra_repr(self) -> str:
        """What it stands for."""
        return f"stage {self._stage}"


class Divided:
    """A model whose modules are divided among stages.

    stage_of: of each module that lies in one stage, none inside another, by its name, and of each parameter or buffer
    of the others; mixed: the names of those others; every_stage_reads: also those in the middle need the batch.
    """

    every_stage_reads = False

    def __init__(self, model: nn.Module, stage_of: Mapping[str, int], stages: int) -> None:
        self.model = model
        self._stages = stages
        self.stage_of = stage_of
        self.mixed = {""} | {name[:at] for name in stage_of for at, letter in enumerate(name) if letter == "."}
        self._graphs: dict[tuple[Any, ...], list[Piece]] = {}
        self._pruned: list[tuple[dict[str, Any], str, Any]] = []  # what was taken out: from where, name, what
        self._absent: dict[str, nn.Parameter] = {}  # of modules that several stages have a part of, without memory

    def prune(self, stages: Sequence[int]) -> None:
        """Take out of the model what is of none of these stages; tied parameters keep their first names."""
        first: dict[nn.Parameter, str] = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            first.setdefault(param, name)
        for name, stage in self.stage_of.items():
            parent, _, child = name.rpartition(".")
            owner = self.model.get_submodule(parent)
            if stage in stages:
                continue
            if child in owner._modules:
                if next(_held(owner._modules[child]), None) is not None:
                    kinds = [(below, kind.name) for below, kind in kinds_of(owner._modules[child]).items()]
                    self._put(owner._modules, child, Elsewhere(name, stage, kinds))
            elif child in owner._parameters:
                self._absent[name] = nn.Parameter(owner._parameters[child].detach().to("meta"))
                self._put(owner._parameters, child, None)
        here = dict.fromkeys(self.model.parameters())
        for param in here:
            _register(self.model, first[param], param)

    def restore(self) -> None:
        """Put back what was taken out."""
        for table, name, was in reversed(self._pruned):
            table[name] = was
        self._pruned = []

    def settle(self) -> None:
        """Let go of what was taken out: nobody wants it back."""
        self._pruned = []

    def _put(self, table: dict[str, Any], name: str, value: Any) -> None:
        self._pruned.append((table, name, table[name]))
        table[name] = value

    def readers(self) -> dict[nn.Parameter, set[int]]:
        """The stages that read each parameter."""
        found: dict[nn.Parameter, set[int]] = {}
        for name, stage in self.stage_of.items():
            for param in params_of(self.model, name):
                found.setdefault(param, set()).add(stage)
        return found

    def prepare(self, batch: Batch) -> None:
        """Divide the forward for the arguments that this micro-batch has; raises what `split` does."""
        if self._stages > 1:
            self._pieces(self._names(batch))

    def run(self, stage: int, values: Any, batch: Batch) -> Any:
        """Stage `stage` of the forward, from what comes into it; returns what goes to the next one, or the output."""
        if self._stages == 1:
            return self.model(*batch.args, **batch.kwargs)
        names = self._names(batch)
        piece = self._pieces(names)[stage]
        given = dict(zip(piece.takes, values or (), strict=True))
        call = functools.partial(piece.run, self.model, names, given)
        for owner in piece.owners:  # whose own parameters are gathered as its forward does
            call = functools.partial(as_forward, self.model.get_submodule(owner), call)
        return call()

    def _pieces(self, names: Mapping[str, Any]) -> list[Piece]:
        key = (tuple(names), self.model.training)
        if key not in self._graphs:
            self._graphs[key] = split(self._traced(names), self.stage_of, self._stages, self.model)
        return self._graphs[key]

    def _names(self, batch: Batch) -> dict[str, Any]:
        """The arguments of the forward, by name."""
        bound = inspect.signature(self.model.forward).bind(*batch.args, **batch.kwargs)
        return dict(bound.arguments)

    def _traced(self, names: Mapping[str, Any]) -> fx.Graph:
        parameters = inspect.signature(self.model.forward).parameters
        fixed = {
            name: each.default
            for name, each in parameters.items()
            if name not in names and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }
        tracer = _Tracer(self.mixed, self.stage_of, self.model)
        try:
            with self._whole():
                graph = tracer.trace(self.model, concrete_args=fixed or None)
        except Exception as error:
            raise RuntimeError(
                f"pipeline: the forward of {type(self.model).__name__} cannot be divided among stages: {error}. What "
                "is between modules of different stages must not depend on values of tensors; give an nn.Sequential "
                "or a model of transformers"
            ) from error
        return _without(graph, fixed)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Inside, a trace finds the parameters that are not here."""
        owners = {name: self.model.get_submodule(name.rpartition(".")[0]) for name in self._absent}
        for name, owner in owners.items():
            owner._parameters[name.rpartition(".")[2]] = self._absent[name]
        try:
            yield
        finally:
            for name, owner in owners.items():
                owner._parameters[name.rpartition(".")[2]] = None


class _Tracer(fx.Tracer):
    """Names a module that stands in several places by each of them in turn: they may be of several stages."""

    def __init__(self, mixed: set[str], stage_of: Mapping[str, int], model: nn.Module) -> None:
        super().__init__()
        self._mixed = mixed
        self._places: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            if name in stage_of:
                self._places.setdefault(module, []).append(name)

    def path_of_module(self, mod: nn.Module) -> str:
        """The name of a module that is called."""
        left = self._places.get(mod, ())
        return super().path_of_module(mod) if not left else left.pop(0) if len(left) > 1 else left[0]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether it is called as it is."""
        return module_qualified_name not in self._mixed


class Piece:
    """The part of a traced forward that one stage runs.

    takes: the values that come from the stage before, by their names in the graph; owners: the modules that are called
    in pieces whose own parameters it reads.
    """

    def __init__(self, graph: fx.Graph, takes: list[str], inputs: list[str]) -> None:
        self.takes = takes
        self._graph = graph
        self._inputs = inputs
        read = (node.target for node in graph.nodes if node.op == "get_attr")
        self.owners = sorted({name.rpartition(".")[0] for name in read})

    def run(self, model: nn.Module, inputs: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
        """Run it on the model's inputs, by name, and on what has come."""
        given = [*(inputs[name] for name in self._inputs), *(values[name] for name in self.takes)]
        found = fx.Interpreter(model, graph=self._graph).run(*given, enable_io_processing=False)
        # What another stage reads of a parameter must outlive its release.
        return map_leaves(found, lambda leaf: leaf.clone() if isinstance(leaf, nn.Parameter) else leaf)


def split(graph: fx.Graph, stage_of: Mapping[str, int], stages: int, model: nn.Module) -> list[Piece]:
    """The pieces of a traced forward, one for each stage; ValueError where a later stage comes before an earlier one.

    What depends on the inputs alone is computed by each stage that uses it: all ranks along pp have the inputs.
    """
    at: dict[fx.Node, int | None] = {}
    for node in graph.nodes:
        before = max((at[each] for each in node.all_input_nodes if at[each] is not None), default=None)
        own = _stage_of(node, stage_of, model)
        if own is not None and before is not None and own < before:
            raise ValueError(
                f"pipeline: '{node.target}' is of stage {own}, and is called behind what stage {before} computes; "
                "stages are run in order, so give it a later one, or the modules before it an earlier one"
            )
        at[node] = before if own is None else own
        if at[node] is None and node.op == "call_function" and _RANDOM.search(getattr(node.target, "__name__", "")):
            at[node] = 0
    (output,) = (node for node in graph.nodes if node.op == "output")
    at[output] = stages - 1
    used = {node: max((_last(user, at) for user in node.users), default=-1) for node in graph.nodes}
    pieces = []
    for stage in range(stages):
        takes = [node for node in graph.nodes if at[node] is not None and at[node] < stage <= used[node]]
        gives = [node for node in graph.nodes if at[node] is not None and at[node] <= stage < used[node]]
        pieces.append(_piece(graph, output, takes, gives, stage == stages - 1))
    return pieces


def _piece(graph: fx.Graph, output: fx.Node, takes: list[fx.Node], gives: list[fx.Node], last: bool) -> Piece:
    """The piece that computes `gives`, or the output, from `takes` and the inputs."""
    wanted, needed = ([output] if last else [*gives]), set()
    while wanted:
        node = wanted.pop()
        if node not in needed and node not in takes:
            needed.add(node)
            wanted += node.all_input_nodes
    made, new, inputs = fx.Graph(), {}, []
    for node in graph.nodes:
        if node.op == "placeholder" and node in needed:
            new[node] = made.placeholder(node.target)
            inputs.append(node.target)
    for node in takes:
        new[node] = made.placeholder(node.name)
    for node in graph.nodes:
        if node in needed and node.op not in ("placeholder", "output"):
            new[node] = made.node_copy(node, lambda each: new[each])
    made.output(fx.map_arg(output.args[0], lambda each: new[each]) if last else tuple(new[node] for node in gives))
    return Piece(made, [node.name for node in takes], inputs)


def _last(user: fx.Node, at: Mapping[fx.Node, int | None]) -> int:
    """The last stage that runs `user`."""
    if at[user] is not None:
        return at[user]
    return max((_last(each, at) for each in user.users), default=-1)


def _stage_of(node: fx.Node, stage_of: Mapping[str, int], model: nn.Module) -> int | None:
    """The stage of what has parameters or buffers; other modules run wherever their inputs are."""
    if node.op not in ("call_module", "get_attr"):
        return None
    name = node.target
    if node.op == "call_module":
        module = model.get_submodule(name)
        free = not isinstance(module, Elsewhere) and next(_held(module), None) is None
        return None if free else stage_of.get(name)
    while name and name not in stage_of:
        name = name.rpartition(".")[0]
    return stage_of.get(name)


def _held(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _without(graph: fx.Graph, fixed: Mapping[str, Any]) -> fx.Graph:
    """The graph without arguments that were not given: torch.fx checks their values in it."""

    def erase(node: fx.Node) -> None:
        for user in [*node.users]:
            erase(user)
        graph.erase_node(node)

    for node in [*graph.nodes]:
        if node.op == "placeholder" and re.sub(r"_\d+$", "", node.target) in fixed and node.graph is graph:
            erase(node)
    return graph


def _register(model: nn.Module, name: str, param: nn.Parameter) -> None:
    """Have the parameter there by this name, too, where its module is elsewhere."""
    path, _, last = name.rpartition(".")
    owner = model
    for part in filter(None, path.split(".")):
        if part not in owner._modules and isinstance(owner, Elsewhere):
            owner._modules[part] = Elsewhere(f"{owner._name}.{part}", owner._stage, [])
        owner = owner._modules[part]
    if owner._parameters.get(last) is not param:
        owner._parameters[last] = param
