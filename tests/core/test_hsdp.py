"""HSDP and hpZ: however ranks share state and parameters, they train as stage 3 over all of them does.

Under the tree bit by bit; by default the sums of gradients are rounded in another order. What travels between groups
of ranks that share state, and between nodes, is counted.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import batch, config, make_net
from oracle import Training, near
from torch import nn

import zero
from zero.core import comm
from zero.utils import safe_get_full_grad, safe_set_full_fp32_param, safe_set_full_grad

SHARDS = (4, 2, 1)  # ranks that state is cut over, of four
STEPS = 4


def settings(stage: int, shard: int, reduce: str = "tree", bf16: bool = False, **more: Any) -> dict[str, Any]:
    """A JSON for four ranks; `shard` 0: hpZ, with nodes of two ranks."""
    found = config(
        stage,
        4,
        **{"gradient_clipping": 0.3, "bf16": {"enabled": bf16}, "zero": {"reduce": reduce}, **more},
    )
    if shard == 0:
        found["zero_optimization"]["zero_hpz_partition_size"] = 2
    elif shard < 4:
        found["zero"]["shard_size"] = shard
    return found


def step(engine: Any, number: int) -> tuple[float, float]:
    """Loss and norm of one step on this rank's part of the batch."""
    rank, micro = dist.get_rank(), 2
    tokens, targets = batch(number, 4 * micro)
    part = slice(rank * micro, (rank + 1) * micro)
    loss = engine(tokens[part], targets[part])
    engine.backward(loss)
    engine.step()
    return loss.item(), engine.get_global_grad_norm()


def weights(engine: Any) -> dict[str, torch.Tensor]:
    with zero.GatheredParameters(list(engine.module.parameters())):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def trained(stage: int, shard: int, reduce: str, bf16: bool) -> dict[str, Any]:
    engine, *_ = zero.initialize(model=make_net(), config=settings(stage, shard, reduce, bf16))
    mesh = engine._sharded.units[0].mesh
    values = [step(engine, number) for number in range(STEPS)]
    found = {"values": values, "params": weights(engine), "sizes": (mesh.shard.size, mesh.replica.size)}
    engine.destroy()
    return found


def on_all_meshes(reduce: str, bf16: bool, stages: tuple[int, ...]) -> dict[tuple[int, int], dict[str, Any]]:
    return {(stage, shard): trained(stage, shard, reduce, bf16) for stage in stages for shard in SHARDS}


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    same = all(torch.equal(first["params"][name], second["params"][name]) for name in second["params"])
    return same and first["values"] == second["values"]


