"""The messages between stages: activations one way, and their gradients the other.

A message is the tensors of a value, one after the other. What form the value has (nesting, shapes, dtypes, numbers) is
sent once for each form of a micro-batch, ahead of the first such value: micro-batches of other lengths or sizes have
another form, and nothing is sent of one that was there before.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from zero.core import comm
from zero.core.comm import Axis, Message, messages_device, tag_of_kind
from zero.core.p2p import Passage, begin, receive_ints, send_ints


class Form(NamedTuple):
    """Of a tensor: what to receive. strides: of a dense one that is not contiguous, else ()."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    strides: tuple[int, ...] = ()

    def empty(self, device: torch.device) -> torch.Tensor:
        """Memory for it."""
        if self.strides:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def form_of(tensor: torch.Tensor) -> Form:
    """The form of the tensor, for the rank that receives it."""
    as_it_is = tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() != tensor.stride()
    needs_grad = tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
    return Form(tuple(tensor.shape), tensor.dtype, needs_grad, () if as_it_is else tensor.stride())


def encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value as JSON holds it, with its tensors appended to `tensors`; TypeError for what cannot be sent."""
    if isinstance(value, torch.Tensor):
        form = form_of(value)
        tensors.append(value)
        return {"tensor": [form.shape, str(form.dtype).removeprefix("torch."), form.needs_grad, form.strides]}
    if isinstance(value, (tuple, list)):
        return {"list" if isinstance(value, list) else "tuple": [encode(each, tensors) for each in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(each, tensors) for key, each in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise TypeError(
        f"a value of {type(value).__name__} goes from one stage of the pipeline to the next, which can be tensors, "
        "numbers, texts, None, and tuples, lists and dicts of such; place the layers that use it on one stage"
    )


def decode(said: Any, tensors: list[Any], make: Any) -> Any:
    """The value that was encoded; `make(form)` gives each tensor, which is appended to `tensors`."""
    if not isinstance(said, dict):
        return said
    ((kind, of),) = said.items()
    if kind == "tensor":
        shape, dtype, needs_grad, strides = of
        tensors.append(make(Form(tuple(shape), getattr(torch, dtype), needs_grad, tuple(strides))))
        return tensors[-1]
    if kind == "dict":
        return {key: decode(each, tensors, make) for key, each in of.items()}
    if kind == "dtype":
        return getattr(torch, of)
    return (list if kind == "list" else tuple)(decode(each, tensors, make) for each in of)


class Messages:
    """Sends and receives along pp. A rank and its neighbour post what they exchange in one order.

    forms: by stage and form of the micro-batch, that of the value that comes into the stage.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._axis, self._device = axis, device
        self.forms: dict[tuple[int, Hashable], Any] = {}
        self._sent: list[Passage] = []
        comm.connect(axis)

    def form_to(self, place: int, stage: int, key: Hashable, said: Any) -> None:
        """The form of what goes into `stage` at `place`; sent if it is not known there."""
        said = json.loads(json.dumps(said))  # lists for tuples, as it is received
        known = self.forms.setdefault((stage, key), said)
        if known is said:
            text = json.dumps(said).encode()
            self._sent += (send_ints(each, [place], self._axis) for each in ([len(text)], list(text)))
        elif known != said:
            raise RuntimeError(
                f"what stage {stage} of the pipeline gets has another form than before, for inputs of the same shapes: "
                f"{said}, after {known}; the next rank cannot know it. Pad what depends on the values of the inputs"
            )

    def form_from(self, place: int, stage: int, key: Hashable, what: str) -> Any:
        """The form of what comes into `stage` from `place`; received from there if it is not known."""
        if (stage, key) not in self.forms:
            (count,) = receive_ints(1, place, self._axis, f"form of activations {what}")
            text = bytes(receive_ints(count, place, self._axis, f"form of activations {what}"))
            self.forms[stage, key] = json.loads(text)
        return self.forms[stage, key]

    def send(self, tensors: Sequence[torch.Tensor], place: int, kind: str, what: str) -> Passage:
        """Start to send tensors to the rank at `place`."""
        there = messages_device(self._axis, self._device)
        sends = [(_memory(each.detach().to(there)), place) for each in tensors if each.numel()]
        return self._begin(sends, (), place, kind, what)

    def receive(self, forms: Sequence[Form], place: int, kind: str, what: str) -> Passage:
        """Start to receive tensors of these forms from the rank at `place`."""
        tensors = [form.empty(messages_device(self._axis, self._device)) for form in forms]
        filled = [(_memory(each), place) for each in tensors if each.numel()]
        return self._begin((), filled, place, kind, what)._replace(received=tensors)

    def settle(self) -> None:
        """Wait until all that was sent of forms has been received."""
        while self._sent:
            self._sent.pop(0).wait()

    def _begin(
        self, sends: Sequence[Message], receives: Sequence[Message], place: int, kind: str, what: str
    ) -> Passage:
        axis, leaves = self._axis, sum(each.nbytes for each, _ in sends)
        collective = axis.watchdog.begin(f"{kind} {what}", "", leaves, (), (axis.ranks[place],), True)
        return begin(sends, receives, axis, collective, tag_of_kind(kind, axis, collective.attempt), self._device)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order of its memory, a copy unless it is dense."""
    if not tensor.is_contiguous() and form_of(tensor).strides:
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().view(-1).view(torch.uint8)
