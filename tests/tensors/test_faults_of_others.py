"""What was wrong elsewhere where layers are cut over ranks, under the name of the report: here it is right.

Others stand beside what they are about: in test_plans.py, test_vocabulary_loss.py, test_random_and_recomputed.py,
test_checkpoints_of_grids.py, test_all_axes.py, and of Trainer and TRL in test_trainer_tensor_parallel.py.
"""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import WIDTH, Integers, family, full, integers, json_of, place_of, plain, trained, words
from marks import longer
from ranks import Pool, listening
from safetensors.torch import load_file
from sharing import needs_transformers
from torch import nn

import zero
from zero.plan.tensors import ranges_of, share_of
from zero.utils import safe_get_full_grad

pytestmark = pytest.mark.ranks(2)
CLOSE = 1e-6


def norm_of(grads: dict[str, torch.Tensor | None]) -> float:
    return float(sum(grad.double().square().sum() for grad in grads.values() if grad is not None)) ** 0.5


# -- the norm of gradients: each element of the whole model counts once


@pytest.mark.parametrize(("stage", "sequences"), [(0, False), (3, True), *longer((1, True), (2, False))])
def test_torchtune_2420_and_nemo_rl_3788_and_rocm_te_715_all_elements_count_once(stage: int, sequences: bool) -> None:
    """Copies of what is whole were counted by each rank, or what is cut by the first one alone."""
    json = json_of(2, stage, tensor_parallel={"sequence_parallel": sequences})
    found = trained(lambda: Integers(6, 3), json, integers, place_of(2))
    assert found["norms"][0] == pytest.approx(norm_of(plain(lambda: Integers(6, 3), integers)["grads"]), rel=1e-12)


@needs_transformers
@pytest.mark.parametrize("stage", [1, *longer(0, 2, 3)])
def test_megatron_5916_and_6489_parts_of_experts_count_on_all_ranks(stage: int) -> None:
    """Those of all ranks but the first were left out, and clipping was too weak."""
    make = functools.partial(family, "mixtral")
    grads = plain(make, words)["grads"]
    assert norm_of({name: grad for name, grad in grads.items() if "experts" in name}) > 0.01 * norm_of(grads)
    found = trained(make, json_of(2, stage), words, 0)
    assert found["norms"][0] == pytest.approx(norm_of(grads), rel=CLOSE)


def only_sinks() -> nn.Module:
    model = family("gpt_oss")
    for name, param in model.named_parameters():
        param.requires_grad_("sinks" in name)
    return model


@needs_transformers
def test_megatron_7452_08_sinks_of_heads_are_in_the_norm() -> None:
    wanted, found = norm_of(plain(only_sinks, words)["grads"]), trained(only_sinks, json_of(2, 2), words, 0)
    assert found["shapes"]["model.layers.0.self_attn.sinks"] == (2,)
    assert wanted > 1e-4 and found["norms"][0] == pytest.approx(wanted, abs=CLOSE)


