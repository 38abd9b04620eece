"""The same Graphs compiled for other CPUs: run where this one can, else compiled to an object."""

import numpy as np
import pytest

from tilegrad.compiler.compile import compile_for, schedule_for
from tilegrad.compiler.flatten import recipe_of
from tilegrad.core import dtype as dtypes
from tilegrad.core.errors import InternalError
from tilegrad.core.target import AVX2, AVX512, NEON, SSE2, Target
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.runtime.buffer import Buffer
from tilegrad.targets.llvm.driver import compile_text
from tilegrad.targets.llvm.target import host_target


def graphs():
    """Softmax, a reduction by columns, matmuls, a gather: name, inputs, outputs."""
    x = build.input_((13, 37), dtypes.float32)
    top = build.max_(x, 1, True)
    e = ops.exp(build.subtract(x, top))
    yield "softmax", [x], [build.divide(e, build.sum_(e, 1, True))]
    yield "columns", [x], [build.sum_(x, 0)]
    w, b = build.input_((37, 50), dtypes.float32), build.input_((50,), dtypes.float32)
    yield "linear", [x, w, b], [ops.tanh(build.add(build.matmul(x, w), b))]
    half = build.input_((20, 70), dtypes.bfloat16), build.input_((70, 33), dtypes.bfloat16)
    yield "bfloat16", list(half), [build.matmul(*half)]
    i = build.input_((9,), dtypes.int64)
    yield "gather", [x, i], [build.gather(x, [i], [0])]


def random_inputs(nodes):
    rng = np.random.default_rng(0)
    for node in nodes:
        if node.dtype.is_float:
            yield rng.standard_normal(node.shape).astype(node.dtype.numpy)
        else:
            yield rng.integers(0, 13, node.shape).astype(node.dtype.numpy)


CASES = {name: (inputs, outputs) for name, inputs, outputs in graphs()}


def same_machine(target: Target) -> bool:
    """Whether a Target's instructions are of this machine's kind."""
    return target.triple.split("-")[0] == host_target().triple.split("-")[0]


@pytest.mark.parametrize("target", [SSE2, AVX2, AVX512, NEON], ids=lambda t: t.name)
@pytest.mark.parametrize("name", CASES)
def test_runs_on_narrower_vectors(name: str, target: Target) -> None:
    if not same_machine(target) or host_target().vector_bytes < target.vector_bytes:
        pytest.skip("this machine has no such vectors")
    inputs, outputs = CASES[name]
    data = list(random_inputs(inputs))
    executable = compile_for(inputs, outputs, target.with_cores(2))
    found = executable.run([Buffer.wrap(d) for d in data])
    expected = interpret(outputs, dict(zip(inputs, data)))
    for node, buffer, wanted in zip(outputs, found, expected):
        got = buffer.array(node.shape, node.dtype).astype(np.float64)
        loose = 2e-2 if node.dtype.bits == 16 else 2e-6
        np.testing.assert_allclose(got, wanted.astype(np.float64), rtol=loose, atol=loose * 10)


def test_code_of_another_machine_is_refused() -> None:
    """It would end the process; it is compiled and not run."""
    inputs, outputs = CASES["columns"]
    (foreign,) = [t for t in (SSE2, NEON) if not same_machine(t)]
    with pytest.raises(InternalError, match="not run"):
        compile_for(inputs, outputs, foreign.with_cores(2))


@pytest.mark.parametrize("target", [NEON, SSE2, AVX512], ids=lambda t: t.name)
@pytest.mark.parametrize("name", CASES)
def test_compiles_for_others(name: str, target: Target) -> None:
    inputs, outputs = CASES[name]
    target = target.with_cores(2)
    _, texts = recipe_of(schedule_for(inputs, outputs, target), target)
    assert texts
    for text in texts.values():
        assert compile_text(text, target)[:4] == b"\x7fELF"
