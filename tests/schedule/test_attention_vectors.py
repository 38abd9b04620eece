"""schedule/attention.py and kernels/attention_cpu: attention on the CPU, tiled.

Compiled Schedules are held to the Graph interpreter (float64 inside) and to torch; small ones for
other vector widths run on the Tile interpreter.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from interpreted import run_interpreted

from tilegrad.compiler.compile import compile_for, host, schedule_for
from tilegrad.core.dtype import BY_NUMPY
from tilegrad.core.target import AVX2, AVX512, AVX512_AMX, NEON, SSE2, Target
from tilegrad.graph import build, ops
from tilegrad.graph.attention import attention
from tilegrad.graph.interpret import interpret
from tilegrad.ir.block import Block
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import symbol
from tilegrad.runtime.buffer import Buffer
from tilegrad.schedule.families import why_not
from tilegrad.schedule.schedule import Schedule

BF16 = ml_dtypes.bfloat16
# Against float64 rounded once: bfloat16 rounds probabilities too.
TOLERANCE = {"float32": 2e-6, "float64": 1e-13, "float16": 1e-3, "bfloat16": 1e-2}
SUM_TOLERANCE = {"float32": 4e-6, "float64": 1e-13, "float16": 1e-5, "bfloat16": 1e-5}
PLAIN = (None, None)
random = np.random.default_rng(7)


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Normal numbers."""
    return random.standard_normal(shape).astype(dtype)


def inputs(sizes: tuple[int, ...], dtype: Any, orders: Any = None) -> list[np.ndarray]:
    """q, k and v of (batch, heads, key heads, queries, keys, width, value width)."""
    b, h, hk, tq, tk, d, e = sizes
    found = []
    for number, (heads, tokens, width) in enumerate(((h, tq, d), (hk, tk, d), (hk, tk, e))):
        of = {"b": b, "h": heads, "t": tokens, "d": width}
        order = "bhtd" if orders is None else orders[number]
        found.append(numbers(*(of[axis] for axis in order), dtype=dtype))
    return found


def attend(q: Node, k: Node, v: Node, more: Any = (), **attrs: Any) -> list[Node]:
    """(out, lse) of an attention Node; attrs that are not given are the usual ones."""
    usual = {"band": PLAIN, "softcap": 0.0, "dropout": 0.0, "orders": ("bhtd",) * 4}
    return attention(q, k, v, dict(more), **{**usual, **attrs})


def graph(
    values: list[np.ndarray], more: dict[str, np.ndarray], **options: Any
) -> tuple[list[Node], list[Node]]:
    """Inputs and (out, lse)."""
    nodes = [build.input_(v.shape, BY_NUMPY[v.dtype]) for v in (*values, *more.values())]
    options.setdefault("scale", values[0].shape[-1] ** -0.5)
    return nodes, list(attend(*nodes[:3], dict(zip(more, nodes[3:])), **options))


def kinds(schedule: Schedule) -> list[str]:
    """What the Kernels of a Schedule are."""
    return [k.kind for k in schedule.kernels]


