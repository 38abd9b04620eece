"""kernels/paged/attention_cpu.py: attention over a paged cache, compiled and interpreted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cache_numbers import sinks_of

from tilegrad.compiler.compile import compile_for, host
from tilegrad.compiler.pipeline import fitted
from tilegrad.core.dtype import DType, bfloat16, float8_e4m3, float16, float32, int8
from tilegrad.core.target import AVX2, AVX512, SSE2, Target
from tilegrad.graph import build, ops, paged_reference
from tilegrad.ir.types import Tuple
from tilegrad.kernels.paged import attention_cpu as paged
from tilegrad.kernels.paged import call
from tilegrad.kernels.paged.shape import PagedShape
from tilegrad.runtime.buffer import Buffer
from tilegrad.targets.llvm.emit import emit
from tilegrad.tile import interpret
from tilegrad.tile.build import prune
from tilegrad.tile.callee import KernelCallee, parse_callee
from tilegrad.tile.check import verify_body
from tilegrad.tile.legalize import legalize

TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 1e-3}


def problem(
    lengths: list[int],
    new: list[int],
    heads: tuple[int, int] = (4, 2),
    page: int = 16,
    dtype: DType = float32,
    cache: DType | None = None,
    rest: int = 2,
    most: int = 1,
    **options: Any,
) -> tuple[PagedShape, list[np.ndarray], np.ndarray]:
    """A shape, the kernel's arguments and the result by definition; unused keys are nan."""
    random = np.random.default_rng(3)
    cache, requests, tokens = cache or dtype, len(lengths), sum(new) + rest
    most = max(most, *(-(-n // page) for n in lengths))
    pages = requests * most + 1
    x = PagedShape(
        *heads, 24, 40, page, tokens, requests, pages, most, 0.2, dtype, cache, **options
    )
    q = random.standard_normal((tokens, heads[0], 24)).astype(dtype.numpy)
    scales = random.uniform(0.01, 0.03, (2, heads[1])) * (1 if cache is int8 else 50)
    scales = scales.astype(np.float32) if x.scaled else np.ones((2, 1), np.float32)
    keys, values = (
        paged_reference.kept(random.standard_normal((pages, heads[1], page, w)) / s, cache.numpy)
        for w, s in zip((24, 40), scales[:, :, None, None])
    )
    table = random.permutation(pages)[: requests * most].reshape(requests, most).astype(np.int32)
    for row, length in zip(table, lengths):
        for place in range(length, most * page):
            for memory in (keys, values):
                memory[row[place // page], :, place % page] = np.nan if cache.is_float else 99
    starts = np.cumsum([0, *new]).astype(np.int32)
    counts = np.array(lengths, np.int32)
    sinks = sinks_of(x)
    want = paged_reference.attention(x, q, keys, values, table, counts, starts, scales, *sinks)
    given = [q, keys, values, *([scales] if x.scaled else [])]
    return x, [*given, table, counts, starts, *sinks], want


CASES = [
    (([5, 0, 70, 33], [1, 0, 1, 1]), {}),
    (([100, 40, 200], [30, 40, 1]), {"heads": (8, 2)}),
    (([100, 40, 200], [3, 20, 1]), {"window": 17, "softcap": 3.0}),
    (([100, 40, 200, 0], [3, 20, 1, 1]), {"window": 17, "sinks": True}),
    (([100, 0, 20], [3, 1, 20]), {"softcap": 3.0, "sinks": True, "heads": (8, 2)}),
    (([100, 20], [3, 1]), {"sinks": True, "heads": (8, 2), "cache": int8}),
    (([1], [1]), {"heads": (3, 3), "page": 64, "rest": 0}),
    (([100, 40, 7], [3, 20, 1]), {"page": 4}),  # fewer keys than a vector has lanes
    (([100, 40, 7], [3, 20, 1]), {"page": 12}),
    (([50, 40, 7], [3, 20, 1]), {"page": 5}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case, options", CASES)
@pytest.mark.parametrize("dtype", [float32, bfloat16, float16])
def test_compiled(case: Any, options: dict[str, Any], dtype: DType) -> None:
    x, given, want = problem(*case, dtype=dtype, **options)
    np.testing.assert_allclose(called(x, given, host()), want, rtol=0, atol=TOLERANCE[dtype.name])


def kernel(x: PagedShape, target: Target) -> KernelCallee:
    """The kernel as a Graph calls it."""
    return call.called(paged.attend, x, paged.choose(x, target), paged.parts_of(x, target))


def called(x: PagedShape, given: list[np.ndarray], target: Target) -> np.ndarray:
    """The result as a Graph that calls the kernel gives it."""
    types = [t for _, t in paged.attend_parameters(x)][:-1]
    nodes = [build.input_(t.shape, t.dtype) for t in types]
    made = ops.call(*nodes, callee=kernel(x, target))
    out = build.items(made)[0] if isinstance(made.type, Tuple) else made
    (buffer,) = compile_for(nodes, [out], target).run([Buffer.wrap(a) for a in given])
    return buffer.array((x.tokens, x.heads, x.value_width), x.dtype.numpy).astype(np.float64)


EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 0, 640]
SPLIT: dict[str, tuple[tuple[list[int], list[int]], int, dict[str, Any]]] = {
    "edges": ((EDGES, [min(1, n) for n in EDGES]), 2, {"heads": (9, 3), "page": 64}),
    "one head": (([700, 3], [1, 1]), 4, {"heads": (8, 1), "page": 64}),
    "groups of 1": (([600, 550], [1, 1]), 2, {"heads": (3, 3)}),
    "groups of 4": (([600, 550], [1, 1]), 2, {"heads": (4, 1)}),
    "several tokens": (([600, 300, 40], [5, 1, 40]), 2, {"heads": (3, 1), "rest": 5}),
    "window": (([640, 530, 20], [1, 3, 1]), 2, {"heads": (9, 3), "window": 300}),
    "short window": (([640, 530], [1, 3]), 2, {"heads": (3, 1), "window": 5}),
    "softcap": (([640, 530], [1, 1]), 2, {"heads": (3, 1), "softcap": 3.0}),
    "sinks": (([640, 530, 3, 0], [1, 1, 1, 1]), 2, {"heads": (9, 3), "sinks": True}),
    "sinks, 8 bits": (
        ([640, 530, 3], [1, 2, 1]),
        2,
        {"heads": (9, 3), "sinks": True, "softcap": 3.0, "cache": int8},
    ),
    "more parts than keys": (([1, 2], [1, 2]), 8, {"heads": (3, 1), "most": 64}),
    "cache of float16": (([640, 130], [1, 2]), 2, {"heads": (9, 3), "cache": float16}),
    "cache of bfloat16": (([640, 130], [1, 1]), 2, {"heads": (3, 3), "cache": bfloat16}),
    "cache of 8 bits": (
        ([640, 130], [1, 2]),
        2,
        {"heads": (9, 3), "dtype": bfloat16, "cache": float8_e4m3},
    ),
    "cache of int8": (([640, 130], [1, 2]), 2, {"heads": (9, 3), "cache": int8}),
}


@pytest.mark.parametrize("label", SPLIT)
def test_split_keys(label: str) -> None:
    """Parts of the keys, put together by a second Body: for as many workers as said."""
    case, cores, options = SPLIT[label]
    x, given, want = problem(*case, **options)
    target = host().with_cores(cores)
    assert paged.parts_of(x, target) > 1
    np.testing.assert_allclose(called(x, given, target), want, rtol=0, atol=TOLERANCE[x.dtype.name])


def test_parts() -> None:
    """As many as workers need, none where key heads go evenly, whoever else is in the step."""
    x = problem([4096], [1], (9, 3), 64)[0]
    assert [paged.parts_of(x, AVX512.with_cores(n)) for n in (1, 2, 3, 4, 64)] == [1, 2, 1, 4, 16]
    assert paged.parts_of(replace(x, most_pages=4), AVX512.with_cores(2)) == 1, "few keys"
    more = problem([4096, 5, 6], [1, 1, 20], (9, 3), 64)[0]
    assert paged.parts_of(more, AVX512.with_cores(2)) == 2
    one = kernel(replace(x, key_heads=1, heads=3), AVX512.with_cores(1))
    assert len(one.launches) == 1 and len(one.types("store")) == 1


def test_neighbours_change_nothing() -> None:
    """A request's result has the same bits alone and beside others."""
    lengths, new = [700, 90, 650], [1, 1, 1]
    x, given, _ = problem(lengths, new, (9, 3), 64, rest=0)
    target = host().with_cores(2)
    whole = called(x, given, target)
    for r in range(3):
        q, keys, values, table, counts, _ = given
        own = [
            q[r : r + 1],
            keys,
            values,
            table[r : r + 1],
            counts[r : r + 1],
            np.array([0, 1], np.int32),
        ]
        one = called(replace(x, tokens=1, requests=1), own, target)
        np.testing.assert_array_equal(one[0], whole[r])


def test_tiles_stay_in_registers() -> None:
    """What is launched is what was written: no tile goes through memory."""
    x = problem([640], [1], (9, 3), 64)[0]
    for body, _ in kernel(x, AVX512.with_cores(2)).launches:
        assert legalize(body, AVX512) is body
        text, _ = emit(fitted(body, AVX512), "kernel", AVX512)
        assert "alloca" not in text and "memcpy" not in text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", [SSE2, AVX2, AVX512], ids=lambda t: t.name)
@pytest.mark.parametrize("cores", [2, 5])
def test_split_interpreted(target: Target, cores: int) -> None:
    x, given, want = problem([600, 3, 0, 40], [2, 1, 0, 3], heads=(3, 1), window=400)
    callee = kernel(x, target.with_cores(cores))
    assert len(callee.launches) == 2
    found = parse_callee(callee.to_text()).interpret(*given)[0]
    np.testing.assert_allclose(found.astype(np.float64), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("target", [SSE2, AVX2, AVX512], ids=lambda t: t.name)
@pytest.mark.parametrize("cache", [None, float8_e4m3, int8])
def test_interpreted(target: Target, cache: DType | None) -> None:
    dtype = float32 if cache is None else bfloat16
    x, given, want = problem([5, 0, 40], [1, 0, 3], dtype=dtype, cache=cache, window=9)
    (body,) = paged.attend(x, paged.choose(x, target))
    prune(body.block, set())
    verify_body(body, "portable", target)
    out = np.full(want.shape, 9, dtype.numpy)
    interpret.run(body, [*given, out])
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=TOLERANCE[dtype.name])


def test_the_reason_for_no_kernel() -> None:
    x, _, _ = problem([5], [1], page=8)
    assert "page" in paged.prefill_why_not(x, AVX512) and not paged.prefill_why_not(x, AVX2)
