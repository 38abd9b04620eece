"""Addresses of Tiles in memory: a base every thread shares, the thread's own part, and a fixed
part for each register.

Pointers are multiples of 16 bytes. Invariant: offsets that may not fit in 32 bits are added in 64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ...core.dtype import DType, int32
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import Size
from ...ir.types import Memory
from ...tile.bounds import divisor_of
from .emission import Emission, memory_of
from .moves import Run, runs_of
from .shared import SWIZZLES
from .spread import Spread

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
    type_ = memory_of(memory)
    if type_.scope != "global":
        return "ld.shared"
    return "ld.global.nc" if type_.use == "constant" else "ld.global"


def store_form(memory: Node) -> str:
    """How an element is stored."""
    return "st.global" if memory_of(memory).scope == "global" else "st.shared"


def element_address(e: Emission, memory: Node, offset: str, dtype: DType) -> str:
    """The address of an element by its number."""
    size, pointer = memory.dtype.size, e.pointers[memory]
    if memory_of(memory).scope != "global":
        return e.w.mad(e.values.resize(offset, dtype, int32), size, pointer)
    form = "mad.wide.s32" if dtype is int32 else "mad.lo.s64"
    return e.w.value(form, offset, str(size), pointer)


def addresses_of(
    e: Emission, memory: Node, index: Sequence[Node], spread: Spread, axes: Sequence[int]
) -> tuple[list[str], list[Run]]:
    """The operands that address each register of a Tile at an index, and its runs."""
    type_ = memory_of(memory)
    align = _alignment(e, type_, index)
    if type_.scope == "global":
        return _global_addresses(e, memory, index, spread, axes, align)
    if SWIZZLES[type_.layout]:
        raise InternalError("ptx.emit", "a swizzled place is read and written whole")
    base, strides = lead_address(e, memory, index), type_.element_strides()
    steps = [int(strides[a]) for a in axes]
    return e.shared.addresses(base, spread, steps, type_.dtype.size, align or 16)


def _alignment(e: Emission, type_: Memory, index: Sequence[Node]) -> int:
    """A number of elements that divides the offset of an index, 16 at most."""
    align = 16
    for node, stride in zip(index, type_.element_strides()):
        align = math.gcd(align, e.bounds.divisor(node) * divisor_of(stride))
    return align


def lead_address(e: Emission, place: Node, index: Sequence[Node], start: str = "") -> str:
    """The shared address of a place (beginning at `start`) at its leading index."""
    type_, address = memory_of(place), start or e.pointers[place]
    for node, stride in zip(index, type_.element_strides()):
        if e.bounds.range(node) != (0, 0):
            part = e.w.mul(e.values.index32(node), int(stride) * type_.dtype.size)
            address = e.w.add(address, part)
    return address


# ---- in 64 bits ---------------------------------------------------------------------------------


def uniform_address(e: Emission, memory: Node, index: Sequence[Node | None]) -> str:
    """The 64-bit address of an index, the same in all threads."""
    type_, values, address = memory_of(memory), e.values, e.pointers[memory]
    for node, stride in zip(index, type_.element_strides()):
        if node is None or e.bounds.range(node) == (0, 0):
            continue
        bytes_ = stride * type_.dtype.size if isinstance(stride, int) else 0
        if values.dtype(node) is int32 and 0 < bytes_ < FAR:
            form, at, step = "mad.wide.s32", values.scalar(node), str(bytes_)
        else:
            form, at = "mad.lo.s64", values.index64(node)
            step = _step64(e, stride, type_.dtype.size)
        address = e.w.value(form, at, step, address)
    return address


def _based_address(e: Emission, memory: Node, index: Sequence[Node], own: str) -> tuple[str, int]:
    """A 64-bit address and the bytes to add to it for an index, `own` bytes of the thread in
    the first: what differs from an index before by a constant shares that one's address."""
    w, type_ = e.w, memory_of(memory)
    strides = type_.element_strides()
    parts = [apart(n) if isinstance(s, int) else (n, 0) for n, s in zip(index, strides)]
    constant = sum(c * int(s) * type_.dtype.size for (_, c), s in zip(parts, strides) if c)
    far = constant >> REACH << REACH

    def make() -> str:
        address = uniform_address(e, memory, [n for n, _ in parts])
        if own:
            address = w.value("add.s64", address, w.value("cvt.s64.s32", own))
        return w.value("add.s64", address, str(far)) if far else address

    key = ("address", memory, tuple(n for n, _ in parts), own, far)
    return e.memo.once(key, make), constant - far


def _step64(e: Emission, stride: Size, size: int) -> str:
    """Bytes of a stride: a literal, or in a register where it depends on Symbols."""
    if isinstance(stride, int):
        return str(stride * size)
    return e.memo.once(
        ("step", stride, size),
        lambda: e.w.value("mul.lo.s64", e.values.size64(stride), str(size)),
    )


def _global_addresses(
    e: Emission,
    memory: Node,
    index: Sequence[Node],
    spread: Spread,
    axes: Sequence[int],
    align: int,
) -> tuple[list[str], list[Run]]:
    """The same in global memory: along axes of long or symbolic strides in 64 bits."""
    type_ = memory_of(memory)
    size, strides = type_.dtype.size, [type_.element_strides()[a] for a in axes]
    reach = [n * s * size if isinstance(s, int) else FAR for n, s in zip(spread.shape, strides)]
    near = [int(s) * size if r < FAR // 4 else 0 for s, r in zip(strides, reach)]
    address, constant = _based_address(e, memory, index, e.threads.offset(spread, near))
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
    w = e.w
    for axis, coordinate in far:
        part = e.threads.part(spread.fields, axis)
        if part is None and not coordinate:
            continue
        if part is None:
            place = w.copy("b64", coordinate)
        else:
            place = w.value("cvt.s64.s32", w.add(part, coordinate) if coordinate else part)
        address = w.value("mad.lo.s64", place, _step64(e, strides[axis], size), address)
    return address
