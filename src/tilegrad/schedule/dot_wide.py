"""Lower `dot` to the library's wide matmul where its operands allow it.

Operands must lie as matrices whose rows are a multiple of 16 bytes and start at the Buffer's own
start, in a dtype that the Target's matrix units take: those that run beside the threads, else
those of a warp; what the Region computes of the products is evaluated on pieces of the accumulator.
Everything else takes the plain tiled matmul of `products`. Invariant: the result is that of
`products`, up to the order of sums. The file is long because it is one
lowering: from operands to the hole of the kernel's epilogue, each step used by the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from .. import tile
from ..core.config import config, invariant
from ..core.dtype import bfloat16, float8_e4m3, float16, float32, int8, int32
from ..graph import ops
from ..graph.blocks import grain_of, scales_of
from ..ir.node import Node, topological, walk
from ..ir.symbol import Size, high, loop_index, power_of_two
from ..ir.types import Shape
from ..kernels.grouped import COLUMNS
from ..kernels.matmul.joint import JointMatmul
from ..kernels.matmul.matvec import LONG, GroupedMatvec, Matvec, MatvecPlan, line_of
from ..kernels.matmul.matvec import choose as choose_matvec
from ..kernels.matmul.matvec import why_not as matvec_why_not
from ..kernels.matmul.plan import BLOCK, most_stages, ranked, transposed
from ..kernels.matmul.shape import Choice, Operands, WidePlan, in_ring, rows_stay, side, tile_counts
from ..kernels.matmul.table import PLAIN, for_any_rows, tuned
from ..kernels.matmul.threads_matmul import ThreadMatmul, ThreadPlan, ranked_threads
from ..kernels.matmul.wide import WideMatmul
from ..kernels.matmul.wide_blocks import BlockJoint, BlockMatmul, Promoting
from ..kernels.matmul.wide_grouped import (
    GroupedBlockJoint,
    GroupedBlocks,
    GroupedJoint,
    GroupedMatmul,
    Grouping,
    choose_grouped,
)
from ..kernels.matmul.wide_sparse import SparseMatmul, choose_sparse
from . import sheet as parameters
from .access import MOVEMENT, Index, base_of, offset_of, reads_below, unravel
from .cost import instructions
from .family import Made
from .problem import ALIGNMENT, A, B, Matrix, matrix_of, problem_of
from .region import Region
from .threads.tiles import ThreadSheet
from .values import is_part, is_whole

FEW_TOKENS = 128  # tokens
LONE = 16  # tokens of which a piece is exchanged beside a ring that fills shared memory
SUMS_BYTES = 2048  # of shared memory, for sums that an epilogue exchanges
COSTLY = 14  # instructions of an epilogue that may not have all of a tile in registers at once
KINDS: dict[tuple[bool, bool], tuple[Any, Any]] = {  # (groups, blocks): of one weight, of several
    (False, False): (WideMatmul, JointMatmul),
    (False, True): (BlockMatmul, BlockJoint),
    (True, False): (GroupedMatmul, GroupedJoint),
    (True, True): (GroupedBlocks, GroupedBlockJoint),
}


class WideDot:
    """Lowers one Region of a dot to the wide matmul; `choice` is None where it does not apply."""

    def __init__(self, region: Region, parts: Sequence[WideDot] = ()) -> None:
        self.region, self.reads, self.target = region, region.inputs, region.target
        self.dot = region.anchor
        self.stored = [v for v in region.stored if not is_part(v)]
        self.block_sums = [v for v in region.stored if is_part(v)]  # sums of blocks of columns
        below = topological(region.stored, set(self.reads).__contains__)
        self.wholes = [v for v in below if v not in self.reads and is_whole(v)]
        self.totals: dict[tuple[Node, int], Node] = {}  # whole sums of a consumer's tokens
        self.kernel: Any = None  # that is being built
        self.brought: dict[tuple[int, int], list[tuple[Node, Index, Node]]] = {}  # read early
        self.problem = problem_of(self.dot)
        self.parts = parts or [self]  # products that its epilogue gets pieces of
        self.written: Sequence[WideDot] = [self]  # those whose results its kernel stores
        self.operands = self._operands()
        self.constant: list[tuple[Node, Index, Node]] = []  # read before the wait
        self.near: list[Node] = []  # what the epilogue reads and the ring brings

    @cached_property
    def choice(self) -> Choice[Any] | None:
        """The Plan that a table or the model of time puts first; None where none fits."""
        x, target = self.operands, self.target
        if x is None:
            return None
        if x.block:
            few = not invariant() and not matvec_why_not(x, target)
            return choose_matvec(x, target) if few else choose_grouped(x, target)
        if x.sparse:
            return choose_sparse(x, target)
        if invariant():
            return next(for_any_rows(x, target), None)
        if x.scaled:
            return next(iter(ranked(x, target)), None)
        if not self.block_sums and self._streams(x):
            return choose_matvec(x, target)
        if not self.asynchronous:
            return next(iter(ranked_threads(x, target)), None)
        known = tuned(x, target, self._epilogue_class())
        if known is not None and self.suits(x, known):
            return self.with_room(x, known)
        return next((self.with_room(x, c) for c in ranked(x, target) if self.suits(x, c)), None)

    def with_room(self, x: Operands, choice: Choice[WidePlan]) -> Choice[WidePlan]:
        """The Plan with as many stages as leave shared memory to the sums of an epilogue, or to a
        piece of few tokens that threads exchange to store it a second time."""
        few = high(x.m) <= FEW_TOKENS
        if self.block_sums or self.wholes:  # of many tokens a factor for each row
            bytes_ = SUMS_BYTES if few or self.block_sums else 8 * choice.plan.tile[0]
        elif high(x.m) <= LONE and len(self.stored) > 1:
            bytes_ = 64 * choice.plan.staged * float32.size
        else:
            return choice
        x = transposed(x) if choice.turned else x
        stages = max(2, most_stages(x, choice.plan, self.target, bytes_))
        return replace(choice, plan=replace(choice.plan, stages=stages))

    def _streams(self, x: Operands) -> bool:
        """Whether the matvec takes the product: not one of long rows with nothing around it."""
        stored = self.asynchronous and self.problem.a in self.reads  # what the wide matmul takes
        alone = stored and len(self.reads) == 2 and high(x.k) > LONG
        return not alone and not matvec_why_not(x, self.target)

    @property
    def plan(self) -> Any:
        """The Plan that was chosen."""
        assert self.choice is not None
        return self.choice.plan

    @property
    def turned(self) -> bool:
        """Whether the kernel computes the transpose of the product."""
        return self.choice is not None and self.choice.turned

    @property
    def asynchronous(self) -> bool:
        """Whether the Target has matrix units that run while their threads go on."""
        return bool(self.target.asynchronous_units)

    def suits(self, x: Operands, choice: Choice[WidePlan]) -> bool:
        """Whether each program of a Plan has the same tokens in all of its tiles, and whole blocks
        of columns in its pieces, where what is handed on asks for them."""
        m, x, plan = high(x.m), transposed(x) if choice.turned else x, choice.plan
        if len(self.region.stored) > 1 and m == 1 and plan.split > 1:
            return False  # all columns would be the one token's
        if not self.block_sums and not self.wholes:
            return True
        if m <= FEW_TOKENS and (tile_counts(x, plan)[choice.turned] != 1 or plan.cluster > 1):
            return False
        if m > FEW_TOKENS and (choice.turned or not rows_stay(x, plan)):
            return False
        if self.wholes and x.span(plan.tile)[0] > 128 and x.span(plan.tile)[1] > 64:
            return False  # registers of many consumers do not hold what all tokens are scaled by
        blocks = [block_of(v) for v in self.block_sums]
        return all(n == 64 if choice.turned else plan.staged % n == 0 for n in blocks)

    def _operands(self) -> Operands | None:
        p = self.problem
        batch, m, k, n = p.sizes
        block = self.dot.attrs.get("block", 0) if p.grouped else 0
        sparse, scaled = self.dot.op is ops.sparse_dot, bool(scales_of(self.dot))
        if (p.grouped and not block) or (
            (p.grouped or sparse or scaled) and (self.block_sums or self.wholes)
        ):
            return None
        dtype = self.dot.inputs[0].dtype
        kinds = {u.inputs for u in self.target.matrix if u.asynchronous == self.asynchronous}
        rounded = self.asynchronous and config().dots == "tf32"  # float32 operands may be
        taken = (bfloat16, float16, *([float32] if rounded else []))
        taken += (float8_e4m3, int8) if self.asynchronous else ()
        if (dtype, self.dot.inputs[1].dtype) not in kinds or dtype not in taken:
            return None
        if any(s == 0 for s in p.sizes) or not all(isinstance(s, int) for s in (batch, k, n)):
            return None
        at = [loop_index(name, s) for name, s in zip(("batch", "m", "k", "n"), p.sizes)]
        row = loop_index("m", p.source.shape[0]) if p.gathered else at[1]
        left = (at[0], row, at[2])
        a = matrix_of(p.source, p.index(A, *left), left, self.reads)
        b, result = self._right(at), self.stored[0].dtype
        if b is None or high(n) * result.size % ALIGNMENT:
            return None
        self.left, self.right = a or Matrix(p.a, 0, 0, 1), b
        along = self.left.columns == 1, b.rows == 1
        kind: dict[str, Any] = {"block": block, "sparse": sparse, "scaled": scaled}
        found = Operands(m, n, k, dtype, result, *along, batch, **kind)
        if a is None:  # computed by every program that reads it, if at all
            alone = p.a not in self.reads and not block and not sparse and not scaled
            return found if alone and not matvec_why_not(found, self.target) else None
        if not all(accepts(v, self.dot) for v in self.stored):
            return None
        if batch != 1 and 0 in (a.batch, b.batch) and not p.grouped:
            return None
        if block and not along[0] and (block % 64 or p.gathered):
            return None  # rows of shared tiles are whole spans
        self.scales = self._scales() if scaled else []
        if scaled and len(self.scales) < 2:
            return None
        return None if (sparse or scaled) and not all(along) else found

    def _right(self, at: Sequence[Size]) -> Matrix | None:
        """How the right operand lies; of sparse weights what is kept, half as many columns."""
        p, stored, (batch, _, k, n) = self.problem, self.dot.inputs[1], at
        if self.dot.op is ops.sparse_dot:
            half = loop_index("k", high(p.sizes[2]) // 2)
            return matrix_of(stored, (n, half), (batch, half, n), self.reads)
        right = stored if scales_of(self.dot) else p.b
        return matrix_of(right, p.index(B, batch, n, k), (batch, k, n), self.reads)

    def _scales(self) -> list[Matrix]:
        """How the scales of both operands of blocks lie; none where the kernel has other blocks."""
        units, found = grain_of(self.dot) == (BLOCK, BLOCK) and self.asynchronous, []
        for scale in scales_of(self.dot) if units else ():
            at = [loop_index(name, size) for name, size in zip(("r", "b"), scale.shape)]
            lies = matrix_of(scale, tuple(at), (0, *at), self.reads, False)
            sizes = lies and zip(scale.shape, (lies.rows, lies.columns), (scale.shape[1], 1))
            dense = sizes and all(size == 1 or step == own for size, step, own in sizes)
            if lies and (dense or not self.problem.gathered):  # rows by number follow one another
                found.append(lies)
        return found

    def _epilogue_class(self) -> str:
        """What is done to the products on their way out, as PlanTables tell it apart."""
        if len(self.stored) > 1:
            return "several"
        if set(self.reads) - {self.left.node, self.right.node}:
            return "reads"
        between = topological([self.stored[0]], lambda node: node is self.dot)
        plain = all(v is self.dot or v.op is ops.cast or v.op in MOVEMENT for v in between)
        return PLAIN if plain else "computes"

    def lower(self) -> Made:
        """The Body."""
        assert self.operands is not None
        given = parameters.reads(self.reads, self.region.constants)
        sheet = ThreadSheet(self.region.name, [*given, *parameters.results(self.region.stored)])
        self.b, self.e, self.outputs = sheet.b, sheet.e, sheet.outputs
        self.e.rounded, self.e.turns = self.region.rounded, False
        x = transposed(self.operands) if self.turned else self.operands
        every = (self, *self.parts)
        for part in every:
            part.b, part.e, part.outputs, part.choice = self.b, self.e, self.outputs, self.choice
        streams = isinstance(self.plan, MatvecPlan)
        kernel = self.matvec(self.operands) if streams else self.matmul(x)
        for part in every:
            part.kernel, part.totals = kernel, self.totals
        return sheet.made(self.listed(kernel).build())

    def matmul(self, x: Operands) -> Any:
        """The kernel over this Region's parameters."""
        plan, given = self.plan, (self.b, self.memories(), self.epilogue)
        if isinstance(plan, ThreadPlan):
            return ThreadMatmul(x, plan, *given)
        known = {*self.reads, *self.region.values[:1]}
        costly = instructions(self.stored, known, self.region.rounded) > COSTLY
        self.near = [r for r in self.residual_reads() if in_ring(x, plan, r.dtype)]
        return (SparseMatmul if x.sparse else KINDS[bool(x.block), x.scaled][0])(
            x,
            plan,
            *given,
            costly=costly,
            residuals=[self.like_result(self.e.memories[r]) for r in self.near],
            prologue=self.prologue if self.wholes else None,
            ask=self.ask if self.asks(x) else None,
        )

    def listed(self, kernel: Any) -> Any:
        """A kernel that knows its list of blocks or the words of its weights, where it has some."""
        more = self.dot.inputs[2:]
        if isinstance(kernel, SparseMatmul):
            kernel.words = self.given(more[0], more[0].shape[1], 1)
        if isinstance(kernel, Promoting):
            lies = [[*zip(scales_of(p.dot), p.scales)] for p in self.parts]
            found = [lies[0][0], *(own for _, own in lies)]
            kernel.scales = [self.given(scale, x.rows, x.columns) for scale, x in found]
        if isinstance(kernel, (Grouping, GroupedMatvec)):
            lists = zip(ops.group_lists(self.dot), ((COLUMNS, 1), (1,)))
            kernel.blocks, *kernel.sources = [self.given(n, *strides) for n, strides in lists]
        return kernel

    def given(self, node: Node, *strides: Size) -> Any:
        """An input beside the operands, as kernels see it."""
        memory = self.e.memories[base_of(node, self.reads)]
        return tile.memory(self.b.matrix(memory, node.shape, strides))

    def asks(self, x: Operands) -> bool:
        """Whether what the epilogue reads is asked for first: where few tokens wait for memory, in
        a tile or two."""
        m = self.problem.most[1]
        few = m <= FEW_TOKENS or (m <= 2 * FEW_TOKENS and bool(self.block_sums))
        return few and x.batch == 1 and not x.block and not self.near

    def matvec(self, x: Operands) -> Any:
        """The kernel of one token: the weights of the parts in lines."""
        k, lead = high(x.k), (x.batch,) if x.block else ()
        line, weights = line_of(k, x.dtype), []
        for part in self.parts:
            memory, size = self.e.memories[part.right.node], high(part.problem.sizes[3]) * k
            strides = (*(size for _ in lead), line, 1)
            weights.append(self.b.matrix(memory, (*lead, size // line, line), strides))
        return (GroupedMatvec if x.block else Matvec)(
            x,
            self.plan,
            self.b,
            self.token,
            weights,
            [w.result for w in self.written],
            [w.epilogue for w in self.written],
            [w.ask for w in self.written],
            self.constants,
        )

    def ask(self, shape: tuple[int, int], where: tuple[Size, Size, Size]) -> None:
        """Read what the epilogue of a piece will want, so that it need not wait for it."""
        with self.piece(shape, where) as at:
            own = self.problem.result_index(where[0], *at)
            starts = [(v, own) for v in self.stored if v.shape == self.dot.shape]
            found = reads_below(starts, set(self.reads))
            self.brought[(self.kernel.own, self.kernel.piece)] = [
                (read, at, self.e.value(read, at)) for read, at in found
            ]

    @contextmanager
    def piece(self, shape: Sequence[int], where: Sequence[Size]) -> Iterator[tuple[Size, Size]]:
        """A piece of the result that begins at (batch, row, column); yields its rows and columns
        as the product counts them."""
        (_, m, _, n), (_, row, column) = self.problem.sizes, where
        sizes = side(m, n, not self.turned)
        with self.e.tile(row, shape[0], sizes[0], column, shape[1], sizes[1]) as (i, j):
            yield side(i, j, not self.turned)

    def token(self, row: Size) -> Node:
        """The token of a row in lines, and the whole sums that follow from the only one."""
        b, p = self.b, self.problem
        codes, lines = p.a.dtype.size == 1, []
        with self.in_lines() as (shape, place):
            for known in self.constant:
                self.e.bind(*known)
            found = None if codes else b.cast(self.e.value(p.a, p.index(A, 0, row, place)), float32)
            for whole in self.wholes:
                source = whole.inputs[0]
                x = b.broadcast(self.e.value(source, unravel(place, source.shape)), shape)
                lines.append(b.reduce(x, 1, whole.op.name))
            totals = [b.reduce(x, 0, whole.op.name) for whole, x in zip(self.wholes, lines)]
            for whole, total in zip(self.wholes, totals):
                self.totals[(whole, 0)] = total
                self.e.bind(whole, unravel(0, whole.shape), total)
            if found is None:  # codes rest on the largest
                found = self.e.value(p.a, p.index(A, 0, row, place))
            return b.broadcast(found, shape)

    def constants(self) -> None:
        """Read the constants that the one token is computed of (a norm's weights)."""
        p = self.problem
        if not self.wholes and p.a in self.reads:
            return
        with self.in_lines() as (_, place):
            starts = [(p.a, p.index(A, 0, 0, place))]
            starts += [(w.inputs[0], unravel(place, w.inputs[0].shape)) for w in self.wholes]
            found = reads_below(starts, {*self.reads, *self.wholes})
            self.constant = [
                (read, at, self.e.value(read, at))
                for read, at in found
                if read in self.region.constants
            ]

    @contextmanager
    def in_lines(self) -> Iterator[tuple[Shape, Size]]:
        """A token in lines: their shape, and the place of an element."""
        k = high(self.problem.sizes[2])
        size = line_of(k, self.problem.a.dtype)
        shape = (k // size, size)
        with self.e.tile(0, shape[0], shape[0], 0, size, size) as (line, at):
            yield shape, line * size + at

    def residual_reads(self) -> list[Node]:
        """What the epilogue reads at the result's own places, whose rows a tensor map has."""
        known, n = {*self.reads, self.dot}, self.problem.sizes[3]

        def step(node: Node) -> Sequence[Node]:
            inside = node not in known and node.op.category in ("unary", "binary", "ternary")
            return node.inputs if inside else ()

        found = [x for x in walk(self.stored, step) if x in self.reads]
        whole = [x for x in found if x.shape == self.dot.shape]
        return [x for x in whole if n * x.dtype.size % ALIGNMENT == 0]

    def like_result(self, memory: Node) -> Node:
        """A parameter with the result's elements, as a matrix or a batch of them."""
        batch, m, _, n = self.problem.sizes
        if batch == 1 or self.problem.grouped:
            return self.b.matrix(memory, (m, n), (n, 1))
        return self.b.matrix(memory, (batch, m, n), (m * n, n, 1))

    @property
    def result(self) -> Node:
        """What the kernel itself stores, as a matrix or a batch of them."""
        return self.like_result(self.outputs[self.stored[0]])

    def memories(self) -> tuple[Node, Node, Node]:
        """a, b and the result as matrices, in the order the kernel wants."""
        a, b, c = self.tokens(), self.weights(), self.result
        return (b, a, c) if self.turned else (a, b, c)

    def weights(self) -> Node:
        """The right operand as stored."""
        _, _, k, n = self.problem.sizes
        k = k // 2 if self.dot.op is ops.sparse_dot else k
        return self.matrix(self.right, (n, k), self.right.columns, self.right.rows)

    def tokens(self) -> Node:
        """The left operand as stored."""
        _, m, k, _ = self.problem.sizes
        rows = self.problem.source.shape[0] if self.problem.gathered else m
        return self.matrix(self.left, (rows, k), self.left.rows, self.left.columns)

    def matrix(self, x: Matrix, shape: tuple[Size, Size], first: int, second: int) -> Node:
        """An operand as stored: the dense axis last."""
        batch = self.problem.sizes[0]
        strides = (first, second)
        if second != 1:
            shape, strides = shape[::-1], strides[::-1]
        memory = self.e.memories[x.node]
        if batch == 1 or not x.batch:
            return self.b.matrix(memory, shape, strides)
        return self.b.matrix(memory, (batch, *shape), (x.batch, *strides))

    # ---- what other kernels hand on ---------------------------------------------------------

    def prologue(self, own: int, start: Size, count: int) -> None:
        """Add up the blocks of every whole sum for some tokens."""
        b, e, m = self.b, self.e, self.problem.sizes[1]
        for whole in self.wholes:
            parts = whole.inputs[0]
            size = high(parts.shape[-1])
            with e.tile(start, power_of_two(count), m, 0, power_of_two(size), size) as (row, block):
                found = e._load(e.memories[parts], row * size + block)
            self.totals[(whole, own)] = b.part(b.reduce(found, 1, "sum"), (0,), (count,))

    def bind_wholes(self, at: Size, columns: int) -> None:
        """Say what whole sums are for the tokens of a piece."""
        for whole in self.wholes:
            total = self.totals[(whole, self.kernel.own)]
            if isinstance(self.kernel, Matvec):
                pass  # one number
            elif not self.turned:
                total = self.e.column(total)
            else:
                total = self.b.part(total, (self.kernel.piece,), (columns,))
            self.e.bind(whole, unravel(at, whole.shape), total)

    def hand_on(self, own: Index, at_m: Size, row: Size, column: Size, shape: Shape) -> None:
        """Store the sums of a piece's blocks of columns."""
        b, e, turned, n = self.b, self.e, self.turned, self.problem.sizes[3]
        axis = 0 if turned else 1  # of the columns; turned, they are one block
        for v in self.block_sums:
            block, blocks = block_of(v), v.shape[-1]
            x = b.broadcast(e.value(v.inputs[0].inputs[0], own), shape)
            for start in range(0, shape[axis], block):
                first = (row, column)[axis] + start
                piece = x if turned else b.part(x, (0, start), (shape[0], block))
                total = b.reduce(piece, axis, "sum")
                offset = at_m * blocks + first // block
                total = total if turned else e.column(total)
                e.store(self.outputs[v], total, offset, b.less(first, n))

    def epilogue(self, *given: Any) -> Node:
        """What the Region stores, computed on a piece of each accumulator and of each matrix that
        the ring brought; last: where."""
        *pieces, (batch, row, column) = given
        piece: Node = pieces[0]
        with self.piece(piece.shape, (batch, row, column)) as (at_m, at_n):
            for part, sums in zip(self.parts, pieces):
                part.problem.bind(self.e, sums, batch, at_n)
            own = self.problem.result_index(batch, at_m, at_n)
            if self.totals:
                self.bind_wholes(at_m, piece.shape[1])
            for known in self.brought.get((self.kernel.own, self.kernel.piece), ()):
                self.e.bind(*known)
            for read, brought in zip(self.near, pieces[len(self.parts) :]):
                self.e.bind(read, own, self.b.cast(brought, read.dtype.wide))
            values = []
            for v in self.stored:
                at = self.problem.index_like(v, batch, at_m, at_n)
                values.append((v, at, self.e.value(v, at)))
            only = None
            if isinstance(self.kernel, Grouping):  # rows past the block's last are the next group's
                own_rows = self.b.less(at_m, self.kernel.last.size)
                only = self.b.broadcast(own_rows, piece.shape)
            for v, at, value in values[1:]:
                self.e.store(self.outputs[v], value, offset_of(v, at), only)
            self.hand_on(own, at_m, row, column, piece.shape)
            return self.b.broadcast(values[0][2], piece.shape)


def laid(region: Region) -> WideDot:
    """A Region as it is cut so far."""
    region.find_inputs()
    return WideDot(region)


def block_of(part: Node) -> int:
    """Columns of a block that a sum of blocks adds up."""
    return high(part.inputs[0].shape[-1])


def accepts(stored: Node, dot: Node) -> bool:
    """Whether the kernel can store a value that is computed of a dot's products."""
    taken = (bfloat16, float16, float32, float8_e4m3, int8, int32)
    return stored.size == dot.size and stored.dtype in taken
