"""The head of a language model and its loss in slices of tokens: logits of a large vocabulary never exist whole.

A slice's logits become its losses and at once its part of the gradients, in the forward already, so that nothing is
computed twice: three matrix products per slice, as many as plain torch needs. What stays for the backward are the
gradients of the hidden states and of the head, which it only multiplies by the gradient of the loss.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_variadic

from zero.core.tensors import map_leaves
from zero.core.torch_private import backward_keeps_graph
from zero.parallel import moves
from zero.tiled.slices import default_size, token_slices
from zero.tiled.vocabulary import Vocabulary

# What gradients of logits are multiplied by before they are rounded to fp16, whose least normal number is 6e-5. Before
# they are divided by the number of tokens they lie between -1 and 1, and many are as small as 1 / vocabulary.
_FP16_SCALE = 2.0**15


class Settings(NamedTuple):
    """Options of `tiled_cross_entropy`, by which losses of tokens become one number."""

    tile_size: int
    ignore_index: int
    mean: bool
    label_smoothing: float
    z_loss: float
    vocabulary: Vocabulary | None = None  # where ranks have some rows of the head each


class Wanted(NamedTuple):
    """Whose gradients are needed."""

    hidden: bool
    weight: bool
    bias: bool


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    tile_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The cross entropy of `F.linear(hidden, weight, bias)` with `targets`, without ever holding all logits.

    hidden [..., width], weight [vocabulary, width] and bias [vocabulary] are of one floating dtype, or of several
    under autocast; targets [...] is int64. Returns a scalar in fp32 (fp64 for fp64), as
    `F.cross_entropy(logits.float(), targets)` does: logits, losses and sums are fp32 whatever the inputs are.

    tile_size:       tokens in a slice; default: an eighth of them, within bounds that keep products fast;
    ignore_index:    tokens with this target count for nothing; if all do, the mean is NaN and gradients are zero;
    reduction:       "mean" over the other tokens, or "sum";
    label_smoothing: this share of the target is spread evenly over the vocabulary;
    z_loss:          adds that times the squared logarithm of the softmax's denominator (PaLM, arXiv:2204.02311, 5).

    In fp32 the loss has the bits of plain torch where a product adds up a slice in the order of the whole, as it does
    on most CPUs for most sizes from 16 tokens on. So has the gradient of `hidden` if that of the loss is a power of
    two. Gradients of weight and bias are sums over slices, in fp32.

    Weight and bias may be parameters of an engine that cuts them into rows. Targets are of the whole vocabulary then,
    the ranks with other rows call it with the same `hidden`, and on all of them the loss and the gradient of `hidden`
    are those of the whole. Give the parameters themselves: copies do not know that they are cut.

    Between forward and backward the gradient of the weight is kept in fp32; the weight itself is read in the forward
    only. There is no second derivative: a backward with `create_graph=True` raises RuntimeError. Raises ValueError for
    arguments that do not fit together, on the CPU also for a target outside the vocabulary (a GPU stops the program; if
    rows are cut, the loss is infinite there).
    """
    if has_torch_function_variadic(hidden, weight, bias):
        # A released parameter brings its values on this way, and calls us again with itself, which knows its cut.
        how = {"tile_size": tile_size, "ignore_index": ignore_index, "reduction": reduction}
        how |= {"label_smoothing": label_smoothing, "z_loss": z_loss}
        among = hidden, weight, bias
        return handle_torch_function(tiled_cross_entropy, among, hidden, weight, targets, bias, **how)
    _check_tensors(hidden, weight, targets, bias)
    _check_options(tile_size, reduction, label_smoothing, z_loss)
    vocabulary = Vocabulary.of(weight, bias)
    _check_targets(targets, weight.shape[0] if vocabulary is None else vocabulary.total, ignore_index)
    size = tile_size or default_size(targets.numel(), weight.shape[1], hidden.is_cuda)
    settings = Settings(size, ignore_index, reduction == "mean", float(label_smoothing), float(z_loss), vocabulary)
    rows, flat = hidden.reshape(targets.numel(), hidden.shape[-1]), targets.reshape(-1)
    if not torch.is_grad_enabled():
        return _Slices(rows, weight, bias, flat, settings, Wanted(False, False, False)).run()
    return _TiledCrossEntropy.apply(rows, weight, bias, flat, settings)


