"""The promise: a model whose ranks share sequences trains as in one process, on every stage; what cannot is named.

The oracle is the model of transformers in plain torch, on the whole batch. Packed rows are told by `position_ids`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from ranks import said_by
from sharing import (
    DOCUMENTS,
    LENGTH,
    ROWS,
    VOCABULARY,
    Lines,
    build,
    check,
    inputs,
    needs_transformers,
    plain,
    settings,
)
from torch import nn

import zero
from zero.utils import cut_sequence, safe_get_full_grad

pytestmark = pytest.mark.ranks(2)
BLOCKS = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block", "qwen": "Qwen2DecoderLayer", "bert": "BertLayer"}
MORE: list[dict[str, Any]] = [
    {},
    {"zero": {"recompute": {}}},
    {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
]


@needs_transformers
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "world", "cp", "stages"),
    [
        ("llama", 2, 2, (0, 3)),
        ("bert", 2, 2, (1, 2)),
        *longer(*((kind, world, cp, range(4)) for kind in BLOCKS for world, cp in ((2, 2), (4, 2), (4, 4)))),
    ],
)
def test_ranks_train_as_one_process(kind: str, world: int, cp: int, stages: Sequence[int]) -> None:
    """Every mode on each stage, with each form and each setting beside them in turn."""
    settings_in_turn, forms = itertools.cycle(MORE), itertools.cycle(["plain", "packed", "padded"])
    for stage, mode in itertools.product(stages, ("ring", "ulysses")):
        more = next(settings_in_turn)
        more = {key: value for key, value in more.items() if stage or key != "zero_optimization"}
        given = copy.deepcopy(more)
        if "zero" in given:
            given["zero"] = {"context": {"mode": mode}, "recompute": {"modules": [BLOCKS[kind]]}}
        check(kind, cp, mode, stage, next(forms), given)
        next(forms) if stage % 2 else None


@needs_transformers
@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_trl_6843_packed_documents_do_not_see_each_other(mode: str) -> None:
    """The loss of a pack is that of its documents one by one."""
    model = build("llama")
    tokens = inputs(0, "plain")["input_ids"][:1]
    parts = tokens.split(DOCUMENTS, 1)
    with torch.no_grad():
        logits = torch.cat([model(input_ids=part).logits for part in parts], 1)
    labels = torch.cat([torch.cat([part.new_full((1, 1), -100), part[:, 1:]], 1) for part in parts], 1)
    wanted = nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])
    engine, *_ = zero.initialize(model=model, config=settings(2, 2, mode))
    positions = torch.cat([torch.arange(size) for size in DOCUMENTS])[None]
    packed = {"input_ids": tokens, "labels": labels}
    assert abs(engine(**packed, position_ids=positions).loss - wanted) < 1e-6
    borders = torch.tensor([0, 13, 15, 30], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 15, "max_length_k": 15}
    assert abs(engine(**packed, position_ids=positions, **lengths).loss - wanted) < 1e-6
    engine.destroy()


@needs_transformers
def test_veomni_1086_gradients_are_summed_over_the_pieces_too() -> None:
    """There the ranks of one sequence kept gradients of their own piece: weights drift apart, and no loss tells."""
    engine, *_ = zero.initialize(model=build("llama"), config=settings(0, 2, "ulysses"))
    for number in range(3):
        engine.backward(engine(**inputs(number, "plain")).loss)
        engine.step()
    for param in engine.module.parameters():
        both = [torch.empty_like(param) for _ in range(2)]
        dist.all_gather(both, param.detach())
        assert torch.equal(*both)
    engine.destroy()


@needs_transformers
def test_deepspeed_7672_key_heads_that_are_fewer_than_the_ranks_have_the_gradients_of_one_process() -> None:
    """There a single key head that ranks share got a part of its gradient."""
    check("qwen", 2, "ulysses", 3, "plain", {})


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lines = Lines()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, position_ids: Any = None) -> torch.Tensor:
        return self.lines(tokens, targets, position_ids)


@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_models_of_the_user_s_own(mode: str) -> None:
    """Attention by our function, in place of torch's, in a function that is recomputed, in a block that is."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    targets[:, 20:] = -100
    model = Lines()
    wanted = model(tokens, targets)
    wanted.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    for own, modules in (("own", []), ("torch's", []), ("checkpointed", []), ("own", ["Lines"])):
        made = settings(3, 2, mode)
        if modules:
            made["zero"]["recompute"] = {"modules": modules}
        whole = Wrapped() if modules else Lines(own)
        engine, *_ = zero.initialize(model=whole, config=made)
        loss = engine(tokens, targets)
        assert abs(loss - wanted) < 1e-6
        engine.backward(loss)
        for name, param in engine.module.named_parameters():
            assert (safe_get_full_grad(param) - grads[name.removeprefix("lines.")]).abs().max() <= 1e-6, (own, name)
        engine.step()
        if not modules:
            logits = engine(torch.zeros(ROWS, 32, dtype=torch.long))  # of no multiple it would need targets
            assert logits.shape == (ROWS, 16, VOCABULARY)
            places, rank = cut_sequence(engine, torch.arange(32)[None]), dist.get_rank()
            ends = [*range(8 * rank, 8 * rank + 8), *range(24 - 8 * rank, 32 - 8 * rank)]
            assert places.tolist() == [ends if mode == "ring" else [*range(16 * rank, 16 * rank + 16)]]
        engine.destroy()


