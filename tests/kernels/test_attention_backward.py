"""kernels/attention/backward.py: every option against float64, checked, simulated and assembled.

The interpreter runs roles in a random order; the static check finds no fault in any Body; the
emitted PTX runs on the simulator at small sizes, and what is chosen for real sizes is assembled:
no spill, no stack frame, no serialised wgmma. The float64 formula is itself held against finite
differences.
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

from tilegrad.core.dtype import bfloat16, bool_, float16, float32, int32, uint32
from tilegrad.core.errors import InternalError
from tilegrad.core.target import H200
from tilegrad.graph.attention_types import dropout_threshold
from tilegrad.graph.interpret import philox
from tilegrad.ir.symbol import combine, evaluate, symbol
from tilegrad.ir.types import Memory
from tilegrad.kernels.attention.backward import attention_backward
from tilegrad.kernels.attention.plan import BackwardPlan
from tilegrad.kernels.attention.plan import backward_why_not as why_not
from tilegrad.kernels.attention.plan import choose_backward as choose
from tilegrad.kernels.attention.shape import AttentionShape
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret
from tilegrad.tile.build import Body
from tilegrad.tile.check import verify_body
from tilegrad.tile.prove import check_body

ROUNDING = {bfloat16: 8e-3, float16: 2e-3}  # of the largest gradient
Arrays = dict[str, np.ndarray]


def shape(
    heads: int,
    key_heads: int,
    queries: int,
    keys: int,
    width: int,
    value_width: int = 0,
    batch: int = 1,
    **more: Any,
) -> AttentionShape:
    """A shape of bfloat16 with the usual scale."""
    more = {"dtype": bfloat16, "scale": 1 / math.sqrt(width), **more}
    return AttentionShape(
        batch, heads, key_heads, queries, keys, width, value_width or width, **more
    )


def ordered(a: np.ndarray, order: str) -> np.ndarray:
    """What lies (b, h, t, d) in another order."""
    return np.ascontiguousarray(np.transpose(a, ["bhtd".index(c) for c in order]))


def plain(a: np.ndarray, order: str) -> np.ndarray:
    """What lies in an order as (b, h, t, d), in float64."""
    return np.transpose(a, [order.index(c) for c in "bhtd"]).astype(np.float64)


EXTRAS: dict[str, Any] = {
    "sinks": float32,
    "bias": bfloat16,
    "mask": bool_,
    "slopes": float32,
    "key_lengths": int32,
    "query_starts": int32,
    "key_starts": int32,
    "key": uint32,
    "offset": uint32,
}
STARTS = {"query_starts": [0, 70, 70, 75, 205, 230], "key_starts": [0, 40, 60, 190, 190, 230]}


def extras_of(x: AttentionShape, draw: Any, wide: dict[str, tuple[int, int]]) -> Arrays:
    """Further inputs; `wide` says which of batch and heads, queries and keys a bias or mask has."""
    made: Arrays = {}
    for name in x.extras:
        if name in ("bias", "mask"):
            lead, tail = wide.get(name, (1, 3))
            sizes = (x.batch, x.heads, x.queries, x.keys)
            sizes = tuple(
                n if (lead if i < 2 else tail) >> i % 2 & 1 else 1 for i, n in enumerate(sizes)
            )
            made[name] = draw.standard_normal(sizes) if name == "bias" else draw.random(sizes) < 0.7
        elif name in STARTS:
            made[name] = np.array(STARTS[name])
        elif name in ("key", "offset"):
            made[name] = draw.integers(0, 1 << 32, ())
        elif name == "key_lengths":
            made[name] = draw.integers(0, x.keys + 1, x.batch)
        else:
            made[name] = draw.standard_normal(x.heads)
        made[name] = np.asarray(made[name]).astype(EXTRAS[name].numpy)
    return made


def forward(x: AttentionShape, q: Any, k: Any, v: Any, more: Arrays) -> tuple[Any, Any, Any, Any]:
    """Probabilities, result, log-sum-exps and the slope of the soft limit in float64."""
    scores = x.scale * np.einsum("bhid,bhjd->bhij", q, np.repeat(k, x.group, 1))
    slope = 1.0
    if x.softcap:
        inner = np.tanh(scores / x.softcap)
        scores, slope = x.softcap * inner, 1 - inner**2
    places, alike = [np.arange(x.queries), np.arange(x.keys)], np.ones(1, np.bool_)
    if "query_starts" in more:
        starts = [more[n] for n in STARTS]
        of = [np.searchsorted(s, p, "right") - 1 for s, p in zip(starts, places)]
        alike = of[0][:, None] == of[1]
        places = [p - s[o] for p, s, o in zip(places, starts, of)]
    apart = places[1][None] - places[0][:, None]
    low, high = x.band
    seen = (
        alike
        & (apart >= (-math.inf if low is None else low))
        & (apart <= (math.inf if high is None else high))
    )
    scores = scores + more.get("bias", np.zeros(1)).astype(np.float64)
    scores = scores + more.get("slopes", np.zeros(1)).astype(np.float64)[:, None, None] * apart
    seen = seen & more.get("mask", np.ones(1, np.bool_))
    if "key_lengths" in more:
        seen = seen & (np.arange(x.keys) < more["key_lengths"][:, None, None, None])
    scores = np.where(seen, scores, -np.inf)
    sinks = np.full((x.batch, x.heads, x.queries, 1), -np.inf)
    if "sinks" in more:
        sinks[:] = more["sinks"].astype(np.float64)[:, None, None]
    whole = np.concatenate([scores, sinks], -1)
    most = np.nan_to_num(whole.max(-1, keepdims=True), neginf=0.0)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(whole - most).sum(-1, keepdims=True)) + most
    p = np.exp(scores - np.where(np.isfinite(lse), lse, 0.0))
    out = np.einsum("bhij,bhjd->bhid", p * kept(x, more), np.repeat(v, x.group, 1))
    return p, out, lse[..., 0], slope


def kept(x: AttentionShape, more: Arrays) -> Any:
    """What dropout multiplies probabilities by."""
    if not x.dropout:
        return 1.0
    shape_ = (x.batch, x.heads, x.queries, x.keys)
    index = np.arange(math.prod(shape_), dtype=np.uint64)
    high = np.uint64(more["offset"]) ^ (index >> np.uint64(32))
    bits = philox(index & np.uint64(0xFFFFFFFF), high, int(more["key"])).reshape(shape_)
    return ((bits >> np.uint32(8)) > dropout_threshold(x.dropout)) / (1 - x.dropout)


def backward(x: AttentionShape, q: Any, k: Any, v: Any, dout: Any, more: Arrays) -> Arrays:
    """delta, lse and the gradients in float64."""
    p, out, lse, slope = forward(x, q, k, v, more)
    wide_k, wide_v = (np.repeat(a, x.group, 1) for a in (k, v))
    delta, keep = (dout * out).sum(-1), kept(x, more)
    back = np.einsum("bhid,bhjd->bhij", dout, wide_v) * keep
    ds = p * (back - delta[..., None]) * x.scale * slope
    dk, dv = np.einsum("bhij,bhid->bhjd", ds, q), np.einsum("bhij,bhid->bhjd", p * keep, dout)

    def grouped(a: np.ndarray) -> np.ndarray:
        return a.reshape(a.shape[0], x.key_heads, x.group, *a.shape[2:]).sum(2)

    return {
        "lse": lse,
        "delta": delta,
        "dq": np.einsum("bhij,bhjd->bhid", ds, wide_k),
        "dk": grouped(dk),
        "dv": grouped(dv),
    }


def numbers(x: AttentionShape, seed: int = 0, **wide: tuple[int, int]) -> tuple[Arrays, Arrays]:
    """Memories by name, gradients unwritten, and the gradients in float64."""
    draw, of = np.random.default_rng(seed), x.dtype.numpy
    sizes = {
        "q": (x.heads, x.queries, x.width),
        "k": (x.key_heads, x.keys, x.width),
        "v": (x.key_heads, x.keys, x.value_width),
        "dout": (x.heads, x.queries, x.value_width),
    }
    given = {n: draw.standard_normal((x.batch, *s)).astype(of) for n, s in sizes.items()}
    more = extras_of(x, draw, wide)
    wanted = backward(x, *[a.astype(np.float64) for a in given.values()], more)
    orders = dict(zip(given, x.orders))
    memories = {n: ordered(a, orders[n]) for n, a in given.items()} | more
    memories |= {n: wanted.pop(n).astype(np.float32) for n in ("lse", "delta")}
    for name in wanted:
        shape_ = ordered(wanted[name], orders[name[1:]]).shape
        memories[name] = np.full(shape_, np.nan, np.float32).astype(of)
    return memories, wanted


def agree(x: AttentionShape, memories: Arrays, wanted: Arrays) -> None:
    """Gradients up to the rounding of p, ds and results."""
    for name, value in wanted.items():
        found = plain(memories[name], x.orders["qkv".index(name[1:])])
        bound = ROUNDING[x.dtype] * max(np.abs(value).max(), 1e-3)
        np.testing.assert_allclose(found, value, rtol=0, atol=bound, err_msg=name)


def arguments(body: Body, memories: Arrays, symbols: dict[str, int] | None = None) -> list[Any]:
    """What a launch takes by name; scratch is made where it is first met, of nan."""
    for p in body.parameters:
        if p.attrs["name"] not in memories:
            sizes = [evaluate(n, symbols or {}) for n in p.shape]
            memories[p.attrs["name"]] = np.full(sizes, np.nan, p.dtype.numpy)
    return [memories[p.attrs["name"]] for p in body.parameters]


def run(x: AttentionShape, plan: BackwardPlan, how: str, seed: int = 0, **wide: Any) -> Arrays:
    """All launches on the interpreter or the simulator, against float64; Bodies are checked."""
    memories, wanted = numbers(x, seed, **wide)
    more = [Memory(memories[n].shape, EXTRAS[n]) for n in x.extras]
    made = attention_backward(x, plan, more)
    for body in made:
        given = arguments(body, memories)
        verify_body(body, "placed", H200)
        assert not [f for f in check_body(body, H200) if f.severity == "error"]
        if how == "interpreted":
            interpret.run(body, given, seed=seed)
        else:
            text, entry = emit(body, "backward", H200)
            simulate(text, entry, given)
    agree(x, memories, wanted)
    return memories


SMALL = BackwardPlan(queries=64, keys=64)
FAST, FAST_WIDE = BackwardPlan(128, late=True, fast=True), BackwardPlan(64, fast=True)
CAUSAL = {"band": (None, 0)}
CASES: dict[str, tuple[AttentionShape, BackwardPlan]] = {
    "one block": (shape(1, 1, 128, 128, 64), SMALL),
    "causal": (shape(2, 2, 200, 200, 64, **CAUSAL), SMALL),
    "grouped heads": (shape(4, 2, 130, 136, 64, batch=2, **CAUSAL), SMALL),
    "one key head": (shape(3, 1, 70, 100, 32, dtype=float16), SMALL),
    "window": (shape(1, 1, 300, 300, 64, band=(-40, 10)), SMALL),
    "causal from the bottom right": (shape(1, 1, 100, 200, 64, band=(None, 100)), SMALL),
    "rows that see nothing": (shape(1, 1, 200, 77, 64, band=(None, -123)), SMALL),
    "keys that nothing sees": (shape(1, 1, 64, 300, 64, **CAUSAL), SMALL),
    "tokens before heads": (shape(2, 1, 33, 260, 64, dtype=float16, orders=("bthd",) * 4),
                            BackwardPlan(128, 2, 96, late=True)),
    "one token": (shape(1, 1, 1, 1, 64), SMALL),
    "odd sizes": (shape(1, 1, 77, 131, 40, 72, **CAUSAL), SMALL),
    "width 128": (shape(1, 1, 130, 140, 128, **CAUSAL), BackwardPlan()),
    "width 96, values 40": (shape(1, 1, 130, 140, 96, 40, **CAUSAL), SMALL),
    "width 32, values 128": (shape(1, 1, 130, 140, 32, 128, **CAUSAL), SMALL),
    "mixed": (shape(5, 5, 200, 150, 32, **CAUSAL), replace(SMALL, section=2)),
    "mixed in one": (shape(2, 1, 200, 150, 32, batch=2, **CAUSAL), replace(SMALL, section=9)),
    "late": (shape(2, 1, 150, 150, 64, **CAUSAL), BackwardPlan(96, 3, 112, late=True)),
    "fast": (shape(1, 1, 128, 128, 64), FAST),
    "fast, several blocks": (shape(2, 1, 400, 300, 32), FAST),
    "fast, grouped heads": (shape(4, 2, 130, 136, 64, batch=2, **CAUSAL), FAST),
    "fast, window": (shape(1, 1, 300, 200, 32, dtype=float16, band=(-40, 10)), FAST),
    "fast, early": (shape(1, 1, 100, 200, 40, **CAUSAL), replace(FAST, late=False)),
    "fast, width 128": (shape(2, 1, 130, 140, 128, **CAUSAL), FAST_WIDE),
    "fast, tokens before heads": (shape(2, 2, 70, 200, 96, 40, orders=("bthd",) * 4),
                                  replace(FAST_WIDE, late=True)),
    "softcap": (shape(2, 1, 130, 140, 64, softcap=2.0, **CAUSAL), SMALL),
    "sinks": (shape(2, 1, 70, 140, 64, extras=("sinks",)), SMALL),
    "key lengths": (shape(2, 1, 130, 300, 64, batch=4, extras=("key_lengths",)), SMALL),
    "key lengths, fast": (shape(1, 1, 130, 300, 64, batch=4, extras=("key_lengths",), **CAUSAL),
                          FAST),
    "slopes": (shape(2, 1, 130, 140, 64, extras=("slopes",), **CAUSAL), SMALL),
    "bias": (shape(2, 2, 130, 140, 64, extras=("bias",)), SMALL),
    "mask": (shape(2, 1, 130, 140, 64, batch=2, extras=("mask",)), SMALL),
    "dropout": (shape(2, 1, 70, 140, 64, dropout=0.3, extras=("key", "offset")), SMALL),
    "dropout, fast": (shape(2, 1, 130, 140, 40, dropout=0.5, batch=2, extras=("offset", "key"),
                            **CAUSAL), FAST),
    "packed": (shape(2, 1, 230, 230, 64, extras=("query_starts", "key_starts")), SMALL),
    "packed, causal": (shape(1, 1, 230, 230, 40, 32, extras=("query_starts", "key_starts"),
                             orders=("bthd",) * 4, **CAUSAL), SMALL),
    "packed, window, slopes": (shape(1, 1, 230, 230, 32, band=(-30, 20),
                                     extras=("slopes", "key_starts", "query_starts")), SMALL),
    "width 256": (shape(2, 1, 100, 140, 256, **CAUSAL), BackwardPlan(32, keys=32, apart=True)),
    "width 72, values 192": (shape(1, 1, 70, 140, 72, 192, **CAUSAL),
                             BackwardPlan(32, keys=32, apart=True)),
    "all at once": (shape(2, 1, 130, 140, 64, softcap=3.0, batch=2, **CAUSAL,
                          dropout=0.2, extras=("mask", "bias", "slopes", "sinks", "key_lengths",
                                               "key", "offset")), SMALL),
    "all at once, fast": (shape(2, 1, 130, 140, 64, softcap=3.0, batch=2, **CAUSAL,
                                extras=("slopes", "mask", "bias", "key_lengths")), FAST),
}  # fmt: skip


# What has an option alone is in "all at once" too.
ALONE = {
    *("one block", "causal from the bottom right", "tokens before heads", "width 96, values 40"),
    *("width 32, values 128", "mixed", "fast", "fast, several blocks", "fast, window"),
    *("fast, early", "fast, width 128", "softcap", "sinks", "key lengths", "key lengths, fast"),
    *("slopes", "bias", "mask", "dropout", "dropout, fast", "packed", "packed, causal"),
    "width 72, values 192",
}
assert set(CASES) >= ALONE


@pytest.mark.sampled(2)
@pytest.mark.parametrize("label", sampled(CASES, lambda label: label not in ALONE))
def test_interpreted(label: str) -> None:
    """The numbers are right in a random order of events, and the check finds no fault."""
    run(*CASES[label], "interpreted", list(CASES).index(label))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("lead", range(4))
@pytest.mark.parametrize("tail", range(4))
def test_parts_of_a_bias(lead: int, tail: int) -> None:
    """A bias and a mask that lack some of batch, heads, queries and keys."""
    x = shape(2, 1, 40, 30, 32, batch=2, extras=("bias", "mask"))
    run(x, BackwardPlan(32, keys=32), "interpreted", bias=(lead, tail), mask=(3 - lead, 3 - tail))


@pytest.mark.parametrize("plan", (SMALL, FAST))
def test_symbols(plan: BackwardPlan) -> None:
    """Numbers of tokens that are known at run time."""
    fixed = shape(2, 1, 150, 170, 64, band=(None, 20))
    memories, wanted = numbers(fixed)
    queries, keys = symbol("queries", 1, 1000), symbol("keys", 1, 1000)
    x = replace(fixed, queries=queries, keys=keys, band=(None, combine(keys, queries, -1)))
    bound = {"queries": 150, "keys": 170}
    for body in attention_backward(x, plan):
        assert not [f for f in check_body(body, H200) if f.severity == "error"]
        interpret.run(body, arguments(body, memories, bound), bound)
    agree(fixed, memories, wanted)


def test_formula() -> None:
    """The formula of the gradients against finite differences."""
    x = shape(2, 1, 5, 6, 8, band=(None, 1), softcap=1.5)
    draw = np.random.default_rng(0)
    q, k, v, dout = (
        draw.standard_normal(s) for s in ((1, 2, 5, 8), (1, 1, 6, 8), (1, 1, 6, 8), (1, 2, 5, 8))
    )
    more = {"slopes": np.array([0.3, -0.2]), "sinks": np.array([0.1, 1.0])}
    wanted = backward(x, q, k, v, dout, more)
    for number, name in enumerate("qkv"):
        given = [q, k, v]
        step = np.zeros_like(given[number])
        found = np.zeros_like(step)
        for at in np.ndindex(step.shape):
            ends = []
            for sign in (1, -1):
                step[at] = sign * 1e-5
                moved = [g + step if i == number else g for i, g in enumerate(given)]
                ends.append((forward(x, *moved, more)[1] * dout).sum())
            step[at] = 0.0
            found[at] = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(found, wanted[f"d{name}"], atol=1e-8)


def test_large_logits() -> None:
    """Scores of hundreds give no nan and the same accuracy."""
    x = replace(shape(1, 1, 130, 70, 64, **CAUSAL), scale=20.0)
    run(x, SMALL, "interpreted")


@pytest.mark.parametrize("plan", (SMALL, FAST))
def test_far_below_zero(plan: BackwardPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-sum-exps of -1000: what lies past the last key, with the score 0, adds nothing."""
    x = shape(1, 1, 70, 75, 64, extras=("slopes",), band=(-200, -1))
    far = extras_of
    monkeypatch.setitem(
        globals(), "extras_of", lambda *g: {n: np.full_like(a, 1000.0) for n, a in far(*g).items()}
    )
    run(x, plan, "interpreted")


