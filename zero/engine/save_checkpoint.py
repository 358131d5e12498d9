"""Saving an engine."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero.checkpoint import folder
from zero.checkpoint.assemble import assemble, file_name, line_of
from zero.checkpoint.exchange import Exchange
from zero.checkpoint.safe_file import NAMES, Piece, write
from zero.config import Config
from zero.core.wrap import Sharded
from zero.engine.saving import buffer_pieces, by_file, config_of, numbers, saved_buffers, tied_names, unit_pieces
from zero.optim.optimizer import ZeroOptimizer


class SaveCheckpoint:
    """`save_checkpoint`; mixed into the engine."""

    module: nn.Module
    optimizer: ZeroOptimizer | None
    global_steps: int
    device: torch.device
    config: Any
    _config: Config
    _sharded: Sharded
    _exchange: Exchange

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything that a run needs to go on, to `save_dir`/`tag` (default: global_step<N>)."""
        self._alive()
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        target = Path(save_dir) / tag
        save = self._exchange.all(secrets.token_hex(4))[0]
        rank, world_size = self._exchange.rank, self._exchange.world_size
        target.mkdir(parents=True, exist_ok=True)
        lines, files = [], {}
        for kind, pieces in by_file(iter(self._pieces())).items():
            path = target / file_name(kind, rank, world_size, save)
            lines += [line_of(*written) for written in write(path, pieces)]
            files[path.name] = path.stat().st_size
        folder.sync(target)
        told = self._exchange.all({"lines": lines, "files": files})
        if rank == 0:
            every = [line for one in told for line in one["lines"]]
            values = {
                "save": save,
                "tag": tag,
                "files": {name: size for one in told for name, size in one["files"].items()},
                "tied": tied_names(self.module),
                "shared": {"global_steps": self.global_steps},
                "ranks": tuple({} for _ in told),
                "signed": self._signed(),
                "config": config_of(self.config),
                "rotates": save_latest,
            }
            index = assemble(every, self._known(), values)
            folder.publish(target / folder.INDEX, index.to_json())
            if save_latest:
                folder.publish(Path(save_dir) / folder.LATEST, tag + "\n")
        self._exchange.all(None)
        return True

    def _pieces(self) -> list[Piece]:
        found = buffer_pieces(saved_buffers(self.module)) if self._exchange.rank == 0 else []
        for unit in self._sharded.units:
            unit.take_edits()
            with unit.borrow():  # cloned: what rests in a file is here only for now
                pieces = unit_pieces(unit, self.optimizer)
                found += [piece._replace(values=piece.values.clone()) for piece in pieces]
        return found

    def _known(self) -> dict[str, dict[str, Any]]:
        known = {}
        for unit in self._sharded.units:
            more = numbers(unit, self.optimizer) if unit.master is not None else {}
            group = unit.plan.group if unit.master is not None else None
            for spec, param in zip(unit.plan.params, unit.params, strict=True):
                dtype = NAMES[unit.shard.dtype]
                known[spec.name] = {"group": group, "numbers": more, "dtype": dtype, "shape": tuple(param.shape)}
        return known

    def _signed(self) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for unit in self._sharded.trained if self.optimizer is not None else ():
            group = self.optimizer.param_groups[unit.plan.group]
            for part in unit.plan.layout.fragments(unit.window)[:1]:
                with unit.borrow():
                    kept = self.optimizer.rule.kept(unit, group, part)
                    found.update({key: state.signed for key, state in kept.items()})
        return found
