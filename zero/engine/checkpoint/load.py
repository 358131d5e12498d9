"""Loading a checkpoint into an engine."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero.checkpoint.differences import Ask, Match, TargetParameter
from zero.checkpoint.folder import check_folder, find, without_latest
from zero.checkpoint.index import Index
from zero.checkpoint.reader import Reader
from zero.checkpoint.run_state import RunState
from zero.checkpoint.safe_file import NAMES
from zero.checkpoint.verify import check_headers
from zero.core.access import GatheredParameters
from zero.core.comm import Axis
from zero.core.owner import owner_of
from zero.core.sharded_module import ShardedModule
from zero.core.values import full_shape
from zero.engine.checkpoint import load_units
from zero.engine.checkpoint.load_units import LoadPlan, UnitLoader, find_alike, fit, together
from zero.engine.checkpoint.random_state import for_rank
from zero.engine.checkpoint.resume import check, restore
from zero.engine.checkpoint.save import CheckpointSaver
from zero.engine.checkpoint.saved_state import saved_buffers
from zero.log import rank_zero
from zero.optim.optimizer import ZeroOptimizer


class Values(NamedTuple):
    """The contents of a checkpoint for one rank, without the model's tensors.

    shared, own: for `restore`; shared is None in a checkpoint that another program has written, own where no random
    numbers were saved. extra: what modules gave by `get_extra_state`, by name in a state_dict. steps: of the optimizer.
    """

    shared: dict[str, Any] | None
    own: dict[str, Any] | None
    client: dict[str, Any]
    extra: dict[str, Any]
    steps: int


class CheckpointLoader:
    """Loads checkpoints into an engine."""

    def __init__(
        self, engine: Any, sharded: ShardedModule, optimizer: ZeroOptimizer | None, saving: CheckpointSaver
    ) -> None:
        self._engine = weakref.proxy(engine)  # it holds this object, and is freed without the garbage collector
        self._sharded = sharded
        self._optimizer = optimizer
        self._saving = saving

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from `load_dir`/`tag` (default: what `latest` names); returns its path and the client state.

        Collective. A checkpoint loads at any number of ranks, on any stage, placement, precision and format of the
        optimizer's state, whatever it was saved with. Gradients of an open accumulation window are dropped. A save that
        runs beside the training loop is waited for. Without `latest`: a warning, and (None, None).

        load_module_strict: False: a parameter or buffer that only the model has keeps its values and moments, one that
        only the checkpoint has is left out, both with a warning that names them.
        load_optimizer_states: False: the weights are exact (from the masters), the optimizer begins anew.
        load_module_only: the weights, exact, and nothing else; the optimizer keeps its state.
        custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` to bring the weights in, with the whole
        state_dict in host memory and all parameters whole; what it writes on rank 0 counts.

        Raises ValueError, on all ranks and before anything is changed, for what is not a whole checkpoint, and with
        all differences for one of another model, another optimizer or another schedule. What is found to be damaged
        only on reading, and any other error of one rank, raises on all ranks, too, but the engine is half loaded then:
        another `load_checkpoint` repairs it, and `destroy()` is all that it does else.
        """
        self._saving.join()  # else it would be by chance which checkpoint is there, or the one before that one
        states = load_optimizer_states and not load_module_only and self._optimizer is not None
        masters = self._engine._config.zero_optimization.load_from_fp32_weights
        ask = Ask(states, load_module_strict, custom_load_fn is None, masters, argument="load_module_strict")
        ask = ask._replace(elsewhere=load_units.names_elsewhere(self._sharded.module, self._sharded.world))
        values: Values | None = None

        def look() -> LoadPlan | None:
            nonlocal values
            there = find(check_folder(load_dir, "load_checkpoint(): load_dir"), None if tag is None else str(tag))
            if there is None:
                return None
            plan = self._fitted(*there, ask)
            values = _saved_values(plan, self._sharded.world.rank, self._sharded.world.size)
            if values.shared is not None and not load_module_only:
                check(self._engine, values.shared, load_optimizer_states, load_lr_scheduler_states, str(plan.place))
            return plan

        world, what = self._sharded.world, "load_checkpoint"
        plan = find_alike(look, world, what)
        if plan is None:
            rank_zero(logging.WARNING, "load_checkpoint: %s", without_latest(Path(load_dir)))
            return None, None
        self._take(what, plan, not (load_optimizer_states or load_module_only), custom_load_fn)
        together(lambda: self._sharded.module.load_state_dict(values.extra, strict=False), world, what)
        if not load_module_only:
            together(lambda: self._resume(values, load_optimizer_states, load_lr_scheduler_states), world, what)
        self._engine._status.half_loaded = None
        return str(plan.place), values.client

    def take_weights(self, look: Callable[[Collection[str], Axis], tuple[Path, Index]], strict: bool) -> Match:
        """The weights, exact, of what `look` finds for a module with these buffers; for `zero.load_weights`."""
        self._saving.join()
        buffers, world = saved_buffers(self._sharded.module), self._sharded.world
        ask = Ask(strict=strict, elsewhere=load_units.names_elsewhere(self._sharded.module, world))
        plan = find_alike(lambda: self._fitted(*look(buffers, world), ask), world, "load_weights")
        self._take("load_weights", plan, False, None)
        self._engine._status.half_loaded = None
        return plan.match

    def _resume(self, values: Values, optimizer: bool, scheduler: bool) -> None:
        """Bring back what is not of the model."""
        if values.shared is None:
            self._engine.global_steps = values.steps
            rank_zero(
                logging.WARNING, "the checkpoint is another program's: schedule, data and random numbers begin anew"
            )
            return
        restore(self._engine, values.shared, values.own, optimizer=optimizer, scheduler=scheduler)

    def _fitted(self, place: Path, index: Index, ask: Ask) -> LoadPlan:
        """Raises RuntimeError where no load may begin, ValueError where the engine cannot take what is there."""
        self._engine._status.check(loading=True)
        self._engine._status.check_outside("loading")
        if self._optimizer is not None:
            self._optimizer.settle()
        self._sharded.check_parameters()
        held = [unit.plan.name for unit in self._sharded.units if unit.holds]
        if held:
            raise RuntimeError(f"loading while GatheredParameters holds {held} open; load outside of it")
        parts = (part for unit in self._sharded.units for part in unit.plan.layout.fragments(unit.shard.window))
        ask = ask._replace(left_out=index.excluded)
        return fit(place, index, ask, self._wanted(), self._sharded.module, parts, "engine")

    def _wanted(self) -> list[TargetParameter]:
        """What this engine has, in its terms for a checkpoint."""
        names, wanted, keys = load_units.names_of_parameters(self._sharded.module), [], {}
        for unit in self._sharded.units:
            group, states = None, ((), ())
            if unit.shard.master is not None and self._optimizer is not None:
                group = unit.plan.group
                if group not in keys:
                    keys[group] = self._optimizer.states.keys(unit, self._optimizer.param_groups[group])
                states = keys[group]
            for param in unit.params:
                own = owner_of(param).name
                others = [name for name in names.get(id(param), ()) if name != own]
                dtype = NAMES[unit.shard.values.dtype]
                shape = full_shape(owner_of(param))
                wanted.append(TargetParameter((own, *others), shape, dtype, unit.plan.name, group, *states))
        return wanted

    @torch.no_grad()
    def _take(self, what: str, plan: LoadPlan, anew: bool, custom: Callable[..., Any] | None) -> None:
        """Change the engine; `anew`: the optimizer begins anew. Raises on all ranks where one cannot read.

        The engine is half loaded until the caller, which may have more to load, says otherwise.
        """
        sharded, place = self._sharded, plan.place
        self._engine._status.half_loaded = (
            f"the engine is half loaded: loading {place} was broken off. Load a checkpoint that is whole, or "
            "call destroy()"
        )
        sharded.recover()
        self._engine._training.means.average_replicas()  # what is not loaded is to be alike on all, too
        self._engine.zero_grad()
        self._engine._accumulation.restart()
        for unit in sharded.units:
            unit.invalidate()
        try:
            state = together(lambda: self._read(plan, anew, custom is not None), sharded.world, what)
        except Exception:
            if not sharded.world.watchdog.broken:
                self._renew()  # what comes next needs the full copies
            raise
        self._renew()
        if custom is not None:
            with GatheredParameters(sharded.module.parameters(), modifier_rank=0):
                together(lambda: custom(src=state, dst=sharded.module), sharded.world, what)
        for line in plan.match.warnings:
            rank_zero(logging.WARNING, "loading %s: %s", place, line)
        if left_out := plan.match.left_out:
            rank_zero(logging.INFO, "loading %s: frozen and not saved, so as before: %s", place, left_out)

    def _read(self, plan: LoadPlan, anew: bool, custom: bool) -> dict[str, torch.Tensor] | None:
        """This rank's part of everything; `custom`: returns the state_dict instead of taking weights and buffers."""
        with Reader(plan.place, plan.index) as reader:
            loader = UnitLoader(reader, plan, self._optimizer)
            for unit in self._sharded.units:
                loader.load(unit, anew)
            reader.finish()
            index = plan.index
            if custom:  # the whole model as it computed, in host memory
                stored = {name: (each.weight, f"weight of '{name}'") for name, each in index.parameters.items()}
                stored |= {name: (each, f"buffer '{name}'") for name, each in index.buffers.items()}
                state = {name: reader.whole(*each) for name, each in stored.items()}
                return state | {name: state[other] for name, other in index.tied.items()}
            world, ranks, own = self._sharded.world, index.ranks, {}
            if len(ranks) == world.size:
                own = (ranks[world.rank] or {}).get("buffers", {})
            load_units.load_buffers(reader, self._sharded.module, plan.match.buffers, own)
        return None

    def _renew(self) -> None:
        """Gather the units that stay whole again; collective."""
        kept = [unit for unit in self._sharded.units if unit.stays_full]
        for unit in kept:
            unit.gather()
        for unit in kept:
            unit.wait()


def _saved_values(plan: LoadPlan, rank: int, world_size: int) -> Values:
    """Read them, behind this rank's share of the headers; of more ranks new ones get random numbers of their own."""
    index = plan.index
    check_headers(plan.place, index, rank, world_size)
    with Reader(plan.place, index) as reader:
        state = RunState(reader)
        own = None
        if index.world_size == world_size:
            own = state.rank(rank)
        elif index.ranks and (first := state.rank(0)) is not None:
            saved = [first, *(state.rank(at) if at in (1, rank) else None for at in range(1, index.world_size))]
            own = {"random": for_rank([each and each["random"] for each in saved], rank, state.steps)}
        return Values(state.engine(), own, state.client(), state.extra(), state.steps)
