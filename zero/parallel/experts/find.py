"""Which modules have experts: stacks of their weights along dim 0, called with tokens, their experts and weights."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from zero.config.expert_parallel import ExpertParallel
from zero.parallel.experts.separate import SeparateExperts
from zero.parallel.pipeline.trunk import pretrained as models_in
from zero.plan.patterns import is_inside

STACKS = "_zero_stacks"  # of a module whose maker has said which of its parameters are stacks
_SLOTS = ("batched_mm", "grouped_mm", "sonicmoe", "deepgemm")  # that add up a token's experts in the order of its slots
_WHERE = "expert_parallel.autoep_size"


class Part(NamedTuple):
    """A parameter of a module, of which each rank has these `ranges`, starts and sizes, along `dim`."""

    module: nn.Module
    own: str
    dim: int
    ranges: tuple[list[tuple[int, int]], ...]


class Experts(NamedTuple):
    """A module of `count` experts, in turn along dim 0 of its parameters `stacks`; with none, they are modules."""

    name: str
    module: nn.Module
    count: int
    stacks: tuple[str, ...]

    @property
    def by_slot(self) -> bool:
        """Whether it adds up what the experts of a token give in the order of the router, and not in theirs."""
        kind = getattr(getattr(self.module, "config", None), "_experts_implementation", None)
        return isinstance(kind, str) and kind.startswith(_SLOTS) and hasattr(self.module, "_is_expert_parallel")

    def parts(self, ranks: int, adapters: Sequence[nn.Module]) -> Iterator[Part]:
        """What is cut: the stacks, and what adapts them (PEFT's `target_parameters`).

        Of the two matrices of rank r of a stack's adapter, experts lie in blocks of r along the first dim of A, and are
        neighbours along the last of B.
        """
        each = self.count // ranks
        for stack in self.stacks:
            yield Part(self.module, stack, 0, tuple([(rank * each, each)] for rank in range(ranks)))
        for adapter in adapters:
            if each == 1 and not adapter._did_swap_in_out_features:
                raise ValueError(
                    f"{_WHERE} {ranks} leaves a rank one expert of '{self.name}', whose stacks are [experts, in, out] "
                    "and have LoRA: PEFT takes one for a plain layer, [out, in]. Take at least two a rank"
                )
            for name, a in adapter.lora_A.items():
                r = a.weight.shape[0] // self.count
                yield Part(a, "weight", 0, tuple([(rank * each * r, each * r)] for rank in range(ranks)))
                runs = tuple([(row * self.count + rank * each, each) for row in range(r)] for rank in range(ranks))
                yield Part(adapter.lora_B[name], "weight", 1, runs)

    def adapters(self, model: nn.Module) -> list[nn.Module]:
        """The modules of PEFT that adapt its stacks."""
        named = [each for each in model.modules() if getattr(each, "parameter_name", None) in self.stacks]
        return [each for each in named if each.get_base_layer() is self.module]


def experts(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """Say that these parameters of the module are stacks of experts along dim 0; returns the module.

    `expert_parallel` then divides them. The module is called with tokens [n, width], the experts of each token [n, k]
    (integers) and their weights [n, k], and gives [n, width]: the sum over k of weight x expert(token). Transformers'
    own need not be told. Raises ValueError for a name that it does not have, and for stacks of different lengths.
    """
    missing = [name for name in names if module._parameters.get(name) is None]
    if missing or not names:
        raise ValueError(f"experts(): {type(module).__name__} has no parameters {missing or 'named'} of its own")
    lengths = {name: module._parameters[name].shape[0] for name in names}
    if len({*lengths.values()}) > 1:
        raise ValueError(f"experts(): {type(module).__name__} has stacks of different lengths: {lengths}")
    setattr(module, STACKS, tuple(names))
    return module


def experts_of(model: nn.Module, section: ExpertParallel, ranks: int) -> list[Experts]:
    """The modules whose experts `ranks` ranks divide.

    Raises ValueError where there is none, with what there is, and where ranks do not divide them, with what would.
    """
    planned, named, found = _planned(model), dict(model.named_modules()), list[Experts]()
    for name, module in named.items():
        if isinstance(module, SeparateExperts) and module.ranks > 1:
            found.append(Experts(name, module, module.total, ()))
        if not _meant(name, section.moe_layer_pattern):
            continue
        if stacks := getattr(module, STACKS, None) or _stacks(name, module):
            found.append(Experts(name, module, module._parameters[stacks[0]].shape[0], stacks))
    for name in sorted(planned):
        if _meant(name, section.moe_layer_pattern) and not any(is_inside(each.name, name) for each in found):
            raise ValueError(
                f"{_WHERE} {ranks}: the ep_plan names '{name}', a {type(named[name]).__name__}, whose parameters are "
                f"not stacks of equally many experts: {_shapes(named[name])}"
            )
    if not found:
        raise ValueError(f"{_WHERE} {ranks}: no experts are found in {type(model).__name__}{_strangers(named)}")
    _check(model, found, section, ranks)
    return found


def _meant(name: str, pattern: str | None) -> bool:
    """Whether the pattern is all of the name, or of that of a module around it, which DeepSpeed compares."""
    around = itertools.accumulate(name.split("."), "{}.{}".format)
    return pattern is None or any(re.fullmatch(pattern, each) for each in around)


def _planned(model: nn.Module) -> set[str]:
    """The names of modules that a model of transformers says to dispatch tokens to."""
    found = set()
    for prefix, theirs in models_in(model):
        plan = getattr(theirs, "ep_plan", None)
        plan = plan if isinstance(plan, Mapping) else {}
        wild = {name for name, style in plan.items() if style == "ep_dispatch_experts"}
        for name, _ in theirs.named_modules():
            if re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) in wild:
                found.add(f"{prefix}.{name}" if prefix else name)
    return found


def _stacks(name: str, module: nn.Module) -> tuple[str, ...]:
    """The names of stacks, by the structure of a module that is called with tokens, experts and weights.

    Raises ValueError where they do not have equally many experts.
    """
    params = {name: each for name, each in module._parameters.items() if each is not None}
    takes = inspect.signature(module.forward).parameters.values()
    names = [each.name for each in takes if each.kind is not each.VAR_KEYWORD]
    if len(names) != 3 or "weight" not in names[2] or max((each.ndim for each in params.values()), default=0) < 3:
        return ()  # it is called with positions, or a mask, say
    lengths = {each.shape[0] if each.ndim > 1 else 0 for each in params.values()}
    if len(lengths) != 1:
        raise ValueError(
            f"{_WHERE}: '{name}', a {type(module).__name__}, is called like experts, and its parameters are not stacks "
            f"of equally many: {_shapes(module)}. Say which are stacks by zero.experts(module, names), or leave it out "
            "by expert_parallel.moe_layer_pattern"
        )
    return tuple(params) if min(lengths) > 1 else ()


def _check(model: nn.Module, found: Sequence[Experts], section: ExpertParallel, ranks: int) -> None:
    for each in found:
        if each.count % ranks:
            near = [size for size in range(1, each.count + 1) if each.count % size == 0]
            nearest = sorted(near, key=lambda size: abs(size - ranks))[:2]
            raise ValueError(
                f"{_WHERE} {ranks} does not divide the {each.count} experts of '{each.name}'; "
                f"{' or '.join(map(str, sorted(nearest)))} do"
            )
        if getattr(each.module, "_is_expert_parallel", False):
            raise ValueError(
                f"{_WHERE} {ranks}: Transformers has divided the experts of '{each.name}' itself; load the model "
                "without ep_size, ep_plan or distributed_config"
            )
    attribute, config = section.num_experts_attr, getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if attribute is not None and {getattr(config, attribute, None)} != {each.count for each in found}:
        counts = {each.name: each.count for each in found}
        raise ValueError(f"expert_parallel.num_experts_attr: config.{attribute} does not say what is found: {counts}")


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in module._parameters.items() if each is not None}


def _strangers(named: Mapping[str, nn.Module]) -> str:
    """What looks like experts and cannot be divided, for an error."""
    lists = [name for name, each in named.items() if isinstance(each, nn.ModuleList) and "expert" in name.lower()]
    others = [name for name, each in named.items() if "expert" in name.lower() and _shapes(each)]
    if lists:
        kinds = {type(named[name][0]).__name__ for name in lists if len(named[name])}
        return (
            f": {', '.join(lists[:3])} are lists of separate modules ({', '.join(kinds)}); stack their weights in one "
            "parameter [experts, ...] of a module that is called with tokens, experts and weights, and say it by "
            "zero.experts(module, names)"
        )
    if others:
        shapes = "; ".join(f"{name} {_shapes(named[name])}" for name in others[:3])
        return f": {shapes} are no stacks that are called with tokens, experts and weights; see zero.experts"
    return "; say which they are by zero.experts(module, names), or leave expert_parallel out"
