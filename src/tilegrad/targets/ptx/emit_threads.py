"""Copies that the threads of a role do together: cp.async, and stores of pieces.

Copies move 16 bytes a thread, neighbouring threads along the rows of the Memory; what lies
outside is filled with zeros by a source of no bytes. Invariant: a piece is moved by one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import Size
from ...ir.types import Memory
from ...tile.bounds import divisor_of
from .addresses import apart, lead_address
from .emission import Emission, memory_of
from .emit_copies import split
from .placed_tiles import PIECE, Exchanged, piece_offset, span_of
from .shared import SWIZZLES
from .write import braced


@dataclass(frozen=True)
class Cover:
    """How threads cover a box of a place: pieces in a row, rows of a round, rounds."""

    pieces: int
    rows: int  # that all threads take at once
    rounds: int
    guard: str  # holds for threads with work; '' for all

    @property
    def starts(self) -> range:
        """The first row of each round."""
        return range(0, self.rounds * self.rows, self.rows)


def commit_threads(e: Emission, node: Node) -> None:
    """The copies issued so far are a group."""
    e.w.put("cp.async.commit_group")


def wait_threads(e: Emission, node: Node) -> None:
    """Until all but some groups have landed."""
    e.w.put("cp.async.wait_group", str(node.attrs["pending"]))


def copy_threads(e: Emission, node: Node) -> None:
    """A box into a place."""
    w, (place, memory) = e.w, node.inputs[:2]
    index, lead = split(node, 2, memory)
    cover = cover_of(e, node.attrs["shape"], place)
    into = pieces_at(e, place, lead, cover, node.attrs["row"])
    source = pieces_of(e, memory, index, node.attrs["axes"], cover)
    inside = pieces_inside(e, memory, index, node, cover)
    for where, address, held in zip(into, source, inside):
        size = [w.value("selp.b32", str(PIECE), "0", held)] if held else []
        form = "cp.async.cg.shared.global.L2::128B"
        w.put(form, where, address, str(PIECE), *size, guard=cover.guard)


def store_threads(e: Emission, node: Node) -> None:
    """A place to a box."""
    w, (memory, place) = e.w, node.inputs[:2]
    index, lead = split(node, 2, memory)
    cover = cover_of(e, node.attrs["shape"], place)
    inside = pieces_inside(e, memory, index, node, cover)
    words = []
    for where in pieces_at(e, place, lead, cover, 0):
        words.append(braced([w.new("b32") for _ in range(4)]))
        w.put("ld.shared.v4.b32", words[-1], where, guard=cover.guard)
    into = pieces_of(e, memory, index, node.attrs["axes"], cover)
    for address, held, word in zip(into, inside, words):
        guard = w.and_predicates(held, cover.guard) if held and cover.guard else held or cover.guard
        w.put("st.global.v4.b32", address, word, guard=guard)


def clear_rows(e: Emission, node: Node) -> None:
    """Zeros to some rows of a place."""
    place, start, stop = node.inputs[:3]
    w, and_guards, zero = e.w, e.threads.and_guards, e.threads.constant(0)
    cover = cover_of(e, place.shape[-2:], place)
    row, _ = own_piece(e, cover)
    first, last = e.values.index32(start), e.values.index32(stop)
    pieces = pieces_at(e, place, node.inputs[3:], cover, 0)
    for step, where in zip(cover.starts, pieces):
        at = w.add(row, step) if step else row
        inside = and_guards(w.test("ge.s32", at, first), w.test("lt.s32", at, last))
        w.put(
            "st.shared.v4.b32",
            where,
            braced([zero] * 4),
            guard=and_guards(inside, cover.guard),
        )


def cover_of(e: Emission, shape: Sequence[int], place: Node) -> Cover:
    """How the role's threads share rows and columns of a place."""
    (rows, columns), threads = shape, e.threads.count
    pieces, odd = divmod(columns * place.dtype.size, PIECE)
    if odd or pieces & (pieces - 1) or pieces > threads:
        raise InternalError("ptx.emit", f"threads do not share rows of {columns} elements")
    at_once = threads // pieces
    if rows < at_once:
        guard = e.w.test("lt.s32", e.threads.number, rows * pieces)
        return Cover(pieces, at_once, 1, guard)
    if rows % at_once or threads & (threads - 1):
        raise InternalError("ptx.emit", f"{threads} threads do not share {rows} rows")
    return Cover(pieces, at_once, rows // at_once, "")


def own_piece(e: Emission, cover: Cover) -> tuple[str, str]:
    """(row, piece) of this thread in the first round."""
    number = e.threads.number
    return e.memo.once(
        ("own piece", number, cover.pieces),
        lambda: (
            e.w.shr(number, cover.pieces.bit_length() - 1),
            e.w.mask(number, cover.pieces - 1),
        ),
    )


def pieces_at(
    e: Emission, place: Node, lead: Sequence[Node], cover: Cover, first: int
) -> list[str]:
    """Where this thread's pieces lie in a place, from row `first` on."""
    type_ = memory_of(place)
    rows, span, turns = int(type_.shape[-2]), span_of(type_), SWIZZLES[type_.layout] // PIECE
    if turns and first % 8:
        raise InternalError("ptx.emit", f"row {first} of a swizzled place")
    own = e.memo.once(
        ("piece", e.threads.number, cover.pieces, span, rows, turns),
        lambda: piece_offset(e, *own_piece(e, cover), span, rows, turns),
    )
    near = Exchanged(e, e.w.add(lead_address(e, place, lead), own))
    return [
        near.at((at * span >> 7) & (turns - 1) if turns else 0, (first + at) * span)
        for at in cover.starts
    ]


def pieces_of(
    e: Emission, memory: Node, index: Sequence[Node], axes: Sequence[int], cover: Cover
) -> list[str]:
    """Where this thread's pieces lie in a Memory."""
    type_, w = memory_of(memory), e.w
    strides, size = type_.element_strides(), type_.dtype.size
    if strides[axes[1]] != 1 or any(divisor_of(s) * size % PIECE for s in strides if s != 1):
        raise InternalError("ptx.emit", f"no pieces of 16 bytes lie in {type_} along {axes}")
    step = strides[axes[0]]
    key = ("own", e.threads.number, memory, cover)

    def make() -> str:
        row, piece = own_piece(e, cover)
        part = w.value("mul.wide.s32", piece, str(PIECE))
        own = w.value("add.s64", scaled(e, row, step, size), part)
        return w.value("add.s64", own, e.pointers[memory])

    base, further = summed(e, key, e.memo.once(key, make), index, strides, size)
    found = []
    for at in cover.starts:
        if isinstance(step, int):
            found.append(f"[{base}+{at * step * size + further}]")
            continue
        part = scaled(e, e.threads.constant(at), step, size)
        found.append(f"[{w.value('add.s64', base, part)}+{further}]")
    return found


def summed(
    e: Emission,
    key: tuple[object, ...],
    base: str,
    index: Sequence[Node],
    strides: Sequence[Size],
    size: int,
) -> tuple[str, int]:
    """(own address and the bytes of an index, further bytes that are constant).

    What was summed before, around this Block too, is not summed again: the axis that varies
    comes last.
    """
    terms, constant = [], 0
    for node, stride in zip(index, strides):
        if isinstance(stride, int):
            rest, more = apart(node)
            constant += more * stride * size
        else:
            rest = node
        if rest is not None:
            terms.append((rest, stride))
    terms.sort(key=lambda term: e.memo.known((*key, term)) is None)
    for node, stride in terms:
        key = (*key, (node, stride))
        base = e.memo.once(key, partial(_further, e, base, node, stride, size))
    return base, constant


def _further(e: Emission, base: str, node: Node, stride: Size, size: int) -> str:
    """An address some bytes of an index on."""
    return e.w.value("add.s64", base, scaled(e, e.values.index32(node), stride, size))


def scaled(e: Emission, index: str, stride: Size, size: int) -> str:
    """Bytes of an index along an axis, in 64 bits."""
    w = e.w
    if isinstance(stride, int) and stride * size < 1 << 31:
        return w.value("mul.wide.s32", index, str(stride * size))
    wide = w.value("cvt.s64.s32", index)
    part = w.value("mul.lo.s64", wide, e.values.size64(stride))
    return w.value("mul.lo.s64", part, str(size))


def pieces_inside(
    e: Emission, memory: Node, index: Sequence[Node], node: Node, cover: Cover
) -> list[str]:
    """For each piece a predicate that it lies inside of the Memory; '' where it must."""
    type_, w = memory_of(memory), e.w
    (rows, columns), (down, across) = node.attrs["shape"], node.attrs["axes"]
    each = PIECE // type_.dtype.size
    if divisor_of(type_.shape[across]) % each or e.bounds.divisor(index[across]) % each:
        raise InternalError("ptx.emit", f"rows of {type_} do not end with a piece")
    row, piece = own_piece(e, cover)
    held = ""
    if not fits(e, type_, index, across, columns):
        at = w.mad(piece, each, e.values.index32(index[across]))
        held = w.test("lt.u32", at, limit(e, type_, across))
    if fits(e, type_, index, down, rows):
        return [held] * cover.rounds
    first, end, test = e.values.index32(index[down]), limit(e, type_, down), "lt.u32"
    if node.op.name == "store_threads":  # in other words than of copies of the same rows: an
        end = w.value("sub.s32", end, first)  # assembler keeps no answer until then
        first, test = row, "lt.s32"
    else:
        first = w.add(first, row)
    found = []
    for step in cover.starts:  # below 0 is far above, unsigned
        at = w.add(first, step) if step else first
        mine = w.test(test, at, end)
        found.append(w.and_predicates(mine, held) if held else mine)
    return found


def fits(e: Emission, type_: Memory, index: Sequence[Node], axis: int, size: int) -> bool:
    """Whether a box surely lies inside along an axis."""
    limit = type_.shape[axis]
    low, high = e.bounds.range(index[axis])
    return isinstance(limit, int) and low >= 0 and high + size <= limit


def limit(e: Emission, type_: Memory, axis: int) -> str:
    """The size of a Memory along an axis, in 32 bits."""
    size = type_.shape[axis]
    if isinstance(size, int):
        return e.threads.constant(size)
    return e.w.value("cvt.u32.u64", e.values.size64(size))
