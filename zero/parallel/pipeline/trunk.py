"""A model of transformers in stages: each stage runs the model's own forward, in which others' blocks do not compute.

Such a forward cannot be traced: it branches on its arguments and its configuration. So it is run, and modules of other
stages are replaced for the time: the block right before the stage gives what came from there, whatever is before that
gives NaN, and the forward ends as the last block of the stage has run. Masks and positions each stage makes by itself,
from the batch. NaN in the wrong place tells that a stage would need more than the output of one block.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zero.core.hooks import tensors_in
from zero.core.tensors import map_leaves
from zero.parallel.pipeline.partition import layers
from zero.parallel.pipeline.split import Divided
from zero.parallel.pipeline.stage import Batch

# Transformers collects these from all blocks; a stage would have its own.
_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")
_PRETRAINED = "transformers.modeling_utils", "PreTrainedModel"
_PLAIN = (bool, int, float, str, type(None))


def is_pretrained(model: nn.Module) -> bool:
    """Whether it is a model of transformers, or adapters of PEFT around one."""
    return any(not name or hasattr(model, "peft_config") for name, _ in pretrained(model))


def pretrained(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The names and the models of transformers that this is, or has inside."""
    for name, module in model.named_modules():
        if any((each.__module__, each.__name__) == _PRETRAINED for each in type(module).__mro__):
            yield name, module


