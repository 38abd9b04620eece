"""kernels/attention/forward.py: every option against float64; checked, broken, simulated, built.

The interpreter runs roles in a random order; the static check finds no fault in any Body. Emitted
PTX runs on the simulator at small sizes, and what is chosen for real sizes is assembled: no spill,
no stack frame, no serialised wgmma.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sampled import sampled

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))

import mutants
from assembled import assemble_all
from simulator import simulate

from tilegrad.core.dtype import bfloat16, dtype_of, float16, float32
from tilegrad.core.errors import InternalError
from tilegrad.core.target import H200
from tilegrad.graph.interpret import philox
from tilegrad.ir.symbol import symbol
from tilegrad.ir.types import Memory
from tilegrad.kernels.attention.forward import wide_attention
from tilegrad.kernels.attention.outside import outside
from tilegrad.kernels.attention.plan import AttentionPlan, choose, plans, why_not
from tilegrad.kernels.attention.shape import STARTS, AttentionShape
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret
from tilegrad.tile.build import Body
from tilegrad.tile.check import Finding, verify_body
from tilegrad.tile.prove import check_body

Array = np.ndarray
STEP = {bfloat16: 2.0**-8, float16: 2.0**-11}
CAUSAL = (None, 0)


def shape(**given: Any) -> AttentionShape:
    """A small attention."""
    base: dict[str, Any] = {
        "batch": 1,
        "heads": 2,
        "key_heads": 2,
        "queries": 128,
        "keys": 128,
        "width": 64,
        "value_width": 64,
        "dtype": bfloat16,
        "scale": 0.125,
    }
    return AttentionShape(**{**base, **given})


def reference(x: AttentionShape, inputs: list[Array]) -> tuple[Array, Array]:
    """Results and log-sum-exps in float64."""
    q, k, v = (
        a.astype(np.float64).transpose([order.index(c) for c in "bhtd"])
        for a, order in zip(inputs[:3], x.orders)
    )
    given = dict(zip(x.extras, inputs[3:]))
    k, v = (np.repeat(a, x.group, 1) for a in (k, v))
    s = x.scale * np.einsum("bhid,bhjd->bhij", q, k)
    i, j = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None]
    if x.softcap:
        s = x.softcap * np.tanh(s / x.softcap)
    if "bias" in given:
        s = s + given["bias"].astype(np.float64)
    if "slopes" in given:
        s = s + given["slopes"].astype(np.float64)[None, :, None, None] * (j - i)
    seen = np.broadcast_to(np.full(i.shape, True) & np.full(j.shape, True), s.shape)
    for side, below in zip(x.band, (True, False)):
        if side is not None:
            seen = seen & ((j - i >= side) if below else (j - i <= side))
    if "mask" in given:
        seen = seen & given["mask"]
    if "key_lengths" in given:
        seen = seen & (j < given["key_lengths"][:, None, None, None])
    s = np.where(seen, s, -math.inf)
    top = s.max(-1, keepdims=True)
    sinks = None
    if "sinks" in given:
        sinks = given["sinks"].astype(np.float64)[None, :, None, None]
        top = np.maximum(top, sinks)
    top = np.where(np.isinf(top), 0.0, top)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True) + (0.0 if sinks is None else np.exp(sinks - top))
    whole = np.where(total > 0, total, 1.0)
    out = np.einsum("bhij,bhjd->bhid", p / whole, v)
    lse = np.where(total > 0, top + np.log(whole), -math.inf)[..., 0]
    return out.transpose(["bhtd".index(c) for c in x.orders[3]]), lse


def numbers(x: AttentionShape, more: tuple[Array, ...], seed: int = 0) -> list[Array]:
    """Inputs, and results that are not yet written."""
    draw = np.random.default_rng(seed)
    given = [
        draw.standard_normal(x.sizes(n)).astype(np.float32).astype(x.dtype.numpy)
        for n in ("q", "k", "v")
    ]
    out = np.full(x.sizes("out"), np.nan, np.float32).astype(x.dtype.numpy)
    return [*given, *more, out, np.full(x.sizes("lse"), np.nan, np.float32)]


def attention(x: AttentionShape, plan: AttentionPlan, more: tuple[Array, ...] = ()) -> Body:
    """The kernel for extras of these types."""
    return wide_attention(x, plan, more=[Memory(m.shape, dtype_of(m.dtype)) for m in more])


def agree(x: AttentionShape, memories: list[Array]) -> None:
    """Up to the rounding of weights and results."""
    out, lse = reference(x, memories[:-2])
    found = memories[-2].astype(np.float64)
    limit = 4 * STEP[x.dtype] * max(1.0, float(np.abs(memories[2].astype(np.float64)).max()))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, out, rtol=4 * STEP[x.dtype], atol=limit / 2)
    np.testing.assert_allclose(memories[-1], lse, rtol=1e-5, atol=2e-5)


def errors(body: Body) -> list[Finding]:
    """Findings of level 'error'."""
    return [f for f in check_body(body, H200) if f.severity == "error"]


def drawn(*sizes: int, seed: int = 3) -> Array:
    """Random float32."""
    return np.random.default_rng(seed).standard_normal(sizes).astype(np.float32)


SMALL = AttentionPlan((128, 64), programs=2)
TURNED = ("bthd", "bthd", "bthd", "bthd")
HOLES = drawn(2, 1, 100, 72) > 0.5
HOLES[1, 0, 10:20] = False  # rows that see nothing
MINUS = np.where(drawn(1, 2, 100, 72, seed=4) > 0.3, drawn(1, 2, 100, 72), -np.inf)
Case = tuple[AttentionShape, AttentionPlan, tuple[Array, ...]]
CASES: dict[str, Case] = {
    "full": (shape(), SMALL, ()),
    "full, no end": (shape(keys=192), replace(SMALL, query_stages=2), ()),
    "causal": (shape(queries=200, keys=200, band=CAUSAL), replace(SMALL, section=2), ()),
    "causal, three consumers": (shape(queries=400, keys=400, band=CAUSAL),
                                replace(SMALL, tile=(192, 128), section=1), ()),
    "one consumer": (shape(queries=130, keys=100), replace(SMALL, tile=(64, 32)), ()),
    "three stages": (shape(queries=130, keys=300), replace(SMALL, stages=3), ()),
    "chained": (shape(queries=300, keys=300, band=CAUSAL),
                replace(SMALL, query_stages=2, chained=True, section=2), ()),
    "chained, programs without tiles": (
        shape(queries=40), replace(SMALL, query_stages=2, chained=True, programs=4), ()),
    "chained, through the queries": (
        shape(queries=100, keys=100),
        replace(SMALL, query_stages=2, chained=True, staged=0, programs=1), ()),
    "narrow": (shape(queries=300, keys=300, band=CAUSAL),
               replace(SMALL, tile=(128, 128), narrow=True, section=2), ()),
    "narrow, chained, bottom right": (
        shape(queries=200, keys=400, band=(None, 128), softcap=5.0),
        replace(SMALL, tile=(128, 128), narrow=True, query_stages=2, chained=True), ()),
    "narrow, three consumers": (shape(heads=1, key_heads=1, queries=500, keys=500, band=CAUSAL),
                                replace(SMALL, tile=(192, 128), narrow=True), ()),
    "narrow, window": (shape(heads=1, key_heads=1, queries=400, keys=400, band=(-150, 0)),
                       replace(SMALL, tile=(192, 64), narrow=True), ()),
    "narrow where all is seen": (shape(queries=150, keys=300), replace(SMALL, narrow=True), ()),
    "late": (shape(queries=300, keys=300, band=CAUSAL),
             replace(SMALL, late=True, query_stages=2, chained=True), ()),
    "bottom right": (shape(queries=72, keys=200, band=(None, 128)), SMALL, ()),
    "rows that see nothing": (shape(queries=200, keys=72, band=(None, -100)), SMALL, ()),
    "window": (shape(queries=300, keys=300, band=(-70, 0)), replace(SMALL, section=2), ()),
    "window on both sides": (shape(queries=200, keys=333, band=(-40, 61)), SMALL, ()),
    "band beyond the keys": (shape(queries=100, keys=64, band=(80, 90)), SMALL, ()),
    "only a lower side": (shape(queries=150, keys=200, band=(-30, None)), SMALL, ()),
    "width 128": (shape(heads=1, key_heads=1, width=128, value_width=128, keys=200),
                  AttentionPlan((128, 80), programs=1, staged=128), ()),
    "width 256, through the queries": (
        shape(heads=3, key_heads=3, width=256, value_width=256, queries=64),
        AttentionPlan((64, 64), programs=2, staged=0), ()),
    "width 40, values 72": (shape(width=40, value_width=72), replace(SMALL, staged=16), ()),
    "width 96": (shape(width=96, value_width=96), replace(SMALL, staged=96), ()),
    "values 128": (shape(value_width=128, queries=70), SMALL, ()),
    "one query and key": (shape(queries=1, keys=1, heads=5, key_heads=1), SMALL, ()),
    "groups": (shape(batch=2, heads=6, key_heads=2, queries=70, keys=90), SMALL, ()),
    "one key head": (shape(heads=3, key_heads=1, band=CAUSAL), replace(SMALL, section=3), ()),
    "float16": (shape(dtype=float16, queries=90, keys=150, band=CAUSAL), SMALL, ()),
    "tokens before heads": (shape(batch=2, heads=4, key_heads=2, queries=90, orders=TURNED),
                            replace(SMALL, section=3), ()),
    "mixed orders": (shape(batch=2, queries=90, orders=("bthd", "bhtd", "bthd", "bhtd")), SMALL,
                     ()),
    "next launch late": (shape(), replace(SMALL, early=False), ()),
    "more programs than tiles": (shape(queries=40), replace(SMALL, programs=7), ()),
    "soft limit": (shape(softcap=2.0, scale=1.0, band=CAUSAL), SMALL, ()),
    "bias": (shape(queries=100, keys=72, extras=("bias",)), SMALL, (drawn(1, 2, 100, 72),)),
    "bias of a row, 16 bits": (shape(batch=2, queries=100, extras=("bias",)), SMALL,
                               (drawn(2, 1, 1, 128).astype(bfloat16.numpy),)),
    "bias of a column": (shape(queries=100, extras=("bias",)), SMALL, (drawn(1, 1, 100, 1),)),
    "bias of -inf": (shape(queries=100, keys=72, extras=("bias",)), SMALL,
                     (MINUS.astype(np.float32),)),
    "soft limit and bias": (shape(queries=100, keys=72, softcap=3.0, extras=("bias",)), SMALL,
                            (drawn(1, 2, 100, 72),)),
    "mask": (shape(batch=2, queries=100, keys=72, extras=("mask",)), SMALL, (HOLES,)),
    "mask, whole blocks": (shape(batch=2, queries=100, keys=64, extras=("mask",)),
                           replace(SMALL, tile=(128, 32)), (HOLES[..., :64].copy(),)),
    "slopes": (shape(queries=100, keys=150, band=CAUSAL, extras=("slopes",)), SMALL,
               (np.asarray([0.25, 0.0625], np.float32),)),
    "sinks": (shape(queries=100, keys=150, band=(None, -20), extras=("sinks",)), SMALL,
              (np.asarray([30.0, -3.0], np.float32),)),
    "lengths": (shape(batch=4, heads=1, key_heads=1, queries=70, keys=150,
                      extras=("key_lengths",)), SMALL, (np.asarray([0, 1, 64, 150], np.int32),)),
    "lengths, causal": (shape(batch=3, heads=1, key_heads=1, queries=150, keys=150, band=CAUSAL,
                              extras=("key_lengths",)), SMALL,
                        (np.asarray([0, 7, 149], np.int32),)),
    "large scores": (shape(scale=40.0, band=CAUSAL), SMALL, ()),
}  # fmt: skip


# Options alone, which other cases have beside more.
ALONE = {
    *("three stages", "narrow", "narrow, three consumers", "narrow, window", "window"),
    *("bottom right", "soft limit", "bias", "lengths", "mixed orders", "width 96"),
}
assert set(CASES) >= ALONE


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sampled(CASES, lambda name: name not in ALONE))
def test_interpreted(name: str) -> None:
    """The numbers are right in a random order of events, and the check finds no fault."""
    x, plan, more = CASES[name]
    body = attention(x, plan, more)
    verify_body(body, "placed", H200)
    assert not errors(body)
    memories = numbers(x, more)
    interpret.run(body, memories, seed=list(CASES).index(name))
    agree(x, memories)


PACKED: dict[str, tuple[AttentionShape, AttentionPlan, list[int], list[int]]] = {
    "causal": (
        shape(queries=300, keys=300, band=CAUSAL),
        SMALL,
        [0, 1, 129, 130, 130, 300],
        [0, 1, 129, 130, 130, 300],
    ),
    "full, groups, no keys": (
        shape(queries=300, keys=400, heads=3, key_heads=1),
        SMALL,
        [0, 100, 228, 300],
        [0, 0, 200, 400],
    ),
    "window, whole tiles": (
        shape(queries=300, keys=300, band=(-50, 0)),
        SMALL,
        [0, 256, 300],
        [0, 256, 300],
    ),
    "one sequence, padded width": (
        shape(queries=150, keys=140, value_width=72, band=CAUSAL),
        replace(SMALL, staged=16, query_stages=2),
        [0, 150],
        [0, 140],
    ),
}


def packed_memories(x: AttentionShape, starts: list[list[int]]) -> list[Array]:
    """Inputs and results of sequences that lie one after another."""
    lines = tuple(np.asarray(s, np.int32) for s in starts)
    return numbers(replace(x, extras=("query_starts", "key_starts")), lines)


def agree_packed(x: AttentionShape, memories: list[Array]) -> None:
    """Every sequence alone."""
    q, k, v, starts, key_starts, out, lse = memories
    for a, b, c, d in zip(starts, starts[1:], key_starts, key_starts[1:]):
        if c == d:
            assert (out[:, :, a:b] == 0).all() and (lse[:, :, a:b] == -math.inf).all()
        elif a != b:
            here = [q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], out[:, :, a:b], lse[:, :, a:b]]
            agree(replace(x, queries=int(b - a), keys=int(d - c)), here)


@pytest.mark.parametrize("name, simulated", [*((n, False) for n in PACKED), ("causal", True)])
def test_packed(name: str, simulated: bool) -> None:
    """Sequences that lie one after another; nothing is written beyond their ends."""
    x, plan, *starts = PACKED[name]
    memories = packed_memories(x, starts)
    body = attention(replace(x, extras=("query_starts", "key_starts")), plan, (*memories[3:5],))
    assert not errors(body)
    if simulated:
        simulate(*emit(body, "attention", H200), memories)
    else:
        interpret.run(body, memories, seed=1)
    agree_packed(x, memories)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("simulated", [False, True])
def test_tokens_of_no_sequence(sinks: bool, simulated: bool) -> None:
    """Zeros, and log-sum-exps of -inf or of a sink; the tokens of sequences are left alone."""
    extras = ("sinks", *STARTS) if sinks else STARTS
    x = shape(heads=4, key_heads=2, queries=150, keys=140, value_width=72, extras=extras)
    draw, of = (
        np.random.default_rng(3),
        {"query_starts": [2, 9, 9, 147], "key_starts": [1, 90, 140]},
    )
    arrays: dict[str, Array] = {n: np.array(s, np.int32) for n, s in of.items()}
    arrays["sinks"] = draw.standard_normal(4).astype(np.float32)
    more = [Memory(arrays[n].shape, dtype_of(arrays[n].dtype)) for n in extras]
    for results in (("out", "lse"), ("dq",), ("dk", "dv")):
        body = outside(x, more, results, "outside")
        assert not errors(body)
        for name in results:
            dtype = np.float32 if name == "lse" else x.dtype.numpy
            arrays[name] = np.full(x.sizes(name), np.nan, np.float32).astype(dtype)
        memories = [arrays[p.attrs["name"]] for p in body.parameters]
        if simulated:
            simulate(*emit(body, "outside", H200), memories)
        else:
            interpret.run(body, memories)
        starts = of["key_starts" if "dk" in results else "query_starts"]
        for name in results:
            inside, found = slice(starts[0], starts[-1]), arrays[name][0].astype(np.float32)
            assert np.isnan(found[:, inside]).all()
            want = np.where(sinks, arrays["sinks"][:, None], -np.inf) if name == "lse" else 0
            rest = np.delete(found, inside, 1)
            assert rest.size and np.allclose(rest, want, rtol=1e-6)


@pytest.mark.parametrize("queries, keys", [(64, 160), (64, 256), (100, 256)])
def test_small_packed_sizes_are_proved(queries: int, keys: int) -> None:
    """Starts from memory keep within what the arithmetic of stages was simplified for."""
    x = shape(
        heads=8, key_heads=2, queries=queries, keys=keys, extras=("query_starts", "key_starts")
    )
    lines = (np.zeros(3, np.int32),) * 2
    assert not errors(attention(x, AttentionPlan((128, 128), 2, 132), lines))


@pytest.mark.parametrize("causal, simulated", [(False, False), (True, False), (True, True)])
def test_dropout(causal: bool, simulated: bool) -> None:
    """What is dropped is what the Graph's random bits say; log-sum-exps know nothing of it."""
    tokens = (70, 100) if simulated else (150, 200)
    x = shape(
        heads=1,
        key_heads=1,
        queries=tokens[0],
        keys=tokens[1],
        dropout=0.3,
        band=CAUSAL if causal else (None, None),
        extras=("key", "offset"),
    )
    more = (np.asarray(12345, np.uint32), np.asarray(77, np.uint32))
    body = attention(x, replace(SMALL, programs=1), more)
    assert not errors(body)
    memories = numbers(x, more)
    if simulated:
        simulate(*emit(body, "attention", H200), memories)
    else:
        interpret.run(body, memories, seed=1)
    count = tokens[0] * tokens[1]
    bits = philox(np.arange(count, dtype=np.uint64), np.full(count, 77, np.uint64), 12345)
    kept = (bits >> 8 > int(np.float32(0.3) * (1 << 24))).reshape(tokens)
    q, k, v = (m[0, 0].astype(np.float64) for m in memories[:3])
    s = x.scale * q @ k.T
    s = np.where(np.tril(np.full(tokens, True)), s, -np.inf) if causal else s
    p = np.exp(s - s.max(1, keepdims=True))
    lse = np.log(p.sum(1)) + s.max(1)
    out = (p / p.sum(1, keepdims=True) * kept / 0.7) @ v
    np.testing.assert_allclose(memories[-2][0, 0].astype(np.float64), out, atol=0.04)
    np.testing.assert_allclose(memories[-1][0, 0], lse, atol=1e-5)


