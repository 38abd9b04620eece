"""kernels/paged/attention_cpu.py: many new tokens over a paged cache, compiled and interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_paged_attention_cpu import TOLERANCE, problem

from tilegrad.compiler.compile import compile_for, host
from tilegrad.core.dtype import DType, bfloat16, float8_e4m3, float16, float32
from tilegrad.core.target import AVX2, AVX512, SSE2, Target
from tilegrad.graph import build, ops
from tilegrad.ir.symbol import symbol
from tilegrad.kernels.paged import attention_cpu as paged
from tilegrad.kernels.paged.call import called
from tilegrad.kernels.paged.shape import PagedShape
from tilegrad.runtime.buffer import Buffer
from tilegrad.tile import interpret
from tilegrad.tile.callee import KernelCallee
from tilegrad.tile.check import verify_body
from tilegrad.tile.legalize import legalize

CASES = [
    (([100, 40, 200], [30, 40, 1]), {"heads": (8, 2)}),
    (([300, 0, 65], [290, 0, 65]), {"heads": (2, 1), "page": 32}),
    (([100, 40, 200], [3, 20, 100]), {"window": 17, "softcap": 3.0}),
    (([100, 40, 200], [3, 20, 100]), {"window": 17, "sinks": True}),
    (([600], [129]), {"heads": (3, 3), "page": 64, "rest": 0, "window": 300}),
    (([5, 0, 70, 33], [1, 0, 1, 1]), {}),
]


def kernel(x: PagedShape, target: Target) -> KernelCallee:
    """The kernel as a Graph calls it."""
    return called(paged.prefill, x, paged.prefill_plan(x, target))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case, options", CASES)
@pytest.mark.parametrize("dtype", [float32, bfloat16, float16])
def test_compiled(case: Any, options: dict[str, Any], dtype: DType) -> None:
    x, given, want = problem(*case, dtype=dtype, **options)
    assert paged.prefill_why_not(x, host()) == ""
    types = [t for _, t in paged.attend_parameters(x)][:-1]
    nodes = [build.input_(t.shape, t.dtype) for t in types]
    out = ops.call(*nodes, callee=kernel(x, host()))
    (buffer,) = compile_for(nodes, [out], host()).run([Buffer.wrap(a) for a in given])
    got = buffer.array(want.shape, dtype.numpy).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype.name])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cache", [float16, bfloat16])
def test_narrower_cache(cache: DType) -> None:
    """float32 queries over a cache of 16 bits."""
    x, given, want = problem([70, 40], [30, 40], (4, 2), cache=cache)
    assert paged.prefill_why_not(x, host()) == ""
    (found,) = kernel(x, host()).interpret(*given)
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-6)
    types = [t for _, t in paged.attend_parameters(x)][:-1]
    nodes = [build.input_(t.shape, t.dtype) for t in types]
    out = ops.call(*nodes, callee=kernel(x, host()))
    (buffer,) = compile_for(nodes, [out], host()).run([Buffer.wrap(a) for a in given])
    np.testing.assert_allclose(buffer.array(want.shape, np.float32), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("target", [SSE2, AVX2, AVX512], ids=lambda t: t.name)
def test_interpreted(target: Target) -> None:
    x, given, want = problem([60, 7], [40, 7], heads=(2, 1))
    body = paged.prefill(x, paged.prefill_plan(x, target))
    verify_body(body, "portable", target)
    out = np.full(want.shape, 7.0, np.float32)
    interpret.run(body, [*given, out])
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("target", [AVX2, AVX512], ids=lambda t: t.name)
def test_tiles_stay_in_registers(target: Target) -> None:
    """What is launched is what was written: no tile goes through memory."""
    x, _, _ = problem([600], [512], (9, 3), 64)
    ((body, _),) = kernel(x, target).launches
    assert legalize(body, target) is body


@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_symbols(dtype: DType) -> None:
    """One Program serves any batch within the bounds; rows and tokens that only pad get 0."""
    x, given, want = problem([100, 0, 40, 0], [30, 0, 40, 0], dtype=dtype, rest=5)
    sizes = {"tokens": symbol("tokens", 1, 256), "requests": symbol("requests", 1, 8)}
    wide = type(x)(**{**x.__dict__, **sizes})
    types = [t for _, t in paged.attend_parameters(wide)][:-1]
    nodes = [build.input_(t.shape, t.dtype) for t in types]
    out = ops.call(*nodes, callee=kernel(wide, host()))
    values = {"tokens": int(x.tokens), "requests": 4}
    (buffer,) = compile_for(nodes, [out], host()).run([Buffer.wrap(a) for a in given], values)
    got = buffer.array(want.shape, dtype.numpy).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype.name])


def test_what_is_refused() -> None:
    x, _, _ = problem([60], [40], dtype=bfloat16, cache=float8_e4m3)
    assert "dtype" in paged.prefill_why_not(x, host())
    x, _, _ = problem([60], [40], dtype=bfloat16, cache=float16)
    assert (paged.prefill_why_not(x, host()) == "") is not bool(paged.prefill_plan(x, host()).unit)
