"""Attention over packed sequences on a machine with a GPU: run by hand or by run_all.py.

    PYTHONPATH=src python tests/gpu/packed_checks.py [--device cpu]

Tokens before the first start and from the last end on belong to no sequence: their results and
gradients are 0, whatever memory held before (it is filled with numbers first). All results and
gradients are compared with the same in float64, sequence by sequence. Prints one row per case and
ends with a status other than 0 if any failed.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import Any

import ml_dtypes
import numpy as np

import tilegrad as tg

ALLOWED = 2e-2  # of the largest
# heads, key heads, width; starts of queries and of keys; how many tokens there are of each
CASES: dict[str, Any] = {
    "all sequences": ((4, 2, 64), (0, 70, 200), (0, 70, 200), 200, 200),
    "before and behind": ((4, 2, 64), (5, 70, 150), (5, 70, 150), 200, 200),
    "a longer tail": ((8, 8, 128), (130, 140, 300), (130, 140, 300), 1000, 1000),
    "keys of other places": ((4, 1, 128), (3, 64, 65, 190), (0, 100, 100, 240), 256, 300),
    "nothing at all": ((2, 1, 64), (0, 0), (0, 0), 90, 90),
    "width 256": ((2, 2, 256), (7, 60), (7, 60), 100, 100),
}


def plain(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, begins: Any, keys: Any, causal: bool
) -> np.ndarray:
    """In float64, sequence by sequence; tokens of none are 0."""
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    for i in range(len(begins) - 1):
        a, b, c, d = begins[i], begins[i + 1], keys[i], keys[i + 1]
        for h in range(len(q)):
            of = h * len(k) // len(q)
            if a == b or c == d:
                continue
            scores = q[h, a:b] @ k[of, c:d].T * q.shape[-1] ** -0.5
            if causal:
                scores = np.where(np.tri(b - a, d - c, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[h, a:b] = weights / weights.sum(-1, keepdims=True) @ v[of, c:d]
    return out


def soil(device: str) -> None:
    """Fill memory that is free with numbers, so that what is not written is seen."""
    for _ in range(3):
        kept = [tg.full((1 << 20,), 777.0, device=device) + i for i in range(8)]
        for x in kept:
            x.realize()


def worst(found: Any, want: np.ndarray) -> float:
    """The largest error, as a share of the largest value."""
    got = found.numpy().astype(np.float64)
    error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-3)
    return float(error) if np.isfinite(got).all() else float("inf")


def check(case: Any, causal: bool, device: str) -> dict[str, float]:
    """Errors of the result and of the three gradients."""
    (heads, key_heads, width), begins, keys, queries, lines = case
    rng, rounded = np.random.default_rng(len(begins)), ml_dtypes.bfloat16
    sizes = ((heads, queries), (key_heads, lines), (key_heads, lines), (heads, queries))
    q, k, v, g = (rng.standard_normal((*s, width)).astype(rounded) for s in sizes)
    starts = [tg.tensor(np.array(s, np.int32)).to(device) for s in (begins, keys)]
    soil(device)
    given = [tg.tensor(x[None]).to(device).requires_grad_() for x in (q, k, v)]
    out = tg.attention(*given, causal=causal, query_starts=starts[0], key_starts=starts[1])
    out.backward(tg.tensor(g[None]).to(device))
    exact = [x.astype(np.float64) for x in (q, k, v, g)]
    found = {"out": worst(out[0], plain(*exact[:3], begins, keys, causal))}
    # The gradient along a direction, and zeros where there is no sequence.
    outside = np.ones(queries, bool), np.ones(lines, bool)
    outside[0][begins[0] : begins[-1]] = False
    outside[1][keys[0] : keys[-1]] = False
    for i, (name, x) in enumerate(zip("qkv", given)):
        grad = x.grad[0].numpy().astype(np.float64)
        rest = grad[:, outside[0 if name == "q" else 1]]
        direction, step = rng.standard_normal(grad.shape), 1e-4
        two = []
        for sign in (1, -1):
            moved = [e + sign * step * direction if j == i else e for j, e in enumerate(exact[:3])]
            two.append((plain(*moved, begins, keys, causal) * exact[3]).sum())
        slope, scale = (two[0] - two[1]) / (2 * step), np.linalg.norm(grad)
        error = abs(slope - (grad * direction).sum()) / max(scale, 1e-3)
        found[name] = float(error if np.isfinite(grad).all() and not rest.any() else np.inf)
    return found


def main() -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    device, failed = parser.parse_args().device, 0
    for name, case in CASES.items():
        for causal in (False, True):
            try:
                errors = check(case, causal, device)
                good = all(e < ALLOWED for e in errors.values())
                text = ", ".join(f"{what} {e:.1e}" for what, e in errors.items())
            except Exception:  # one case that fails must not hide the others
                good, text = False, traceback.format_exc(limit=3)
            failed += not good
            print(f"{'ok' if good else 'FAIL'} {name}{', causal' * causal}: {text}", flush=True)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
