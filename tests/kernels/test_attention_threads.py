"""kernels/attention/threads.py: every option against float64, on the interpreter and as PTX
of sm_80 on the simulator; what is chosen for real sizes is assembled: no spill, no stack frame.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulator import simulate
from test_attention import HOLES, MINUS, agree, drawn, numbers, shape

from tilegrad.compiler.compile import schedule_for
from tilegrad.core.dtype import dtype_of, float16
from tilegrad.core.target import A100, H200, Target
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import philox
from tilegrad.ir.symbol import symbol
from tilegrad.ir.types import Memory
from tilegrad.kernels.attention.shape import AttentionShape
from tilegrad.kernels.attention.threads import WarpPlan, attend, plans, why_not
from tilegrad.schedule.schedule import Launch
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret
from tilegrad.tile.build import Body
from tilegrad.tile.prove import check_body

Array = np.ndarray
CAUSAL = (None, 0)
HELD = replace(H200, name="h200-warps", cpu="sm_80", matrix=A100.matrix)  # held to a warp's units
SMALL, ONE = WarpPlan((64, 32), 4, 2), WarpPlan((64, 32), 4, 1)
TURNED = ("bthd", "bthd", "bthd", "bthd")


def one_head(**given: Any) -> AttentionShape:
    """A smaller attention still."""
    return shape(**{"heads": 1, "key_heads": 1, **given})


Case = tuple[AttentionShape, WarpPlan, tuple[Array, ...]]
CASES: dict[str, Case] = {
    "full": (one_head(), SMALL, ()),
    "full, one stage": (shape(heads=1, key_heads=1, keys=200), ONE, ()),
    "causal": (one_head(queries=100, keys=100, band=CAUSAL), SMALL, ()),
    "causal, one stage": (one_head(queries=130, keys=130, band=CAUSAL), ONE, ()),
    "two rows of blocks a warp": (
        one_head(queries=150, keys=150, band=CAUSAL),
        WarpPlan((128, 48), 4, 2),
        (),
    ),
    "one stage, steps known": (one_head(queries=70, keys=40, band=CAUSAL), ONE, ()),
    "bottom right": (one_head(queries=72, keys=200, band=(None, 128)), SMALL, ()),
    "rows that see nothing": (one_head(queries=200, keys=72, band=(None, -100)), SMALL, ()),
    "window": (one_head(queries=130, keys=130, band=(-70, 0)), SMALL, ()),
    "window on both sides": (one_head(queries=100, keys=233, band=(-40, 61)), ONE, ()),
    "band beyond the keys": (one_head(queries=100, keys=64, band=(80, 90)), SMALL, ()),
    "only a lower side": (one_head(queries=150, keys=200, band=(-30, None)), SMALL, ()),
    "width 128": (shape(heads=1, key_heads=1, width=128, value_width=128, keys=100), SMALL, ()),
    "width 256": (
        shape(heads=1, key_heads=1, width=256, value_width=256, queries=64, keys=50),
        WarpPlan((64, 16), 4, 2),
        (),
    ),
    "width 40, values 72": (one_head(width=40, value_width=72, queries=70), SMALL, ()),
    "one query and key": (shape(queries=1, keys=1, heads=5, key_heads=1), SMALL, ()),
    "groups": (shape(batch=2, heads=6, key_heads=2, queries=30, keys=50), SMALL, ()),
    "float16": (one_head(dtype=float16, queries=90, keys=70, band=CAUSAL), SMALL, ()),
    "tokens before heads": (shape(batch=2, heads=2, queries=20, keys=40, orders=TURNED), SMALL, ()),
    "soft limit": (one_head(softcap=2.0, scale=1.0, band=CAUSAL), SMALL, ()),
    "bias": (shape(queries=100, keys=72, extras=("bias",)), SMALL, (drawn(1, 2, 100, 72),)),
    "bias of a row": (shape(batch=2, queries=40, extras=("bias",)), SMALL, (drawn(2, 1, 1, 128),)),
    "bias of -inf": (
        shape(queries=100, keys=72, extras=("bias",)),
        ONE,
        (MINUS.astype(np.float32),),
    ),
    "mask": (shape(batch=2, queries=100, keys=72, extras=("mask",)), SMALL, (HOLES,)),
    "slopes": (
        shape(extras=("slopes",), queries=70, band=CAUSAL),
        SMALL,
        (np.array([0.5, 0.25], np.float32),),
    ),
    "sinks": (shape(extras=("sinks",), queries=70), SMALL, (np.array([1.5, -2.0], np.float32),)),
    "lengths": (
        one_head(batch=3, queries=40, keys=100, extras=("key_lengths",)),
        SMALL,
        (np.array([100, 33, 0], np.int32),),
    ),
}


def built(x: AttentionShape, plan: WarpPlan, more: tuple[Array, ...]) -> Body:
    """The Body for extras of these types."""
    return attend(x, plan, A100, [Memory(m.shape, dtype_of(m.dtype)) for m in more])


def arguments(x: AttentionShape, body: Body, memories: list[Array]) -> list[Array]:
    """Memories in the order of the Body's parameters."""
    named = dict(zip(("q", "k", "v", *x.extras, "out", "lse"), memories))
    return [named[p.attrs["name"]] for p in body.parameters]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    x, plan, more = CASES[name]
    body = built(x, plan, more)
    assert not [f for f in check_body(body, A100) if f.severity == "error"]
    memories = numbers(x, more)
    interpret.run(body, arguments(x, body, memories), {}, seed=1)
    agree(x, memories)
    memories = numbers(x, more)
    text, entry = emit(body, "entry", A100)
    assert ".target sm_80" in text and text.count("cp.async.cg") and "mma.sync" in text
    simulate(text, entry, arguments(x, body, memories), {})
    agree(x, memories)


