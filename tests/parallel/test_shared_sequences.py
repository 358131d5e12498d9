"""The promise: a model whose ranks share sequences trains as in one process, on every stage; what cannot is named.

The oracle is the model of transformers in plain torch, on the whole batch. Packed rows are told by `position_ids`.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import config
from torch import nn

import zero
from zero.utils import cut_sequence, safe_get_full_grad

ROWS, LENGTH, VOCABULARY = 2, 30, 64
DOCUMENTS = (13, 2, 15)
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (it needs Python 3.11)"
)


def build(kind: str, **more: Any) -> Any:
    """Two layers of width 32, seeded and without dropout."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    import transformers as hf

    torch.manual_seed(5)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "use_cache": False}
    if kind == "gpt2":
        own = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY, "use_cache": False}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**own, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **more))
    if kind == "bert":
        own = {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}
        return hf.BertForMaskedLM(hf.BertConfig(**sizes | own | more))
    if kind == "qwen":
        own = {"num_key_value_heads": 1, "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes | own | more))
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes | {"num_key_value_heads": 2} | more))


def inputs(number: int, form: str, kind: str = "llama") -> dict[str, torch.Tensor]:
    """One micro-batch: plain, "packed" or "padded"; some labels do not count."""
    generator = torch.Generator().manual_seed(100 + number)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    found = {"input_ids": tokens, "labels": tokens.clone()}
    found["labels"][:, : 3 + number % 5] = -100
    if form == "packed" and kind != "bert":  # which attends to all, whatever its positions
        found["position_ids"] = torch.cat([torch.arange(size) for size in DOCUMENTS]).expand(ROWS, -1)
    if form == "padded":
        found["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [21]])).long()
        found["labels"][found["attention_mask"] == 0] = -100
    return found


def plain(kind: str, form: str, data_ranks: int, steps: int = 2) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of one process; a step is the mean over the micro-batches of all data ranks."""
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, grads = [], []
    for step in range(steps):
        optimizer.zero_grad()
        batches = [inputs(step * data_ranks + rank, form, kind) for rank in range(data_ranks)]
        loss = sum(model(**each).loss for each in batches) / data_ranks
        loss.backward()
        losses.append(loss.item())
        grads.append({name: param.grad.clone() for name, param in model.named_parameters()})
        optimizer.step()
    return losses, grads


def settings(stage: int, cp: int, mode: str, **more: Any) -> dict[str, Any]:
    data_ranks = dist.get_world_size() // cp
    made = config(stage, data_ranks, micro=ROWS)
    made["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    made |= {"gradient_clipping": 0, "sequence_parallel_size": cp, "zero": {"context": {"mode": mode}}}
    for key, value in more.items():
        made[key] = {**made.get(key, {}), **value}
    return made


def check(kind: str, cp: int, mode: str, stage: int, form: str, more: dict[str, Any]) -> None:
    """Losses and gradients on this rank beside those of one process."""
    data_ranks = dist.get_world_size() // cp
    losses, grads = plain(kind, form, data_ranks)
    engine, *_ = zero.initialize(model=build(kind), config=settings(stage, cp, mode, **more))
    for step, (loss, whole) in enumerate(zip(losses, grads, strict=True)):
        found = engine(**inputs(step * data_ranks + dist.get_rank() // cp, form, kind)).loss
        engine.backward(found)
        mean = found.detach().clone()
        dist.all_reduce(mean)
        assert abs(mean.item() / dist.get_world_size() - loss) <= 1e-6 * loss, (mode, stage, form, more)
        for name, param in engine.module.named_parameters():
            mine = safe_get_full_grad(param)
            assert (mine - whole[name]).abs().max() <= 1e-6, (name, mode, stage, form, more)
        engine.step()
    engine.destroy()


BLOCKS = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block", "qwen": "Qwen2DecoderLayer", "bert": "BertLayer"}
MORE: list[dict[str, Any]] = [
    {},
    {"zero": {"recompute": {}}},
    {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
]


def several(kind: str, cp: int) -> None:
    """Every mode on every stage, with each form and each setting beside them in turn."""
    settings_in_turn, forms = itertools.cycle(MORE), itertools.cycle(["plain", "packed", "padded"])
    for stage, mode in itertools.product(range(4), ("ring", "ulysses")):
        more = next(settings_in_turn)
        more = {key: value for key, value in more.items() if stage or key != "zero_optimization"}
        given = copy.deepcopy(more)
        if "zero" in given:
            given["zero"] = {"context": {"mode": mode}, "recompute": {"modules": [BLOCKS[kind]]}}
        check(kind, cp, mode, stage, next(forms), given)
        next(forms) if stage % 2 else None


@needs_transformers
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "kind", ["llama", "bert", *(pytest.param(each, marks=pytest.mark.long) for each in ("gpt2", "qwen"))]
)
def test_two_ranks_train_as_one_process(kind: str) -> None:
    several(kind, 2)


@needs_transformers
@pytest.mark.long
@pytest.mark.ranks(4)
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen", "bert"])
def test_four_ranks_train_as_one_process(kind: str, cp: int) -> None:
    several(kind, cp)


@needs_transformers
@pytest.mark.ranks(2)
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
@pytest.mark.ranks(2)
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
@pytest.mark.ranks(2)
def test_deepspeed_7672_key_heads_that_are_fewer_than_the_ranks_have_the_gradients_of_one_process() -> None:
    """There a single key head that ranks share got a part of its gradient."""
    check("qwen", 2, "ulysses", 3, "plain", {})


class Lines(nn.Module):
    """A model of the user's own: positions, attention, a head; the loss outside of it, or of `targets`."""

    def __init__(self, own: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.place = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.mix, self.head, self.own = nn.Linear(16, 48), nn.Linear(16, VOCABULARY), own

    def forward(self, tokens: torch.Tensor, targets: Any = None, position_ids: Any = None) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])[None] if position_ids is None else position_ids
        hidden = self.embed(tokens) + self.place(places)
        query, key, value = self.mix(hidden).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        if self.own:
            seen = zero.attention(query, key, value)
        else:
            with zero.shared_attention():
                seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits = self.head(hidden + seen.transpose(1, 2).flatten(2))
        return logits if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_models_of_the_user_s_own(mode: str) -> None:
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    targets[:, 20:] = -100
    for own in (True, False):
        wanted = Lines()(tokens, targets)
        engine, *_ = zero.initialize(model=Lines(own), config=settings(3, 2, mode))
        loss = engine(tokens, targets)
        assert abs(loss - wanted) < 1e-6
        engine.backward(loss)
        engine.step()
        whole = torch.zeros(ROWS, 32, dtype=torch.long)  # no multiple of the ranks would need targets
        logits = engine(whole)
        assert logits.shape == (ROWS, 16, VOCABULARY)
        places = cut_sequence(engine, torch.arange(32)[None])
        rank = dist.get_rank()
        own = [*range(8 * rank, 8 * rank + 8), *range(24 - 8 * rank, 32 - 8 * rank)]
        assert places.tolist() == [own if mode == "ring" else [*range(16 * rank, 16 * rank + 16)]]
        engine.destroy()


