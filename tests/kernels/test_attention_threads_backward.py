"""kernels/attention/threads.py: gradients against float64, as PTX of sm_80 on the
simulator; what is chosen for real sizes is assembled: no spill, no stack frame.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulator import simulate
from test_attention import drawn, shape
from test_attention_threads import CAUSAL, HELD

from tilegrad.compiler.compile import schedule_for
from tilegrad.core.dtype import dtype_of, float16, float32
from tilegrad.core.target import A100
from tilegrad.graph import build, ops
from tilegrad.ir.types import Memory
from tilegrad.kernels.attention.shape import AttentionShape
from tilegrad.kernels.attention.threads import SIDES, WarpPlan, attend, plans, why_not
from tilegrad.schedule.schedule import Launch
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret
from tilegrad.tile.prove import check_body

Array = np.ndarray
SMALL, ONE = WarpPlan((64, 32), 4, 2), WarpPlan((64, 32), 4, 1)
TURNED = ("bthd", "bthd", "bthd", "bthd")


def one_head(**given: Any) -> AttentionShape:
    """A small attention."""
    return shape(**{"heads": 1, "key_heads": 1, **given})


Case = tuple[AttentionShape, WarpPlan, tuple[Array, ...]]
CASES: dict[str, Case] = {
    "full": (one_head(queries=70, keys=100), SMALL, ()),
    "one stage": (one_head(queries=70, keys=40, band=CAUSAL), ONE, ()),
    "causal, 128 kept": (
        one_head(queries=100, keys=100, band=CAUSAL),
        WarpPlan((128, 32), 4, 2),
        (),
    ),
    "window, groups": (
        shape(heads=4, key_heads=2, queries=40, keys=60, band=(-20, 5)),
        SMALL,
        (),
    ),
    "rows that see nothing": (one_head(queries=90, keys=40, band=(None, -30)), SMALL, ()),
    "width 40, values 72": (one_head(width=40, value_width=72, queries=40, keys=40), SMALL, ()),
    "float16, tokens before heads": (
        shape(dtype=float16, queries=40, keys=40, orders=TURNED),
        SMALL,
        (),
    ),
    "soft limit": (one_head(queries=40, keys=40, softcap=2.0, scale=0.5), SMALL, ()),
    "queries end": (one_head(queries=40, keys=64), SMALL, ()),
    "bias": (one_head(queries=40, keys=70, extras=("bias",)), SMALL, (drawn(1, 1, 40, 70),)),
    "mask": (one_head(queries=40, keys=40, extras=("mask",)), SMALL, (drawn(1, 1, 40, 40) > 0,)),
    "slopes": (
        one_head(queries=40, keys=40, extras=("slopes",), band=CAUSAL),
        SMALL,
        (np.array([0.3], np.float32),),
    ),
    "lengths": (
        one_head(batch=2, queries=40, keys=70, extras=("key_lengths",)),
        SMALL,
        (np.array([33, 0], np.int32),),
    ),
}


def reference(x: AttentionShape, m: dict[str, Array]) -> dict[str, Array]:
    """lse, delta and gradients in float64, as the orders have them."""
    q, k, v, dout = (
        m[n].astype(np.float64).transpose([order.index(c) for c in "bhtd"])
        for n, order in zip(("q", "k", "v", "dout"), x.orders)
    )
    k, v = (np.repeat(a, x.group, 1) for a in (k, v))
    s = x.scale * np.einsum("bhid,bhjd->bhij", q, k)
    bent = 1.0
    if x.softcap:
        bent = 1 - np.tanh(s / x.softcap) ** 2
        s = x.softcap * np.tanh(s / x.softcap)
    i, j = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None]
    s = s + m.get("bias", 0.0)
    if "slopes" in m:
        s = s + m["slopes"][None, :, None, None] * (j - i)
    low, high = (far if side is None else side for side, far in zip(x.band, (-(10**9), 10**9)))
    seen = (j - i >= low) & (j - i <= high) & m.get("mask", True)
    if "key_lengths" in m:
        seen = seen & (j < m["key_lengths"][:, None, None, None])
    s = np.where(seen, s, -np.inf)
    top = s.max(-1, keepdims=True)
    top = np.where(np.isinf(top), 0.0, top)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    whole = np.where(total > 0, total, 1.0)
    p = p / whole
    delta = (dout * (p @ v)).sum(-1)
    ds = p * (np.einsum("bhid,bhjd->bhij", dout, v) - delta[..., None]) * bent
    grads = {
        "q": x.scale * np.einsum("bhij,bhjd->bhid", ds, k),
        "k": x.scale * np.einsum("bhij,bhid->bhjd", ds, q),
        "v": np.einsum("bhij,bhid->bhjd", p, dout),
    }
    for n in "kv":
        b, _, t, d = grads[n].shape
        grads[n] = grads[n].reshape(b, x.key_heads, x.group, t, d).sum(2)
    found = {
        f"d{n}": grads[n].transpose(["bhtd".index(c) for c in order])
        for n, order in zip("qkv", x.orders)
    }
    lse = np.where(total > 0, top + np.log(whole), -np.inf)[..., 0]
    return {**found, "lse": lse.astype(np.float32), "delta": delta.astype(np.float32)}


def numbers(
    x: AttentionShape, more: tuple[Array, ...]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """All memories by name, gradients not yet written, and what these should be."""
    draw = np.random.default_rng(0)
    made = {
        name: draw.standard_normal(x.sizes(of)).astype(np.float32).astype(x.dtype.numpy)
        for name, of in (("q", "q"), ("k", "k"), ("v", "v"), ("dout", "out"))
    }
    made |= dict(zip(x.extras, more))
    wanted = reference(x, made)
    made |= {n: np.ascontiguousarray(wanted.pop(n)) for n in ("lse", "delta")}
    for n in "qkv":
        made[f"d{n}"] = np.full(x.sizes(n), np.nan, np.float32).astype(x.dtype.numpy)
    return made, wanted


def agree(made: dict[str, Array], wanted: dict[str, Array]) -> None:
    """Up to the rounding of weights and results."""
    for name, whole in wanted.items():
        found = made[name].astype(np.float64)
        assert np.isfinite(found).all(), name
        np.testing.assert_allclose(found, whole, atol=0.02 * max(1.0, np.abs(whole).max()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    x, plan, more = CASES[name]
    made, wanted = numbers(x, more)
    for side in SIDES:
        types = [Memory(m.shape, dtype_of(m.dtype)) for m in more]
        body = attend(x, plan, A100, types, side)
        assert not [f for f in check_body(body, A100) if f.severity == "error"]
        memories = [made[p.attrs["name"]] for p in body.parameters]
        if name in ("full", "window, groups"):
            copies = [m.copy() for m in memories]
            interpret.run(body, copies, {}, seed=1)
            names = [p.attrs["name"] for p in body.parameters]
            agree(dict(zip(names, copies)), {n: w for n, w in wanted.items() if n in names})
        text, entry = emit(body, "entry", A100)
        simulate(text, entry, memories, {})
    agree(made, wanted)


def test_backward_of_a_graph_takes_it() -> None:
    x = one_head(queries=40, keys=40, band=CAUSAL)
    given = [build.input_(x.sizes(n), x.dtype) for n in ("q", "k", "v", "out")]
    given += [build.input_(x.sizes("lse"), float32) for _ in range(2)]
    attrs = {"scale": x.scale, "band": x.band, "softcap": 0.0, "dropout": 0.0, "extras": ()}
    node = ops.attention_backward(*given, **attrs, orders=x.orders, wanted=())
    schedule = schedule_for(given, build.items(node), A100, ())
    steps = [s for kernel in schedule.kernels for s in kernel.steps if isinstance(s, Launch)]
    assert [s.body.name for s in steps] == ["thread_attention"] * 2
    made, wanted = numbers(x, ())
    order = ("q", "k", "v", "dout", "lse", "delta", "dq", "dk", "dv")
    slots = dict(zip([*schedule.inputs, *schedule.outputs], (made[n] for n in order)))
    for step in steps:
        text, entry = emit(step.body, "entry", A100)
        simulate(text, entry, [slots[n] for n in step.slots], {})
    agree(made, wanted)


def test_refused() -> None:
    assert "128" in why_not(shape(width=256), True)
    assert not why_not(shape(extras=("mask",)), True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("width", (64, 128))
@pytest.mark.parametrize("given", [{}, {"band": CAUSAL}, {"band": CAUSAL, "softcap": 30.0}])
def test_assembled(width: int, given: dict[str, Any], side: str) -> None:
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE")
    sizes = {"queries": 2048, "keys": 2048, "width": width, "value_width": width}
    x = shape(batch=4, heads=16, key_heads=4, **sizes, **given)
    for target, arch in ((A100, "sm_80"), (HELD, "sm_90")):
        plan = plans(x, target, side)[0]
        made = assemble(emit(attend(x, plan, target, (), side), "entry", A100)[0], arch)
        report = made.reports["entry"]
        assert report.spill_stores == report.spill_loads == report.stack_bytes == 0, (plan, report)
