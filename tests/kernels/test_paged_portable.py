"""kernels/paged/portable.py: the kernel for every Target, on the Tile interpreter and as PTX."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))

from cache_numbers import sinks_of
from simulated import run_graph

from tilegrad.core.dtype import bfloat16, float8_e4m3, float32, int8
from tilegrad.core.target import A100, AVX2, H200, Target
from tilegrad.graph import build, ops, paged_reference
from tilegrad.graph.paged_types import ATTEND, named
from tilegrad.kernels.paged import portable
from tilegrad.kernels.paged.shape import PagedShape
from tilegrad.schedule.families import rows_of
from tilegrad.schedule.outside import family_of
from tilegrad.schedule.paged import ListAttention

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 9, "softcap": 2.0},
    {"sinks": True},
    {"sinks": True, "window": 9, "softcap": 2.0},
)


def step(x: PagedShape) -> list[Any]:
    """Arguments of a step of two requests and a token of nobody; what is not a key is nan."""
    draw = np.random.default_rng(0)
    q = draw.standard_normal((x.tokens, x.heads, x.width)).astype(x.dtype.numpy)
    table = np.array([[3, 1, 99, 99], [0, 5, 2, 99]], np.int32)
    lengths, starts = np.array([18, 33], np.int32), np.array([0, 3, 4], np.int32)
    caches = []
    for width in (x.width, x.value_width):
        made = draw.standard_normal((x.pages, x.key_heads, x.page, width)).astype(np.float32)
        used = np.zeros((x.pages, x.page), bool)
        for pages, length in zip(table, lengths):
            for key in range(length):
                used[pages[key // x.page], key % x.page] = True
        made.swapaxes(1, 2)[~used] = np.nan
        caches.append(made)
    scales = draw.uniform(0.01, 0.03, (2, x.key_heads)).astype(np.float32)
    if x.scaled:
        caches = [c / s[:, None, None] for c, s in zip(caches, scales)]
    kept = [paged_reference.kept(c, x.cache.numpy) for c in caches]
    return [q, *kept, *([scales] if x.scaled else []), table, lengths, starts, *sinks_of(x)]


def expected(x: PagedShape, given: list[Any]) -> Any:
    """What the step gives by definition."""
    return paged_reference.attention(x, **named(ATTEND, given))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", [AVX2, A100, H200], ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=str)
@pytest.mark.parametrize("cache", [None, float8_e4m3, int8], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_interpreted(target: Target, dtype: Any, cache: Any, options: dict[str, Any]) -> None:
    x = PagedShape(6, 2, 40, 24, 12, 5, 2, 8, 4, 0.2, dtype, cache or dtype, **options)
    given = step(x)
    (found,) = portable.attend(x, target).interpret(*given)
    wanted = expected(x, given)
    within = 1e-5 if dtype is float32 else 2e-2
    np.testing.assert_allclose(found.astype(float), wanted, atol=within, rtol=within)


@pytest.mark.parametrize("target, cache", [(A100, bfloat16), (A100, int8), (H200, float8_e4m3)])
def test_simulated(target: Target, cache: Any) -> None:
    x = PagedShape(4, 2, 32, 32, 16, 5, 2, 8, 4, 0.2, window=9, cache=cache, sinks=cache is int8)
    given = step(x)
    callee = portable.attend(x, target)
    inputs = [build.input_(t.shape, t.dtype) for t in callee.types("read")]
    (found,) = run_graph(inputs, [ops.call(*inputs, callee=callee)], given, target=target)
    wanted = expected(x, given)
    np.testing.assert_allclose(found.astype(float), wanted, atol=2e-2, rtol=2e-2)


def test_who_takes_a_step() -> None:
    """The list of work where it fits shared memory, else this kernel, also without matrix units: a
    fallback."""
    node: Any = SimpleNamespace(attrs={"single": True})
    shared = replace(A100.memories["shared"], bytes=99 << 10)
    small = replace(A100, memories={**A100.memories, "shared": shared})
    rest = {name: space for name, space in A100.memories.items() if name != "shared"}
    bare = replace(A100, matrix=(), memories=rest)
    for target, width, listed in ((A100, 256, True), (small, 256, False), (bare, 128, False)):
        x = PagedShape(32, 8, width, width, 16, 8, 8, 4096, 128, 0.1)
        families = [family_of(row) for row in rows_of("paged_attention", "paged_attention", target)]
        assert [f.name for f in families if f.fallback] == ["paged attention on threads"]
        assert any(isinstance(f, ListAttention) for f in families) is (target is not bare)
        if target is not bare:
            assert isinstance(ListAttention.kernels(Mock(), node, x, target), str) is not listed