@needs_transformers
@pytest.mark.ranks(2)
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
@pytest.mark.ranks(2)
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
@pytest.mark.ranks(2)
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
@pytest.mark.ranks(2)
def test_the_engine_s_own_check_compares_with_whole_sequences() -> None:
    engine, *_ = zero.initialize(model=build("llama"), config=settings(1, 2, "ulysses"))
    assert engine.check(inputs(0, "packed"), steps=2, stages=(0, 3), accumulations=(1,))
    assert torch.isfinite(engine(**inputs(0, "packed")).loss)
    engine.destroy()


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Conv1d(4, 4, 3)

    def forward(self, tokens: torch.Tensor, position_ids: Any = None) -> torch.Tensor:
        return tokens


class Counting(Lines):
    """It counts positions by itself."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(tokens)


class GatedDeltaNet(Convolved):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.zeros(4))


@pytest.mark.ranks(2)
def test_models_that_cannot_are_named_before_the_first_step() -> None:
    refused = [
        (Convolved(), r"'mixer', a Conv1d, convolves along the sequence"),
        (GatedDeltaNet(), r"a GatedDeltaNet, carries a state along the sequence"),
        (nn.LSTM(4, 4), r"an? LSTM, carries a state"),
        (Counting(), r"Counting.forward takes no position_ids, so each rank would count"),
    ]
    for model, text in refused:
        with pytest.raises(ValueError, match=text):
            zero.initialize(model=model, config=settings(1, 2, "ring"))
    for made, text in [
        ({"sequence_parallel_size": 3}, "sequence_parallel_size: got 3, wanted a divisor of world size 2: 1, 2"),
        ({"zero": {"context": {"mode": "stripes"}}}, "zero.context.mode: got 'stripes'"),
    ]:
        with pytest.raises(zero.ConfigError, match=text):
            zero.initialize(model=Lines(), config=settings(1, 2, "ring") | made)


@needs_transformers
@pytest.mark.ranks(2)
def test_models_of_transformers_that_cannot_are_named() -> None:
    import transformers as hf

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    classes = hf.BertForSequenceClassification(hf.BertConfig(**sizes, intermediate_size=48))
    for model, text in [
        (classes, r"has the loss 'ForSequenceClassification', which is of whole sequences"),
        (build("llama", output_attentions=True, attn_implementation="eager"), r"config has output_attentions"),
    ]:
        with pytest.raises(ValueError, match=text):
            zero.initialize(model=model, config=settings(1, 2, "ring"))
    engine, *_ = zero.initialize(model=build("llama", attention_dropout=0.1), config=settings(1, 2, "ring"))
    batch = inputs(0, "plain")
    with pytest.raises(ValueError, match=r"dropout 0.1 inside of it; set it to 0 in the model's config"):
        engine(**batch)
    engine.eval()
    assert torch.isfinite(engine(**batch).loss)
    with pytest.raises(ValueError, match="output_attentions needs all scores on one rank"):
        engine(**batch, output_attentions=True)
    with pytest.raises(ValueError, match="attention_mask of 4 dimensions"):
        engine(**batch, attention_mask=torch.ones(ROWS, 1, LENGTH, LENGTH))
    with pytest.raises(ValueError, match="30 positions are no multiple of 4, and no argument is called labels"):
        engine(input_ids=batch["input_ids"])
    engine.destroy()


@pytest.mark.ranks(2)
def test_ranks_that_were_given_different_samples_are_named() -> None:
    engine, *_ = zero.initialize(model=Lines(), config=settings(1, 2, "ring"))
    tokens = torch.full((ROWS, 8), dist.get_rank())
    with pytest.raises(RuntimeError, match=r"ranks 0, 1 share one sequence, and 1 were given another batch than 0"):
        engine(tokens, tokens)
    engine.destroy()


@pytest.mark.ranks(2)
def test_a_model_whose_attention_stays_on_its_piece_is_named() -> None:
    class Deaf(Lines):
        def forward(self, tokens: torch.Tensor, targets: Any = None, position_ids: Any = None) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), targets.flatten())

    engine, *_ = zero.initialize(model=Deaf(), config=settings(1, 2, "ring"))
    tokens = torch.zeros(ROWS, 8, dtype=torch.long)
    with pytest.raises(RuntimeError, match=r"no attention of Deaf has seen the whole sequence; let it call zero\.att"):
        engine(tokens, tokens)
    engine.destroy()


@needs_transformers
@pytest.mark.ranks(2)
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
@pytest.mark.ranks(2)
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
