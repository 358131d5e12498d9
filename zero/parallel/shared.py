"""An engine whose ranks share sequences: it is called with whole ones, the model sees pieces, attention sees all."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from zero.config.sections import Context
from zero.core import comm
from zero.core.comm import Axis
from zero.core.torch_private import backward_task
from zero.core.world import world_of_one
from zero.kernels.crc32 import crc32
from zero.log import rank_zero
from zero.parallel import huggingface
from zero.parallel.attention import LIVE, RUNNING, keep_out_compiler
from zero.parallel.first_check import compare, part_of
from zero.parallel.loss import combined, count_in, loss_in
from zero.parallel.refusals import refuse_arguments, refuse_model
from zero.parallel.sequence import Sequence, documents_of, documents_of_lengths, grouped
from zero.plan.sequences import Documents, pieces

IGNORED = -100  # the label that transformers and torch's losses leave out
_FIRST = ("input_ids", "inputs_embeds")
_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class SharedSequences:
    """What `axis`, the ranks that share sequences, do around each forward of a model.

    cuts: else arguments come cut, as by DeepSpeed's adapter of a loader, with `position_ids`; training_only: in eval
    each rank has a batch of its own; whole: all of the model is here, so that the first batch can be compared.
    """

    def __init__(
        self, module: nn.Module, axis: Axis, section: Context, cuts: bool, training_only: bool, whole: bool = True
    ) -> None:
        refuse_model(module)
        self.cuts, self._training_only = cuts, training_only
        self._axis, self._section, self._module = axis, section, module
        self._now: Sequence | None = None  # of the forward that runs
        self._last: Sequence | None = None
        self._seen: list[Sequence] = []  # those whose backward may come
        self._unnamed = ""  # an argument of the forward whose negative numbers may be left out by the loss
        self._ended = self._checked = self._logged = False
        # Forwards, by whether they build graphs.
        self._to_compare = {False, True} if section.check and cuts and whole else set()
        self._calls = 0  # of attention
        self.model = huggingface.SharedModel(module, lambda: self.shares)
        if self.model.counts and not cuts:
            self.model.give_back()
            raise ValueError(
                f"{type(module).__name__} counts positions by tokens or a mask, and batches that come cut have those "
                'that count from 0; share sequences by "sequence_parallel_size" in the JSON'
            )
        keep_out_compiler()
        comm.connect(axis)
        LIVE.add(self)
        self._hooks = [hook for each in module.modules() for hook in self._hooked(each)]

    def run(self, model: Callable[..., Any], begins: Callable[[], bool], /, *inputs: Any, **kwargs: Any) -> Any:
        """The model on this rank's pieces; the loss is that of the whole batch of all that share it.

        begins: begins a micro-batch if the forward is one of its own, and says whether no rank has ended one before.
        """
        # A model from from_pretrained() is in eval, and some programs train it so.
        if self._training_only and not (self._module.training or torch.is_grad_enabled()):
            return model(*inputs, **kwargs)
        takes = inspect.signature(self._module.forward).parameters.values()
        if inputs and any(each.kind is each.VAR_POSITIONAL for each in takes):
            raise ValueError(f"{type(self._module).__name__}.forward names no arguments; give them by keyword")
        named = dict(zip([each.name for each in takes], inputs, strict=False)) | kwargs
        named = {name: value for name, value in named.items() if value is not None}
        self._check_same(named)
        refuse_arguments(named)
        if (graph := torch.is_grad_enabled()) in self._to_compare and begins():
            self._compare(named)
            self._to_compare -= {graph, False}
        self._checked = True  # only now, so that a rank that begins anew meets no other in the middle
        return self._forward(model, named)

    @property
    def shares(self) -> bool:
        """Whether attention that runs now is over shared sequences."""
        return self._now is not None or bool(self._seen and backward_task() >= 0)

    def piece(self, whole: torch.Tensor, fill: float) -> torch.Tensor:
        """This rank's positions of a tensor [rows, length, ...] beside the inputs of the last forward.

        fill: for what is behind it. RuntimeError where there was no forward.
        """
        if self._last is None:
            raise RuntimeError("cut_sequence() cuts as the last forward did; there was none")
        behind = (0, 0) * (whole.ndim - 2) + (0, self._last.length - whole.shape[1])
        return self._last.piece(pad(whole, behind, value=fill))

    def ended(self) -> None:
        """A backward has ended."""
        self._ended = True

    def close(self) -> None:
        """Leave the module as it was."""
        LIVE.discard(self)
        self.model.give_back()
        for hook in self._hooks:
            hook.remove()

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> tuple[str, Sequence] | None:
        """See `SharingEngine`."""
        if not self.shares or query.is_meta:
            return None  # called by itself, as by generate(), or the copy that the plan traces
        fitting = [each for each in self._seen if each.size == query.shape[2]] if self._now is None else [self._now]
        if len(fitting) > 1:
            raise RuntimeError(
                f"recomputed attention: it may be of {len(fitting)} forwards with different documents since the last "
                "backward; run each forward's backward before the next forward"
            )
        if not fitting:
            return None
        if query.shape[2] != fitting[0].size or key.shape[2] != query.shape[2]:
            raise ValueError(
                f"attention of {query.shape[2]} queries to {key.shape[2]} keys, in a forward whose pieces of the "
                f"sequence have {fitting[0].size} positions: only attention of a sequence to itself is shared"
            )
        self._calls += 1
        return self._section.mode, fitting[0]

    def _forward(self, model: Callable[..., Any], named: dict[str, Any]) -> Any:
        sequence = self._cut(named) if self.cuts else self._as_cut(named)
        self.model.given = set(named)
        before = self._calls
        with self._running(sequence):
            output = model(**named)
        if self.model.has_windows and not self.model.windows:
            raise RuntimeError(
                f"sequence_parallel_size: {type(self._module).__name__} has layers with a sliding window, and its "
                "attention is not told of it; train this model with sequence_parallel_size 1"
            )
        if self._calls == before:
            raise RuntimeError(
                f"sequence_parallel_size: no attention of {type(self._module).__name__} has seen the whole sequence; "
                "let it call zero.attention(q, k, v), or F.scaled_dot_product_attention inside zero.shared_attention()"
            )
        if not self.cuts or (loss := loss_in(output)) is None:
            return output
        sums = self._section.reduction == "sum" or "num_items_in_batch" in named  # by which a part is divided already
        return combined(output, loss, self._count(output, named, sums), sums, self._axis)

    def _compare(self, named: Mapping[str, Any]) -> None:
        """Raise RuntimeError, on all ranks, where a part of this batch gives something else on pieces."""
        self._cut(dict(named))  # errors of the whole batch come first
        first, halves = _first(named), self._section.mode == "ring"
        rows, length = named[first].shape[:2]
        cut = [name for name, each in named.items() if self._has_sequence(name, each, rows, length)]
        cut += [name for name in ("attention_mask",) if name in named and name not in cut]
        part = part_of(named, first, cut, self._axis.size, halves)
        sequence, mask = self._cut(dict(part)), part.get("attention_mask")
        several = any(sum(mark >= 0 for mark in borders[:-1]) > 1 for _, borders in sequence.documents)
        seen = torch.ones(part[first].shape[1], dtype=torch.bool, device=part[first].device)
        if mask is not None and not several:
            seen = (mask != 0).all(0)  # one process computes something for padding

        def shared() -> Any:
            return self._forward(self._module, dict(part))

        targets = [name for name in _targets(part) if name in cut]
        weighed = f"the mean over {f'{targets[0]} >= 0' if targets else 'all positions'}"
        if self._section.reduction == "sum" or self._section.count:
            weighed = "a sum" if self._section.reduction == "sum" else f"the mean over the sum of {self._section.count}"
        compare(self._module, sequence, functools.partial(self._whole, part, several), shared, seen, weighed)

    def _whole(self, part: Mapping[str, Any], several: bool) -> Any:
        """The model on whole sequences, as in one process; but those of several documents are told to attention."""
        named = {name: each for name, each in part.items() if name not in _BORDERS}
        first, mask = named[_first(named)], named.get("attention_mask")
        positions = named.get("position_ids")
        if positions is None:
            positions = self.model.positions(named.get("input_ids"), mask, first)
        if several or not self.model.is_theirs:
            named["position_ids"] = positions
        if not several:
            return self._module(**named)
        named.pop("attention_mask", None)
        rows, length = first.shape[:2]
        documents = grouped(_documents(part, rows, length))
        alone = Sequence(world_of_one().point(), pieces(length, 1, False), documents)
        self.model.begins(alone, positions, mask)
        with self._running(alone):
            return self._module(**named)

    @contextlib.contextmanager
    def _running(self, sequence: Sequence) -> Iterator[None]:
        if self._ended:
            self._seen, self._ended = [], False
        if torch.is_grad_enabled() and sequence not in self._seen:
            self._seen.append(sequence)
        before, self._now = self._now, sequence
        self._last = sequence
        try:
            yield
        finally:
            self._now = before

    def _hooked(self, module: nn.Module) -> Iterator[Any]:
        tokens: list[Any] = []

        def enter(called: nn.Module, *_: Any) -> None:
            if called is module:  # a copy has the same hooks, and is nobody's
                tokens.append(RUNNING.set(self))

        def leave(called: nn.Module, *_: Any) -> None:
            if called is module:
                RUNNING.reset(tokens.pop())

        yield module.register_forward_pre_hook(enter, prepend=True)
        yield module.register_forward_hook(leave, always_call=True)

    def _check_same(self, named: Mapping[str, Any]) -> None:
        """RuntimeError where ranks that share a sequence were first given different ones."""
        if self._checked or not self.cuts:
            return
        tensors = [named[name] for name in sorted(named) if isinstance(named[name], torch.Tensor)]
        mine = 0
        for each in tensors:
            mine = crc32(each.detach().cpu().contiguous(), mine)
        told = torch.tensor([mine, *named[_first(named)].shape[:2]], device=tensors[0].device)
        found = comm.gather_scalars(told, self._axis, "comparison of batches").tolist()
        if other := [rank for rank, each in zip(self._axis.ranks, found, strict=True) if each != found[0]]:
            raise RuntimeError(
                f"sequence_parallel_size: ranks {', '.join(map(str, self._axis.ranks))} share one sequence, and "
                f"{', '.join(map(str, other))} were given another batch than {self._axis.ranks[0]}; give all of them "
                "the same: initialize(training_data=...), engine.deepspeed_io(...), a sampler over the data-parallel "
                f"ranks, or Accelerate's ParallelismConfig(sp_size={self._axis.size}) (rank {self._axis.global_rank})"
            )

    def _cut(self, named: dict[str, Any]) -> Sequence:
        """Cut the arguments; documents come from positions, from a mask, or from cumulative lengths."""
        first = named[_first(named)]
        rows, length, ranks = *first.shape[:2], self._axis.size
        halves = self._section.mode == "ring"
        more = -length % (ranks * (1 + halves))
        documents = _documents(named, rows, length)
        mask, positions, *_ = (named.pop(name, None) for name in ("attention_mask", "position_ids", *_BORDERS))
        if more:  # padding is behind all others
            documents = [(*each[:-1], ~length, length + more) for each in documents]
        if positions is None:
            positions = self.model.positions(named.get("input_ids"), mask, first)
        named["position_ids"] = positions
        self._shift(named)
        sequence = Sequence(self._axis, pieces(length + more, ranks, halves), grouped(documents))
        self.model.begins(sequence, positions, mask)
        cut = [name for name, value in named.items() if self._has_sequence(name, value, rows, length)]
        targets = _targets({name: named[name] for name in cut})
        if more and not targets:
            raise ValueError(
                f"sequence_parallel_size: {length} positions are no multiple of {ranks * (1 + halves)}, and no "
                "argument of integers is called labels or targets, in which padding is left out; pad the sequence"
            )
        integers = [name for name in cut if not targets and _are_integers(named[name])]
        self._unnamed = next((name for name in integers if (named[name] < 0).any()), "")  # on all ranks alike
        for name in cut:
            fill = IGNORED if name in targets else 0
            behind = (0, 0) * (named[name].ndim - 2) + (0, more)
            named[name] = sequence.piece(pad(named[name], behind, value=fill) if more else named[name])
        if not self._logged:
            self._logged = True
            rank_zero(
                logging.INFO, "%s ranks share each sequence (%s): cut are %s", ranks, self._section.mode, ", ".join(cut)
            )
        return sequence

    def _has_sequence(self, name: str, value: Any, rows: int, length: int) -> bool:
        if self._section.cut:
            return name in {*self._section.cut, "position_ids", "shift_labels"}
        return isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[:2] in ((rows, length), (1, length))

    def _shift(self, named: dict[str, Any]) -> None:
        """Labels of the next token are shifted before the cut, so that no pair of tokens is cut apart."""
        if "labels" not in named or "shift_labels" in named or not huggingface.shifts(self._module, self._section.cut):
            return
        named["shift_labels"] = pad(named["labels"][:, 1:], (0, 1), value=IGNORED)
        named["labels"] = named["shift_labels"]  # without which no loss is computed

    def _as_cut(self, named: dict[str, Any]) -> Sequence:
        """The sequence of arguments that come cut in order of ranks: documents by everyone's positions and masks."""
        if (positions := named.get("position_ids")) is None:
            raise ValueError("sequence_parallel_size: a batch that comes cut needs position_ids of the whole sequence")
        mask = named.pop("attention_mask", positions.new_ones(named[_first(named)].shape[:2])).to(positions)
        mine = torch.stack([positions.expand(mask.shape), mask])
        told = comm.gather_scalars(mine.view(-1), self._axis, "positions")
        whole, masks = told.view(-1, *mine.shape).permute(1, 2, 0, 3).flatten(2)
        cut = pieces(whole.shape[1], self._axis.size, False)
        sequence = Sequence(self._axis, cut, grouped(documents_of(whole, masks, *whole.shape)))
        self.model.begins(sequence, whole, None if masks.all() else masks)
        return sequence

    def _count(self, output: Any, named: Mapping[str, Any], sums: bool) -> float:
        """The number of elements in the loss of this rank's piece: by the model, the JSON, or its labels."""
        count, told = count_in(output), self._section.count
        if count is None and sums:
            return 1.0
        targets = _targets(named)
        if count is None and told and told not in targets:
            if (
                not isinstance(named.get(told), torch.Tensor)
                or named[told].shape[1:2] != named["position_ids"].shape[1:2]
            ):
                raise ValueError(
                    f"zero.context.count: got '{told}', and no argument of this forward that is called so is cut; "
                    f"wanted one of {', '.join(name for name, each in named.items() if isinstance(each, torch.Tensor))}"
                )
            count = float(named[told].double().sum())
        if count is None and self._unnamed:
            raise ValueError(
                f"sequence_parallel_size: {self._unnamed} has negative numbers; where they say what the loss "
                "leaves out, call it labels or targets, so that a rank's loss weighs what it counts"
            )
        if count is None:
            count = float((named[targets[0]] >= 0).sum()) if targets else 1.0
        if not 0 <= count < math.inf:
            raise ValueError(f"sequence_parallel_size: the loss of a piece counts {count}; wanted at least 0")
        return count


