"""Recomputes the modules named in the JSON, without a change of the model.

Only `forward` of the chosen instances is replaced, inside the hooks that gather and release parameters. So
names do not change, and the backward gathers a unit once, for the recomputation and the gradients.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zero.config.sections import ActivationCheckpointing, Recompute
from zero.core.comm import Axis
from zero.core.kinds import kinds_of
from zero.core.replaced_forward import ReplacedForward
from zero.log import rank_zero
from zero.plan.patterns import is_inside, outermost
from zero.recompute.auto import Auto, agreed, log_choice
from zero.recompute.call import recomputed
from zero.recompute.holder import HOLDER, Scope
from zero.recompute.marks import MARK
from zero.recompute.policy import Policy
from zero.recompute.saved_inputs import InputStore
from zero.recompute.selective import Selective, is_operator

Forward = Callable[..., Any]


class Kept(ReplacedForward):
    """The forward of a module inside of a recomputed one, of which the results are kept."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        with HOLDER.within(HOLDER.scope._replace(kept=True)):
            return self.plain(*args, **kwargs)


class Recomputed(ReplacedForward):
    """Replaces the forward of one module.

    inner: the forward that is run, and recomputed; around: functions that return contexts for it; policy: what is kept;
    auto: measures calls until a policy is chosen, else None.
    """

    def __init__(
        self, module: nn.Module, number: int, rules: Mapping[Policy, Selective | None], inputs: InputStore
    ) -> None:
        self.policy = Policy.FULL
        self.auto: Auto | None = None
        super().__init__(module)
        self._number = number
        self.inner: Forward = self.plain
        self.around: list[Callable[[], contextlib.AbstractContextManager[Any]]] = []
        self._rules = rules
        self._inputs = inputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; if it builds a graph, keep what the policy says."""
        forward = self._watched if self.around else self.inner
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.auto is not None and not torch.compiler.is_compiling():
            done, out = self.auto.call(self._number, self.module, forward, args, kwargs)
            if done:
                return out
        if self.policy is Policy.NONE:
            return forward(*args, **kwargs)
        rule = self._rules[self.policy]
        contexts = None if rule is None else rule.contexts
        return recomputed(forward, args, kwargs, self._inputs, contexts, self.module)

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for around in self.around:
                stack.enter_context(around())
            return self.inner(*args, **kwargs)

    def compile(self, compiler: Callable[[Forward], Forward]) -> None:
        """Compile the inner forward; recomputation stays outside of it."""
        self.inner = compiler(self.plain)

    def undo_compile(self) -> None:
        """Run the plain forward again."""
        self.inner = self.plain


class Recomputing:
    """An engine's recomputation, from the sections `zero.recompute` and `activation_checkpointing`."""

    def __init__(self, section: Recompute, resting: ActivationCheckpointing, device: torch.device) -> None:
        self.modules: list[Recomputed] = []
        self._kept: list[Kept] = []
        self.inputs = InputStore(resting, HOLDER.axis, device)
        self._section = section
        self._device = device
        self._auto: Auto | None = None

    def apply(self, model: nn.Module) -> None:
        """Replace the forward of the modules that the JSON names, or that say it of themselves.

        ValueError for a name without one, a container, an unknown operator, and where there is nothing to recompute.
        """
        section, kinds = self._section, kinds_of(model)
        said = {
            name: each.module.__dict__[MARK]
            for name, each in kinds.items()
            if MARK in getattr(each.module, "__dict__", ())
        }
        where, all_names = "zero.recompute.modules", [(path, kind.name) for path, kind in kinds.items()]
        names = outermost(where, all_names, section.modules, [name for name, mode in said.items() if mode])
        if not names:
            if section.model_fields_set:
                raise ValueError(f"{where}: is missing; name classes or paths of modules, such as ['Block']")
            return
        found = [(name, kinds[name].module) for name in names[:: section.every]]  # of stages elsewhere there is none
        chosen = [(name, module) for name, module in found if module is not None and said.get(name, True)]
        if unknown := [name for name in section.ops if not is_operator(name)]:
            raise ValueError(f"zero.recompute.ops: {unknown} are no operators of torch, as are 'gelu' and 'aten.mm'")
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
            inside = [kinds[each].module for each, mode in said.items() if not mode and is_inside(each, name)]
            self._kept += map(Kept, filter(None, inside))
            full = Selective(None, section.ops) if section.ops or inside else None
            rules = {Policy.SELECTIVE: Selective(section.products), Policy.FULL: full}
            recomputed_module = Recomputed(module, number, rules, self.inputs)
            recomputed_module.policy, recomputed_module.auto = policy, self._auto
            self.modules.append(recomputed_module)
        rank_zero(logging.INFO, "zero.recompute: %d modules, policy %s", len(chosen), section.policy)

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward: `zero.checkpointing.checkpoint` inside follows this engine's JSON."""
        return HOLDER.within(Scope(self.inputs))

    def backward_ended(self) -> None:
        """Record the end of a backward."""
        if self._auto is not None:
            self._auto.backward_ended()

    def after_step(self, axis: Axis) -> None:
        """Choose policies from the measurements of the first step; collective once, a no-op without policy "auto"."""
        if self._auto is None:
            return
        choice = agreed(self._auto.choose(), len(self.modules), axis)
        log_choice(choice, self._auto.budget)
        for number, module in enumerate(self.modules):
            module.policy, module.auto = choice.policies[number], None
        self._auto = None

    def undo(self) -> None:
        """Restore the model; an existing graph can still run its backward."""
        for module in (*self.modules, *self._kept):
            module.undo()
        self.modules, self._kept = [], []
        self.inputs.buffers.close()
