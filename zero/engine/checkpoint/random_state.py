"""The random numbers that a rank would draw next, as values that another process goes on with.

Covered are the generators of the process: torch's of the CPU and of this rank's device, Python's `random`, NumPy's
global one where it is imported, and the named streams of `zero.checkpointing.get_cuda_rng_tracker()`.
"""

from __future__ import annotations

import hashlib
import logging
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zero.checkpoint.run_state import python_state
from zero.log import rank_zero
from zero.recompute.holder import HOLDER

State = dict[str, Any]

_NUMPY = "numpy.random"  # imported before it is drawn from


def capture(device: torch.device) -> State:
    """The state of all generators of this process, which stay as they are: plain values and uint8 tensors."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    numpy = sys.modules.get(_NUMPY)
    return {
        "torch": torch.default_generator.get_state(),
        "cuda": cuda,
        "python": _of_python(random.getstate()),
        "numpy": None if numpy is None else numpy.get_state(legacy=False),
        "streams": HOLDER.seeds.state_dict(),
    }


def restore(state: Mapping[str, Any], device: torch.device) -> None:
    """Let all generators go on as `capture` found them on a rank; of a device that had none, as that rank's other ones.

    NumPy's generator is left alone, with a warning, where there is none or another kind.
    """
    torch.default_generator.set_state(state["torch"])
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        if state["cuda"] is None:
            generator.manual_seed(_seed(state["torch"], "cuda"))
        else:
            generator.set_state(state["cuda"])
    random.setstate(python_state(state["python"]))
    if state["numpy"] is not None:
        try:
            import numpy

            numpy.random.set_state(dict(state["numpy"]))
        except (ImportError, ValueError, TypeError) as error:
            rank_zero(logging.WARNING, "random numbers: NumPy's global generator stays as it is, since %s", error)
    HOLDER.seeds.load_state_dict(state["streams"], _seed(state["torch"], "streams"))


def for_rank(saved: Sequence[State | None], rank: int, step: int) -> State:
    """What a rank goes on with, given what ranks 0, 1, ... of the saved run had at `step`.

    A rank that was there has its own. Others get new states, which follow from rank 0's, the step and the rank: the
    same in every such resume, and no two ranks the same.
    """
    if rank < len(saved) and saved[rank] is not None:
        return saved[rank]
    first = saved[0]
    seed = _seed(first["torch"], f"{step},{rank}")
    numpy = None
    if first["numpy"] is not None:
        from numpy import random as of_numpy

        # The seed goes another way into it than into Python's, whose generator is of the same kind.
        generator = getattr(of_numpy, first["numpy"]["bit_generator"])(seed)
        numpy = of_numpy.RandomState(generator).get_state(legacy=False)
    return {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "cuda": None,  # made of the one above, which is no other rank's
        "python": _of_python(random.Random(seed).getstate()),
        "numpy": numpy,
        "streams": _shared_streams([state["streams"] for state in saved if state is not None]),
    }


def _seed(state: torch.Tensor, purpose: str) -> int:
    """A seed of 63 bits that follows from a state, another one for each purpose."""
    digest = hashlib.blake2b(bytes(state.tolist()), digest_size=8)
    digest.update(purpose.encode())
    return int.from_bytes(digest.digest(), "little") >> 1


def _of_python(state: tuple[int, tuple[int, ...], float | None]) -> State:
    version, words, gauss = state
    packed = struct.pack(f"<{len(words)}I", *words)
    return {"version": version, "words": torch.frombuffer(bytearray(packed), dtype=torch.uint8), "gauss": gauss}


def _shared_streams(saved: Sequence[Mapping[str, Any]]) -> State:
    """Streams for a new rank: those that all of several ranks had alike, and the names of the others, with no state."""
    first, others = saved[0], saved[1:]
    alike = {
        name: bool(others)
        and all(name in other["states"] and torch.equal(state, other["states"][name]) for other in others)
        for name, state in first["states"].items()
        if state is not None
    }
    states = {name: state if alike.get(name) else None for name, state in first["states"].items()}
    return {"states": states, "seeds": first["seeds"]}