def test_symbols() -> None:
    """Batch and tokens that are known at the launch."""
    batch, tokens = symbol("batch", 1, 8), symbol("tokens", 1, 512)
    x = shape(batch=batch, queries=tokens, keys=tokens, band=CAUSAL)
    body = wide_attention(x, replace(SMALL, section=4))
    assert not errors(body)
    for b, t in ((1, 1), (3, 130)):
        known = replace(x, batch=b, queries=t, keys=t)
        memories = numbers(known, ())
        interpret.run(body, memories, symbols={"batch": b, "tokens": t}, seed=t)
        agree(known, memories)


@pytest.mark.parametrize(
    "given, plan, why",
    [
        ({"dtype": float32}, None, "float32"),
        ({"width": 260}, None, "256"),
        ({"scale": -1.0}, None, "scale"),
        ({"extras": ("bias", "query_starts", "key_starts")}, None, "one after another"),
        ({"keys": 0}, None, "no keys"),
        ({}, AttentionPlan((128, 64), chained=True), "chain"),
        ({}, AttentionPlan((256, 64)), "consumers"),
        ({}, AttentionPlan((128, 40)), "sixteens"),
        ({}, AttentionPlan((128, 64), stages=1), "two stages"),
        ({}, AttentionPlan((128, 64), staged=48), "pieces"),
        ({"value_width": 128}, AttentionPlan((128, 64), staged=0), "wider"),
        ({}, AttentionPlan((128, 256), stages=4), "shared memory"),
    ],
)
def test_refused(given: dict[str, Any], plan: AttentionPlan | None, why: str) -> None:
    """What no Body can be right for is refused, with a reason."""
    x = shape(**given)
    assert why in why_not(x, plan)
    with pytest.raises(InternalError):
        wide_attention(x, plan or SMALL)


