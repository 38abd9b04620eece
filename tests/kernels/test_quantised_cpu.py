"""kernels/quantised/cpu*.py: every Format against Format.to_float32 and float64 products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from quantised_rows import decode_bound, prefill_bound, random_rows, rounding

from tilegrad.compiler.compile import compile_for, host
from tilegrad.compiler.pipeline import fitted
from tilegrad.core import format as formats
from tilegrad.core.config import override
from tilegrad.core.dtype import bfloat16, float16, float32, int32
from tilegrad.core.format import QUANTISED, Format
from tilegrad.core.target import AVX2, AVX512, AVX512_AMX, NEON, SSE2, Target
from tilegrad.graph import build, ops
from tilegrad.ir.symbol import symbol
from tilegrad.ir.types import Tuple
from tilegrad.kernels.quantised import cpu as kernels
from tilegrad.kernels.quantised.cpu_decode import Decode, programs
from tilegrad.kernels.quantised.cpu_many import Many, many
from tilegrad.kernels.quantised.cpu_prefill import panel_blocks, prefill, unit_of
from tilegrad.kernels.quantised.shape import Around, QuantisedShape
from tilegrad.runtime.buffer import Buffer
from tilegrad.targets.llvm.driver import assembly
from tilegrad.targets.llvm.emit import emit
from tilegrad.tile.callee import KernelCallee
from tilegrad.tile.check import verify_body, walk


def packed(shape: QuantisedShape, raw: np.ndarray) -> list[np.ndarray]:
    """The parts in order."""
    found = kernels.pack(shape, raw)
    for name, sizes, dtype in kernels.parts(shape):
        assert found[name].shape == sizes and found[name].dtype == dtype.numpy, name
    return [found[name] for name, _, _ in kernels.parts(shape)]


def compiled(
    callee: Any,
    given: list[np.ndarray],
    sizes: tuple[int, int],
    dtype: Any,
    target: Target | None = None,
) -> Any:
    """The first result on this machine."""
    nodes = [build.input_(t.shape, t.dtype) for t in callee.types("read")]
    made = ops.call(*nodes, callee=callee)
    out = build.items(made)[0] if isinstance(made.type, Tuple) else made
    (buffer,) = compile_for(nodes, [out], target or host()).run([Buffer.wrap(a) for a in given])
    return buffer.array(sizes, dtype.numpy)


def product(form: Format, rows: int, columns: int, x: np.ndarray, seed: int = 0) -> Any:
    """(result on this machine, in float64, weights in float64)."""
    dtype = {"float32": float32, "float16": float16}.get(x.dtype.name, bfloat16)
    shape = QuantisedShape(form, rows, columns, len(x), dtype)
    assert kernels.why_not(shape, host()) == ""
    raw = random_rows(form, rows, columns, seed)
    got = compiled(kernels.callee(shape, host()), [x, *packed(shape, raw)], (len(x), rows), dtype)
    w = form.to_float32(raw).astype(np.float64)
    return got.astype(np.float64), x.astype(np.float64) @ w.T, w


def few_or_skip(tokens: int) -> None:
    """Skip where this machine has no instructions to multiply weights of so many tokens packed."""
    if tokens > kernels.few(host()):
        pytest.skip(f"{kernels.few(host())} tokens are few here")


def tokens_of(count: int, columns: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, columns)).astype(np.float32)


def check(x: np.ndarray, got: np.ndarray, want: np.ndarray, w: np.ndarray) -> None:
    """No element is further off than its bound."""
    few = len(x) <= kernels.few(host()) or kernels.bytes_alone(host())
    bound = (decode_bound if few else prefill_bound)(x.astype(np.float64), w)
    worst = (np.abs(got - want) / bound).max()
    assert worst < 1.0, worst


@pytest.mark.parametrize("form", QUANTISED, ids=str)
def test_rows_are_the_formats_bit_for_bit(form: Format) -> None:
    shape = QuantisedShape(form, 37, 512, 9)
    raw = random_rows(form, 37, 512)
    parts = packed(shape, raw)
    assert sum(p.nbytes for p in parts) <= 1.2 * 48 / 37 * raw.nbytes  # rows up to whole blocks
    ids = np.array([0, 36, 5, 5, 16, 15, 31, 32, 1], np.int32)
    got = compiled(kernels.take_callee(shape, host()), [ids, *parts], (9, 512), float32)
    np.testing.assert_array_equal(got, form.to_float32(raw)[ids])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", QUANTISED, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 30])
def test_every_format(form: Format, tokens: int) -> None:
    x = tokens_of(tokens, 768)
    got, want, w = product(form, 37, 768, x)
    check(x, got, want, w)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "rows, columns, tokens",
    [
        (1, 32, 1),
        (16, 32, 2),
        (17, 96, 4),
        (64, 288, 5),
        (33, 64, 7),
        (200, 160, 8),
        (96, 32, 9),
        (17, 64, 31),
        (40, 96, 32),
        (31, 32, 70),
        (16, 64, 25),
    ],
)
@pytest.mark.parametrize("form", [formats.Q4_1, formats.Q8_0], ids=str)
def test_odd_sizes(form: Format, rows: int, columns: int, tokens: int) -> None:
    x = tokens_of(tokens, columns)
    got, want, w = product(form, rows, columns, x)
    check(x, got, want, w)


@pytest.mark.parametrize("tokens", [2, 27])
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
def test_narrow_tokens(dtype: Any, tokens: int) -> None:
    """Judged by the rounding of results, and of weights where tokens are bfloat16 too (twice
    2**-8 of the root of squares is seven deviations)."""
    x = tokens_of(tokens, 256).astype(dtype.numpy)
    got, want, w = product(formats.Q4_1, 48, 256, x)
    size = np.abs(x.astype(np.float64)) @ np.abs(w).T
    unit = 2.0**-8 if dtype is bfloat16 else 2.0**-11
    spread = np.sqrt((x.astype(np.float64) ** 2) @ (w**2).T)
    assert (np.abs(got - want) <= unit * np.abs(want) + 2.0**-14 * size + 2 * unit * spread).all()


HOSTILE = {
    "zeros": lambda x: x * 0,
    "huge": lambda x: x * np.float32(1e34),
    "tiny": lambda x: x * np.float32(1e-35),
    "one outlier": lambda x: np.where(np.arange(x.shape[1]) == 77, np.float32(1e6), x),
    "one sided": lambda x: np.abs(x) + np.float32(3),
    "steps of zeros": lambda x: np.where(np.arange(x.shape[1]) // 32 % 2, x, np.float32(0)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", [1, 5, 27])
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("form", [formats.Q4_1, formats.Q8_0, formats.Q3_K], ids=str)
def test_hostile_tokens(form: Format, kind: str, tokens: int) -> None:
    x = HOSTILE[kind](tokens_of(tokens, 256)).astype(np.float32)
    got, want, w = product(form, 48, 256, x)
    if kind == "zeros":
        assert (got == 0).all()
        return
    check(x, got, want, w)


@pytest.mark.parametrize("tokens", [3, 27])
def test_nan_stays_with_its_token(tokens: int) -> None:
    x = tokens_of(tokens, 256)
    x[1, 9] = np.nan
    got, want, w = product(formats.Q4_1, 48, 256, x)
    assert np.isnan(got[1]).all()
    rest = [0, *range(2, tokens)]
    bound = np.maximum(decode_bound(x[rest], w), prefill_bound(x[rest], w))
    assert (np.abs(got - want)[rest] < bound).all()


def test_a_sum_does_not_depend_on_its_neighbours() -> None:
    few_or_skip(8)
    x = tokens_of(8, 288)
    together = product(formats.Q4_1, 48, 288, x)[0]
    for t in (0, 3, 7):
        alone = product(formats.Q4_1, 48, 288, x[t : t + 1])[0]
        np.testing.assert_array_equal(alone[0], together[t])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", [formats.Q4_1, formats.Q6_K, formats.MXFP4], ids=str)
@pytest.mark.parametrize("target", [SSE2, AVX2, NEON, AVX512, AVX512_AMX], ids=lambda t: t.name)
@pytest.mark.parametrize("tokens", [1, 26])
def test_interpreted(target: Target, form: Format, tokens: int) -> None:
    shape = QuantisedShape(form, 20, 256, tokens)
    raw, x = random_rows(form, 20, 256), tokens_of(tokens, 256)
    callee = kernels.callee(shape, target)
    for body, _ in callee.launches:
        verify_body(body, "portable", target)
        emit(fitted(body, target), "kernel", target)
    got = callee.interpret(x, *packed(shape, raw))[0]
    w = form.to_float32(raw).astype(np.float64)
    error = np.abs(got - x.astype(np.float64) @ w.T)
    assert (error < np.maximum(decode_bound(x, w), prefill_bound(x, w))).all()


def test_tokens_known_at_run_time() -> None:
    """One callee for all counts; the grid of the kernel that has no work is empty."""
    form, count = formats.Q4_1, symbol("tokens", 1, 40)
    shape = QuantisedShape(form, 48, 96, count)
    raw, callee = random_rows(form, 48, 96), kernels.callee(shape, host())
    w, parts = form.to_float32(raw).astype(np.float64), packed(shape, raw)
    assert len(callee.launches) >= 2
    for tokens in (1, 2, 6, 7, kernels.few(host()), kernels.few(host()) + 1, 33, 40):
        x = tokens_of(tokens, 96)
        check(x, callee.interpret(x, *parts)[0], x.astype(np.float64) @ w.T, w)


def test_the_work_of_a_step() -> None:
    """16 byte products for 512 weights and a token, and no more loads than the bytes need."""
    shape = QuantisedShape(formats.Q4_1, 4096, 576)
    nodes = [n for n, _ in walk(Decode(shape, AVX512_AMX).build().block)]
    assert sum(n.op.name == "byte_dot" for n in nodes) == 16
    read = sum(
        int(np.prod(n.shape)) * n.dtype.size
        for n in nodes
        if n.op.name == "load" and n.shape == (16,)
    )
    assert read == 16 * 20  # bytes of a block of 32 in each of 16 rows
    text = emit(fitted(Decode(shape, AVX512_AMX).build(), AVX512_AMX), "k", AVX512_AMX)[0]
    assert text.count("call <16 x i32> @llvm.x86.avx512.vpdpbusd.512") == 3 * 16  # 2 + 1 a loop
    many = QuantisedShape(formats.Q4_1, 4096, 576, 512)
    body = kernels.callee(many, AVX512_AMX).launches[1][0]
    dots = [n for n, _ in walk(body.block) if n.op.name == "matrix_dot"]
    loads = [n for n, _ in walk(body.block) if n.op.name == "matrix_load"]
    assert (len(dots), len(loads)) == (12, 8 + 4)  # and the zeros that four sums begin with


@pytest.mark.parametrize("more, wanted", [("", ""), ("dotprod", "sdot"), ("dotprod i8mm", "usdot")])
@pytest.mark.parametrize("form", [formats.Q4_0, formats.Q8_0], ids=str)
def test_byte_products_of_arm(form: Format, more: str, wanted: str) -> None:
    """The instruction that a CPU has, also where codes have all eight bits; on every machine."""
    target = replace(NEON, features=",".join(f"+{name}" for name in ("neon", *more.split())))
    text = emit(
        fitted(Decode(QuantisedShape(form, 32, 64, 3), target).build(), target), "k", target
    )[0]
    words = assembly(text, target).split()
    for name in ("sdot", "usdot"):
        assert (words.count(name) > 0) == (name == wanted), name


@pytest.mark.parametrize("rows, cores", [(16, 2), (576, 2), (49152, 2), (4096, 64), (100, 8)])
def test_programs_are_a_few_for_each_worker(rows: int, cores: int) -> None:
    count = programs(QuantisedShape(formats.Q4_1, rows, 576), AVX512.with_cores(cores))
    assert 1 <= count <= -(-rows // 16)
    assert count % cores == 0 or count == -(-rows // 16)


@pytest.mark.parametrize(
    "rows, columns, cores, blocks",
    [
        (576, 576, 2, 6),
        (960, 576, 2, 10),
        (3072, 576, 2, 16),
        (576, 1536, 2, 6),
        (576, 4096, 2, 2),
        (64, 64, 8, 2),
        (4096, 4096, 64, 2),
    ],
)
def test_panels(rows: int, columns: int, cores: int, blocks: int) -> None:
    """They fit a cache, and workers have the same to do."""
    shape = QuantisedShape(formats.Q4_1, rows, columns, 512)
    assert panel_blocks(shape, AVX512_AMX.with_cores(cores), 4) == blocks


def test_the_reason_for_no_kernel() -> None:
    assert "quantised" in kernels.why_not(QuantisedShape(formats.F16, 16, 32), host())
    assert "columns" in kernels.why_not(QuantisedShape(formats.Q4_1, 16, 0), host())
    assert "tokens" in kernels.why_not(QuantisedShape(formats.Q4_1, 16, 32, 1, int32), host())


AROUND = [
    Around(norm=1e-5),
    Around(norm=1e-6, offset=1.0, residual=True),
    Around(bias=True),
    Around(norm=1e-5, gated="silu"),
    Around(bias=True, residual=True),
]


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("around", AROUND, ids=str)
def test_what_lies_around(around: Around, tokens: int) -> None:
    """Norm, bias, gates and residual in the same launch, against float64."""
    few_or_skip(tokens)
    form, rows, columns = formats.Q4_1, 96, 288
    shape = QuantisedShape(form, rows, columns, tokens)
    assert kernels.why_not_around(shape, host(), around) == ""
    raw, draw = random_rows(form, rows, columns), np.random.default_rng(8)
    results = rows // 2 if around.gated else rows
    x = 3 * tokens_of(tokens, columns)
    norm, bias, residual = (
        draw.standard_normal(size).astype(np.float32) for size in (columns, rows, (tokens, results))
    )
    given = [x, *([norm] if around.norm is not None else []), *packed(shape, raw)]
    given += [bias] if around.bias else []
    given += [residual] if around.residual else []
    callee = kernels.callee(shape, host(), around)
    assert len(callee.launches) == 1
    got = compiled(callee, given, (tokens, results), float32)
    want = x.astype(np.float64)
    if around.norm is not None:
        want = want / np.sqrt((want**2).mean(-1, keepdims=True) + around.norm)
        want = want * (norm.astype(np.float64) + around.offset)
    want = want @ form.to_float32(raw).astype(np.float64).T
    want = want + bias if around.bias else want
    if around.gated:
        gate, other = want[:, :results], want[:, results:]
        want = gate / (1 + np.exp(-gate)) * other
    want = want + residual if around.residual else want
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("splits", [(48, 16, 32), (16, 80)])
@pytest.mark.parametrize("tokens", [1, 7])
def test_several_results(splits: tuple[int, ...], tokens: int) -> None:
    few_or_skip(tokens)
    form, columns = formats.Q4_1, 96
    shape, around = QuantisedShape(form, 96, columns, tokens), Around(norm=1e-5, splits=splits)
    assert kernels.why_not_around(shape, host(), around) == ""
    raw, x = random_rows(form, 96, columns), tokens_of(tokens, columns)
    given = [x, np.ones(columns, np.float32), *packed(shape, raw)]
    callee = kernels.callee(shape, host(), around)
    nodes = [build.input_(t.shape, t.dtype) for t in callee.types("read")]
    made = build.items(ops.call(*nodes, callee=callee))
    buffers = compile_for(nodes, made, host()).run([Buffer.wrap(a) for a in given])
    wide = x.astype(np.float64)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    want, first = wide @ form.to_float32(raw).astype(np.float64).T, 0
    for buffer, size in zip(buffers, splits):
        got = buffer.array((tokens, size), np.float32)
        assert np.abs(got - want[:, first : first + size]).max() < 1e-4 * np.abs(want).max()
        first += size
    for wrong in ((48, 40), (90, 6)):
        assert "multiple" in kernels.why_not_around(shape, host(), Around(splits=wrong))


def test_what_cannot_be_around() -> None:
    shape = QuantisedShape(formats.Q4_1, 96, 64)
    assert "gelu" in kernels.why_not_around(shape, host(), Around(gated="gelu"))
    assert "gates" in kernels.why_not_around(shape, host(), Around(gated="silu", bias=True))
    many = QuantisedShape(formats.Q4_1, 96, 64, 1000)
    assert "tokens" in kernels.why_not_around(many, host(), Around(norm=1e-5))


LESSER = [SSE2, AVX2, replace(AVX2, name="avxvnni", features=f"{AVX2.features},+avxvnni"), AVX512]


@pytest.mark.parametrize("target", LESSER, ids=lambda t: t.name)
@pytest.mark.parametrize("form", [formats.Q4_1, formats.Q6_K], ids=str)
@pytest.mark.parametrize("tokens", [1, 30])
def test_lesser_machines(target: Target, form: Format, tokens: int) -> None:
    """Programs for CPUs without this one's instructions, run here."""
    if not target.feature_set <= host().feature_set | {"sse2"} or "x86_64" not in host().triple:
        pytest.skip("not a CPU that runs these")
    shape = QuantisedShape(form, 40, 256, tokens)
    raw, x = random_rows(form, 40, 256), tokens_of(tokens, 256)
    callee = kernels.callee(shape, target)
    got = compiled(callee, [x, *packed(shape, raw)], (tokens, 40), float32, target)
    w = form.to_float32(raw).astype(np.float64)
    error = np.abs(got - x.astype(np.float64) @ w.T)
    assert (error < np.maximum(decode_bound(x, w), prefill_bound(x, w))).all()