@pytest.mark.parametrize("stage", [0, 3])
def test_accelerate_4219_and_transformers_48208_one_norm_and_optimizer_of_cut_and_whole(stage: int) -> None:
    """Some were DTensors there and others plain, and neither took both."""
    model, json = Integers(6, 3), json_of(2, stage, gradient_clipping=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(**integers(0, 0)).backward()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    optimizer.step()
    json["optimizer"] = {"type": "AdamW", "params": {"lr": 0.125, "weight_decay": 0.01}}
    found = trained(lambda: Integers(6, 3), json, integers, 0)
    assert total > 0.5 and found["norms"][0] == pytest.approx(total, rel=CLOSE)
    for name, param in model.named_parameters():
        assert (found["weights"][name] - param.detach()).abs().max() <= CLOSE, name


# -- gradients


@pytest.mark.parametrize("stage", [1, *longer(0, 2, 3)])
def test_deepspeed_7409_a_rank_that_trains_nothing_of_its_own_takes_part(stage: int) -> None:
    """A list of gradients was empty on some ranks, and the norm failed on its first element."""

    def make() -> nn.Module:
        model = Integers(6, 3).bfloat16()
        for name, param in model.named_parameters():
            param.requires_grad_(name == "blocks.1.first.weight")
        return model

    json = json_of(2, stage, bf16={"enabled": True})
    engine, *_ = zero.initialize(model=make(), config=json)
    batch = integers(0, 0)
    engine.backward(engine(**batch))
    grad = safe_get_full_grad(engine.module.blocks[1].first.weight).clone()
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(float(grad.double().norm()), rel=1e-12) and grad.any()
    before = make().get_parameter("blocks.1.first.weight").float()
    assert torch.equal(full(engine)["blocks.1.first.weight"], before - 0.125 * grad)
    engine.destroy()


@needs_transformers
@pytest.mark.parametrize(
    ("name", "part"), [("qwen3", "self_attn.q_norm"), ("deepseek_v2", "kv_a_proj_with_mqa"), ("deepseek_v2", "kv_a_la")]
)
def test_megatron_7452_11_and_torchtitan_1373_gradients_of_what_feeds_local_heads(name: str, part: str) -> None:
    """What is whole on all ranks, and read by the heads of each, had a part of its gradient."""
    make = functools.partial(family, name)
    found, wanted = trained(make, json_of(2, 1), words, 0), plain(make, words)
    names = [each for each in wanted["grads"] if part in each]
    assert len(names) == 2
    for each in names:
        assert found["shapes"][each] == tuple(wanted["grads"][each].shape), "it is whole"
        assert (found["grads"][each] - wanted["grads"][each]).abs().max() <= CLOSE
        assert wanted["grads"][each].abs().max() > 1e-4


class Halves(nn.Module):
    """A number that each of two ranks has a use of; the gradients are 1 on the first, and 1/1024 on the second."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)
        self.scale = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.up_proj.weight.fill_(1)
            self.scale.weight.fill_(1)
            self.down_proj.weight.copy_(torch.tensor([[1.0, 2.0**-10]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.scale.weight[0, 0] * self.up_proj(x)).sum()


@pytest.mark.parametrize("stage", [0, 3, *longer(1, 2)])
def test_pytorch_190626_parts_of_a_gradient_are_summed_in_fp32(stage: int) -> None:
    """In 16 bits, which they have on their ranks, the smaller one is lost."""
    rule = {"patterns": ["scale"], "partition_type": "skip", "grad_allreduce": True}
    section = {"partition_config": {"layer_specs": [rule]}}
    json = json_of(2, stage, bf16={"enabled": True}, tensor_parallel=section, communication_data_type="fp32")
    engine, *_ = zero.initialize(model=Halves(), config=json)
    engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16)))
    assert safe_get_full_grad(engine.module.scale.weight).item() == 1 + 2**-10
    engine.destroy()


def biased() -> Integers:
    """Only biases behind sums over ranks give anything."""
    model = Integers(tied=False)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(("o_proj.bias", "down_proj.bias")):
                param.fill_(1)
            elif name != "lm_head.weight":
                param.zero_()
    return model


@pytest.mark.parametrize("sequences", [False, True])
def test_torchtitan_2106_a_bias_behind_a_sum_is_added_once(sequences: bool) -> None:
    json = json_of(2, 1, tensor_parallel={"sequence_parallel": sequences})
    found, wanted = trained(biased, json, integers, 0), plain(biased, integers)
    assert found["losses"] == [wanted["loss"]] and wanted["loss"]
    for name in ("blocks.0.attn.o_proj.bias", "blocks.1.mlp.down_proj.bias"):
        assert torch.equal(found["grads"][name], wanted["grads"][name]) and wanted["grads"][name].any()


class Convolved(nn.Module):
    """A causal convolution along the sequence, which no rule cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 2, groups=WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(nn.functional.pad(x.transpose(1, 2), (1, 0))).transpose(1, 2)


class Around(nn.Module):
    """A linear attention without decay, all of which is whole: each token has the sum of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.mix(hidden_states).cumsum(1)


class Mixed(nn.Module):
    """The blocks of a model, with another part in front that reads earlier tokens."""

    def __init__(self, block: nn.Module, part: nn.Module) -> None:
        super().__init__()
        self.part, self.attn, self.mlp = part, block.attn, block.mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.part(x))
        return x + self.mlp(x)


def mixed(kind: type[nn.Module]) -> nn.Module:
    model = Integers(tied=False)
    generator = torch.Generator().manual_seed(8)
    for at, block in enumerate(model.blocks):
        model.blocks[at] = Mixed(block, kind())
        with torch.no_grad():
            for param in model.blocks[at].part.parameters():
                param.copy_(torch.randint(-1, 2, param.shape, generator=generator))
    return model


@pytest.mark.parametrize("kind", [Convolved, Around])
def test_parts_that_mix_tokens_see_all_of_a_sequence_that_is_cut_between_layers(kind: type[nn.Module]) -> None:
    """A fault of our own: what no rule cuts was given this rank's tokens alone, in Bamba and OLMo Hybrid, say."""
    json = json_of(2, 1, tensor_parallel={"sequence_parallel": True})
    make = functools.partial(mixed, kind)
    found, wanted = trained(make, json, integers, 0), plain(make, integers)
    assert found["losses"] == [wanted["loss"]]
    for name, grad in wanted["grads"].items():
        assert torch.equal(found["grads"][name], grad), name


# -- parts of unequal size, and what goes out of a model that is cut


@pytest.mark.ranks(0)
def test_pytorch_188947_uneven_parts_begin_where_the_one_before_ends() -> None:
    """Of 7 over 3 they began at 0, 2, 4, as if all were as large as the last."""
    for numel in range(3, 40):
        for ranks in range(1, min(numel, 8) + 1):
            parts = [ranges_of((numel,), share_of(numel, rank, ranks))[0] for rank in range(ranks)]
            assert [place for start, size in parts for place in range(start, start + size)] == [*range(numel)]
    assert [ranges_of((7,), share_of(7, rank, 3)) for rank in range(3)] == [[(0, 3)], [(3, 2)], [(5, 2)]]


def uneven() -> Integers:
    return Integers(6, 6, inner=7)


def consolidated(stage: int, folder: Path) -> dict[str, torch.Tensor]:
    """What a step leaves, and it is written to a file in two ways."""
    engine, *_ = zero.initialize(model=uneven(), config=json_of(dist.get_world_size(), stage))
    engine.backward(engine(**integers(0, 0)))
    engine.step()
    engine.save_16bit_model(folder, "model.safetensors")
    engine.save_16bit_model(folder, "model.bin")
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return state


def after_a_step() -> nn.Module:
    model = uneven()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    model(**integers(0, 0)).backward()
    optimizer.step()
    return model


@pytest.mark.parametrize(("world", "stage"), [(3, 3), *longer((2, 3), (4, 3), (3, 0))])
def test_deepspeed_8168_and_pytorch_188947_weights_go_out_whole(
    pool: Pool, tmp_path: Path, world: int, stage: int
) -> None:
    """Stage 3 over one rank, or parts of 7 over 3, were joined in the wrong places."""
    wanted = dict(after_a_step().named_parameters())
    state = pool.run(world, consolidated, stage, tmp_path)[0]
    for file in (load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "model.bin"), state):
        for name, value in wanted.items():
            assert torch.equal(file[name].float(), value), name


