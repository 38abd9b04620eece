"""Copies of boxes: by the copy engine and its tensor maps, or by the threads of a role.

One thread of a role issues copies (a role of copies alone is one warp); of pages each lane issues
its own. What the threads of a role do together (cp.async, and stores of pieces) moves 16 bytes a
thread, neighbouring threads along the rows of the Memory; what lies outside is filled with zeros by
a source of no bytes. Invariant: a piece is moved by one thread, and nothing is waited for that the
Body does not wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...core.dtype import int32
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import Size
from ...tile.bounds import divisor_of
from ...tile.row import Touch, memory_of, touch_of, touches_of
from .addresses import (
    PIECE,
    Exchanged,
    apart,
    lead_address,
    lie_of,
    piece_offset,
)
from .emission import Emission
from .emit_barriers import barrier_address
from .program import TensorMap
from .shared import SWIZZLES
from .write import Registers, braced, several

WARP = 32
CACHE_HINTS = {"first": "0x12F0000000000000"}  # what is read once leaves caches first
LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.tile.bulk_group"


@dataclass(frozen=True)
class Boxes:
    """How a copy is cut: what it moves and the place of it, the tensor map of one copy, and how
    many copies of so many columns there are."""

    box: Touch
    place: Touch
    map: TensorMap
    columns: int
    count: int

    def form(self, way: str) -> str:
        """The instruction of a copy."""
        return way.format(len(self.box.index))


def ends(node: Node) -> tuple[Touch, Touch]:
    """What a copy moves of a Memory, which may end within, and of a place."""
    place, box = sorted(touches_of(node), key=lambda touch: touch.clips)
    return box, place


def boxes_of(e: Emission, node: Node) -> Boxes:
    """The boxes of a copy: where a place is swizzled, each as wide as a span of its columns."""
    box, place = ends(node)
    type_, into, columns = memory_of(box.memory), memory_of(place.memory), box.shape[-1]
    swizzle = SWIZZLES[into.layout]
    span = swizzle // into.dtype.size or columns
    if columns % span:
        raise InternalError("ptx.emit", f"rows of {box.shape} do not fill {into.layout}")
    full, strides = [1] * len(type_.shape), type_.element_strides()
    for axis, size in zip(box.axes, (*box.shape[:-1], span)):
        full[axis] = size
    if list(box.axes) != sorted(box.axes) or strides[-1] != 1:
        raise InternalError("ptx.emit", f"no tensor map describes {type_} along {box.axes}")
    number = e.body.parameters.index(box.memory)
    map_ = TensorMap(number, type_.dtype, type_.shape, strides, tuple(full), swizzle)
    e.maps.setdefault(map_, "")
    return Boxes(box, place, map_, span, columns // span)


def collect_maps(e: Emission) -> None:
    """Find the tensor maps that copies need, so that they can be parameters."""
    for node in e.body.block.find("copy_async", "copy_store", "copy_multicast", "copy_pages"):
        boxes_of(e, node)


def source_at(e: Emission, boxes: Boxes, at: Sequence[str]) -> str:
    """A box of a Memory as an operand: its map, and its coordinates, innermost first."""
    return f"[{e.maps[boxes.map]}, {braced(at[::-1])}]"


def along(e: Emission, boxes: Boxes, address: str, first: int) -> Iterator[tuple[str, str]]:
    """The boxes along the columns, and where they lie from `first` bytes behind an address on."""
    step = lie_of(memory_of(boxes.place.memory)).block
    for number in range(boxes.count):
        at = [e.values.index32(i) for i in boxes.box.nodes]
        if number:
            at[-1] = e.add(at[-1], number * boxes.columns)
        yield source_at(e, boxes, at), f"[{address}+{first + number * step}]"


def copy_async(e: Emission, node: Node) -> None:
    """A box into a place, or into the same place of several programs of the cluster; its bytes land
    on a barrier."""
    boxes, (barrier, stage), more = boxes_of(e, node), node.inputs[2:4], []
    place, form, alone = boxes.place, boxes.form(LOAD), node.op.name == "copy_async"
    row_bytes, first = lie_of(memory_of(place.memory)).span, 0
    if alone:
        address, first = lead_address(e, place), node.attrs["row"] * row_bytes
    else:
        *_, row, rank = node.inputs
        whole = replace(place, index=place.index[: -len(place.axes)])
        address = e.mad(e.values.index32(row), row_bytes, lead_address(e, whole))
    landing = f"[{barrier_address(e, barrier, stage)}]"
    if not alone:
        mask = e.shl(e.copy("b32", node.attrs["mask"]), e.values.index32(rank))
        form, more = form + ".multicast::cluster", [e.value("cvt.u16.u32", mask)]
    for source, where in along(e, boxes, address, first):
        e.put(form, where, source, landing, *more, guard=e.threads.first())


copy_multicast = copy_async


def copy_store(e: Emission, node: Node) -> None:
    """A place to a box."""
    boxes = boxes_of(e, node)
    for into, where in along(e, boxes, lead_address(e, boxes.place), 0):
        e.put(boxes.form(STORE), into, where, guard=e.threads.first())


def copy_pages(e: Emission, node: Node) -> None:
    """A copy for each span of each page, issued by a lane of its own."""
    barrier, stage, pages = node.inputs[2:5]
    values, threads, boxes = e.values, e.threads, boxes_of(e, node)
    spans, count = boxes.count, boxes.count * int(pages.shape[0])
    lie = lie_of(memory_of(boxes.place.memory))
    (number,) = values.get(pages, e.plan.spread(pages), int32)
    base, landing = lead_address(e, boxes.place), f"[{barrier_address(e, barrier, stage)}]"
    found = [values.index32(i) for i in boxes.box.nodes]
    form, hint = boxes.form(LOAD), []
    if node.attrs["hint"]:
        form += ".L2::cache_hint"
        hint = [e.copy("b64", CACHE_HINTS[node.attrs["hint"]])]
    for first in range(0, count, WARP):
        lane = e.add(threads.number, first) if first else threads.number
        page, span = lane, threads.constant(0) if spans == 1 else ""
        if spans > 1:
            page = e.value("div.u32", lane, spans)
            span = e.value("rem.u32", lane, spans)
        at = list(found)
        at[0] = e.add(e.value("shfl.sync.idx.b32", number, page, "31", "-1"), found[0])
        at[-1] = e.mad(span, boxes.columns, found[-1])
        address = e.mad(page, boxes.box.shape[0] * lie.span, base)
        address = e.mad(span, lie.block, address)
        mine = e.test("lt.s32", threads.number, min(WARP, count - first))
        e.put(form, f"[{address}]", source_at(e, boxes, at), landing, *hint, guard=mine)


def wait_copies(e: Emission, node: Node) -> None:
    """Until all but some groups have been read."""
    e.put("cp.async.bulk.wait_group.read", node.attrs["pending"], guard=e.threads.first())
    if not e.threads.single:
        e.threads.meet()


# ---- copies by threads --------------------------------------------------------------------------


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


def copy_threads(e: Emission, node: Node) -> None:
    """A box into a place."""
    box, place = ends(node)
    cover = cover_of(e, box.shape, place.memory)
    into = pieces_at(e, place, cover, node.attrs["row"])
    source = pieces_of(e, box, cover)
    inside = pieces_inside(e, box, cover)
    for where, address, held in zip(into, source, inside):
        size = [e.value("selp.b32", PIECE, 0, held)] if held else []
        form = "cp.async.cg.shared.global.L2::128B"
        e.put(form, where, address, PIECE, *size, guard=cover.guard)


def store_threads(e: Emission, node: Node) -> None:
    """A place to a box."""
    box, place = ends(node)
    cover = cover_of(e, box.shape, place.memory)
    inside = pieces_inside(e, box, cover)
    words = []
    for where in pieces_at(e, place, cover, 0):
        words.append(braced(several(e, "b32", 4)))
        e.put("ld.shared.v4.b32", words[-1], where, guard=cover.guard)
    for address, held, word in zip(pieces_of(e, box, cover), inside, words):
        e.put("st.global.v4.b32", address, word, guard=e.threads.and_guards(held, cover.guard))


def clear_rows(e: Emission, node: Node) -> None:
    """Zeros to some rows of a place."""
    place, start, stop = node.inputs[:3]
    and_guards, zero = e.threads.and_guards, e.threads.constant(0)
    cover = cover_of(e, place.shape[-2:], place)
    row, _ = own_piece(e, cover)
    first, last = e.values.index32(start), e.values.index32(stop)
    pieces = pieces_at(e, touch_of(node), cover, 0)
    for step, where in zip(cover.starts, pieces):
        at = e.add(row, step) if step else row
        inside = and_guards(e.test("ge.s32", at, first), e.test("lt.s32", at, last))
        guard = and_guards(inside, cover.guard)
        e.put("st.shared.v4.b32", where, braced([zero] * 4), guard=guard)


def cover_of(e: Emission, shape: Sequence[int], place: Node) -> Cover:
    """How the role's threads share rows and columns of a place."""
    (rows, columns), threads = shape, e.threads.count
    pieces, odd = divmod(columns * place.dtype.size, PIECE)
    if odd or pieces & (pieces - 1) or pieces > threads:
        raise InternalError("ptx.emit", f"threads do not share rows of {columns} elements")
    at_once = threads // pieces
    if rows < at_once:
        guard = e.test("lt.s32", e.threads.number, rows * pieces)
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
            e.shr(number, cover.pieces.bit_length() - 1),
            e.mask(number, cover.pieces - 1),
        ),
    )


