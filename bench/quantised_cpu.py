"""Products with quantised weights on a CPU, at the shapes of SmolLM2-135M.

    python bench/quantised_cpu.py                       Q4_1 layers and a Q8_0 head, 1 to 512 tokens
    python bench/quantised_cpu.py --tokens 1,8 --layers 4
    python bench/quantised_cpu.py --format Q4_0         another Format for the layers
    python bench/quantised_cpu.py --each                every shape by itself (warm in cache)

Random weights of as many layers as said in one piece of memory, all products of a step in one
compiled function; prefill leaves out the head. Bytes are those of the packed weights, the
floor is what reading them takes at the rate that this machine reads memory now: the best of many
repeats of both, since neighbours disturb. The relative error is that of a sample of rows.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tilegrad as tg
from tilegrad.core.config import config
from tilegrad.core.format import BY_NAME, Format
from tilegrad.exchange.mapped import Stored
from tilegrad.tensor.quantised import Packed, Room, pack, quantised_matmul

SHAPES = (("q+k+v", 960, 576), ("o", 576, 576), ("gate+up", 3072, 576), ("down", 576, 1536))
HEAD = ("head", 49152, 576)
READ = 256 << 20  # bytes read by each thread for the floor


def best(run: Callable[[], Any], seconds: float) -> float:
    """The least seconds of a call, of as many as fit."""
    run()
    found, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop or found == float("inf"):
        start = time.perf_counter()
        run()
        found = min(found, time.perf_counter() - start)
    return found


def read_rate(threads: int, seconds: float = 2.0) -> float:
    """Bytes/s that threads read from memory together."""
    arrays = [np.ones(READ // 8, np.int64) for _ in range(threads)]

    def run() -> None:
        own = [threading.Thread(target=a.max) for a in arrays]
        for thread in own:
            thread.start()
        for thread in own:
            thread.join()

    return threads * READ / best(run, seconds)


def random_weights(form: Format, rows: int, columns: int, seed: int) -> Stored:
    """Weights as a file stores them; few different rows, since packing them takes long."""
    draw = np.random.default_rng(seed)
    some = form.pack(draw.standard_normal((min(rows, 256), columns)).astype(np.float32) * 0.05)
    raw = np.resize(some, (rows, some.shape[1]))
    return Stored("w", (rows, columns), form, raw)


class Model:
    """The weights of a step."""

    def __init__(self, form: Format, head: Format, layers: int) -> None:
        made = [(n, random_weights(form, r, c, i)) for i in range(layers) for n, r, c in SHAPES]
        made.append((HEAD[0], random_weights(head, *HEAD[1:], 99)))
        self.stored = dict(made)
        start = time.perf_counter()
        room = Room([[s] for _, s in made])
        self.packed: list[tuple[str, Packed]] = [(n, pack(s, "cpu", room)) for n, s in made]
        self.seconds = time.perf_counter() - start
        self.bytes = sum(p.bytes for _, p in self.packed)

    def tokens(self, count: int) -> dict[int, Any]:
        """Tokens for each number of columns."""
        draw = np.random.default_rng(count)
        return {
            c: tg.tensor(draw.standard_normal((count, c)).astype(np.float32))
            for c in {c for _, _, c in SHAPES}
        }

    def error(self, name: str, x: Any, got: Any) -> float:
        """Largest error of a result, as a share of its largest element."""
        w = self.stored[name].values().astype(np.float64)
        want = x.numpy().astype(np.float64) @ w.T
        return float(np.abs(got.numpy() - want).max() / np.abs(want).max())


def step(xs: dict[int, Any], weights: list[Packed]) -> list[Any]:
    """All products of a step."""
    return [quantised_matmul(xs[p.shape[1]], p) for p in weights]


def whole(model: Model, counts: list[int], seconds: float, rate: float) -> None:
    """A step's products together."""
    print(
        f"\n{'tokens':>6} {'ms':>9} {'tokens/s':>10} {'GB/s':>7} {'GMAC/s':>8} {'floor ms':>9}"
        f" {'error':>8}"
    )
    for count in counts:
        used = model.packed if count <= 24 else model.packed[:-1]
        xs, weights = model.tokens(count), [p for _, p in used]
        function = tg.jit(step)
        took = best(lambda f=function, a=xs, b=weights: f(a, b), seconds)
        found = function(xs, weights)
        size = sum(p.bytes for p in weights)
        work = count * sum(p.shape[0] * p.shape[1] for p in weights)
        last = len(SHAPES) - 1
        wrong = max(
            model.error(n, xs[p.shape[1]], y) for (n, p), y in list(zip(used, found))[-1 - last :]
        )
        print(
            f"{count:6d} {took * 1e3:9.3f} {count / took:10.1f} {size / took / 1e9:7.1f}"
            f" {work / took / 1e9:8.1f} {size / rate * 1e3:9.3f} {wrong:8.1e}"
        )


def each(model: Model, counts: list[int], seconds: float) -> None:
    """Every shape by itself."""
    print(f"\n{'shape':>8} {'tokens':>6} {'us':>9} {'GB/s':>7} {'GMAC/s':>8}")
    for name, packed in (*model.packed[: len(SHAPES)], model.packed[-1]):
        for count in counts:
            if name == HEAD[0] and count > 24:
                continue
            x, function = model.tokens(count)[packed.shape[1]], tg.jit(quantised_matmul)
            took = best(lambda f=function, a=x, b=packed: f(a, b), seconds)
            work = count * packed.shape[0] * packed.shape[1]
            print(
                f"{name:>8} {count:6d} {took * 1e6:9.1f} {packed.bytes / took / 1e9:7.1f}"
                f" {work / took / 1e9:8.1f}"
            )


def main() -> None:
    """Read the arguments, pack and time."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--format", default="Q4_1", choices=[n for n, f in BY_NAME.items() if f.packer]
    )
    parser.add_argument(
        "--head", default="Q8_0", choices=[n for n, f in BY_NAME.items() if f.packer]
    )
    parser.add_argument("--tokens", default="1,2,4,8,16,32,128,512")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=2.0, help="of repeats of each case")
    parser.add_argument("--each", action="store_true")
    given = parser.parse_args()
    counts = [int(c) for c in given.tokens.split(",")]
    threads = config().threads
    rate = read_rate(threads)
    print(f"{threads} threads read {rate / 1e9:.1f} GB/s")
    model = Model(BY_NAME[given.format], BY_NAME[given.head], given.layers)
    print(f"packed {model.bytes / 1e6:.1f} MB in {model.seconds:.3f} s")
    if given.each:
        each(model, counts, given.seconds)
    else:
        whole(model, counts, given.seconds, rate)


if __name__ == "__main__":
    main()
