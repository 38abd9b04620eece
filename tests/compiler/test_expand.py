"""Attention in ordinary ops, compiled for this machine: against the reference of the op."""

import numpy as np
import pytest

from tilegrad.compiler import expand
from tilegrad.compiler.compile import compile_for, host
from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.core import dtype as dtypes
from tilegrad.graph import attention, build, grad, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import topological
from tilegrad.runtime.buffer import Buffer


def some(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


STARTS = {
    "query_starts": np.array([0, 3, 3, 8], np.int32),
    "key_starts": np.array([0, 2, 4, 9], np.int32),
}
DRAWN = {"key": np.array(5, np.uint32), "offset": np.array(2, np.uint32)}
CASES = {
    "plain": ({}, {}),
    "band": ({"band": (-4, 0)}, {}),
    "softcap": ({"softcap": 2.0, "band": (None, 0)}, {"bias": some(1, 4, 1, 9)}),
    "seen": ({}, {"mask": some(1, 1, 10, 9) < 0.5, "key_lengths": np.array([0, 7], np.int32)}),
    "heads": ({}, {"slopes": some(4), "sinks": some(4)}),
    "packed": ({"band": (None, 0)}, STARTS),
    "dropout": ({"dropout": 0.4}, DRAWN),
}


def graph_of(name, order, dtype):
    """Results with every gradient, and the values of the inputs."""
    attrs, extras = CASES[name]
    batch = 1 if name == "packed" else 2
    shapes = ((batch, 4, 10, 8), (batch, 2, 9, 8), (batch, 2, 9, 16))
    arrays = [some(*s).transpose(["bhtd".index(a) for a in order]) for s in shapes]
    arrays = [np.ascontiguousarray(x).astype(dtype.numpy) for x in arrays]
    values = {
        build.input_(x.shape, dtypes.BY_NUMPY[x.dtype]): x for x in (*arrays, *extras.values())
    }
    nodes = list(values)
    usual = {"scale": 0.3, "band": (None, None), "softcap": 0.0, "dropout": 0.0}
    attrs = {**usual, "orders": (order,) * 4, **attrs}
    out, lse = attention.attention(*nodes[:3], dict(zip(extras, nodes[3:])), **attrs)
    wrt = [n for n in nodes if n.dtype.is_float]
    seed = some(*(2 * s for s in out.shape))[tuple(slice(s) for s in out.shape)].astype(dtype.numpy)
    g = build.input_(out.shape, dtype)
    values[g] = np.ascontiguousarray(seed)
    results = [out, lse, *grad.gradients([out, lse], [g, build.like(lse, 0.5)], wrt)]
    return results, values


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", ["bhtd", "bthd"])
@pytest.mark.parametrize("name", CASES)
def test_compiled(name, order, monkeypatch) -> None:
    monkeypatch.setattr(expand, "why_not", lambda node, target: "a test")
    check(*graph_of(name, order, dtypes.float32), 3e-5)


def test_compiled_in_bfloat16(monkeypatch) -> None:
    monkeypatch.setattr(expand, "why_not", lambda node, target: "a test")
    check(*graph_of("band", "bthd", dtypes.bfloat16), 2e-2)


def check(results, values, tolerance) -> None:
    """The compiled results against the interpreted ones."""
    wanted = interpret(results, values)
    _, stages = run_pipeline(list(values), results, host())
    fired = [rule for s in stages for rule in s.fired]
    assert {"attention (a test)", "attention_backward (a test)"} <= set(fired)
    assert not any(n.op.category == "attention" for n in topological(stages[-1].results))
    executable = compile_for(list(values), results, host())
    found = executable.run([Buffer.wrap(x) for x in values.values()])
    for node, buffer, expected in zip(results, found, wanted):
        got = buffer.array(node.shape, node.dtype).astype(np.float64)
        expected = expected.astype(np.float64)
        scale = max(1.0, np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * scale)


def test_what_a_kernel_takes_stays(monkeypatch) -> None:
    monkeypatch.setattr(expand, "why_not", lambda node, target: "")
    results, values = graph_of("plain", "bhtd", dtypes.float32)
    made, stages = run_pipeline(list(values), results, host())
    groups = [n.op for n in topological(made) if n.op.category == "attention"]
    assert set(groups) == {ops.attention, ops.attention_backward}
    assert not any("attention" in rule for s in stages for rule in s.fired)