def tile_loss(model: nn.Module) -> nn.Module:
    """Have a causal language model of Transformers compute its loss by `tiled_cross_entropy`; returns the model.

    Its forward takes `labels`, or `shift_labels`, which are shifted already, and `num_items_in_batch`, as before, and
    returns the loss without logits; without labels, logits. Raises ValueError where the head is no `nn.Linear` or the
    loss not that of the next token; and the forward TypeError or AttributeError where it caps or scales its logits.
    """
    owners = [each for each in model.modules() if hasattr(type(each), "loss_function") and each.get_output_embeddings()]
    head, loss = (owners[0].get_output_embeddings(), owners[0].loss_function) if owners else (model, None)
    if type(head).forward is not nn.Linear.forward or getattr(loss, "__name__", "") != "ForCausalLMLoss":
        raise ValueError(f"tile_loss: got a head {type(head).__name__} and {loss}; wanted Linear and ForCausalLMLoss")
    owners[0].loss_function = functools.update_wrapper(functools.partial(_loss_of, loss), loss)
    forward = functools.partial(_without_logits, owners[0], owners[0].forward)
    owners[0].forward = functools.update_wrapper(forward, owners[0].forward, updated=())
    return model


def _without_logits(model: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if inspect.signature(forward).bind(*args, **kwargs).arguments.get("labels") is None:
        if kwargs.get("shift_labels") is None:
            return forward(*args, **kwargs)
        kwargs["labels"] = kwargs["shift_labels"]  # without labels the model asks for no loss
    head = model.get_output_embeddings()
    # In place of logits the head gives the function that makes losses of targets; hooks find no tensor in it.
    plain, head.forward = head.forward, functools.partial(functools.partial, _causal_loss, head)
    try:
        return map_leaves(forward(*args, **kwargs), lambda each: None if isinstance(each, functools.partial) else each)
    finally:
        head.forward = plain


def _loss_of(plain: Callable[..., Tensor], logits: Any, *args: Any, **kwargs: Any) -> Tensor:
    return logits(*args, **kwargs) if isinstance(logits, functools.partial) else plain(logits, *args, **kwargs)


def _causal_loss(head: Any, hidden: Tensor, labels: Tensor, vocab_size: int, **more: Any) -> Tensor:
    targets, count, ignored = more.get("shift_labels"), more.get("num_items_in_batch"), more.get("ignore_index", -100)
    if targets is None:
        targets = F.pad(labels, (0, 1), value=ignored)[..., 1:]
    targets, how = targets.to(hidden.device), "mean" if count is None else "sum"
    loss = tiled_cross_entropy(hidden, head.weight, targets, head.bias, ignore_index=ignored, reduction=how)
    return loss if count is None else loss / count


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: Settings
    ) -> Tensor:
        wanted = Wanted(*ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[2])
        slices = _Slices(hidden, weight, bias, targets, settings, wanted)
        loss = slices.run()
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden, weight, bias)]
        ctx.save_for_backward(slices.hidden_grad, slices.weight_grad, slices.bias_grad, slices.unit)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "tiled_cross_entropy: a backward with create_graph=True reached it, and it has no second derivative; "
                "use F.cross_entropy where gradients are differentiated"
            )
        *kept, unit = ctx.saved_tensors
        factor = grad if unit is None else grad * unit
        # A graph that is run once leaves them to us: no second copy of the largest tensor of the model then.
        again = backward_keeps_graph()
        scaled = [each if each is None else each * factor if again else each.mul_(factor) for each in kept]
        grads = [each if each is None else each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes, strict=True)]
        return *grads, None, None


