"""The other side of a check: the same training in plain torch, with no code of the core.

Nothing is cut. Gradients are summed in the order of ranks, averaged once, clipped by their norm in fp64, and a
class of `torch.optim` takes the step. Under 16-bit parameters it updates fp32 copies of them.

It may follow another run: its gradient is then that of the other's weights at each step, and its update that of the
other's gradient. So no difference grows from step to step, and none from a gradient to an update of Adam's.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zero.config import Config
from zero.config.optimizers import ARGUMENTS, LambParams, MuonParams, torch_reason
from zero.core.comm import local_device
from zero.core.micro_batches import Weighing, weighted
from zero.core.mixed_precision import DTYPES
from zero.core.quantized_params import format_of
from zero.data import Loader
from zero.data.loader import make_loader
from zero.engine.arguments import Groups, client_optimizer, parameter_groups
from zero.engine.check.places import Places
from zero.engine.check.runs import RunKind
from zero.engine.getters import DeepSpeedGetters
from zero.engine.metrics import Metrics, print_on_first
from zero.engine.status import Status
from zero.optim.make import torch_arguments
from zero.optim.muon_groups import muon_groups, rules_line

Values = dict[str, torch.Tensor]
_NUDGE = 1e-6  # of a gradient, to see whether the update makes more of it


class Step(NamedTuple):
    """Of one optimizer step, by name and on the CPU.

    grads:  the gradient of each trained parameter before it was clipped;
    params: the exact weights after the step;
    slack:  how far a gradient that is larger or smaller by 1e-6 moves them, where that was tried.
    """

    grads: Values
    params: Values
    slack: Values


class PlainEngine(DeepSpeedGetters, nn.Module):
    """What a training loop sees of the engine, over an unsharded module.

    masters: the exact weights by parameter name: what the optimizer updates where it does, else the parameter.
    """

    print = print_on_first
    training_dataloader = lr_scheduler = None  # until they are set
    no_sync = contextlib.nullcontext  # gradients are summed over the ranks at the boundary only

    def __init__(self, module: nn.Module, client: Any, model_parameters: Any, settings: Config, kind: RunKind) -> None:
        """As for `zero.initialize`; `client`: the script's optimizer; `settings` are those of the run."""
        super().__init__()
        self.device = device = local_device()
        self.module = module.to(device)
        there = dist.is_initialized()
        self.global_rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if there else (0, 1)
        self._places = Places(settings, device)
        self._metrics = Metrics(self._places.data, device)
        self._status = Status(None)
        self.last: Step | None = None
        self._config = settings
        self._nudged = kind is RunKind.NUDGED
        self._lead: Sequence[Step] | None = None
        self._boundary: bool | None = None
        self._norm: float | None = None
        self._sums: dict[nn.Parameter, torch.Tensor | None] = {}
        self._counts: list[float] = []  # of the micro-batches of the step
        self._weighing = Weighing(settings)
        for tensor in (*module.parameters(), *module.buffers()):
            if self.world_size > 1 and tensor.numel():
                dist.broadcast(tensor.data, 0)
        self.masters = self._make_masters(DTYPES[settings.compute_dtype])
        self.optimizer: Any = plain_optimizer(module, client, model_parameters, settings)
        if self.optimizer is not None:
            self._bind(self.optimizer)

    def _bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer of the module's parameters the masters in their place."""
        # The script's call is of a whole step, as with the engine; our own is of the class's.
        optimizer.step = types.MethodType(lambda _, closure=None: self.step(), optimizer)
        masters = {param: self.masters[name] for name, param in self.module.named_parameters()}
        for group in optimizer.param_groups:
            trained = [param for param in group["params"] if param.requires_grad]
            for param in trained:
                param.register_post_accumulate_grad_hook(self._take)
            self._sums |= dict.fromkeys(trained)
            group["params"] = [masters[param] for param in trained]

    def follow(self, lead: Sequence[Step]) -> None:
        """Take each step from the weights and with the gradients of `lead`."""
        self._lead = lead
        self._nudge()

    @property
    def rules(self) -> str:
        """See `rules_line`."""
        return rules_line(self.optimizer.param_groups, {master: name for name, master in self.masters.items()})

    def weights(self) -> Values:
        """The exact weights by name, on the CPU."""
        return {name: master.detach().cpu().clone() for name, master in self.masters.items()}

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        inputs, kwargs = self._places.batch(inputs, kwargs)
        self._weighing.forward(kwargs)
        if self._config.autocast_dtype is None:
            return self.module(*inputs, **kwargs)
        with torch.autocast(self.device.type, dtype=self._dtype):
            return self.module(*inputs, **kwargs)

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        tokens: Any = None,
        reduction: str = "mean",
    ) -> torch.Tensor:
        """See `Engine.backward`."""
        steps = self.gradient_accumulation_steps()
        whole = scale_wrt_gas or self._weighing.items is not None
        weighed = self._weigh(loss, tokens, reduction, not scale_wrt_gas)
        (weighed if whole else weighed * steps).backward(retain_graph=retain_graph)
        return loss.detach() / steps if whole and not self._config.counted else loss.detach()

    def scale(self, loss: torch.Tensor, *, tokens: Any = None, reduction: str = "mean") -> torch.Tensor:
        """The loss times its weight; the loss scale is 1."""
        return self._weigh(loss, tokens, reduction, False)

    def _weigh(self, loss: torch.Tensor, tokens: Any, reduction: str, whole_step: bool) -> torch.Tensor:
        weight = self._weighing.weight(tokens, reduction, whole_step and bool(self._counts))
        self._counts.append(weight.count)
        return loss if self._config.zero.mean != "tokens" else weighted(loss, weight.factor)

    def begin_step(self, micro_batches: int) -> None:
        """Nothing to do: gradients are summed over the ranks once, by `step`."""

    def step(self, lr_kwargs: dict[str, Any] | None = None, *, partial: bool = False) -> None:
        """See `Engine.step`."""
        status = self._status
        if partial or self.is_gradient_accumulation_boundary():
            self._reduce()
            grads = self._grads()
            if self._lead is not None:
                self._put({name: self._lead[self.global_steps].grads[name] for name in grads})
            self._norm = self._clip()
            applied = math.isfinite(self._norm)
            slack = self._update() if applied else {}
            self.optimizer.zero_grad()
            self.last = Step(grads, self.weights(), slack)
            self._load()
            status.global_steps += 1
            status.skipped_steps += not applied
            status.global_samples += self.train_batch_size()
            if applied and self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
        status.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """See `Engine.is_gradient_accumulation_boundary`."""
        if self._boundary is not None or not self._config.managed_gradient_accumulation:
            return self._boundary is None or self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """See `Engine.set_gradient_accumulation_boundary`."""
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """See `Engine.was_step_applied`."""
        return self._norm is not None and math.isfinite(self._norm)

    def get_global_grad_norm(self) -> float | None:
        """See `Engine.get_global_grad_norm`."""
        return self._norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `Engine.zero_grad`."""
        self._sums = dict.fromkeys(self._sums)

    def deepspeed_io(self, dataset: Any, *args: Any, **kwargs: Any) -> Loader:
        """See `Engine.deepspeed_io`."""
        loader = make_loader(self._config, self.device, self._metrics.axis.rank, dataset, *args, **kwargs)
        return self._follow(loader)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Nothing to do: there is no line of a step."""

    _follow = property(lambda self: self._metrics.follow)
    gather_for_metrics = property(lambda self: self._metrics.gather_for_metrics, doc="See `Engine.gather_for_metrics`.")
    reduce = property(lambda self: self._metrics.reduce, doc="See `Engine.reduce`.")
    destroy = property(lambda self: self._places.close, doc="End the groups that were made.")

    def __getattr__(self, name: str) -> Any:
        """Look up what is missing in the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_modules"]["module"], name)

    @property
    def _dtype(self) -> torch.dtype:
        """What forward and backward compute in."""
        return DTYPES[self._config.autocast_dtype or self._config.compute_dtype]

    @torch.no_grad()
    def _nudge(self) -> None:
        """Where that is asked for, move each weight by as much as its last bit is worth, up or down."""
        generator = torch.Generator().manual_seed(self.global_steps)
        for param in self.module.parameters() if self._nudged else ():
            if param.is_floating_point() and format_of(param) is None:
                signs = torch.randint(0, 2, param.shape, generator=generator).to(param) * 2 - 1
                param.mul_(1 + torch.finfo(self._dtype).eps * signs)

    @torch.no_grad()
    def _make_masters(self, dtype: torch.dtype) -> dict[str, nn.Parameter]:
        masters = {}
        for name, param in self.module.named_parameters():
            plain = param.dtype in (torch.float32, torch.bfloat16, torch.float16) and format_of(param) is None
            if dtype != torch.float32 and plain:
                if param.requires_grad:
                    masters[name] = nn.Parameter(param.data.float())
                param.data = param.data.to(dtype)
            masters.setdefault(name, param)
        return masters

    def _grads(self) -> Values:
        trained = (name for name, param in self.module.named_parameters() if param in self._sums)
        return {name: self.masters[name].grad.cpu().clone() for name in trained}

    def _put(self, grads: Values) -> None:
        for name, grad in grads.items():
            self.masters[name].grad = grad.to(self.masters[name]).clone()

    @torch.no_grad()
    def _set(self, values: Values) -> None:
        for name, value in values.items():
            self.masters[name].copy_(value)

    @torch.no_grad()
    def _load(self) -> None:
        """Let the module compute with what the step brought, or with the weights of the run that is followed."""
        if self._lead is not None:
            self._set(self._lead[self.global_steps].params)
        for name, param in self.module.named_parameters():
            if self.masters[name] is not param:
                param.data.copy_(self.masters[name].data)
        self._nudge()

    def _clip(self) -> float:
        """Clip as torch does; returns the norm, added up in fp64, since fp32 sums of many squares are far off."""
        grads = [param.grad for group in self.optimizer.param_groups for param in group["params"]]
        norm = math.hypot(*(float(torch.linalg.vector_norm(grad, dtype=torch.float64)) for grad in grads))
        limit = self.gradient_clipping()
        if limit and norm > limit - 1e-6:
            for grad in grads:
                grad.mul_(limit / (norm + 1e-6))
        return norm

    def _update(self) -> Values:
        """One step of the optimizer; returns how far rounding of the gradient would move it, in a run that follows."""
        ends = [self._tried(factor) for factor in (1 - _NUDGE, 1 + _NUDGE)] if self._lead is not None else []
        type(self.optimizer).step(self.optimizer)
        after = self.weights()
        return {name: sum((end[name] - value).abs() for end in ends) for name, value in after.items() if ends}

    def _tried(self, factor: float) -> Values:
        """The weights after a step of a gradient `factor` times as large; it leaves everything as it was."""
        before, grads = self.weights(), self._grads()
        groups = [dict(group) for group in self.optimizer.param_groups]
        state = {param: copy.deepcopy(own) for param, own in self.optimizer.state.items()}
        self._put({name: grad * factor for name, grad in grads.items()})
        type(self.optimizer).step(self.optimizer)
        after = self.weights()
        self._put(grads)
        self._set(before)
        self.optimizer.state.clear()
        self.optimizer.state.update(state)
        for group, old in zip(self.optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(old)
        return after

    def _take(self, param: nn.Parameter) -> None:
        """Add a gradient up in the masters' precision, as it lands."""
        grad = param.grad.to(torch.float32)
        total = self._sums[param]
        self._sums[param] = grad if total is None else total + grad
        param.grad = None

    def _reduce(self) -> None:
        """Sum over the ranks in their order and take the mean; a parameter without a gradient has one of zeros."""
        names = {param: name for name, param in self.module.named_parameters()}
        mean = self._config.gradient_factor
        if self._config.counted:
            count = self._metrics.reduce(float(sum(self._counts)), "sum") * self._config.sequence_parallel_size
            mean = mean / count if count else 0.0
        for param, grad in self._sums.items():
            master = self.masters[names[param]]
            grad = torch.zeros_like(master) if grad is None else grad
            if self.world_size > 1:
                rows = [torch.empty_like(grad) for _ in range(self.world_size)]
                dist.all_gather(rows, grad.contiguous())
                first, *others = (rows[rank] for rank in self._places.summed)
                grad = sum(others, start=first)
            master.grad = (grad * mean).to(master.dtype)
        self._sums, self._counts = dict.fromkeys(self._sums), []