# ---- any number of tokens by one kernel ---------------------------------------------------------


def by_bytes(kernel: Any, form: Format, x: np.ndarray, raw: np.ndarray) -> Any:
    """Products of bytes with all tokens on this machine: 24 at a time, or of unpacked codes."""
    shape = QuantisedShape(form, len(raw), x.shape[1], len(x))
    bodies = many(shape, host()) if kernel is many else [Decode(shape, host(), 24).build()]
    callee = KernelCallee.named("quantised_matmul", bodies, ("out0", "split"))
    return compiled(callee, [x, *packed(shape, raw)], (len(x), len(raw)), float32)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dots, limit", [("exact", 32639), ("int8", 127)])
@pytest.mark.parametrize("form", QUANTISED, ids=str)
def test_any_number_of_tokens_by_products_of_bytes(form: Format, dots: str, limit: int) -> None:
    """Each is within its bound; its bits depend neither on how many there are nor on the kernel."""
    x, raw = tokens_of(53, 256), random_rows(form, 37, 256)
    with override(dots=dots):
        whole = by_bytes(many, form, x, raw)
        w = form.to_float32(raw).astype(np.float64)
        wide = x.astype(np.float64)
        assert (np.abs(whole - wide @ w.T) / decode_bound(wide, w, limit)).max() < 1.0
        for kernel, count in ((Decode, 1), (Decode, 7), (Decode, 53), (many, 1), (many, 50)):
            found = by_bytes(kernel, form, x[:count], raw)
            np.testing.assert_array_equal(found, whole[:count])