class _Slices:
    """One forward over hidden [tokens, width], slice by slice; `run` gives the loss and leaves the gradients here.

    hidden_grad, weight_grad, bias_grad: in the dtype of the sums; None where they are not wanted;
    unit: what these are still to be multiplied by, a scalar; None for 1.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: Settings, wanted: Wanted
    ) -> None:
        dtype = _operands(hidden, weight)
        self.settings = settings
        self.hidden, self.weight = hidden.detach().to(dtype), weight.detach().to(dtype)
        self.sums = torch.float64 if dtype == torch.float64 else torch.float32
        self.bias = None if bias is None else bias.detach().to(self.sums)
        self.valid = targets != settings.ignore_index
        self.targets = torch.where(self.valid, targets, 0).unsqueeze(1)
        self.slices = token_slices(len(targets), settings.tile_size)
        self.hidden_grad = hidden.new_empty(hidden.shape, dtype=self.sums) if wanted.hidden else None
        # The first slice overwrites it, so that nobody has to clear it; without one there is nothing to add.
        make = weight.new_empty if self.slices else weight.new_zeros
        self.weight_grad = make(weight.shape, dtype=self.sums) if wanted.weight else None
        self.bias_grad = bias.new_zeros(bias.shape, dtype=self.sums) if wanted.bias else None
        self.unit: Tensor | None = None
        self._share = torch.ones((), dtype=self.sums, device=hidden.device)  # of each token's loss
        if settings.mean:
            self._share = self._share / self.valid.sum()
        weights = torch.where(self.valid, self._share, 0)
        if any(wanted) and dtype == torch.float16:
            weights, self.unit = self.valid.to(self.sums) * _FP16_SCALE, self._share / _FP16_SCALE
        self._weights = weights.unsqueeze(1)  # [tokens, 1]: of the gradient of each token's loss
        self._any = any(wanted)

    @torch.no_grad()
    def run(self) -> Tensor:
        """The loss."""
        tokens, rows = len(self.hidden), max(map(len, self.slices), default=0)
        shape = (rows, len(self.weight))
        logits = self.hidden.new_empty(shape, dtype=self.sums)
        cut = self.settings.vocabulary
        grads = self.hidden.new_zeros(shape, dtype=self.sums) if self._any and cut is None else logits
        narrow = self.hidden.new_empty(shape) if self._any and self.hidden.dtype != self.sums else None
        log_probs, smooth, log_sums = self.hidden.new_empty((3, tokens, 1), dtype=self.sums)
        with torch.autocast(self.hidden.device.type, enabled=False):
            for part in self.slices:
                own = slice(part.start, part.stop)
                here = logits[: len(part)]
                self._multiply(self.hidden[own], here)
                log_probs[own], log_sums[own], smooth[own], sums = self._normalize(here, self.targets[own])
                if self._any:
                    self._differentiate(own, here, grads[: len(part)], log_sums[own], sums)
                    self._collect(own, here, here if narrow is None else narrow[: len(part)].copy_(here))
            if self.hidden_grad is not None and cut is not None:
                moves.all_reduce(self.hidden_grad, cut.axis)
            return self._loss(log_probs, smooth, log_sums)

    def _normalize(self, logits: Tensor, targets: Tensor) -> Iterable[Tensor]:
        """Turn logits [rows, vocabulary] into logarithms of probabilities; see `Vocabulary.normalize`."""
        smooth = self.settings.label_smoothing > 0
        if self.settings.vocabulary is not None:
            return self.settings.vocabulary.normalize(logits, targets, smooth)
        at_target = logits.gather(1, targets)
        # In place: a row is read to its end before it is written. The same holds for the gradient below.
        torch.log_softmax(logits, 1, out=logits)
        log_probs = logits.gather(1, targets)
        spread = logits.sum(1, keepdim=True) if smooth else torch.zeros_like(log_probs)
        return log_probs, at_target - log_probs, spread, torch.ones_like(log_probs)

    def _multiply(self, hidden: Tensor, out: Tensor) -> None:
        """The logits [rows, vocabulary] of a slice."""
        if hidden.dtype != out.dtype:
            torch.mm(hidden, self.weight.t(), out_dtype=out.dtype, out=out)
            if self.bias is not None:
                out += self.bias
        elif self.bias is not None:
            torch.addmm(self.bias, hidden, self.weight.t(), out=out)
        else:
            torch.mm(hidden, self.weight.t(), out=out)

    def _differentiate(self, own: slice, log_probs: Tensor, grads: Tensor, log_sums: Tensor, sums: Tensor) -> None:
        """Turn what `_normalize` left into the gradient of logits, in place; `grads`: zeros, and again afterwards."""
        settings, weights, targets = self.settings, self._weights[own], self.targets[own]
        drift = 2 * settings.z_loss * log_sums * weights
        if settings.vocabulary is not None:
            factor = (weights + drift) / sums
            settings.vocabulary.differentiate(log_probs, targets, factor, weights, settings.label_smoothing)
            return
        spread = weights * (settings.label_smoothing / grads.shape[1])
        if settings.label_smoothing:
            grads.copy_(-spread)
        # The gradient of the z-loss is probabilities times `drift`: it goes through the softmax as if it were more loss
        # of the target, and what that does to the target itself is taken back.
        grads.scatter_(1, targets, (settings.label_smoothing - 1) * weights - spread - drift)
        torch.ops.aten._log_softmax_backward_data.out(grads, log_probs, 1, log_probs.dtype, out=log_probs)
        if settings.z_loss:
            log_probs.scatter_(1, targets, log_probs.gather(1, targets) + drift)
        if settings.label_smoothing:
            grads.zero_()
        else:
            grads.scatter_(1, targets, 0.0)

    def _collect(self, own: slice, exact: Tensor, grads: Tensor) -> None:
        """Add a slice's gradient of logits, as it came and in the dtype that multiplies, to what is wanted."""
        mixed = {} if grads.dtype == self.sums else {"out_dtype": self.sums}
        if self.hidden_grad is not None:
            torch.mm(grads, self.weight, **mixed, out=self.hidden_grad[own])
        if self.weight_grad is not None:
            total, beta = self.weight_grad, 0 if own.start == 0 else 1
            torch.addmm(total, grads.t(), self.hidden[own], beta=beta, **mixed, out=total)
        if self.bias_grad is not None:
            self.bias_grad += exact.sum(0)

    def _loss(self, log_probs: Tensor, smooth: Tensor, log_sums: Tensor) -> Tensor:
        """The scalar, from [tokens, 1] of each."""
        settings = self.settings
        # As if the target were the only class: it adds up in the order in which plain torch does.
        labels = torch.where(self.valid, 0, -1)
        loss = F.nll_loss(log_probs, labels, ignore_index=-1, reduction="mean" if settings.mean else "sum")
        if settings.label_smoothing:
            total = len(self.weight) if settings.vocabulary is None else settings.vocabulary.total
            spread = torch.where(self.valid, smooth.squeeze(1), 0).sum() * self._share / total
            loss = (1 - settings.label_smoothing) * loss - settings.label_smoothing * spread
        if settings.z_loss:
            squares = torch.where(self.valid, log_sums.squeeze(1).square(), 0).sum()
            loss = loss + settings.z_loss * squares * self._share
        return loss