@pytest.mark.parametrize("world", [3, *longer(2, 4)])
def test_megatron_6500_a_tied_head_has_the_rows_of_its_embedding(pool: Pool, tmp_path: Path, world: int) -> None:
    """Slices of one were taken for those of the other; also on the ends of a pipeline, in test_all_axes.py."""
    pool.run(world, consolidated, 1, tmp_path)
    model = uneven()
    model.load_state_dict(torch.load(tmp_path / "model.bin"))
    assert model.lm_head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, after_a_step().embed.weight)
    assert model(**integers(1, 0)).item() == after_a_step()(**integers(1, 0)).item()


# -- what is reported


class Sink:
    def __init__(self) -> None:
        self.told: dict[str, float] = {}

    def write_events(self, events: Any) -> None:
        self.told |= {name: value for name, value, _ in events}


def reported() -> list[Any]:
    """The loss, gradients and lines of a step of micro-batches that count 1 + 10 x place tokens, twice."""
    json = json_of(2, 1, 2, zero={"mean": "tokens"}, steps_per_print=1)
    engine, *_ = zero.initialize(model=Integers(), config=json)
    place, sink = place_of(2), Sink()
    if not dist.get_rank():
        engine.monitor.add(sink)
    with listening(logging.INFO) as lines:
        for micro in range(2):
            engine.backward(engine(**integers(micro, place)), tokens=1 + 2 * place)
            grad = safe_get_full_grad(engine.module.blocks[0].mlp.up_proj.weight) if micro else None
            engine.step()
        samples = engine.global_samples
        engine.destroy()
    return [sink.told.get("Train/Samples/train_loss"), grad, lines, samples]


def test_trl_7100_tokens_and_samples_of_ranks_that_share_layers_count_once(pool: Pool) -> None:
    """Tokens were counted by each of them: in the rate, in the mean, in the number of samples."""
    model, total = Integers(), 0.0
    for place in range(2):
        for micro in range(2):
            loss = model(**integers(micro, place)) * (1 + 2 * place) / 8
            loss.backward()
            total += loss.item()
    found = pool.run(4, reported)
    assert found[0][0] == pytest.approx(total, rel=CLOSE)
    for _, grad, _, samples in found:
        assert torch.equal(grad, model.blocks[0].mlp.up_proj.weight.grad)
        assert samples == 2 * 2 * 2
    line = next(line for line in found[0][2] if "tokens/s" in line)
    rate, time = (float(each.replace(",", "")) for each in re.search(r"(\S+) tokens/s \| (\S+) ms/step", line).groups())
    assert rate * time / 1e3 == pytest.approx(8, rel=0.02)
