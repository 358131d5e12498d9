"""sentence-transformers at stage 3: its trainer, and its models, save what they hold, which is cut."""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.func import functional_call

import zero
from deepspeed.comm import _engines
from zero.core.owner import is_released
from zero.log import rank


class _Whole(nn.Module):
    """Calls a method of a trainer."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.model = trainer.model

    def forward(self, method: Any, *args: Any) -> None:
        method(*args)


def save_whole() -> None:
    """Have what is imported of the library save whole weights: those its trainer is given, or gathered ones."""
    models, trainers = (sys.modules.get(f"sentence_transformers.base.{name}") for name in ("model", "trainer"))
    if trainers is None or trainers.BaseTrainer._save.__module__ == __name__:
        return
    save_trained, save = trainers.BaseTrainer._save, models.BaseModel.save

    @functools.wraps(save_trained, ("__doc__",))
    def _save(self: Any, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not _is_cut(self.model):
            save_trained(self, output_dir, state_dict)
        elif state_dict:  # rank 0 alone has it, and other ranks need not be here
            weights = {f"model.{name}": value for name, value in state_dict.items()}
            with _alone(self.model):
                functional_call(_Whole(self), weights, (save_trained, self, output_dir), tie_weights=False)

    @functools.wraps(save, ("__doc__",))
    def _save_model(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_cut(self):
            save(self, *args, **kwargs)
            return
        with zero.GatheredParameters(self.parameters()):
            if rank() == 0:
                with _alone(self):
                    save(self, *args, **kwargs)

    trainers.BaseTrainer._save, models.BaseModel.save = _save, _save_model


@contextlib.contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """Forwards inside, such as those for a model card, wait for no other rank; all weights are there."""
    held = [(each._sharded, each._sharded.hooked) for each in _engines if each._sharded and each.module is model]
    for sharded, modules in held:
        sharded.unhook(modules)
    try:
        yield
    finally:
        for sharded, modules in held:
            sharded.hook(modules)


def _is_cut(model: nn.Module) -> bool:
    return any(map(is_released, model.parameters()))
