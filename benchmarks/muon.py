"""How much of a step is Muon's, by the size of the model? The GPT of examples/gpt, its update beside AdamW's, LAMB's.

    python benchmarks/muon.py

One process, fp32, stage 0. Newton-Schulz costs per parameter as much as the width says, whatever the tokens: `tokens`
are those of a step of which it would be 5 %, by FLOPs at the rates seen here.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from measure import machine_line, stat, table

import zero
from zero.core.comm import local_device

sys.path.append(str(Path(__file__).parents[1] / "examples" / "gpt"))
from model import GPT, VOCAB, Shape

RULES = {
    "AdamW": {"type": "AdamW", "params": {}},
    "LAMB": {"type": "Lamb", "params": {}},
    "Muon, standard": {"type": "Muon", "params": {"ns_method": "standard"}},
    "Muon, gram": {"type": "Muon", "params": {}},
    "NorMuon, gram": {"type": "Muon", "params": {"beta2": 0.95}},
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="time steps of AdamW and of Muon")
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512, help="of a step")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    device, rows = local_device(), []
    for width in args.widths:
        shape = Shape(width=width, layers=args.layers, heads=width // 64, context=args.tokens)
        text = torch.randint(0, VOCAB, (1, args.tokens + 1), device=device)
        settings = {"train_batch_size": 1, "gradient_clipping": 0, "steps_per_print": float("inf")}
        configs = [{**settings, "optimizer": rule} for rule in RULES.values()]
        engines = [zero.initialize(model=GPT(shape), config=config)[0] for config in configs]
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in RULES}
        for number in range(args.rounds + 1):
            for name, engine in zip(RULES, engines, strict=True):
                begin = now(device)
                engine.backward(engine(text[:, :-1], text[:, 1:]))
                middle = now(device)
                engine.step()
                if number:  # the first one warms up
                    times[name].append((middle - begin, now(device) - middle))
        numel = sum(param.numel() for param in engines[0].parameters())
        plain = stat([step for _, step in times["AdamW"]]).median
        for name, pairs in times.items():
            both, step = stat([1e3 * sum(pair) for pair in pairs]), stat([1e3 * pair[1] for pair in pairs])
            share = stat([pair[1] / sum(pair) for pair in pairs])
            rate = stat([pair[0] for pair in pairs]).median / args.tokens  # seconds of a token
            tokens = (step.median / 1e3 - plain) / rate / 0.05 if "Muon" in name else 0.0
            cells = both.text(), step.text(1), share.text(2), f"{tokens:,.0f}" if tokens else "-"
            rows.append((f"{width}, {numel / 1e6:.1f}M", name, *cells))
    print(machine_line(), "\n")
    print(f"GPT of {args.layers} blocks, {args.tokens} tokens a step, median [min-max] of {args.rounds} steps\n")
    print(table(["width", "rule", "ms of all", "ms of step()", "share", "tokens for 5 %"], rows))


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
