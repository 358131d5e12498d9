"""DeepSpeed's Ulysses by its names: the groups that are given as `mpu`, and a loader whose ranks share sequences."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad
from torch.utils.data import IterableDataset

from zero.core.agree import agree
from zero.core.comm import exchange, local_device, messages_device
from zero.core.world import axis_of
from zero.parallel.grid_groups import GridGroups, groups
from zero.parallel.huggingface import NAME
from zero.parallel.shared import IGNORED


class UlyssesSPAttentionHF:
    """Where programs ask for the groups; it is `initialize(mpu=...)` that makes attention over shared sequences."""

    @staticmethod
    def register_with_transformers(
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int | None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> GridGroups | None:
        """The `mpu`, None for a size of 1; batches of any size and length will do. Collective."""
        del micro_batch_size, seq_length, seq_length_is_variable, max_length
        if sequence_parallel_size == 1:
            return None
        has = getattr(getattr(model_name_or_path, "config", None), "_attn_implementation", None)
        if core_attn_implementation is not None and has not in (None, core_attn_implementation, NAME):
            raise ValueError(f"{core_attn_implementation=} does not match model config attn_implementation='{has}'")
        if (loss := getattr(model_name_or_path, "loss_type", None)) not in (None, "ForCausalLM"):
            raise ValueError(f"got a model with the loss '{loss}'; its labels would become those of next tokens")
        mpu = groups({"sp": sequence_parallel_size})
        mpu.disable_in_eval = disable_in_eval
        mpu._group("cp")  # made by all ranks, which are all here
        return mpu


class UlyssesSPDataLoaderAdapter(IterableDataset):
    """The batches of all ranks of a group, one after the other, of which each rank gets a piece.

    dl: this rank's loader, of mappings with `input_ids` [rows, length]. `labels` become `shift_labels`, of the next
    token; `position_ids` count from 0 unless there are some; a length that the ranks do not divide is padded with
    documents of their own. Tensors of one dimension, and what is no tensor, all ranks get as they are.
    """

    # For Accelerate's `skip_first_batches`, which makes a loader of `dataset`, with these.
    batch_size = device = drop_last = prefetch_factor = rng_types = synchronized_generator = None
    dataset = property(lambda self: self)
    iteration = property(lambda self: getattr(self.dl, "iteration", 0))
    set_epoch = property(lambda self: self.dl.set_epoch)

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl, self._ranks, self._to = dl, sp_world_size, device
        self._axis = axis_of(sp_group)

    @property
    def __class__(self) -> type:
        """Accelerate's loader, once it is imported: of no other does it keep the epoch where it skips batches."""
        return getattr(sys.modules.get("accelerate.data_loader"), "DataLoaderShard", type(self))

    def __len__(self) -> int:
        return len(self.dl) * self._ranks

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self.dl)
        while pieces := self._deal(next(batches, None)):
            last = getattr(self.dl, "end_of_dataloader", False)
            for number, piece in enumerate(pieces, 1):
                if last:  # Accelerate steps there, also within an accumulation
                    self.dl.end_of_dataloader = number == len(pieces)
                yield {key: value.to(self._to) if torch.is_tensor(value) else value for key, value in piece.items()}

    def _deal(self, batch: Any) -> list[dict[str, Any]]:
        """This rank's pieces of the batches of all ranks that have one; what is wrong with one is raised on all."""
        pieces, form = [], None
        try:
            pieces = [] if batch is None else cut_batch(batch, self._ranks)
            form = [_form(key, value) for key, value in pieces[0].items()] if pieces else None
        except ValueError as error:
            form = f"the batch of rank {dist.get_rank()}: {error}"
        forms = agree(form, self._axis, name="forms of batches")
        if wrong := next((each for each in forms if isinstance(each, str)), None):
            raise ValueError(wrong)
        sizes = [sum(nbytes for *_, nbytes in each or ()) for each in forms]
        there = messages_device(self._axis, local_device())
        flat = torch.cat(
            [torch.empty(0, dtype=torch.uint8), *(_bytes(each) for piece in pieces for each in piece.values())]
        )
        sends = [sizes[self._axis.rank]] * self._ranks
        got = exchange(flat.to(there), sends, sizes, self._axis, "batches").cpu().split(sizes)
        return [_piece(part, each) for part, each in zip(got, forms, strict=True) if each is not None]


def _form(key: str, value: Any) -> list[Any]:
    """What the ranks that get a value must know: its key, and the dtype and shape of a tensor; and its bytes."""
    if torch.is_tensor(value):
        return [key, str(value.dtype).removeprefix("torch."), value.shape, value.nbytes]
    return [key, None, None, _bytes(value).numel()]


def _bytes(value: Any) -> torch.Tensor:
    if torch.is_tensor(value):
        return value.cpu().reshape(-1).view(torch.uint8)
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _piece(part: torch.Tensor, form: list[list[Any]]) -> dict[str, Any]:
    piece = {}
    for (key, dtype, shape, _), each in zip(form, part.split([nbytes for *_, nbytes in form]), strict=True):
        own = each.clone()  # a dtype of several bytes cannot begin at any of them
        piece[key] = pickle.loads(bytes(own.numpy())) if dtype is None else own.view(getattr(torch, dtype)).view(shape)
    return piece


def cut_batch(batch: Any, ranks: int) -> list[dict[str, Any]]:
    """What each of the ranks gets of a batch, on the CPU; see `UlyssesSPDataLoaderAdapter`."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise ValueError(f"got a {type(batch).__name__}; wanted a mapping with input_ids [rows, length]")
    borders = [key for key in batch if key.startswith(("cu_seq_lens", "max_length", "seq_idx"))]  # not those of pieces
    if borders and "position_ids" not in batch:
        raise ValueError(f"got {', '.join(borders)} without position_ids, which tell documents by beginning anew")
    length, parts = batch["input_ids"].shape[1], {}
    named = {"position_ids": torch.arange(length)[None], **batch}  # as models count by themselves
    for key, value in ((key, named[key]) for key in named if key not in borders):
        if not torch.is_tensor(value) or value.ndim < 2:
            parts[key] = [value] * ranks
            continue
        if value.shape[1] != length:
            raise ValueError(f"{key}: got the shape {tuple(value.shape)} beside input_ids of length {length}")
        fill, behind = IGNORED if "label" in key else 0, (0, 0) * (value.ndim - 2)
        if key == "labels":
            key, value = "shift_labels", pad(value[:, 1:], (*behind, 0, 1), value=fill)
        whole = pad(value.cpu(), (*behind, 0, -length % ranks), value=fill)
        parts[key] = whole.chunk(ranks, 1)
    return [{key: part[rank] for key, part in parts.items()} for rank in range(ranks)]
