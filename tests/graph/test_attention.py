"""The ops attention and attention_backward: meaning, decomposition, derivatives, batches, text."""

import itertools
import math

import numpy as np
import pytest
from cases import evaluate, inner, or_zeros
from hypothesis import given, settings
from hypothesis import strategies as st

from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.core import dtype as dtypes
from tilegrad.core.errors import TilegradError
from tilegrad.graph import attention, batch, build, grad, ops
from tilegrad.graph.attention_types import EXTRAS, WANTED, dropout_threshold
from tilegrad.graph.interpret import interpret, philox
from tilegrad.ir.block import argument, pure_block
from tilegrad.ir.node import topological
from tilegrad.ir.symbol import combine, symbol
from tilegrad.ir.text import parse_block, print_block
from tilegrad.ir.types import Array

USUAL = {
    "scale": 0.6,
    "band": (None, None),
    "softcap": 0.0,
    "dropout": 0.0,
    "orders": ("bhtd",) * 4,
}
PLAIN = {**USUAL, "extras": ()}


def node_of(array):
    """An input of the array's type."""
    return build.input_(array.shape, dtypes.BY_NUMPY[array.dtype])


# ---- meaning, one number at a time ------------------------------------------------------------


def position(token, starts):
    """(number in its sequence, number of the sequence) of a token; None for no sequence."""
    if starts is None:
        return token, 0
    for n in range(len(starts) - 1):
        if starts[n] <= token < starts[n + 1]:
            return token - int(starts[n]), n
    return token, None


def score(dot, extras, attrs, place, shape):
    """The score of (b, h, i, j) whose product is `dot`."""
    b, h, i, j = place
    i, of_i = position(i, extras.get("query_starts"))
    j, of_j = position(j, extras.get("key_starts"))
    low, high = attrs["band"]
    seen = of_i is not None and of_i == of_j
    seen &= (low is None or j - i >= low) and (high is None or j - i <= high)
    seen &= place[3] < int(extras["key_lengths"][b]) if "key_lengths" in extras else True
    seen &= bool(np.broadcast_to(extras.get("mask", True), shape)[place])
    if not seen:
        return -math.inf
    s = attrs["scale"] * dot
    s = attrs["softcap"] * math.tanh(s / attrs["softcap"]) if attrs["softcap"] else s
    s += float(np.broadcast_to(extras.get("bias", 0.0), shape)[place])
    return s + (float(extras["slopes"][h]) * (j - i) if "slopes" in extras else 0.0)


def factor(extras, attrs, index):
    """What dropout makes of 1 at a linear index."""
    if attrs["dropout"] == 0.0:
        return 1.0
    offset = np.array([int(extras["offset"])], np.uint64)
    bits = int(philox(np.array([index], np.uint64), offset, int(extras["key"]))[0])
    number = np.float32(bits >> 8) * np.float32(2.0**-24)
    return 1.0 / (1.0 - attrs["dropout"]) if np.float32(attrs["dropout"]) < number else 0.0


