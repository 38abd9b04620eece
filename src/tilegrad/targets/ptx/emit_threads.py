"""What the threads of a role do together: cp.async, bulk copies of pages, ldmatrix, mma.sync.

Copies move 16 bytes a thread, neighbouring threads along the rows of the Memory; what lies
outside is filled with zeros by a source of no bytes. Warps of a product stand in a grid and take
turns along both axes, 16 rows or columns each, so that any whole turn of the result is a
rectangle. Addresses in swizzled places differ by constants that are added (rows, blocks) or
exchanged (16-byte pieces within a block), so each lane computes one address for each operand.
Invariant: places are those of `emit_placed`: column blocks of one swizzle span.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...core.dtype import bfloat16, float16, int32
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import Expr, Size
from ...ir.types import Memory
from ...tile.bounds import divisor_of
from .emit_memory import all_nodes
from .emit_send import SendEmitter
from .emit_shared import SWIZZLES
from .spread import Spread

PIECE = 16  # bytes that one thread moves
DEPTH = 16  # of one matrix product
WARP = 32
CACHE_HINTS = {"first": "0x12F0000000000000"}  # what is read once leaves caches first
MATRIX_TYPES = {bfloat16: "bf16", float16: "f16"}


@dataclass(frozen=True)
class Walk:
    """How threads walk a box of a place: pieces in a row, rows of a round, rounds."""

    pieces: int
    rows: int  # that all threads take at once
    rounds: int
    guard: str  # holds for threads with work; '' for all


@dataclass
class Register:
    """An operand of matrix_sync: which side, the grid of warps, words of each 16 x 16 block."""

    right: bool
    warps: tuple[int, int]
    words: list[list[str]]


class ThreadsEmitter(SendEmitter):
    """Emits copy_threads, copy_pages, store_threads, load_operand and matrix_sync."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.registers: dict[Node, Register] = {}

    def emit_named_sync(self, node: Node) -> None:
        super().emit_named_sync(node)
        if node.attrs["threads"] == self.threads:  # all of this role and nobody else
            self.hazards.meet()

    # ---- copies ---------------------------------------------------------------------------

    def emit_commit_threads(self, node: Node) -> None:
        self.w.put("cp.async.commit_group")

    def emit_wait_threads(self, node: Node) -> None:
        self.w.put("cp.async.wait_group", str(node.attrs["pending"]))

    def emit_copy_threads(self, node: Node) -> None:
        place, memory = node.inputs[:2]
        rank = len(memory.shape)
        index, lead = node.inputs[2 : 2 + rank], node.inputs[2 + rank :]
        walk = self.walk_of(node, place)
        into = self.pieces_at(place, lead, walk, node.attrs["row"])
        source = self.pieces_of(memory, index, node.attrs["axes"], walk)
        inside = self.pieces_inside(memory, index, node, walk)
        for where, address, held in zip(into, source, inside):
            size = [] if not held else [self.w.value("b32", "selp.b32", str(PIECE), "0", held)]
            self.w.put(
                "cp.async.cg.shared.global.L2::128B",
                where,
                address,
                str(PIECE),
                *size,
                guard=walk.guard,
            )

    def emit_copy_pages(self, node: Node) -> None:
        """A copy for each span of each page, issued by a lane of its own."""
        place, memory, barrier, stage, pages = node.inputs[:5]
        rank, w = len(memory.shape), self.w
        index, lead = node.inputs[5 : 5 + rank], node.inputs[5 + rank :]
        type_ = place.type
        assert isinstance(type_, Memory)
        box, spans, _ = self.boxes(type_, node.attrs["shape"])
        count = int(pages.shape[0])
        map_ = self.map_of(memory, type_, box, node.attrs["axes"])
        bytes_ = SWIZZLES[type_.layout] or box[-1] * type_.dtype.size  # of a row of a span
        number = self.resize(self.get(pages, self.plan.spread(pages))[0], self.dtype(pages), int32)
        base, landing = self.lead_address(place, lead), self.barrier_address(barrier, stage)
        found = [self.index32(i) for i in index]
        span_bytes = int(type_.shape[-2]) * bytes_
        form, hint = self.page_copy(rank, node.attrs["hint"])
        for first in range(0, spans * count, WARP):
            lane = w.value("b32", "add.s32", self.thread, str(first)) if first else self.thread
            page, span = self.divided(lane, spans)
            at = list(found)
            at[0] = w.value("b32", "shfl.sync.idx.b32", number, page, "31", "-1")
            at[0] = w.value("b32", "add.s32", at[0], found[0])
            at[-1] = w.value("b32", "mad.lo.s32", span, str(box[-1]), found[-1])
            address = w.value("b32", "mad.lo.s32", page, str(box[0] * bytes_), base)
            address = w.value("b32", "mad.lo.s32", span, str(span_bytes), address)
            last = min(WARP, spans * count - first)
            mine = w.value("pred", "setp.lt.s32", self.thread, str(last))
            where = "{" + ", ".join(reversed(at)) + "}"
            w.put(
                form,
                f"[{address}]",
                f"[{self.map_addresses[map_]}, {where}]",
                f"[{landing}]",
                *hint,
                guard=mine,
            )

    def page_copy(self, rank: int, hint: str) -> tuple[str, list[str]]:
        """The form of a copy of copy_pages, and its operand for a cache hint."""
        form = (
            f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        )
        if not hint:
            return form, []
        return form + ".L2::cache_hint", [self.w.value("b64", "mov.b64", CACHE_HINTS[hint])]

    def divided(self, number: str, by: int) -> tuple[str, str]:
        """(quotient, remainder) of a number that is not negative."""
        if by == 1:
            return number, self.constant32(0)
        whole = self.w.value("b32", "div.u32", number, str(by))
        return whole, self.w.value("b32", "rem.u32", number, str(by))

    def emit_store_threads(self, node: Node) -> None:
        memory, place = node.inputs[:2]
        rank = len(memory.shape)
        index, lead = node.inputs[2 : 2 + rank], node.inputs[2 + rank :]
        walk = self.walk_of(node, place)
        inside = self.pieces_inside(memory, index, node, walk)
        words = []
        for where in self.pieces_at(place, lead, walk, 0):
            words.append("{" + ", ".join(self.w.new("b32") for _ in range(4)) + "}")
            self.w.put("ld.shared.v4.b32", words[-1], where, guard=walk.guard)
        into = self.pieces_of(memory, index, node.attrs["axes"], walk)
        for address, held, word in zip(into, inside, words):
            guard = held or walk.guard
            if held and walk.guard:
                guard = self.w.value("pred", "and.pred", held, walk.guard)
            self.w.put("st.global.v4.b32", address, word, guard=guard)

    def emit_clear_rows(self, node: Node) -> None:
        place, start, stop = node.inputs[:3]
        w, zero = self.w, self.constant32(0)
        walk = self.walk_over(place.shape[-2:], place)
        row, _ = self.walker(walk)
        first, last = self.index32(start), self.index32(stop)
        for round_, where in enumerate(self.pieces_at(place, node.inputs[3:], walk, 0)):
            at = w.value("b32", "add.s32", row, str(round_ * walk.rows)) if round_ else row
            inside = self.both(
                w.value("pred", "setp.ge.s32", at, first), w.value("pred", "setp.lt.s32", at, last)
            )
            w.put(
                "st.shared.v4.b32",
                where,
                "{" + ", ".join([zero] * 4) + "}",
                guard=self.both(inside, walk.guard),
            )

    def walk_of(self, node: Node, place: Node) -> Walk:
        """How the role's threads share a box."""
        return self.walk_over(node.attrs["shape"], place)

    def walk_over(self, shape: Any, place: Node) -> Walk:
        """How the role's threads share rows and columns of a place."""
        rows, columns = shape
        pieces, odd = divmod(columns * place.dtype.size, PIECE)
        if odd or pieces & (pieces - 1) or pieces > self.threads:
            raise InternalError("ptx.emit", f"threads do not share rows of {columns} elements")
        at_once = self.threads // pieces
        if rows < at_once:
            guard = self.w.value("pred", "setp.lt.s32", self.thread, str(rows * pieces))
            return Walk(pieces, at_once, 1, guard)
        if rows % at_once or self.threads & (self.threads - 1):
            raise InternalError("ptx.emit", f"{self.threads} threads do not share {rows} rows")
        return Walk(pieces, at_once, rows // at_once, "")

    def walker(self, walk: Walk) -> tuple[str, str]:
        """(row, piece) of this thread in the first round."""
        key = ("walker", self.thread, walk.pieces)
        found = self.known(key)
        if found is None:
            bits = walk.pieces.bit_length() - 1
            row = self.w.value("b32", "shr.u32", self.thread, str(bits))
            piece = self.w.value("b32", "and.b32", self.thread, str(walk.pieces - 1))
            found = self.keep(key, (row, piece))
        return found

    def pieces_at(self, place: Node, lead: tuple[Node, ...], walk: Walk, first: int) -> list[str]:
        """Where this thread's pieces lie in a place, from row `first` on."""
        type_, w = place.type, self.w
        assert isinstance(type_, Memory)
        rows = int(type_.shape[-2])
        span = SWIZZLES[type_.layout] or int(type_.shape[-1]) * type_.dtype.size
        turns = SWIZZLES[type_.layout] // PIECE
        if turns and first % 8:
            raise InternalError("ptx.emit", f"row {first} of a swizzled place")
        key = ("piece", self.thread, walk.pieces, span, rows, turns)
        own = self.known(key)
        if own is None:
            row, piece = self.walker(walk)
            own = self.keep(key, self.piece_offset(row, piece, span, rows, turns))
        base = w.value("b32", "add.s32", self.lead_address(place, lead), own)
        known = {0: base}
        found = []
        for at in range(0, walk.rounds * walk.rows, walk.rows):
            turn = turn_of(at, span, turns)
            if turn not in known:
                known[turn] = w.value("b32", "xor.b32", base, str(turn * PIECE))
            found.append(f"[{known[turn]}+{(first + at) * span}]")
        return found

    def piece_offset(self, row: str, piece: str, span: int, rows: int, turns: int) -> str:
        """The offset of a 16-byte piece of a row, in a place of so many rows."""
        w = self.w
        if not turns:
            return w.value(
                "b32", "mad.lo.s32", row, str(span), w.value("b32", "shl.b32", piece, "4")
            )
        block = w.value("b32", "shr.u32", piece, str(turns.bit_length() - 1))
        inner = w.value("b32", "and.b32", piece, str(turns - 1))
        turn = w.value("b32", "shr.u32", w.value("b32", "mul.lo.s32", row, str(span)), "7")
        turn = w.value("b32", "and.b32", turn, str(turns - 1))
        inner = w.value("b32", "shl.b32", w.value("b32", "xor.b32", inner, turn), "4")
        inner = w.value("b32", "mad.lo.s32", row, str(span), inner)
        return w.value("b32", "mad.lo.s32", block, str(rows * span), inner)

    def pieces_of(
        self, memory: Node, index: tuple[Node, ...], axes: tuple[int, int], walk: Walk
    ) -> list[str]:
        """Where this thread's pieces lie in a Memory."""
        type_, w = memory.type, self.w
        assert isinstance(type_, Memory)
        strides, size = type_.element_strides(), type_.dtype.size
        if strides[axes[1]] != 1 or any(divisor_of(s) * size % PIECE for s in strides if s != 1):
            raise InternalError("ptx.emit", f"no pieces of 16 bytes walk {type_} along {axes}")
        step = strides[axes[0]]
        key = ("own", self.thread, memory, walk)
        own = self.known(key)
        if own is None:
            row, piece = self.walker(walk)
            part = w.value("b64", "mul.wide.s32", piece, str(PIECE))
            own = w.value("b64", "add.s64", self.scaled(row, step, size), part)
            own = self.keep(key, w.value("b64", "add.s64", own, self.pointers[memory]))
        base, further = self.summed(key, own, index, strides, size)
        found = []
        for at in range(0, walk.rounds * walk.rows, walk.rows):
            if isinstance(step, int):
                found.append(f"[{base}+{at * step * size + further}]")
                continue
            part = self.scaled(self.constant32(at), step, size)
            found.append(f"[{w.value('b64', 'add.s64', base, part)}+{further}]")
        return found

    def summed(
        self,
        key: tuple[object, ...],
        own: str,
        index: tuple[Node, ...],
        strides: tuple[Size, ...],
        size: int,
    ) -> tuple[str, int]:
        """(own address and the bytes of an index, further bytes that are constant).

        What was summed before, around this Block too, is not summed again: the axis that varies
        comes last.
        """
        terms, constant = [], 0
        for node, stride in zip(index, strides):
            if isinstance(stride, int):
                node, more = plus_constant(node)
                constant += more * stride * size
            if node.op.name != "constant" or isinstance(stride, Expr):
                terms.append((node, stride))
        terms.sort(key=lambda term: self.known((*key, term)) is None)
        base = own
        for term in terms:
            key = (*key, term)
            found = self.known(key)
            if found is None:
                part = self.scaled(self.index32(term[0]), term[1], size)
                found = self.keep(key, self.w.value("b64", "add.s64", base, part))
            base = found
        return base, constant

    def scaled(self, index: str, stride: object, size: int) -> str:
        """Bytes of an index along an axis, in 64 bits."""
        w = self.w
        if isinstance(stride, int) and stride * size < 1 << 31:
            return w.value("b64", "mul.wide.s32", index, str(stride * size))
        wide = w.value("b64", "cvt.s64.s32", index)
        part = w.value("b64", "mul.lo.s64", wide, self.size64(stride))  # type: ignore[arg-type]
        return w.value("b64", "mul.lo.s64", part, str(size))

    def pieces_inside(
        self, memory: Node, index: tuple[Node, ...], node: Node, walk: Walk
    ) -> list[str]:
        """For each piece a predicate that it lies inside of the Memory; '' where it must."""
        type_, w = memory.type, self.w
        assert isinstance(type_, Memory)
        (rows, columns), (down, across) = node.attrs["shape"], node.attrs["axes"]
        each = PIECE // type_.dtype.size
        if divisor_of(type_.shape[across]) % each or self.bounds.divisor(index[across]) % each:
            raise InternalError("ptx.emit", f"rows of {type_} do not end with a piece")
        row, piece = self.walker(walk)
        held = ""
        if not self.fits(type_, index, across, columns):
            at = w.value("b32", "mad.lo.s32", piece, str(each), self.index32(index[across]))
            held = w.value("pred", "setp.lt.u32", at, self.limit(type_, across))
        if self.fits(type_, index, down, rows):
            return [held] * walk.rounds
        first = w.value("b32", "add.s32", self.index32(index[down]), row)
        found = []
        for step in range(0, walk.rounds * walk.rows, walk.rows):  # below 0 is far above, unsigned
            at = w.value("b32", "add.s32", first, str(step)) if step else first
            mine = w.value("pred", "setp.lt.u32", at, self.limit(type_, down))
            found.append(w.value("pred", "and.pred", mine, held) if held else mine)
        return found

    def fits(self, type_: Memory, index: tuple[Node, ...], axis: int, size: int) -> bool:
        """Whether a box surely lies inside along an axis."""
        limit = type_.shape[axis]
        low, high = self.bounds.range(index[axis])
        return isinstance(limit, int) and low >= 0 and high + size <= limit

    def limit(self, type_: Memory, axis: int) -> str:
        """The size of a Memory along an axis, in 32 bits."""
        size = type_.shape[axis]
        if isinstance(size, int):
            return self.constant32(size)
        return self.w.value("b32", "cvt.u32.u64", self.size64(size))

    # ---- products -------------------------------------------------------------------------

    @cached_property
    def operands(self) -> dict[Node, tuple[bool, tuple[int, int]]]:
        """Register places that are operands of matrix_sync: whether right, and the warps."""
        found = {}
        for node in all_nodes(self.body.block):
            if node.op.name == "matrix_sync":
                for right, operand in enumerate(node.inputs[1:]):
                    found[operand] = (bool(right), node.attrs["warps"])
        return found

    def emit_register_tile(self, node: Node) -> None:
        if node not in self.operands:
            super().emit_register_tile(node)
            return
        right, warps = self.operands[node]
        rows, depth = node.shape
        blocks, odd = divmod(rows, 16 * warps[right])
        if odd or depth != DEPTH or node.dtype not in MATRIX_TYPES:
            raise InternalError("ptx.emit", f"{node.type} is no operand of {warps} warps")
        words = [[self.w.new("b32") for _ in range(4)] for _ in range(blocks)]
        self.registers[node] = Register(right, warps, words)

    def emit_load_operand(self, node: Node) -> None:
        """ldmatrix, 16 x 16 at a time.

        Four 8 x 8 matrices come in the order of the registers of mma: down the result first for
        the left operand, along k first for the right one; where k runs down the rows of the
        place they are transposed on the way.
        """
        operand, place = node.inputs[:2]
        held, start, k_rows = (
            self.registers[operand],
            node.attrs["start"],
            node.attrs["transpose"],
        )
        type_, w = place.type, self.w
        assert isinstance(type_, Memory)
        span = SWIZZLES[type_.layout]
        turns, rows = span // PIECE, int(type_.shape[-2])
        if not span or start % DEPTH:
            raise InternalError("ptx.emit", f"no operand comes from {type_} at {start}")
        address = w.value(
            "b32",
            "add.s32",
            self.lead_address(place, node.inputs[2:]),
            self.lane_start(held, span, rows, turns, k_rows),
        )
        form = "ldmatrix.sync.aligned.m8n8.x4" + (".trans" if k_rows else "") + ".shared.b16"
        apart, known = 16 * held.warps[held.right], {0: address}
        for number, words in enumerate(held.words):
            along = number * apart
            row, column = (start, along) if k_rows else (along, start)
            block, piece = divmod(column * type_.dtype.size // PIECE, turns)
            if piece not in known:
                known[piece] = w.value("b32", "xor.b32", address, str(piece * PIECE))
            where = f"[{known[piece]}+{row * span + block * rows * span}]"
            w.put(form, "{" + ", ".join(words) + "}", where)

    def lane_start(self, held: Register, span: int, rows: int, turns: int, k_rows: bool) -> str:
        """The offset of the row that this lane gives to ldmatrix for the warp's first block."""
        key = ("lane start", self.thread, held.right, held.warps, span, rows, k_rows)
        found = self.known(key)
        if found is not None:
            return found
        w, lane = self.w, self.bits(0, 5)
        low = w.value("b32", "and.b32", w.value("b32", "shr.u32", lane, "3"), "1")
        high = w.value("b32", "shr.u32", lane, "4")
        along, deep = (high, low) if held.right else (low, high)
        warp = self.warp_of(held)
        if warp:
            along = w.value("b32", "mad.lo.s32", warp, "2", along)
        down, piece = (deep, along) if k_rows else (along, deep)
        row = w.value("b32", "mad.lo.s32", down, "8", w.value("b32", "and.b32", lane, "7"))
        return self.keep(key, self.piece_offset(row, piece, span, rows, turns))

    def warp_of(self, held: Register) -> str:
        """This warp's place along the operand's side of the grid; '' where there is one."""
        across, count = held.warps[1], held.warps[held.right]
        if count == 1:
            return ""
        shift = 5 if held.right else 5 + across.bit_length() - 1
        return self.bits(shift, count.bit_length() - 1)

    def emit_matrix_sync(self, node: Node) -> None:
        total, a, b = node.inputs
        sums, left, right = self.places[total], self.registers[a].words, self.registers[b].words
        if self.threads != 32 * node.attrs["warps"][0] * node.attrs["warps"][1]:
            raise InternalError("ptx.emit", f"{self.threads} threads are not {node.attrs['warps']}")
        name = MATRIX_TYPES[a.dtype]
        form = f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32"
        wide = 2 * len(right)
        for i, words in enumerate(left):
            for step in range(wide):
                j = wide - 1 - step if i % 2 else step  # back and forth: one operand stays
                at = (i * wide + j) * 4
                held = "{" + ", ".join(sums[at : at + 4]) + "}"
                pair = right[j // 2][2 * (j % 2) : 2 * (j % 2) + 2]
                self.w.put(
                    form, held, "{" + ", ".join(words) + "}", "{" + ", ".join(pair) + "}", held
                )

    # ---- places ---------------------------------------------------------------------------

    def swizzled_runs(
        self, type_: Memory, base: str, spread: Spread, swizzle: int
    ) -> list[tuple[str, int, int]]:
        """As any Tile, but with one address a thread where registers only add and exchange."""
        size, w = type_.dtype.size, self.w
        span, rows = swizzle // size, int(type_.shape[-2])
        runs = self.runs(spread, [rows * span, 1], PIECE, size)
        reach = [0, 0]
        for _, width, axis, stride in spread.fields:
            reach[axis] |= ((1 << width) - 1) * stride
        starts = [spread.registers[start] for start, _ in runs]
        apart = all(r % 8 == 0 and not r & reach[0] and not c & reach[1] for r, c in starts)
        whole = all(c * size % PIECE == 0 for _, c in starts)
        if not apart or not whole or not disjoint(spread) or size > PIECE:
            return super().swizzled_runs(type_, base, spread, swizzle)
        key = ("run", self.thread, spread.fields, swizzle, rows, size)
        own = self.known(key)
        if own is None:
            row, column = (
                self.thread_part(spread.fields, axis) or self.constant32(0) for axis in (0, 1)
            )
            bytes_ = w.value("b32", "mul.lo.s32", column, str(size))
            piece = w.value("b32", "shr.u32", bytes_, "4")
            rest = w.value("b32", "and.b32", bytes_, str(PIECE - 1))
            own = self.piece_offset(row, piece, swizzle, rows, swizzle // PIECE)
            own = self.keep(key, w.value("b32", "add.s32", own, rest))
        address, found = w.value("b32", "add.s32", base, own), []
        known = {0: address}
        for (start, count), (r, c) in zip(runs, starts):
            block, number = divmod(c * size // PIECE, swizzle // PIECE)
            if number not in known:
                known[number] = w.value("b32", "xor.b32", address, str(number * PIECE))
            where = f"[{known[number]}+{r * swizzle + block * rows * swizzle}]"
            found.append((where, start, count))
        return found


def plus_constant(node: Node) -> tuple[Node, int]:
    """(a scalar, a constant) whose sum a scalar is: the constant is no part of it."""
    constant = 0
    while node.op.name == "add" and node.inputs[1].op.name == "constant":
        constant += int(node.inputs[1].attrs["value"])
        node = node.inputs[0]
    if node.op.name == "constant":
        constant += int(node.attrs["value"])
    return node, constant


def disjoint(spread: Spread) -> bool:
    """Whether the parts that threads add to a coordinate never carry into one another."""
    taken = [0] * len(spread.shape)
    for _, width, axis, stride in spread.fields:
        mask = ((1 << width) - 1) * stride
        if stride & (stride - 1) or taken[axis] & mask:
            return False
        taken[axis] |= mask
    return True


def turn_of(row: int, span: int, turns: int) -> int:
    """By what the 16-byte pieces of a row are exchanged."""
    return (row * span >> 7) & (turns - 1) if turns else 0


__all__ = ["ThreadsEmitter"]