def computed(nodes: list[Node], outputs: list[Node], values: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs on this machine."""
    buffers = [Buffer.wrap(np.ascontiguousarray(v)) for v in values]
    found = compile_for(nodes, outputs, host()).run(buffers)
    return [np.array(b.array(tuple(o.shape), o.dtype)) for b, o in zip(found, outputs)]


def compare(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """Close where finite, equal elsewhere."""
    assert got.shape == want.shape and got.dtype == want.dtype
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    scale = max(1.0, float(np.abs(want[finite]).max(initial=0.0)))
    np.testing.assert_allclose(got[finite], want[finite], rtol=0, atol=tolerance * scale)


def check(
    sizes: tuple[int, ...],
    dtype: Any = np.float32,
    more: dict[str, np.ndarray] | None = None,
    target: Target | None = None,
    values: list[np.ndarray] | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """One attention, compiled here or interpreted for a Target, against the definition."""
    more = {} if more is None else more
    given = inputs(sizes, dtype, options.get("orders")) if values is None else values
    nodes, outputs = graph(given, more, **options)
    assert kinds(schedule_for(nodes, outputs, target or host())) == ["attention"]
    everything = [*given, *more.values()]
    if target is None:
        got = computed(nodes, outputs, everything)
    else:
        got = run_interpreted(target, nodes, outputs, everything)
    want = interpret(outputs, dict(zip(nodes, everything)))
    name = np.dtype(dtype).name
    for g, w, tolerance in zip(got, want, (TOLERANCE[name], SUM_TOLERANCE[name])):
        compare(np.asarray(g).reshape(w.shape), w, tolerance)
    return list(got)


ODD = (2, 4, 2, 37, 45, 24, 20)
LONG = (1, 2, 1, 150, 530, 40, 72)
DTYPES = (np.float32, BF16, np.float16, np.float64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes, band",
    [
        (ODD, PLAIN),
        (LONG, (None, 380)),
        (ODD, (-9, 0)),
        ((1, 1, 1, 1, 1, 8, 8), PLAIN),
        ((1, 3, 1, 20, 0, 16, 16), PLAIN),
        ((1, 4, 2, 1, 77, 64, 64), PLAIN),
        ((2, 2, 2, 1, 0, 16, 16), PLAIN),
        ((1, 2, 2, 33, 64, 130, 33), (None, 0)),
    ],
)
def test_sizes_and_bands(dtype: Any, sizes: tuple[int, ...], band: Any) -> None:
    check(sizes, dtype, band=band)


def extras(sizes: tuple[int, ...], dtype: Any) -> dict[str, np.ndarray]:
    """All extras, some rows hidden."""
    b, h, _, tq, tk, _, _ = sizes
    mask = random.random((b, 1, tq, tk)) < 0.7
    mask[:, :, : tq // 3] = False
    return {
        "bias": numbers(1, h, tq, tk, dtype=dtype),
        "mask": mask,
        "slopes": numbers(h) * 0.1,
        "sinks": numbers(h),
        "key_lengths": np.arange(b, dtype=np.int32) * tk // 2,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [ODD, (2, 4, 2, 3, 75, 24, 40)])
def test_all_extras(dtype: Any, sizes: tuple[int, ...]) -> None:
    check(sizes, dtype, extras(sizes, dtype), softcap=2.0, band=(-60, 20))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["bias", "mask", "slopes", "sinks", "key_lengths"])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_each_extra(name: str, dtype: Any) -> None:
    check(ODD, dtype, {name: extras(ODD, np.float32)[name]}, band=(None, 8))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(1, 1, 1, 45), (2, 4, 37, 1), (1, 1, 1, 1), (2, 1, 37, 45)])
@pytest.mark.parametrize("queries", [37, 1])
def test_bias_of_every_shape(shape: tuple[int, ...], queries: int) -> None:
    shape = tuple(queries if s == 37 else s for s in shape)
    bias = numbers(*shape)
    bias[random.random(shape) < 0.2] = -np.inf
    check((2, 4, 2, queries, 45, 24, 20), more={"bias": bias, "mask": bias < 1})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "orders",
    [
        ("bthd", "bthd", "bthd", "bthd"),
        ("htbd", "tbhd", "bhtd", "bthd"),
    ],
)
@pytest.mark.parametrize("queries", [37, 2])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_orders(orders: Any, queries: int, dtype: Any) -> None:
    check((2, 4, 2, queries, 45, 24, 20), dtype, orders=orders, band=(None, 3))


ROW = {
    "query_starts": np.array([2, 5, 5, 40, 150], np.int32),
    "key_starts": np.array([1, 9, 20, 50, 190], np.int32),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("band", [PLAIN, (None, 0), (-7, 2)])
@pytest.mark.parametrize("tokens", [150, 160])
def test_sequences_in_a_row(dtype: Any, band: Any, tokens: int) -> None:
    """The tokens before the first sequence and past the last one see nothing."""
    more = ROW if tokens == 150 else {"slopes": numbers(4) * 0.1, **ROW}
    check((1, 4, 2, tokens, 200, 24, 20), dtype, more, band=band)
    check_backward((1, 4, 2, tokens, 200, 24, 20), dtype, more, band=band)


def test_a_sink_is_all_that_tokens_of_no_sequence_see() -> None:
    check((1, 4, 2, 160, 200, 24, 20), np.float32, {"sinks": numbers(4), **ROW})


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing_are_zero(dtype: Any) -> None:
    for sizes in (ODD, (2, 4, 2, 1, 45, 24, 20)):
        out, sums = check(sizes, dtype, {"key_lengths": np.array([0, 45], np.int32)})
        assert not out[0].any() and np.isneginf(sums[0]).all() and np.isfinite(sums[1]).all()


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("queries", [40, 1])
def test_large_logits(dtype: Any, queries: int) -> None:
    sizes = (1, 2, 2, queries, 300, 32, 32)
    q, k, v = inputs(sizes, np.float32)
    q, k = (np.rint(x * 4) * 16 for x in (q, k))  # products are exact: large, not rounded
    values = [x.astype(dtype) for x in (q, k, v)]
    out, _ = check(sizes, dtype, values=values, scale=1.0)
    assert np.isfinite(out.astype(np.float32)).all()


def test_a_split_over_keys_is_combined() -> None:
    """One key head for two workers: parts of the keys, then one more launch."""
    values = inputs((1, 4, 1, 1, 801, 64, 40), np.float32)
    more = {"sinks": numbers(4), "key_lengths": np.array([700], np.int32)}
    nodes, outputs = graph(values, more)
    target = host().with_cores(8)
    schedule = schedule_for(nodes, outputs, target)
    assert [s.body.grid for s in schedule.kernels[0].steps] == [(1, 1, 1, 3), (1, 1, 1, 1)]
    got = run_interpreted(target, nodes, outputs, [*values, *more.values()])
    for g, w in zip(got, interpret(outputs, dict(zip(nodes, [*values, *more.values()])))):
        compare(np.asarray(g).reshape(w.shape), w, 4e-6)


@pytest.mark.parametrize("target", [SSE2, AVX2, AVX512, AVX512_AMX, NEON], ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_every_vector_width(target: Target, dtype: Any) -> None:
    small = (1, 2, 1, 19, 21, 12, 9)
    check(small, dtype, {"mask": extras(small, dtype)["mask"]}, target, band=(None, 0))
    check((1, 2, 1, 1, 70, 12, 9), dtype, target=target)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("key_heads", [8, 32])
def test_decode_of_arrays_asks_for_keys_alone(key_heads: int, dtype: Any) -> None:
    """Every line of the keys of a square; values are a stream that machines bring unasked."""
    shapes = [(8, heads, tokens, 128) for heads, tokens in ((32, 1), *[(key_heads, 4096)] * 2)]
    nodes = [build.input_(shape, BY_NUMPY[np.dtype(dtype)]) for shape in shapes]
    outputs = [attend(*nodes, scale=0.25)[0]]
    (kernel,) = schedule_for(nodes, outputs, AVX512.with_cores(8)).kernels
    body = kernel.steps[0].body

    def asked(block: Block) -> list[Node]:
        inner = [n for node in block.nodes for b in node.blocks for n in asked(b)]
        return [*(n for n in block.nodes if n.op.name == "prefetch"), *inner]

    found = asked(body.block)
    assert [n.inputs[0].attrs["name"] for n in found] == ["k"] * 16


def test_sizes_known_at_run_time() -> None:
    tokens, keys = symbol("tokens", 1, 200), symbol("keys", 1, 300)
    shapes = [(1, 2, tokens, 16), (1, 2, keys, 16), (1, 2, keys, 16)]
    nodes = [build.input_(s, BY_NUMPY[np.dtype(np.float32)]) for s in shapes]
    outputs = list(attend(*nodes, scale=0.25, band=(None, keys - tokens)))
    assert kinds(schedule_for(nodes, outputs, host())) == ["attention"]
    executable = compile_for(nodes, outputs, host())
    for tq, tk in ((1, 1), (130, 270), (200, 300), (37, 38)):
        values = inputs((1, 2, 2, tq, tk, 16, 16), np.float32)
        buffers = executable.run([Buffer.wrap(v) for v in values], {"tokens": tq, "keys": tk})
        known, wanted = graph(values, {}, scale=0.25, band=(None, tk - tq))
        for buffer, w in zip(buffers, interpret(wanted, dict(zip(known, values)))):
            compare(np.array(buffer.array(w.shape, w.dtype)), w, 4e-6)


def test_memory_grows_with_tokens() -> None:
    """Neither the arena nor a worker's scratch holds scores of all keys and queries."""
    nodes = [build.input_((1, 8, 4096, 64), BY_NUMPY[np.dtype(np.float32)]) for _ in range(3)]
    schedule = schedule_for(nodes, [attend(*nodes, scale=0.125)[0]], host())
    assert schedule.arena_bytes == 0
    executable = compile_for(nodes, [attend(*nodes, scale=0.125)[0]], host())
    assert executable.recipe.scratch_bytes < 1 << 20


def test_log_sum_exps_nobody_wants_are_not_stored() -> None:
    nodes, outputs = graph(inputs(ODD, np.float32), {})
    schedule = schedule_for(nodes, outputs[:1], host())
    assert len(schedule.kernels[0].steps[0].slots) == 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout(dtype: Any) -> None:
    more = {"key": np.array(17, np.uint32), "offset": np.array(3, np.uint32)}
    for sizes in (ODD, (2, 4, 2, 1, 45, 24, 20)):
        check(sizes, dtype, more, dropout=0.3, band=(None, 30))
        check_backward(sizes, dtype, more, dropout=0.3, band=(None, 30))


def test_the_reason_for_no_kernel() -> None:
    values = inputs(ODD, np.float32)
    nodes, outputs = graph(values, {"bias": numbers(1, 4, 37, 45)})
    dout = build.input_(outputs[0].shape, outputs[0].dtype)
    attrs = dict(outputs[0].inputs[0].attrs)
    node = ops.attention_backward(
        *nodes[:3], dout, outputs[1], outputs[1], nodes[3], **attrs, wanted=("bias",)
    )
    assert "bias" in why_not(node, host()) and why_not(outputs[0].inputs[0], host()) == ""
    given, gradient = [*nodes, dout], ops.get(node, index=3)
    assert "dot" in kinds(schedule_for(given, [gradient], host()))


@pytest.mark.parametrize("queries, keys, width", [(200, 200, 64), (1, 900, 128)])
def test_bfloat16_is_as_exact_as_torch(queries: int, keys: int, width: int) -> None:
    torch = pytest.importorskip("torch")
    values = inputs((1, 4, 4, queries, keys, width, width), BF16)
    nodes, outputs = graph(values, {})
    (got,) = computed(nodes, outputs[:1], values)
    exact = [torch.from_numpy(v.astype(np.float64)) for v in values]
    want = torch.nn.functional.scaled_dot_product_attention(*exact).numpy()
    peer = torch.nn.functional.scaled_dot_product_attention(*(x.bfloat16() for x in exact))
    error = np.abs(got.astype(np.float64) - want)
    theirs = np.abs(peer.double().numpy() - want)
    assert error.max() <= 2 * theirs.max() and error.mean() <= 1.2 * theirs.mean()


# ---- backward -------------------------------------------------------------------------------


def check_backward(
    sizes: tuple[int, ...],
    dtype: Any = np.float32,
    more: dict[str, np.ndarray] | None = None,
    target: Target | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """attention_backward, compiled or interpreted, against the definition."""
    more = {} if more is None else more
    values = inputs(sizes, dtype, options.get("orders"))
    nodes, outputs = graph(values, more, **options)
    out, sums = interpret(outputs, dict(zip(nodes, [*values, *more.values()])))
    dout = numbers(*out.shape, dtype=dtype)
    order = outputs[0].inputs[0].attrs["orders"][3]
    delta = (dout.astype(np.float64) * out.astype(np.float64)).sum(-1).astype(sums.dtype)
    delta = np.ascontiguousarray(delta.transpose([order.index(a) for a in "bht"]))
    rest = [build.input_(v.shape, BY_NUMPY[v.dtype]) for v in (dout, sums, delta)]
    attrs = dict(outputs[0].inputs[0].attrs)
    node = ops.attention_backward(*nodes[:3], *rest, *nodes[3:], **attrs, wanted=())
    gradients = [ops.get(node, index=i) for i in range(3)]
    given = [*nodes[:3], *rest, *nodes[3:]]
    everything = [*values, dout, sums, delta, *more.values()]
    assert kinds(schedule_for(given, gradients, target or host())) == ["attention"]
    if target is None:
        got = computed(given, gradients, everything)
    else:
        got = [np.asarray(g) for g in run_interpreted(target, given, gradients, everything)]
    want = interpret(gradients, dict(zip(given, everything)))
    for g, w in zip(got, want):
        compare(g.reshape(w.shape), w, 2 * TOLERANCE[np.dtype(dtype).name])
    return got


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes, band",
    [
        (ODD, PLAIN),
        ((1, 2, 1, 150, 290, 40, 72), (None, 140)),
        (ODD, (-9, 2)),
        ((1, 1, 1, 1, 1, 8, 8), PLAIN),
        ((1, 3, 1, 20, 0, 16, 16), PLAIN),
    ],
)
def test_backward_of_sizes_and_bands(dtype: Any, sizes: tuple[int, ...], band: Any) -> None:
    check_backward(sizes, dtype, band=band)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_backward_with_all_extras(dtype: Any) -> None:
    orders = ("bthd", "bhtd", "htbd", "bthd")
    check_backward(ODD, dtype, extras(ODD, dtype), softcap=2.0, band=(-60, 20), orders=orders)


@pytest.mark.parametrize(
    "target, dtype",
    [
        (SSE2, np.float32),
        (AVX512, np.float32),
        (AVX512, BF16),
        (AVX512_AMX, BF16),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_backward_of_every_vector_width(target: Target, dtype: Any) -> None:
    check_backward((1, 2, 1, 19, 21, 12, 9), dtype, target=target, band=(None, 3))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_backward_is_the_same_every_time_and_needs_little_memory(dtype: Any) -> None:
    sizes = (1, 4, 2, 300, 300, 32, 32)
    values = inputs(sizes, dtype)
    nodes, outputs = graph(values, {}, band=(None, 0))
    dout = build.input_(outputs[0].shape, outputs[0].dtype)
    wide = [build.cast(x, outputs[1].dtype) for x in (dout, outputs[0])]
    delta = build.sum_(build.multiply(*wide), 3)
    attrs = dict(outputs[0].inputs[0].attrs)
    node = ops.attention_backward(*nodes, dout, outputs[1], delta, **attrs, wanted=())
    gradients = [ops.get(node, index=i) for i in range(3)]
    given, numpy_values = [*nodes, dout], [*values, numbers(1, 4, 300, 32, dtype=dtype)]
    schedule = schedule_for(given, gradients, host())
    assert schedule.arena_bytes < 1 << 19  # scores alone would need 1440000 bytes
    executable = compile_for(given, gradients, host())
    buffers = [Buffer.wrap(v) for v in numpy_values]
    first = [np.array(b.array((b.bytes,), np.uint8)) for b in executable.run(buffers)]
    for _ in range(20):
        for a, b in zip(first, executable.run(buffers)):
            np.testing.assert_array_equal(a, b.array((b.bytes,), np.uint8))