def by_loops(q, k, v, extras, attrs):
    """(out, lse) in plain orders."""
    shape = (*q.shape[:3], k.shape[2])
    group = q.shape[1] // k.shape[1]
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        scores = [
            score(float(q[b, h, i] @ k[b, h // group, j]), extras, attrs, (b, h, i, j), shape)
            for j in range(k.shape[2])
        ]
        all_ = [*scores, float(extras["sinks"][h])] if "sinks" in extras else scores
        total = sum(map(math.exp, all_))
        if total == 0.0:
            continue
        lse[b, h, i] = math.log(total)
        for j, s in enumerate(scores):
            index = int(np.ravel_multi_index((b, h, i, j), shape))
            weight = math.exp(s) / total * factor(extras, attrs, index)
            out[b, h, i] += weight * v[b, h // group, j]
    return out, lse


# ---- problems ---------------------------------------------------------------------------------

ORDERS = ("bhtd", "bthd", "tbhd", "hbtd")


def laid(x, order):
    """(b, h, t, d) in an order."""
    return x.transpose(["bhtd".index(a) for a in order])


def extras_for(draw, rng, shape, packed):
    """Extras by name for scores of a shape."""
    flag, found = st.booleans(), {}
    for name in ("bias", "mask"):
        if draw(flag):
            some = tuple(n if draw(flag) else 1 for n in shape)
            x = rng.standard_normal(some)
            found[name] = x < 0.7 if name == "mask" else np.where(x < -1.5, -np.inf, x)
    for name in ("slopes", "sinks"):
        if draw(flag):
            found[name] = rng.standard_normal(shape[1])
    if packed:
        for name, count in (("query_starts", shape[2]), ("key_starts", shape[3])):
            cuts = draw(st.lists(st.integers(0, count), min_size=4, max_size=4))
            found[name] = np.array(sorted(cuts), np.int32)
    elif draw(flag):
        found["key_lengths"] = rng.integers(0, shape[3] + 2, shape[0]).astype(np.int32)
    return found


@st.composite
def problems(draw):
    """(q, k, v, extras, attrs), plain orders; attrs' orders are those to be used."""
    heads, key_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
    packed = draw(st.booleans())
    size = 1 if packed else draw(st.integers(1, 2))
    queries, keys = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    extras = extras_for(draw, rng, (size, heads, queries, keys), packed)
    bound = st.sampled_from([None, -2, 0, 1])
    rate = draw(st.sampled_from([0.0, 0.4]))
    if rate:
        extras.update(key=np.array(7, np.uint32), offset=np.array(3, np.uint32))
    attrs = {
        "scale": draw(st.sampled_from([0.6, -1.1])),
        "band": (draw(bound), draw(bound)),
        "softcap": draw(st.sampled_from([0.0, 1.5])),
        "dropout": rate,
        "extras": tuple(n for n in EXTRAS if n in extras),
        "orders": tuple(draw(st.sampled_from(ORDERS)) for _ in range(4)),
    }
    q = rng.standard_normal((size, heads, queries, 3))
    k, v = (rng.standard_normal((size, key_heads, keys, n)) for n in (3, 2))
    return q, k, v, extras, attrs


def built(problem):
    """The attention Node, its inputs and their values."""
    q, k, v, extras, attrs = problem
    values = [laid(x, o) for x, o in zip((q, k, v), attrs["orders"])]
    values += [extras[n] for n in attrs["extras"]]
    nodes = [node_of(x) for x in values]
    return ops.attention(*nodes, **attrs), dict(zip(nodes, values))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(problems())
def test_what_it_decomposes_into_is_the_definition(problem) -> None:
    node, values = built(problem)
    out, lse = by_loops(*problem)
    wanted = [laid(out, problem[4]["orders"][3]), lse]
    for found, expected in zip(evaluate(build.items(node), values), wanted):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(problems())
def test_backward_is_the_derivative(problem) -> None:
    """By central differences."""
    node, values = built(problem)
    outputs = build.items(node)
    nothing = build.equal(outputs[1], -math.inf)  # an lse of -inf has no slope
    outputs[1] = build.where(nothing, 0.0, outputs[1])
    rng = np.random.default_rng(5)
    seeds = {node_of(x): x for x in (rng.standard_normal(o.shape) for o in outputs)}
    wrt = [n for n in values if n.dtype is dtypes.float64]
    found = or_zeros(grad.gradients(outputs, list(seeds), wrt), wrt)
    slopes = interpret(found, {**values, **seeds})
    tangents = [np.where(np.isfinite(values[n]), rng.standard_normal(n.shape), 0.0) for n in wrt]
    ends = []
    for sign in (1e-6, -1e-6):
        moved = {n: values[n] + sign * t for n, t in zip(wrt, tangents)}
        ends.append(interpret(outputs, {**values, **moved}))
    change = [(a - b) / 2e-6 for a, b in zip(*ends)]
    assert inner(change, list(seeds.values())) == pytest.approx(
        inner(slopes, tangents), rel=1e-5, abs=1e-6
    )


def test_second_order_by_differences() -> None:
    """The gradient of the square of every gradient, with extras and dropout."""
    rng = np.random.default_rng(0)
    extras = {
        "bias": rng.standard_normal((1, 4, 1, 5)),
        "slopes": rng.standard_normal(4),
        "sinks": rng.standard_normal(4),
        "key": np.array(1, np.uint32),
        "offset": np.array(2, np.uint32),
    }
    attrs = {**PLAIN, "softcap": 2.0, "band": (-3, 1), "dropout": 0.3, "extras": tuple(extras)}
    shapes = ((2, 4, 3, 4), (2, 2, 5, 4), (2, 2, 5, 2))
    node, values = built((*(rng.standard_normal(s) for s in shapes), extras, attrs))
    wrt = [n for n in values if n.dtype is dtypes.float64]
    out, lse = build.items(node)
    total = build.add(build.sum_(build.multiply(out, out)), build.sum_(lse))
    first = grad.gradients([total], [build.like(total, 1.0)], wrt)
    assert len([n for n in topological(first) if n.op is ops.attention_backward]) == 1
    value = build.sum_(build.multiply(first[0], first[0]))
    for g in first[1:]:
        value = build.add(value, build.sum_(build.multiply(g, g)))
    second = grad.gradients([value], [build.like(value, 1.0)], wrt)
    slopes = evaluate(second, values)
    for n, slope in zip(wrt, slopes):
        tangent = rng.standard_normal(n.shape)
        ends = [
            interpret([value], {**values, n: values[n] + s * tangent})[0] for s in (1e-5, -1e-5)
        ]
        assert inner([slope], [tangent]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6)


def test_a_row_that_sees_nothing_has_gradients_of_0() -> None:
    rng = np.random.default_rng(0)
    bias = np.zeros((1, 1, 2, 3))
    bias[:, :, 1] = -np.inf
    attrs = {**PLAIN, "extras": ("bias",)}
    q, k, v = (rng.standard_normal((1, 2, t, 4)) for t in (2, 3, 3))
    node, values = built((q, k, v, {"bias": bias}, attrs))
    out, lse = build.items(node)
    seeds = {node_of(x): x for x in (np.ones(out.shape), np.full(lse.shape, np.inf))}
    seeds[list(seeds)[1]][..., 0] = 1.0  # what arrives at an lse of -inf may be anything
    found = grad.gradients([out, lse], list(seeds), list(values))
    second = grad.gradients(
        [build.sum_(g) for g in found],
        [build.constant(1.0, dtypes.float64) for _ in found],
        list(values),
    )
    for g in evaluate([*found, *(s for s in second if s is not None)], {**values, **seeds}):
        assert np.isfinite(g).all()
    assert not evaluate(found[:1], {**values, **seeds})[0][:, :, 1].any()


def test_dropout_is_the_dropout_of_everything_else() -> None:
    for rate in (0.1, 0.25, 0.5, 0.999):
        edge = dropout_threshold(rate)
        for bits in (edge, edge + 1):
            kept = np.float32(rate) < np.float32(bits) * np.float32(2.0**-24)
            assert kept == (bits > edge)


# ---- decomposition ----------------------------------------------------------------------------


def test_bytes_as_floats_are_multiplied_as_bfloat16() -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 2, 6, 4)) for _ in range(4))
    low = [x.astype(dtypes.float8_e4m3.numpy) for x in (q, k, v)]
    nodes = [node_of(x) for x in low]
    node = ops.attention(*nodes, **PLAIN)
    seed = node_of(dout.astype(dtypes.float8_e4m3.numpy))
    found = grad.gradients(build.items(node), [seed, None], nodes)
    (back,) = [n for n in topological(found) if n.op is ops.attention_backward]
    values = {**dict(zip(nodes, low)), seed: dout.astype(dtypes.float8_e4m3.numpy)}
    for whole in (node, back):
        wanted = evaluate(build.items(whole), values)
        for a, b in zip(evaluate(attention.decompose(whole), values), wanted):
            assert a.dtype == b.dtype
            a, b = a.astype(np.float64), b.astype(np.float64)
            np.testing.assert_allclose(a, b, atol=0.13 * np.abs(b).max())


@pytest.mark.parametrize("orders", [("bhtd",) * 4, ("bthd",) * 4])
def test_shared_heads_are_not_repeated(orders) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, h, 6, 4)) for h in (8, 2, 2))
    node, values = built((q, k, v, {}, {**PLAIN, "orders": orders}))
    loss = build.sum_(build.items(node)[0])
    back = grad.gradients([loss], [build.like(loss, 1.0)], list(values)[:3])
    (backward,) = [n for n in topological(back) if n.op is ops.attention_backward]
    for whole in (node, backward):
        dots = [n for n in topological(attention.decompose(whole)) if n.op is ops.dot]
        assert len(dots) == (2 if whole is node else 5)
        for dot in dots:
            assert 2 in dot.inputs[0].shape  # key heads are a batch axis
            for x in dot.inputs:
                assert x.op is not ops.expand and math.prod(x.shape) <= 8 * 6 * 6


