"""How a table of examples proves a RuleSet: each Rule fires on its example, and values stay.

Inputs are random, with nan, inf and both zeros among floats and the extremes among integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node, topological
from tilegrad.ir.pattern import RuleSet
from tilegrad.ir.rewrite import Log, rewrite

Example = Callable[[], Node]
SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -1.0, 0.5, -2.0)


def values(node: Node, random: np.random.Generator, symbols: Mapping[str, int]) -> Any:
    """Random values of an input, special ones included."""
    from tilegrad.ir.symbol import evaluate

    shape = tuple(evaluate(s, symbols) for s in node.shape)
    dtype = node.dtype
    if dtype.kind == "bool":
        return random.random(shape) < 0.5
    if dtype.is_integer:
        low, high = int(dtype.lowest), min(int(dtype.highest), 2**63 - 1)
        found = random.integers(low, high, shape, endpoint=True, dtype=np.int64).astype(object)
        small = random.integers(max(low, -4), min(high, 5), shape).astype(object)
        return np.where(random.random(shape) < 0.5, small, found).astype(dtype.numpy)
    found = random.normal(size=shape) * random.choice([1.0, 30.0], shape)
    special = random.choice(np.array(SPECIAL), shape)
    return np.where(random.random(shape) < 0.3, special, found).astype(dtype.numpy)


def agree(
    before: Sequence[Node],
    after: Sequence[Node],
    *,
    close: float = 0.0,
    seeds: int = 3,
    symbols: Mapping[str, int] | None = None,
    finite: bool = False,
) -> None:
    """Assert that two graphs have the same types and values on random inputs."""
    symbols = {} if symbols is None else symbols
    assert [n.type for n in before] == [n.type for n in after]
    inputs = [n for n in topological([*before, *after]) if n.op is ops.input_]
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        given = {n: values(n, random, symbols) for n in inputs}
        if finite:
            given = {
                n: np.clip(np.nan_to_num(v), -9, 9).astype(v.dtype) if n.dtype.is_float else v
                for n, v in given.items()
            }
        for a, b in zip(interpret(before, given, symbols), interpret(after, given, symbols)):
            assert_same(a, b, close)


def assert_same(a: Any, b: Any, close: float) -> None:
    """Equal to the bit (nan is nan), or within a relative distance."""
    assert a.dtype == b.dtype and a.shape == b.shape
    if a.dtype.kind in "biu" or a.dtype.name in ("int4", "uint4"):
        np.testing.assert_array_equal(a, b)
        return
    a, b = a.astype(np.float64), b.astype(np.float64)
    if close:
        np.testing.assert_allclose(a, b, rtol=close, atol=close)
    else:
        np.testing.assert_array_equal(a, b)
        known = ~np.isnan(a)
        np.testing.assert_array_equal(np.signbit(a)[known], np.signbit(b)[known])


def fires(rules: RuleSet, name: str, example: Node) -> Node:
    """What the one Rule makes of its example; it must fire."""
    (rule,) = [r for r in rules.rules if r.name == name]
    log = Log()
    (after,) = rewrite([example], RuleSet(name, [rule]), log)
    assert log.fired.get(name), f"{name} does not fire on its example"
    return after


def check(rules: RuleSet, name: str, example: Node, **how: Any) -> None:
    """The Rule fires on its example; it and the whole RuleSet keep the values."""
    agree([example], [fires(rules, name, example)], **how)
    agree([example], rewrite([example], rules), **how)


def given(*shape: Any, dtype: Any) -> Node:
    """A fresh input."""
    return build.input_(tuple(shape), dtype)
