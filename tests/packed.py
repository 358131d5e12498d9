"""Models whose frozen layers are in 4 or 8 bits: by bitsandbytes, or by a small stand-in with its classes and names.

The stand-in has what zero and its users see of bitsandbytes: which attributes there are and when they move, that the
graph holds the packed weight itself, and the names in a state_dict. Its 4-bit values are 16 equal steps.
"""

from __future__ import annotations

import json
import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH = 128


class QuantState:
    """Scales of blocks of 64: fp32, or nested: 8 bits of what they are above `offset`, by `state2`."""

    def __init__(self, absmax: Any, shape: Any, code: Any, dtype: Any, offset: Any = None, state2: Any = None) -> None:
        self.absmax, self.shape, self.code, self.dtype = absmax, shape, code, dtype
        self.quant_type, self.blocksize, self.offset, self.state2 = "nf4", 64, offset, state2
        self.nested = state2 is not None

    def to(self, device: Any) -> None:
        self.absmax, self.code = self.absmax.to(device), self.code.to(device)

    def as_dict(self) -> dict[str, torch.Tensor]:
        said: dict[str, Any] = {"shape": list(self.shape), "dtype": str(self.dtype)}
        found = {"absmax": self.absmax, "quant_map": self.code}
        if self.nested:
            said["nested_offset"] = self.offset.item()
            found |= {"nested_absmax": self.state2.absmax, "nested_quant_map": self.state2.code.clone()}
        text = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
        return {**found, "quant_state.bitsandbytes__nf4": text}

    @classmethod
    def from_dict(cls, entries: dict[str, torch.Tensor], device: Any) -> QuantState:
        there = {name.rpartition(".")[2]: value for name, value in entries.items()}
        said = json.loads(bytes(there["bitsandbytes__nf4"].tolist()))
        offset = state2 = None
        if "nested_absmax" in there:
            offset = torch.tensor(said["nested_offset"])
            state2 = types.SimpleNamespace(absmax=there["nested_absmax"], code=there["nested_quant_map"])
        dtype = getattr(torch, said["dtype"].removeprefix("torch."))
        return cls(there["absmax"], torch.Size(said["shape"]), there["quant_map"], dtype, offset, state2)

    def scales(self) -> torch.Tensor:
        if not self.nested:
            return self.absmax
        rows = self.state2.code[self.absmax.int()].view(-1, 256)
        return (rows * self.state2.absmax[:, None]).view(-1) + self.offset


class Params4bit(nn.Parameter):
    def __new__(cls, data: Any, requires_grad: bool = False, module: Any = None, **more: Any) -> Params4bit:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.compress_statistics, made.quant_storage = more["compress_statistics"], torch.uint8
        made.blocksize, made.quant_type, made.bnb_quantized = 64, "nf4", False
        made.quant_state, made.module = None, module
        return made

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is None or self.bnb_quantized:
            return self
        values = self.data.to(device)
        blocks = values.float().reshape(-1, 64)
        absmax, code = blocks.abs().amax(1), torch.linspace(-1, 1, 16)
        steps = ((blocks / absmax[:, None] + 1) * 7.5).round().to(torch.uint8).view(-1, 2)
        offset = state2 = None
        if self.compress_statistics:
            offset = absmax.mean()
            blocks = (absmax - offset).view(-1, 256)
            widest = blocks.abs().amax(1, keepdim=True)
            state2 = types.SimpleNamespace(absmax=widest.view(-1), code=torch.linspace(-1, 1, 256))
            absmax = ((blocks / widest + 1) * 127.5).round().to(torch.uint8).view(-1)
        self.data = (steps[:, :1] << 4) | steps[:, 1:]
        self.quant_state = QuantState(absmax, values.shape, code, values.dtype, offset, state2)
        self.module.quant_state, self.bnb_quantized = self.quant_state, True
        return self


class _Linear4bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, state: QuantState) -> torch.Tensor:
        ctx.packed, ctx.state = packed.view(-1, 1), state  # past `save_for_backward`, as there
        return functional.linear(x, _dequantized(packed, state).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ _dequantized(ctx.packed, ctx.state).to(grad.dtype), None, None


def _dequantized(packed: torch.Tensor, state: QuantState) -> torch.Tensor:
    steps = torch.cat([packed >> 4, packed & 15], 1).int()
    return (state.code[steps].view(-1, 64) * state.scales()[:, None]).view(state.shape)


class Linear4bit(nn.Linear):
    def __init__(self, inputs: int, outputs: int, bias: bool, compress_statistics: bool = True, **_: Any) -> None:
        super().__init__(inputs, outputs, bias)
        self.weight = Params4bit(self.weight.data, module=self, compress_statistics=compress_statistics)
        self.quant_state = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Linear4bit.apply(x, self.weight, self.weight.quant_state)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight.quant_state is not None:
            for name, value in self.weight.quant_state.as_dict().items():
                destination[f"{prefix}weight.{name}"] = value


class Int8Params(nn.Parameter):
    def __new__(cls, data: Any, requires_grad: bool = False) -> Int8Params:
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.CB = made.SCB = None
        made.has_fp16_weights = False
        return made

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._nn._parse_to(*args, **kwargs)[0] is not None and self.dtype != torch.int8:
            rows = self.data.float().abs().amax(1)
            self.data = self.CB = (self.data / rows[:, None] * 127).round().to(torch.int8)
            self.SCB = rows
        return self


class _Linear8bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, state: Any) -> torch.Tensor:
        ctx.state = state
        return x @ _of_rows(state).to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ _of_rows(ctx.state).to(grad.dtype), None, None


def _of_rows(state: Any) -> torch.Tensor:
    return state.CB * (state.SCB[:, None] / 127)


class Linear8bitLt(nn.Linear):
    def __init__(self, inputs: int, outputs: int, bias: bool = True, **_: Any) -> None:
        super().__init__(inputs, outputs, bias)
        self.weight, self.state = Int8Params(self.weight.data), types.SimpleNamespace(CB=None, SCB=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB, self.weight.CB, self.weight.SCB = self.weight.CB, self.weight.SCB, None, None
        out = _Linear8bit.apply(x, self.weight, self.state)
        self.weight.data = self.state.CB
        return out

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}SCB"] = self.weight.SCB if self.weight.SCB is not None else self.state.SCB


def library(real: bool) -> Any:
    """The layers: those of bitsandbytes, or the stand-ins."""
    if not real:
        return types.SimpleNamespace(Linear4bit=Linear4bit, Linear8bitLt=Linear8bitLt)
    import bitsandbytes

    return bitsandbytes.nn


class Block(nn.Module):
    """Two frozen layers in the format, and a trained adapter beside each."""

    def __init__(self, form: str, real: bool) -> None:
        super().__init__()
        made, nested = library(real), form.endswith("-nested")
        kind = form.removesuffix("-nested")

        def frozen(inputs: int, outputs: int) -> nn.Module:
            if kind == "int8":
                return made.Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False)
            return made.Linear4bit(inputs, outputs, bias=False, quant_type=kind, compress_statistics=nested)

        self.up, self.down = frozen(WIDTH, 2 * WIDTH), frozen(2 * WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) + self.second(self.first(x))


class Net(nn.Module):
    """Blocks in a format of `library(real)`, and a mean of squares as its loss."""

    def __init__(self, form: str, real: bool = False, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(form, real) for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, 1, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()