@pytest.mark.parametrize(("bf16", "stages"), [(True, (1, 3)), *longer((True, (2, 3)), (False, (1, 2, 3)))])
def test_all_meshes_agree_bitwise_under_the_tree(pool, bf16, stages):
    for found in pool.run(4, on_all_meshes, "tree", bf16, stages):
        for (stage, shard), run in found.items():
            assert run["sizes"] == (shard, 4 // shard)
            assert equal(run, found[3, 4]), f"stage {stage}, state cut over {shard} ranks"


@pytest.mark.parametrize(("bf16", "stages"), [(False, (2, 3)), *longer((False, (1,)), (True, (1, 2, 3)))])
def test_all_meshes_are_as_near_to_the_truth_by_default(pool, bf16, stages):
    training = Training(4, STEPS, clipping=0.3)
    for found in pool.run(4, on_all_meshes, "ranks", bf16, stages):
        for run in found.values():
            assert near(run["params"], training, "bf16" if bf16 else "fp32")


# --- the norm -----------------------------------------------------------------------------------------------


def norms() -> list[tuple[float, float]]:
    """Per mesh and way to add up: the engine's norm, and that of all gradients put together, in fp64."""
    found = []
    for reduce, place in (("ranks", "none"), ("tree", "none"), ("ranks", "cpu")):
        for shard in SHARDS:
            wanted = settings(2, shard, reduce)
            wanted["zero_optimization"]["offload_optimizer"] = {"device": place}
            engine, *_ = zero.initialize(model=make_net(), config=wanted)
            tokens, targets = batch(0, 8)
            part = slice(dist.get_rank() * 2, dist.get_rank() * 2 + 2)
            engine.backward(engine(tokens[part], targets[part]))
            grads = [safe_get_full_grad(param).double() for param in engine.module.parameters()]
            engine.step()
            whole = math.sqrt(sum(grad.square().sum().item() for grad in grads))
            found.append((engine.get_global_grad_norm(), whole))
            engine.destroy()
    return found


def test_the_norm_counts_each_element_once_on_any_mesh(pool):
    for found in pool.run(4, norms):
        for ours, whole in found:
            assert abs(ours - whole) <= 1e-12 * whole


# --- checkpoints --------------------------------------------------------------------------------------------


def moved(folder: str, save: int, load: int, bf16: bool, stage: int = 3) -> list[bool]:
    """Train two steps on one mesh, save, and go on with two on another: as two more on the first."""
    engine, *_ = zero.initialize(model=make_net(), config=settings(stage, save, bf16=bf16))
    for number in range(2):
        step(engine, number)
    engine.save_checkpoint(folder)
    wanted = [step(engine, number) for number in range(2, 4)], weights(engine)
    engine.destroy()
    engine, *_ = zero.initialize(model=make_net(seed=8), config=settings(stage, load, bf16=bf16))
    engine.load_checkpoint(folder)
    found = [step(engine, number) for number in range(2, 4)], weights(engine)
    engine.destroy()
    return [found[0] == wanted[0], all(torch.equal(found[1][name], wanted[1][name]) for name in wanted[1])]


MOVES = [(4, 2), (2, 1), (1, 4), (2, 4), (4, 1), (1, 2), (2, 0), (0, 1)]  # 0: hpZ
SHORT = [(4, 2, False), (2, 1, True), (1, 4, False), (2, 0, True)]


@pytest.mark.parametrize(
    ("save", "load", "bf16"),
    [*SHORT, *longer(*((*move, bf16) for move in MOVES for bf16 in (False, True) if (*move, bf16) not in SHORT))],
)
def test_checkpoints_go_from_any_mesh_to_any_other(pool, tmp_path, save, load, bf16):
    assert pool.run(4, moved, str(tmp_path), save, load, bf16) == [[True, True]] * 4


@pytest.mark.parametrize(("stage", "save", "load"), [(1, 4, 2), (2, 2, 4), *longer((1, 2, 1), (2, 1, 2), (1, 1, 4))])
def test_checkpoints_of_whole_parameters_go_from_mesh_to_mesh(pool, tmp_path, stage, save, load):
    assert pool.run(4, moved, str(tmp_path), save, load, False, stage) == [[True, True]] * 4


# --- what is sent -------------------------------------------------------------------------------------------


def sent(shard: int) -> Counter:
    """What this rank sends in one step, by (inside a pair of ranks or between, direction of the message)."""
    engine, *_ = zero.initialize(model=make_net(), config=settings(3, shard))
    step(engine, 0), step(engine, 1)  # the order of the units is known then
    counted, send = Counter(), dist.isend

    def count(tensor: torch.Tensor, group: Any, group_dst: int, tag: int) -> dist.Work:
        peer = dist.get_process_group_ranks(group)[group_dst]
        direction = ("gather", "reduce", "reduce")[(tag - comm.FIRST_TAG) % comm.TAGS % 3]
        where = "inside" if peer // 2 == dist.get_rank() // 2 else "between"
        counted[where, direction, "messages"] += 1
        counted[where, direction, "elements"] += tensor.numel()
        return send(tensor, group=group, group_dst=group_dst, tag=tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", count)
        step(engine, 2)
    units = engine._sharded.units
    counted["numel"], counted["units"] = sum(unit.plan.layout.numel for unit in units), len(units)
    engine.destroy()
    return counted


def test_only_sums_of_shards_travel_between_groups(pool):
    full, pairs = pool.run(4, sent, 4), pool.run(4, sent, 2)
    for all_ranks, two in zip(full, pairs, strict=True):
        numel, units = two["numel"], two["units"]
        assert two["between", "gather", "elements"] == 0, "parameters are gathered inside a group"
        # Of the rank's half of each gradient, half is sent to be summed, and the sum of the other half is sent back.
        assert two["between", "reduce", "elements"] == numel // 2
        assert two["between", "reduce", "messages"] == 2 * units
        assert all_ranks["between", "gather", "elements"] > 0
        assert all_ranks["between", "reduce", "elements"] == numel // 2  # two ranks' quarters


def test_between_nodes_each_unit_is_gathered_once_a_step(pool):
    stage3, hpz = pool.run(4, sent, 4), pool.run(4, sent, 0)
    for without, found in zip(stage3, hpz, strict=True):
        numel, units = found["numel"], found["units"]
        assert found["between", "gather", "messages"] == units
        assert found["between", "gather", "elements"] == numel // 4
        assert without["between", "gather", "elements"] > 2 * numel // 4, "to two ranks there, and for some units twice"
        assert found["inside", "gather", "elements"] >= numel // 2


# --- reports of others --------------------------------------------------------------------------------------


def llama() -> nn.Module:
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRANSFORMERS_VERBOSITY="error")
    import transformers as hf

    torch.manual_seed(5)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))


