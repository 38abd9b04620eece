"""Addresses of Tiles in memory: a base every thread shares, the thread's own part, and a fixed part
for each register.

Pointers are multiples of 16 bytes.

A swizzled place lies as column blocks of one swizzle span: block, row, column within the block, its
16-byte pieces exchanged by the row; one with the layout 'held' as 16 bytes of each thread side by
side, then the next 16, so that only who holds a Tile alike can read it. Addresses in swizzled
places differ by constants that are added (rows, blocks) or exchanged (pieces within a block), so
where it can each lane computes one address. Invariant: a place begins on a boundary of its pattern,
and offsets that may not fit in 32 bits are added in 64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...core.dtype import DType, int32, int64
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import Size
from ...ir.types import Memory
from ...tile.bounds import divisor_of
from ...tile.row import Touch, memory_of
from .element import convert
from .emission import Emission
from .moves import Run, runs_of
from .shared import SWIZZLES
from .spread import Spread, accumulator
from .write import Operand

FAR = 1 << 30  # bytes that a 32-bit offset does not reach any more
REACH = 21  # bits of the bytes that are left to an instruction's own offset


def apart(node: Node) -> tuple[Node | None, int]:
    """An index as another one (None for 0) and a constant that is added to it."""
    constant = 0
    while node.op.name == "add":
        for one, other in (node.inputs, node.inputs[::-1]):
            if other.op.name == "constant" and one.shape == ():
                constant, node = constant + int(other.attrs["value"]), one
                break
        else:
            return node, constant
    if node.op.name == "constant":
        return None, constant + int(node.attrs["value"])
    return node, constant


def load_form(memory: Node) -> str:
    """How an element is loaded."""
    space = space_of(memory)
    constant = space == "global" and memory_of(memory).use == "constant"
    return "ld.global.nc" if constant else f"ld.{space}"


def space_of(memory: Node) -> str:
    """Which memory of the machine an element lies in."""
    return "global" if memory_of(memory).scope == "global" else "shared"


def element_address(e: Emission, touch: Touch, at: str) -> str:
    """The operand that addresses the element of an op that has an offset."""
    assert touch.offsets is not None
    size, pointer = touch.memory.dtype.size, e.pointers[touch.memory]
    dtype = e.values.dtype(touch.offsets)
    if memory_of(touch.memory).scope != "global":
        return f"[{e.mad(convert(e, dtype, int32, at), size, pointer)}]"
    return f"[{further(e, pointer, at, 1, size, dtype)}]"


def addresses_of(e: Emission, touch: Touch, spread: Spread) -> tuple[list[str], list[Run]]:
    """The operands that address each register of a Tile in a box, and its runs."""
    type_ = memory_of(touch.memory)
    align = 16  # a number of elements that divides the offset of the index, 16 at most
    for node, stride in zip(touch.nodes, type_.element_strides()):
        align = math.gcd(align, e.bounds.divisor(node) * divisor_of(stride))
    if type_.scope == "global":
        return _global_addresses(e, touch, spread, align)
    if SWIZZLES[type_.layout]:
        raise InternalError("ptx.emit", "a swizzled place is read and written whole")
    base = lead_address(e, touch)
    return e.shared.addresses(base, spread, steps_along(touch), type_.dtype.size, align or 16)


def steps_along(touch: Touch) -> list[int]:
    """Elements from one to the next along the axes of a Tile in a place."""
    strides = memory_of(touch.memory).element_strides()
    return [int(strides[axis]) for axis in touch.axes]


def lead_address(e: Emission, touch: Touch, start: str = "") -> str:
    """The shared address of a place (beginning at `start`) at its leading index."""
    type_, address = memory_of(touch.memory), start or e.pointers[touch.memory]
    for node, stride in zip(touch.nodes, type_.element_strides()):
        if e.bounds.range(node) != (0, 0):
            part = e.mul(e.values.index32(node), int(stride) * type_.dtype.size)
            address = e.add(address, part)
    return address


# ---- in 64 bits ---------------------------------------------------------------------------------


def further(
    e: Emission, address: str, index: str, stride: Size, size: int, dtype: DType = int32
) -> str:
    """An address some elements of `size` bytes on, which stand a stride apart."""
    if isinstance(stride, int) and dtype is int32 and stride * size < FAR:
        return e.value("mad.wide.s32", index, stride * size, address)
    wide = convert(e, dtype, int64, index)
    return e.value("mad.lo.s64", wide, _step64(e, stride, size), address)


def _step64(e: Emission, stride: Size, size: int) -> Operand:
    """Bytes of a stride: a literal, or in a register where it depends on Symbols."""
    if isinstance(stride, int):
        return stride * size
    return e.memo.once(
        ("step", stride, size),
        lambda: e.value("mul.lo.s64", e.values.size64(stride), size),
    )


def uniform_address(e: Emission, memory: Node, index: Sequence[Node | None]) -> str:
    """The 64-bit address of an index, the same in all threads."""
    type_, values, address = memory_of(memory), e.values, e.pointers[memory]
    for node, stride in zip(index, type_.element_strides()):
        if node is not None and e.bounds.range(node) != (0, 0):
            at, dtype = values.scalar(node), values.dtype(node)
            address = further(e, address, at, stride, type_.dtype.size, dtype)
    return address


def _based_address(e: Emission, touch: Touch, own: str) -> tuple[str, int]:
    """A 64-bit address and the bytes to add to it for an index, `own` bytes of the thread in
    the first: what differs from an index before by a constant shares that one's address."""
    memory, type_ = touch.memory, memory_of(touch.memory)
    strides = type_.element_strides()
    parts = [apart(n) if isinstance(s, int) else (n, 0) for n, s in zip(touch.nodes, strides)]
    constant = sum(c * int(s) * type_.dtype.size for (_, c), s in zip(parts, strides) if c)
    far = constant >> REACH << REACH

    def make() -> str:
        address = uniform_address(e, memory, [n for n, _ in parts])
        if own:
            address = e.value("add.s64", address, e.value("cvt.s64.s32", own))
        return e.value("add.s64", address, far) if far else address

    key = ("address", memory, tuple(n for n, _ in parts), own, far)
    return e.memo.once(key, make), constant - far