HARMLESS = (
    "matrix_fence",  # another one stands before or after it
    "wait after expect",  # the stage is free long before
    "wait 16",
    "wait 17",
    "wait 18",
    "wait 19",  # the consumer before waits before its turn ends
    "named_arrive 2 number + 1",  # the second consumer begins
    "named_sync 2 number + 1",
    "named_sync 5 number + 1",  # a number that nobody else uses
)


def test_broken_bodies_are_found() -> None:
    """Bodies with one fault in their barriers, copies or groups fail the check."""
    x = shape(heads=1, key_heads=1, queries=640, keys=640, band=CAUSAL)
    body = attention(x, replace(SMALL, programs=1))
    broken = list(mutants.mutants(body))[::7]
    survive = [label for label, changed in broken if not errors(changed)]
    assert len(broken) > 40 and all(label.startswith(HARMLESS) for label in survive), survive


SIMULATED = (
    "bottom right",
    "window",
    "late",
    "narrow",
    "chained",
    "lengths",
    "width 128",
    "width 96",
    "float16",
    "mask",
    "three stages",
    "one consumer",
    "sinks",
    "width 256, through the queries",
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SIMULATED)
def test_simulated(name: str) -> None:
    """The emitted PTX computes the same."""
    x, plan, more = CASES[name]
    x = replace(x, heads=x.group, key_heads=1) if not more else x
    text, entry = emit(attention(x, replace(plan, programs=1), more), "attention", H200)
    memories = numbers(x, more)
    simulate(text, entry, memories)
    agree(x, memories)


