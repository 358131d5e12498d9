"""Modules whose activations are recomputed because the JSON says so; nothing in the model changes.

Only `forward` of the chosen instances is replaced, inside of the hooks that gather and release parameters, so that
names stay as they are, and backward gathers a unit once: for the recomputation and for what follows it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero.config.sections import ActivationCheckpointing, Recompute
from zero.core.world import Axis
from zero.log import rank_zero
from zero.plan.patterns import outermost
from zero.recompute.auto import Auto, agreed, say
from zero.recompute.call import recomputed
from zero.recompute.holder import HOLDER, Scope
from zero.recompute.policy import Policy
from zero.recompute.saved_inputs import InputStore
from zero.recompute.selective import Selective

Forward = Callable[..., Any]


class Recomputed:
    """Stands for the forward of one module. Copies of the module, and files of it, get the plain forward of their own.

    inner: what is run, and run again; around: gives contexts in which it runs, for who watches; policy: what is kept;
    auto: who watches calls as long as that is not chosen, else None.
    """

    def __init__(self, module: nn.Module, name: str, number: int, every: int, inputs: InputStore) -> None:
        self.policy = Policy.FULL
        self.auto: Auto | None = None
        self._module = module
        self._number = number
        self._plain: Forward = module.forward
        self._own = "forward" in module.__dict__
        self.inner = self._plain
        self.around: list[Callable[[], contextlib.AbstractContextManager[Any]]] = []
        self._selective = Selective(name, every)
        self._inputs = inputs
        functools.update_wrapper(self, self._plain, updated=())  # for those who read the names of its arguments
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; where a graph is built, keep what the policy says."""
        forward = self._watched if self.around else self.inner
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.auto is not None and not torch.compiler.is_compiling():
            done, out = self.auto.call(self._number, self._module, forward, args, kwargs)
            if done:
                return out
        if self.policy is Policy.NONE:
            return forward(*args, **kwargs)
        contexts = self._selective.contexts if self.policy is Policy.SELECTIVE else None
        return recomputed(forward, args, kwargs, self._inputs, contexts, self._module)

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for around in self.around:
                stack.enter_context(around())
            return self.inner(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """What copies and saved files get instead; used by `copy.deepcopy` and by `torch.save`."""
        # The copy of the module has no forward of its own yet when this is called, so that it finds its class's.
        return (_itself, (self._plain,)) if self._own else (getattr, (self._module, "forward"))

    def compile(self, compiler: Callable[[Forward], Forward]) -> None:
        """Compile what is run and run again; recomputation stays outside of it."""
        self.inner = compiler(self._plain)

    def undo_compile(self) -> None:
        """Run the plain forward again."""
        self.inner = self._plain

    def undo(self) -> None:
        """Give the module its own forward back."""
        if self._module.__dict__.get("forward") is self:
            if self._own:
                self._module.forward = self._plain
            else:
                del self._module.forward


class Recomputing:
    """What an engine recomputes, from the sections `zero.recompute` and `activation_checkpointing`."""

    def __init__(self, section: Recompute, resting: ActivationCheckpointing, device: torch.device) -> None:
        self.modules: list[Recomputed] = []
        self.inputs = InputStore(resting, HOLDER.axis, device)
        self._section = section
        self._device = device
        self._auto: Auto | None = None

    def apply(self, model: nn.Module) -> None:
        """Replace the forward of the modules that the JSON names.

        Raises ValueError for a name without a module, and for a container, which has no forward.
        """
        section = self._section
        if not section.modules:
            return
        kinds = [(name, type(module).__name__) for name, module in model.named_modules()]
        names = outermost("zero.recompute.modules", kinds, section.modules)
        chosen = [(name, model.get_submodule(name)) for name in names[:: section.every]]
        for name, module in chosen:
            if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
                raise ValueError(
                    f"zero.recompute.modules: '{name}' is a {type(module).__name__}, which has no forward; "
                    "name the modules in it"
                )
        policy = Policy.FULL if section.policy == "auto" else Policy(section.policy)
        if section.policy == "auto":
            self._auto = Auto(section.budget, self.inputs, section.products)
        for number, (name, module) in enumerate(chosen):
            recomputed_module = Recomputed(module, name or "<root>", number, section.products, self.inputs)
            recomputed_module.policy, recomputed_module.auto = policy, self._auto
            self.modules.append(recomputed_module)
        rank_zero(logging.INFO, "zero.recompute: %d modules, policy %s", len(chosen), section.policy)

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward: `zero.checkpointing.checkpoint` inside does as this engine's JSON says."""
        return HOLDER.within(Scope(self.inputs))

    def backward_ended(self) -> None:
        """A backward is over."""
        if self._auto is not None:
            self._auto.backward_ended()

    def after_step(self, axis: Axis) -> None:
        """Choose policies by what the first step has shown; collective once, a no-op without policy "auto"."""
        if self._auto is None:
            return
        choice = agreed(self._auto.choose(), len(self.modules), axis)
        say(choice, self._auto.budget)
        for number, module in enumerate(self.modules):
            module.policy, module.auto = choice.policies[number], None
        self._auto = None

    def undo(self) -> None:
        """Leave the model as it was; a graph that is still there can run its backward."""
        for module in self.modules:
            module.undo()
        self.modules = []
        self.inputs.buffers.close()


def _itself(value: Any) -> Any:
    return value
