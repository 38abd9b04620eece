"""Emit memory ops: loads and stores of tiles, gathers, scatters, and tiles of a matrix unit.

A tile is loaded vector by vector: contiguous where its lanes have a unit stride, else by a
gather; masks become masked loads, or branches around scalars. Invariant: nothing is touched
where a mask is false.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...core.dtype import DType
from ...ir.node import Node
from ...ir.types import Shape, unravel
from ...tile.row import memory_of, moved_tile, touch_of
from .emit_shape import (
    Emission,
    Values,
    in_lanes,
    lane_of,
    lanes_of,
    size_text,
    splat,
    split_shape,
)
from .rules import Vectors, literal, mangle, memory_type, scalar_type, stored, vector

# ---- memory ---------------------------------------------------------------------------


def offset_of(e: Emission, memory: Node, index: Sequence[Node]) -> str:
    """The element offset of an index."""
    type_ = memory_of(memory)
    total = "0"
    for position, stride in zip((e.values[i][0] for i in index), type_.element_strides()):
        if position == "0" or stride == 0:
            continue
        term = position
        if stride != 1:
            term = e.value(f"mul nsw i64 {position}, {size_text(e, stride)}")
        total = term if total == "0" else e.value(f"add nsw i64 {total}, {term}")
    return total


def address_of(e: Emission, memory: Node, offset: str) -> str:
    """The address of an element."""
    base = e.values[memory][0]
    if offset == "0":
        return base
    return e.value(f"getelementptr {memory_type(memory.dtype)}, ptr {base}, i64 {offset}")


def offsets_of(
    e: Emission, memory: Node, shape: Shape, axes: Shape, offset: str
) -> tuple[list[str], str]:
    """Element offsets of each vector of a tile, and the stride along its lanes."""
    strides = [memory.type.element_strides()[a] for a in axes]  # type: ignore[union-attr]
    if not shape:
        return [offset], "1"
    offsets = []
    split = split_shape(shape)
    strides = [*strides[:-1], strides[-1] * split[-1], strides[-1]]
    for number in range(math.prod(split[:-1])):
        total = offset
        for position, stride in zip(unravel(number, split[:-1]), strides):
            if position:
                step = size_text(e, stride * position)
                total = e.value(f"add nsw i64 {total}, {step}")
        offsets.append(total)
    return offsets, size_text(e, strides[-1])


def vectors_at(e: Emission, node: Node) -> tuple[Iterator[tuple[str, str | None]], str]:
    """The offset and the mask of each vector of a tile that an op moves, and the stride along its
    lanes; '' where every lane has an offset of its own."""
    touch, value = touch_of(node), moved_tile(node)
    if touch.offsets is not None:
        offsets, stride = e.values[touch.offsets], ""
    else:
        start = offset_of(e, touch.memory, touch.nodes)
        offsets, stride = offsets_of(e, touch.memory, value.shape, touch.axes, start)
    masks: Sequence[str | None] = [None]
    if touch.mask is not None:
        masks = e.values[touch.mask]
        masks = masks if touch.mask.shape else [splat(e, masks[0], "i1", lanes_of(value))]
    return zip(offsets, masks if len(masks) == len(offsets) else [masks[0]] * len(offsets)), stride


def _load(e: Emission, node: Node) -> Values:
    memory, lanes = node.inputs[0], lanes_of(node)
    found, stride = vectors_at(e, node)
    loaded = (move_vector(e, memory, o, stride, lanes, m) for o, m in found)
    return [Vectors(e, lanes).convert(x, stored(memory.dtype), memory.dtype) for x in loaded]


_gather = _load


def move_vector(
    e: Emission, memory: Node, offset: str, stride: str, lanes: int, mask: str | None, x: str = ""
) -> str:
    """One vector from memory, or x to it: contiguous, or strided by a gather or a scatter, whose
    lanes are stored in their order."""
    element, align = memory_type(memory.dtype), memory.dtype.size
    v, suffix = vector(element, lanes), f"{mangle(element, lanes)}."

    def plain() -> str:
        where = f"ptr {address_of(e, memory, offset)}, align {align}"
        if not x:
            return e.value(f"load {v}, {where}")
        e.line(f"store {v} {x}, {where}")
        return ""

    if mask is None and (lanes == 1 or stride == "1"):
        return plain()
    if lanes == 1:
        zero = "0.0" if v in ("float", "double") else "0"
        return e.only(str(mask), "write" if x else "read", plain, "" if x else v, zero)
    if stride == "1":
        name, suffix = "store" if x else "load", f"{suffix}p0"
        where = f"ptr align {align}", address_of(e, memory, offset)
    else:
        name, suffix = "scatter" if x else "gather", f"{suffix}v{lanes}p0"
        where = addresses_of(e, memory, lane_offsets(e, offset, stride, lanes), lanes)
    name, held = f"llvm.masked.{name}.{suffix}", (f"<{lanes} x i1>", mask or "splat (i1 true)")
    if x:
        return e.intrinsic(name, "void", (v, x), where, held)
    return e.intrinsic(name, v, where, held, (v, "zeroinitializer"))


def lane_offsets(e: Emission, offset: str, stride: str, lanes: int) -> str:
    """offset + lane * stride, as a vector; without a stride it is one already."""
    if not stride:
        return offset
    v = f"<{lanes} x i64>"
    lane = "<" + ", ".join(f"i64 {i}" for i in range(lanes)) + ">"
    steps = e.value(f"mul {v} {lane}, {splat(e, stride, 'i64', lanes)}")
    return e.value(f"add {v} {steps}, {splat(e, offset, 'i64', lanes)}")


def addresses_of(e: Emission, memory: Node, offsets: str, lanes: int) -> tuple[str, str]:
    """Addresses of elements at a vector of offsets, as an operand."""
    element, base = memory_type(memory.dtype), e.values[memory][0]
    where = e.value(f"getelementptr {element}, ptr {base}, <{lanes} x i64> {offsets}")
    return f"<{lanes} x ptr> align {memory.dtype.size}", where


def _store(e: Emission, node: Node) -> None:
    memory, value = node.inputs[:2]
    lanes = lanes_of(value)
    found, stride = vectors_at(e, node)
    for x, (o, m) in zip(e.values[value], found):
        given = Vectors(e, lanes).convert(x, value.dtype, stored(value.dtype))
        move_vector(e, memory, o, stride, lanes, m, given)


_scatter = _store


def _atomic_add(e: Emission, node: Node) -> Values:
    memory, value = node.inputs[:2]
    kinds, lanes = (scalar_type(node.dtype), "i64", "i1"), lanes_of(value)
    before = []
    for x, (o, m) in zip(e.values[value], vectors_at(e, node)[0]):
        for lane in range(lanes):
            one = [lane_of(e, part, kind, lanes, lane) for part, kind in zip((x, o, m), kinds)]
            before.append(added(e, memory, node.dtype, *one))
    return in_lanes(e, node, before)


def added(e: Emission, memory: Node, dtype: DType, x: str, offset: str, mask: str | None) -> str:
    """Add to one element as one step; the value before, 0 where the mask is false."""
    element, name = scalar_type(dtype), "fadd" if dtype.is_float else "add"

    def add() -> str:
        where = address_of(e, memory, offset)
        return e.value(f"atomicrmw {name} ptr {where}, {element} {x} monotonic")

    return e.only(mask or "true", "add", add, element, literal(0, dtype))


def _prefetch(e: Emission, node: Node) -> None:
    memory = node.inputs[0]
    where = address_of(e, memory, offset_of(e, memory, node.inputs[1:]))
    locality = "3" if node.attrs["to"] == "l1" else "2"
    hints = [("i32", hint) for hint in ("0", locality, "1")]
    e.intrinsic("llvm.prefetch.p0", "void", ("ptr", where), *hints)


def _sort(e: Emission, node: Node) -> None:
    from .sort import MEMCPY, sort_function

    name, text = sort_function(node.inputs[0].dtype, node.attrs["descending"])
    e.declared[MEMCPY] = f"declare void @{MEMCPY}(ptr, ptr, i64, i1)"
    e.declared[name] = text  # a helper in the same module
    pointers = ", ".join(f"ptr {e.values[i][0]}" for i in node.inputs[:4])
    e.line(f"call void @{name}({pointers}, i64 {e.values[node.inputs[4]][0]})")


def _allocate(e: Emission, node: Node) -> Values:
    type_ = memory_of(node)
    size = type_.dtype.size * math.prod(type_.shape)
    start, e.scratch = e.scratch, e.scratch + (size + 63) // 64 * 64
    return [e.value(f"getelementptr i8, ptr %scratch, i64 {start}")]


# ---- matrix unit (AMX) ----------------------------------------------------------------


def _matrix_zero(e: Emission, node: Node) -> Values:
    """Loaded from memory, through an address that nobody can compare: LLVM would make one zero
    of several, and tiles cannot be copied but through the stack."""
    zeros = "private unnamed_addr constant [1024 x i8] zeroinitializer, align 64"
    e.declared["tile_zeros"] = f"@tile_zeros = {zeros}"
    where = e.value('call ptr asm sideeffect "", "=r,0"(ptr @tile_zeros)')
    return [tile_from(e, node, where, str(node.shape[1] * node.dtype.size))]


def extents(node: Node) -> list[tuple[str, str]]:
    """Rows of a tile of the unit, and bytes of one, as operands."""
    return [("i16", str(node.shape[0])), ("i16", str(node.shape[1] * node.dtype.size))]


def tile_from(e: Emission, node: Node, where: str, pitch: str) -> str:
    """A tile of the unit from memory."""
    place = (("ptr", where), ("i64", pitch))
    return e.intrinsic("llvm.x86.tileloadd64.internal", "x86_amx", *extents(node), *place)


def matrix_address(e: Emission, memory: Node, index: Sequence[Node]) -> tuple[str, str]:
    """Address and row pitch in bytes of a 2-D tile (the last two axes of the Memory)."""
    type_ = memory_of(memory)
    where = address_of(e, memory, offset_of(e, memory, index))
    pitch = size_text(e, type_.element_strides()[-2] * type_.dtype.size)
    return where, pitch


def _matrix_load(e: Emission, node: Node) -> Values:
    return [tile_from(e, node, *matrix_address(e, node.inputs[0], node.inputs[1:]))]


def _matrix_dot(e: Emission, node: Node) -> Values:
    acc, a, _ = node.inputs
    operands = [*extents(acc), extents(a)[1], *[("x86_amx", e.values[i][0]) for i in node.inputs]]
    return [e.intrinsic(f"llvm.x86.{node.attrs['unit']}.internal", "x86_amx", *operands)]


def _matrix_store(e: Emission, node: Node) -> None:
    memory, value = node.inputs[:2]
    where, pitch = matrix_address(e, memory, node.inputs[2:])
    place = (("ptr", where), ("i64", pitch), ("x86_amx", e.values[value][0]))
    e.intrinsic("llvm.x86.tilestored64.internal", "void", *extents(value), *place)
