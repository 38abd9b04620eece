"""Products of one token with weights: every weight is read once, as fast as memory gives it.

`Matvec` is a kernel for one row of 16-bit floats. A program takes a few rows of the weights (n, k)
into registers, all of them asked for before anything else and before the launch before has ended,
since weights are constants; only then it waits, reads the token, multiplies, and hands its sums to
the epilogue. There are many more programs than fit on the cores at once: while some wait for
memory others multiply, and the first programs of the next launch ask for their weights while the
last ones of this are at work, so memory does not idle between launches. Several weights of one
token are taken one after another (q, k and v), or taken side by side for an epilogue that sees
all products (gate and up).

`GroupedMatvec` has the few rows of one or two tokens that go to experts: a program takes some rows
of a group's weights, and all rows of the group. Which weights those are is known when the launch
before has ended.

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
from ..grouped import block_at, listed
from .shape import Ask, Choice, Epilogue, Operands, among, first_wrong

LINES = (256, 128, 64)  # elements of a line that a warp reads at once; a row is some lines
WARPS = (8, 4, 2, 1)  # of a program, the first number that divides a row's lines
MOST_ROWS = 16  # of all groups, whose weights are read as a matvec does
LONG = 8192  # elements of a row beyond which a product by itself is left to the wide matmul
LONGEST = 16384  # elements of a row that a program holds in registers
EACH = 64  # elements of weights that a thread holds: 128 took 4 % longer, a step of an 8B model
SMALL = 2  # warps; each thread has twice as much: small programs begin too slowly
SECONDS, RATE = 2e-6, 1.0  # beginning and end; share of the copy rate


@dataclass(frozen=True)
class MatvecPlan:
    """Choices of `Matvec`: rows of a program (of all weights, where it takes several), warps."""

    rows: int = 8
    warps: int = 8


def line_of(k: int) -> int:
    """Elements of a line of such rows; 0 where they have no whole ones."""
    return next((line for line in LINES if k % line == 0), 0)


def warps_of(k: int) -> int:
    """Warps of a program, each with as many lines of a row; 0 where none fit or it is too long."""
    line = line_of(k)
    fits = (w for w in WARPS if line and k % (w * line) == 0 and k <= 2 * EACH * 32 * w)
    return next(fits, 0) if k <= LONGEST else 0


def why_not(x: Operands, target: Target) -> str:
    """Why there is no such kernel for operands (not turned); '' where there is."""
    k, weights = x.k, x.weights or (x.n,)
    wrong = [
        (high(x.m) > MOST_ROWS if x.block else (x.m, x.batch) != (1, 1), "one token"),
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
    most = EACH if warps > SMALL else 2 * EACH
    rows = next(r for r in (8, 4, 2, 1) if r * each <= most or r == 1)
    rows = max(rows, x.products)
    sizes = x.weights or (high(x.n),)
    bytes_ = sum(sizes) * high(x.k) * x.dtype.size * (high(x.m) if x.block else 1)
    seconds = SECONDS + bytes_ / (RATE * target.peak_bytes())
    return Choice(MatvecPlan(rows, warps), True, seconds)


class Matvec:
    """Builds one Body: weights and results as the schedule or a test gives them."""

    def __init__(
        self,
        x: Operands,
        plan: MatvecPlan,
        b: BodyBuilder,
        token: Callable[[Any], Node],
        weights: Sequence[Node],
        results: Sequence[Node],
        epilogues: Sequence[Epilogue],
        ahead: Sequence[Ask] = (),
    ) -> None:
        """weights: (n * lines, line) each; results: (rows, n) each; token(row) gives (lines, line)
        in float32; `ahead` asks for what the epilogue of a result will read."""
        self.x, self.plan, self.b, self.token = x, plan, b, tile.outside(token)
        self.weights = [tile.memory(w) for w in weights]
        self.results = [tile.memory(r) for r in results]
        self.epilogues = [tile.outside(e) for e in epilogues]
        self.ahead = [tile.outside(ask) for ask in ahead]
        self.line = line_of(high(x.k))
        self.lines = high(x.k) // self.line
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
        loaded = self.rows_of(weights, row)
        if constant:
            tile.grid_dependency_wait()
        for ask in self.ahead[number : number + 1]:
            ask((self.rows, 1), (0, row, 0))
        self.multiply(number, loaded, (0, row, 0))

    def multiply(self, number: int, loaded: Sequence[Any], where: tuple[Any, Any, Any]) -> None:
        """The token, sums, the epilogue; where: (group, row of the weights, row)."""
        _, row, own = where
        token = self.token(own)
        products = [tile.cast(line, float32) * token for line in loaded]
        lines = [tile.sum(p, 1) for p in products]  # threads meet once for all of them
        sums = [tile.sum(line, 0) for line in lines]
        pieces = [
            tile.stack(sums[n * self.rows : (n + 1) * self.rows]) for n in range(self.x.products)
        ]
        value = self.epilogues[number](*pieces, where)
        out = self.results[number]
        value = tile.reshape(tile.cast(value, out.dtype), (self.rows,))
        tile.store(out[own, row : row + self.rows], value)

    def rows_of(self, weights: Sequence[Any], row: Any) -> list[Any]:
        """What a program has of each weight: a row is so many lines of the (rows * lines, line)
        that it is stored as."""
        firsts = ((w, (row + r) * self.lines) for w in weights for r in range(self.rows))
        return [tile.load(w[at : at + self.lines, 0 : self.line]) for w, at in firsts]


class GroupedMatvec(Matvec):
    """Builds one Body for rows in groups; weights: (groups, n * lines, line) each."""

    blocks: Any  # the list of groups that have rows
    sources: Sequence[Any]  # the row of the input that each row is: the token's hole reads it

    def build(self) -> Body:
        """Every program: some rows of a block's weights."""
        most = tile.most(self.blocks.shape[0]) - 1
        with tile.into(self.b):
            program = tile.grid(most * self.programs)
            tile.grid_launch_dependents()
            tile.grid_dependency_wait()
            self.take(program // self.programs, program % self.programs * self.rows)
        return self.b.finish((most * self.programs,), plan=self.plan, warps=self.plan.warps)

    @tile.function
    def take(self, block: Any, row: Any) -> None:
        """All rows of a block by its number, if there is one."""
        rows, _, _, groups = self.x.most
        if block < listed(self.blocks, 0, 0, rows):
            group, first, last = block_at(self.blocks, block, groups, rows)
            loaded = self.rows_of([w[group] for w in self.weights], row)
            for own in tile.range(first, last, bounds=(0, rows - 1)):
                self.multiply(0, loaded, (group, row, own))
