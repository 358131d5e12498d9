"""Lightning's Trainer over zero's engine, with one process or many, on GPUs and on the CPU.

    from zero.lightning import ZeroStrategy
    trainer = lightning.Trainer(strategy=ZeroStrategy(stage=3), precision="bf16-true", gradient_clip_val=1.0)

Lightning starts the processes, deals out the data and steps the schedulers; forward, backward, step and checkpoint are
the engine's. Importing this file also gives Trainer the names "zero" and "zero_stage_1" to "zero_stage_3".
"""

from __future__ import annotations

import copy
import gc
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers, _MockOptimizer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig

from zero.checkpoint.plain_values import as_json, encode
from zero.config.errors import ConfigError
from zero.config.read import read
from zero.core.comm import local_device
from zero.engine import Engine, initialize
from zero.engine.checkpoint import random_state
from zero.engine.init import Init
from zero.engine.joining import init_distributed

_SECTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "32-true": {},
    "bf16-mixed": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    "16-mixed": {"torch_autocast": {"enabled": True, "dtype": "fp16"}},
    "bf16-true": {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}},
    "16-true": {"fp16": {"enabled": True}, "data_types": {"buffer_dtype": "fp16"}},
}
_OPTIONS = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("process_group_backend", "timeout"),
)


class ZeroPrecision(Precision):
    """What the Trainer's precision means for the engine, which scales losses and clips gradients in its step.

    lightning: the Trainer's own plugin, which goes on converting inputs and setting what a step's new tensors are.
    Raises MisconfigurationException for a precision that the engine does not have.
    """

    def __init__(self, lightning: Precision | None = None) -> None:
        lightning = Precision() if lightning is None else lightning
        if type(lightning) not in (Precision, HalfPrecision, MixedPrecision) or lightning.precision not in _SECTIONS:
            raise MisconfigurationException(
                f"ZeroStrategy: got {type(lightning).__name__} with precision {lightning.precision!r}; wanted "
                f"Trainer(precision=...) of {', '.join(_SECTIONS)}"
            )
        self.precision = lightning.precision
        self._clipped = False
        self.forward_context = lightning.forward_context
        self.convert_input = lightning.convert_input

    def backward(self, tensor: torch.Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run the engine's backward, or the module's own on the scaled loss; Lightning has divided it already."""
        engine = model.trainer.strategy.engine
        if is_overridden("backward", model):
            model.backward(engine.scale(tensor * engine.gradient_accumulation_steps()), *args, **kwargs)
        else:
            engine.backward(tensor, *args, scale_wrt_gas=False, **kwargs)

    def optimizer_step(
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> torch.Tensor | None:
        """Run the closure, then the engine's step, if there are gradients: `training_step` may have returned None."""
        engine = model.trainer.strategy.engine
        loss = closure()
        self._clipped = False
        self._after_closure(model, optimizer)
        if model.automatic_optimization and not self._clipped:
            rank_zero_warn("ZeroStrategy: configure_gradient_clipping() called no self.clip_gradients(): no clipping")
        if engine._accumulation.pending():
            engine.step(**kwargs)
        engine.optimizer.clipping = engine.gradient_clipping()
        return loss

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Have the next step clip the norm of all gradients together to `clip_val`; 0 leaves it to the config."""
        if clip_val and gradient_clip_algorithm != GradClipAlgorithmType.NORM:
            raise MisconfigurationException(
                f"ZeroStrategy: got gradient_clip_algorithm={gradient_clip_algorithm.value!r}; the engine clips 'norm'"
            )
        self._clipped = True
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        optimizer.clipping = clip_val or optimizer.clipping


class ZeroStrategy(DDPStrategy):
    """Trains with ZeRO; a `Trainer(strategy=...)`.

    stage: 0 to 3, of a config that does not say it; 2 unless given. config: the engine's JSON, a path or a dict; what
    Trainer's arguments say (precision, accumulation, clipping) may be left out of it, or must agree. options: those
    of Lightning's DDPStrategy that are of processes and plugins: accelerator, parallel_devices, cluster_environment,
    checkpoint_io, precision_plugin, process_group_backend, timeout.

    `configure_optimizers` returns one optimizer, with any schedulers, unless the config has a section `optimizer`. A
    model that `configure_model` builds is cut while it is built, at stage 3. Checkpoints are folders, which load at any
    number of ranks; those of weights only are Lightning's own files. After a fit the engine stays, so that tests and
    `trainer.save_checkpoint` use it: at stage 3 the parameters are still cut until `strategy.engine.destroy()`.
    Raises MisconfigurationException for what cannot be, ConfigError for the config.
    """

    strategy_name = "zero"
    restore_checkpoint_after_setup = True  # by the engine,
    lightning_restore_optimizer = False  # which takes the optimizer's state at once

    def __init__(
        self, stage: int | None = None, config: str | os.PathLike | Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            raise TypeError(f"ZeroStrategy: got {', '.join(unknown)}; wanted stage, config, {', '.join(_OPTIONS)}")
        super().__init__(**options)
        self._forward_redirection = _ForwardRedirection()
        self._engine: Engine | None = None
        self._random: dict[str, Any] | None = None  # this rank's random numbers as a checkpoint has them
        source = read({} if config is None else config)
        if source.errors:
            raise ConfigError(source.errors, source.name)
        self._said = source.values
        section = self._said["zero_optimization"] = self._said.get("zero_optimization") or {}
        if stage is not None and section.setdefault("stage", stage) != stage:
            raise MisconfigurationException(f"ZeroStrategy(stage={stage}): the config says stage {section['stage']}")
        section.setdefault("stage", 2)

    @property
    def engine(self) -> Engine:
        """The engine of the running fit or evaluation, or of the last one; RuntimeError before the first."""
        if self._engine is None:
            raise RuntimeError("ZeroStrategy: there is no engine before fit, validate, test or predict")
        return self._engine

    @DDPStrategy.precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """The Trainer's precision, as the engine does it."""
        self._precision_plugin = plugin if isinstance(plugin, ZeroPrecision | None) else ZeroPrecision(plugin)

    def setup_distributed(self) -> None:
        """Join the process group."""
        super().setup_distributed()
        init_distributed()  # says in the environment which rank this is, where only the launcher's own variables do
        if local_device() != torch.device(self.root_device.type, self.root_device.index):
            raise MisconfigurationException(
                f"ZeroStrategy: Trainer gave this rank device '{self.root_device}', the engine takes "
                f"'{local_device()}', the visible GPU of its local rank; set CUDA_VISIBLE_DEVICES"
            )

    def setup(self, trainer: Trainer) -> None:
        """Make the engine. To evaluate the module of the last fit, its engine goes on."""
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        module, last = self.lightning_module, self._engine
        if last is not None and last.module is module:
            if not fitting and not last._status.destroyed:
                self.model = last
                return
            last.destroy()
        last = self._engine = None
        self._reset_optimizers_and_schedulers()
        gc.collect()  # so that an engine of a Trainer that is gone lets go of the module
        config, client = self._config(trainer), None
        if fitting:
            module = self._layer_sync.apply(module) if self._layer_sync else module
            client = self._client(config)
        else:
            config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
        made = initialize(model=module, optimizer=client, config=config, dist_init_required=False)
        self._engine = self.model = made[0]
        if fitting:
            self._engine.set_gradient_accumulation_boundary(True)
            self.optimizers = [made[1]]
        if made[3] is not None:
            self._engine.lr_scheduler = None  # Lightning's to step, and to save
            self.lr_scheduler_configs = [LRSchedulerConfig(made[3], interval="step")]

    def _config(self, trainer: Trainer) -> dict[str, Any]:
        """The config, completed by what the Trainer's arguments say; MisconfigurationException where the two differ."""
        config, precision = copy.deepcopy(self._said), self.precision_plugin.precision
        asked = {
            "gradient_accumulation_steps": ("accumulate_grad_batches", trainer.accumulate_grad_batches),
            "gradient_clipping": ("gradient_clip_val", trainer.gradient_clip_val),
        }
        for key, (argument, value) in asked.items():
            said = config.get(key)
            if None not in (said, value) and said not in ("auto", value):
                raise MisconfigurationException(f"ZeroStrategy: {key} is {said}, and Trainer({argument}={value})")
            config[key] = value or 0 if said in (None, "auto") else said
        batch = "train_batch_size", "train_micro_batch_size_per_gpu"
        if all(config.get(key) in (None, "auto") for key in batch):  # they are for the engine's log only
            config = {key: value for key, value in config.items() if key != batch[0]} | {batch[1]: 1}
        config.setdefault("steps_per_print", math.inf)  # Lightning has a progress bar
        for kind in ("fp16", "bf16", "torch_autocast"):
            config[kind] = section = dict(config.get(kind) or {})
            if section.get("enabled") == "auto":
                section["enabled"] = False
            if section.get("enabled") and _SECTIONS[precision] and kind not in _SECTIONS[precision]:
                raise MisconfigurationException(
                    f"ZeroStrategy: the config enables {kind}, and Trainer has {precision=}"
                )
        for key, section in _SECTIONS[precision].items():
            config[key] = {**(config.get(key) or {}), **section}
        return config

    def _client(self, config: Mapping[str, Any]) -> Any:
        """The optimizer of `configure_optimizers`; None where the config has one."""
        if "optimizer" in config:
            rank_zero_info("ZeroStrategy: the config has an optimizer; configure_optimizers() is not called")
            return None
        optimizers, self.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(self.lightning_module)
        if len(optimizers) != 1 or isinstance(optimizers[0], _MockOptimizer):
            raise MisconfigurationException(
                f"ZeroStrategy: configure_optimizers() gave {[type(each).__name__ for each in optimizers]}; wanted one "
                "optimizer (parameter groups may differ), or a section `optimizer` in the config"
            )
        if self.lr_scheduler_configs and "scheduler" in config:
            raise MisconfigurationException(
                "ZeroStrategy: a scheduler in the config, and one of configure_optimizers()"
            )
        return optimizers[0]

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around `configure_model`: at stage 3 each parameter is resharded as soon as its module is complete."""
        with Init(config=self._config(self.lightning_module.trainer)):
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, in the engine's forward; not with manual optimization, whose backward and step come inside."""
        if self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around a micro-batch before the last of its step, which Lightning counts."""
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
            if not self.engine._accumulation.idle:  # `training_step` may have returned None
                self.engine.step()
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: the engine saves the state."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write the folder `filepath`; or, for weights only, the file, from rank 0. Collective.

        Hyper-parameters that JSON and tensors cannot tell become text, to be looked up; anything else of the kind is a
        ValueError that names it. OSError where a rank cannot write.
        """
        filepath = str(self.broadcast(filepath))  # a name may have a metric in it, which ranks differ in
        if storage_options is not None or ("://" in filepath and "optimizer_states" in checkpoint):
            raise ValueError(f"ZeroStrategy: got {filepath!r} with {storage_options=}; the engine writes local folders")
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        if "optimizer_states" in checkpoint:
            client = {key: _plain(key, value) for key, value in rest.items()}
            folder = os.path.split(os.path.abspath(filepath))
            self.engine.save_checkpoint(*folder, client_state=client, save_latest=False)
            return
        weights = self.engine._consolidated_16bit_state_dict()
        if weights is not None:
            rest["state_dict"] = {name: weights[name] for name in checkpoint["state_dict"]}
            self.checkpoint_io.save_checkpoint(rest, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What Lightning saved of itself; of a folder, the engine takes the rest at once. Collective."""
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if not os.path.isdir(checkpoint_path):
            if fitting:
                rank_zero_warn("ZeroStrategy: the checkpoint is a file of Lightning's; the optimizer begins anew")
            return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        strict = self.lightning_module.strict_loading
        folder = os.path.split(os.path.abspath(checkpoint_path))
        client = self.engine.load_checkpoint(*folder, load_module_strict=strict, load_module_only=not fitting)[1]
        self._random = random_state.capture(self.root_device) if fitting else None
        return client

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take the weights of a file of Lightning's; those of a folder are there already."""
        if "state_dict" in checkpoint:
            self.engine.load_module_state_dict(checkpoint["state_dict"], strict=strict)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, once the one that is being written beside the training loop is whole."""
        self.engine.wait_for_checkpoint()
        super().remove_checkpoint(filepath)

    def on_train_start(self) -> None:
        """Inside an epoch, go on with the random numbers as saved: its loader, made anew, has drawn some."""
        epochs = self.lightning_module.trainer.fit_loop
        batches, state, self._random = epochs.epoch_loop, self._random, None
        over = batches.restarted_on_train_batch_end and batches.batch_progress.is_last_batch
        if state is not None and epochs.restarted_mid_epoch and not over:
            random_state.restore(state, self.root_device)

    def on_train_end(self) -> None:
        """Wait for a checkpoint that is being written beside the training loop."""
        self.engine.wait_for_checkpoint()

    def teardown(self) -> None:
        """Let go of everything but the engine; not collective, as it comes after an exception, too."""
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Give Trainer the names "zero" and "zero_stage_1" to "zero_stage_3"."""
        strategy_registry.register("zero", cls, description="ZeRO stage 2 of zero", override=True)
        for stage in (1, 2, 3):
            name = f"zero_stage_{stage}"
            strategy_registry.register(name, cls, description=f"ZeRO stage {stage} of zero", override=True, stage=stage)


def _plain(key: str, value: Any) -> Any:
    """What of Lightning's own state goes into a checkpoint of the engine."""
    if "hparams" not in key and "hyper_parameters" not in key:
        return value
    try:
        encode(value, key)
    except ValueError:
        return as_json(value)
    return value


ZeroStrategy.register_strategies(StrategyRegistry)