def real(width: int, tokens: int, causal: bool) -> AttentionShape:
    """A case of the table of peers."""
    heads = 2048 // width
    return shape(
        batch=16384 // tokens,
        heads=heads,
        key_heads=heads,
        queries=tokens,
        keys=tokens,
        width=width,
        value_width=width,
        scale=width**-0.5,
        band=CAUSAL if causal else (None, None),
    )


REAL = [
    (64, 512, True),
    (64, 16384, False),
    (128, 2048, True),
    (128, 8192, False),
    (256, 8192, True),
]


def test_real_plans_are_proved() -> None:
    """What is chosen for real sizes passes the check."""
    for case in REAL:
        assert not errors(wide_attention(real(*case), choose(real(*case), H200))), case


@pytest.mark.skipif(find_ptxas() is None, reason="no ptxas")
def test_assembled() -> None:
    """What is chosen for real sizes neither spills nor stalls."""
    texts = {
        str(case): emit(wide_attention(real(*case), choose(real(*case), H200)), "attention", H200)[
            0
        ]
        for case in REAL
    }
    for name, made in assemble_all(texts).items():
        made.check_library(name)


def test_plans_can_be_built() -> None:
    """Every Plan is one that is taken, and the chosen one has the tile of one of them."""
    for case in REAL:
        x = real(*case)
        found = list(plans(x, H200))
        assert choose(x, H200).tile in {p.tile for p in found} and len(found) == len(set(found)) > 1
        assert not any(why_not(x, plan) for plan in [*found, choose(x, H200)])


