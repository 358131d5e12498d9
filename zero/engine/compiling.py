"""torch.compile, block by block: compiled is what units are anchored at, and what moves parameters stays outside."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zero.core.sharded_module import ShardedModule
from zero.core.unit import Unit
from zero.engine.status import Status
from zero.log import rank_zero
from zero.parallel import moves
from zero.recompute.modules import Recomputed


class BlockCompiler:
    """Compiles the blocks of a module, and takes that back."""

    def __init__(self, sharded: ShardedModule, status: Status) -> None:
        self._sharded = sharded
        self._status = status
        self._compiled: dict[nn.Module, Callable[..., Any] | None] = {}  # each block's own forward before, if any

    @property
    def is_compiled(self) -> bool:
        """Whether `compile()` has compiled a block."""
        return bool(self._compiled)

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the forward of each block of the model: of every module below the root at which units are anchored.

        Parameters are gathered before a compiled block and released after it, as without. Blocks that contain
        others, or read parameters of a unit that is anchored elsewhere (tied weights), run as they are. Where
        parameters are resharded, a module inside a compiled block cannot be called on its own. A second call compiles
        anew. `compile_kwargs` go to torch.compile. Raises ValueError for `schedule` and
        `compiled_autograd_enabled`, which are DeepCompile's.
        """
        self._status.check()
        if schedule is not None or compiled_autograd_enabled:
            raise ValueError("compile(): schedule and compiled_autograd_enabled belong to DeepCompile; leave them out")
        self.undo()
        moves.keep_out_compiler()
        blocks, left = _blocks(self._sharded.module, self._sharded.units)
        for block in blocks:
            self._compiled[block] = block.__dict__.get("forward")
            # Hooks have ids, and dynamo would compile every block anew for its own.
            self._sharded.unhook(_below(block))
            compiler = functools.partial(torch.compile, backend=backend, **dict(compile_kwargs or {}))
            if isinstance(block.forward, Recomputed):
                block.forward.compile(compiler)
            else:
                block.forward = compiler(block.forward)
        rank_zero(
            logging.INFO, "compiled %d blocks with %s; left as they are: %s", len(blocks), backend, left or "none"
        )

    def undo(self) -> None:
        """Give the blocks their own forward back."""
        for block, before in self._compiled.items():
            if isinstance(before, Recomputed):
                before.undo_compile()
            elif before is None:
                del block.forward
            else:
                block.forward = before
            self._sharded.hook(_below(block))
        self._compiled = {}


def _below(block: nn.Module) -> list[nn.Module]:
    return [module for module in block.modules() if module is not block]


def _blocks(root: nn.Module, units: tuple[Unit, ...]) -> tuple[list[nn.Module], list[str]]:
    """The modules to compile, and the names of the anchors that cannot be."""
    anchors = dict.fromkeys(unit.plan.anchor for unit in units if unit.plan.anchor)
    unit_of = {id(param): unit for unit in units for param in unit.params}
    blocks, left = [], []
    for name in anchors:
        block = root.get_submodule(name)
        inner = any(other.startswith(f"{name}.") for other in anchors)
        foreign = any(unit_of[id(param)].plan.anchor != name for param in block.parameters())
        # A container such as ModuleList has no forward of its own.
        if inner or foreign or type(block).forward is nn.Module.forward:
            left.append(name)
        else:
            blocks.append(block)
    return blocks, left