def _operands(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of what is multiplied.

    On a GPU 16-bit numbers are, with sums and results in fp32. A CPU gives 16-bit results, so there they are widened.
    """
    dtype, device = torch.promote_types(hidden.dtype, weight.dtype), hidden.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return torch.float32 if device == "cpu" and dtype.itemsize < 4 else dtype


def _check_tensors(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    for name, each in (("hidden", hidden), ("weight", weight), ("targets", targets), ("bias", bias)):
        if not isinstance(each, Tensor) and not (name == "bias" and each is None):
            raise ValueError(f"tiled_cross_entropy({name}=...): got {type(each).__name__}; wanted a tensor")
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"tiled_cross_entropy: got hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}; "
            "wanted [..., width] and [vocabulary, width]"
        )
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise ValueError(
            f"tiled_cross_entropy(targets=...): got {targets.dtype} {tuple(targets.shape)}; "
            f"wanted torch.int64 {tuple(hidden.shape[:-1])}, a class for each row of hidden"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"tiled_cross_entropy(bias=...): got {tuple(bias.shape)}; wanted {tuple(weight.shape[:1])}")
    operands = [each for each in (hidden, weight, bias) if each is not None]
    mixed = len({each.dtype for each in operands}) > 1 and not torch.is_autocast_enabled(hidden.device.type)
    if mixed or not all(each.is_floating_point() for each in operands):
        dtypes = [str(each.dtype) for each in operands]
        raise ValueError(f"tiled_cross_entropy: got hidden, weight and bias in {dtypes}; wanted one floating dtype")


def _check_options(tile_size: int | None, reduction: str, label_smoothing: float, z_loss: float) -> None:
    if tile_size is not None and (not isinstance(tile_size, int) or tile_size < 1):
        raise ValueError(f"tiled_cross_entropy(tile_size=...): got {tile_size!r}; wanted a whole number of tokens")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"tiled_cross_entropy(reduction=...): got {reduction!r}; wanted 'mean' or 'sum'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"tiled_cross_entropy(label_smoothing=...): got {label_smoothing!r}; wanted 0.0 to 1.0")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"tiled_cross_entropy(z_loss=...): got {z_loss!r}; wanted a finite number from 0.0 on")


def _check_targets(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    if targets.device.type != "cpu":
        return  # to look at them would mean to wait for the device
    wrong = targets[((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)]
    if len(wrong):
        raise ValueError(
            f"tiled_cross_entropy(targets=...): got {wrong[0].item()}; wanted 0 to {vocabulary - 1}, "
            f"or ignore_index, which is {ignore_index}"
        )
