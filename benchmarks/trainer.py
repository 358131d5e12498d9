"""Step time of Transformers' Trainer over zero beside the same loop by hand, step by step in turn in one run.

    python benchmarks/trainer.py --ranks 2 --stage 2

Both have the same model, data, optimizer, schedule and JSON, and engines of their own. A step of the Trainer reaches
from the end of one to the end of the next, with its loader, callbacks and logging; between two of them a step by hand
has its turn, which does not count. The ratio is taken pair by pair, and its median is to be at most 1.03; run it on an
idle machine.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measure import machine_line, paired, run_ranks, slowest, stat, table


class Counts(NamedTuple):
    """What is trained, and for how long."""

    stage: int
    steps: int
    warmup: int
    layers: int
    width: int
    length: int
    batch: int


def settings(counts: Counts) -> dict[str, Any]:
    """The JSON of both."""
    section = {"stage": counts.stage}
    return {"train_micro_batch_size_per_gpu": counts.batch, "gradient_clipping": 1.0, "zero_optimization": section}


def model_and_data(counts: Counts) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A random Llama, and rows for all steps of all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": counts.width, "intermediate_size": 4 * counts.width, "num_hidden_layers": counts.layers}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_attention_heads=8, **sizes))
    rows = torch.randint(
        0, 4096, (counts.batch * (counts.warmup + counts.steps) * dist.get_world_size(), counts.length)
    )
    return model, [{"input_ids": row, "labels": row} for row in rows]


class ByHand:
    """The loop without Trainer."""

    def __init__(self, counts: Counts) -> None:
        import deepspeed
        from transformers import default_data_collator, get_linear_schedule_with_warmup

        model, rows = model_and_data(counts)
        groups = [[], []]  # Trainer's: what decays, and norms, which do not
        for param in model.parameters():
            groups[param.ndim < 2].append(param)
        optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-4, weight_decay=0.0)
        schedule = get_linear_schedule_with_warmup(optimizer, 0, counts.warmup + counts.steps)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings(counts)
        )
        mine = torch.utils.data.DistributedSampler(rows, shuffle=False)
        loader = torch.utils.data.DataLoader(rows, counts.batch, sampler=mine, collate_fn=default_data_collator)
        self.batches = iter(loader)

    def step(self) -> float:
        """One step; its loss."""
        loss = self.engine(**next(self.batches)).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()


def timed(rank: int, counts: Counts) -> tuple[list[float], list[float]]:
    """Seconds of each step after the warm-up, by Trainer and by hand: the maximum over ranks."""
    importlib.import_module("zero.as_deepspeed")  # first, wherever imports are sorted to
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    hand = ByHand(counts)
    times: dict[str, list[float]] = {"trainer": [], "hand": []}

    class Turns(TrainerCallback):
        began = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times["trainer"].append(time.perf_counter() - self.began)
            dist.barrier()
            began = time.perf_counter()
            hand.step()
            times["hand"].append(time.perf_counter() - began)
            dist.barrier()
            self.began = time.perf_counter()

    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out,
            deepspeed=settings(counts),
            per_device_train_batch_size=counts.batch,
            max_steps=counts.warmup + counts.steps,
            learning_rate=1e-4,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        model, rows = model_and_data(counts)
        trainer = Trainer(model, args, train_dataset=rows, data_collator=default_data_collator, callbacks=[Turns()])
        trainer.train()
    return slowest(times["trainer"][counts.warmup :]), slowest(times["hand"][counts.warmup :])


def main() -> None:
    """Print the medians and the ratio, pair by pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    for name, value in Counts(stage=2, steps=40, warmup=5, layers=6, width=384, length=256, batch=4)._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    options = vars(parser.parse_args())
    ranks, counts = options.pop("ranks"), Counts(**options)
    trainer, hand = run_ranks(timed, ranks, counts)
    rows = [
        (name, stat([1e3 * each for each in values]).text(1))
        for name, values in (("Trainer", trainer), ("by hand", hand))
    ]
    print(machine_line(), "", table(("stage " + str(counts.stage), "ms/step"), rows), "", sep="\n")
    print(f"Trainer / by hand, pair by pair: {paired(trainer, hand).text(3)}")


if __name__ == "__main__":
    main()
