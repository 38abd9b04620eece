"""Places in shared memory and in registers: made, read and written whole.

Invariant: a place in registers keeps its registers as long as it lives, so that products in flight
may write them; what is read of it is a copy.
"""

from __future__ import annotations

from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.types import product
from . import rules
from .emission import Emission, memory_of
from .emit_matrix import operand_words, operands_of
from .moves import packed, read_run, unpacked, write_run
from .placed_tiles import by_matrix, matrix_rows, place_runs, row_address
from .shared import SWIZZLES
from .spread import Spread
from .write import braced

HELD = {"read_place", "write_place", "send"}  # what a place held by threads allows


def allocate(e: Emission, node: Node) -> None:
    """A place."""
    type_ = memory_of(node)
    if type_.scope == "register":
        register_tile(e, node)
        return
    users = {n.op.name for n in e.nodes if node in n.inputs}
    if type_.layout == "held" and not users <= HELD:
        raise InternalError("ptx.emit", f"{node!r} lies as threads hold it: read or write it")
    swizzle, bytes_ = SWIZZLES[type_.layout], int(product(type_.shape)) * type_.dtype.size
    at = e.shared.reserve(bytes_, 8 * swizzle if swizzle else 128)
    e.pointers[node] = e.w.add(e.shared.base, at)


def register_tile(e: Emission, node: Node) -> None:
    """A place in registers; of 16 bits two elements share one where they are neighbours."""
    if node in operands_of(e):
        e.placed.registers[node] = operand_words(e, node)
        e.placed.paired.add(node)
        return
    spread, kind = e.plan.spread(node), rules.kind_of(node.dtype)
    count = len(spread.registers)
    if kind == "b16" and in_pairs(spread):
        e.placed.paired.add(node)
        kind, count = "b32", count // 2
    e.placed.registers[node] = [e.w.new(kind) for _ in range(count)]


def in_pairs(spread: Spread) -> bool:
    """Whether registers come two by two, neighbours along the last axis."""
    found = spread.registers
    return (
        len(found) % 2 == 0
        and bool(spread.shape)
        and all(b == (*a[:-1], a[-1] + 1) for a, b in zip(found[::2], found[1::2]))
    )


def read_place(e: Emission, node: Node) -> list[str]:
    """What a place holds."""
    w, place, index = e.w, node.inputs[0], node.inputs[1:]
    if place in e.placed.registers:
        paired = place in e.placed.paired
        kind = "b32" if paired else rules.kind_of(place.dtype)
        found = [w.copy(kind, r) for r in e.placed.registers[place]]
        return unpacked(w, found, place.dtype) if paired else found
    spread = e.plan.spread(node)
    begin = row_address(e, place, node.attrs["rows"][0]) if node.attrs["rows"] else ""
    if by_matrix(e, place, spread):
        found = []
        for where, _ in matrix_rows(e, place, index, spread, begin):
            words = [w.new("b32") for _ in range(4)]
            w.put("ldmatrix.sync.aligned.m8n8.x4.shared.b16", braced(words), where)
            found += unpacked(w, words, place.dtype)
        return found
    parts = {
        run.first: read_run(w, run.where, "ld.shared", place.dtype, run.count)
        for run in place_runs(e, place, index, spread, begin)
    }
    return [r for first in sorted(parts) for r in parts[first]]


def write_place(e: Emission, node: Node) -> None:
    """Set what a place holds."""
    w, (place, value), index = e.w, node.inputs[:2], node.inputs[2:]
    if place in e.placed.registers:
        registers = e.values.get(value, e.plan.spread(place))
        if place in e.placed.paired:
            w.move(e.placed.registers[place], packed(w, registers, place.dtype), "b32")
        else:
            w.move(e.placed.registers[place], registers, rules.kind_of(place.dtype))
        return
    spread = e.values.spread_of(value)
    registers = e.values.get(value, spread)
    if by_matrix(e, place, spread) and e.overlaps:  # sm_80 has no stmatrix
        for where, first in matrix_rows(e, place, index, spread):
            words = packed(w, registers[first : first + 8], place.dtype)
            w.put("stmatrix.sync.aligned.m8n8.x4.shared.b16", where, braced(words))
        return
    owner = e.threads.owner(spread)
    for run in place_runs(e, place, index, spread):
        part = registers[run.first : run.first + run.count]
        write_run(w, run.where, "st.shared", place.dtype, part, owner)
