"""Which layers can be cut over tensor-parallel ranks, how, and why others not (Megatron-LM, Shoeybi et al. 2019).

A layer that makes more of the hidden state (queries, keys, values, up, gate) is cut by its outputs ("column"), the one
behind it (attention's output, down) by its inputs ("row"): nothing is sent in between, and one sum follows the second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

_QUERY = ("q_proj", "query", "q", "wq", "to_q", "q_lin")
_KEYS = ("k_proj", "key", "k", "wk", "to_k", "k_lin", "v_proj", "value", "v", "wv", "to_v", "v_lin")
_FUSED = ("qkv", "qkv_proj", "c_attn", "query_key_value", "Wqkv", "in_proj", "attn_qkv", "gate_up_proj")
_OUTPUT = ("o_proj", "out_proj", "o", "wo", "out", "to_out", "out_lin")
_HEADS = ("num_heads", "num_attention_heads", "heads", "n_heads", "n_head")
_GROUPS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", *_HEADS)


class Layer(NamedTuple):
    """One layer, or several that are alike.

    name: its path, a star for the numbers of blocks; how: "column", "row", "vocabulary" or "" for one that stays whole;
    divides: the tensor-parallel sizes are the divisors of this number; why: what it is, or why it stays whole.
    """

    name: str
    kind: str
    how: str
    divides: int
    why: str
    count: int = 1

    def __str__(self) -> str:
        times = f" x {self.count}" if self.count > 1 else ""
        cut = f"{self.how}, over sizes that divide {self.divides:,}" if self.how else "whole"
        return f"{self.name}{times} ({self.kind}): {cut}: {self.why}"


def shardable(model: nn.Module) -> list[Layer]:
    """All layers that have parameters, in order; blocks that are alike in one."""
    found: dict[Layer, int] = {}
    for layer in _layers(model):
        found[layer] = found.get(layer, 0) + 1
    return [layer._replace(count=count) for layer, count in found.items()]


def largest(layers: list[Layer]) -> int:
    """The number that every tensor-parallel size divides at which all is cut that can be; 1 where nothing can."""
    return math.gcd(*(layer.divides for layer in layers if layer.how)) or 1


def _layers(model: nn.Module) -> Iterator[Layer]:
    modules = dict(model.named_modules())
    users: dict[int, list[str]] = {}
    for name, module in modules.items():
        for param in module.parameters(recurse=False):
            users.setdefault(id(param), []).append(name)
    vocabularies = {each.num_embeddings for each in modules.values() if isinstance(each, nn.Embedding)}
    for name, module in modules.items():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        shared = [other for param in own for other in users[id(param)] if other != name]
        how, divides, why = _cut(model, modules, name, vocabularies)
        if shared and how == "vocabulary":
            why += f", in the same slices as {shared[0]}, whose weight it shares"
        elif shared:
            how, divides, why = "", 1, f"shares a weight with {shared[0]}, which is not used in the same way"
        yield Layer(re.sub(r"\.\d+(?=\.|$)", ".*", f".{name}")[1:], type(module).__name__, how, divides, why)


def _cut(model: nn.Module, modules: dict[str, nn.Module], name: str, vocabularies: set[int]) -> tuple[str, int, str]:
    """How, over the divisors of what number, and why."""
    module, last = modules[name], name.rpartition(".")[2]
    if isinstance(module, nn.Embedding):
        return "vocabulary", module.num_embeddings, "each rank has the rows of some tokens"
    if "Conv" in type(module).__name__ and type(module).__name__ != "Conv1D":
        return "", 1, "a convolution; its neighbours would need each other's edges or all channels"
    sizes = _features(module)
    if sizes is None:
        return "", 1, "no product of matrices; every rank has it, with the same gradient"
    taken, given = sizes
    if last in _FUSED:
        return "", 1, "a fused projection, and which of its rows belong to which head is not known; split it into parts"
    if given in vocabularies and not re.search(r"\.\d+\.", f".{name}."):
        return "vocabulary", given, "each rank has the logits of some tokens, and the loss is summed over ranks"
    holders = [modules[path] for path in _above(name)]
    if last in _OUTPUT and (fused := [each for each, _ in holders[0].named_children() if each in _FUSED]):
        return "", 1, f"behind '{fused[0]}', which stays whole"
    for names, attributes, how in ((_QUERY, _HEADS, "column"), (_KEYS, _GROUPS, "column"), (_OUTPUT, _HEADS, "row")):
        if last in names:
            heads = _number(model, holders, attributes)
            if heads is None:
                return "", 1, f"a projection of attention whose number of heads is not known ({attributes[0]})"
            return how, heads, "whole heads of attention stay on one rank"
    if given > taken:
        return "column", given, "channels inside the MLP stay on one rank"
    if taken > given:
        return "row", taken, "behind the channels inside the MLP; its results are summed over ranks"
    return "", 1, "it takes as much as it gives, and its name says no place in the block"


def _features(module: nn.Module) -> tuple[int, int] | None:
    """What a linear layer takes and gives; transformers' Conv1D is one, too."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D":
        return module.weight.shape[0], module.weight.shape[1]
    return None


def _above(name: str) -> Iterator[str]:
    """Paths of the modules that it lies in, the nearest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _number(model: nn.Module, holders: list[nn.Module], attributes: tuple[str, ...]) -> int | None:
    """Of heads: from the nearest module that says it, or from the model's configuration."""
    for holder in (*holders, getattr(model, "config", None)):
        for attribute in attributes:
            if isinstance(value := getattr(holder, attribute, None), int):
                return value
    return None
