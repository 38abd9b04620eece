"""Products of one token with weights: every weight is read once, as fast as memory gives it.

`Matvec` is a placed kernel for one row of 16-bit floats: a producer streams whole rows of the
weights (n, k) into a ring of shared memory, its first ones before the launch before has ended, and
a consumer holds the token in registers, multiplies row by row and hands units of 16 products to
the epilogue. Several weights of one token are walked one after another (q, k and v), or two are
taken side by side for an epilogue that sees both (gate and up). The ring takes less than half of
shared memory, so that the next launch of the kind fills its own while this one still runs: memory
does not idle between launches.

Costs: bytes of the weights once; 3 operations an element, about a third of what a core has time
for. Invariant: the order of a sum over k depends on k and the Plan alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.dtype import float32, int64
from ..core.errors import InternalError
from ..core.target import Target
from ..ir.node import Node
from ..ir.symbol import Size, ceil_divide, combine, floor_divide, high, maximum, modulo, multiply
from ..tile import ops, placed
from ..tile.build import Body
from ..tile.placed import PlacedBuilder
from .matmul import Epilogue, Operands, Prologue

UNIT = 16  # products that the epilogue gets at once
LINE = 256  # elements of a line of a copy: a row is some lines
RING_BYTES = 96 << 10  # two programs, of two launches, share a core
STAGE_BYTES = 16 << 10
LONGEST = 16384  # elements of a token that a program holds in registers
SECONDS, RATE = 2e-6, 0.97  # beginning and end; share of the copy rate


@dataclass(frozen=True)
class MatvecPlan:
    """Choices of `Matvec`: rows of a stage, stages, programs, warps that multiply."""

    each: int = 2
    stages: int = 6
    programs: int = 132
    warps: int = 8
    split: int = 1  # as the wide matmul's Plans: k is whole
    cluster: int = 1


@dataclass(frozen=True)
class MatvecChoice:
    """A Plan and the time expected; the weights are rows, as in a turned wide matmul."""

    plan: MatvecPlan
    seconds: float
    turned: bool = True


def why_not(x: Operands, target: Target) -> str:
    """Why there is no such kernel for operands (not turned); '' where there is."""
    k, weights = x.k, x.weights or (x.n,)
    wrong = [
        (x.m != 1 or x.batch != 1, "one token"),
        (x.dtype.size != 2, "16-bit floats"),
        (not x.a_along_k or not x.b_along_k, "weights are dense along k"),
        (not isinstance(k, int) or high(k) % LINE or high(k) > LONGEST, "rows are whole lines"),
        (any(not isinstance(n, int) or n % UNIT for n in weights), "products come in units"),
        (not any(unit.name.startswith("wgmma") for unit in target.matrix), "no bulk copies"),
    ]  # fmt: skip
    return next((why for is_wrong, why in wrong if is_wrong), "")


def units_of(x: Operands) -> int:
    """Units of a problem; gated, a unit has products of every weight."""
    sizes = x.weights[:1] if x.gated else x.weights or (high(x.n),)
    return sum(n // UNIT for n in sizes)


def choose(x: Operands, target: Target) -> MatvecChoice:
    """A Plan: as few programs as take no more turns than all cores would."""
    row = high(x.k) * x.dtype.size
    each = next(e for e in (8, 4, 2, 1) if e == 1 or e * row <= STAGE_BYTES)
    turns = -(-units_of(x) // target.cores)
    programs = -(-units_of(x) // turns)
    stages = max(2, RING_BYTES // (each * row))
    many = len(x.weights) if x.gated else 1
    bytes_ = units_of(x) * UNIT * row * many
    seconds = SECONDS + bytes_ / (RATE * target.peak_bytes())
    return MatvecChoice(MatvecPlan(each, stages, programs), seconds)


class Matvec:
    """Builds one Body: the token, weights and results as the schedule or a test gives them."""

    def __init__(
        self, x: Operands, plan: MatvecPlan, b: PlacedBuilder, token: Node,
        weights: Sequence[Node], results: Sequence[Node], epilogues: Sequence[Epilogue],
        prologue: Prologue | None = None,
    ) -> None:  # fmt: skip
        """token: (lines, LINE); weights: (n * lines, LINE) each; results: (n,) each."""
        self.x, self.plan, self.b = x, plan, b
        self.token, self.weights, self.results = token, list(weights), list(results)
        self.epilogues, self.prologue = list(epilogues), prologue
        self.lines = high(x.k) // LINE
        self.products = len(self.weights) if x.gated else 1
        self.steps = self.products * UNIT // plan.each  # of a unit
        self.units = units_of(x)
        self.own, self.piece = 0, 0  # as the wide matmul says to its epilogues
        sizes = x.weights or (high(x.n),)
        self.starts = [sum(n // UNIT for n in sizes[:i]) for i in range(len(sizes))]
        idle = plan.programs > self.units  # such a program would begin what nobody ends
        if len(self.weights) != len(sizes) or UNIT % plan.each or plan.stages < 2 or idle:
            raise InternalError("kernels.matvec", f"no Body with {plan} for {x}")

    def build(self) -> Body:
        """The ring, barriers, roles."""
        b, plan = self.b, self.plan
        shape = (plan.stages, plan.each, self.lines, LINE)
        self.ring = b.allocate(shape, self.x.dtype, "shared")
        self.full = b.barrier("full", 1, plan.stages)
        self.empty = b.barrier("empty", 1, plan.stages)
        self.program = b.program(0, plan.programs)
        self.mine = ceil_divide(combine(self.units, self.program, -1), plan.programs)
        b.role("producer", 1, 0, self.producer)
        b.role("consumer", plan.warps, 0, self.consumer)
        return b.finish((plan.programs,), plan=plan)

    # ---- which unit, which stage ------------------------------------------------------------

    def number(self, count: Size) -> Size:
        """The number of a unit."""
        return combine(multiply(count, self.plan.programs), self.program, 1)

    def turn(self, count: Size, step: Size) -> tuple[Size, Size]:
        """(stage, lap) of a step of a unit."""
        turn = combine(multiply(count, self.steps), step, 1)
        return modulo(turn, self.plan.stages), floor_divide(turn, self.plan.stages)

    def each(self, unit: Size, do: Callable[[int, Size], None]) -> None:
        """do(number of the weight that a unit is of, its first row there)."""
        b, last = self.b, len(self.starts) - 1

        def among(number: int) -> Sequence[Node]:
            def here() -> Sequence[Node]:
                most = (high(unit) if number == last else self.starts[number + 1] - 1)
                row = b.index(multiply(combine(unit, self.starts[number], -1), UNIT))
                most = UNIT * max(0, most - self.starts[number])
                do(number, b.atom("row", row, 0, most))
                return ()

            if number == last or self.x.gated:
                return here()
            b.branch(b.less(unit, self.starts[number + 1]), here, lambda: among(number + 1))
            return ()

        among(0)

    # ---- roles ------------------------------------------------------------------------------

    def producer(self) -> None:
        """Fill the ring: the weights are constants, so the first rows need not wait."""
        b, plan = self.b, self.plan
        constant = all(w.type.use == "constant" for w in self.weights)  # type: ignore[union-attr]
        early = min(plan.stages, self.steps) if constant else 0
        if early:
            b.loop("early", 0, early, 1, lambda s, _: self.fill(0, s, False))
        b.do(placed.grid_dependency_wait)

        def unit(count: Size, _: list[Node]) -> Sequence[Node]:
            done = maximum(combine(early, multiply(count, early), -1), 0)
            b.loop("step", done, self.steps, 1, lambda s, _: self.fill(count, s, True))
            return ()

        b.loop("count", 0, self.mine, 1, unit)

    def fill(self, count: Size, step: Size, waits: bool) -> Sequence[Node]:
        """Some rows into a stage."""
        b, plan = self.b, self.plan
        stage, lap = self.turn(count, step)
        if waits:
            b.wait(self.empty, stage, (lap + 1) % 2)
        b.expect(self.full, stage, plan.each * high(self.x.k) * self.x.dtype.size)
        unit, per = self.number(count), UNIT // plan.each

        def copy(number: int, row: Size, within: Size) -> Sequence[Node]:
            first = combine(row, multiply(within, plan.each), 1)
            for r in range(plan.each):
                at = multiply(combine(first, r, 1), self.lines)
                b.copy_async(self.ring, (stage, r), self.weights[number], (at, 0), (0, 1),
                             self.full, stage)  # fmt: skip
            return ()

        def among(number: int) -> Sequence[Node]:
            row = multiply(unit, UNIT)
            if number == self.products - 1:
                return copy(number, row, combine(step, per * number, -1))
            b.branch(b.less(step, per * (number + 1)),
                     lambda: copy(number, row, combine(step, per * number, -1)),
                     lambda: among(number + 1))  # fmt: skip
            return ()

        if self.x.gated:
            among(0)
        else:
            self.each(unit, lambda number, row: copy(number, row, step) and None)
        return ()

    def consumer(self) -> None:
        """Multiply row by row; units of sums to the epilogue."""
        b = self.b
        b.do(placed.grid_dependency_wait)
        b.do(placed.grid_launch_dependents)
        if self.prologue is not None:
            self.prologue(0, 0, 1)
        token = b.load(self.token, (0, 0), (self.lines, LINE), (0, 1))
        token = b.cast(token, float32)

        def unit(count: Size, _: list[Node]) -> Sequence[Node]:
            pieces = [self.sums(count, number, token) for number in range(self.products)]
            self.each(self.number(count), lambda number, row: self.write(number, row, pieces))
            return ()

        b.loop("count", 0, self.mine, 1, unit)

    def sums(self, count: Size, number: int, token: Node) -> Node:
        """The products of a unit's rows of one weight, (UNIT, 1)."""
        b, per = self.b, UNIT // self.plan.each
        places = b.add(ops.reshape(b.add(ops.iota(size=UNIT, dtype=int64)), shape=(UNIT, 1)))

        def step(s: Size, carried: list[Node]) -> Sequence[Node]:
            (found,) = carried
            for r, total in enumerate(self.step(count, combine(s, number * per, 1), token)):
                at = b.index(combine(multiply(s, self.plan.each), r, 1))
                here = b.apply("equal", places, b.broadcast(at, (UNIT, 1)))
                found = b.apply("where", here, b.broadcast(total, (UNIT, 1)), found)
            return [found]

        return b.loop("step", 0, per, 1, step, [b.constant(0.0, float32, (UNIT, 1))])[0]

    def step(self, count: Size, step: Size, token: Node) -> list[Node]:
        """The sums of a stage's rows."""
        b = self.b
        stage, lap = self.turn(count, step)
        b.wait(self.full, stage, lap % 2)
        rows = [b.read(self.ring, stage, r) for r in range(self.plan.each)]
        b.arrive(self.empty, stage)
        products = [b.apply("multiply", b.cast(row, float32), token) for row in rows]
        lines = [b.add(ops.reduce(p, axis=1, kind="sum")) for p in products]
        return [b.add(ops.reduce(line, axis=0, kind="sum")) for line in lines]

    def write(self, number: int, row: Size, pieces: Sequence[Node]) -> None:
        """A unit's products, (UNIT, 1) of each weight, by the epilogue to its result."""
        b, result = self.b, self.results[number]
        value = b.cast(self.epilogues[number](*pieces, (0, row, 0)), result.dtype)
        b.store(result, b.add(ops.reshape(value, shape=(UNIT,))), (row,), (0,))