def reported(hpz: int, precision: dict[str, Any], offload: bool, checkpointing: bool) -> list[tuple[float, ...]]:
    """A llama as the reports train it: losses of six steps, of evaluations between them, and norms."""
    model = llama()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
    found = config(3, 4, gradient_clipping=1.0, **precision)
    found["zero_optimization"]["zero_hpz_partition_size"] = hpz
    if offload:
        place = {"device": "cpu", "pin_memory": True}
        found["zero_optimization"] |= {"offload_optimizer": place, "offload_param": place}
    engine, *_ = zero.initialize(model=model, config=found)
    values = []
    for number in range(6):
        generator = torch.Generator().manual_seed(10 * dist.get_rank() + number % 2)
        tokens = torch.randint(3, 64, (2, 12), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            after = engine(input_ids=tokens, labels=tokens).loss.item()
        engine.train()
        values.append((loss.item(), after, engine.get_global_grad_norm()))
    engine.destroy()
    return values


@pytest.mark.parametrize(
    ("precision", "offload", "checkpointing"),
    [
        # 5059: loss 0 from the third step on; 5030: no step ends
        ({"bf16": {"enabled": True}}, False, True),
        ({"bf16": {"enabled": True}}, True, False),  # 6926: the loss stays what it was, the norm 0
        ({"fp16": {"enabled": True, "initial_scale_power": 8}}, True, False),
    ],
    ids=["DeepSpeed 5059 and 5030", "DeepSpeed 6926 in bf16", "DeepSpeed 6926 in fp16"],
)
@pytest.mark.long
def test_what_others_report_of_hpz(pool, precision, offload, checkpointing):
    """DeepSpeed issues 5059 (zero loss), 5030 (hang) and 6926 (stuck loss), each as its reporter trains."""
    without = pool.run(4, reported, 1, precision, offload, checkpointing)
    found = pool.run(4, reported, 2, precision, offload, checkpointing)
    assert found == without, "hpZ changes no bit"
    for values in found:
        losses = [loss for loss, _, _ in values]
        assert losses[-2] < losses[0]
        assert losses[-1] < losses[1]
        assert all(loss > 0.1 and after > 0.1 and 0 < norm < math.inf for loss, after, norm in values)


# --- other features on a mesh -------------------------------------------------------------------------------


def with_others(shard: int, offload: bool) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Built under `zero.Init`, two micro-batches for a step, replicas compared at every step, a checked order."""
    wanted = settings(3, shard)
    wanted["gradient_accumulation_steps"], wanted["train_batch_size"] = 2, 16
    wanted["zero"] |= {"check_replicas": 1, "check_order": True, "recompute": {"modules": ["Block"]}}
    if offload:
        wanted["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    with zero.Init():
        model = make_net()
    engine, *_ = zero.initialize(model=model, config=wanted)
    values = [step(engine, number) for number in range(4)]
    found = weights(engine)
    engine.destroy()
    return values, found


@pytest.mark.parametrize("offload", [True, *longer(False)], ids=["offload", "device"])
def test_other_features_do_what_they_do_on_all_meshes(pool, offload):
    wanted = pool.run(4, with_others, 4, offload)
    for shard in (2, 1, 0) if not offload else (2, 0):
        for found, params in zip(pool.run(4, with_others, shard, offload), wanted, strict=True):
            assert found[0] == params[0]
            assert all(torch.equal(found[1][name], params[1][name]) for name in params[1])


def checked(shard: int) -> tuple[bool, str]:
    engine, *_ = zero.initialize(model=make_net(), config=settings(3, shard, "ranks"))
    report = engine.check([batch(dist.get_rank(), 2)], steps=2, stages=(0, 2, 3), accumulations=(1,))
    engine.destroy()
    return bool(report), str(report)


@pytest.mark.long
@pytest.mark.parametrize("shard", [2, *longer(0)], ids=["HSDP", "hpZ"])
def test_the_trust_check_runs_on_a_mesh(pool, shard):
    for good, text in pool.run(4, checked, shard):
        assert good, text


def refuse(module: Any, args: Any) -> None:
    raise ValueError("bad batch")


def failing(shard: int) -> str:
    """What this rank raises when rank 3 cannot run its forward."""
    engine, *_ = zero.initialize(model=make_net(), config=settings(3, shard))
    step(engine, 0)
    if dist.get_rank() == 3:
        engine.module.blocks[1].register_forward_pre_hook(refuse)
    with pytest.raises((RuntimeError, ValueError)) as error:
        step(engine, 1), step(engine, 2)
    return str(error.value)


@pytest.mark.parametrize("shard", [2, *longer(0)], ids=["HSDP", "hpZ"])
def test_a_rank_that_fails_is_named_in_all_groups(pool, shard):
    *others, own = pool.run(4, failing, shard)
    assert own == "bad batch"
    for text in others:
        assert "rank 3 raised ValueError: bad batch" in text


# --- values that are changed between steps ------------------------------------------------------------------


def changed(shard: int) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], list[list[float]]]:
    """Values written in every way that there is, by another rank than the first, with steps between."""
    engine, *_ = zero.initialize(model=make_net(), config=settings(3, shard))
    params = dict(engine.module.named_parameters())
    first, second, *_ = params.values()
    values, seen = [step(engine, 0)], []
    with zero.GatheredParameters(first, modifier_rank=3):
        if dist.get_rank() == 3:
            first.data.mul_(1.5)
    with zero.GatheredParameters(first):
        seen.append(first.flatten()[:3].tolist())
    values.append(step(engine, 1))
    safe_set_full_fp32_param(second, torch.full(second.shape, 0.25))
    with zero.GatheredParameters(second):
        seen.append(second.flatten()[:3].tolist())
    values.append(step(engine, 2))
    tokens, targets = batch(3, 8)
    part = slice(dist.get_rank() * 2, dist.get_rank() * 2 + 2)
    engine.backward(engine(tokens[part], targets[part]))
    safe_set_full_grad(first, torch.ones(first.shape))
    engine.step()
    engine.offload_states()
    engine.reload_states()
    values.append(step(engine, 4))
    found = values, weights(engine), seen
    engine.destroy()
    return found


def test_values_written_between_steps_reach_all_ranks(pool):
    wanted, params, seen = pool.run(4, changed, 4)[0]
    for shard in (2, 1, 0):
        for rank, (values, found, shown) in enumerate(pool.run(4, changed, shard)):
            assert all(torch.equal(found[name], params[name]) for name in params)
            assert shown == seen
            assert rank or values == wanted
