"""The promise: each parameter group trains with its own settings of now, in the dtype that its parameters have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import allowed, error, twice
from models import batch, config, make_net, step
from oracle import Training, backward, exact, limits, train
from torch import nn

import zero


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """Three groups with their own lr, decay and betas."""
    norms = [param for name, param in net.named_parameters() if "norm" in name or name.endswith("bias")]
    head = [net.head.weight]
    rest = [param for param in net.parameters() if not any(param is each for each in norms + head)]
    return [
        {"params": rest},
        {"params": norms, "weight_decay": 0.0, "lr": 3e-3},
        {"params": head, "betas": (0.5, 0.9), "eps": 1e-6},
    ]


def change(groups: list[dict[str, Any]], step: int) -> None:
    """What a user does between steps."""
    if step == 1:
        groups[0]["lr"] = 5e-3
        groups[1]["weight_decay"] = 0.3
    if step == 2:
        groups[2]["betas"] = (0.8, 0.95)


def engine_run(stage: int, client: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """`client`: the user's own optimizer, whose own groups are changed, not the engine's."""
    net = make_net(blocks=2)
    net.embed.to(dtype)  # a model of two dtypes under compute fp32 keeps both
    net.embed.register_forward_hook(lambda module, args, output: output.float())
    own = adamw_of_groups(net)
    given = {"optimizer": own} if client else {"model_parameters": groups_of(net)}
    engine = zero.initialize(model=net, config=config(stage, 2), **given)[0]
    for number in range(4):
        change((own if client else engine.optimizer).param_groups, number)
        step(engine, number)
    engine.destroy()
    return [param.detach().clone() for param in net.parameters()]


def micro(half: bool) -> Any:
    """With `half` the embedding is read, and its gradient made, in bf16; its master stays as it is."""

    def run(net: Any, number: int, rank: int, world: int, factor: float) -> torch.Tensor:
        tokens, targets = (each[2 * rank : 2 * rank + 2] for each in batch(number, 2 * world))
        embed = net.embed.weight.bfloat16() if half else net.embed.weight
        x = nn.functional.embedding(tokens, embed).to(net.head.weight.dtype)
        for block in net.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(net.head(net.norm(x)).flatten(0, 1), targets.flatten())
        return backward(loss, factor)

    return run


def adamw_of_groups(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(net), lr=1e-2, weight_decay=0.1)


def all_runs(client: bool) -> list[list[list[torch.Tensor]]]:
    return [[engine_run(stage, client, dtype) for stage in (0, 2, 3)] for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("client", [False, True], ids=["json", "client"])
def test_groups_keep_their_settings_and_take_new_ones(pool, client):
    training = Training(
        2,
        4,
        build=lambda: make_net(blocks=2),
        micro=micro(False),
        optimizer=adamw_of_groups,
        before_step=lambda optimizer, step: change(optimizer.param_groups, step),
    )
    truth = list(exact(training).params.values())
    limit_half = allowed(truth, *twice(lambda: train(training._replace(micro=micro(True)), "fp32").params.values()))
    for runs, mixed in pool.run(2, all_runs, client):
        for same in (runs, mixed):
            assert all(all(map(torch.equal, run, same[0])) for run in same)
        assert error(runs[0], truth) <= limits(training, "fp32")[1]
        assert [param.dtype for param in mixed[0]] == [torch.bfloat16, *[torch.float32] * (len(truth) - 1)]
        assert error(mixed[0][1:], truth[1:]) <= limit_half


def test_a_parameter_in_two_groups_is_named():
    net = make_net()
    groups = [{"params": net.parameters()}, {"params": [net.head.bias]}]
    with pytest.raises(ValueError, match=r"model_parameters: parameter 'head.bias' is in groups 0 and 1"):
        zero.initialize(model=net, model_parameters=groups, config=config(0, 1))


def test_pairs_of_a_name_and_a_parameter_are_taken_as_torch_takes_them():
    found = []
    for pairs in (False, True):
        net = make_net()
        given = list(net.named_parameters()) if pairs else list(net.parameters())
        groups = [{"params": given[:3], "lr": 0.5}, {"params": given[3:]}]
        for params in (given, groups):
            engine, *_ = zero.initialize(model=net, model_parameters=params, config=config(2, 1))
            found.append([len(group["params"]) for group in engine.optimizer.param_groups] + [engine.get_lr()])
            engine.destroy()
    assert found[:2] == found[2:]


def test_groups_that_are_empty_or_frozen_are_left_out():
    net = make_net()
    net.embed.requires_grad_(False)
    rest = [param for param in net.parameters() if param.requires_grad]
    groups = [{"params": []}, {"params": list(net.embed.parameters())}, {"params": rest, "lr": 0.5}]
    assert zero.initialize(model=net, model_parameters=groups, config=config(0, 1))[0].get_lr() == [0.5]
    net = make_net()
    client = torch.optim.SGD([{"params": []}, {"params": net.parameters(), "lr": 0.25}], lr=1.0)
    engine = zero.initialize(model=net, optimizer=client, config=config(0, 1))[0]
    assert engine.get_lr() == [0.25]
    step(engine, 0)
    assert engine.was_step_applied()


def test_what_shards_cannot_do_is_said():
    engine = zero.initialize(model=make_net(), config=config(0, 1))[0]
    optimizer = engine.optimizer
    with pytest.raises(RuntimeError, match=r"add_param_group\(\): the parameters are cut into units"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(RuntimeError, match=r"optimizer.state_dict\(\): each rank has a shard"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"optimizer.load_state_dict\(\): each rank has a shard"):
        optimizer.load_state_dict({})


def test_rates_and_attributes_that_users_read():
    engine = zero.initialize(model=make_net(), config=config(0, 1, accumulation=2))[0]
    engine.optimizer.set_lr(0.125)
    assert engine.get_lr() == engine.optimizer.get_lr() == [0.125]
    assert engine.basic_optimizer is engine.optimizer
    assert (engine.mp_world_size, engine.seq_dp_world_size, engine.dp_world_size) == (1, 1, 1)
    ranks = (engine.get_data_parallel_rank(), engine.get_model_parallel_rank(), engine.get_tensor_parallel_rank())
    assert ranks == (0, 0, 0)
    assert engine.param_names[engine.module.head.bias] == "head.bias"
    for number in range(4):
        step(engine, number)
    assert engine.gas_boundary_ctr == 2
