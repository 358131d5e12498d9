"""Tiny models of every family of Transformers that has a tensor-parallel plan, cut over two ranks beside plain torch.

    python tests/huggingface/tensor_families.py [FAMILY ...]

with `tests` on PYTHONPATH says what each family gives: "equal", "refused: why", or "plain: why" where plain
Transformers cannot build or run it here. Anything else is a fault.
"""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from every_model import PlainCannot, _inputs, _said, _seed, config_of, families, loss_of

KINDS = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "LMHeadModel", "Model")
CLOSE = 1e-6
LARGEST = 60_000_000  # parameters
SECONDS = 90  # of one family
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    "tensor_parallel": {"autotp_size": 2},
}


def planned() -> dict[str, str]:
    """The class to be tried of each family with a plan."""
    import transformers

    found = {}
    for family, names in sorted(families().items()):
        names = sorted(names, key=lambda name: next((at for at, kind in enumerate(KINDS) if name.endswith(kind)), 9))
        for name in names:
            kind = getattr(transformers, name, None)
            if kind is None or not any(name.endswith(each) for each in KINDS):
                continue
            try:
                config = getattr(kind, "config_class", None)
            except ImportError:
                continue  # of a library that is not here
            plans = [getattr(config, "base_model_tp_plan", None), getattr(kind, "_tp_plan", None)]
            below = getattr(config, "sub_configs", None) or {}
            plans += [getattr(each, "base_model_tp_plan", None) for each in below.values()]
            if any(plans):
                found[family] = name
                break
    return found


def outcome(family: str, name: str) -> str:
    """What this family gives; on both ranks."""
    import transformers

    import zero
    from zero.utils import safe_get_full_grad

    kind = getattr(transformers, name)
    try:
        model, inputs, loss = _plain(family, kind)
        loss.backward()
        wanted = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad()
        loss = loss.detach()  # no graph that knows whole parameters
        rounded = _rounded(model, inputs, wanted)
    except PlainCannot as error:
        return f"plain: {error}"
    try:
        engine, *_ = zero.initialize(model=model, config=CONFIG)
    except ValueError as error:
        return f"refused: {str(error)[:200]}"
    try:
        engine.eval()
        try:
            found = loss_of(engine, inputs)
        except RuntimeError as error:
            if not str(error).startswith("tensor_parallel: "):
                raise
            return f"refused: {str(error)[:200]}"
        engine.backward(found)
        apart = {}
        if abs(found.item() - loss.item()) > CLOSE * max(1.0, abs(loss.item())):
            apart["loss"] = found.item() - loss.item()
        largest = max((float(grad.abs().max()) for grad in wanted.values() if grad is not None), default=0.0)
        for n, p in engine.module.named_parameters():
            grad, want = safe_get_full_grad(p), wanted[n]
            if p.requires_grad:
                want = torch.zeros_like(grad) if want is None else want
                if (error := float((grad - want).abs().max())) > CLOSE * max(
                    1.0, largest, 2 * rounded.get(n, 0) / CLOSE
                ):
                    apart[n] = error
        try:
            engine.step()
        except RuntimeError as error:
            return f"refused: {str(error)[:200]}"
        return f"apart: {len(apart)}, {list(apart.items())[:3]}" if apart else "equal"
    finally:
        engine.destroy()


def _rounded(model: Any, inputs: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """How far plain torch's gradients in fp32 are from those in fp64, by name; nothing where that does not run."""
    exact = copy.deepcopy(model).double()
    try:
        loss_of(exact, inputs).backward()
    except Exception:
        return {}
    found = {n: p.grad for n, p in exact.named_parameters()}
    return {n: float((found[n] - each).abs().max()) for n, each in wanted.items() if each is not None}


def _plain(family: str, kind: Any) -> tuple[Any, dict[str, Any], torch.Tensor]:
    """A small model of a family, without dropout, what its forward takes, and the loss; raises PlainCannot."""
    why = "nothing was tried"
    for divisor in (32, 16, 64, 8, 4):
        try:
            config = config_of(family, divisor)
            with torch.device("meta"):
                count = sum(param.numel() for param in kind._from_config(copy.deepcopy(config)).parameters())
            if not 0 < count <= LARGEST:
                why = f"{count} parameters"
                continue
            _seed(0)
            model = kind._from_config(config).eval()
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation("eager")  # torch's grouped products want widths of 16 bytes
        except Exception as error:
            why = _said(error)
            continue
        for inputs in _inputs(model):
            try:
                loss = loss_of(model, inputs)
                if torch.isfinite(loss) and loss.requires_grad:
                    return model, inputs, loss
                why = f"a loss of {loss.item()}"
            except Exception as error:
                why = _said(error)
    raise PlainCannot(why)


def _serve(rank: int, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1"
    )
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    while (asked := pipe.recv()) is not None:
        try:
            pipe.send(outcome(*asked))
        except BaseException as error:
            import traceback

            frames = traceback.extract_tb(error.__traceback__)
            at = " < ".join(f"{os.path.basename(each.filename)}:{each.lineno}" for each in reversed(frames[-5:]))
            pipe.send(f"{_said(error)} [{at}]")


@contextlib.contextmanager
def _pair() -> Iterator[list[Any]]:
    context = mp.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ends = [context.Pipe() for _ in range(2)]
    ranks = [context.Process(target=_serve, args=(rank, port, ends[rank][1]), daemon=True) for rank in range(2)]
    for each in ranks:
        each.start()
    try:
        yield [here for here, _ in ends]
    finally:
        for each in ranks:
            each.kill()


def outcomes(tried: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Family, class and what it gives."""
    left = list(tried.items())
    while left:
        with _pair() as pipes:
            while left:
                family, name = left.pop(0)
                for pipe in pipes:
                    pipe.send((family, name))
                said = []
                with contextlib.suppress(EOFError):
                    said = [pipe.recv() for pipe in pipes if pipe.poll(SECONDS)]
                if len(said) < 2:
                    yield family, name, f"no answer: {said}"
                    break
                yield family, name, said[0] if said[0] == said[1] or "plain" in said[0] else f"ranks differ: {said}"


if __name__ == "__main__":
    every = planned()
    for family, name, said in outcomes({key: every[key] for key in sys.argv[1:] or every}):
        print(f"{family} {name}: {said}", flush=True)
