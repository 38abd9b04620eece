"""Products of one token with weights: every weight is read once, as fast as memory gives it.

`Matvec` is a kernel for one row of 16-bit floats, e4m3 or int8. A program takes a block, a few rows
of the weights (n, k), into registers, all of them asked for before anything else and before the
launch before has ended, since weights are constants; only then it waits, reads the token,
multiplies, and hands its sums to the epilogue. Several weights of one token are taken one after
another (q, k and v), or side by side for an epilogue that sees all products (gate and up).

Every program computes the token: a norm, or codes and the largest value that they rest on, which
costs as much as some rows of weights. So many rows are *shared out*: as many programs as run at
once take block after block, each row of the next asked for as soon as one of this is multiplied.
Short rows, whose programs are small, have a program for each block: while some wait for memory
others multiply.

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
from ...core.dtype import DType, bfloat16, float8_e4m3, float16, float32, int8, int32, uint16
from ...core.errors import InternalError
from ...core.target import Target
from ...ir.node import Node
from ...ir.symbol import ceil_divide, high
from ...tile.build import Body, BodyBuilder
from ..grouped import block_at, listed
from .shape import Ask, Choice, Epilogue, Operands, among, first_wrong

STREAMED = (bfloat16, float16, float8_e4m3, int8)  # of weights
LINES = (512, 256, 128)  # bytes of a line that a warp reads at once; a row is some lines
WARPS = (8, 4, 2, 1)  # of a program, the first number that divides a row's lines
MOST_ROWS = 16  # of all groups, whose weights are read as a matvec does
LONG = 8192  # elements of a row beyond which a product by itself is left to the wide matmul
LONGEST = 16384  # elements of a row that a program holds in registers
EACH = 64  # elements of weights that a thread holds: 128 took 4 % longer, a step of an 8B model
SMALL = 2  # warps; each thread has twice as much: small programs begin too slowly
CODES = 128  # codes of weights that a thread holds, where its program has one block of rows
UNIT = 4  # of codes of a token 2 ** -UNIT: 4 products fit halves, and the least are not lost
RESIDENT = 2  # programs of a core that rows are shared out among
SECONDS, RATE = 2e-6, 1.0  # beginning and end; share of the copy rate


@dataclass(frozen=True)
class MatvecPlan:
    """Choices of `Matvec`: rows of a block (of all weights, where it takes several), warps, and how
    many blocks a program takes."""

    rows: int = 8
    warps: int = 8
    each: int = 1


def line_of(k: int, dtype: DType) -> int:
    """Elements of a line of such rows; 0 where they have no whole ones."""
    return lines_of(k, dtype)[0]


def warps_of(k: int, dtype: DType) -> int:
    """Warps of a program, each with as many lines of a row; 0 where none fit or it is too long."""
    warps = lines_of(k, dtype)[1]
    return warps if k <= min(LONGEST, 2 * EACH * 32 * warps) else 0


def lines_of(k: int, dtype: DType) -> tuple[int, int]:
    """Elements of a line, and warps: lines as long as they may be; of codes all warps where they
    can be, since threads hold a token twice while they encode it."""
    sizes = [bytes_ // dtype.size for bytes_ in LINES]
    pairs = [(line, warps) for line in sizes for warps in WARPS]
    if dtype.size == 1:
        pairs.sort(key=lambda pair: pair[1] < WARPS[0])
    return next((pair for pair in pairs if k % (pair[0] * pair[1]) == 0), (0, 0))


def why_not(x: Operands, target: Target) -> str:
    """Why there is no such kernel for operands (not turned); '' where there is."""
    k, weights = x.k, x.weights or (x.n,)
    wrong = [
        (high(x.m) > MOST_ROWS if x.block else (x.m, x.batch) != (1, 1), "one token"),
        (x.dtype not in STREAMED or x.scaled or x.sparse, "whole 16-bit floats, e4m3 or int8"),
        (x.block and x.dtype.size == 1, "codes of groups are encoded once, for matrix units"),
        (not x.a_along_k or not x.b_along_k, "weights are dense along k"),
        (
            not isinstance(k, int) or not warps_of(k, x.dtype),
            "rows are whole lines, as many for each warp",
        ),
        (any(not isinstance(n, int) or n % 8 for n in weights), "rows come in eights"),
        (not target.has_threads, "threads"),
    ]
    return first_wrong(wrong)


def choose(x: Operands, target: Target) -> Choice[MatvecPlan]:
    """A Plan: as many rows as registers hold well; weights are rows, as in a turned wide matmul."""
    warps = warps_of(high(x.k), x.dtype)
    each = high(x.k) // (32 * warps)  # elements of a row that a thread holds
    sizes = x.weights or (high(x.n),)
    most = CODES if x.dtype.size == 1 else EACH if warps > SMALL else 2 * EACH
    rows = max(next(r for r in (8, 4, 2, 1) if r * each <= most or r == 1), x.products)
    shared = 1 if x.block or warps < WARPS[0] else sharing(sum(sizes) // rows, target)
    bytes_ = sum(sizes) * high(x.k) * x.dtype.size * (high(x.m) if x.block else 1)
    seconds = SECONDS + bytes_ / (RATE * target.peak_bytes())
    return Choice(MatvecPlan(rows, warps, shared), True, seconds)


def sharing(blocks: int, target: Target) -> int:
    """Blocks of a program, where as many programs as run at once share them out and hardly any of
    them idles; else 1."""
    most = RESIDENT * target.cores
    each = ceil_divide(blocks, most)
    return each if 4 * blocks >= 3 * most * each else 1


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
        constants: Callable[[], None] = lambda: None,
    ) -> None:
        """weights: (n * lines, line) each; results: (rows, n) each; token(row) gives (lines, line)
        in float32, or its codes; `ahead` asks for what the epilogue of a result will read,
        `constants` for those that the token is computed of."""
        self.x, self.plan, self.b, self.token = x, plan, b, tile.outside(token)
        self.weights = [tile.memory(w) for w in weights]
        self.results = [tile.memory(r) for r in results]
        self.epilogues = [tile.outside(e) for e in epilogues]
        self.ahead = [tile.outside(ask) for ask in ahead]
        self.constants = tile.outside(constants)
        self.line = line_of(high(x.k), x.dtype)
        self.lines = high(x.k) // self.line
        self.rows = plan.rows // x.products  # of each weight
        self.own, self.piece = 0, 0  # as the wide matmul says to its epilogues
        self.sizes = x.weights or (high(x.n),)
        kept = self.sizes[:1] if x.gated else self.sizes
        shares = [ceil_divide(n // self.rows, plan.each) for n in kept]
        self.starts = [sum(shares[:i]) for i in range(len(kept))]
        self.programs = sum(shares)
        whole = self.rows and not any(n % self.rows for n in self.sizes)
        if len(self.weights) != len(self.sizes) or not whole:
            raise InternalError("kernels.matmul.matvec", f"no Body with {plan} for {x}")

    def build(self) -> Body:
        """Every program: which weight it has rows of, then all of its work."""
        with tile.into(self.b):
            self.program = tile.grid(self.programs)
            tile.grid_launch_dependents()
            among(self.program, self.starts, self.work)
        notes = {"resident": RESIDENT} if self.plan.each > 1 else {}
        return self.b.finish((self.programs,), plan=self.plan, warps=self.plan.warps, **notes)

    def work(self, number: int) -> None:
        """Weights, the wait, then all of a block, or of block after block."""
        start, after = self.starts[number], [*self.starts, self.programs][number + 1]
        step = (after - start) * self.rows
        row = tile.hold((self.program - start) * self.rows, "row", (0, max(0, step - self.rows)))
        weights = self.weights if self.x.gated else [self.weights[number]]
        constant = all(w.type.use == "constant" for w in weights)
        if not constant:
            tile.grid_dependency_wait()
        loaded = self.rows_of(weights, row)
        self.constants()
        if constant:
            tile.grid_dependency_wait()
        if self.plan.each > 1:
            self.share_out(number, weights, row, step, loaded)
            return
        self.ask(number, row)
        self.finish(number, self.products(loaded, self.operand(0)), (0, row, 0))

    @tile.function
    def share_out(
        self, number: int, weights: Sequence[Any], first: Any, step: int, loaded: list[Any]
    ) -> None:
        """Block after block of rows, all with the token that was made once; each row of the next
        is asked for as soon as one of this is multiplied, before threads meet for its sums."""
        token, rows = self.operand(0), self.sizes[number]
        for row in tile.range(first, rows, step):
            self.ask(number, row)
            lines, following = [], []
            for own, at in zip(loaded, self.begins(weights, row + step)):
                lines += self.products([own], token)
                following.append(self.row_of(*at, row + step < rows))
            loaded = following
            self.finish(number, lines, (0, row, 0))

    def ask(self, number: int, row: Any) -> None:
        """Ask for what the epilogue of a result will read."""
        for ask in self.ahead[number : number + 1]:
            ask((self.rows, 1), (0, row, 0))

    def operand(self, own: Any) -> Any:
        """The token of a row as its products want it: codes in words, e4m3 as halves."""
        token = self.token(own)
        if self.x.dtype.size > 1:
            return token
        if self.x.dtype is int8:
            return in_eights(tile.words(token), token)
        pairs = tile.words(tile.cast(token, float16))
        unit = tile.repeat_bits(tile.full((), 2.0**-UNIT, float16))
        pairs = tile.pair_multiply_add(pairs, unit, tile.full((), 0, int32), float16)
        return in_eights(pairs, token)

    def products(self, loaded: Sequence[Any], token: Any) -> list[Any]:
        """Sums of lines, as far as a thread has them."""
        if self.x.dtype.size > 1:
            made = [tile.cast(line, float32) * token for line in loaded]
        else:
            made = [of_codes(line, token) for line in loaded]
        return [tile.sum(products, 1) for products in made]

    def finish(self, number: int, lines: Sequence[Any], where: tuple[Any, Any, Any]) -> None:
        """Sums, the epilogue; where: (group, row of the weights, row)."""
        _, row, own = where
        sums = [tile.sum(line, 0) for line in lines]
        if self.x.dtype is float8_e4m3:
            sums = [total * 2.0**UNIT for total in sums]
        pieces = [
            tile.stack(sums[n * self.rows : (n + 1) * self.rows]) for n in range(self.x.products)
        ]
        value = self.epilogues[number](*pieces, where)
        out = self.results[number]
        value = tile.reshape(tile.cast(value, out.dtype), (self.rows,))
        tile.store(out[own, row : row + self.rows], value)

    def rows_of(self, weights: Sequence[Any], row: Any) -> list[Any]:
        """What a block has of each weight."""
        return [self.row_of(*at) for at in self.begins(weights, row)]

    def begins(self, weights: Sequence[Any], row: Any) -> list[tuple[Any, Any]]:
        """Where the rows of a block begin: a row is so many lines of the (rows * lines, line) that
        a weight is stored as."""
        return [(w, (row + r) * self.lines) for w in weights for r in range(self.rows)]

    def row_of(self, weight: Any, at: Any, inside: Any = None) -> Any:
        """A row; 0 where it is not there."""
        size = (self.lines, self.line)
        mask = None if inside is None else tile.broadcast(inside, size)
        return tile.load(weight, (at, 0), size, mask=mask)


def in_eights(words: Any, codes: Any) -> Any:
    """Words of lines by eight codes, or as many as a thread has of a line."""
    (lines, size), each = codes.shape, min(8, codes.shape[1] // 32)
    return tile.reshape(words, (lines, size // each, words.shape[1] * each // size))


def of_codes(codes: Any, token: Any) -> Any:
    """Products of a row's codes with the token, neighbours added up."""
    halves = codes.dtype is not int8
    words = in_eights(tile.words(tile.cast(codes, float16) if halves else codes), codes)
    total = tile.zeros((*token.shape[:2], 1), int32)
    for i in range(token.shape[2]):
        pair = words[:, :, i : i + 1], token[:, :, i : i + 1], total
        total = tile.pair_multiply_add(*pair, float16) if halves else tile.signed_byte_dot(*pair)
    if halves:
        low, high = (tile.bitcast((total >> n).to(uint16), float16) for n in (0, 16))
        total = low.to(float32) + high.to(float32)
    return tile.reshape(total, token.shape[:2])


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
                self.finish(0, self.products(loaded, self.operand(own)), (group, row, own))
