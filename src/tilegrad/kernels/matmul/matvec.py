"""Products of one token with weights: every weight is read once, as fast as memory gives it.

`Matvec` is a kernel for one row of 16-bit floats. A program takes a few rows of the weights (n, k)
into registers, all of them asked for before anything else and before the launch before has ended,
since weights are constants; only then it waits, reads the token, multiplies, and hands its sums to
the epilogue. There are many more programs than fit on the cores at once: while some wait for
memory others multiply, and the first programs of the next launch ask for their weights while the
last ones of this are at work, so memory does not idle between launches. Several weights of one
token are taken one after another (q, k and v), or taken side by side for an epilogue that sees
all products (gate and up).

Costs: bytes of the weights once, the token (and what it is computed from) once a program from the
L2 cache; 2 operations an element. Invariant: the order of a sum over k depends on k and the Plan
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.dtype import float32
from ...core.errors import InternalError
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import high
from ...tile.build import Body, BodyBuilder
from .shape import Ask, Choice, Epilogue, Operands, among, first_wrong

LINE = 256  # elements of a line that a warp reads at once; a row is some lines
WARPS = (8, 4)  # of a program, the first number that divides a row's lines
LONG = 8192  # elements of a row beyond which a product by itself is left to the wide matmul
LONGEST = 16384  # elements of a row that a program holds in registers
EACH = 64  # elements of weights that a thread holds: 128 took 4 % longer, a step of an 8B model
SECONDS, RATE = 2e-6, 1.0  # beginning and end; share of the copy rate


@dataclass(frozen=True)
class MatvecPlan:
    """Choices of `Matvec`: rows of a program (of all weights, where it takes several), warps."""

    rows: int = 8
    warps: int = 8


def warps_of(k: int) -> int:
    """Warps of a program, each with as many lines of a row; 0 where none fit or it is too long."""
    fits = (w for w in WARPS if k % (w * LINE) == 0)
    return next(fits, 0) if k <= LONGEST else 0


def why_not(x: Operands, target: Target) -> str:
    """Why there is no such kernel for operands (not turned); '' where there is."""
    k, weights = x.k, x.weights or (x.n,)
    wrong = [
        (x.m != 1 or x.batch != 1, "one token"),
        (x.dtype.size != 2, "16-bit floats"),  # codes of 8 bits are widened too slowly
        (not x.a_along_k or not x.b_along_k, "weights are dense along k"),
        (
            not isinstance(k, int) or not warps_of(k),
            "rows are whole lines, as many for each warp",
        ),
        (any(not isinstance(n, int) or n % 8 for n in weights), "rows come in eights"),
        (not target.has_threads, "threads"),
    ]
    return first_wrong(wrong)


def choose(x: Operands, target: Target) -> Choice[MatvecPlan]:
    """A Plan: as many rows as registers hold well; weights are rows, as in a turned wide matmul."""
    warps = warps_of(high(x.k))
    each = high(x.k) // (32 * warps)  # elements of a row that a thread holds
    rows = next(r for r in (8, 4, 2, 1) if r * each <= EACH or r == 1)
    rows = max(rows, x.products)
    sizes = x.weights or (high(x.n),)
    bytes_ = sum(sizes) * high(x.k) * x.dtype.size
    seconds = SECONDS + bytes_ / (RATE * target.peak_bytes())
    return Choice(MatvecPlan(rows, warps), True, seconds)


class Matvec:
    """Builds one Body: weights and results as the schedule or a test gives them."""

    def __init__(
        self,
        x: Operands,
        plan: MatvecPlan,
        b: BodyBuilder,
        token: Callable[[], Node],
        weights: Sequence[Node],
        results: Sequence[Node],
        epilogues: Sequence[Epilogue],
        ahead: Sequence[Ask] = (),
    ) -> None:
        """weights: (n * lines, LINE) each; results: (n,) each; token() gives (lines, LINE) in
        float32; `ahead` asks for what the epilogue of a result will read."""
        self.x, self.plan, self.b, self.token = x, plan, b, tile.outside(token)
        self.weights = [tile.memory(w) for w in weights]
        self.results = [tile.memory(r) for r in results]
        self.epilogues = [tile.outside(e) for e in epilogues]
        self.ahead = [tile.outside(ask) for ask in ahead]
        self.lines = high(x.k) // LINE
        self.rows = plan.rows // x.products  # of each weight
        self.own, self.piece = 0, 0  # as the wide matmul says to its epilogues
        self.sizes = x.weights or (high(x.n),)
        kept = self.sizes[:1] if x.gated else self.sizes
        self.starts = [sum(kept[:i]) // self.rows for i in range(len(kept))]
        self.programs = sum(kept) // self.rows
        whole = self.rows and not any(n % self.rows for n in self.sizes)
        if len(self.weights) != len(self.sizes) or not whole:
            raise InternalError("kernels.matmul.matvec", f"no Body with {plan} for {x}")

    def build(self) -> Body:
        """Every program: which weight it has rows of, then all of its work."""
        with tile.into(self.b):
            self.program = tile.grid(self.programs)
            tile.grid_launch_dependents()
            among(self.program, self.starts, self.work)
        return self.b.finish((self.programs,), plan=self.plan, warps=self.plan.warps)

    def work(self, number: int) -> None:
        """Weights, the wait, the token, sums, the epilogue."""
        start, after = self.starts[number], [*self.starts, self.programs][number + 1]
        most = max(0, (after - start - 1) * self.rows)
        row = tile.hold((self.program - start) * self.rows, "row", (0, most))
        weights = self.weights if self.x.gated else [self.weights[number]]
        constant = all(w.type.use == "constant" for w in weights)
        if not constant:
            tile.grid_dependency_wait()
        loaded = [self.row_of(w, row + r) for w in weights for r in range(self.rows)]
        if constant:
            tile.grid_dependency_wait()
        for ask in self.ahead[number : number + 1]:
            ask((self.rows, 1), (0, row, 0))
        token = self.token()
        products = [tile.cast(line, float32) * token for line in loaded]
        lines = [tile.sum(p, 1) for p in products]  # threads meet once for all of them
        sums = [tile.sum(line, 0) for line in lines]
        pieces = [
            tile.stack(sums[n * self.rows : (n + 1) * self.rows]) for n in range(self.x.products)
        ]
        value = self.epilogues[number](*pieces, (0, row, 0))
        out = self.results[number]
        value = tile.reshape(tile.cast(value, out.dtype), (self.rows,))
        tile.store(out[row : row + self.rows], value)

    def row_of(self, weight: Any, row: Any) -> Any:
        """A row of a weight: so many lines of the (rows * lines, LINE) that it is stored as."""
        first = row * self.lines
        return tile.load(weight[first : first + self.lines, 0:LINE])
