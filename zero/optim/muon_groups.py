"""The parameters that Muon updates, and those of AdamW: a parameter group for each, and a log line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from zero.config.optimizers import MuonParams
from zero.core.owner import cut_of
from zero.log import counted
from zero.optim.shard_optimizer import Group
from zero.plan.matrices import matrices_of

_EMBEDDINGS_AND_FILTERS = (nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.ConvTranspose1d)
_ARGUMENTS = ("weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr_fn", "beta2")
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # torch.optim.Muon's, like all values without an argument
_NS_EPS = 1e-7


def muon_groups(
    model: nn.Module, groups: list[dict[str, Any]], params: MuonParams, is_part: bool = False, has_head: bool = True
) -> list[dict[str, Any]]:
    """Each parameter group split into one for Muon and one for AdamW, `use_muon` true and false, if it has both.

    The attribute `use_muon` of a parameter decides, then the key of that name in its group, then its place in
    the model: Muon's are matrices that are neither an embedding nor the head, and stacks of them, but not filters.
    is_part: other ranks have more of the model, so that groups without parameters stay; has_head: this one its end.
    Raises ValueError for a parameter that is no matrix but marked for Muon, and if Muon would get none.
    """
    names, others = {param: name for name, param in model.named_parameters()}, _not_hidden(model, has_head)
    muon = {key: getattr(params, key) for key in _ARGUMENTS} | {"ns_coefficients": _COEFFICIENTS, "eps": _NS_EPS}
    adam = {"betas": params.betas, "eps": params.eps, "weight_decay": params.weight_decay, "bias_correction": True}
    muon["lr"] = params.lr if params.muon_lr is None else params.muon_lr
    adam["lr"] = params.lr if params.adam_lr is None else params.adam_lr
    for pattern in params.split:
        if not is_part and not any(fnmatchcase(name, pattern) for name in names.values()):
            raise ValueError(f"optimizer.params.split: '{pattern}' is the name of no parameter")
    found: list[dict[str, Any]] = []
    for group in groups:
        parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for param in group["params"]:
            chosen = getattr(param, "use_muon", group.get("use_muon"))
            shape = param.shape if (cut := cut_of(param)) is None else cut.shape
            if chosen is None:
                chosen = len(shape) in (2, 3) and param not in others
            if chosen:
                matrices_of(names.get(param, "?"), shape, params.split)  # raises if it is no matrix
            parts[bool(chosen)].append(param)
        for rule, kept in parts.items():
            if kept or is_part:
                found.append({**(muon if rule else adam), **group, "params": kept, "use_muon": rule})
    if not any(group["use_muon"] for group in found):
        raise ValueError(
            "optimizer.type: got 'Muon', and no parameter is a matrix of a hidden layer; set the attribute use_muon of "
            "those that are, or use AdamW"
        )
    return found


def _not_hidden(model: nn.Module, has_head: bool) -> set[nn.Parameter]:
    """Embeddings, by class or name, the head, and 1-D filters, which have three dims like stacks of matrices.

    The head is what a Transformers model returns, else the last linear layer, unless that is in an nn.ModuleList.
    """
    others = {param for name, param in model.named_parameters(remove_duplicate=False) if "embed" in name.lower()}
    last, blocks = None, ()
    for path, module in model.named_modules():
        if isinstance(module, _EMBEDDINGS_AND_FILTERS):
            others.update(module.parameters(recurse=False))
        elif isinstance(module, nn.ModuleList):
            blocks = (*blocks, f"{path}.")
        elif isinstance(module, nn.Linear):
            last = None if path.startswith(blocks) else module
    head = getattr(model, "get_output_embeddings", lambda: None)() or (last if has_head else None)
    return others | (set(head.parameters()) if head is not None else set())


def rules_line(groups: Iterable[Group], names: Mapping[nn.Parameter, str]) -> str:
    """The parameters that each rule updates, by name, equal ones of all blocks as one; empty if there is one rule."""
    updated: dict[bool, list[str]] = {True: [], False: []}
    for group in groups:
        if "use_muon" not in group:
            return ""
        updated[group["use_muon"]] += [re.sub(r"\b\d+\b", "*", names.get(param, "?")) for param in group["params"]]
    texts = []
    for rule, those in (("Muon", updated[True]), ("AdamW", updated[False])):
        alike = [f"{count} x {name}" if count > 1 else name for name, count in Counter(those).items()]
        texts.append(f"{rule} updates {counted(len(those), 'parameter')}{': ' * bool(those)}{', '.join(alike)}")
    return "; ".join(texts)