@pytest.mark.parametrize(
    "x, why",
    [
        (shape(1, 1, 64, 64, 64, dtype=float32), "no float32"),
        (shape(1, 1, 64, 64, 60), "multiples of 8"),
        (shape(1, 1, 64, 64, 264), "up to 256"),
    ],
)
def test_what_it_does_not_take(x: AttentionShape, why: str) -> None:
    """Each is refused with its reason."""
    assert why in why_not(x)
    with pytest.raises(InternalError, match=why):
        attention_backward(x, BackwardPlan())


HARMLESS = ("matrix_fence", "matrix_async after matrix_commit", "named_sync")
REGISTERS = ("wait 5", "wait 10", "matrix_wait 4", "matrix_wait 10")  # they only save registers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan, number", ((FAST, 1), (SMALL, 0)))
def test_mutants_are_caught(plan: BackwardPlan, number: int) -> None:
    """Each barrier op, fence, wait and commit dropped or changed: the static check finds all but
    those that repeat what another op says."""
    x = shape(1, 1, 320, 256, 64, **CAUSAL)
    missed, count = [], 0
    for label, broken in mutants.mutants(attention_backward(x, plan)[number]):
        count += 1
        if not any(f.severity == "error" for f in check_body(broken, H200)):
            missed.append(label)
    assert not [m for m in missed if not m.startswith(HARMLESS + REGISTERS)]
    assert len(missed) < 0.1 * count


