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

from ...core.dtype import DType, bfloat16, float32
from ...core.errors import InternalError
from ...ir.node import Node
from . import rules
from .emit_shape import ShapeEmitter
from .plan_spread import by_matrix, dot_spread, warp_grid
from .spread import Spread, accumulator_80

PAD = 16  # bytes beyond each row
UNROLLED = 2048  # products of one thread that are written out, not looped over


@dataclass
class Laid:
    """An operand in shared memory: where it begins, bytes of a row, whether rows are columns."""

    base: str
    stride: int
    turned: bool


class DotEmitter(ShapeEmitter):
    """Emits dot."""

    def emit_dot(self, node: Node) -> None:
        a, b, c = node.inputs
        matrix = by_matrix(node)
        narrow = node.dtype.is_float and node.dtype.bits < 32
        wide = float32 if narrow else node.dtype
        dtype = a.dtype if matrix else wide
        to = self.plan.spread(node)
        if to not in [dot_spread(node, self.threads, rows) for rows in (False, True)]:
            to = dot_spread(node, self.threads)
        totals = self.converted(self.get(c, to), self.dtype(c), wide)
        held = self.held_alike(a, to) if matrix else None
        sizes = [x.shape[0] * x.shape[1] * dtype.size + max(x.shape) * PAD for x in (b, a)]
        sizes = [-(-s // 16) * 16 for s in (sizes[:1] if held else sizes)]
        base = self.take_turn(node, sum(sizes))
        right = self.lay(b, dtype, base, free_turn=matrix)
        left = Laid("", 0, False)
        if not held:
            second = self.w.value("b32", "add.s32", base, str(sizes[0]))
            left = self.lay(a, dtype, second, free_turn=matrix)
        self.sync()
        if matrix:
            found = self.by_warps(node, to, left, right, totals, held)
        else:
            found = self.by_threads(to, left, right, totals, a.shape[1], dtype)
        found = self.converted(found, wide, self.dtype(node))
        own = self.plan.spread(node)
        self.held[node] = found if own == to else self.change(node, found, to, own)

    def converted(self, registers: list[str], source: DType, to: DType) -> list[str]:
        """Registers in another dtype."""
        if source is to:
            return registers
        return [rules.convert(self.w, source, to, r) for r in registers]

    def take_turn(self, node: Node, bytes_: int) -> str:
        """One of two buffers of a product's own; the other one next time."""
        bytes_ = -(-bytes_ // 128) * 128
        base = self.scratch_base(("dot", node), 2 * bytes_)
        turn = self.known(("turn", node)) or self.w.new("b32")
        self.made[0][("turn", node)] = turn
        self.toggles[turn] = 0
        where = self.w.value("b32", "add.s32", base, turn)
        self.w.put("sub.s32", turn, str(bytes_), turn)
        return where

    def lay(self, x: Node, dtype: DType, base: str, free_turn: bool) -> Laid:
        """Write an operand to shared memory, along the axis its registers run along."""
        own = self.spread_of(x)
        registers = self.converted(self.get(x, own), self.dtype(x), dtype)
        rows, columns = x.shape
        ways = []
        for turned in (False, True) if free_turn else (False,):
            stride = ((rows if turned else columns) * dtype.size + PAD) // dtype.size
            steps = [1, stride] if turned else [stride, 1]
            ways.append((len(self.runs(own, steps, 16, dtype.size)), turned, steps, stride))
        _, turned, steps, stride = min(ways, key=lambda way: way[:2])
        address, offsets, runs = self.row_major(base, own, steps, dtype.size, 16)
        owner = self.owner(own)
        for at, count in runs:
            self.write_run(
                f"[{address}+{offsets[at]}]", "st.shared", dtype, registers[at : at + count], owner
            )
        return Laid(base, stride * dtype.size, turned)

    # ---- matrix units -----------------------------------------------------------------------

    def by_warps(
        self,
        node: Node,
        to: Spread,
        left: Laid,
        right: Laid,
        totals: list[str],
        a_held: dict[tuple[int, ...], str] | None,
    ) -> list[str]:
        """Each warp multiplies 16 x 16 by 16 x 8 pieces."""
        w, k = self.w, node.inputs[0].shape[1]
        rows, columns = node.shape
        whole_rows = to == dot_spread(node, self.threads, True)
        down, across = warp_grid(rows, columns, self.threads // 32, whole_rows)
        high, wide = rows // down, columns // across
        held = [w.value("b32", "mov.b32", r) for r in totals]
        name = "bf16" if node.inputs[0].dtype is bfloat16 else "f16"
        form = f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32"
        column_bits = across.bit_length() - 1
        first_row = self.warp_start(5 + column_bits, down, high)
        first_column = self.warp_start(5, across, wide)
        a_start = "" if a_held else self.matrix_start(left, first_row, left.turned, False)
        b_start = self.matrix_start(right, first_column, not right.turned, True)
        for step in range(0, k, 16):
            a = [
                self.own_fragment(a_held, 16 * i, step)
                if a_held
                else self.fragment_of(left, a_start, 16 * i, step, left.turned)
                for i in range(high // 16)
            ]
            b = self.right_fragments(right, b_start, wide, step)
            for i in range(high // 16):
                for j in range(wide // 8):
                    at = (i * (wide // 8) + j) * 4
                    sums = "{" + ", ".join(held[at : at + 4]) + "}"
                    w.put(form, sums, a[i], b[j], sums)
        return held

    def held_alike(self, a: Node, to: Spread) -> dict[tuple[int, ...], str] | None:
        """Registers of a left operand that is held as a product's result is, whole rows by the
        warps that need them: it needs no shared memory."""
        if self.plan.free(a):
            return None
        own = self.plan.spread(a)
        if (
            a.shape[0] != to.shape[0]
            or own.fields != to.fields
            or any(axis == 1 and shift >= 5 for shift, _, axis, _ in own.fields)
        ):
            return None
        high = len({at[0] for at in to.registers})
        if own != accumulator_80(a.shape, a.shape[0] // (8 * high), 1):
            return None
        return dict(zip(own.registers, self.get(a, own)))

    def own_fragment(self, held: dict[tuple[int, ...], str], row: int, step: int) -> str:
        """Four registers of a 16 x 16 piece of what a warp holds."""
        words = [
            self.w.value("b32", "mov.b32", f"{{{held[r, c]}, {held[r, c + 1]}}}")
            for c in (step, step + 8)
            for r in (row, row + 8)
        ]
        return "{" + ", ".join(words) + "}"

    def warp_start(self, shift: int, count: int, size: int) -> str:
        """The first row (or column) of this warp's part."""
        if count == 1:
            return ""
        number = self.bits(shift, count.bit_length() - 1)
        return self.w.value("b32", "mul.lo.s32", number, str(size))

    def matrix_start(self, laid: Laid, first: str, k_rows: bool, right: bool) -> str:
        """The address whose row this lane gives to ldmatrix.

        Matrices come in the order (0, 0), (8 along the result, 0), (0, 8 along k), (8, 8) for
        the left operand, and along k first for the right one; `k_rows` says that k runs down
        the rows of what was laid.
        """
        w = self.w
        lane = self.bits(0, 5)
        row = w.value("b32", "and.b32", lane, "7")
        low = w.value("b32", "and.b32", w.value("b32", "shr.u32", lane, "3"), "1")
        high = w.value("b32", "shr.u32", lane, "4")
        along_result, along_k = (high, low) if right else (low, high)
        down, across = (along_k, along_result) if k_rows else (along_result, along_k)
        row = w.value("b32", "mad.lo.s32", down, "8", row)
        address = w.value("b32", "mad.lo.s32", row, str(laid.stride), laid.base)
        address = w.value("b32", "mad.lo.s32", across, "16", address)
        if first:
            step = 2 if k_rows else laid.stride
            address = w.value("b32", "mad.lo.s32", first, str(step), address)
        return address

    def offset_of(self, laid: Laid, along: int, step: int, k_rows: bool) -> int:
        """Bytes from the start to (place along the result, place along k)."""
        return step * laid.stride + 2 * along if k_rows else along * laid.stride + 2 * step

    def fragment_of(self, laid: Laid, start: str, row: int, step: int, k_rows: bool) -> str:
        """Four registers of a 16 x 16 piece of the left operand."""
        registers = [self.w.new("b32") for _ in range(4)]
        form = "ldmatrix.sync.aligned.m8n8.x4" + (".trans" if k_rows else "") + ".shared.b16"
        text = "{" + ", ".join(registers) + "}"
        self.w.put(form, text, f"[{start}+{self.offset_of(laid, row, step, k_rows)}]")
        return text

    def right_fragments(self, laid: Laid, start: str, wide: int, step: int) -> list[str]:
        """Pairs of registers of the 16 x 8 pieces of the right operand."""
        k_rows, found = not laid.turned, []
        for j in range(0, wide, 16):
            count = min(4, (wide - j) // 4)
            registers = [self.w.new("b32") for _ in range(count)]
            form = f"ldmatrix.sync.aligned.m8n8.x{count}" + (".trans" if k_rows else "")
            self.w.put(
                f"{form}.shared.b16",
                "{" + ", ".join(registers) + "}",
                f"[{start}+{self.offset_of(laid, j, step, k_rows)}]",
            )
            found += ["{" + ", ".join(registers[i : i + 2]) + "}" for i in range(0, count, 2)]
        return found

    # ---- threads --------------------------------------------------------------------------

    def by_threads(
        self, to: Spread, left: Laid, right: Laid, totals: list[str], k: int, dtype: DType
    ) -> list[str]:
        """Each thread multiplies its rows by its columns."""
        w, kind = self.w, rules.kind_of(dtype)
        rows = sorted({at[0] for at in to.registers})
        columns = sorted({at[1] for at in to.registers})
        if set(to.registers) != {(r, c) for r in rows for c in columns}:
            raise InternalError("ptx.emit", "a dot's result is not held in rectangles")
        held = {
            at: w.value(kind, "mov.pred" if kind == "pred" else f"mov.{kind}", r)
            for at, r in zip(to.registers, totals)
        }
        a, b = left.base, right.base
        row, column = (self.thread_part(to.fields, axis) for axis in (0, 1))
        if row is not None:
            a = w.value("b32", "mad.lo.s32", row, str(left.stride), a)
        if column is not None:
            b = w.value("b32", "mad.lo.s32", column, str(dtype.size), b)
        many = max(1, min(k, 16 // dtype.size))
        steps = range(0, k, many)
        if len(held) * k <= UNROLLED:
            for step in steps:
                self.multiply(held, rows, columns, a, b, left, right, step, many, dtype)
            return [held[at] for at in to.registers]
        a, b = w.value("b32", "mov.b32", a), w.value("b32", "mov.b32", b)
        count, more, again = w.value("b32", "mov.b32", "0"), w.new("pred"), w.label("products")
        w.place(again)
        self.made.append({})
        new = dict(held)
        self.multiply(new, rows, columns, a, b, left, right, 0, many, dtype)
        for at, register in held.items():
            self.move([register], [new[at]], kind)
        self.made.pop()
        w.put("add.s32", a, a, str(many * dtype.size))
        w.put("add.s32", b, b, str(many * right.stride))
        w.put("add.s32", count, count, str(many))
        w.put("setp.lt.s32", more, count, str(k))
        w.put("bra", again, guard=more)
        return [held[at] for at in to.registers]

    def multiply(
        self,
        held: dict[tuple[int, ...], str],
        rows: list[int],
        columns: list[int],
        a: str,
        b: str,
        left: Laid,
        right: Laid,
        step: int,
        many: int,
        dtype: DType,
    ) -> None:
        """Some steps of k: what a thread needs of both operands, then the products."""
        w, size = self.w, dtype.size
        x = {
            r: self.read_run(f"[{a}+{r * left.stride + step * size}]", "ld.shared", dtype, many)
            for r in rows
        }
        for i in range(many):
            y: dict[int, str] = {}
            for start, count in neighbours(columns, max(1, 16 // size)):
                where = f"[{b}+{(step + i) * right.stride + columns[start] * size}]"
                found = self.read_run(where, "ld.shared", dtype, count)
                y.update(zip(columns[start : start + count], found))
            for r in rows:
                for c in columns:
                    one, other, total = x[r][i], y[c], held[r, c]
                    if dtype.is_float:
                        held[r, c] = rules.apply(w, "multiply_add", dtype, one, other, total)
                        continue
                    product = rules.apply(w, "multiply", dtype, one, other)
                    held[r, c] = rules.apply(w, "add", dtype, total, product)


def neighbours(places: list[int], most: int) -> list[tuple[int, int]]:
    """Runs (first, count) of consecutive aligned places, powers of two long."""
    found, start = [], 0
    while start < len(places):
        count = 1
        while (
            2 * count <= most
            and start + 2 * count <= len(places)
            and (
                places[start + 2 * count - 1] == places[start] + 2 * count - 1
                and places[start] % (2 * count) == 0
            )
        ):
            count *= 2
        found.append((start, count))
        start += count
    return found
