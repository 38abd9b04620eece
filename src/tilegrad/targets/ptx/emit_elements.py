"""Elements at offsets that values give: gather, scatter, atomics.

A scatter takes equal offsets of a Tile in order. Where it cannot be seen that offsets differ, the
Tile's offsets are laid out in shared memory: for each element its thread looks for later ones with
the same offset, and the last one writes. A Body noted as `distinct` says that no two offsets of a
scatter are equal. Invariant: what a scatter leaves in memory does not depend on which thread runs
first.
"""

from __future__ import annotations

import math

from ...core.dtype import int64
from ...core.errors import InternalError
from ...ir.node import Node
from ...tile.row import memory_of
from . import rules
from .addresses import element_address, load_form, store_form
from .emission import Emission
from .emit_memory import access
from .moves import get_word, offsets_of, put_word, read_run, write_run
from .spread import Spread, blocked, steps_of
from .write import Registers

ATOMS = {
    "int32": "s32",
    "uint32": "u32",
    "int64": "u64",
    "uint64": "u64",
    "float32": "f32",
    "float64": "f64",
    "float16": "noftz.f16",
}


def masks_of(e: Emission, node: Node, number: int, spread: Spread) -> Registers:
    """The registers of an op's mask; '' where it has none."""
    if len(node.inputs) > number:
        return e.values.get(node.inputs[number], spread)
    return [""] * len(spread.registers)


def gather(e: Emission, node: Node) -> Registers:
    """Elements at offsets."""
    memory, offset = node.inputs[0], node.inputs[1]
    spread = e.values.spread_of(node)
    offsets = e.values.get(offset, spread)
    masks = masks_of(e, node, 2, spread)
    access(e, memory, writes=False)
    seen: dict[tuple[str, str], str] = {}
    for at, mask in zip(offsets, masks):
        if (at, mask) not in seen:
            where = f"[{element_address(e, memory, at, e.values.dtype(offset))}]"
            found = read_run(e, where, load_form(memory), memory.dtype, guard=mask)
            seen[at, mask] = found[0]
    return e.values.loaded(node, [seen[key] for key in zip(offsets, masks)])


# ---- scatter ------------------------------------------------------------------------------------


def scatter(e: Emission, node: Node) -> None:
    """Elements to offsets."""
    memory, value, offset = node.inputs[:3]
    held = [n for n in (value, offset, *node.inputs[3:]) if n.shape and not e.plan.free(n)]
    spread = e.plan.spread(held[0]) if held else e.values.spread_of(offset)
    access(e, memory, writes=True)
    if offset.shape and not (e.body.notes.get("distinct") or differ(e, offset)):
        in_order(e, node)
        return
    registers = e.values.stored(value, spread)
    offsets = e.values.get(offset, spread)
    masks = masks_of(e, node, 3, spread)
    owner = e.threads.owner(spread)
    for register, at, mask in zip(registers, offsets, masks):
        where = f"[{element_address(e, memory, at, e.values.dtype(offset))}]"
        guard = e.threads.and_guards(mask, owner)
        write_run(e, where, store_form(memory), memory.dtype, [register], guard)


def differ(e: Emission, offset: Node) -> bool:
    """Whether all elements of a Tile are seen to differ: counted places, moved and scaled."""
    name = offset.op.name
    if name == "iota" or offset.shape == ():
        return True
    if name in ("reshape", "transpose", "cast"):
        return differ(e, offset.inputs[0])
    if name == "broadcast":
        grows = math.prod(offset.shape) != math.prod(offset.inputs[0].shape)
        return not grows and differ(e, offset.inputs[0])
    if name in ("add", "subtract", "multiply"):
        for one, other in (offset.inputs, offset.inputs[::-1]):
            while other.op.name == "broadcast":
                other = other.inputs[0]
            low, most = e.bounds.range(other)
            injective = other.shape == () and (name != "multiply" or low > 0 or most < 0)
            if injective and differ(e, one):
                return True
    return False


def in_order(e: Emission, node: Node) -> None:
    """A scatter whose offsets may be equal."""
    values = e.values
    memory, value, offset = node.inputs[:3]
    plain = blocked(offset.shape, e.threads.count, 1)
    registers = values.stored(value, plain)
    offsets = [values.resize(r, values.dtype(offset), int64) for r in values.get(offset, plain)]
    if len(node.inputs) > 3:
        none = e.copy("b64", -1)
        masks = values.get(node.inputs[3], plain)
        offsets = [e.value("selp.b64", o, none, m) for o, m in zip(offsets, masks)]
    count = math.prod(offset.shape)
    base = e.shared.scratch(8 * count)
    numbers = line_numbers(e, plain)
    owner = e.threads.owner(plain)
    for number, at in zip(numbers, offsets):
        e.put("st.shared.b64", f"[{e.mad(number, 8, base)}]", at, guard=owner)
    e.shared.written()
    for number, at, x in zip(numbers, offsets, registers):
        live = e.threads.and_guards(e.test("ge.s64", at, 0), owner)
        where = f"[{element_address(e, memory, at, int64)}]"
        alone = search(e, base, e.add(number, 1), count, at, live)
        write_run(e, where, store_form(memory), memory.dtype, [x], alone)


def line_numbers(e: Emission, spread: Spread) -> Registers:
    """The place of every register's element in the Tile, row by row."""
    steps = steps_of(spread.shape)
    part = e.threads.offset(spread, steps) or e.threads.constant(0)
    return [e.add(part, offset) for offset in offsets_of(spread, steps)]


def search(e: Emission, base: str, place: str, count: int, at: str, live: str) -> str:
    """`live`, unless the offset occurs again from a place on."""
    alone = e.copy("pred", live)
    never = e.test("ne.s32", e.threads.constant(0), 0)
    address = e.mad(place, 8, base)
    with e.until(("look", "looked"), "bra", "ge.s32", place, str(count)):
        same = e.test("eq.s64", e.value("ld.shared.b64", f"[{address}]"), at)
        e.move([alone], [never], "pred", same)
        e.put("add.s32", address, address, "8")
        e.put("add.s32", place, place, "1")
    return alone


# ---- atomics ------------------------------------------------------------------------------------


def atomic_add(e: Emission, node: Node) -> Registers:
    """Elements added at offsets; what was there before."""
    memory, value, offset = node.inputs[:3]
    dtype, values = memory.dtype, e.values
    if dtype.name not in ATOMS:
        raise InternalError("ptx.emit", f"no atomic addition of {dtype}")
    spread = e.plan.spread(node)
    registers = values.stored(value, spread)
    masks = masks_of(e, node, 3, spread)
    space = "global" if memory_of(memory).scope == "global" else "shared"
    access(e, memory, writes=True)
    form = f"atom.relaxed.gpu.{space}.add.{ATOMS[dtype.name]}"
    kind, owner, found = rules.kind_of(dtype), e.threads.owner(spread), []
    for at, register, mask in zip(values.get(offset, spread), registers, masks):
        address = element_address(e, memory, at, values.dtype(offset))
        found.append(e.copy(kind, 0))
        e.put(form, found[-1], f"[{address}]", register, guard=e.threads.and_guards(mask, owner))
    if not owner:
        return found
    if spread.shape:
        return e.shared.exchange(found, spread, spread, dtype)
    base = e.shared.scratch(8)
    put_word(e, f"[{base}]", found[0], dtype, owner)
    e.shared.written()
    return [get_word(e, f"[{base}]", dtype)]
