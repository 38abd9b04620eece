"""kernels/paged_attention_cpu.py: attention over a paged cache, compiled and interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilegrad.compiler.compile import compile_for, host
from tilegrad.core.dtype import DType, bfloat16, float8_e4m3, float16, float32
from tilegrad.core.target import AVX2, AVX512, SSE2, Target
from tilegrad.graph import build, ops
from tilegrad.kernels import paged_attention_cpu as paged
from tilegrad.kernels import paged_reference
from tilegrad.kernels.paged_shape import PagedShape
from tilegrad.runtime.buffer import Buffer
from tilegrad.tile import interpret
from tilegrad.tile.build import prune
from tilegrad.tile.check import verify_body

TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1e-3}


def problem(
    lengths: list[int], new: list[int], heads: tuple[int, int] = (4, 2), page: int = 16,
    dtype: DType = float32, cache: DType | None = None, rest: int = 2, **options: Any,
) -> tuple[PagedShape, list[np.ndarray], np.ndarray]:  # fmt: skip
    """A shape, the kernel's arguments and the result by definition; unused keys are nan."""
    random = np.random.default_rng(3)
    cache, requests, tokens = cache or dtype, len(lengths), sum(new) + rest
    most = max(1, *(-(-n // page) for n in lengths))
    pages = requests * most + 1
    x = PagedShape(*heads, 24, 40, page, tokens, requests, pages, most, 0.2, dtype, cache,
                   **options)  # fmt: skip
    q = random.standard_normal((tokens, heads[0], 24)).astype(dtype.numpy)
    keys, values = (random.standard_normal((pages, heads[1], page, w)).astype(cache.numpy)
                    for w in (24, 40))  # fmt: skip
    table = random.permutation(pages)[: requests * most].reshape(requests, most).astype(np.int32)
    for row, length in zip(table, lengths):
        for place in range(length, most * page):
            keys[row[place // page], :, place % page] = np.nan
            values[row[place // page], :, place % page] = np.nan
    starts = np.cumsum([0, *new]).astype(np.int32)
    counts, scales = np.array(lengths, np.int32), (0.7, 1.3) if x.scaled else (1.0, 1.0)
    want = paged_reference.attention(x, q, keys, values, table, counts, starts, scales)
    given = [q, keys, values, *([np.array(scales, np.float32)] if x.scaled else [])]
    return x, [*given, table, counts, starts], want


CASES = [
    (([5, 0, 70, 33], [1, 0, 1, 1]), {}),
    (([100, 40, 200], [30, 40, 1]), {"heads": (8, 2)}),
    (([100, 40, 200], [3, 20, 1]), {"window": 17, "softcap": 3.0}),
    (([1], [1]), {"heads": (3, 3), "page": 64, "rest": 0}),
]


@pytest.mark.parametrize("case, options", CASES)
@pytest.mark.parametrize("dtype", [float32, bfloat16, float16])
def test_compiled(case: Any, options: dict[str, Any], dtype: DType) -> None:
    x, given, want = problem(*case, dtype=dtype, **options)
    assert paged.why_not(x, host()) == ""
    types = [t for _, t in paged.attend_parameters(x)][:-1]
    nodes = [build.input_(t.shape, t.dtype) for t in types]
    out = ops.call(*nodes, callee=paged.callee(x, host()))
    (buffer,) = compile_for(nodes, [out], host()).run([Buffer.wrap(a) for a in given])
    got = buffer.array(want.shape, dtype.numpy).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype.name])


@pytest.mark.parametrize("target", [SSE2, AVX2, AVX512], ids=lambda t: t.name)
@pytest.mark.parametrize("cache", [None, float8_e4m3])
def test_interpreted(target: Target, cache: DType | None) -> None:
    dtype = float32 if cache is None else bfloat16
    x, given, want = problem([5, 0, 40], [1, 0, 3], dtype=dtype, cache=cache, window=9)
    body = paged.attend(x, paged.choose(x, target))
    prune(body.block, set())
    verify_body(body, "portable", target)
    out = np.full(want.shape, 9, dtype.numpy)
    interpret.run(body, [*given, out])
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=TOLERANCE[dtype.name])


def test_the_reason_for_no_kernel() -> None:
    x, _, _ = problem([5], [1], page=8)
    assert "page" in paged.why_not(x, AVX512) and paged.why_not(x, AVX2) == ""
