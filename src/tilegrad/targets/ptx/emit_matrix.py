"""Products on matrix units: wgmma over places, and mma.sync of what a role's warps hold.

Warps of mma.sync stand in a grid and take turns along both axes, 16 rows or columns each, so that
any whole turn of the result is a rectangle.

A descriptor of a shared operand of wgmma is 64 bits: the address, the distances between groups of 8
rows and between column blocks, in units of 16 bytes, and the swizzle. Only its low half depends on
where the operand lies, so a step along k or to another block of rows is one addition. Invariant: a
product's registers are those of its places; nothing is copied on the way.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...core.dtype import DType, bfloat16, float8_e4m3, float8_e5m2, float16, float32, int8, int32
from ...core.errors import InternalError
from ...ir.node import Node
from ...tile.placed import apart, kept_words
from ...tile.row import Touch, memory_of, touches_of
from .addresses import Exchanged, Lie, lead_address, lie_of, piece_offset
from .element import widen_word
from .emission import Emission
from .moves import load_matrices
from .write import Registers, braced, several, vector

WGMMA_TYPES = {
    bfloat16: ("bf16", 16),
    float16: ("f16", 16),
    float32: ("tf32", 8),
    float8_e4m3: ("e4m3", 32),
    float8_e5m2: ("e5m2", 32),
    int8: ("s8", 32),
}
DEPTH = 16  # of one mma.sync
Side = tuple[bool, tuple[int, int]]  # of an operand of mma.sync: whether right, the grid of warps


def matrix_async(e: Emission, node: Node) -> None:
    """A product that a warpgroup issues: total += a @ b.

    Where two of every four of a are kept, an instruction has twice the depth, and each thread gives
    it a word that says which; of 16-bit elements a word is for two instructions, one for lanes 0
    and 1 of every four and one for the others.
    """
    (total, a, b, accumulate), kept = node.inputs[:4], kept_words(node)
    if len(total.shape) > 2:
        raise InternalError("ptx.emit", "an accumulator has no leading index")
    of_a, of_b, *of_kept = list(touches_of(node))[:-2]
    name, depth = WGMMA_TYPES[b.dtype]
    left_name = name if a.dtype is int32 else WGMMA_TYPES[a.dtype][0]
    sums, signs = ("f32", ["1", "1"]) if total.dtype is float32 else ("s32", [])
    (m, n), groups = total.shape, e.threads.count // 128
    alone = m == 64 and n <= 256 and e.threads.count == 128
    if kept and not (alone and all(x in e.pointers for x in (a, *kept))):
        raise InternalError("ptx.emit", f"no sparse product adds {a.type} to {total.type}")
    trans_a, trans_b = node.attrs["transpose_a"], not node.attrs["transpose_b"]
    deep, sparse = (2 * depth, ".sp") if kept else (depth, "")
    right = Operand(e, of_b, not trans_b, deep)
    left = None if a in e.carried else Operand(e, of_a, not trans_a, depth)
    words = kept_registers(e, of_kept[0], a.shape[-1] // 32) if kept else []
    flags = [int(trans_b)] if left is None else [int(trans_a), int(trans_b)]
    flags = flags if depth == 16 else []
    k, first = b.shape[-2 if trans_b else -1], e.values.scalar(accumulate)
    width = min(n, 256)
    for block in range(m // (64 * groups)):
        for column in range(0, n, width):
            count = min(width, n - column)
            kinds = f"m64n{count}k{deep}.{sums}.{left_name}.{name}"
            start = (block * n + column) // 2
            held = braced(e.carried[total].registers[start : start + count // 2])
            for step in range(k // deep):
                scale = first if step == 0 else e.threads.always()
                if left is None:
                    given = own_words(e, a, (block * k + step * depth) // 2, depth // 2)
                else:
                    given = left.at(block * 64 * groups, step, groups)
                operands: list[str | int] = [held, given, right.at(column, step)]
                if kept:
                    operands += [words[step * depth // 32], step % 2 if depth == 16 else 0]
                form = f"wgmma.mma_async{sparse}.sync.aligned.{kinds}"
                e.put(form, *operands, scale, *signs, *flags)


def kept_registers(e: Emission, kept: Touch, count: int) -> Registers:
    """A thread's words of what is kept; products read such as were written since the last one."""
    words = several(e, "b32", count)
    base = e.mad(e.threads.number, 4 * count, lead_address(e, kept))
    for at in range(0, count, 4):
        form, to = vector("ld.shared", "b32", words[at : at + 4])
        e.put(form, to, f"[{base}+{4 * at}]")
    e.put("wgmma.fence.sync.aligned")
    return words


