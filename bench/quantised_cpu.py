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
from tilegrad.tensor.stored import bytes_to_prepare, stored

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
        self.weights = [(n, stored(s)) for n, s in made]
        start = time.perf_counter()
        rows = [tg.tensor([0]) for _ in made]  # what prepares the weights, and hardly more
        tg.jit(lambda rows: [w[i] for i, (_, w) in zip(rows, self.weights)])(rows)
        self.seconds = time.perf_counter() - start
        self.bytes = bytes_to_prepare([w for _, w in self.weights], "cpu")

    def tokens(self, count: int, weights: list[Any]) -> list[Any]:
        """Tokens for each of some weights: those that had the same would be one product."""
        draw = np.random.default_rng(count)
        return [
            tg.tensor(draw.standard_normal((count, w.shape[1])).astype(np.float32)) for w in weights
        ]

    def error(self, name: str, x: Any, got: Any) -> float:
        """Largest error of a result, as a share of its largest element."""
        w = self.stored[name].values().astype(np.float64)
        want = x.numpy().astype(np.float64) @ w.T
        return float(np.abs(got.numpy() - want).max() / np.abs(want).max())


def products(weights: list[Any]) -> Any:
    """A compiled function of tokens for each of some weights: all their products."""
    return tg.jit(lambda xs: [x @ w.T for x, w in zip(xs, weights)])


def whole(model: Model, counts: list[int], seconds: float, rate: float) -> None:
    """A step's products together."""
    print(
        f"\n{'tokens':>6} {'ms':>9} {'tokens/s':>10} {'GB/s':>7} {'GMAC/s':>8} {'floor ms':>9}"
        f" {'error':>8}"
    )
    for count in counts:
        used = model.weights if count <= 24 else model.weights[:-1]
        weights = [w for _, w in used]
        xs, function = model.tokens(count, weights), products(weights)
        took = best(lambda f=function, a=xs: f(a), seconds)
        found = function(xs)
        size = bytes_to_prepare(weights, "cpu")
        work = count * sum(w.shape[0] * w.shape[1] for w in weights)
        last = len(SHAPES) - 1
        wrong = max(
            model.error(n, x, y) for (n, _), x, y in list(zip(used, xs, found))[-1 - last :]
        )
        print(
            f"{count:6d} {took * 1e3:9.3f} {count / took:10.1f} {size / took / 1e9:7.1f}"
            f" {work / took / 1e9:8.1f} {size / rate * 1e3:9.3f} {wrong:8.1e}"
        )


def each(model: Model, counts: list[int], seconds: float) -> None:
    """Every shape by itself."""
    print(f"\n{'shape':>8} {'tokens':>6} {'us':>9} {'GB/s':>7} {'GMAC/s':>8}")
    for name, weights in (*model.weights[: len(SHAPES)], model.weights[-1]):
        for count in counts:
            if name == HEAD[0] and count > 24:
                continue
            xs, function = model.tokens(count, [weights]), products([weights])
            took = best(lambda f=function, a=xs: f(a), seconds)
            work = count * weights.shape[0] * weights.shape[1]
            size = bytes_to_prepare([weights], "cpu")
            print(
                f"{name:>8} {count:6d} {took * 1e6:9.1f} {size / took / 1e9:7.1f}"
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