def cut_sequence(engine: Any, whole: torch.Tensor, *, shift: bool = False, fill: float = -100) -> torch.Tensor:
    """This rank's positions of a tensor [rows, length, ...], cut as the inputs of the engine's last forward were.

    For a loss outside of the model, from outputs that are of this rank's piece: the labels of these. shift: by one
    position to the front, as labels of next tokens; fill: for what is behind them, by default what losses leave out.
    Without `sequence_parallel_size` it is the whole tensor. Raises RuntimeError before the first forward.
    """
    if shift:
        whole = pad(whole[:, 1:], (0, 0) * (whole.ndim - 2) + (0, 1), value=fill)
    sharing = engine._training.forms.sharing
    return whole if sharing is None else sharing.piece(whole, fill)


def _first(named: Mapping[str, Any]) -> str:
    """The name of the argument that says rows and length."""
    known = [name for name in _FIRST if name in named]
    known += [name for name, value in named.items() if isinstance(value, torch.Tensor) and value.ndim > 1]
    if not known or not named[known[0]].numel():
        raise ValueError(
            "sequence_parallel_size: the model was called without a tensor [rows, length, ...] that has elements; "
            f"wanted {' or '.join(_FIRST)}, or another one first"
        )
    return known[0]


def _documents(named: Mapping[str, Any], rows: int, length: int) -> list[Documents]:
    """The documents of each row, by cumulative lengths, by positions or by a mask."""
    mask, positions, borders, *_ = map(named.get, ("attention_mask", "position_ids", *_BORDERS))
    if borders is not None:
        return documents_of_lengths(borders.tolist(), rows, length)
    return [(0, length)] * rows if positions is None and mask is None else documents_of(positions, mask, rows, length)


def _targets(named: Mapping[str, Any]) -> list[str]:
    """The arguments in which what is negative, as padding, is left out of the loss."""
    return [name for name in named if ("label" in name or "target" in name) and _are_integers(named[name])]


def _are_integers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype != torch.bool
