"""The promise: which parameters Muon updates follows from the model, can be said by hand, and is said in the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from models import config, make_net
from torch import nn

import zero
from zero.config.optimizers import MuonParams
from zero.optim.muon_groups import muon_groups


class Mixed(nn.Module):
    """Of each kind one, and no block."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.ones(4, 8))
        self.words = nn.Embedding(11, 8)
        self.filter = nn.Conv1d(8, 8, 3)
        self.patches = nn.Conv2d(3, 8, 4)
        self.hidden = nn.Linear(8, 8)
        self.experts = nn.Parameter(torch.ones(2, 8, 8))
        self.out = nn.Linear(8, 11, bias=False)


def chosen(model: nn.Module, groups: Any = None, **params: Any) -> list[str]:
    found = muon_groups(model, groups or [{"params": list(model.parameters())}], MuonParams(**params))
    names = {param: name for name, param in model.named_parameters()}
    assert sum(len(group["params"]) for group in found) == len(names)
    return [names[param] for group in found if group["use_muon"] for param in group["params"]]


def test_matrices_of_hidden_layers_are_muons():
    assert chosen(make_net(blocks=1)) == ["blocks.0.up.weight", "blocks.0.down.weight"]
    assert chosen(Mixed()) == ["experts", "hidden.weight"]


def test_the_head_is_the_last_layer_or_what_the_model_says():
    trunk = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(2)])})
    assert chosen(trunk) == ["blocks.0.weight", "blocks.1.weight"], "it has none"
    assert chosen(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) == ["0.weight"]
    model = Mixed()
    model.get_output_embeddings = lambda: model.hidden
    assert chosen(model) == ["experts", "out.weight"]
    model.out.weight = model.words.weight
    assert chosen(model) == ["experts"], "a tied one is an embedding"


def test_use_muon_decides():
    model = Mixed()
    model.hidden.weight.use_muon, model.out.weight.use_muon, model.patches.weight.use_muon = False, True, True
    assert chosen(model) == ["experts", "patches.weight", "out.weight"]
    groups = [{"params": [model.words.weight], "use_muon": True}]
    groups += [{"params": [param for name, param in model.named_parameters() if "words" not in name]}]
    assert chosen(model, groups)[0] == "words.weight"


def test_what_does_not_fit_is_refused():
    net = make_net()
    net.blocks[0].up.bias.use_muon = True
    with pytest.raises(ValueError, match=r"'blocks.0.up.bias' of shape \(25,\) is no matrix"):
        chosen(net)
    with pytest.raises(ValueError, match="no parameter is a matrix of a hidden layer"):
        chosen(nn.Linear(3, 3))
    settings = config(0, 1, optimizer={"type": "Muon", "params": {"split": {"*.up.weight": 2}}})
    with pytest.raises(ValueError, match=r"optimizer.params.split: 'blocks.0.up.weight' has 25 rows"):
        zero.initialize(model=make_net(), config=settings)
    settings["optimizer"]["params"]["split"] = {"*.qkv.weight": 3}
    with pytest.raises(ValueError, match=r"optimizer.params.split: '\*.qkv.weight' is the name of no parameter"):
        zero.initialize(model=make_net(), config=settings)
    with pytest.raises(ValueError, match="name it in the section 'optimizer' of the JSON"):
        zero.FusedOptimizer(make_net().parameters(), "Muon")


def test_the_log_says_which_rule_each_gets(caplog):
    with caplog.at_level(logging.INFO, logger="zero"):
        engine, *_ = zero.initialize(model=make_net(), config=config(0, 1, optimizer={"type": "Muon", "params": {}}))
    engine.destroy()
    assert (
        "Muon updates 6 parameters: 3 x blocks.*.up.weight, 3 x blocks.*.down.weight; AdamW updates 17 parameters: "
        "embed.weight, 3 x blocks.*.norm.weight, " in caplog.text
    )
