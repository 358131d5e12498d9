"""Models whose constructors treat parameters in every way that is common, for tests of `zero.Init`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from models import Net
from torch import nn


class Tied(nn.Module):
    """A head that shares the embedding's weight, tied late, after both were complete."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.other = nn.Linear(6, 11)
        self.head.weight = self.embed.weight
        self.other.weight = self.head.weight


class ByHand(nn.Module):
    """Parameters made by hand around children, and initialised long after."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(5, 7))
        self.child = nn.Linear(7, 7)
        self.register_parameter("nothing", None)
        self.late = nn.Parameter(torch.randn(3))
        self.register_buffer("mask", torch.rand(4))
        self.register_buffer("scale", self.child.weight.detach().abs().mean())
        self.norm = nn.BatchNorm1d(7)
        nn.init.orthogonal_(self.first)
        self.last = nn.Parameter(self.first.detach().clone() * 2 + self.late.sum())
        self.empty = nn.Parameter(torch.empty(0))
        self.scalar = nn.Parameter(torch.rand(()))


class Applied(nn.Module):
    """Initialised by `apply`, twice, and then in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(blocks=2)
        self.apply(self._init)
        self.apply(self._init)
        for name, param in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(param, std=0.02 / 2)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.1)


class Containers(nn.Module):
    """Every container, also those that are filled late."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ModuleList([nn.Linear(3, 4) for _ in range(3)])
        self.listed.append(nn.Linear(4, 3))
        self.listed.insert(0, nn.Linear(2, 2))
        self.row = nn.Sequential(*[nn.Conv1d(3, 3, 2) for _ in range(2)], nn.Sequential(nn.GroupNorm(1, 3)))
        self.named = nn.ModuleDict({"a": nn.Bilinear(2, 3, 4)})
        self.params = nn.ParameterList([nn.Parameter(torch.randn(2, i)) for i in (1, 2)])
        self.params.append(nn.Parameter(torch.randn(3)))
        self.dict = nn.ParameterDict({"x": nn.Parameter(torch.randn(4))})


class Frozen(nn.Module):
    """Frozen parameters, parts in other precisions, integers that can be cut and integers that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.half = nn.Linear(5, 5).to(torch.bfloat16)
        self.double = nn.Linear(5, 5).double().requires_grad_(False)
        self.codes = nn.Parameter(torch.randint(-9, 9, (7,), dtype=torch.int8), requires_grad=False)
        self.long = nn.Parameter(torch.arange(3), requires_grad=False)
        self.adapter = nn.Linear(5, 2)
        self.adapter.bias.requires_grad = False
        self.changed = nn.Linear(4, 4)
        self.changed.half()


class Library(nn.Module):
    """What torch builds itself: copies of layers, fused weights, recurrent weights, parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2)
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4)
        self.lstm = nn.LSTM(3, 4, num_layers=2)
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
        self.clone = copy.deepcopy(self.lstm)


class Data(nn.Module):
    """Writes that go around autograd, through views kept for later, and from one parameter to another."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        kept = self.a.weight.data
        rows = self.a.bias.detach()[1:3]
        self.b = nn.Linear(4, 4)
        self.b.weight.data.copy_(self.a.weight.data)
        kept.mul_(3)
        rows.fill_(7)
        del kept, rows
        self.c = nn.Linear(4, 4)
        self.c.weight.data = torch.randn(4, 4)
        self.c.bias.data = self.c.bias.data.new_zeros(4)
        self.fused = nn.Linear(4, 12)
        with torch.no_grad():
            for part in self.fused.weight.chunk(3):
                nn.init.xavier_uniform_(part)
            self.fused.weight[0] = self.b.weight[1]
            self.fused.bias.view(3, 4).numpy()[1] = 5
        self.d = nn.Linear(4, 4)
        self.a.weight.data, self.d.weight.data = self.d.weight.data, self.a.weight.data.clone()
        self.reshaped = nn.Linear(4, 4)
        self.reshaped.weight.data = self.reshaped.weight.data[:2].clone()


class Together(nn.Module):
    """Functions that read the parameters of many modules at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        with torch.no_grad():
            everything = torch.cat([layer.weight.flatten() for layer in self.layers])
            stacked = torch.stack([layer.bias for layer in self.layers]).std()
            same = torch.equal(self.layers[0].weight, self.layers[1].weight)
        self.scale = nn.Parameter(everything.std() + stacked + float(same))
        vector = nn.utils.parameters_to_vector(self.layers.parameters())
        nn.utils.vector_to_parameters(vector.detach() * 0.5, self.layers.parameters())
        self.other = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.other.load_state_dict({name: value + 1 for name, value in self.layers.state_dict().items()})
        self.layers[0].weight = nn.Parameter(self.layers[1].weight @ self.layers[2].weight)
        # What is built and thrown away draws random numbers, too.
        self.out = nn.Linear(3, 3)
        self.out.weight = nn.Linear(3, 3).weight
        self.renewed = nn.Linear(3, 3)
        self.layers[1].requires_grad_(False)  # trained, it could not share memory with another
        self.renewed.weight = nn.Parameter(self.layers[1].weight, requires_grad=False)
        self.first = self.layers[3].weight.detach()


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "tied": Tied,
    "by hand": ByHand,
    "applied": Applied,
    "containers": Containers,
    "frozen": Frozen,
    "library": Library,
    "data": Data,
    "together": Together,
    "a single layer": lambda: nn.Linear(5, 3),
    "nothing": nn.Identity,
}


def build(name: str, seed: int = 5) -> nn.Module:
    """One of the models, with seeded weights."""
    torch.manual_seed(seed)
    return BUILDERS[name]()
