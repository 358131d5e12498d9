"""A step refuses what would corrupt memory: a ValueError that names the argument, before a byte is touched."""

import itertools

import pytest
import torch
from kernel_cases import BAD_FLAT, bits, numbers, step_reference

from zero.kernels.formulas import Adam, Lion, Sgd
from zero.kernels.moments import Moment
from zero.kernels.remainder import split
from zero.kernels.step import step

both = pytest.mark.parametrize("take", [step, step_reference])
COUNTERS = {"step": 1, "grad_scale": 1.0}


def arguments(fmt="fp32", remainder=False, numel=8):
    """Keyword arguments of a step that nothing is wrong with."""
    master, param = numbers(numel, seed=1), torch.zeros(numel, dtype=torch.bfloat16)
    if remainder:
        param, master = split(master)
    moments = tuple(Moment.filled(numel, fmt, 0.25, signed=signed) for signed in (True, False))
    return {"formula": Adam(1e-3), "master": master, "moments": moments, "grad": numbers(numel, seed=2), "param": param}


def tensors(made):
    """All tensors with memory of their own, to see whether they were touched."""
    found = [made["master"], made["grad"], made["param"]]
    found += [x for m in made["moments"] if isinstance(m, Moment) for x in (m.values, m.scales)]
    return [
        x
        for x in found
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and x.is_cpu and x.untyped_storage().nbytes()
    ]


def refused(take, made, message, **counters):
    before = [bits(x.contiguous()).clone() for x in tensors(made)]
    with pytest.raises(ValueError, match=message):
        take(**made, **COUNTERS | counters)
    after = [bits(x.contiguous()) for x in tensors(made)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@both
@pytest.mark.parametrize("bad", BAD_FLAT)
@pytest.mark.parametrize("name", ["master", "grad", "param"])
def test_it_names_the_tensor_it_refuses(take, name, bad):
    wanted = r"^(master|grad): got" if name == "master" else f"^{name}: got"
    refused(take, arguments() | {name: BAD_FLAT[bad]()}, wanted)


@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"master": torch.ones(8, dtype=torch.float16)}, "master: got.*float16.*wanted.*float32 or torch.float64 or"),
        ({"grad": torch.ones(8, dtype=torch.float64)}, "grad: got.*float64.*wanted.*float32 or torch.bfloat16 or"),
        ({"param": torch.ones(8, dtype=torch.int16)}, "param: got.*int16"),
        ({"param": torch.ones(8, dtype=torch.float64)}, "param: got.*float64"),
        ({"formula": "Adam"}, "formula: got str"),
        ({"moments": ()}, r"moments: got 0 for Adam\(.*wanted 2 \(exp_avg, exp_avg_sq\)"),
        ({"moments": (Moment.filled(8, "fp32"),)}, "moments: got 1 for Adam"),
        ({"formula": Sgd(1.0)}, "moments: got 2 for Sgd.*wanted none"),
        ({"formula": Lion(1.0)}, r"moments: got 2 for Lion.*wanted 1 \(exp_avg\)"),
        ({"moments": (torch.ones(8), torch.ones(8))}, "exp_avg: got shape.*wanted a Moment"),
        ({"moments": (None, None)}, "exp_avg: got NoneType; wanted a Moment"),
        ({"moments": (Moment.filled(8, "fp32"), Moment.filled(8, "bf16"))}, "exp_avg_sq: got bf16, .*exp_avg is fp32"),
    ],
)  # fmt: skip
def test_wrong_dtypes_and_moments(take, change, message):
    refused(take, arguments() | change, message)


@both
def test_a_remainder_wants_its_bf16_parameter(take):
    made = arguments(remainder=True)
    refused(take, made | {"param": None}, "param: got None beside a remainder.*wanted the bfloat16 parameter")
    refused(take, made | {"param": torch.ones(8)}, "param: got.*float32.*wanted.*bfloat16")
    refused(take, made | {"param": torch.ones(8).half()}, "param: got.*float16.*wanted.*bfloat16")


@both
def test_counters_out_of_range(take):
    for name, bad in [("step", 0), ("step", -1), ("step", 2**63), ("key", -1), ("key", 2**63)]:
        refused(take, arguments(), f"^{name}: got {bad}; wanted an integer", **{name: bad})
    for bad in (-256, 1, 255, 257):
        refused(take, arguments(), f"^first: got {bad}; wanted a multiple of 256", first=bad)


NAMES = ("master", "grad", "param", "exp_avg", "exp_avg_sq", "scales of exp_avg", "scales of exp_avg_sq")
DTYPES = (torch.float32, torch.bfloat16, torch.bfloat16, torch.uint8, torch.uint8, torch.float32, torch.float32)


def laid_out(overlapping):
    """A step's tensors one after the other in one buffer, the two named ones sharing their last and first 4 bytes."""
    memory, at, numel = torch.zeros(4096, dtype=torch.uint8), 0, 260
    order = [*overlapping, *(name for name in NAMES if name not in overlapping)]
    views = {}
    for name in order:
        dtype = DTYPES[NAMES.index(name)]
        size = (2 if name.startswith("scales") else numel) * dtype.itemsize
        at -= 4 if name in overlapping[1:] else 0
        views[name] = memory[at : at + size].view(dtype)
        at += size
    moments = tuple(Moment(views[name], views[f"scales of {name}"]) for name in ("exp_avg", "exp_avg_sq"))
    return {"formula": Adam(1e-3), "moments": moments} | {name: views[name] for name in NAMES[:3]}


@both
@pytest.mark.parametrize("pair", [*itertools.pairwise([*NAMES, *NAMES[:1]])], ids=" over ".join)
def test_it_refuses_tensors_that_overlap(take, pair):
    refused(take, laid_out(pair), f"^{pair[0]}, {pair[1]}: got tensors that overlap by 4 bytes")


# Moment.


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "8bit"])
def test_a_moment_refuses_other_formats_and_spans(fmt):
    moment = Moment.filled(600, fmt)
    with pytest.raises(ValueError, match="format: got 'int4'; wanted one of fp32, bf16, 8bit"):
        Moment.filled(1, "int4")
    for start, numel in ((-256, 256), (0, 601), (512, 256), (256, -1)):
        with pytest.raises(ValueError, match=f"start, numel: got {start}, {numel}; wanted a span within 600"):
            moment.narrow(start, numel)
    if fmt == "8bit":
        for start, numel in ((1, 256), (0, 255), (256, 300)):
            with pytest.raises(ValueError, match=f"start, numel: got {start}, {numel}; wanted multiples of 256"):
                moment.narrow(start, numel)
