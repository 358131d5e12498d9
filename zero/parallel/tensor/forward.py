"""The forward of a module whose layers are cut: the module's own, with what goes in and what comes out moved.

Only `forward` of the instance is replaced, inside of recomputation, so modules keep class, names and hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero.core.comm import Axis
from zero.core.replaced_forward import ReplacedForward
from zero.parallel import moves
from zero.parallel.tensor.layers import Layer
from zero.plan.tensors import sizes_of


class Replaced(ReplacedForward):
    """The forward of one module is this one's `run`, in which tensors are moved along the axis."""

    def __init__(self, module: nn.Module, axis: Axis) -> None:
        super().__init__(module)
        self.axis = axis

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `run` as the module's own forward is called, of which the first argument is the tensor that is moved."""
        if args:
            return self.run(args[0], args[1:], kwargs)
        tensors = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
        name = "hidden_states" if "hidden_states" in kwargs else tensors[0]
        return self.run(kwargs[name], (), kwargs, name)

    def run(self, x: Any, args: Any, kwargs: dict[str, Any], name: str = "") -> Any:
        """The forward that is run instead; `name`: of `x` among the keywords, if it is one."""
        raise NotImplementedError

    def call(self, x: Any, args: Any, kwargs: dict[str, Any], name: str) -> Any:
        """The module's own forward."""
        return self.plain(**{**kwargs, name: x}) if name else self.plain(x, *args, **kwargs)


