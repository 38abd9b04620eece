"""Paged caches of 16 and 8 bits on a machine with a GPU: run by hand or by run_all.py.

    PYTHONPATH=src python tests/gpu/cache_checks.py [--device cpu]

Steps of prompts, of single tokens and of both over caches of bfloat16, e4m3 and int8, with scales
that differ by layer and head: what lies in the pages, and attention over it, beside
`graph.paged_reference` in float64. Prints one row per case and ends with a status other than 0 if
any failed.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

import tilegrad as tg
from tilegrad.graph import paged_reference as reference
from tilegrad.ir.symbol import symbol
from tilegrad.nn import PagedCache

KEPT = {"bfloat16": tg.bfloat16, "fp8": tg.float8_e4m3, "int8": tg.int8}
SHAPES = (
    (32, 8, 128),
    (9, 3, 64),
    (8, 1, 256),
    (28, 4, 128),
    (6, 2, 96),
)  # heads, key heads, width
# new tokens of each request (prompts, single tokens, both), then those of no request, which get 0
STEPS = (
    ((70, 5, 1, 200), 0),
    ((1, 1, 1, 1), 0),
    ((1, 0, 130, 3), 30),
    ((1, 1, 1, 1), 2),
    ((0, 1, 0, 0), 5),
)
LAYERS, REQUESTS = 2, 4
ALLOWED = 1.5e-2  # of the largest result


class Run:
    """A cache on a device, and what it should hold."""

    def __init__(self, kept: Any, shape: tuple[int, int, int], page: int, device: str) -> None:
        self.heads, self.key_heads, self.width = shape
        self.rng, self.page, self.device, self.kept = np.random.default_rng(0), page, device, kept
        most = -(-512 // page)
        scales = self.rng.uniform(0.5, 1.0, (LAYERS, 2, self.key_heads))
        self.scales = (scales / (1 if kept is tg.float8_e4m3 else 32)).astype(np.float32)
        if kept.bits != 8:
            self.scales = np.ones_like(self.scales)
        self.cache = PagedCache(
            LAYERS,
            REQUESTS * most,
            page,
            self.key_heads,
            self.width,
            requests=REQUESTS,
            most_pages=most,
            dtype=kept,
            scales=self.scales,
            device=device,
        )
        self.table = self.rng.permutation(REQUESTS * most).reshape(REQUESTS, most).astype(np.int32)
        self.lengths = np.zeros(REQUESTS, np.int32)
        self.frequencies = (1e4 ** (-np.arange(self.width // 2) / 32)).astype(np.float32)
        speeds = tg.tensor(self.frequencies, device=device)

        def step(cache: Any, q: Any, k: Any, v: Any, table: Any, lengths: Any, starts: Any) -> Any:
            places = (table, lengths, starts)
            return [cache.step(i, q, k, v, *places, frequencies=speeds) for i in range(LAYERS)]

        tokens = symbol("tokens", 1, 512)
        self.step = tg.jit(step, dynamic={name: {0: tokens} for name in "qkv"})

    def drawn(self, tokens: int, heads: int) -> Any:
        """Random bfloat16."""
        made = self.rng.standard_normal((tokens, heads, self.width)) * 2
        return made.astype(ml_dtypes.bfloat16)

    def worst(self, counts: tuple[int, ...], nobody: int) -> float:
        """One step: how far off its results are, of the largest; pages must be right."""
        total = sum(counts) + nobody
        q, k, v = (self.drawn(total, n) for n in (self.heads, self.key_heads, self.key_heads))
        self.lengths = self.lengths + np.array(counts, np.int32)
        starts = np.cumsum([0, *counts]).astype(np.int32)
        places = (self.table, self.lengths, starts)
        sides = zip(self.cache.keys, self.cache.values)
        before = [tuple(m.numpy().copy() for m in pair) for pair in sides]
        given = (tg.tensor(a, device=self.device) for a in (q, k, v, *places))
        found = [out.numpy().astype(np.float64) for out in self.step(self.cache, *given)]
        rotation = SimpleNamespace(width=self.width, interleaved=False, factor=1.0)
        scores = SimpleNamespace(scale=self.width**-0.5, window=0, softcap=0.0)
        worst = 0.0
        for layer in range(LAYERS):
            wide = [m.astype(np.float64) for m in before[layer]]
            scales = self.scales[layer]
            turned = reference.append(rotation, q, k, v, self.frequencies, *places, *wide, scales)
            after = [m[layer].numpy() for m in (self.cache.keys, self.cache.values)]
            for near, exact in zip(after, wide):
                self.agree(near, exact)
            turned = turned.astype(ml_dtypes.bfloat16)
            want = reference.attention(scores, turned, *after, *places, scales)
            worst = max(worst, float(np.abs(found[layer] - want).max() / np.abs(want).max()))
            if found[layer][starts[-1] :].any():
                raise AssertionError("tokens of no request have other results than 0")
        return worst

    def agree(self, near: Any, exact: Any) -> None:
        """Pages hold what they should, to one rounding."""
        exact = np.clip(exact, float(self.kept.lowest), float(self.kept.highest))
        within = {8: 0.51 if self.kept is tg.int8 else 2.0**-4}.get(self.kept.bits, 2.0**-8)
        apart = np.abs(near.astype(np.float64) - exact)
        room = within if self.kept is tg.int8 else within * np.abs(exact) + 2.0**-9
        if not (apart <= room).all():
            raise AssertionError(f"a page is off by {apart.max()}")


def main() -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of them")
    given, failed = parser.parse_args(), 0
    for name, kept in KEPT.items():
        for shape in SHAPES[: given.shapes]:
            for page in (16, 64):
                label = f"cache {name} heads {shape[0]}/{shape[1]} width {shape[2]} page {page}"
                try:
                    run = Run(kept, shape, page, given.device)
                    worst = max(run.worst(*step) for step in STEPS)
                    right = worst <= ALLOWED
                    print(f"{'ok  ' if right else 'FAIL'} {label}: {worst:.1e}", flush=True)
                    failed += not right
                except Exception:
                    failed += 1
                    print(f"FAIL {label}\n{traceback.format_exc()}", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