# ---- PTX ----------------------------------------------------------------------------------------

SIMULATED = {
    "causal": (shape(1, 1, 100, 136, 64, **CAUSAL), SMALL),
    "grouped heads, late": (shape(2, 1, 70, 40, 32, 64, **CAUSAL), replace(SMALL, late=True)),
    "width 96": (shape(1, 1, 70, 64, 96, 40, **CAUSAL), SMALL),
    "fast": (shape(1, 1, 100, 140, 64, **CAUSAL), FAST),
    "fast, width 128": (shape(1, 1, 70, 140, 128, **CAUSAL), FAST_WIDE),
    "packed": (shape(1, 1, 230, 230, 32, extras=("query_starts", "key_starts"), **CAUSAL), SMALL),
    "dropout": (shape(1, 1, 40, 70, 32, dropout=0.3, extras=("key", "offset")), SMALL),
    "width 136": (shape(1, 1, 40, 40, 136, **CAUSAL), BackwardPlan(32, keys=32, apart=True)),
    "options": (
        shape(
            1,
            1,
            40,
            70,
            32,
            softcap=3.0,
            **CAUSAL,
            extras=("slopes", "mask", "bias", "key_lengths"),
        ),
        SMALL,
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("label", SIMULATED)
def test_simulated(label: str) -> None:
    """The emitted PTX on the simulator, which checks races and fences of its own."""
    run(*SIMULATED[label], "simulated")


NO_PTXAS = pytest.mark.skipif(
    find_ptxas() is None, reason="NO PTXAS HERE: the library's attention was not assembled"
)


@NO_PTXAS
@pytest.mark.parametrize("width", [128, pytest.param(64, marks=pytest.mark.slow)])
def test_assembled(width: int) -> None:
    """What is chosen for real sizes: checked, no spill, no stack frame, no C75xx."""
    texts = {}
    for more in ({}, CAUSAL):
        for fast in (False, True):
            x = shape(16, 16, 8192, 8192, width, batch=2, **more)
            plan = choose(x, fast)
            assert plan.fast == fast
            for body in attention_backward(x, plan):
                assert not [f for f in check_body(body, H200) if f.severity == "error"]
                name = f"{body.name}_{width}_{len(more)}_{fast:d}"
                texts[name] = emit(body, name, H200)[0]
    for name, made in assemble_all(texts).items():
        made.check_library(name)


@NO_PTXAS
def test_options_are_assembled() -> None:
    """The same with a softcap, dropout, packed requests and the widest heads."""
    texts = {}
    for label in ("softcap", "dropout", "packed", "width 256"):
        x = CASES[label][0]
        x = replace(x, queries=4096, keys=4096, width=x.width if x.width > 128 else 128)
        more = [Memory((9,) if n.endswith("starts") else (), EXTRAS[n]) for n in x.extras]
        for body in attention_backward(x, choose(x, True), more):
            name = f"{body.name}_{label.replace(' ', '_')}"
            texts[name] = emit(body, name, H200)[0]
    for name, made in assemble_all(texts).items():
        made.check_library(name)
