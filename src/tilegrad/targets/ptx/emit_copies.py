"""Copies of boxes by the copy engine: tensor maps, and who issues.

One thread of a role issues copies (a role of copies alone is one warp); of pages each lane issues
its own. Invariant: the order of what is emitted is the order of the Body: nothing is waited for
that it does not wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.dtype import int32
from ...core.errors import InternalError
from ...ir.node import Node
from .addresses import lead_address
from .emission import Emission, memory_of
from .emit_barriers import barrier_address
from .placed_tiles import row_offsets
from .program import TensorMap
from .shared import SWIZZLES
from .write import braced

WARP = 32
CACHE_HINTS = {"first": "0x12F0000000000000"}  # what is read once leaves caches first
LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.tile.bulk_group"


@dataclass(frozen=True)
class Boxes:
    """How a copy is cut: a tensor map, the box of one copy, how many along the columns."""

    map: TensorMap
    box: tuple[int, ...]
    count: int


def boxes_of(e: Emission, node: Node) -> Boxes:
    """The boxes of a copy: where a place is swizzled, each as wide as a span of its columns."""
    order = (1, 0) if node.op.name == "copy_store" else (0, 1)
    place, memory = (node.inputs[i] for i in order)
    type_, into = memory_of(memory), memory_of(place)
    shape, axes = node.attrs["shape"], node.attrs["axes"]
    swizzle = SWIZZLES[into.layout]
    span = swizzle // into.dtype.size or shape[-1]
    if shape[-1] % span:
        raise InternalError("ptx.emit", f"rows of {shape} do not fill {into.layout}")
    box, full, strides = (*shape[:-1], span), [1] * len(type_.shape), type_.element_strides()
    for axis, size in zip(axes, box):
        full[axis] = size
    if list(axes) != sorted(axes) or strides[-1] != 1:
        raise InternalError("ptx.emit", f"no tensor map describes {type_} along {axes}")
    number = e.body.parameters.index(memory)
    map_ = TensorMap(number, type_.dtype, type_.shape, strides, tuple(full), swizzle)
    e.placed.maps.setdefault(map_, len(e.placed.maps))
    return Boxes(map_, box, shape[-1] // span)


def collect_maps(e: Emission) -> None:
    """Find the tensor maps that copies need, so that they can be parameters."""
    for node in e.nodes:
        if node.op.name in ("copy_async", "copy_store", "copy_multicast", "copy_pages"):
            boxes_of(e, node)


def source_at(e: Emission, boxes: Boxes, at: Sequence[str]) -> str:
    """A box of a Memory as an operand: its map, and its coordinates, innermost first."""
    return f"[{e.placed.map_addresses[boxes.map]}, {braced(at[::-1])}]"


def box_at(e: Emission, boxes: Boxes, index: Sequence[Node], number: int) -> str:
    """The operand of a copy's box of a number along the columns."""
    at = [e.values.index32(i) for i in index]
    if number:
        at[-1] = e.w.add(at[-1], number * boxes.box[-1])
    return source_at(e, boxes, at)


def split(node: Node, first: int, memory: Node) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The index of a Memory and that of the place, from an input on."""
    end = first + len(memory.shape)
    return node.inputs[first:end], node.inputs[end:]


def copy_async(e: Emission, node: Node) -> None:
    """A box into a place; its bytes land on a barrier."""
    place, memory, barrier, stage = node.inputs[:4]
    index, lead = split(node, 4, memory)
    boxes = boxes_of(e, node)
    address = lead_address(e, place, lead)
    first, step = row_offsets(memory_of(place), node.attrs["row"])
    landing = f"[{barrier_address(e, barrier, stage)}]"
    for i in range(boxes.count):
        source, where = box_at(e, boxes, index, i), f"[{address}+{first + i * step}]"
        form = LOAD.format(len(index))
        e.w.put(form, where, source, landing, guard=e.threads.first())


def copy_multicast(e: Emission, node: Node) -> None:
    """A box into the same place of several programs of the cluster."""
    w, (place, memory, barrier, stage) = e.w, node.inputs[:4]
    index, (*lead, row, first) = split(node, 4, memory)
    boxes = boxes_of(e, node)
    span, step = row_offsets(memory_of(place), 1)
    address = w.mad(e.values.index32(row), span, lead_address(e, place, lead))
    landing = f"[{barrier_address(e, barrier, stage)}]"
    mask = w.shl(w.copy("b32", node.attrs["mask"]), e.values.index32(first))
    mask = w.value("cvt.u16.u32", mask)
    for i in range(boxes.count):
        source, where = box_at(e, boxes, index, i), f"[{address}+{i * step}]"
        form = LOAD.format(len(index)) + ".multicast::cluster"
        w.put(form, where, source, landing, mask, guard=e.threads.first())


def copy_store(e: Emission, node: Node) -> None:
    """A place to a box."""
    memory, place = node.inputs[:2]
    index, lead = split(node, 2, memory)
    boxes = boxes_of(e, node)
    address = lead_address(e, place, lead)
    rows = node.attrs["shape"][-2] if len(node.attrs["shape"]) > 1 else 1
    step = rows * SWIZZLES[memory_of(place).layout]
    for i in range(boxes.count):
        into, where = box_at(e, boxes, index, i), f"[{address}+{i * step}]"
        e.w.put(STORE.format(len(index)), into, where, guard=e.threads.first())


def copy_pages(e: Emission, node: Node) -> None:
    """A copy for each span of each page, issued by a lane of its own."""
    place, memory, barrier, stage, pages = node.inputs[:5]
    w, values, threads, type_ = e.w, e.values, e.threads, memory_of(place)
    index, lead = split(node, 5, memory)
    boxes = boxes_of(e, node)
    spans, count = boxes.count, boxes.count * int(pages.shape[0])
    bytes_ = SWIZZLES[type_.layout] or boxes.box[-1] * type_.dtype.size  # of a row of a span
    number = values.get(pages, e.plan.spread(pages))[0]
    number = values.resize(number, values.dtype(pages), int32)
    base, landing = lead_address(e, place, lead), f"[{barrier_address(e, barrier, stage)}]"
    found = [values.index32(i) for i in index]
    form, hint = LOAD.format(len(index)), []
    if node.attrs["hint"]:
        form += ".L2::cache_hint"
        hint = [w.copy("b64", CACHE_HINTS[node.attrs["hint"]])]
    for first in range(0, count, WARP):
        lane = w.add(threads.number, first) if first else threads.number
        page, span = lane, threads.constant(0) if spans == 1 else ""
        if spans > 1:
            page = w.value("div.u32", lane, str(spans))
            span = w.value("rem.u32", lane, str(spans))
        at = list(found)
        at[0] = w.add(w.value("shfl.sync.idx.b32", number, page, "31", "-1"), found[0])
        at[-1] = w.mad(span, boxes.box[-1], found[-1])
        address = w.mad(page, boxes.box[0] * bytes_, base)
        address = w.mad(span, int(type_.shape[-2]) * bytes_, address)
        mine = w.test("lt.s32", threads.number, min(WARP, count - first))
        w.put(form, f"[{address}]", source_at(e, boxes, at), landing, *hint, guard=mine)


def commit_copies(e: Emission, node: Node) -> None:
    """The stores issued so far are a group."""
    e.w.put("cp.async.bulk.commit_group", guard=e.threads.first())


def wait_copies(e: Emission, node: Node) -> None:
    """Until all but some groups have been read."""
    pending = str(node.attrs["pending"])
    e.w.put("cp.async.bulk.wait_group.read", pending, guard=e.threads.first())
    if not e.threads.single:
        e.threads.meet_role()
