"""The promise: packed rows without padding, in which each example is computed as if it were alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformer_models import tiny

import zero


def example(length: int, first: int = 1, **more: object) -> dict:
    return {"input_ids": list(range(first, first + length)), **more}


def test_a_row_is_what_the_collator_of_transformers_gives():
    transformers = pytest.importorskip("transformers")
    examples = [example(5), example(3, 20, labels=[7, -100, 9]), example(1, 40)]
    examples[0]["labels"] = examples[0]["input_ids"]
    examples[2]["labels"] = examples[2]["input_ids"]
    wanted = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(examples)
    (row,) = zero.pack(examples, 9)
    assert row.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert row[name].dtype == value.dtype and torch.equal(row[name], value), name
        else:
            assert row[name] == value, name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_computes_each_example_as_if_it_were_alone(attention):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    how = {"vocab_size": 64, "attn_implementation": attention, "use_cache": False}
    model = tiny("LlamaForCausalLM", 0, **how, **sizes).eval()
    ids = [torch.randint(64, (length,)) for length in (7, 4, 9)]
    (row,) = zero.pack([{"input_ids": each} for each in ids], 20)
    with torch.no_grad():
        packed = model(**row)
        alone = [model(input_ids=each[None], labels=each[None]) for each in ids]
    torch.testing.assert_close(packed.logits[0], torch.cat([one.logits[0] for one in alone]))
    counted = [len(each) - 1 for each in ids]
    mean = sum(one.loss * count for one, count in zip(alone, counted, strict=True)) / sum(counted)
    torch.testing.assert_close(packed.loss, mean)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 12), max_size=30))
def test_every_token_is_in_one_row(lengths):
    starts = [100 * index for index in range(len(lengths))]
    rows = zero.pack([example(length, first) for length, first in zip(lengths, starts, strict=True)], 12)
    seen = []
    for row in rows:
        ids, places = row["input_ids"][0].tolist(), row["cu_seq_lens_q"].tolist()
        assert len(ids) <= 12
        for begin, end in itertools.pairwise(places):
            assert row["position_ids"][0, begin:end].tolist() == list(range(end - begin))
            assert row["labels"][0, begin:end].tolist() == [-100, *ids[begin + 1 : end]]
            seen.append(ids[begin:end])
    assert sorted(seen) == [list(range(first, first + length)) for first, length in zip(starts, lengths, strict=True)]


def test_examples_are_left_as_they_were():
    labels = torch.tensor([4, 5, 6])
    zero.pack([{"input_ids": labels, "labels": labels}], 3)
    assert labels.tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    "wrong",
    [example(5), example(0), example(2, labels=[1]), {"input_ids": [[1, 2]]}],
    ids=["long", "empty", "labels", "2d"],
)
def test_what_cannot_be_packed_is_an_error_by_its_index(wrong):
    with pytest.raises(ValueError, match=r"examples\[1\]: got input_ids of shape .* max_tokens=4"):
        zero.pack([example(2), wrong], 4)