def pieces_at(e: Emission, place: Touch, cover: Cover, first: int) -> Registers:
    """Where this thread's pieces lie in a place, from row `first` on."""
    lie = lie_of(memory_of(place.memory))
    if lie.turns and first % 8:
        raise InternalError("ptx.emit", f"row {first} of a swizzled place")
    own = e.memo.once(
        ("piece", e.threads.number, cover.pieces, lie),
        lambda: piece_offset(e, *own_piece(e, cover), lie),
    )
    near = Exchanged(e, e.add(lead_address(e, place), own), lie)
    return [near.at(first + at, 0) for at in cover.starts]


def pieces_of(e: Emission, box: Touch, cover: Cover) -> Registers:
    """Where this thread's pieces lie in a Memory."""
    type_ = memory_of(box.memory)
    strides, size = type_.element_strides(), type_.dtype.size
    step, across = (strides[axis] for axis in box.axes)
    if across != 1 or any(divisor_of(s) * size % PIECE for s in strides if s != 1):
        raise InternalError("ptx.emit", f"no pieces of 16 bytes lie in {type_} along {box.axes}")
    key = ("own", e.threads.number, box.memory, cover)

    def make() -> str:
        row, piece = own_piece(e, cover)
        part = e.value("mul.wide.s32", piece, PIECE)
        own = e.value("add.s64", scaled(e, row, step, size), part)
        return e.value("add.s64", own, e.pointers[box.memory])

    base, further = summed(e, key, e.memo.once(key, make), box)
    found = []
    for at in cover.starts:
        if isinstance(step, int):
            found.append(f"[{base}+{at * step * size + further}]")
            continue
        part = scaled(e, e.threads.constant(at), step, size)
        found.append(f"[{e.value('add.s64', base, part)}+{further}]")
    return found