def plain_optimizer(
    model: nn.Module, client: Any, model_parameters: Iterable[Any] | None, settings: Config
) -> torch.optim.Optimizer | None:
    """The client's optimizer, or the config's over the model's parameters; ValueError where torch has no such."""
    if client is None and settings.optimizer is None:
        return None
    groups = parameter_groups(model, model_parameters)
    if client is not None:
        return client_optimizer(client, groups)
    kind, params = settings.optimizer.type, dict(settings.optimizer.params)
    if kind.lower() == "muon":
        return PlainMuon(muon_groups(model, groups, MuonParams.model_validate(params)))
    if kind.lower() == "lamb":
        return PlainLamb(groups, dict(LambParams.model_validate(params)))
    if not params.get("bias_correction", True):
        raise ValueError(
            "optimizer.params.bias_correction: torch has no Adam without it, so there is nothing to compare"
        )
    if torch_reason(kind, params) is None:
        params.setdefault("weight_decay", 0.0)  # AdamW's own default in torch is not ours
    if kind.lower() in ARGUMENTS:
        kind, params = torch_arguments(kind.lower(), params)
    maker = PlainLion if kind == "Lion" else getattr(torch.optim, kind)
    return maker(groups, **{key: value for key, value in params.items() if value is not None})


class PlainMuon(torch.optim.Optimizer):
    """`torch.optim.Muon` and AdamW, each for its groups."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            kind = torch.optim.Muon if group["use_muon"] else torch.optim.AdamW
            known = inspect.signature(kind).parameters.keys() & group.keys()
            made = kind(**{key: group[key] for key in known})
            made.state = self.state
            made.step()


class PlainLamb(torch.optim.Optimizer):
    """You et al. 2019, "Large Batch Optimization for Deep Learning", algorithm 2, as DeepSpeed's FusedLamb has it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                state, lr = self.state[param], group["lr"]
                mean = state.setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 1 - beta1)
                square = state.setdefault("square", torch.zeros_like(param)).mul_(beta2)
                square += param.grad.square() * (1 - beta2)
                state["step"] = step = state.get("step", 0) + 1
                if group["bias_correction"]:
                    lr *= math.sqrt(1 - beta2**step) / (1 - beta1**step)
                change = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * param
                ratio = (param.norm() / change.norm()).item()
                if 0.0 < ratio < math.inf:
                    lr *= min(max(ratio, group["min_coeff"]), group["max_coeff"])
                param.sub_(lr * change)


class PlainLion(torch.optim.Optimizer):
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2."""

    def __init__(self, groups: Groups, lr: float = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for param in group["params"]:
                mean = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                direction = (mean * beta1 + param.grad * (1 - beta1)).sign()
                param.mul_(1 - lr * group["weight_decay"]).sub_(lr * direction)
                mean.mul_(beta2).add_(param.grad, alpha=1 - beta2)