def test_weights_stay_in_their_registers() -> None:
    """Two weights a register from the conversion to the product: nothing packs them again."""
    text, _ = emit(attention(*CASES["full"][:2]), "attention", H200)
    assert "cvt.rn.bf16x2.f32" in text and "ex2.approx.ftz.f32" in text
    assert not any("mov.b32 %r" in line and ", {" in line for line in text.splitlines())


def test_registers_of_three_consumers_grow() -> None:
    """Four warpgroups begin with 128 registers a thread: 160 are more."""
    text, _ = emit(attention(*CASES["causal, three consumers"][:2]), "attention", H200)
    assert text.count("setmaxnreg.inc.sync.aligned.u32 160") == 3
    assert text.count("setmaxnreg.dec.sync.aligned.u32 32") == 1


def test_softmax_cannot_slip_behind_the_wait() -> None:
    """ptxas moves arithmetic past a wait for products within a basic block, and then nothing
    overlaps: a loop that waits stands between the exponentials and the wait."""
    text, _ = emit(attention(*CASES["full, no end"][:2]), "attention", H200)
    lines = text.splitlines()
    ends = [n for n, line in enumerate(lines) if "wgmma.wait_group.sync.aligned 0" in line]
    loops = 0
    for end in ends:
        back = next(
            n for n in range(end, -1, -1) if "ex2.approx" in lines[n] or "mma_async" in lines[n]
        )
        if "ex2.approx" in lines[back]:
            loops += 1
            assert any("bra $wait" in line for line in lines[back:end])
    assert loops == 2  # one in each consumer
