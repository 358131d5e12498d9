"""Train a byte-level GPT on text with the zero engine, on as many ranks as it is started with.

    zero run --num_gpus 2 examples/gpt/train.py --config examples/gpt/zero3.json
    torchrun --nproc_per_node 2 examples/gpt/train.py --config examples/gpt/zero1.json
    mpirun -n 2 python examples/gpt/train.py --config examples/gpt/zero2.json

What the JSON says (batch, optimizer, schedule, precision, clipping, stage) is no flag here. The same seed and
text give the same losses under every stage. With `--save DIR` the run saves itself every so often and, started
again, goes on where it was, with the losses of a run that was never interrupted. At the end: the validation loss
beside that of a bigram model, a sample, the bytes of model state on this rank beside the formula of the ZeRO
paper, and loss.png and loss.csv in `--out`.
"""

from __future__ import annotations

import argparse
import io
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from model import GPT, Shape
from report import Point, bytes_table, write_csv, write_curve
from text import Split, Windows, bigram_counts, bigram_loss, read_split
from torch import Tensor
from tqdm import tqdm

import zero
from zero.data import RepeatingLoader
from zero.plan.formats import ITEMSIZE, Formats, is_compact
from zero.plan.memory import StateBytes
from zero.plan.sharding import Sharding

DEFAULT_STEPS = 400
"""Steps of a run whose schedule has no end and that got no --steps."""
VALIDATION_WINDOWS = 256
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
PROMPT = b"def "
SAMPLE_BYTES = 160


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    shape = Shape()
    parser = argparse.ArgumentParser(description="train a byte-level GPT with the zero engine")
    parser.add_argument("--config", required=True, help="JSON of the engine, such as zero3.json beside this file")
    parser.add_argument("--data", type=Path, help="folder of text; default: the source of Python's standard library")
    parser.add_argument("--steps", type=int, help="optimizer steps; default: total_num_steps of the JSON's schedule")
    parser.add_argument("--out", type=Path, default=Path("out/gpt"), help="folder for loss.png and loss.csv")
    parser.add_argument("--save", type=Path, metavar="DIR", help="save there, and go on from what is there")
    parser.add_argument("--save-every", type=int, default=100, metavar="N", help="steps between two saves")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the windows and the sample")
    parser.add_argument("--tiled-loss", action="store_true", help="compute head and loss in slices of tokens")
    for name in ("width", "layers", "heads", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(shape, name))
    args = parser.parse_args(argv)
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps: wanted at least 1, got {args.steps}")
    if args.save_every < 1:
        parser.error(f"--save-every: wanted at least 1, got {args.save_every}")
    return args


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean over all ranks of a scalar, in fp64, the same on each."""
    value = value.detach().double()
    return sum_over_ranks(value).item() / (dist.get_world_size() if dist.is_initialized() else 1)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Add `values` up over all ranks, in place; a run without a process group is its own sum."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def memory_text(device: torch.device) -> str:
    """Return what this rank's process holds now: of the GPU, or of the machine's memory."""
    if device.type == "cuda":
        return f"{torch.cuda.memory_allocated(device) / 2**20:.0f} MiB GPU"
    return f"{psutil.Process().memory_info().rss / 2**20:.0f} MiB"


def resume(engine: Any, save: Path | None) -> list[Point]:
    """Take over the newest checkpoint, if there is one; return the points of the steps before it."""
    if save is None or not (save / "latest").exists():
        return []
    path, client = engine.load_checkpoint(save)
    if engine.global_rank == 0:
        print(f"goes on from {path}, after step {engine.global_steps}", flush=True)
    return [Point(*point) for point in client["points"]]


def train(engine: Any, loader: Any, steps: int, args: argparse.Namespace) -> tuple[list[Point], StateBytes | None]:
    """Run the optimizer steps that are left; return a point for each of the run's steps, and the last step's bytes.

    The bytes are those alive here after the last backward; None where no step was left.
    """
    points, states = resume(engine, args.save), None
    batches = RepeatingLoader(loader)
    every = max(1, steps // 10)
    first = engine.global_steps + 1
    start = time.perf_counter() - (points[-1].seconds if points else 0)
    engine.train()
    # A log file keeps every state of the bar, so there it moves seldom.
    pause = 1 if sys.stderr.isatty() else 20
    hidden = engine.global_rank != 0
    with tqdm(total=steps, initial=first - 1, unit="step", disable=hidden, mininterval=pause) as bar:
        for step in range(first, steps + 1):
            loss, tokens, states = optimizer_step(engine, batches, measure=step == steps)
            points.append(Point(step, loss, engine.get_lr()[0], time.perf_counter() - start))
            bar.update()
            rate = tokens * step / points[-1].seconds
            bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s, {memory_text(engine.device)}", refresh=False)
            if not hidden and (step % every == 0 or step == 1):
                # All digits: runs that should agree can be compared as text.
                bar.write(f"step {step} loss {loss!r}", file=sys.stdout)
            if args.save is not None and (step % args.save_every == 0 or step == steps):
                engine.save_checkpoint(args.save, client_state={"points": [list(point) for point in points]})
    return points, states


def optimizer_step(engine: Any, batches: RepeatingLoader, measure: bool) -> tuple[float, int, StateBytes | None]:
    """Run one optimizer step; return the loss of the global batch and its tokens, over all ranks.

    With `measure` also the bytes of model state that this rank holds when the gradients are complete.
    """
    losses, tokens, states = [], 0, None
    micro_steps = engine.gradient_accumulation_steps()
    for micro in range(micro_steps):
        x, y = (part.to(engine.device) for part in next(batches))
        loss = engine(x, y)
        engine.backward(loss)
        losses.append(loss.detach())
        tokens += x.numel() * engine.world_size
        if measure and micro == micro_steps - 1:
            states = engine.state_nbytes()
        engine.step()
    return mean_over_ranks(torch.stack(losses).mean()), tokens, states


@torch.no_grad()
def validate(engine: Any, windows: Windows) -> float:
    """Return the mean loss over fixed windows in nats per byte, the same for any number of ranks.

    The ranks take whole batches in turn. All run as many forwards, since stage 3 gathers weights in each; a
    rank whose turn finds no batch repeats the first one and does not count it.
    """
    engine.eval()
    size = engine.train_micro_batch_size_per_gpu()
    begins = range(0, len(windows), size)
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)  # sum of losses over windows, windows
    for turn in range(0, len(begins), engine.world_size):
        mine = turn + engine.global_rank
        begin = begins[mine] if mine < len(begins) else 0
        items = [windows[i] for i in range(begin, min(begin + size, len(windows)))]
        x, y = (torch.stack(part).to(engine.device) for part in zip(*items, strict=True))
        loss = engine(x, y)
        if mine < len(begins):
            total += torch.tensor([loss.item() * len(items), len(items)], dtype=torch.float64).to(total.device)
    sum_over_ranks(total)
    engine.train()
    return (total[0] / total[1]).item()


def sample(engine: Any, seed: int) -> str:
    """Return generated text; every rank draws the same, because every rank has to run the same forwards."""
    engine.eval()
    prompt = torch.tensor([list(PROMPT)], device=engine.device)
    generator = torch.Generator().manual_seed(seed)
    tokens = engine.module.generate(prompt, SAMPLE_BYTES, temperature=0.8, generator=generator)
    engine.train()
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    # An untrained model draws control characters, which a terminal would obey.
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def bigram_on(windows: Windows, train_text: Tensor) -> float:
    """Return the loss of the bigram model on the windows that the GPT is measured on, in nats per byte."""
    x, y = (torch.stack(part) for part in zip(*(windows[i] for i in range(len(windows))), strict=True))
    return bigram_loss(bigram_counts(train_text), x, y)


def tell(engine: Any, args: argparse.Namespace, text: Split, windows: Windows, run: tuple, after: tuple) -> None:
    """Print the result and write the files; for rank 0."""
    (points, states), (validation, generated, elapsed) = run, after
    bigram = bigram_on(windows, text.train)
    parameters = list(engine.module.parameters())
    numel, dtype = sum(p.numel() for p in parameters), DTYPE_NAMES[parameters[0].dtype]
    stage, world_size = engine.zero_optimization_stage(), engine.world_size
    formats = engine.optimizer.states.formats
    compact = sum(p.numel() for p in parameters if is_compact(p.numel(), p.ndim))
    replica = replica_nbytes(numel, dtype, formats, compact)
    formula = formula_nbytes(replica, stage, world_size)
    args.out.mkdir(parents=True, exist_ok=True)
    write_csv(args.out / "loss.csv", points)
    write_curve(args.out / "loss.png", points, validation, bigram)
    print(f"\nsample, from the prompt {PROMPT!r}:\n{textwrap.indent(generated, '    ')}\n")
    title = f"rank 0 of {world_size}, stage {stage}, {numel:,} parameters in {dtype}"
    if states is not None:
        print(bytes_table(title, states, replica, formula))
    if (off := engine.host_nbytes()) is not None:
        print(f"off the device, and so in the formula only: {off.memory + off.files:,} bytes")
    print("\n" + verdict(len(points), validation, bigram))
    print(f"{len(points)} steps in {points[-1].seconds:.1f} s, all in {elapsed:.1f} s")
    print(f"wrote {args.out / 'loss.png'} and {args.out / 'loss.csv'}", flush=True)


def replica_nbytes(numel: int, dtype: str, formats: Formats, compact: int) -> StateBytes:
    """Bytes of one unsharded replica: under Adam 2 + 2 + 12 for each parameter in 16 bits, 4 + 4 + 8 in fp32.

    In 16 bits the fp32 master is a third optimizer state (Rajbhandari et al. 2020, section 3.1: K = 12); `formats` may
    make it less. compact: how many parameters are large enough for moments in such a format.
    """
    moments = formats.moments_nbytes(compact) + formats.moments_nbytes(numel - compact, "fp32")
    size, master = ITEMSIZE[dtype] * numel, formats.master_dtype(dtype)
    return StateBytes(size, size, moments + (0 if master is None else ITEMSIZE[master] * numel))


def formula_nbytes(replica: StateBytes, stage: int, world_size: int) -> StateBytes:
    """ZeRO's formula: each kind of a replica's bytes divided by `world_size` if the stage cuts it."""
    cut = Sharding.of_stage(stage)
    kinds = zip(replica, (cut.params, cut.grads, cut.optim), strict=True)
    return StateBytes(*(nbytes // world_size if divided else nbytes for nbytes, divided in kinds))


def verdict(steps: int, validation: float, bigram: float) -> str:
    """Say how far a run has come in so many steps: its loss beside that of a bigram model, in nats per byte."""
    far = "below" if validation < bigram else "not yet below"
    return f"validation loss {validation:.4f} nats/byte, after {steps} steps {far} the bigram model's {bigram:.4f}"


def main(argv: list[str] | None = None) -> None:
    """Train, measure, and report on rank 0."""
    begin = time.perf_counter()
    args = parse(argv)
    # A terminal that cannot show a generated letter, or the frame of a table, must not end the run.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    shape = Shape(args.width, args.layers, args.heads, args.context)
    text = read_split(args.data)
    # As many windows as fit into the text side by side: one pass of the loader is about one reading of it.
    dataset = Windows(text.train, shape.context, max(1, text.train.numel() // shape.context), args.seed)
    windows = Windows(text.validation, shape.context, VALIDATION_WINDOWS, seed=None)
    torch.manual_seed(args.seed)
    model = GPT(shape, zero.tiled_cross_entropy if args.tiled_loss else None)
    engine, _, loader, scheduler = zero.initialize(
        model=model, model_parameters=model.parameters(), config=args.config, training_data=dataset
    )
    if engine.global_rank == 0:
        files = f"{len(text.train_files)} + {len(text.validation_files)} files"
        print(f"text: {text.train.numel():,} + {text.validation.numel():,} bytes, {files} (train + validation)")
    steps = args.steps or getattr(scheduler, "total_num_steps", DEFAULT_STEPS)
    run = train(engine, loader, steps, args)
    validation = validate(engine, windows)
    generated = sample(engine, args.seed)
    if engine.global_rank == 0:
        tell(engine, args, text, windows, run, (validation, generated, time.perf_counter() - begin))
    engine.destroy()


if __name__ == "__main__":
    main()