@needs_transformers
def test_checkpoints_interchange_with_whole_sequences(tmp_path: Path) -> None:
    """Saved where ranks share sequences, loaded where none do, and back: the same losses and norms follow."""

    def go_on(cp: int, load: str, save: str, numbers: tuple[int, ...]) -> list[float]:
        made = settings(2, cp, "ring") | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
        engine, *_ = zero.initialize(model=build("llama"), config=made)
        if load:
            engine.load_checkpoint(folder / load)
        found = []
        for number in numbers:
            loss = engine(**inputs(number, "packed")).loss  # where nothing is shared, both ranks have the same rows
            engine.backward(loss)
            engine.step()
            found += [loss.item(), engine.get_global_grad_norm()]
        engine.save_checkpoint(folder / save)
        engine.destroy()
        return found

    paths: list[Any] = [str(tmp_path)]
    dist.broadcast_object_list(paths)
    folder = Path(paths[0])
    go_on(2, "", "shared", (0, 1))
    straight = go_on(2, "shared", "further", (2, 3))
    assert go_on(1, "shared", "whole", (2, 3)) == pytest.approx(straight, rel=1e-6)
    assert go_on(2, "whole", "back", (4,)) == pytest.approx(go_on(1, "further", "other", (4,)), rel=1e-6)


@needs_transformers
@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_activations_are_those_of_the_piece(mode: str) -> None:
    """Bytes that autograd keeps, but for parameters: half of them on each of two ranks, within 2 %.

    Ulysses keeps the output of its attention twice, as it computes it and as it exchanges it.
    """

    def kept(cp: int) -> int:
        made = settings(0, cp, mode)
        engine, *_ = zero.initialize(model=build("llama"), config=made)
        params = {param.untyped_storage().data_ptr() for param in engine.module.parameters()}
        found = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            found.setdefault(storage.data_ptr(), (storage.nbytes(), tensor))
            return tensor

        tokens = torch.zeros(4, 64, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = engine(input_ids=tokens, labels=tokens).loss
        bytes_kept = sum(size for place, (size, _) in found.items() if place not in params)
        engine.backward(loss)
        engine.destroy()
        return bytes_kept

    twice = 2 * 4 * 32 * 32 * 4 if mode == "ulysses" else 0  # layers x rows x positions x width, in fp32
    assert kept(2) - twice == pytest.approx(kept(1) / 2, rel=0.02)


@needs_transformers
@pytest.mark.long
@pytest.mark.ranks(4)
@pytest.mark.parametrize("section", [{"shard_size": 2}, {"reduce": "tree"}, {"check_replicas": 1}, {"mean": "tokens"}])
def test_beside_other_ways_to_share(section: dict[str, Any]) -> None:
    """HSDP, sums as a tree, a comparison of replicas, a mean over tokens, and hpZ with a model under zero.Init."""
    losses, grads = plain("llama", "plain", 2)
    made = settings(3, 2, "ring")
    made["zero"] |= section
    if "check_replicas" in section:
        made["zero_optimization"] |= {"zero_hpz_partition_size": 2}
    with zero.Init(config=made):
        model = build("llama")
    engine, *_ = zero.initialize(model=model, config=made)
    for step, (loss, whole) in enumerate(zip(losses, grads, strict=True)):
        batch = inputs(step * 2 + dist.get_rank() // 2, "plain")
        found = engine(**batch).loss
        count = (batch["labels"][:, 1:] != -100).sum()
        engine.backward(found, tokens=count if "mean" in section else None)
        if "mean" in section:
            engine.step()
            continue  # another mean than that of `plain`
        mean = found.detach().clone()
        dist.all_reduce(mean)
        assert abs(mean.item() / 4 - loss) <= 1e-6 * loss
        for name, param in engine.module.named_parameters():
            assert (safe_get_full_grad(param) - whole[name]).abs().max() <= 1e-6, (name, section)
        engine.step()
    engine.destroy()


@needs_transformers
def test_the_mean_over_tokens_counts_a_shared_sequence_once() -> None:
    """Micro-batches of different counts, on two ranks that share each, beside the sum over tokens in one process."""
    made = settings(2, 2, "ring") | {"train_batch_size": 2 * ROWS, "gradient_accumulation_steps": 2}
    made["zero"] |= {"mean": "tokens"}
    model, batches = build("llama"), [inputs(number, form) for number, form in ((0, "plain"), (1, "padded"))]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    assert counts[0] != counts[1]
    sum(model(**batch).loss * count for batch, count in zip(batches, counts, strict=True)).div(sum(counts)).backward()
    wanted = {name: param.grad for name, param in model.named_parameters()}
    engine, *_ = zero.initialize(model=build("llama"), config=made)
    for batch, count in zip(batches, counts, strict=True):
        engine.backward(engine(**batch).loss, tokens=count)
        engine.step()
    norm = torch.cat([grad.flatten() for grad in wanted.values()]).norm()
    assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-6)
    engine.destroy()


@needs_transformers
def test_the_engine_s_own_check_compares_with_whole_sequences() -> None:
    engine, *_ = zero.initialize(model=build("llama"), config=settings(1, 2, "ulysses"))
    assert engine.check(inputs(0, "packed"), steps=2, stages=(0, 3), accumulations=(1,))
    assert torch.isfinite(engine(**inputs(0, "packed")).loss)
    engine.destroy()


@needs_transformers
def test_a_model_generates_whole_sequences_and_is_given_back_as_it_was() -> None:
    model = build("llama")
    prompt = torch.arange(6)[None]
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    wanted = model.generate(prompt, **options)
    engine, *_ = zero.initialize(model=model, config=settings(3, 2, "ring"))
    assert torch.equal(engine.generate(prompt, **options), wanted)
    assert torch.isfinite(engine(**inputs(0, "plain")).loss)
    assert torch.equal(engine.generate(prompt, **options), wanted)
    engine.destroy()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model.generate(prompt, **options), wanted)


