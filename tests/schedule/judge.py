"""Run a Graph through the whole compiler and compare it with the interpreter.

Invariant: integers and bools agree exactly; floats agree to a tolerance of their dtype, and nan
and inf stand in the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tilegrad.compiler.compile import executable_for
from tilegrad.core.dtype import BY_NUMPY, DType
from tilegrad.graph import build
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import evaluate
from tilegrad.runtime.buffer import Buffer

TOLERANCE = {
    "float64": 1e-9,
    "float32": 2e-5,
    "float16": 4e-3,
    "bfloat16": 3e-2,
    "float8_e4m3": 0.15,
    "float8_e5m2": 0.3,
}


def run(
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    values: Sequence[np.ndarray],
    symbols: Mapping[str, int] | None = None,
    donate: tuple[int, ...] = (),
) -> list[np.ndarray]:
    """The outputs, compiled and run."""
    executable = executable_for(tuple(inputs), tuple(outputs), donate)
    buffers = [Buffer.wrap(np.array(v, order="C")) for v in values]
    found = executable.run(buffers, symbols)
    result = []
    for node, buffer in zip(outputs, found):
        shape = tuple(evaluate(s, symbols or {}) for s in node.shape)
        result.append(buffer.array(shape, node.dtype).copy())
    return result


def compare(
    node: Node,
    got: np.ndarray,
    expected: np.ndarray,
    looser: float = 1.0,
    noise: np.ndarray | float = 0.0,
) -> None:
    """Assert that two arrays agree as their dtype allows, or are not further apart than `noise`."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    dtype: DType = BY_NUMPY[got.dtype]
    if not dtype.is_float:
        np.testing.assert_array_equal(got.astype(np.int64), expected.astype(np.int64))
        return
    limit = TOLERANCE[dtype.name] * looser
    a, b = got.astype(np.float64), expected.astype(np.float64)
    finite = np.abs(b[np.isfinite(b)])
    scale = float(finite.max()) if finite.size else 1.0
    least = limit * min(max(scale, 1e-3), 1e6)
    with np.errstate(invalid="ignore"):
        a = np.where(np.abs(a - b) <= noise, b, a)
    np.testing.assert_allclose(a, b, rtol=limit, atol=least)


def check(
    function: Callable[..., Node | Sequence[Node]],
    *values: np.ndarray,
    looser: float = 1.0,
    donate: tuple[int, ...] = (),
) -> list[np.ndarray]:
    """Compile function(nodes...) and compare it with the interpreter; gives what it computed."""
    values = tuple(np.asarray(v) for v in values)
    nodes = [build.input_(v.shape, BY_NUMPY[v.dtype]) for v in values]
    made = function(*nodes)
    outputs = [made] if isinstance(made, Node) else list(made)
    expected = interpret(outputs, dict(zip(nodes, values)))
    got = run(nodes, outputs, values, donate=donate)
    for node, a, b in zip(outputs, got, expected):
        compare(node, a, b, looser)
    return got
