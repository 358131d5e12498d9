"""A unit: parameters that are gathered, reduced and released together, and that an optimizer updates.

It adds two verbs to those of zero/core/sharded_params.py: `invalidate`, called before the optimizer changes the
parameters, and `reduce`, which handles the gradient and is legal in every state. It adds one part, `gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zero.core.gathering import make_gathering
from zero.core.gradients import GradientDtypes, Gradients
from zero.core.initial_values import initial_values, share_equal, share_with_peers
from zero.core.mesh import Mesh
from zero.core.owner import Owner
from zero.core.param_buffer import ParamBuffer
from zero.core.released import absent
from zero.core.sharded_params import TAGS, ShardedParams
from zero.core.state import State
from zero.log import logger
from zero.memory.state_placement import StatePlacement
from zero.plan.layout import Span
from zero.plan.units import UnitPlan


class Unit(ShardedParams):
    """Parameters with one flat buffer, one shard, one gradient.

    optimizer: returns the optimizer that updates it, or None; weak, because parameters outlive engines; engine: so too;
    left_by:   the `ShardedModule` that owned it, if that was dropped without giving the parameters back.
    """

    def __init__(
        self,
        plan: UnitPlan,
        params: Sequence[nn.Parameter],
        index: int,
        number: int,
        mesh: Mesh,
        cut: bool,
        placement: StatePlacement,
    ) -> None:
        cut = cut and (mesh.shard.size > 1 or placement.shard_offloaded)
        super().__init__(plan, ParamBuffer(plan, params, cut, mesh.data.global_rank), index, mesh, placement, number)
        self.gradients: Gradients | None = None
        self.optimizer: Callable[[], Any] = lambda: None  # until one is bound
        self.engine: Callable[[], Any] = lambda: None
        self.left_by: Any = None

    @property
    def span(self) -> Span:
        """The part of its shard that this rank counts in norms and writes to checkpoints, as a span of the buffer."""
        return self.mesh.counted_span(self.plan.layout)

    def counted(self, values: torch.Tensor) -> torch.Tensor:
        """The part of the shard's values [n] that lies in `span`; the other replicas count the rest."""
        part = values.chunk(self.mesh.replica.size)[self.mesh.replica.rank]
        return part if self.mesh.counts else part[:0]

    @property
    def stays_full(self) -> bool:
        """Whether the full parameters stay between uses: only the optimizer's step outdates them."""
        return self.persistent or not self.cut

    def adopt(
        self,
        dtype: torch.dtype,
        device: torch.device,
        gradient_dtypes: GradientDtypes,
        remainder: bool = False,
        quantized: bool = False,
    ) -> None:
        """Move the parameters into flat storage, with rank 0's values, and keep this rank's shard.

        The masters are made from the values before they are rounded to a 16-bit `dtype`; see `initial_values`.
        `quantized`: from now on parameters are gathered in 8 bits.
        """
        trained = self.plan.requires_grad
        share_with_peers(self.params, self.mesh.data, self.plan.name)
        share_equal(self.params, self.plan, self.mesh.peers)
        full, master = initial_values(self.params, self.plan, self.mesh, self.shard.window, dtype, device, remainder)
        self.buffer.adopt(full)
        self.shard.adopt(trained, master)
        self.gathering = make_gathering(self.mesh, self.shard, self.buffer, TAGS * self.number, quantized)
        self._source = self.gathering
        for position, param in enumerate(self.params):
            param._zero_owner = Owner(self.plan.params[position].name, self, position)
        if trained:
            shapes = [param.shape for param in self.params]
            how = self.mesh, gradient_dtypes, device, TAGS * self.number + 1, self.shard.placement
            self.gradients = Gradients(self.plan, shapes, *how)

    # -- the optimizer's step, and the parameters around it

    def publish(self, after_update: bool = False) -> None:
        """The shard was updated: start to send it to the ranks that need it before its next use."""
        if self.stays_full:
            self.send(after_update)
        elif not self.shard.placement.streamed:  # else with the gather, which waits for the stream of the update
            self.gathering.publish()

    def absence(self) -> RuntimeError | None:
        """See `ShardedParams.absence`; so too while the optimizer's state is in host memory."""
        if getattr(self.optimizer(), "away", False):
            return RuntimeError(f"the states of {self.buffer.name} are offloaded; call engine.reload_states() first")
        return super().absence()

    def wait_sent(self) -> None:
        """Wait until the other ranks have received what the last update sent."""
        self.shard.settle()
        if self.state is State.GATHERING and self.stays_full:
            self.wait()

    def invalidate(self) -> None:
        """The shard is about to change: a full copy must be gathered again, and no reader may hold it.

        Autograd is told, so that a graph built before the change raises, as in plain torch. What the user has written
        into parameters is taken into the masters first.
        """
        self.shard.settle()
        if self.cut:
            self.buffer.forget_graph()
            self._release(True)
            self.buffer.outdate()
            self.gathering.changed()
        else:
            self.take_writes()
            self.buffer.outdate()
            with self.buffer.lock:
                self.buffer.move("invalidate")

    def offload(self) -> None:
        """Parameters and shard must not be read until `reload`; their storages may be freed in between."""
        if self.holds:
            raise RuntimeError(f"unit '{self.plan.name}' is held open by GatheredParameters; leave that block first")
        self.shard.settle()
        self.buffer.forget_graph()
        self._release(True)
        self.take_writes()
        with self.buffer.lock:
            self.buffer.offload()

    def reload(self) -> None:
        """The storages hold the values of `offload` again."""
        with self.buffer.lock:
            self.buffer.reload()

    def write_exact(self, start: int, values: torch.Tensor) -> None:
        """Replace the exact values from element `start` of the shard on by `values`, fp32 [k], and their roundings."""
        self.shard.write_exact(start, values)
        self.gathering.changed()

    def reduce(self, leaf: Any = None) -> None:
        """Start to reduce the full gradient to its shard, after a running update has finished with the last one."""
        self.shard.settle()
        with self.shard.placement.events.span("reduce", self.plan.name):
            self.gradients.reduce(leaf)

    def dissolve(self, alone: bool = False) -> None:
        """Give every parameter storage of its own again, with its current value, and forget the flat buffers.

        `alone`: without the other ranks. What only they hold of cut parameters becomes NaN (0 in dtypes without one).
        """
        if alone:
            self._stand_alone()
        else:
            self.gather_exact()
            self.wait()
        self.buffer.dissolve()
        if self.gradients is not None:
            self.gradients.drop()
        self.shard.wait_copies()
        self.shard.placement.close()

    def _stand_alone(self) -> None:
        """Become readable with what is on this rank; messages in flight are not waited for."""
        self._transfer = None
        with self.buffer.lock:
            if self.state in (State.SHARDED, State.REQUESTED):
                self.buffer.allocate()
                full = self.buffer.full
                full.copy_(absent(full.shape, full.dtype, full.device))
                try:
                    self.shard.fill()
                except (OSError, RuntimeError) as error:
                    logger.warning("the own part of %s could not be read either: %s", self.buffer.name, error)
        if self.state not in (State.FULL, State.CONCEALED):
            self.complete()
        self.wait()


# Reading order, 3 of 7; next: zero/core/hooks.py, what follows a forward and a backward through the module.