def summed(
    e: Emission,
    key: tuple[object, ...],
    base: str,
    box: Touch,
) -> tuple[str, int]:
    """(own address and the bytes of an index, further bytes that are constant).

    What was summed before, around this Block too, is not summed again: the axis that varies
    comes last.
    """
    terms, constant, size = [], 0, box.memory.dtype.size
    for node, stride in zip(box.nodes, memory_of(box.memory).element_strides()):
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
    return e.value("add.s64", base, scaled(e, e.values.index32(node), stride, size))


def scaled(e: Emission, index: str, stride: Size, size: int) -> str:
    """Bytes of an index along an axis, in 64 bits."""
    if isinstance(stride, int) and stride * size < 1 << 31:
        return e.value("mul.wide.s32", index, stride * size)
    wide = e.value("cvt.s64.s32", index)
    part = e.value("mul.lo.s64", wide, e.values.size64(stride))
    return e.value("mul.lo.s64", part, size)


def pieces_inside(e: Emission, box: Touch, cover: Cover) -> Registers:
    """For each piece a predicate that it lies inside of the Memory; '' where it must."""
    type_, (down, across) = memory_of(box.memory), (box.nodes[axis] for axis in box.axes)
    each = PIECE // type_.dtype.size
    if divisor_of(type_.shape[box.axes[1]]) % each or e.bounds.divisor(across) % each:
        raise InternalError("ptx.emit", f"rows of {type_} do not end with a piece")
    row, piece = own_piece(e, cover)
    held = ""
    if not fits(e, box, 1):
        at = e.mad(piece, each, e.values.index32(across))
        held = e.test("lt.u32", at, limit(e, box, 1))
    if fits(e, box, 0):
        return [held] * cover.rounds
    first, end, test = e.values.index32(down), limit(e, box, 0), "lt.u32"
    if box.writes:  # in other words than of copies of the same rows: an
        end = e.value("sub.s32", end, first)  # assembler keeps no answer until then
        first, test = row, "lt.s32"
    else:
        first = e.add(first, row)
    found = []
    for step in cover.starts:  # below 0 is far above, unsigned
        at = e.add(first, step) if step else first
        found.append(e.threads.and_guards(e.test(test, at, end), held))
    return found


def fits(e: Emission, box: Touch, axis: int) -> bool:
    """Whether a box surely lies inside along one of its axes."""
    along = box.axes[axis]
    limit = box.memory.shape[along]
    low, high = e.bounds.range(box.nodes[along])
    return isinstance(limit, int) and low >= 0 and high + box.shape[axis] <= limit


def limit(e: Emission, box: Touch, axis: int) -> str:
    """The size of a Memory along one of the axes of a box, in 32 bits."""
    size = box.memory.shape[box.axes[axis]]
    if isinstance(size, int):
        return e.threads.constant(size)
    return e.value("cvt.u32.u64", e.values.size64(size))
