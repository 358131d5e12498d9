"""Every kernel against its reference in plain torch: bits where bits are promised, on every instruction set."""

import functools
import itertools
import logging
import math
import sys

import pytest
import torch

from zero.kernels import adam, native, norm
from zero.kernels.adam import adam_step, adam_step_reference
from zero.kernels.bucket import pack, pack_reference, sum_rows, sum_rows_reference, unpack, unpack_reference
from zero.kernels.norm import sum_squares, sum_squares_reference

CPU = native.load()
ISAS = ("scalar", "avx2", "avx512")
NARROW = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *NARROW)
SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 31, 61, 65, 4095, 4096, 4097, 33013)  # the last is split over two threads
HYPER = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 7,
    "decoupled": True, "bias_correction": True, "grad_scale": 0.37,
}  # fmt: skip


@pytest.fixture(params=ISAS)
def isa(request):
    """Run the test on one instruction set of this machine."""
    if CPU is None:
        pytest.skip(f"no compiled kernels: {native.missing_reason()}")
    if request.param not in CPU.isas():
        pytest.skip(f"{request.param} cannot run on this processor, or was not compiled")
    CPU.set_isa(request.param)
    yield request.param
    CPU.set_isa("auto")


@pytest.fixture(params=(1, 2))
def threads(request, monkeypatch):
    """Let the kernels use this many threads, and torch itself one, so that a busy machine does not stall the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    yield request.param
    torch.set_num_threads(before)


def sizes(threads):
    """All sizes for one thread; for two only such as are worth two, and a small one."""
    return SIZES if threads == 1 else (1, 4097, 33013)


def same(got, wanted):
    """Equal bits, except that any NaN equals any other."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    nan = wanted.isnan()
    assert torch.equal(got.isnan(), nan)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    where = ((got.view(integer) != wanted.view(integer)) & ~nan).nonzero().flatten()
    assert not len(where), f"{len(where)} differ, at {where[:3]}: {got[where[:3]]} wanted {wanted[where[:3]]}"


