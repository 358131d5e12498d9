"""Models that no engine can train: a line for each reason names the parameter or module and says what to do.

Nothing is changed here: a model that is refused is what it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from zero.core.owner import is_released
from zero.core.torch_private import storage_id


def refusals(model: nn.Module, trained: bool, hooked: bool) -> list[str]:
    """Why no engine can take this model. `hooked`: its modules get hooks, as where parameters come and go."""
    lines = []
    for path, module in model.named_modules():
        which = f"module '{path}' is a {type(module).__name__}" if path else f"model is a {type(module).__name__}"
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            lines.append(f"{which}, which moves data or gradients itself; pass what it wraps, its .module")
        elif hooked and isinstance(module, torch.jit.RecursiveScriptModule):
            lines.append(
                f"{which}, which takes no hooks, so its parameters cannot be there when it runs; train it as the "
                "module that was scripted, perhaps compiled, or below stage 3 without offload"
            )
            break  # all below it are too
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        if is_lazy(tensor):
            path = name.rpartition(".")[0]
            lines.append(
                f"{kind} '{name}' of module '{path}' ({type(model.get_submodule(path)).__name__}) has no shape before "
                "the first forward; run the model once on sample data first"
            )
        elif tensor.is_meta:
            lines.append(
                f"{kind} '{name}' is on meta and has no values; build the model under zero.Init(), or give it memory "
                "by to_empty(device=...) and values of its own first"
            )
        elif kind == "parameter" and not is_released(tensor) and tensor.is_inference():
            lines.append(
                f"parameter '{name}' was made under torch.inference_mode(), and no graph may hold it; build the model "
                "outside of that, or under torch.no_grad()"
            )
    if trained and torch.is_inference_mode_enabled():
        lines.append("called under torch.inference_mode(), and no graph may hold what is made there; leave it first")
    return lines or _spread(model) or sharing(tensors)


def _spread(model: nn.Module) -> list[str]:
    """A line where parameters were placed on several accelerators: they would silently be moved to one of them."""
    first: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        if param.device.type != "cpu":
            first.setdefault(param.device, name)
    if len(first) < 2:
        return []
    where = ", ".join(f"'{name}' on {device}" for device, name in first.items())
    return [
        f"parameters lie on {len(first)} devices ({where}), and a rank of an engine has one; start a process for each "
        "device, as `zero run` does, and divide the layers among these by pipeline.stages and pipeline.stage_map in "
        "the JSON; or bring the model to one device first, for transformers without device_map"
    ]


def sharing(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """A line for each two of these that have memory in common, of which at least one is trained."""
    by_memory: dict[int | None, list[tuple[int, int, str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        if not is_released(tensor) and tensor.layout is torch.strided and tensor.numel():
            start = tensor.storage_offset() * tensor.itemsize
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            entry = (start, start + (last + 1) * tensor.itemsize, name, tensor)
            by_memory.setdefault(storage_id(tensor), []).append(entry)
    return [
        f"'{one}' and '{other}' share memory without being one Parameter, and an engine would part them; tie the "
        "Parameter itself (b = a), or give each memory of its own (b.data = b.data.clone())"
        for spans in by_memory.values()
        for one, other in _meeting(sorted(spans, key=lambda span: span[:2]))
    ]


def _meeting(spans: list[tuple[int, int, str, torch.Tensor]]) -> Iterator[tuple[str, str]]:
    """The names of those in one memory, sorted by its bytes [start, end), that have an element in common."""
    reach: list[tuple[int, int, str, torch.Tensor]] = []
    for span in spans:
        start, _, name, tensor = span
        reach = [before for before in reach if before[1] > start]
        for _, end, other, one in reach:
            if (one.requires_grad or tensor.requires_grad) and _meet(one, tensor, max(end, span[1])):
                yield other, name
        reach.append(span)


def _meet(one: torch.Tensor, other: torch.Tensor, end: int) -> bool:
    """Whether two views of one memory, in which both end before byte `end`, have an element in common."""
    if one.dtype != other.dtype:
        return True  # their bytes interleave at best
    taken = torch.zeros(end // one.itemsize, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def in_channels_last(model: nn.Module) -> list[str]:
    """The names of parameters in a memory format that flat memory does not keep."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return [
        name
        for name, param in model.named_parameters()
        if not is_released(param) and param.ndim in formats and not param.is_contiguous()
        if param.is_contiguous(memory_format=formats[param.ndim])
    ]
