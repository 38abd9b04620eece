"""A row of -inf gives nan on a GPU too, where it is found as attention: run on the simulator."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
from simulated import run_graph

from tilegrad.core.dtype import BY_NUMPY, float32
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.graph.recognize import recognize
from tilegrad.ir.node import topological


def attend(q, k, v, mask):
    """softmax(where(mask, q k^T, -inf)) v in ordinary ops."""
    q, k, v = (build.cast(x, float32) for x in (q, k, v))
    scores = build.where(mask, build.dot(q, k, ((0, 1), (0, 1)), ((3,), (3,))), -math.inf)
    powers = ops.exp(build.subtract(scores, build.max_(scores, 3, keep=True)))
    shares = build.divide(powers, build.sum_(powers, 3, keep=True))
    return build.dot(shares, v, ((0, 1), (0, 1)), ((3,), (2,)))


def test_a_hidden_row():
    random = np.random.default_rng(0)
    given = [random.standard_normal((1, 1, 64, 64)).astype(ml_dtypes.bfloat16) for _ in range(3)]
    mask = random.random((1, 1, 64, 64)) < 0.5
    mask[0, 0, 3] = False
    values = [*given, mask]
    nodes = [build.input_(x.shape, BY_NUMPY[x.dtype]) for x in values]
    out = build.cast(attend(*nodes), nodes[0].dtype)
    assert any(n.op is ops.attention for n in topological(recognize([out])))
    (found,) = run_graph(nodes, [out], values)
    (wanted,) = interpret([out], dict(zip(nodes, values)))
    assert np.isnan(found[0, 0, 3].astype(np.float32)).all()
    np.testing.assert_allclose(
        found.astype(np.float32), wanted.astype(np.float32), rtol=3e-2, atol=3e-2
    )
