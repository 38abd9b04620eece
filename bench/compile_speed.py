"""How fast all Graph passes of the pipeline run on 10,000 Nodes.

Prints one JSON object: seconds per graph (best of three), Nodes before and after, Rules that
fired. The claim is 2.0 s in all for each graph on one core.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable

from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.core.config import override
from tilegrad.core.dtype import float32
from tilegrad.graph import build, ops
from tilegrad.ir.node import Node, topological

UNARY = (ops.exp, ops.negative, ops.tanh, ops.square_root, ops.sign, ops.absolute)
BINARY = (ops.add, ops.subtract, ops.multiply, ops.divide, ops.maximum)


def _grow(choose: random.Random, pool: list[Node]) -> Node:
    """One more value from values of shape (8, 8)."""
    x, y = choose.choice(pool[-50:]), choose.choice(pool[-50:])
    kind = choose.randrange(12)
    if kind < 3:
        return choose.choice(UNARY)(x)
    if kind < 6:
        return choose.choice(BINARY)(x, y)
    if kind == 6:
        return build.add(x, choose.choice((0, 1, 2.5)))
    if kind == 7:
        turned = build.permute(build.reshape(x, (8, 4, 2)), (1, 2, 0))
        return build.reshape(turned, (8, 8))
    if kind == 8:
        return build.broadcast_to(build.sum_(x, 1, keep=True), (8, 8))
    if kind == 9:
        return build.matmul(x, y)
    if kind == 10:
        cut = build.slice_(x, (0, 0), (8, 4))
        return build.concatenate([cut, build.slice_(y, (0, 4), (8, 8))], 1)
    wide = build.multiply(build.unsqueeze(x, 2), build.unsqueeze(y, 0))
    return build.sum_(wide, 1)


def random_graph(count: int, seed: int = 0) -> list[Node]:
    """About `count` Nodes of every kind."""
    choose = random.Random(seed)
    pool = [build.input_((8, 8), float32) for _ in range(4)]
    while len(topological(pool)) < count:
        for _ in range(max(1, (count - len(topological(pool))) // 4)):
            pool.append(_grow(choose, pool))
    return pool


def deep_chain(count: int) -> list[Node]:
    """A chain of `count` elementwise Nodes."""
    x = build.input_((8, 8), float32)
    y = x
    for i in range(count):
        y = UNARY[i % len(UNARY)](y) if i % 3 else ops.add(y, x)
    return [y]


def run(make: Callable[[], list[Node]]) -> dict[str, float]:
    """Time, Nodes and firings of all passes on a graph."""
    best = cpu = float("inf")
    for _ in range(3):
        roots = make()
        before = len(topological(roots))
        leaves = [n for n in topological(roots) if n.op is ops.input_]
        start, busy = time.perf_counter(), time.process_time()
        with override(verify=False):
            roots, stages = run_pipeline(leaves, roots)
        best = min(best, time.perf_counter() - start)
        cpu = min(cpu, time.process_time() - busy)
    return {
        "seconds": round(best, 4),
        "cpu_seconds": round(cpu, 4),
        "nodes_before": before,
        "nodes_after": len(topological(roots)),
        "fired": sum(sum(stage.fired.values()) for stage in stages),
    }


def main() -> None:
    """Print the measurements."""
    print(
        json.dumps(
            {
                "random_10000": run(lambda: random_graph(10_000)),
                "chain_10000": run(lambda: deep_chain(10_000)),
            }
        )
    )


if __name__ == "__main__":
    main()