def test_sizes_known_late() -> None:
    batch, tokens = symbol("batch", 1, 4), symbol("tokens", 1, 256)
    x = shape(batch=batch, queries=tokens, keys=tokens, band=CAUSAL)
    body = built(x, SMALL, ())
    text, entry = emit(body, "entry", A100)
    for sizes in ({"batch": 1, "tokens": 70}, {"batch": 2, "tokens": 33}):
        known = shape(
            batch=sizes["batch"], queries=sizes["tokens"], keys=sizes["tokens"], band=CAUSAL
        )
        memories = numbers(known, ())
        simulate(text, entry, arguments(x, body, memories), sizes)
        agree(known, memories)


@pytest.mark.parametrize("causal", (False, True))
def test_dropout(causal: bool) -> None:
    """What is dropped is what the Graph's random bits say; log-sum-exps know nothing of it."""
    band = CAUSAL if causal else (None, None)
    x = shape(
        heads=1, key_heads=1, queries=70, keys=100, dropout=0.3, band=band, extras=("key", "offset")
    )
    more = (np.asarray(12345, np.uint32), np.asarray(77, np.uint32))
    body, memories = built(x, SMALL, more), numbers(x, more)
    text, entry = emit(body, "entry", A100)
    simulate(text, entry, arguments(x, body, memories), {})
    bits = philox(np.arange(7000, dtype=np.uint64), np.full(7000, 77, np.uint64), 12345)
    kept = (bits >> 8 > int(np.float32(0.3) * (1 << 24))).reshape(70, 100)
    q, k, v = (m[0, 0].astype(np.float64) for m in memories[:3])
    s = x.scale * q @ k.T
    s = np.where(np.tril(np.full((70, 100), True)), s, -np.inf) if causal else s
    p = np.exp(s - s.max(1, keepdims=True))
    out = (p / p.sum(1, keepdims=True) * kept / 0.7) @ v
    np.testing.assert_allclose(memories[-2][0, 0].astype(np.float64), out, atol=0.04)
    np.testing.assert_allclose(memories[-1][0, 0], np.log(p.sum(1)) + s.max(1), atol=1e-5)


@pytest.mark.parametrize("target", [A100, HELD], ids=["a100", "held"])
def test_attention_of_a_graph_takes_it(target: Target) -> None:
    x = shape(queries=70, keys=70, band=CAUSAL)
    nodes = [build.input_(x.sizes(n), x.dtype) for n in "qkv"]
    attrs = {
        "scale": x.scale,
        "band": x.band,
        "softcap": 0.0,
        "dropout": 0.0,
        "extras": (),
        "orders": x.orders,
    }
    out, lse = build.items(ops.attention(*nodes, **attrs))
    schedule = schedule_for(nodes, [out, lse], target, ())
    steps = [s for kernel in schedule.kernels for s in kernel.steps if isinstance(s, Launch)]
    assert [s.body.name for s in steps] == ["thread_attention"]
    memories = numbers(x, ())
    slots = dict(zip([*schedule.inputs, *schedule.outputs], memories))
    text, entry = emit(steps[0].body, "entry", target)
    simulate(text, entry, [slots[n] for n in steps[0].slots], {})
    agree(x, memories)


def test_refused() -> None:
    assert "multiples of 8" in why_not(shape(width=36))
    assert "256" in why_not(shape(width=264))
    assert "one after another" in why_not(shape(extras=("query_starts", "key_starts")))
    assert not why_not(shape(extras=("bias", "sinks")))


REAL = {
    f"{width}{' causal' if band == CAUSAL else ''}{' odd' if tokens % 128 else ''} {target.name}": (
        shape(
            batch=4,
            heads=16,
            key_heads=4,
            queries=tokens,
            keys=tokens,
            width=width,
            value_width=width,
            band=band,
        ),
        target,
    )
    for target in (A100, HELD)
    for width in (64, 128)
    for band in ((None, None), CAUSAL)
    for tokens in (2048, 1000)
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REAL)
def test_assembled(name: str) -> None:
    x, target = REAL[name]
    plan = plans(x, target)[0]
    no_spill(x, plan, (), "sm_80" if target is A100 else "sm_90")


def no_spill(x: AttentionShape, plan: WarpPlan, more: tuple[Array, ...], arch: str) -> None:
    """Assemble for an architecture; nothing may be kept outside of registers."""
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE")
    made = assemble(emit(built(x, plan, more), "entry", A100)[0], arch)
    report = made.reports["entry"]
    assert report.spill_stores == report.spill_loads == report.stack_bytes == 0, (plan, report)


OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"extras": ("bias",)},
    "mask": {"extras": ("mask",)},
    "slopes": {"extras": ("slopes",), "band": CAUSAL},
    "soft limit": {"softcap": 30.0, "band": CAUSAL},
    "window": {"band": (-500, 0)},
    "dropout": {"extras": ("key", "offset"), "dropout": 0.1},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", (64, 128))
@pytest.mark.parametrize("name", OPTIONS)
def test_options_assembled(name: str, width: int) -> None:
    given = OPTIONS[name]
    kinds = {
        "bias": np.zeros((1, 1, 1024, 1024), np.float32),
        "slopes": np.zeros(4, np.float32),
        "mask": np.zeros((1, 1, 1024, 1024), bool),
        "key": np.uint32(1),
        "offset": np.uint32(1),
    }
    x = shape(
        heads=4, key_heads=4, queries=1024, keys=1024, width=width, value_width=width, **given
    )
    more = tuple(np.asarray(kinds[n]) for n in x.extras)
    no_spill(x, plans(x, HELD)[0], more, "sm_90")
