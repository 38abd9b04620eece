"""Breakpoints of Symbols: where the kernels of a Target differ, and that jit compiles ranges."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.compiler import breaks as found_breaks
from tilegrad.compiler.breaks import breaks_of
from tilegrad.compiler.choose import choose_kernels
from tilegrad.core.errors import ShapeError
from tilegrad.core.format import format_of
from tilegrad.core.target import A100, AVX2, H200
from tilegrad.graph import build, ops
from tilegrad.ir.node import Node, topological
from tilegrad.ir.rewrite import Log
from tilegrad.ir.symbol import Expr, symbol


def single(most: Any, pages: int = 1024) -> list[Node]:
    """A step of two requests with a token each."""
    q, k, v = (build.input_((2, h, 64), tg.bfloat16) for h in (4, 2, 2))
    cache = [build.input_((8, 2, 16, 64), tg.bfloat16) for _ in "kv"]
    places = [build.input_(s, tg.int32) for s in ((2, pages), (2,), (3,))]
    speeds = build.input_((32,), tg.float32)
    appended = ops.paged_append(
        q, k, v, speeds, *places, *cache, width=64, interleaved=False, factor=1.0
    )
    turned, *after = build.items(appended)
    attrs = {"scale": 0.1, "window": 0, "softcap": 0.0, "queries": 0, "single": True}
    return [ops.paged_attention(turned, *after, *places, **attrs, most_keys=most), *after]


def test_few_keys_are_a_range() -> None:
    keys = symbol("keys", 1, 16384)
    ((name, (first,)),) = breaks_of(single(keys), H200).items()
    assert name == "keys" and first > 4096
    assert breaks_of(single(keys), A100) == breaks_of(single(keys), AVX2) == {}
    assert breaks_of(single(keys, pages=64), H200) == {}  # a table that holds no more
    assert breaks_of(single(16384), H200) == breaks_of(single(symbol("keys", 1, 64)), H200) == {}
    for most, calls in ((first - 1, 1), (16384, 3)):
        chosen = choose_kernels([], single(symbol("keys", 1, most)), Log(), H200)
        assert sum(n.op is ops.call for n in topological(chosen)) == calls


def test_many_tokens_unpack_weights() -> None:
    tokens = symbol("tokens", 1, 512)
    raw = build.input_((64, 36), tg.uint8)
    x = build.input_((tokens, 64), tg.bfloat16)
    weights = ops.unpack(raw, format="Q4_0", dtype=tg.bfloat16)
    assert weights.shape == (64, 64)
    product = build.dot(x, weights, batch=((), ()), contract=((1,), (1,)))
    assert breaks_of([product], H200) == {"tokens": (257,)}
    assert breaks_of([product], AVX2) == {}
    other = format_of("INT4_G128_F16")  # one that no kernel reads as it lies
    raw = build.input_(other.storage_shape((64, 128)), tg.uint8)
    x = build.input_((tokens, 128), tg.bfloat16)
    weights = ops.unpack(raw, format=other.name, dtype=tg.bfloat16)
    product = build.dot(x, weights, batch=((), ()), contract=((1,), (1,)))
    assert breaks_of([product], H200) == {"tokens": (32,)}


# ---- jit ----------------------------------------------------------------------------------------


@pytest.fixture
def at_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if sums were others from 8 on, of shapes and of numbers."""

    def every(outputs: Any, device: Any) -> dict[str, tuple[int, ...]]:
        return {"n": (8, 20)}

    monkeypatch.setattr(found_breaks, "breaks_of", every)


def test_a_range_is_compiled_when_it_is_first_met(at_eight: None, caplog: Any) -> None:
    seen = []

    def total(x):
        seen.append((x.shape[0].low, x.shape[0].high))
        return x.sum()

    run = tg.jit(total, dynamic={"x": {0: ("n", 1, 64)}})
    caplog.set_level(logging.INFO, "tilegrad.jit")
    for count, traces in ((3, 1), (7, 1), (8, 2), (19, 2), (1, 2), (64, 3), (20, 3)):
        assert float(run(tg.ones(count))) == count
        assert run.traces == traces
    assert seen == [(1, 64), (1, 7), (8, 19), (20, 64)]  # the first was only looked at
    assert "the range of n" in caplog.text
    assert run.range_of("n", 9) == (8, 19)


def test_a_range_may_hold_one_size(at_eight: None) -> None:
    run = tg.jit(lambda x: x.sum(), dynamic={"x": {0: ("n", 1, 20)}})
    assert float(run(tg.ones(20))) == 20 and float(run(tg.ones(3))) == 3
    assert run.range_of("n", 20) == (20, 20)


def test_a_number_may_be_a_symbol(at_eight: None) -> None:
    seen: list[Any] = []

    def scaled(x, most):
        assert isinstance(most, Expr)
        seen.append((most.low, most.high))
        return x * float(most.high)

    run = tg.jit(scaled, dynamic={"most": ("n", 1, 64)})
    x = tg.ones(3)
    assert run(x, 5).tolist() == run(x, 7).tolist() == [7.0] * 3
    assert run(x, 8).tolist() == [19.0] * 3
    assert seen == [(1, 64), (1, 7), (8, 19)]
    bound = run.bind(x, 30)
    assert bound.ranges == {"n": (20, 64)} and bound.run().tolist() == [64.0] * 3
    assert bound.covers("n", 20) and not bound.covers("n", 19)
    for wrong in (0, 65, 2.0):
        with pytest.raises(ShapeError, match="argument most does not fit its symbolic sizes"):
            run(x, wrong)


def test_a_range_of_one_value_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_breaks, "breaks_of", lambda *given: {"n": (8, 9)})
    seen: list[Any] = []

    def total(x, most):
        seen.append(most)
        return x.sum() + x.shape[0]

    run = tg.jit(total, dynamic={"x": {0: ("n", 1, 64)}, "most": ("n", 1, 64)})
    for count in (8, 3, 8, 30):
        assert float(run(tg.ones(count), count)) == 2 * count
    assert seen[1] == 8 and run.traces == 3 and run.range_of("n", 8) == (8, 8)


def test_without_breakpoints_there_is_one_trace() -> None:
    run = tg.jit(lambda x, most: x + 1, dynamic={"x": {0: ("n", 1, 64)}, "most": ("m", 1, 9)})
    for count in (1, 40, 64):
        np.testing.assert_array_equal(run(tg.ones(count), 3).numpy(), np.full(count, 2.0))
    assert run.traces == 1 and run.bind(tg.ones(4), 9).ranges == {}


def test_explain_takes_the_ranges_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_target(outputs: Any, device: Any) -> dict[str, tuple[int, ...]]:
        return {"n": (8, 20)} if device is H200 else {"n": (40,)}

    monkeypatch.setattr(found_breaks, "breaks_of", by_target)
    seen: list[Any] = []

    def total(x):
        seen.append((x.shape[0].low, x.shape[0].high))
        return x.sum()

    run = tg.jit(total, dynamic={"x": {0: ("n", 1, 64)}})
    assert "h200" in str(tg.explain(run, tg.ones(9), target="h200", level="summary"))
    assert seen == [(1, 64), (8, 19)] and run.traces == 0
    assert float(run(tg.ones(9))) == 9.0 and seen[2:] == [(1, 64), (1, 39)]
