"""Steps and evaluations of a model whose stages lie on several ranks: `train_batch` and `eval_batch`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zero.core import comm
from zero.core.agree import agree
from zero.core.comm import Axis
from zero.core.sharded_module import ShardedModule
from zero.core.tensors import find_loss
from zero.core.tree import Leaf
from zero.engine.accumulation import Accumulation
from zero.engine.feed import Feed
from zero.engine.randomness import Randomness
from zero.engine.status import Status
from zero.engine.step import TrainingStep
from zero.parallel.pipeline.build import Pipelined
from zero.parallel.pipeline.partition import in_eval
from zero.parallel.pipeline.runner import Calls, Runner
from zero.parallel.pipeline.stage import Batch, Stage
from zero.plan.pipeline import forward_orders
from zero.watchdog.hang_report import Phase


class Pipeline:
    """An engine's stages on this rank; feed: where micro-batches come from; stepping: `train_batch` is in its step."""

    def __init__(
        self,
        pipelined: Pipelined,
        training: TrainingStep,
        accumulation: Accumulation,
        sharded: ShardedModule,
        status: Status,
        data: Axis,
    ) -> None:
        config = accumulation.config
        self.pipelined, self.stepping = pipelined, False
        self._training, self._accumulation, self._sharded = training, accumulation, sharded
        self._status, self._data = status, data
        self._along = sharded.meshes.along("pp")
        needs_data = self.is_first or self.is_last or pipelined.divided.every_stage_reads
        self.feed = Feed(sharded, pipelined, needs_data)
        each = config.reduces_each or (sharded.sharding.grads and config.pipeline.gather == "use")
        how = config.pipeline.gather == "step", each
        self._runner = Runner(pipelined.stages(), self._along, sharded, *how)
        self._whole = training.model
        if len(pipelined.places) > 1 and training.randomness is None:
            # Ranks that were seeded alike would drop the same places in every stage.
            training.randomness = Randomness(sharded.world, sharded.device, sharded.meshes.apart)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model, where all of it is here."""
        if len(self.pipelined.places) == 1:
            return self._whole(*inputs, **kwargs)
        raise RuntimeError(
            "engine(x) of a model whose stages lie on several ranks; call engine.train_batch(data_iter), which steps, "
            "too, or engine.eval_batch(data_iter)"
        )

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage."""
        return 0 in self.pipelined.here

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return len(self.pipelined.places) - 1 in self.pipelined.here

    @property
    def micro_batches(self) -> int:
        """Batches of one schedule, of which a step has one or several."""
        config = self._accumulation.config
        return config.pipeline.micro_batches or config.gradient_accumulation_steps

    def train_batch(self, step: Callable[[], None], data_iter: Iterator[Any] | None) -> torch.Tensor:
        """See `Engine.train_batch`. step: the engine's."""
        self._status.check()
        config = self._accumulation.config
        schedules, results = config.gradient_accumulation_steps // self.micro_batches, []
        try:
            with self._accumulation.schedule():
                first = 0
                for number in range(schedules):
                    batches = self.feed.take("train_batch", data_iter, self.micro_batches, config)
                    results.append(self._train(batches, first, number == schedules - 1))
                    first += len(batches)
        except BaseException:
            self._training.abandon()
            raise
        self._status.micro_steps += config.gradient_accumulation_steps - 1
        self.stepping = True
        try:
            step()
        finally:
            self.stepping = False
        found = torch.cat(results)
        counts = found[:, 2].sum() if config.counted else torch.ones_like(found[0, 0])
        return self._over_data((found[:, 0] * found[:, 1]).sum(), counts)

    def _train(self, batches: Sequence[Batch], first: int, last: bool) -> torch.Tensor:
        """Run one schedule; returns of each micro-batch its loss, its share of the step's, and its count [n, 3]."""
        training, reducer, config = self._training, self._sharded.reducer, self._accumulation.config
        losses = torch.zeros(len(batches), 3, dtype=torch.float64, device=self._sharded.device)

        def forward(stage: Stage, values: Any, batch: Batch) -> Any:
            reducer.leaf = Leaf(first + batch.number)
            if not stage.index:
                training.recorder.batch((batch.args, batch.kwargs))
            return self._forward(stage, values, batch)

        def loss(output: Any, number: int) -> torch.Tensor:
            value, tokens = self._loss(output, batches[number])
            weight, share = training.weight_of(tokens), batches[number].share
            of_step = weight.factor if config.counted else share / config.gradient_accumulation_steps
            losses[number, 0] = value.detach()
            losses[number, 1:] = torch.tensor([of_step, weight.count], dtype=torch.float64)
            return training.scaled(value, 1.0 if config.counted else share, weight)

        self._runner.train(
            self.pipelined.schedule_of(len(batches)), batches, Calls(forward, loss, self._backward), first, last
        )
        comm.broadcast(losses, self.pipelined.places[-1], self._along, "losses")
        counts = losses[:, 2].tolist() if config.counted else [1.0] * len(batches)
        for (value, share, _), count in zip(losses, counts, strict=True):
            training.recorder.backward(value, share, 0.0, count)
        reducer.end_schedule(counts)
        return losses

    def _forward(self, stage: Stage, values: Any, batch: Batch) -> Any:
        if self._training.randomness is not None:
            self._training.randomness.part = stage.index

        def run(values: Any, args: Any, kwargs: Any) -> Any:
            def model(*args: Any, **kwargs: Any) -> Any:
                return stage.run(values, batch._replace(args=args, kwargs=kwargs))

            if self._training.forms.sharing is not None:
                return self._training.forms.sharing.run(model, lambda: False, *args, **kwargs)
            return model(*args, **kwargs)

        return self._training.run(run, (values, batch.args, batch.kwargs), {})

    @contextlib.contextmanager
    def _backward(self) -> Iterator[None]:
        with self._sharded.world.watchdog.call(Phase.BACKWARD), self._training.recorder.phase("backward"):
            yield

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool,
        compute_loss: bool,
        reduce_output: str | None,
        bcast_loss: bool,
        num_micro_batches: int | None,
    ) -> Any:
        """See `Engine.eval_batch`."""
        self._status.check()
        config = self._accumulation.config
        batches = self.feed.take("eval_batch", data_iter, num_micro_batches or self.micro_batches, config)
        outputs: dict[int, Any] = {}

        def keep(output: Any, number: int) -> Any:
            outputs[number] = output
            return output

        schedule = forward_orders(self.pipelined.schedule_of(len(batches)))
        with in_eval(self._sharded.module), torch.no_grad():
            self._runner.evaluate(schedule, batches, Calls(self._forward, keep, self._backward))
        given = [outputs[number] for number in range(len(batches))] if self.is_last else []
        result = None
        if compute_loss:
            shares = [batch.share for batch in batches]
            values = [self._value(output, batch) for output, batch in zip(given, batches, strict=False)]
            result = self._mean(values, shares, reduce_output == "avg", bcast_loss)
        logits: Any = given or None
        if given and all(isinstance(each, torch.Tensor) and each.ndim for each in given):
            logits = torch.cat(given)
        return (result, logits) if return_logits else result

    def _value(self, output: Any, batch: Batch) -> torch.Tensor:
        """The loss, or the output of a model that has none."""
        if self.pipelined.loss_fn is not None or find_loss(output) is not None:
            return self._loss(output, batch)[0]
        if not isinstance(output, torch.Tensor):
            raise ValueError(
                f"eval_batch(): the model returned {type(output).__name__} and initialize() was given no loss_fn, so "
                "there is nothing to average; ask for return_logits=True, compute_loss=False"
            )
        return output

    def _mean(self, values: Sequence[torch.Tensor], shares: Sequence[float], over_data: bool, broadcast: bool) -> Any:
        """The mean of what the last stage has, on it or, if `broadcast`, on all ranks."""
        mean = None
        if values:
            mean = sum(value.double() * share for value, share in zip(values, shares, strict=True)) / sum(shares)
        if broadcast:
            here = mean is not None and [*mean.shape]
            shape = agree(here, self._along)[self.pipelined.places[-1]]
            mean = torch.empty(shape, dtype=torch.float64, device=self._sharded.device) if mean is None else mean
            comm.broadcast(mean, self.pipelined.places[-1], self._along, "outputs")
        if over_data and mean is not None and not mean.ndim:
            return self._over_data(mean, torch.ones_like(mean))
        return None if mean is None else mean.float()

    def _over_data(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """The sum of totals over the sum of counts of all ranks with samples of their own, fp32 []."""
        sums = comm.gather_scalars(torch.stack([total, count]), self._data, "losses", read=False).sum(0)
        return (sums[0] / sums[1]).float()

    def _loss(self, output: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
        """The loss of a micro-batch, and how many it is the mean over, None where that is not said."""
        found, tokens = output, batch.kwargs.get("num_items_in_batch") if self._accumulation.config.counted else None
        if self.pipelined.loss_fn is not None:
            found = self.pipelined.loss_fn(output, batch.target)
        if isinstance(found, tuple) and len(found) == 2 and self._accumulation.config.counted:
            found, tokens = found
        loss = find_loss(found)
        if loss is None:
            raise ValueError(
                f"a pipeline wants the loss of each micro-batch; got {type(found).__name__}, in which there is none (a "
                "scalar tensor, .loss, ['loss'] or [0]); give initialize(loss_fn=<function of (output, target)>)"
            )
        return loss, tokens