def test_the_pass_says_why() -> None:
    x = argument("x", Array((1, 1, 4, 4), dtypes.float32))
    out, _ = attention.attention(x, x, x, {}, **USUAL)
    (result,), stages = run_pipeline([x], [out], None)
    (stage,) = [s for s in stages if s.name == "expand attention"]
    (reason,) = stage.fired
    assert reason.startswith("attention (") and len(reason) > len("attention ()")
    assert not any(n.op in (ops.attention, ops.stop_gradient) for n in topological([result]))


# ---- batches ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flagged", "folds"),
    [
        (("q",), True),
        (("q", "k", "v"), True),
        (("q", "bias"), True),
        (("q", "slopes"), False),
        (("q", "key"), False),
    ],
)
def test_a_batch_folds_into_b(flagged, folds) -> None:
    rng = np.random.default_rng(0)
    extras = {
        "bias": rng.standard_normal((1, 2, 1, 4)),
        "slopes": rng.standard_normal(2),
        "key": np.array(9, np.uint32),
        "offset": np.array(0, np.uint32),
    }
    attrs = {**PLAIN, "extras": tuple(extras), "dropout": 0.5, "orders": ("bthd",) * 4}
    shapes = ((2, 2, 3, 4), (2, 1, 4, 4), (2, 1, 4, 2))
    node, values = built((*(rng.standard_normal(s) for s in shapes), extras, attrs))
    names = dict(zip(("q", "k", "v", *extras), values))
    new = {}
    for name in flagged:
        x = values[names[name]]
        new[names[name]] = build.input_((3, *x.shape), dtypes.BY_NUMPY[x.dtype])
    found = batch.batched(build.items(node), new, 3)
    made = [n for n in topological([x for x, _ in found]) if n.op is ops.attention]
    assert [n.inputs[0].shape for n in made] == ([(6, 3, 2, 4)] if folds else [])
    stacked = {b: np.stack([values[n]] * 3) for n, b in new.items()}
    results = evaluate([x for x, _ in found], {**values, **stacked})
    alike = np.allclose(results[0][0], results[0][1])
    assert alike == ("key" in flagged)  # one key for all: every example draws bits of its own