def _global_addresses(
    e: Emission, touch: Touch, spread: Spread, align: int
) -> tuple[list[str], list[Run]]:
    """The same in global memory: along axes of long or symbolic strides in 64 bits."""
    type_ = memory_of(touch.memory)
    size, strides = type_.dtype.size, [type_.element_strides()[a] for a in touch.axes]
    reach = [n * s * size if isinstance(s, int) else FAR for n, s in zip(spread.shape, strides)]
    near = [int(s) * size if r < FAR // 4 else 0 for s, r in zip(strides, reach)]
    address, constant = _based_address(e, touch, e.threads.offset(spread, near))
    far = [a for a, r in enumerate(reach) if r >= FAR // 4]
    bases: dict[tuple[int, ...], str] = {}
    addresses = []
    for at in spread.registers:
        key = tuple(at[a] for a in far)
        if key not in bases:
            bases[key] = _far_address(e, address, spread, size, zip(far, key), strides)
        addresses.append(f"[{bases[key]}+{constant + sum(c * s for c, s in zip(at, near))}]")
    steps = [divisor_of(s) * (1 + (1 << 48)) if a in far else int(s) for a, s in enumerate(strides)]
    return addresses, runs_of(spread, steps, align, size)


def _far_address(
    e: Emission,
    address: str,
    spread: Spread,
    size: int,
    far: Iterable[tuple[int, int]],
    strides: Sequence[Size],
) -> str:
    """Add coordinates along axes of long or symbolic strides."""
    for axis, coordinate in far:
        part = e.threads.part(spread, axis)
        if part:
            index = e.add(part, coordinate) if coordinate else part
            address = further(e, address, index, strides[axis], size)
        elif coordinate:
            index = e.copy("b64", coordinate)
            address = further(e, address, index, strides[axis], size, int64)
    return address


# ---- places -------------------------------------------------------------------------------------


PIECE = 16  # bytes that are exchanged as one


PlaceRun = tuple[str, int, int]  # neighbouring registers in a place: where, the first, how many


class Lie(NamedTuple):
    """How the rows of a place lie, of a line its elements."""

    span: int  # bytes of a row within a block of columns
    rows: int
    turns: int  # pieces of a row that are exchanged; 0 where it is not swizzled

    @property
    def block(self) -> int:
        """Bytes from a block of columns to the next."""
        return self.rows * self.span


def lie_of(type_: Memory) -> Lie:
    """How a place lies: a row of a block ends with its swizzle, or with the row."""
    shape = type_.shape if len(type_.shape) > 1 else (*type_.shape, 1)
    rows, columns = (int(size) for size in shape[-2:])
    swizzle = SWIZZLES[type_.layout]
    return Lie(swizzle or columns * type_.dtype.size, rows, swizzle // PIECE)


def first_row(touch: Touch) -> int:
    """The row at which what is moved of a place begins, a multiple of 8."""
    row = touch.index[touch.axes[0]] if touch.axes else 0
    assert isinstance(row, int)
    return row


def place_runs(e: Emission, touch: Touch, spread: Spread, start: str = "") -> list[PlaceRun]:
    """The runs of a Tile in a shared place."""
    type_ = memory_of(touch.memory)
    base = lead_address(e, touch, start)
    if type_.layout == "held":
        return _held_runs(e, touch, base, spread)
    if SWIZZLES[type_.layout]:
        return _swizzled_runs(e, touch, base, spread)
    steps = steps_along(touch)
    first = first_row(touch) * steps[0] if steps else 0
    addresses, runs = e.shared.addresses(base, spread, steps, type_.dtype.size, first | 16, first)
    return [(addresses[at], at, count) for at, count in runs]


def _held_runs(e: Emission, touch: Touch, base: str, spread: Spread) -> list[PlaceRun]:
    """Runs of 16 bytes of each thread, side by side: no bank is wanted twice."""
    place, threads = touch.memory, e.threads.count
    count, size = len(spread.registers), place.dtype.size
    known = e.memo.ever(("held", place), lambda: spread)
    if first_row(touch) or known != spread or spread.copies(threads) or count * size % PIECE:
        raise InternalError("ptx.emit", f"{place!r} is held as {known}, and as {spread}")
    own, each = e.mad(e.threads.number, PIECE, base), PIECE // size
    return [(f"[{own}+{at * size * threads}]", at, each) for at in range(0, count, each)]


def _swizzled_runs(e: Emission, touch: Touch, base: str, spread: Spread) -> list[PlaceRun]:
    """Runs in a swizzled place: the piece of a column is exchanged by the row. One address a
    thread does where registers only add and exchange."""
    size, lie = touch.memory.dtype.size, lie_of(memory_of(touch.memory))
    first = first_row(touch)
    runs = runs_of(spread, [lie.block // size, 1], PIECE, size)
    starts = [spread.registers[start] for start, _ in runs]
    reach = [0, 0]
    for _, width, axis, stride in spread.fields:
        reach[axis] |= ((1 << width) - 1) * stride
    apart = all(not r & reach[0] and not c & reach[1] for r, c in starts)
    whole = all(c * size % PIECE == 0 for _, c in starts)

    def offset(r: int = 0, c: int = 0) -> str:
        parts = [e.threads.part(spread, a) or e.threads.constant(0) for a in (0, 1)]
        row, column = (e.add(x, by) if by else x for x, by in zip(parts, (r, c)))
        bytes_ = e.mul(column, size)
        piece = e.shr(bytes_, 4)
        rest = e.mask(bytes_, PIECE - 1)
        return e.add(piece_offset(e, row, piece, lie), rest)

    if not apart or not whole or not _disjoint(spread) or size > PIECE:
        return [
            (f"[{e.add(base, offset(r, c))}+{first * lie.span}]", start, count)
            for (start, count), (r, c) in zip(runs, starts)
        ]
    own = e.memo.once(("run", e.threads.number, spread.fields, lie, size), offset)
    near = Exchanged(e, e.add(base, own), lie)
    return [(near.at(first + r, c * size), *run) for run, (r, c) in zip(runs, starts)]


def piece_offset(e: Emission, row: str, piece: str, lie: Lie) -> str:
    """The offset of a 16-byte piece of a row."""
    span, turns = lie.span, lie.turns
    if not turns:
        return e.mad(row, span, e.shl(piece, 4))
    block = e.shr(piece, turns.bit_length() - 1)
    inner = e.mask(piece, turns - 1)
    turn = e.mask(e.shr(e.mul(row, span), 7), turns - 1)
    inner = e.shl(e.xor(inner, turn), 4)
    return e.mad(block, lie.block, e.mad(row, span, inner))


class Exchanged:
    """Addresses that differ from one by the exchange of pieces and by constants."""

    def __init__(self, e: Emission, base: str, lie: Lie) -> None:
        self.w, self.known, self.lie = e, {0: base}, lie

    def at(self, row: int, column: int) -> str:
        """The operand that addresses a place some rows down and some bytes of columns across."""
        span, rows, turns = self.lie
        block, piece = divmod(column // PIECE, max(1, turns))
        piece ^= (row * span >> 7) & (max(1, turns) - 1)  # as the row exchanges it
        if piece not in self.known:
            self.known[piece] = self.w.xor(self.known[0], piece * PIECE)
        return f"[{self.known[piece]}+{(row + block * rows) * span}]"


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


def matrix_rows(e: Emission, touch: Touch, spread: Spread) -> list[tuple[str, int]]:
    """(address of this lane's row, first register) of an accumulator's blocks of 16 x 16."""
    threads, lie = e.threads, lie_of(memory_of(touch.memory))

    def make() -> str:
        lane = threads.bits(0, 5)
        row = e.mad(e.shr(threads.number, 5), 16, e.mask(lane, 15))
        return piece_offset(e, row, e.shr(lane, 4), lie)

    own = e.memo.once(("matrix rows", threads.number, lie), make)
    near = Exchanged(e, e.add(lead_address(e, touch), own), lie)
    first, across = first_row(touch), range(spread.shape[1] // 16)
    down = range(first, first + spread.shape[0], threads.count // 2)
    blocks = [near.at(row, 2 * PIECE * column) for row in down for column in across]
    return [(where, 8 * number) for number, where in enumerate(blocks)]