def own_words(e: Emission, a: Node, first: int, count: int) -> str:
    """Registers of an operand that threads hold, from an element of each thread on."""
    held = e.carried[a]
    each = 2 if held.in_words or a.dtype is int32 else 1
    return braced(held.registers[first // each : (first + count) // each])


# ---- mma.sync -----------------------------------------------------------------------------------


def operands_of(e: Emission) -> dict[Node, Side]:
    """Register places that are operands of matrix_sync, but those that each warp has apart."""
    return e.memo.ever(
        "operands",
        lambda: {
            operand: (bool(right), node.attrs["warps"])
            for node in e.body.block.find("matrix_sync")
            if not apart(node.inputs[0], node.inputs[2], node.attrs["warps"])
            for right, operand in enumerate(node.inputs[1:])
        },
    )


def operand_words(e: Emission, node: Node) -> list[str]:
    """Registers of an operand: four words of each 16 x 16 block."""
    right, warps = operands_of(e)[node]
    rows, depth = node.shape
    blocks, odd = divmod(rows, 16 * warps[right])
    if odd or depth != DEPTH or node.dtype not in (bfloat16, float16):
        raise InternalError("ptx.emit", f"{node.type} is no operand of {warps} warps")
    return several(e, "b32", 4 * blocks)


def load_operand(e: Emission, node: Node) -> None:
    """ldmatrix, 16 x 16 at a time.

    Four 8 x 8 matrices come in the order of the registers of mma: down the result first for
    the left operand, along k first for the right one; where k runs down the rows of the
    place they are transposed on the way.
    """
    operand, place = node.inputs[:2]
    if operand.dtype is not place.dtype:
        return load_bytes(e, node)
    start, k_rows, type_ = node.attrs["start"], node.attrs["transpose"], memory_of(place)
    right, warps = operands_of(e)[operand]
    words, lie = e.carried[operand].registers, lie_of(type_)
    if not lie.turns or start % DEPTH:
        raise InternalError("ptx.emit", f"no operand comes from {type_} at {start}")
    base = lead_address(e, next(touches_of(node)))
    near = Exchanged(e, e.add(base, lane_start(e, (right, warps), lie, k_rows)), lie)
    for number in range(len(words) // 4):
        along = number * 16 * warps[right]
        row, column = (start, along) if k_rows else (along, start)
        where = near.at(row, column * type_.dtype.size)
        load_matrices(e, where, k_rows, into=words[4 * number : 4 * number + 4])


def load_bytes(e: Emission, node: Node) -> None:
    """ldmatrix of bytes, two to an element of the instruction, each widened to 16 bits: the left
    operand of wgmma, of which each warp has 16 rows in turn (see `placed.mixed_order`).

    Along k a lane gets four neighbours of a row: two for each half of 16. Where k runs down the
    rows of the place it gets two neighbours of two rows, for rows of the operand 8 apart.
    """
    operand, place = node.inputs[:2]
    start, turned, type_ = node.attrs["start"], node.attrs["transpose"], memory_of(place)
    words, lie = e.carried[operand].registers, lie_of(type_)
    (m, k), warps = operand.shape, e.threads.count // 32
    in_words = e.carried[operand].in_words
    if not lie.turns or start % 32 or k % 32 or m % (16 * warps) or not in_words:
        raise InternalError("ptx.emit", f"no {operand.type} comes from {type_} at {start}")

    def make() -> str:
        lane = e.threads.bits(0, 5)
        warp, row, matrix = e.shr(e.threads.number, 5), e.mask(lane, 7), e.shr(lane, 3)
        if turned:
            return piece_offset(e, e.mad(matrix, 8, row), warp, lie)
        row = e.add(e.mad(warp, 16, row), e.mul(e.mask(matrix, 1), 8))
        return piece_offset(e, row, e.shr(matrix, 1), lie)

    own = e.memo.once(("bytes", e.threads.number, lie, turned), make)
    near = Exchanged(e, e.add(lead_address(e, next(touches_of(node))), own), lie)
    for number in range(m // (16 * warps)):
        for deep in range(0, k, 32):
            row, column = number * 16 * warps, start + deep
            found = load_matrices(e, near.at(*((column, row) if turned else (row, column))), turned)
            first = (number * k + deep) // 4
            for at, word in enumerate(found):
                low = first + (2 * at if turned else at + 2 * (at // 2))
                high = low + (1 if turned else 2)
                widen_word(e, place.dtype, word, turned, words[low], words[high])


def lane_start(e: Emission, side: Side, lie: Lie, k_rows: bool) -> str:
    """The offset of the row that this lane gives to ldmatrix for the warp's first block."""

    def make() -> str:
        return piece_offset(e, *lane_piece(e, side, k_rows), lie)

    return e.memo.once(("lane start", e.threads.number, side, lie, k_rows), make)


def lane_piece(e: Emission, side: Side, k_rows: bool) -> tuple[str, str]:
    """The row, and the piece of it, that this lane gives to ldmatrix."""
    (right, warps), lane = side, e.threads.bits(0, 5)
    low = e.mask(e.shr(lane, 3), 1)
    high = e.shr(lane, 4)
    along, deep = (high, low) if right else (low, high)
    if warps[right] > 1:  # this warp's place along the operand's side of the grid
        shift = 5 if right else 5 + warps[1].bit_length() - 1
        along = e.mad(e.threads.bits(shift, warps[right].bit_length() - 1), 2, along)
    down, piece = (deep, along) if k_rows else (along, deep)
    return e.mad(down, 8, e.mask(lane, 7)), piece


def matrix_sync(e: Emission, node: Node) -> None:
    """A product of what warps hold: total += a @ b."""
    (total, a, b), (down, across) = node.inputs, node.attrs["warps"]
    sums, left, right = (e.carried[x].registers for x in (total, a, b))
    if e.threads.count != 32 * down * across:
        raise InternalError("ptx.emit", f"{e.threads.count} threads are not {down} x {across}")
    form = sync_form(b.dtype)
    wide = len(right) // 2
    for i, j in serpentine(len(left) // 4, wide):
        at = (i * wide + j) * 4
        held = braced(sums[at : at + 4])
        e.put(form, held, braced(left[4 * i : 4 * i + 4]), braced(right[2 * j : 2 * j + 2]), held)


def sync_form(dtype: DType) -> str:
    """The product of a warp, of operands of this DType."""
    name, _ = WGMMA_TYPES[dtype]
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32"


def serpentine(high: int, wide: int) -> Iterator[tuple[int, int]]:
    """Products of a warp back and forth, so that one operand stays: along the longer side, and
    where that is much longer along the shorter one, so that its words are soon free."""
    if 4 * high <= wide:
        for j in range(wide):
            yield from ((high - 1 - i if j % 2 else i, j) for i in range(high))
        return
    for i in range(high):
        yield from ((i, wide - 1 - j if i % 2 else j) for j in range(wide))


# ---- descriptors --------------------------------------------------------------------------------


SWIZZLE_CODES = {128: 1, 64: 2, 32: 3}


class Operand:
    """Descriptors of a shared operand of wgmma."""

    def __init__(self, e: Emission, place: Touch, along_k: bool, depth: int) -> None:
        self.e, self.along_k, self.depth = e, along_k, depth
        self.size, self.lie = place.memory.dtype.size, lie_of(memory_of(place.memory))
        if not self.lie.turns:
            raise InternalError("ptx.emit", "a matrix operand lies in a swizzled place")
        leading = 1 if along_k else self.lie.block >> 4
        high = (8 * self.lie.span >> 4) | SWIZZLE_CODES[self.lie.span] << 30
        # an address in a cluster has the rank of its program above the bits of the place
        low = e.value("bfe.u32", lead_address(e, place), "4", "14")
        self.low = e.value("or.b32", low, leading << 16)
        self.high = e.copy("b32", high)
        self.known: dict[int, str] = {}

    def at(self, row: int, step: int, groups: int = 1) -> str:
        """The descriptor for elements from `row` (of m or n) on, at a step of k."""
        k = step * self.depth
        offset = self.offset(*((k, row) if self.along_k else (row, k)))
        if offset not in self.known:
            low = self.low
            if groups > 1:
                apart = self.offset(*((0, 64) if self.along_k else (64, 0)))
                low = self.e.mad(self.e.threads.group(), apart >> 4, low)
            if offset:
                low = self.e.add(low, offset >> 4)
            self.known[offset] = self.e.value("mov.b64", braced((low, self.high)))
        return self.known[offset]

    def offset(self, column: int, row: int) -> int:
        """Bytes to an element."""
        block, rest = divmod(column * self.size, self.lie.span)
        return block * self.lie.block + rest + row * self.lie.span
