"""Where the styles of a model's layers come from: the JSON, the model's own `tp_plan`, or what layers are called."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from zero.parallel.pipeline.trunk import pretrained as models_in
from zero.parallel.tensor.layers import base_of
from zero.plan.tensors import OF_EXPERTS, STYLES

OF_MODEL = "the tp_plan of"  # begins the source of styles that a model brings


class Preset(NamedTuple):
    """Layers that together are a block, as children of one module or of modules in it, with their styles.

    packs: of layers in which several tensors are fused; locals: attributes of the block that count what is cut.
    """

    styles: Mapping[str, str]
    packs: Mapping[str, int] = {}
    locals: tuple[str, ...] = ()


def _pairs(columns: str, row: str) -> Preset:
    return Preset({**dict.fromkeys(columns.split(), "colwise"), row: "rowwise"})


# By what layers of a block are called.
PRESETS = (
    _pairs("q_proj k_proj v_proj", "o_proj"),
    _pairs("q_proj k_proj v_proj", "out_proj"),
    _pairs("wq wk wv", "wo"),
    _pairs("self.query self.key self.value", "output.dense")._replace(
        locals=("self.num_attention_heads", "self.all_head_size")
    ),
    Preset({"c_attn": "colwise", "c_proj": "rowwise"}, {"c_attn": 3}, ("num_heads", "split_size")),
    _pairs("gate_proj up_proj", "down_proj"),
    _pairs("up_proj", "down_proj"),
    _pairs("w1 w3", "w2"),
    _pairs("fc1", "fc2"),
    _pairs("c_fc", "c_proj"),
    _pairs("linear1", "linear2"),
    _pairs("intermediate.dense", "output.dense"),
    _pairs("dense_h_to_4h", "dense_4h_to_h"),
)
_OPTIONAL = {"sinks": "colwise"}  # parameters of an attention, one for each head


class Styles(NamedTuple):
    """Styles by names of modules and parameters.

    packs: sizes of fused tensors; locals: attributes that count what is cut; both by names. source: what says so.
    """

    by_name: dict[str, str]
    packs: dict[str, tuple[int, ...]]
    locals: dict[str, tuple[str, ...]]
    source: str


def pretrained(model: nn.Module) -> tuple[str, Any] | None:
    """The name and the module of the model of transformers that this is, or has inside."""
    return next(models_in(model), None)


def styles_of(model: nn.Module, section: Any) -> Styles:
    """Styles by the section `tensor_parallel`, the model's own plan, or its structure; ValueError for unknown ones."""
    given = section.partition_config
    if given.layer_specs or given.strict_mode or not given.use_default_specs:
        found = _specified(model, given)
        if given.use_default_specs:
            ours = _planned(model) or _structured(model)
            skipped = {name for name, style in found.by_name.items() if not style}
            found.by_name.update(
                {name: style for name, style in ours.by_name.items() if name not in {*found.by_name, *skipped}}
            )
            found.packs.update({name: ours.packs[name] for name in ours.packs if name not in found.packs})
            found.locals.update(ours.locals)
        found = found._replace(by_name={name: style for name, style in found.by_name.items() if style})
    else:
        found = _planned(model) or _structured(model)
    for name, style in found.by_name.items():
        if style in OF_EXPERTS:
            raise ValueError(
                f"'{name}': {found.source} says '{style}', which divides experts among ranks; that is expert_parallel, "
                "not tensor_parallel"
            )
        if style not in STYLES:
            raise ValueError(f"'{name}': {found.source} says '{style}'; wanted one of {', '.join(STYLES)}")
    _complete_tied(model, found)
    return found


def _planned(model: nn.Module) -> Styles | None:
    """Styles of the model's `tp_plan`; None where it has none, or one of its head only."""
    prefix, theirs = pretrained(model) or ("", model)
    plan = getattr(theirs, "tp_plan", None)
    if not isinstance(plan, Mapping):  # of a module of nobody's, as DeepSpeed reads it: `*` stands for any text
        wild = getattr(getattr(theirs, "config", None), "base_model_tp_plan", None)
        wild = wild if isinstance(wild, Mapping) else {}
        every = [name for name, _ in theirs.named_modules()]
        plan = {name: style for pattern, style in wild.items() for name in fnmatch.filter(every, pattern)}
    params = {f"{prefix}.{name}" if prefix else name for name, _ in theirs.named_parameters()}
    names = [name for name, _ in theirs.named_modules()] + [name for name, _ in theirs.named_parameters()]
    styles = {}
    for name in names:
        if (style := plan.get(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), plan.get(name))) is not None:
            styles[f"{prefix}.{name}" if prefix else name] = style
    head = [f"{prefix}.{name}" if prefix else name for name, each in theirs.named_modules() if each is _head(theirs)]
    if not styles.keys() - set(head):
        return None
    for name in (name for name, style in styles.items() if style == "all_reduce"):
        if any(other.rpartition(".")[0] == name and other in params for other in styles):
            styles[name] = "moe_tp_experts"  # its own parameters are parts, so what it takes is used in parts, too
    return Styles(styles, {}, {}, f"{OF_MODEL} {type(theirs).__name__}")


