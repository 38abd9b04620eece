"""Places of the placed level: where they lie, and where a Tile's registers lie in them.

A swizzled place lies as column blocks of one swizzle span: block, row, column within the block,
its 16-byte pieces exchanged by the row; one with the layout 'held' as 16 bytes of each thread side
by side, then the next 16, so that only who holds a Tile alike can read it. Addresses in swizzled
places differ by constants that are added (rows, blocks) or exchanged (pieces within a block), so
where it can each lane computes one address. Invariant: a place begins on a boundary of its pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.types import Memory
from .addresses import lead_address
from .emission import Emission, memory_of
from .moves import runs_of
from .shared import SWIZZLES
from .spread import Spread, accumulator

PIECE = 16  # bytes that are exchanged as one


@dataclass(frozen=True)
class PlaceRun:
    """Neighbouring registers of a Tile in a place."""

    where: str
    first: int
    count: int


def span_of(type_: Memory) -> int:
    """Bytes of a row within a block of columns: those of its swizzle, or all of them."""
    return SWIZZLES[type_.layout] or int(type_.shape[-1]) * type_.dtype.size


def place_runs(
    e: Emission, place: Node, index: Sequence[Node], spread: Spread, start: str = ""
) -> list[PlaceRun]:
    """The runs of a Tile in a shared place."""
    type_ = memory_of(place)
    base = lead_address(e, place, index, start)
    swizzle, size = SWIZZLES[type_.layout], type_.dtype.size
    if type_.layout == "held":
        return _held_runs(e, place, base, spread)
    if swizzle:
        return _swizzled_runs(e, type_, base, spread, swizzle)
    steps = [int(s) for s in type_.element_strides()[len(index) :]]
    addresses, runs = e.shared.addresses(base, spread, steps, size, 16)
    return [PlaceRun(addresses[at], at, count) for at, count in runs]


def _held_runs(e: Emission, place: Node, base: str, spread: Spread) -> list[PlaceRun]:
    """Runs of 16 bytes of each thread, side by side: no bank is wanted twice."""
    count, size, threads = len(spread.registers), place.dtype.size, e.threads.count
    known = e.placed.spreads.setdefault(place, spread)
    if known != spread or spread.copies(threads) or count * size % PIECE:
        raise InternalError("ptx.emit", f"{place!r} is held as {known}, and as {spread}")
    own, each = e.w.mad(e.threads.number, PIECE, base), PIECE // size
    return [PlaceRun(f"[{own}+{at * size * threads}]", at, each) for at in range(0, count, each)]


def _swizzled_runs(
    e: Emission, type_: Memory, base: str, spread: Spread, swizzle: int
) -> list[PlaceRun]:
    """Runs in a swizzled place: the piece of a column is exchanged by the row. One address a
    thread does where registers only add and exchange."""
    w, size, rows = e.w, type_.dtype.size, int(type_.shape[-2])
    span, turns = swizzle // size, swizzle // PIECE
    runs = runs_of(spread, [rows * span, 1], PIECE, size)
    starts = [spread.registers[start] for start, _ in runs]
    reach = [0, 0]
    for _, width, axis, stride in spread.fields:
        reach[axis] |= ((1 << width) - 1) * stride
    apart = all(r % 8 == 0 and not r & reach[0] and not c & reach[1] for r, c in starts)
    whole = all(c * size % PIECE == 0 for _, c in starts)
    if not apart or not whole or not _disjoint(spread) or size > PIECE:
        row, column = (e.threads.part(spread.fields, a) or e.threads.constant(0) for a in (0, 1))
        return [
            PlaceRun(
                _swizzled_address(e, base, w.add(row, r), w.add(column, c), type_), start, count
            )
            for (start, count), (r, c) in zip(runs, starts)
        ]

    def make() -> str:
        row, column = (e.threads.part(spread.fields, a) or e.threads.constant(0) for a in (0, 1))
        bytes_ = w.mul(column, size)
        piece = w.shr(bytes_, 4)
        rest = w.mask(bytes_, PIECE - 1)
        return w.add(piece_offset(e, row, piece, swizzle, rows, turns), rest)

    own = e.memo.once(("run", e.threads.number, spread.fields, swizzle, rows, size), make)
    near = Exchanged(e, w.add(base, own))
    found = []
    for (start, count), (r, c) in zip(runs, starts):
        block, number = divmod(c * size // PIECE, turns)
        where = near.at(number, r * swizzle + block * rows * swizzle)
        found.append(PlaceRun(where, start, count))
    return found


def _swizzled_address(e: Emission, base: str, row: str, column: str, type_: Memory) -> str:
    """The address of an element of a swizzled place."""
    w, size, swizzle = e.w, type_.dtype.size, SWIZZLES[type_.layout]
    span = swizzle // size
    block = w.shr(column, span.bit_length() - 1)
    bytes_ = w.mul(w.mask(column, span - 1), size)
    turn = w.mask(w.shr(w.mul(row, swizzle), 7), swizzle // PIECE - 1)
    turned = w.xor(bytes_, w.shl(turn, 4))
    place = w.mad(row, swizzle, turned)
    place = w.mad(block, int(type_.shape[-2]) * swizzle, place)
    return f"[{w.add(base, place)}+0]"


def piece_offset(e: Emission, row: str, piece: str, span: int, rows: int, turns: int) -> str:
    """The offset of a 16-byte piece of a row, in a place of so many rows."""
    w = e.w
    if not turns:
        return w.mad(row, span, w.shl(piece, 4))
    block = w.shr(piece, turns.bit_length() - 1)
    inner = w.mask(piece, turns - 1)
    turn = w.mask(w.shr(w.mul(row, span), 7), turns - 1)
    inner = w.shl(w.xor(inner, turn), 4)
    return w.mad(block, rows * span, w.mad(row, span, inner))


class Exchanged:
    """Addresses that differ from one by the exchange of pieces and by constants."""

    def __init__(self, e: Emission, base: str) -> None:
        self.w, self.known = e.w, {0: base}

    def at(self, piece: int, bytes_: int) -> str:
        """The operand that addresses a piece, some bytes on."""
        if piece not in self.known:
            self.known[piece] = self.w.xor(self.known[0], piece * PIECE)
        return f"[{self.known[piece]}+{bytes_}]"


def _disjoint(spread: Spread) -> bool:
    """Whether the parts that threads add to a coordinate never carry into one another."""
    taken = [0] * len(spread.shape)
    for _, width, axis, stride in spread.fields:
        mask = ((1 << width) - 1) * stride
        if stride & (stride - 1) or taken[axis] & mask:
            return False
        taken[axis] |= mask
    return True


# ---- by matrices --------------------------------------------------------------------------------


def by_matrix(e: Emission, place: Node, spread: Spread) -> bool:
    """Whether a Tile can be stored by stmatrix, and read by ldmatrix."""
    type_, threads = memory_of(place), e.threads.count
    return (
        SWIZZLES[type_.layout] in (64, 128)
        and type_.dtype.size == 2
        and len(spread.shape) == 2
        and spread.shape[1] % 16 == 0
        and spread.shape[0] % (threads // 2) == 0
        and threads % 128 == 0
        and spread == accumulator(spread.shape, threads // 32)
    )


def matrix_rows(
    e: Emission, place: Node, index: Sequence[Node], spread: Spread, begin: str = ""
) -> list[tuple[str, int]]:
    """(address of this lane's row, first register) of an accumulator's blocks of 16 x 16."""
    w, threads, type_ = e.w, e.threads, memory_of(place)
    rows, columns, span = int(type_.shape[-2]), spread.shape[1], SWIZZLES[type_.layout]
    base = lead_address(e, place, index, begin)
    warp, lane = w.shr(threads.number, 5), threads.bits(0, 5)
    row = w.mad(warp, 16, w.mask(lane, 15))
    turn = w.mask(lane, 7)
    if span == 64:
        turn = w.value("bfe.u32", lane, "1", "2")
    half = w.shr(lane, 4)
    start = w.mad(row, span, base)
    pieces = [w.mad(w.xor(w.add(half, 2 * j), turn), PIECE, start) for j in range(span // 32)]
    per_block = columns // 2
    found = []
    for block in range(len(spread.registers) // per_block):
        for j in range(columns // 16):
            wide, piece = divmod(j, len(pieces))
            offset = wide * rows * span + block * (threads.count // 2) * span
            found.append((f"[{pieces[piece]}+{offset}]", block * per_block + 8 * j))
    return found


# ---- rows ---------------------------------------------------------------------------------------


def row_offsets(type_: Memory, row: int) -> tuple[int, int]:
    """Bytes of a place before a row, and from a span of its columns to the next."""
    if len(type_.shape) < 2:
        return row * type_.dtype.size, 0
    return row * span_of(type_), int(type_.shape[-2]) * span_of(type_)


def row_address(e: Emission, place: Node, row: int) -> str:
    """Where a place begins, as if its first rows were not there."""
    type_ = memory_of(place)
    if type_.layout == "held":
        raise InternalError("ptx.emit", f"no rows from {row} on are read of {place!r}")
    return e.w.add(e.pointers[place], row_offsets(type_, row)[0])