@pytest.mark.parametrize("form", [formats.Q4_1, formats.Q8_0, formats.Q6_K], ids=str)
def test_many_tokens_of_8_bits(form: Format) -> None:
    """Rounded to a byte, or with a matrix unit for bfloat16 to that, and weights too."""
    x = tokens_of(40, 256)
    with override(dots="int8"):
        got, want, w = product(form, 48, 256, x)
    size = np.abs(x.astype(np.float64)) @ np.abs(w).T
    bound = np.maximum(decode_bound(x, w, 127), 2.0**-8 * size + rounding(x, w))
    assert (np.abs(got - want) < bound).all()
    assert (np.abs(got - want) > 1e-4 * np.abs(want).max()).any() == (  # as the setting says
        kernels.bytes_alone(host()) or bool(unit_of(host()))
    )


@pytest.mark.parametrize("dots, products", [("exact", 12), ("int8", 4)])
def test_products_of_a_matrix_unit(dots: str, products: int) -> None:
    """32 tokens by 32 rows of a step: three products of parts, or one of what is rounded."""
    with override(dots=dots):
        *_, body = prefill(QuantisedShape(formats.Q4_0, 32, 64, 99), AVX512_AMX)
    found = [n for n, _ in walk(body.block) if n.op.name == "matrix_dot"]
    assert len(found) == products