def _structured(model: nn.Module) -> Styles:
    """Styles by what layers are called; and of the head, where it is said which that is."""
    styles, packs, named = {}, {}, dict(model.named_modules())
    counted: dict[str, tuple[str, ...]] = {}
    for name, module in named.items():
        for preset in PRESETS:
            full = {f"{name}.{key}" if name else key: style for key, style in preset.styles.items()}
            if full.keys() & styles.keys() or not all(_is_layer(named.get(key)) for key in full):
                continue
            if any(key.split(".")[0] in ("c_attn",) for key in preset.styles) and not _fused(named, full):
                continue
            styles |= full
            path = f"{name}." if name else ""
            for key, count in preset.packs.items():
                numel = _features(named[f"{path}{key}"])
                packs[f"{path}{key}"] = (numel // count,) * count
            for key in preset.locals:
                owner, _, attribute = key.rpartition(".")
                where = f"{path}{owner}" if owner else name
                counted[where] = (*counted.get(where, ()), attribute)
            styles |= {f"{path}{key}": style for key, style in _OPTIONAL.items() if key in module._parameters}
    theirs = pretrained(model)
    head = _head(theirs[1]) if theirs is not None else named.get("lm_head")
    if styles and isinstance(head, nn.Linear):
        styles[next(name for name, each in named.items() if each is head)] = "colwise_gather_output"
    return Styles(styles, packs, counted, "what its layers are called")


def _specified(model: nn.Module, given: Any) -> Styles:
    """Styles of `partition_config`, whose patterns match names of parameters; an empty one for what stays whole."""
    styles, packs, named = {}, {}, dict(model.named_modules())
    kind = getattr(getattr(model, "config", None), "model_type", None)
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        spec = next(
            (
                each
                for each in given.layer_specs
                if (not each.model_types or kind in each.model_types)
                and any(re.match(pattern, name) for pattern in each.patterns)
            ),
            None,
        )
        if spec is None or (param.ndim < 2 and spec.partition_type != "skip"):
            continue
        if spec.partition_type == "skip":
            styles[owner] = "replicated_with_grad_allreduce" if spec.grad_allreduce else ""
            continue
        columns = spec.partition_type == "column"
        styles[owner] = ("colwise_gather_output" if spec.gather_output else "colwise") if columns else "rowwise"
        if spec.shape is not None:
            dim = spec.partition_dim if spec.partition_dim is not None else 0 if columns else len(spec.shape) - 1
            said = spec.shape[dim]
            numel = param.shape[0 if columns else -1]
            if isinstance(said, int):
                packs[owner] = (numel // said,) * said if said > 0 else (numel,)
            else:
                packs[owner] = tuple(said)
    if given.strict_mode:
        linears = [name for name, each in named.items() if _is_layer(each) and name not in styles]
        if linears:
            raise ValueError(
                f"tensor_parallel.partition_config.strict_mode: no pattern matches {', '.join(map(repr, linears))}"
            )
    return Styles(styles, packs, {}, "tensor_parallel.partition_config")


def _complete_tied(model: nn.Module, found: Styles) -> None:
    """Cut modules that share a parameter together, a head as its embedding, or raise ValueError."""
    owners: dict[int, list[tuple[str, str]]] = {}
    named, styles = dict(model.named_modules()), found.by_name
    for name, module in named.items():
        for key, param in module._parameters.items():
            if param is not None:
                owners.setdefault(id(param), []).append((name, key))
    for places in (each for each in owners.values() if len(each) > 1):
        if any(f"{name}.{key}" in styles for name, key in places):  # of experts, say, which have a style, too
            first = next((name, key) for name, key in places if f"{name}.{key}" in styles)
            for name, key in places:
                styles.setdefault(f"{name}.{key}", styles[".".join(first)])
                styles |= {name: styles[first[0]]} if first[0] in styles else {}
            continue
        said = {name: styles.get(name, "") for name, key in places if key == "weight"}
        if not any(STYLES[style].dim for style in said.values() if style):
            continue
        for name, style in said.items():
            other = next(
                (style for each, style in said.items() if type(named[each]) is type(named[name]) and style), ""
            )
            wanted = style or other or "colwise_gather_output"
            wanted = "embedding_rowwise" if isinstance(named[name], nn.Embedding) else wanted
            if style not in ("", wanted):
                raise ValueError(
                    f"'{name}' shares its weight with {list(said)}, and {found.source} cuts these differently"
                )
            styles[name] = wanted


def linears_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers with a weight of two dims, by name."""
    yield from ((name, each) for name, each in model.named_modules() if _is_layer(each))


def _head(theirs: Any) -> nn.Module | None:
    try:
        return theirs.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        return None


def _is_layer(module: nn.Module | None) -> bool:
    if module is None:
        return False
    base = base_of(module)
    return isinstance(base, nn.Linear) or type(base).__name__ == "Conv1D"


def _features(module: nn.Module) -> int:
    base = base_of(module)
    return base.weight.shape[1 if type(base).__name__ == "Conv1D" else 0]


def _fused(named: Mapping[str, nn.Module], full: Mapping[str, str]) -> bool:
    """Whether the first layer gives queries, keys and values of the width that the last one takes."""
    columns, rows = (named[name] for name in full)
    base = base_of(rows)
    return _features(columns) == 3 * base.weight.shape[0 if type(base).__name__ == "Conv1D" else 1]
