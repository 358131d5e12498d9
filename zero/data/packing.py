"""Examples of different lengths packed into rows without padding."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zero.plan.balance import best_fit

IGNORED = -100  # a label that no loss of torch or Transformers counts


def pack(examples: Sequence[Mapping[str, Any]], max_tokens: int) -> list[dict[str, Any]]:
    """Pack examples into few rows of at most `max_tokens` tokens, by best-fit decreasing; a row is `model(**row)`.

    Each example has `input_ids`, and `labels` unless they are the same: lists or tensors [tokens]. A row has what
    Transformers' `DataCollatorWithFlattening` gives: `input_ids`, `labels` and `position_ids` [1, tokens], positions
    from 0 in each example, whose first label is -100; `cu_seq_lens_q` and `cu_seq_lens_k`, the places where examples
    begin and the end, int32; `max_length_q` and `max_length_k`, the longest example. Attention must keep to them, as
    that of Transformers does. A batch of a `TokenBatchSampler` with the same `max_tokens` makes one row.

    Raises ValueError for an example that is empty, longer than a row, or has another number of labels.
    """
    documents = []
    for index, example in enumerate(examples):
        ids = torch.as_tensor(example["input_ids"])
        labels = torch.as_tensor(example.get("labels", ids)).clone()
        if ids.dim() != 1 or labels.shape != ids.shape or not 1 <= len(ids) <= max_tokens:
            raise ValueError(
                f"examples[{index}]: got input_ids of shape {list(ids.shape)} and labels of {list(labels.shape)}, "
                f"wanted one dimension of 1 to max_tokens={max_tokens}"
            )
        labels[0] = IGNORED  # nothing in the row predicts it
        documents.append((ids, labels))
    rows = best_fit([len(ids) for ids, _ in documents], max_tokens)
    return [_row([documents[at] for at in sorted(row)]) for row in rows]


def _row(documents: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    lengths = [len(ids) for ids, _ in documents]
    places = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)
    return {
        "input_ids": torch.cat([ids for ids, _ in documents])[None],
        "labels": torch.cat([labels for _, labels in documents])[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": places,
        "cu_seq_lens_k": places,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
