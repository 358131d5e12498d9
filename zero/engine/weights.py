"""The model's weights going out and coming in, whole, under the names that the model itself has."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zero.checkpoint.folder import check_folder
from zero.checkpoint.model_files import LIMIT, NAME, size_of
from zero.config import Config
from zero.core.access import GatheredParameters
from zero.core.agree import agree
from zero.core.owner import owner_of
from zero.core.quantized_params import load_quant_state, quant_params
from zero.core.sharded_module import ShardedModule
from zero.core.values import cut_out, own_part, write_exact, write_frozen
from zero.engine.checkpoint.save import TagValidation
from zero.engine.status import Status
from zero.engine.weight_streams import (
    Listed,
    Merge,
    choose,
    is_here,
    list_tensors,
    merged,
    shape_of,
    stream_model,
    to_the_end,
    walk,
)
from zero.engine.weight_updates import WeightUpdates
from zero.log import log_once
from zero.parallel.pipeline.split import Elsewhere


class Unmatched(NamedTuple):
    """Names that a loaded dictionary lacked, and that it had too many."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Weights:
    """State dictionaries of the module, on every stage. All methods are collectives.

    updates: the weights that changed since a given step.
    """

    def __init__(self, config: Config, sharded: ShardedModule, status: Status, device: torch.device) -> None:
        self._asked = config.zero_optimization.stage3_gather_16bit_weights_on_model_save
        self._validation = TagValidation(config.checkpoint.tag_validation)
        self.updates = WeightUpdates(sharded, status, config.zero.track_updates)
        self._sharded = sharded
        self._status = status
        self._device = device

    def module_state_dict(
        self,
        destination: MutableMapping[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> MutableMapping[str, Any]:
        """The module's state_dict, in the dtype it computes in, on every rank.

        Where parameters are resharded, their values are copies in host memory; elsewhere the storage itself, as torch.
        `keep_vars` gives the parameters themselves, whose values may be away. Tied weights are one tensor.
        """
        self._status.check()
        destination = {} if destination is None else destination
        names = self._named_state(exclude_frozen_parameters, prefix)
        if keep_vars:
            destination.update(names)
            return destination
        whole = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in names.items()}
        tensors = list_tensors(names, self._sharded, of_all=False)
        for item, tensor in walk([each for each in tensors if not is_here(each.value, self._sharded)], self._sharded):
            whole |= dict.fromkeys(item.names, tensor.to("cpu", copy=True))
        destination.update(whole)
        return destination

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Collection[nn.Parameter] | None = None,
        allowed_missing_keys: Collection[str] | None = None,
    ) -> Unmatched:
        """Take the weights of `state_dict`, the same on all ranks; those of fp32 are exact in the masters.

        Nothing needs to be gathered for it. `custom_load_fn(src=state_dict, dst=module)` loads by itself, with all
        parameters whole. `fetch_z3_params` and `z3_params_to_fetch` are accepted and need not be given. Raises
        RuntimeError, before anything is changed, for a wrong shape and, with `strict`, for missing and unexpected
        names.
        """
        self._status.check()
        self._status.check_outside("load_module_state_dict()")
        if custom_load_fn is not None:
            with GatheredParameters(self._sharded.module.parameters(), modifier_rank=0):
                custom_load_fn(src=state_dict, dst=self._sharded.module)
            return Unmatched([], [])
        names = self._sharded.module.state_dict(keep_vars=True)
        allowed = set(allowed_missing_keys or ())
        missing = [name for name in names if name not in state_dict and name not in allowed]
        known = {name for each in list_tensors(names, self._sharded) for name in each.names} | {*names}
        unmatched = Unmatched(missing, [name for name in state_dict if name not in known])
        packed = quant_params(self._sharded.module)
        fixed = {name: value for name, value in names.items() if name not in packed}
        self._all_agree(_misfits(fixed, state_dict, unmatched if strict else Unmatched([], [])))
        rest = {}
        with torch.no_grad():
            for name, value in state_dict.items():
                owner = owner_of(names[name]) if isinstance(names.get(name), torch.Tensor) else None
                if owner is None:
                    rest[name] = value
                elif owner.unit.shard.master is None:
                    write_frozen(owner, own_part(owner, value))
                else:
                    whole = own_part(owner, value.to(self._device, torch.float32))
                    write_exact(owner, cut_out(owner, whole), whole)
        self._sharded.module.load_state_dict(load_quant_state(self._sharded.module, rest), strict=False)
        return unmatched

    def stream_weights(
        self,
        dtype: torch.dtype | None = None,
        names: str | Collection[str] | None = None,
        *,
        merge: Merge | None = None,
        rank0_only: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of the module's state_dict, buffers first, while one unit is gathered at a time.

        A tensor is a copy of what the model computes with, on its device, in `dtype` where one is given and it is
        floating; it may be written, and kept, which costs its memory. In a loop one unit and two tensors are alive,
        with `merge` a third. Tied weights come once, by the first of their names. A collective: all ranks must go
        through it, and one that leaves the loop, by an exception too, gathers on with the others. `step()` and loads
        inside the loop raise.

        names: those wanted, or patterns of fnmatch, such as "model.layers.*"; default all.
        merge: called on all ranks with each name and tensor; returns a tensor in its place, a name and a tensor, or
               None to leave it out. It reads other parameters, such as adapters, inside `zero.GatheredParameters`.
        rank0_only: the other ranks get nothing, and only help.
        Raises ValueError for a name that is none.
        """
        self._status.check()
        tensors = choose(list_tensors(self._named_state(False), self._sharded), names)
        here = not rank0_only or self._sharded.world.writes
        return to_the_end(merged(tensors, self._sharded, merge, dtype), self._status, here)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        *,
        max_shard_size: int | str | None = None,
    ) -> bool:
        """Write the weights as the model computes with them; returns True.

        A name that ends in `.safetensors` gives that format, with tied weights once and their other names in its
        metadata, and one unit at a time is in memory; any other name gives torch's format, and the whole model is in
        the memory of rank 0. With `max_shard_size`, such as "5GB", the folder gets the layout of Hugging Face: files
        of at most so many bytes and their index; the name, by default model.safetensors, is what theirs begin with.
        A file appears whole or not at all; where ranks give other folders or names, rank 0's are taken, as
        `checkpoint.tag_validation` has it. At stage 3 it is written whatever
        `stage3_gather_16bit_weights_on_model_save` says: one unit at a time is whole. Raises ValueError for a name or
        size that does not go, and OSError on all ranks when rank 0 cannot write.
        """
        self._status.check()
        limit = None if max_shard_size is None else size_of(max_shard_size, "max_shard_size")
        if limit is not None and save_filename == "pytorch_model.bin":
            save_filename = NAME
        path = self._first_path("save_16bit_model()", save_dir, save_filename)
        safe = path.suffix == ".safetensors"
        if limit is not None and not safe:
            raise ValueError(f"max_shard_size is for names that end in .safetensors; save_filename is {path.name!r}")
        if self._sharded.sharding.params and not self._asked:
            log_once(
                logging.INFO,
                "save_16bit_model() gathers and writes the weights, "
                "though zero_optimization.stage3_gather_16bit_weights_on_model_save is false",
            )
        if safe:
            tensors = list_tensors(self._named_state(exclude_frozen_parameters), self._sharded)
            keep = self._sharded.world.writes
            problem = stream_model(tensors, self._sharded, path.parent, path.name, limit, keep)
        else:
            problem = self._save_torch(path, exclude_frozen_parameters)
        self._all_agree(problem, OSError)
        return True

    def save_pretrained(self, save_directory: str | Path, *, max_shard_size: int | str = LIMIT) -> None:
        """Write the model for others to read: safetensors files of at most `max_shard_size`, and its configuration.

        A model that has a `save_pretrained` of its own, as those of Transformers, PEFT and Diffusers, writes the files
        with it on rank 0: config.json and generation_config.json with them, of PEFT the adapters alone, for which
        nothing else is gathered. It is given the weights in memory that is mapped to a file, which is written unit by
        unit and is gone at the end: the folder needs room for them twice, and the memory of rank 0 for one of the
        files. Of any other module these are the files of `save_16bit_model(save_directory, max_shard_size=...)`.
        Weights have the dtype that the model computes with. Raises ValueError for a size that does not go, and OSError
        on all ranks when rank 0 cannot write.
        """
        self._status.check()
        own = getattr(self._sharded.module, "save_pretrained", None)
        if not callable(own):
            self.save_16bit_model(save_directory, max_shard_size=max_shard_size)
            return
        size_of(max_shard_size, "max_shard_size")
        place = self._first_path("save_pretrained()", save_directory)
        first = self._sharded.world.writes
        if _learns_prompts(self._sharded.module):
            self._save_prompts(own, place, first)
            return
        state = self._adapters(self._named_state(False))
        tensors = list_tensors(state, self._sharded)
        folder = place / f".{os.getpid()}.partial"
        problem = stream_model(tensors, self._sharded, folder, NAME, None, first)
        try:
            if first and problem is None:
                options = {"max_shard_size": max_shard_size}
                problem = _problem(lambda: own(place, state_dict=_mapped(tensors, state, folder / NAME), **options))
        finally:
            if first:
                shutil.rmtree(folder, ignore_errors=True)
        self._all_agree(problem, OSError)

    def _save_prompts(self, save: Callable[..., Any], folder: Path, first: bool) -> None:
        """Have PEFT write prompts: what their encoder computes of its parameters, on all ranks."""
        self._all_agree(_problem(lambda: first and folder.mkdir(parents=True, exist_ok=True)), OSError)
        self._all_agree(_problem(lambda: save(folder, is_main_process=first)), OSError)

    def _save_torch(self, path: Path, exclude_frozen_parameters: bool) -> str | None:
        """Write the file; returns what went wrong."""
        state = self.consolidated_16bit_state_dict(exclude_frozen_parameters)
        return None if state is None else _problem(lambda: _write(state, path))

    save_fp16_model = save_16bit_model  # DeepSpeed's older name

    def zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """As `consolidated_16bit_state_dict`, where parameters are resharded; ValueError elsewhere."""
        if not self._sharded.sharding.params:
            raise ValueError("this function requires ZeRO-3 mode")
        return self.consolidated_16bit_state_dict(exclude_frozen_parameters)

    def consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole state_dict in host memory on rank 0, None elsewhere, where one unit at a time is in memory."""
        self._status.check()
        state, keep = self._named_state(exclude_frozen_parameters), self._sharded.world.writes
        found = dict(state)
        for item, tensor in walk(list_tensors(state, self._sharded), self._sharded):
            found |= dict.fromkeys(item.names, tensor.to("cpu", copy=True)) if keep else {}
        return found if keep else None

    def _adapters(self, names: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of `names` that rank 0's PEFT writes, where the module has adapters; else all. A collective."""
        if not getattr(self._sharded.module, "peft_config", None):
            return names
        if any(isinstance(each, Elsewhere) for each in self._sharded.module.modules()):
            raise ValueError(
                "save_pretrained(): PEFT writes adapters of modules that rank 0 has, and those of other stages of the "
                "pipeline it has not; engine.save_16bit_model(folder, exclude_frozen_parameters=True) writes all, "
                "which load_state_dict(torch.load(file), strict=False) of the model gives back outside of the engine"
            )
        axis = self._sharded.world
        written = _written_by_peft(self._sharded.module, names) if axis.rank == 0 else []
        return {name: names[name] for name in agree(written, axis)[0]}

    def _named_state(self, exclude_frozen_parameters: bool, prefix: str = "") -> dict[str, Any]:
        """The module's own tensors by the names of its state_dict, cut or not."""
        names = self._sharded.module.state_dict(prefix=prefix, keep_vars=True)
        if not exclude_frozen_parameters:
            return names
        frozen = {name for name, value in names.items() if isinstance(value, nn.Parameter) and not value.requires_grad}
        return {name: value for name, value in names.items() if name not in frozen}

    def empty_partition_cache(self) -> None:
        """Release every parameter that is whole only for now, and give unused memory of a GPU back."""
        self._status.check()
        self._sharded.prefetcher.release_all()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _first_path(self, caller: str, *parts: Any) -> Path:
        """Rank 0's folder, or folder and name, on all ranks; raises on all of them. A collective."""
        axis, made = self._sharded.world, [""]

        def make() -> None:
            made[0] = os.path.abspath(Path(check_folder(parts[0], f"{caller}: the folder"), *parts[1:]))

        self._all_agree(_problem(make), ValueError)
        paths = agree(made[0], axis)
        return Path(self._validation.first_of(paths, f"{caller}: the path", axis.ranks, axis.rank == 0))

    def _all_agree(self, problem: str | None, kind: type[Exception] = RuntimeError) -> None:
        """Raise on all ranks when one has a problem; collective."""
        agree(None if problem is None else kind(problem), self._sharded.world, raises=(kind,))


def _problem(work: Callable[[], Any]) -> str | None:
    """The error of `work`, as text; None without one."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _learns_prompts(module: nn.Module) -> bool:
    configs = getattr(module, "peft_config", None) or {}
    return any(getattr(config, "is_prompt_learning", False) for config in configs.values())


def _written_by_peft(module: nn.Module, names: Mapping[str, Any]) -> list[str]:
    """The names of what PEFT writes for all adapters; all names where that is not the module's own tensors."""
    try:
        from peft import get_peft_model_state_dict

        chosen = [get_peft_model_state_dict(module, dict(names), adapter) for adapter in module.peft_config]
    except Exception:  # save_pretrained will meet it, too, where all ranks are told
        return list(names)
    wanted, own = {id(value) for state in chosen for value in state.values()}, set(map(id, names.values()))
    return [name for name, value in names.items() if id(value) in wanted or not wanted <= own]


def _misfits(names: Mapping[str, Any], state_dict: Mapping[str, Any], unmatched: Unmatched) -> str | None:
    """Why a state_dict cannot be loaded, or None."""
    lines = [f"{kind}: {keys}" for kind, keys in zip(("missing", "unexpected"), unmatched, strict=True) if keys]
    for name, value in names.items():
        if name not in state_dict or not isinstance(value, torch.Tensor):
            continue
        shape = getattr(state_dict[name], "shape", None)
        if shape != shape_of(value):
            lines.append(f"'{name}' has shape {shape_of(value)}, the dictionary {shape and tuple(shape)}")
    return f"load_module_state_dict: {'; '.join(lines)}" if lines else None


def _mapped(tensors: Iterable[Listed], state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The state_dict with its tensors in the memory that a file of them is mapped to; tied weights are one."""
    from safetensors.torch import load_file

    values = load_file(path)
    return {**state, **{name: values[each.names[0]] for each in tensors for name in each.names}}


def _write(state: dict[str, Any], path: Path) -> None:
    """One file of torch's, renamed when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(state, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