@pytest.mark.parametrize("dots, products", [("exact", 96), ("int8", 48)])
def test_a_step_of_many_tokens(dots: str, products: int) -> None:
    """3 tokens by 8 rows: no more instructions beside products than scales and loads are."""
    target = replace(NEON, features="+neon,+dotprod")
    with override(dots=dots):
        body = Many(QuantisedShape(formats.Q4_0, 32, 576, 99), target).build()
    lines = assembly(emit(fitted(body, target), "k", target)[0], target).splitlines()
    loops = "\n".join(line.split("//")[0].strip() for line in lines).split(".LBB")
    step = max(loops, key=lambda loop: loop.count("sdot"))
    assert step.count("sdot") == products
    assert len(step.splitlines()) < products + 100


@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(0, 40, 13), (40, 0, 13), (3, 3, 47)], ids=str)
def test_groups_of_many_tokens(sizes: tuple[int, ...], dtype: Any) -> None:
    """Groups with some tokens each are multiplied by codes that are unpacked once."""
    form, tokens = formats.Q4_K, sum(sizes)
    shape = QuantisedShape(form, 3 * 32, 256, tokens, dtype, groups=3)
    raw, x = random_rows(form, 3 * 32, 256), tokens_of(tokens, 256).astype(dtype.numpy)
    offsets = np.cumsum([0, *sizes]).astype(np.int32)
    callee = kernels.grouped_callee(shape, host(), 0)
    got = compiled(callee, [x, offsets, *packed(shape, raw)], (tokens, 32), dtype)
    w = form.to_float32(raw).astype(np.float64).reshape(3, 32, 256)
    for number in np.flatnonzero(sizes):
        own = slice(offsets[number], offsets[number + 1])
        wide = x[own].astype(np.float64)
        bound = np.maximum(decode_bound(wide, w[number]), prefill_bound(wide, w[number]))
        bound = bound + (2.0**-8 * np.abs(wide @ w[number].T) if dtype is bfloat16 else 0)
        assert (np.abs(got[own].astype(np.float64) - wide @ w[number].T) <= bound).all()


@pytest.mark.parametrize("target", [AVX512, AVX512_AMX, AVX2, NEON, SSE2], ids=lambda t: t.name)
def test_any_number_of_tokens_to_the_same_bits(target: Target) -> None:
    """At the level `invariant`: kernels whose sums are the same, for one token and for many."""
    found = set()
    with override(determinism="invariant"):
        for tokens in (1, 7, 300, symbol("tokens", 1, 512)):
            shape = QuantisedShape(formats.Q4_1, 64, 96, tokens)
            assert "invariant" in kernels.why_not_around(shape, target, Around(bias=True))
            found |= {body.name for body, _ in kernels.callee(shape, target).launches}
    few = kernels.few(target) > 1
    packed_codes = {"quantised_decode", "quantised_split", "quantised_many"}
    assert found == (packed_codes if few else {"quantised_prefill"})