class Scope(Replaced):
    """A block whose layers are cut: what several of them read is moved once, and its gradient summed once.

    regions: where random numbers differ by rank, or None; around: the section of a sequence that it is in, or None;
    first: the comparison of its first forward, until that; whole: whether its layers take and give whole features now.
    Tensors are kept only while the block runs: a moved one refers to what it was made of, and no collector sees that.
    """

    def __init__(
        self, module: nn.Module, axis: Axis, regions: Regions | None = None, around: Section | None = None
    ) -> None:
        super().__init__(module, axis)
        self.regions, self._around = regions, around
        self.first: Callable[[Scope, Any, Any, dict[str, Any], str], bool] | None = None
        self.whole = False
        self._moved: list[tuple[Tensor, tuple[bool, int], Tensor]] = []
        self._sums: list[Tensor] = []  # of partial ones, of a section

    def run(self, x: Any, args: Any, kwargs: dict[str, Any], name: str = "") -> Any:
        """See `Replaced.run`."""
        if self.first is not None and isinstance(x, Tensor):
            first = torch.compiler.disable(self.first) if torch.compiler.is_compiling() else self.first
            if first(self, x, args, kwargs, name):
                self.first = None
        try:
            return self.call(x, args, kwargs, name)
        finally:
            self._moved.clear()
            if self.regions is not None:
                self.regions.leave()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, forwards leave nothing that the one around them would find."""
        scopes = [self] if self._around is None else [self, self._around]
        before = [(each, each._moved, each._sums) for each in scopes]
        for each in scopes:
            each._moved, each._sums = [*each._moved], []
        try:
            yield
        finally:
            for each, moved, sums in before:
                each._moved, each._sums = moved, sums

    def entered(self, x: Tensor) -> Tensor:
        """A whole tensor for uses of which each rank has a part; the same one for all of them."""
        if (known := self._known(x)) is None:
            known = moves.copied(x, self.axis)
            self.keep(x, known)
        return known

    def keep(self, x: Tensor, moved: Tensor) -> None:
        """Let `entered` give `moved` for this tensor, as long as it is not written to."""
        self._moved.append((x, (torch.is_grad_enabled(), x._version), moved))

    def _known(self, x: Tensor) -> Tensor | None:
        now = torch.is_grad_enabled(), x._version
        found = next((moved for each, then, moved in self._moved if each is x and then == now), None)
        return self._around._known(x) if found is None and self._around is not None else found


class CutForward(Replaced):
    """The forward of a layer that is cut, or of experts that are.

    scope: the block that it is in, None for a layer alone; section: the one around it, if sequences are cut.
    """

    def __init__(self, layer: Layer, axis: Axis, scope: Scope | None, section: Section | None) -> None:
        super().__init__(layer.module, axis)
        self._layer, self._scope, self._section = layer, scope, section

    def run(self, x: Any, args: Any, kwargs: dict[str, Any], name: str = "") -> Any:
        """See `Replaced.run`."""
        if self._scope is not None and self._scope.whole:
            return self._whole(x, args, kwargs, name)
        return self.cut(x, args, kwargs, name)

    def cut(self, x: Any, args: Any, kwargs: dict[str, Any], name: str) -> Any:
        """With a rank's features where the plan cuts them."""
        style, outside = self._layer.style, None
        if style.takes == "copy":
            x = moves.copied(x, self.axis) if self._scope is None else self._scope.entered(x)
        elif style.takes == "split":
            x = moves.split(x, self.axis, -1, self._layer.sizes)
        elif style.takes == "ids":
            start, size = self._layer.part
            outside = (x < start) | (x >= start + size)
            x = (x - start).masked_fill(outside, 0)
        elif style.takes == "divide":
            x = x / self.axis.size
        elif style.takes == "routed":
            x = moves.copied(x, self.axis)
            args, kwargs = self._routed(args, kwargs)
        regions = self._scope.regions if self._scope is not None and self.module.training else None
        if regions is not None and style.takes == "copy":
            regions.leave()  # another layer of the block may have begun one, and what an adapter drops here is whole
        with self._biases():
            out = self.call(x, args, kwargs, name)
        if regions is not None:
            (regions.enter if style.takes == "copy" else regions.leave)()
        if outside is not None:
            out = out.masked_fill(outside[..., None], 0)
        return self._given(out)

    def _whole(self, x: Any, args: Any, kwargs: dict[str, Any], name: str) -> Any:
        """The layer's forward with whole features in and out; without gradients."""
        layer, rows = self._layer, self._layer.style.dim == "in"
        if rows:
            if x.shape[-1] != layer.numel:  # on all ranks alike, some of which would find their features
                raise RuntimeError(
                    f"tensor_parallel: '{layer.name}' was given {x.shape[-1]} features in place of {layer.numel} where "
                    "the layers before it gave all of theirs: what reads a weight itself, in place of calling its "
                    "layer, has a part of it. Say 'skip' of these layers in tensor_parallel.partition_config"
                )
            x = torch.cat([x.narrow(-1, start, size) for start, size in layer.ranges[layer.rank]], -1)
        with self._biases(), values_said(layer.widths):
            out = self.call(x, args, kwargs, name)
        if not rows:
            return moves.assembled(out, self.axis, out.ndim - 1, layer.ranges)
        out = moves.all_reduce(out.contiguous(), self.axis)
        return out if layer.bias is None else out + layer.bias

    def _routed(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The weights that a router gives experts are whole, and each rank uses them for its part."""

        def move(value: Any) -> Any:
            weights = isinstance(value, Tensor) and value.is_floating_point()
            return moves.copied(value, self.axis) if weights else value

        return tuple(map(move, args)), {key: move(value) for key, value in kwargs.items()}

    def _given(self, out: Any) -> Any:
        gives = self._layer.style.gives
        if not gives or not isinstance(out, Tensor):
            return out
        if gives == "gather":
            return moves.gathered(out, self.axis, -1, self._layer.sizes)
        if gives == "rope":  # of latent and rotary keys: only these go to the heads as they are
            latent, rotary = out.tensor_split([-self._layer.rope], -1)
            return torch.cat([latent, moves.copied(rotary, self.axis)], -1)
        bias = self._layer.bias
        if self._section is not None and not self._section.rests and out.ndim == 3:
            out = out if bias is None else moves.added_once(out, bias, self.axis)
            return self._section.summed(out)
        out = moves.summed(out, self.axis)
        return out if bias is None else out + bias

    @contextlib.contextmanager
    def _biases(self) -> Iterator[None]:
        """Inside, biases that are to be added once are not there, or are the first rank's alone."""
        shadows = [(module, name, value()) for module, name, value in self._layer.shadows(self.axis)]
        for module, name, value in shadows:
            module.__dict__[name] = value  # found before the parameter of that name
        try:
            yield
        finally:
            for module, name, _ in shadows:
                del module.__dict__[name]


class Section(Scope):
    """A module inside of which sequences are whole, while around it each rank has a part (sequence parallelism, dim 1).

    learned: whether what it gives is the only sum of partial ones in it, as it is; then that is summed and split at
    once, from the first step on: what is recomputed until then must do as before.
    """

    def __init__(self, module: nn.Module, axis: Axis, regions: Regions | None, trunk: Trunk) -> None:
        super().__init__(module, axis, regions)
        self._trunk = trunk
        self.scatters = self.learned = False

    @property
    def rests(self) -> bool:
        """Whether the sequence that runs is of a length that is not cut."""
        return self._trunk.rests

    def run(self, x: Any, args: Any, kwargs: dict[str, Any], name: str = "") -> Any:
        """See `Replaced.run`."""
        if self.rests:
            return super().run(x, args, kwargs, name)
        sizes = [x.shape[1]] * self.axis.size
        whole = moves.gathered(x, self.axis, 1, sizes)
        self._sums = []
        # Its layers get a second view of the whole: they give partial gradients, others of the section whole ones.
        self.keep(whole, moves.regathered(x, whole.detach(), self.axis, 1, sizes))
        out = super().run(whole, args, kwargs, name)
        first = out if isinstance(out, Tensor) else out[0]
        alone = len(self._sums) == 1 and first is self._sums[0]  # what another layer inside reads must be whole
        self._sums = []
        if self.scatters:
            if not alone:
                raise RuntimeError(
                    f"tensor_parallel.sequence_parallel: {type(self.module).__name__} gave another tensor than the sum "
                    "of its last layer, as it did in the first step; set sequence_parallel to false"
                )
            return out
        self.learned = alone
        first = moves.split(first, self.axis, 1, sizes_of(first.shape[1], self.axis.size))
        return first if isinstance(out, Tensor) else (first, *out[1:])

    def summed(self, out: Tensor) -> Tensor:
        """The sum of partial ones, or this rank's part of it."""
        sizes = sizes_of(out.shape[1], self.axis.size)
        out = moves.summed_and_split(out, self.axis, 1, sizes) if self.scatters else moves.summed(out, self.axis)
        self._sums.append(out)
        return out


class Trunk:
    """The blocks between which each rank has a part of the sequence; made whole again behind the last one."""

    def __init__(self, first: nn.Module, last: nn.Module, axis: Axis) -> None:
        self.rests = False
        self.ends = [_End(last, axis, self, opens=False), _End(first, axis, self, opens=True)]


class TokenDropout(Replaced):
    """A dropout between sections: each rank drops of its own tokens, and not in the same places as the others."""

    def __init__(self, module: nn.Module, axis: Axis, regions: Regions, trunk: Trunk) -> None:
        super().__init__(module, axis)
        self._regions, self._trunk = regions, trunk

    def run(self, x: Any, args: Any, kwargs: dict[str, Any], name: str = "") -> Any:
        """See `Replaced.run`."""
        if not self.module.training or self._trunk.rests:
            return self.call(x, args, kwargs, name)
        self._regions.enter()
        try:
            return self.call(x, args, kwargs, name)
        finally:
            self._regions.leave()


class _End(Replaced):
    def __init__(self, module: nn.Module, axis: Axis, trunk: Trunk, opens: bool) -> None:
        super().__init__(module, axis)
        self._trunk, self._opens = trunk, opens

    def run(self, x: Any, args: Any, kwargs: dict[str, Any], name: str = "") -> Any:
        """See `Replaced.run`."""
        size = self.axis.size
        if self._opens:
            self._trunk.rests = bool(x.shape[1] % size)
            if self._trunk.rests and torch.is_grad_enabled():
                raise ValueError(
                    f"tensor_parallel.sequence_parallel: got a sequence of {x.shape[1]}, which {size} ranks do not "
                    f"divide; pad it to {-(-x.shape[1] // size) * size}, or set sequence_parallel to false"
                )
            if not self._trunk.rests:
                x = moves.split(x, self.axis, 1, sizes_of(x.shape[1], size))
        out = self.call(x, args, kwargs, name)
        if self._opens or self._trunk.rests:
            return out
        first = out if isinstance(out, Tensor) else out[0]
        first = moves.gathered(first, self.axis, 1, [first.shape[1]] * size)
        return first if isinstance(out, Tensor) else (first, *out[1:])


class Regions:
    """Where each rank has a part of the activations, random numbers are its own; around, they are those of all.

    What a region draws is made of the state in front of it, and that goes on by one number behind it: so a block that
    is recomputed draws the same again. Without dropout nothing is installed.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._rank = axis.rank
        self._generator = torch.default_generator
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index]
        self._after: Tensor | None = None  # the state behind the region that runs

    def enter(self) -> None:
        """From here on each rank draws its own."""
        if self._after is not None:
            return
        generator = self._generator
        if generator.device.type == "cpu":
            seed = int(torch.randint(1 << 62, (), generator=generator))
        else:  # a drawn number would have to be waited for; it counts on in steps of 4
            seed = generator.initial_seed() + generator.get_offset() * 0xBF58476D1CE4E5B9
            generator.set_offset(generator.get_offset() + 4)
        self._after = generator.get_state()
        generator.manual_seed((seed + (self._rank + 1) * 0x9E3779B97F4A7C15) % (1 << 63))

    def leave(self) -> None:
        """From here on all ranks draw the same."""
        if self._after is not None:
            self._generator.set_state(self._after)
            self._after = None


@contextlib.contextmanager
def values_said(values: Sequence[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Inside, attributes of modules have these values."""
    before = [(module, name, getattr(module, name)) for module, name, _ in values]
    for module, name, value in values:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def has_dropout(modules: Sequence[nn.Module]) -> bool:
    """Whether any of these drops something at random."""
    return any(
        isinstance(value, float) and value > 0 and ("drop" in name or (isinstance(each, nn.Dropout) and name == "p"))
        for each in modules
        for name, value in vars(each).items()
    )
