"""The promise: a model built under `zero.Init` may be copied, and in a later block changed, as a plain one."""

from __future__ import annotations

import copy

import pytest
import torch
from built_models import build
from models import WIDTH, make_net
from test_init import same, values
from torch import nn

import zero
from zero.core import comm
from zero.core.owner import is_released


@pytest.mark.ranks(2)
def test_a_copy_is_cut_in_the_same_way():
    """Nothing is sent for it, what is tied stays tied, and its values are its own."""
    with zero.Init():
        model = build("tied").requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "gather", None)
        copied = copy.deepcopy(model)
    assert all(is_released(param) for param in copied.parameters())
    assert not same(copied, model)
    with zero.GatheredParameters(copied.parameters(), modifier_rank=0):
        copied.embed.weight.fill_(1)
    assert not same(model, build("tied").requires_grad_(False))
    assert values(copied)["head.weight"].eq(1).all()


def change(model: nn.Module) -> nn.Module:
    """What scripts do to a model before they train it: another head, a larger embedding, a norm of a weight."""
    model.head = copy.deepcopy(model.head)
    model.embed.weight.data = torch.cat([model.embed.weight.data, torch.randn(3, WIDTH)])
    scale = nn.Parameter(model.blocks[0].up.weight.norm(dim=1))
    model.blocks[0].register_parameter("scale", scale)
    model.blocks[1].up.weight.data.mul_(2)
    return model.requires_grad_(False)


@pytest.mark.ranks(2)
def test_a_later_block_changes_a_model_as_plain_torch_does():
    wanted = make_net()
    torch.manual_seed(3)
    change(wanted)
    with zero.Init():
        model = make_net()
    torch.manual_seed(3)
    with zero.Init(dtype=torch.bfloat16):
        change(model)
    assert all(is_released(param) for param in model.parameters())
    read = {"blocks.0.up.weight", "blocks.0.scale", "blocks.1.up.weight", "head.weight", "head.bias", "embed.weight"}
    found = values(model)
    for name, value in values(wanted).items():
        assert found[name].equal(value.to(found[name].dtype)), name
        assert (found[name].dtype == torch.bfloat16) == (name in read), name


@pytest.mark.ranks(2)
def test_parameters_that_are_put_in_place_of_empty_ones_are_cut():
    """As Diffusers loads by default: Accelerate makes each parameter anew, on meta, from its attributes."""
    accelerate = pytest.importorskip("accelerate")
    wanted = make_net()
    with zero.Init():
        with accelerate.init_empty_weights():
            model = make_net()
        for (name, param), value in zip(list(model.named_parameters()), wanted.parameters(), strict=True):
            assert param.is_meta
            path, _, name = name.rpartition(".")
            model.get_submodule(path)._parameters[name] = nn.Parameter(value.detach().clone())  # registers nothing
    assert all(is_released(param) for param in model.parameters())
    assert not same(model, wanted)