# ---- text and types ---------------------------------------------------------------------------


def test_text() -> None:
    queries, keys = symbol("Q", 1, 64), symbol("K", 1, 64)
    q = argument("q", Array((2, queries, 4, 8), dtypes.bfloat16))
    k = argument("k", Array((2, 2, keys, 8), dtypes.bfloat16))
    more = {
        "sinks": argument("sinks", Array((4,), dtypes.float32)),
        "bias": argument("bias", Array((1, 4, queries, 1), dtypes.float32)),
    }
    band = (None, combine(keys, queries, -1))
    out, lse = attention.attention(
        q,
        k,
        k,
        more,
        scale=0.125,
        band=band,
        softcap=30.0,
        dropout=0.0,
        orders=("bthd", "bhtd", "bhtd", "bthd"),
    )
    assert out.type == Array((2, queries, 4, 8), dtypes.bfloat16)
    assert lse.type == Array((2, 4, queries), dtypes.float32)
    assert lse.inputs[0].attrs["extras"] == ("bias", "sinks")  # in the order of the table
    total = build.sum_(build.cast(out, dtypes.float32))
    wrt = [q, k, more["bias"], more["sinks"]]
    results = (out, lse, *grad.gradients([total], [build.like(total, 1.0)], wrt))
    assert [r.type for r in results[2:]] == [x.type for x in wrt]
    block = pure_block("main", (q, k, *more.values()), results)
    text = print_block(block, "graph")
    again = parse_block(text)
    assert print_block(again, "graph") == text
    assert 'wanted=("bias", "sinks")' in text


def test_wanted_gradients_are_only_those_asked_for() -> None:
    rng = np.random.default_rng(0)
    extras = {n: rng.standard_normal((1, 1, 1, 3) if n == "bias" else 2) for n in WANTED}
    q, k, v = (rng.standard_normal((1, 2, 3, 4)) for _ in range(3))
    node, values = built((q, k, v, extras, {**PLAIN, "extras": tuple(extras)}))
    names = dict(zip(("q", "k", "v", *extras), values))
    loss = build.sum_(build.items(node)[0])
    found = grad.gradients([loss], [build.like(loss, 1.0)], [names["sinks"]])
    (back,) = [n for n in topological(found) if n.op is ops.attention_backward]
    assert back.attrs["wanted"] == ("sinks",)


WRONG = [
    ({"orders": ("bhdt",) * 4}, "not a layout"),
    ({"band": (0.5, None)}, "band is"),
    ({"dropout": 0.5}, "belong to dropout"),
    ({"softcap": -1.0}, "softcap"),
    ({"extras": ("bias",)}, "do not name"),
    ({"orders": ("bthd", "bhtd", "bhtd", "bhtd")}, "heads do not divide"),
]


@pytest.mark.parametrize(("change", "text"), WRONG, ids=[w[1] for w in WRONG])
def test_wrong_attrs(change, text) -> None:
    q, k = (build.input_((1, 2, t, 4), dtypes.float32) for t in (3, 5))
    with pytest.raises(TilegradError, match=text):
        ops.attention(q, k, k, **{**PLAIN, **change})


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("bias", (2, 2, 3, 5), dtypes.float32),
        ("mask", (1, 1, 3, 5), dtypes.float32),
        ("slopes", (3,), dtypes.float32),
        ("key_lengths", (1,), dtypes.int64),
        ("bias", (3, 5), dtypes.float32),
        ("query_starts", (2,), dtypes.int32),
    ],
)
def test_wrong_extras(name, shape, dtype) -> None:
    q, k = (build.input_((1, 2, t, 4), dtypes.float32) for t in (3, 5))
    with pytest.raises(TilegradError, match=name):
        attention.attention(q, k, k, {name: build.input_(shape, dtype)}, **USUAL)