@functools.cache
def _numbers(numel, seed, hostile):
    generator = torch.Generator().manual_seed(seed + numel)
    x = torch.randn(numel, generator=generator)
    if hostile:
        x *= torch.exp2(torch.randint(-140, 120, (numel,), generator=generator).float())
        odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, -1e-40, 3.4e38, 65504.0, 65520.0])
        at = torch.randperm(numel, generator=generator)[: numel // 3]
        x[at] = odd[torch.randint(0, len(odd), at.shape, generator=generator)]
    return x


def shifted(x, start):
    """A copy of a tensor that begins `start` elements into its memory."""
    return torch.empty(x.numel() + start, dtype=x.dtype)[start:].copy_(x)


def numbers(numel, dtype=torch.float32, seed=0, hostile=False, start=0):
    """Normal numbers; hostile: over all magnitudes, with nan, inf, -0 and subnormals."""
    return shifted(_numbers(numel, seed, hostile).to(dtype), start)


def adam_state(numel, grad_dtype, out_dtype, hostile=False, start=0, dtype=torch.float32):
    """(master, exp_avg, exp_avg_sq, grad, param_out)."""
    made = [numbers(numel, seed=seed, hostile=hostile, start=start).to(dtype) for seed in (1, 2, 3)]
    made[1] *= 0.1
    made[2].square_()
    grad = numbers(numel, grad_dtype, seed=4, hostile=hostile, start=start)
    return [*made, grad, None if out_dtype is None else shifted(torch.zeros(numel, dtype=out_dtype), start)]


def clones(tensors):
    return [None if tensor is None else tensor.clone() for tensor in tensors]


def all_same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        if b is not None:
            same(a, b)


@functools.cache
def adam_wanted(numel, grad_dtype, hostile, decoupled):
    """What the reference makes of adam_state; shared by all instruction sets and thread counts."""
    wanted = adam_state(numel, grad_dtype, None, hostile)
    adam_step_reference(*wanted, **HYPER | {"decoupled": decoupled})
    return wanted[:4]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("out_dtype", [None, *DTYPES])
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_adam_gives_the_bits_of_the_reference(isa, threads, grad_dtype, out_dtype, decoupled):
    for numel, (start, hostile) in itertools.product(sizes(threads), ((0, False), (1, True))):
        got = adam_state(numel, grad_dtype, out_dtype, hostile, start)
        adam_step(*got, **HYPER | {"decoupled": decoupled})
        wanted = adam_wanted(numel, grad_dtype, hostile, decoupled)
        all_same(got, [*wanted, None if out_dtype is None else wanted[0].to(out_dtype)])


CHANGES = [
    {"weight_decay": 0.0}, {"weight_decay": 0.0, "decoupled": False}, {"beta1": 0.0}, {"beta1": 0.5},
    {"beta1": 0.3, "beta2": 0.0}, {"bias_correction": False}, {"step": 1}, {"step": 10**9}, {"lr": 0.0}, {"eps": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_adam_hyperparameters(isa, change):
    got = adam_state(1003, torch.float32, torch.bfloat16)
    wanted = clones(got)
    adam_step(*got, **HYPER | change)
    adam_step_reference(*wanted, **HYPER | change)
    all_same(got, wanted)
    if change == {"beta1": 0.0}:
        same(got[1], got[3] * HYPER["grad_scale"])  # not m + (g - m)


def test_adam_in_pieces_gives_the_same_bits(isa, threads):
    whole = adam_state(33013, torch.bfloat16, torch.bfloat16)
    pieces = clones(whole)
    adam_step(*whole, **HYPER)
    for begin, end in itertools.pairwise((0, 3, 1000, 1001, 20011, 33013)):
        adam_step(*(tensor[begin:end] for tensor in pieces), **HYPER)
    all_same(pieces, whole)


def run_torch(cls, start, grads, **options):
    parameter = torch.nn.Parameter(start.clone())
    optimizer = cls([parameter], **options)
    for grad in grads:
        parameter.grad = grad.to(start.dtype)
        optimizer.step()
    return parameter.detach()


@functools.cache
def long_run(decoupled, beta1, steps=60):
    """Start, gradients, result in fp64, and the errors of torch's own two fp32 versions against that."""
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    options = {"lr": 1e-3, "betas": (beta1, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    start = numbers(1009, seed=5)
    grads = [numbers(1009, seed=10 + step) * 0.1 for step in range(steps)]
    exact = run_torch(cls, start.double(), grads, **options)
    peers = [run_torch(cls, start, grads, fused=fused, **options) for fused in (True, False)]
    return start, grads, exact, [(peer.double() - exact).abs() for peer in peers]


@pytest.mark.parametrize("beta1", [0.9, 0.4])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_as_near_to_fp64_as_torch_is(isa, decoupled, beta1):
    start, grads, exact, peer_errors = long_run(decoupled, beta1)
    ours, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    hyper = {"beta1": beta1, "beta2": 0.99, "decoupled": decoupled, "grad_scale": 1.0}
    for step, grad in enumerate(grads, 1):
        adam_step(ours, m, v, grad, None, **HYPER | hyper | {"step": step})
    error = (ours.double() - exact).abs()
    for peer in peer_errors:
        assert error.mean() <= 2 * peer.mean()
        assert error.max() <= 2 * peer.max()


@pytest.mark.parametrize(("dtype", "ulps"), [(torch.float32, 2), (torch.float64, 4)])
def test_one_adam_step_is_within_a_few_ulp_of_torch(monkeypatch, dtype, ulps):
    monkeypatch.setattr("zero.kernels.adam.REFERENCE_CHUNK", 100)  # float64 runs as plain torch, in chunks
    ours, grad, out = numbers(1003, dtype, seed=5), numbers(1003, dtype, seed=6), torch.zeros(1003).bfloat16()
    theirs = run_torch(torch.optim.AdamW, ours, [grad], fused=True, lr=1e-3, weight_decay=0.1)
    adam_step(ours, torch.zeros_like(ours), torch.zeros_like(ours), grad, out, **HYPER | {"step": 1, "grad_scale": 1.0})
    ulp = torch.nextafter(theirs.abs(), torch.tensor(math.inf, dtype=dtype)) - theirs.abs()
    assert ((ours - theirs).abs() <= ulps * ulp).all()
    same(out, ours.bfloat16())


@functools.cache
def fixed_sum_squares(numel, dtype):
    """The documented structure of the additions, in Python numbers."""
    total = 0.0
    for block in numbers(numel, dtype).double().split(4096):
        lanes = [0.0] * 16
        for index, value in enumerate(block.tolist()):
            lanes[index % 16] += value * value
        for half in (8, 4, 2, 1):
            for lane in range(half):
                lanes[lane] += lanes[lane + half]
        total += lanes[0]
    return total


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_squares_adds_in_the_documented_order(isa, threads, dtype):
    for numel, start in itertools.product(sizes(threads), (0, 1)):
        x = numbers(numel, dtype, start=start)
        assert sum_squares(x) == fixed_sum_squares(numel, dtype)
        assert sum_squares_reference(x) == pytest.approx(sum_squares(x), rel=1e-13)


@pytest.mark.parametrize("numel", [1, 17, 4097, 33013])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_squares_is_finite_exactly_when_all_elements_are(isa, threads, dtype, numel):
    x = torch.full((numel,), torch.finfo(dtype).max, dtype=dtype)
    assert math.isfinite(sum_squares(x))
    for at, bad in itertools.product({0, numel // 2, numel - 1}, (math.inf, -math.inf, math.nan)):
        y = x.clone()
        y[at] = bad
        assert not math.isfinite(sum_squares(y))
        assert not math.isfinite(sum_squares_reference(y))


def test_sum_squares_takes_any_shape_fp64_and_subnormals(isa):
    assert sum_squares(torch.full((3, 5), 2.0)) == 60.0
    assert sum_squares(torch.full((3, 5), 2.0, dtype=torch.float64)) == 60.0
    assert sum_squares(torch.tensor([2.0**-149])) == 2.0**-298


def every_pattern(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def ties(dtype):
    """fp32 numbers half way between neighbours of `dtype`, and the fp32 numbers next to those on both sides."""
    x = every_pattern(dtype)[every_pattern(dtype).isfinite()]
    above = (x.view(torch.int16) + 1).view(dtype)
    middle = ((x.double() + above.double()) / 2)[above.isfinite()].float()
    edge = torch.tensor([65520.0, 3.3895314e38, 3.3961775e38, 3.4028235e38, 2e-45, 2.0**-25])
    middle = torch.cat([middle, edge, -edge])
    bits = middle.view(torch.int32)
    return torch.cat([middle, (bits + 1).view(torch.float32), (bits - 1).view(torch.float32)])


@pytest.mark.parametrize("dtype", NARROW)
def test_every_16_bit_pattern_widens_and_comes_back(isa, dtype):
    x = every_pattern(dtype)
    wide, scaled = torch.empty(x.numel()), torch.empty(x.numel())
    unpack(x, [wide], [0])
    unpack(x, [scaled[:-3], scaled[-3:]], [0, x.numel() - 3], scale=3.0)  # the last three take the scalar tail
    same(wide, x.float())
    same(scaled, x.float() * 3.0)
    back = torch.empty_like(x)
    pack([wide], back, [0])
    same(back, x)
    for other in NARROW:
        cast = torch.empty(x.numel(), dtype=other)
        pack([x], cast, [0])
        same(cast, x.to(other))


@pytest.mark.parametrize("dtype", NARROW)
def test_narrowing_rounds_ties_to_even_as_torch_does(isa, dtype):
    x = torch.cat([ties(dtype), numbers(20000, hostile=True)])
    flat = torch.empty(x.numel(), dtype=dtype)
    pack([x], flat, [0])
    same(flat, x.to(dtype))
    pack(list(x[:3000].split(1)), flat, list(range(5000, 8000)))  # each element alone, in the scalar tail
    same(flat[5000:8000], x[:3000].to(dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_conversions_of_nan_have_the_bits_of_scalar(isa, dtype):
    x = torch.tensor([0x7F800001, 0x7FC12345, -0x007FFFFF, -1, 0x7FFFE000] * 7, dtype=torch.int32).view(torch.float32)
    results = []
    for name in (isa, "scalar"):
        CPU.set_isa(name)
        flat, wide = torch.empty(35, dtype=dtype), torch.empty(35)
        pack([x], flat, [0])
        unpack(flat, [wide], [0], scale=2.0)
        results.append((flat.view(torch.int16).tolist(), wide.view(torch.int32).tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize(("dtype", "flat_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_pack_and_unpack_give_the_bits_of_the_reference(isa, threads, dtype, flat_dtype, scale):
    tensors = [numbers(numel, dtype, hostile=True) for numel in SIZES[1:]]
    tensors, gap = [*tensors, numbers(6).view(2, 3)], 3  # any shape, and dtypes may be mixed
    *offsets, size = itertools.accumulate((tensor.numel() + gap for tensor in tensors), initial=gap)
    got, wanted = (torch.full((size,), 9.0, dtype=flat_dtype) for _ in range(2))
    pack(tensors, got, offsets, scale)
    pack_reference(tensors, wanted, offsets, scale)
    same(got, wanted)
    assert got[:gap].tolist() == got[-gap:].tolist() == [9.0] * gap
    got_back, wanted_back = ([torch.zeros_like(t) for t in tensors] for _ in range(2))
    unpack(got, got_back, offsets, scale)
    unpack_reference(got, wanted_back, offsets, scale)
    all_same([t.flatten() for t in got_back], [t.flatten() for t in wanted_back])


def test_pack_takes_fp64_empty_tensors_and_empty_lists(isa):
    flat, third = torch.zeros(5), torch.ones(2, dtype=torch.float64) / 3
    pack([third, torch.ones(0)], flat, [3, 5], scale=2.0)
    assert flat.tolist() == [0, 0, 0, *(third * 2).float().tolist()]
    pack([], flat, [])
    unpack(torch.zeros(0), [], [])


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_rows_gives_the_bits_of_the_reference(isa, threads, dtype, accumulate):
    for numel, count, start in itertools.product(sizes(threads), (1, 2, 5), (0, 1)):
        rows = [numbers(numel, dtype, seed=row, hostile=row % 2 == 1, start=start) for row in range(count)]
        got = numbers(numel, seed=99, start=start)
        wanted = got.clone()
        sum_rows(rows, got, accumulate)
        sum_rows_reference(rows, wanted, accumulate)
        same(got, wanted)


def test_sum_rows_adds_first_to_last_and_may_write_into_a_row(isa):
    rows = [torch.full((100,), x) for x in (1.0, 1e8, -1e8)]
    sum_rows(rows, rows[0], False)
    assert rows[0].eq(0.0).all()  # (1 + 1e8) - 1e8 in fp32
    out = torch.empty(4)
    sum_rows(list(torch.arange(12.0).view(3, 4)), out, False)
    assert out.tolist() == [12, 15, 18, 21]
    sum_rows([torch.full((4,), -0.0)], out, False)
    assert out.signbit().all()


TENSORS = ("master", "exp_avg", "exp_avg_sq", "grad", "param_out")


def released(numel):
    tensor = torch.zeros(numel + 3)
    view = tensor[3:]
    tensor.untyped_storage().resize_(0)
    return view


BAD_FLAT = {
    "list": lambda: [1.0] * 8,
    "short": lambda: torch.zeros(7),
    "2-D": lambda: torch.zeros(2, 4),
    "strided": lambda: torch.zeros(16)[::2],
    "integer": lambda: torch.zeros(8, dtype=torch.int32),
    "meta": lambda: torch.zeros(8, device="meta"),
    "sparse": lambda: torch.zeros(8).to_sparse(),
    "released": lambda: released(8),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("bad", BAD_FLAT)
@pytest.mark.parametrize("step", [adam_step, adam_step_reference])
def test_adam_names_the_tensor_it_refuses(step, name, bad):
    arguments = {key: torch.ones(8) for key in TENSORS} | {name: BAD_FLAT[bad]()}
    wanted = r"^(master|exp_avg): got" if name == "master" else f"^{name}: got"
    with pytest.raises(ValueError, match=wanted):
        step(**arguments, **HYPER)
    assert all(value.eq(1).all() for key, value in arguments.items() if key != name)


@pytest.mark.parametrize("name", ["beta1", "beta2", "eps", "lr", "weight_decay", "step"])
def test_adam_refuses_hyperparameters_out_of_range(name):
    with pytest.raises(ValueError, match=f"{name}.*got.*-1"):
        adam_step(*adam_state(8, torch.float32, None), **HYPER | {name: -1})


def test_adam_wants_master_and_moments_of_one_dtype():
    master, m, v, grad, _ = adam_state(8, torch.float32, None)
    for bad, wanted in (((master, m.double()), "exp_avg: got.*float64"), ((master.half(), m), "master: got.*float16")):
        with pytest.raises(ValueError, match=wanted):
            adam_step(*bad, v, grad, None, **HYPER)


BAD_ANY_SHAPE = sorted(set(BAD_FLAT) - {"short", "2-D"})


@pytest.mark.parametrize("bad", BAD_ANY_SHAPE)
@pytest.mark.parametrize("call", [sum_squares, sum_squares_reference])
def test_sum_squares_refuses(call, bad):
    with pytest.raises(ValueError, match="tensor: got"):
        call(BAD_FLAT[bad]())


@pytest.mark.parametrize("move", [pack, pack_reference, unpack, unpack_reference])
def test_pack_and_unpack_refuse(move):
    good, flat = torch.zeros(8), torch.zeros(20)
    cases = [([good, BAD_FLAT[bad]()], flat, [0, 8], r"tensors\[1\]: got") for bad in BAD_ANY_SHAPE]
    cases += [([good], BAD_FLAT[bad](), [0], "flat: got") for bad in BAD_ANY_SHAPE]
    cases += [([good], flat, [offset], rf"offsets\[0\]: got {offset}") for offset in (-1, 13)]
    cases += [([good], torch.zeros(4, 5), [0], "flat: got.*1-D"), ([good], flat, [0, 1], "offsets: got 2 for 1")]
    for tensors, buffer, offsets, wanted in cases:
        with pytest.raises(ValueError, match=wanted):
            move(*((tensors, buffer) if move in (pack, pack_reference) else (buffer, tensors)), offsets)


@pytest.mark.parametrize("call", [sum_rows, sum_rows_reference])
def test_sum_rows_refuses(call):
    for bad in BAD_FLAT:
        with pytest.raises(ValueError, match=r"rows\[1\]: got"):
            call([torch.zeros(8), BAD_FLAT[bad]()], torch.zeros(8), False)
        with pytest.raises(ValueError, match=r"(out|rows\[0\]): got"):
            call([torch.zeros(8)], BAD_FLAT[bad](), False)
    with pytest.raises(ValueError, match="rows: got none"):
        call([], torch.zeros(8), False)
    with pytest.raises(ValueError, match=r"rows\[1\]: got.*bfloat16"):
        call([torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)], torch.zeros(8), False)


def test_instruction_sets(isa):
    runnable, compiled = CPU.isas(), CPU.compiled_isas()
    assert runnable[0] == compiled[0] == "scalar"
    assert set(runnable) <= set(compiled) <= set(ISAS)
    assert native.isa() == isa
    CPU.set_isa("auto")
    assert native.isa() == runnable[-1]
    with pytest.raises(ValueError, match=r"instruction set 'sse9' cannot run here.*scalar"):
        CPU.set_isa("sse9")


def test_without_compiled_kernels_it_says_so_once_and_gives_the_same(monkeypatch, caplog):
    compiled, plain = (adam_state(1003, torch.bfloat16, torch.bfloat16) for _ in range(2))
    adam_step(*compiled, **HYPER)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zero._cpu", None)  # makes the import fail
        for cached in (native._find, native.load):
            patch.setattr(native, cached.__name__, functools.cache(cached.__wrapped__))
        for module in (adam, norm):
            patch.setattr(module, "load", native.load)
        with caplog.at_level(logging.WARNING, logger="zero"):
            adam_step(*plain, **HYPER)
            assert norm.sum_squares(torch.ones(3)) == 3.0
        assert native.isa() == "torch"
        assert "zero._cpu" in native.missing_reason()
    assert [record.name for record in caplog.records] == ["zero"]
    assert "compiled CPU kernels are missing" in caplog.text
    all_same(plain, compiled)