class Trunk(Divided):
    """A model of transformers whose blocks are divided among stages.

    What its pp_plan names before the blocks is of the first stage; what it names behind them, and what is outside of
    the base model, of the last. ValueError where that is not so, or a stage would not compute what the model does.
    """

    every_stage_reads = True

    def __init__(self, model: nn.Module, stage_of: Mapping[str, int], stages: int) -> None:
        # Modules without parameters, rotary embeddings say, stay on all ranks.
        params = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        held = {name: at for name, at in stage_of.items() if any(f"{each}.".startswith(f"{name}.") for each in params)}
        super().__init__(model, held, stages)
        if stages == 1:
            return
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            self._refuse("its adapter puts virtual tokens in front of the texts; take one inside of blocks (LoRA)")
        inside, theirs = next(pretrained(model))
        self._base, self._blocks = theirs.base_model, layers(model)
        path = f"{inside}." if inside else ""
        path += "" if self._base is theirs else f"{theirs.base_model_prefix}."
        plan = getattr(self._base, "_pp_plan", None) or getattr(self._base.config, "base_model_pp_plan", None) or {}
        plan = [f"{path}{name}" for name in plan if name in self._base._modules]
        if (trunk := self._blocks[0].rpartition(".")[0]) not in plan:
            self._refuse(f"it has no pp_plan with its blocks '{trunk}'; take a model of transformers that has (Llama)")
        self._before, behind = plan[: plan.index(trunk)], plan[plan.index(trunk) + 1 :]
        if {*(found := [held.get(name) for name in self._blocks])} != {*range(stages)}:
            self._refuse(f"its blocks are of the stages {found}; give each of 0 to {stages - 1} a whole one")
        for name in (name for name in held if name not in self._blocks):
            if name.startswith(path) and name not in plan:
                self._refuse(f"'{name}' has parameters and is not in its pp_plan; take a model whose plan is complete")
            if held[name] != (wanted := 0 if name in self._before else stages - 1):
                self._refuse(f"'{name}' is said to be of stage {held[name]}, and is called in stage {wanted}; say that")
        self._takes = inspect.signature(self._base.forward).parameters
        self._attributes = {
            name: {key: each for key, each in vars(model.get_submodule(name)).items() if type(each) in _PLAIN}
            for name in (*self._before, *self._blocks, *behind)
        }
        self._prove(behind)

    def prepare(self, batch: Batch) -> None:
        """Raise ValueError where the batch asks for what no stage has."""
        if self._stages > 1:
            self._given(batch)

    def run(self, stage: int, values: Any, batch: Batch) -> Any:
        """Stage `stage` of the forward, from what comes into it; returns what goes to the next one, or the output."""
        if self._stages == 1:
            return super().run(stage, values, batch)
        with self._instead(self._calls(stage, values)):
            try:
                return self.model(**self._given(batch))
            except _Reached as reached:
                return reached.args[0]

    def _given(self, batch: Batch) -> dict[str, Any]:
        """The arguments of the model's forward, by name."""
        given = dict(zip(inspect.signature(self.model.forward).parameters, batch.args, strict=False)) | batch.kwargs
        for name in _COLLECTED:
            asked = given.get(name)
            if getattr(self._base.config, name, False) if asked is None else asked:
                self._refuse(f"{name} is set, and a stage has that of its own blocks only; set {name}=False")
        return given | ({"use_cache": False} if "use_cache" in self._takes else {})

    def _calls(self, stage: int, came: Any) -> dict[str, Callable[..., Any]]:
        """The forwards that modules get instead in a stage, of which `came` is the input."""
        at = [self.stage_of[name] for name in self._blocks]
        first, name = at.index(stage), self._blocks[len(at) - at[::-1].index(stage) - 1]
        last, nan = self.model.get_submodule(name), map_leaves(came, _nan)

        def run_last(*args: Any, **kwargs: Any) -> None:
            raise _Reached(last(*args, **kwargs))

        calls = {} if stage == self._stages - 1 else {name: run_last}
        if stage:
            calls |= dict.fromkeys(self._before, lambda *_, **__: next(tensors_in(nan)))
            calls |= dict.fromkeys(self._blocks[: first - 1], lambda *_, **__: nan)
            calls[self._blocks[first - 1]] = lambda *_, **__: came
        return calls

    @contextlib.contextmanager
    def _instead(self, calls: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """Inside, the modules of these names do that."""
        kept = {name: self.model.get_submodule(name) for name in calls}
        try:
            for name, call in calls.items():
                self.model.set_submodule(name, StandIn(call, self._attributes[name]))
            yield
        finally:
            for name, module in kept.items():
                self.model.set_submodule(name, module)

    def _prove(self, behind: list[str]) -> None:
        """Raise ValueError where a stage needs more than the batch and what the block before it gives.

        Runs the base model on two tokens, without any parameter. What is on the meta device computes nothing, and no
        engine is made of it. behind: what is called behind the blocks.
        """
        device = next(itertools.chain(self._base.buffers(), self._base.parameters())).device
        one = torch.ones(1, 2, self._base.config.hidden_size, device=device)
        given = self._given(Batch(0, (), {"input_ids": torch.zeros(1, 2, device=device, dtype=torch.long)}))
        for stage in range(1, 1 if device.type == "meta" else self._stages):
            order, probed = [], [name for name in self._blocks if self.stage_of[name] >= stage] + behind
            calls = self._calls(stage, one) | {name: functools.partial(_probe, order, name, one) for name in probed}
            try:
                with self._instead(calls), torch.no_grad():
                    _probe(order, "the head", one, self._base(**given)[0])
                if order != [*probed, "the head"]:
                    raise ValueError(f"it calls modules in the order {order}, wanted {probed}")
            except Exception as error:
                self._refuse(f"its forward cannot begin at stage {stage}: {error}; take another model")

    def _refuse(self, why: str) -> None:
        raise ValueError(f"pipeline: {type(self.model).__name__} cannot be divided among stages: {why}")


class _Reached(Exception):
    """The last block of a stage has run; with what it gave."""


class StandIn(nn.Module):
    """Is called in place of a module, of which it has the plain attributes: a loop over the blocks may read them."""

    def __init__(self, call: Callable[..., Any], attributes: Mapping[str, Any]) -> None:
        super().__init__()
        self.__dict__.update(attributes, forward=call)


def _probe(order: list[str], name: str, gives: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    order.append(name)
    if any(each.is_floating_point() and bool(each.isnan().any()) for each in tensors_in((args, kwargs))):
        raise ValueError(f"{name} needs more than what the block before it gives")
    return gives


def _nan(leaf: Any) -> Any:
    floats = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return torch.full_like(leaf, float("nan")) if floats else leaf
