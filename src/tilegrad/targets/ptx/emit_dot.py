"""Portable products of Tiles: `dot(a, b, c)` through shared memory.

bfloat16 and float16 with float32 sums go to the matrix units of a warp (ldmatrix, mma.sync);
everything else is multiplied and added in c's dtype, exactly rounded step by step, each thread
a rectangle of the result. Operands are laid down with rows that are 16 bytes longer than they
need to be, so that eight rows touch all banks, in two buffers that take turns, so that a
product costs one barrier. Invariant: float32 is never cut to fewer bits, and the order of a sum
over k is that of k.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.dtype import DType
from ...core.errors import InternalError
from ...ir.node import Node
from . import rules
from .element import convert, kind_of
from .emission import Emission
from .emit_matrix import lane_piece, sync_form
from .moves import load_matrices, read_run, runs_of
from .plan_spread import by_matrix, dot_spread, warp_grid
from .spread import Spread, accumulator_80
from .write import Registers, Writer, braced

PAD = 16  # bytes beyond each row
UNROLLED = 2048  # products of one thread that are written out, not looped over
Held = dict[tuple[int, ...], str]


@dataclass
class Laid:
    """An operand in shared memory: where it begins (for a thread, once it is known what part is
    its own), bytes of a row, whether k runs down the rows."""

    base: str
    stride: int
    k_rows: bool


def dot(e: Emission, node: Node) -> Registers:
    """c + a @ b."""
    values, (a, b, c) = e.values, node.inputs
    matrix = by_matrix(node)
    wide = node.dtype.wide
    dtype = a.dtype if matrix else wide
    to = e.plan.spread(node)
    if to not in [dot_spread(node, e.threads.count, rows) for rows in (False, True)]:
        to = dot_spread(node, e.threads.count)
    totals = values.get(c, to, wide)
    held = held_alike(e, a, to) if matrix else None
    sizes = [x.shape[0] * x.shape[1] * dtype.size + max(x.shape) * PAD for x in (b, a)]
    sizes = [-(-s // 16) * 16 for s in (sizes[:1] if held else sizes)]
    base = take_turn(e, node, sum(sizes))
    right = lay(e, b, dtype, base, matrix, True)
    left = held or lay(e, a, dtype, e.add(base, sizes[0]), matrix, False)
    e.shared.sync()
    if isinstance(left, Laid) and not matrix:
        found = by_threads(e, to, left, right, totals, a.shape[1], dtype)
    else:
        found = by_warps(e, node, to, left, right, totals)
    found = [convert(e, wide, values.dtype(node), r) for r in found]
    return values.planned(node, found, to)


def take_turn(e: Emission, node: Node, bytes_: int) -> str:
    """One of two buffers of a product's own; the other one next time."""
    bytes_ = -(-bytes_ // 128) * 128
    base = e.shared.base_of(("dot", node), 2 * bytes_)
    turn = e.memo.ever(("turn", node), lambda: e.new("b32"))
    e.shared.toggles[turn] = 0
    where = e.add(base, turn)
    e.put("sub.s32", turn, bytes_, turn)
    return where


def lay(e: Emission, x: Node, dtype: DType, base: str, free_turn: bool, right: bool) -> Laid:
    """Write an operand to shared memory, along the axis its registers run along."""
    own, registers = e.values.own(x, dtype)
    rows, columns = x.shape
    ways = []
    for turned in (False, True) if free_turn else (False,):
        stride = ((rows if turned else columns) * dtype.size + PAD) // dtype.size
        steps = [1, stride] if turned else [stride, 1]
        ways.append((len(runs_of(own, steps, 16, dtype.size)), turned, steps, stride))
    _, turned, steps, stride = min(ways, key=lambda way: way[:2])
    e.shared.lay(registers, base, own, steps, dtype)
    return Laid(base, stride * dtype.size, turned != right)


# ---- matrix units -------------------------------------------------------------------------------


def by_warps(
    e: Emission,
    node: Node,
    to: Spread,
    left: Laid | Held,
    right: Laid,
    totals: Registers,
) -> Registers:
    """Each warp multiplies 16 x 16 by 16 x 8 pieces."""
    (rows, columns), warps = node.shape, e.threads.count // 32
    whole_rows = to == dot_spread(node, e.threads.count, True)
    down, across = warp_grid(rows, columns, warps, whole_rows)
    high, wide = rows // down, columns // across
    held = [e.copy("b32", r) for r in totals]
    form = sync_form(node.inputs[0].dtype)
    first_row = warp_start(e, 5 + across.bit_length() - 1, down, high)
    first_column = warp_start(e, 5, across, wide)
    if isinstance(left, Laid):
        left.base = matrix_start(e, left, first_row, False)
    right.base = matrix_start(e, right, first_column, True)
    for step in range(0, node.inputs[0].shape[1], 16):
        a = [
            braced(loaded(e, left, i, step, 4))
            if isinstance(left, Laid)
            else own_piece(e, left, i, step)
            for i in range(0, high, 16)
        ]
        b = []
        for j in range(0, wide, 16):
            words = loaded(e, right, j, step, min(4, (wide - j) // 4))
            b += [braced(words[i : i + 2]) for i in range(0, len(words), 2)]
        for i in range(high // 16):
            for j in range(wide // 8):
                at = (i * (wide // 8) + j) * 4
                sums = braced(held[at : at + 4])
                e.put(form, sums, a[i], b[j], sums)
    return held


def held_alike(e: Emission, a: Node, to: Spread) -> Held | None:
    """Registers of a left operand that is held as a product's result is, whole rows by the
    warps that need them: it needs no shared memory."""
    if e.plan.free(a):
        return None
    own = e.plan.spread(a)
    if (
        a.shape[0] != to.shape[0]
        or own.fields != to.fields
        or any(axis == 1 and shift >= 5 for shift, _, axis, _ in own.fields)
    ):
        return None
    high = len({at[0] for at in to.registers})
    if own != accumulator_80(a.shape, a.shape[0] // (8 * high), 1):
        return None
    return dict(zip(own.registers, e.values.get(a, own)))


def own_piece(w: Writer, held: Held, row: int, step: int) -> str:
    """Four registers of a 16 x 16 piece of what a warp holds."""
    words = [
        w.value("mov.b32", braced((held[r, c], held[r, c + 1])))
        for c in (step, step + 8)
        for r in (row, row + 8)
    ]
    return braced(words)


def warp_start(e: Emission, shift: int, count: int, size: int) -> str:
    """The first row (or column) of this warp's part."""
    if count == 1:
        return ""
    return e.mul(e.threads.bits(shift, count.bit_length() - 1), size)


def matrix_start(e: Emission, laid: Laid, first: str, right: bool) -> str:
    """The address whose row this lane gives to ldmatrix.

    Matrices come in the order (0, 0), (8 along the result, 0), (0, 8 along k), (8, 8) for
    the left operand, and along k first for the right one.
    """
    row, piece = lane_piece(e, (right, (1, 1)), laid.k_rows)
    address = e.mad(piece, 16, e.mad(row, laid.stride, laid.base))
    return e.mad(first, 2 if laid.k_rows else laid.stride, address) if first else address


def loaded(w: Writer, laid: Laid, along: int, step: int, count: int) -> Registers:
    """Registers of the 8 x 8 pieces at (place along the result, place along k)."""
    row, column = (step, along) if laid.k_rows else (along, step)
    return load_matrices(w, f"[{laid.base}+{row * laid.stride + 2 * column}]", laid.k_rows, count)


# ---- threads ------------------------------------------------------------------------------------


def by_threads(
    e: Emission, to: Spread, left: Laid, right: Laid, totals: Registers, k: int, dtype: DType
) -> Registers:
    """Each thread multiplies its rows by its columns."""
    kind = kind_of(dtype)
    held = {at: e.copy(kind, r) for at, r in zip(to.registers, totals)}
    row, column = (e.threads.part(to, axis) for axis in (0, 1))
    if row:
        left.base = e.mad(row, left.stride, left.base)
    if column:
        right.base = e.mad(column, dtype.size, right.base)
    many = max(1, min(k, 16 // dtype.size))
    if len(held) * k <= UNROLLED:
        for step in range(0, k, many):
            multiply_steps(e, held, left, right, step, many, dtype)
        return [held[at] for at in to.registers]
    left.base, right.base = e.copy("b32", left.base), e.copy("b32", right.base)
    count, more, head = e.copy("b32", 0), e.new("pred"), e.label("products")
    e.place(head)
    with e.memo.inside():
        new = dict(held)
        multiply_steps(e, new, left, right, 0, many, dtype)
        e.move(list(held.values()), [new[at] for at in held], kind)
    further = {left.base: many * dtype.size, right.base: many * right.stride, count: many}
    for register, by in further.items():
        e.put("add.s32", register, register, by)
    e.put("setp.lt.s32", more, count, k)
    e.put("bra", head, guard=more)
    return [held[at] for at in to.registers]


def multiply_steps(
    w: Writer, held: Held, left: Laid, right: Laid, step: int, many: int, dtype: DType
) -> None:
    """Some steps of k: what a thread needs of both operands, then the products."""
    size = dtype.size
    rows, columns = (sorted({at[axis] for at in held}) for axis in (0, 1))
    if len(held) != len(rows) * len(columns):
        raise InternalError("ptx.emit", "a dot's result is not held in rectangles")
    x = {
        r: read_run(w, f"[{left.base}+{r * left.stride + step * size}]", "ld.shared", dtype, many)
        for r in rows
    }
    for i in range(many):
        y: dict[int, str] = {}
        for start, count in neighbours(columns, max(1, 16 // size)):
            where = f"[{right.base}+{(step + i) * right.stride + columns[start] * size}]"
            found = read_run(w, where, "ld.shared", dtype, count)
            y.update(zip(columns[start : start + count], found))
        for r in rows:
            for c in columns:
                held[r, c] = rules.apply(w, "multiply_add", dtype, x[r][i], y[c], held[r, c])


def neighbours(coordinates: list[int], most: int) -> list[tuple[int, int]]:
    """Runs (first, count) of consecutive aligned places, powers of two long."""
    line = Spread((coordinates[-1] + 1,), (), tuple((place,) for place in coordinates))
    return runs_of(line, [1], most, 16 // most)