@needs_transformers
@pytest.mark.long
def test_compiled_blocks_attend_by_the_documents_of_each_forward() -> None:
    model = build("llama")
    wanted = [model(**inputs(number, form)).loss.item() for number, form in ((0, "plain"), (1, "packed"), (2, "plain"))]
    engine, *_ = zero.initialize(model=model, config=settings(1, 2, "ring"))
    engine.compile(backend="eager")
    with torch.no_grad():
        found = [
            engine(**inputs(number, form)).loss.item() for number, form in ((0, "plain"), (1, "packed"), (2, "plain"))
        ]
    assert found == pytest.approx(wanted, rel=1e-6)
    engine.destroy()


@needs_transformers
def test_recomputed_attention_of_two_forwards_with_different_documents_is_named() -> None:
    made = settings(1, 2, "ring") | {"zero": {"context": {"mode": "ring"}, "recompute": {"modules": ["*layers.*"]}}}
    engine, *_ = zero.initialize(model=build("llama"), config=made)
    losses = [engine(**inputs(0, form)).loss for form in ("plain", "packed")]
    with pytest.raises(RuntimeError, match="may be of 2 forwards with different documents since the last backward"):
        engine.backward(sum(losses))
    engine.backward(engine(**inputs(0, "packed")).loss)  # and it goes on
    engine.step()
    engine.destroy()


@needs_transformers
@pytest.mark.parametrize(
    ("mode", "stage", "in_backward"),
    [("ulysses", 0, True), *longer(("ring", 0, False), ("ring", 3, True), ("ulysses", 3, False))],
)
def test_a_rank_that_raises_in_attention_and_goes_on_is_named(mode: str, stage: int, in_backward: bool) -> None:
    model, bad = build("llama"), [1][dist.get_rank() :]
    engine, *_ = zero.initialize(model=model, config=settings(stage, 2, mode))

    def refuse(*_: Any) -> None:
        if bad:
            bad.pop()
            raise ValueError("bad sample")

    module = model.model.layers[1].self_attn.o_proj
    (module.register_full_backward_pre_hook if in_backward else module.register_forward_pre_hook)(refuse)

    def train() -> None:
        for number in range(2):
            with contextlib.suppress(ValueError):
                engine.backward(engine(**inputs(number, "plain")).loss)
                engine.step()

    said = said_by(train)
    assert "rank 0 raised ValueError: bad sample in " in said and " and went on" in said
    assert "ranks 0, 1 wait for each other, and nothing can come" in said


@needs_transformers
@pytest.mark.ranks(4)
def test_loaders_give_ranks_that_share_a_sequence_the_same_samples() -> None:
    data = [{key: value[0] for key, value in inputs(number, "plain").items()} for number in range(8)]
    engine, _, loader, _ = zero.initialize(model=build("llama"), config=settings(1, 2, "ring"), training_data=data)
    assert engine.train_batch_size() == 2 * ROWS
    batches = list(loader)
    assert len(batches) == 2
    tokens = [None] * 4
    dist.all_gather_object(tokens, torch.cat([each["input_ids"] for each in batches]))
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[2], tokens[3])
    assert not torch.equal(tokens[0], tokens[2])
    for batch in batches:
        engine.backward(engine(**batch).loss, tokens=ROWS * LENGTH)
        engine.step()
    assert engine.gather_for_metrics(batches[-1]["input_ids"]).shape == (2 * ROWS, LENGTH)
    engine.destroy()
