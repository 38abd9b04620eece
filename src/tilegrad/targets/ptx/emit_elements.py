"""Elements at offsets that values give: gather, scatter, atomics.

A scatter takes equal offsets of a Tile in order. Where it cannot be seen that offsets differ, the
Tile's offsets are laid out in shared memory: for each element its thread looks for later ones with
the same offset, and the last one writes. A Body noted as `distinct` says that no two offsets of a
scatter are equal. Invariant: what a scatter leaves in memory does not depend on which thread runs
first.
"""

from __future__ import annotations

import math

from ...core.errors import InternalError
from ...ir.node import Node
from ...tile.row import Touch, touch_of
from .addresses import element_address, load_form, space_of
from .element import kind_of
from .emission import Emission
from .emit_memory import access
from .moves import offsets_of, read_run, write_run
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


def elements_of(e: Emission, touch: Touch, spread: Spread) -> list[tuple[str, str]]:
    """The offset and the guard ('' where there is none) of each element that an op moves."""
    assert touch.offsets is not None
    offsets, masks = e.values.get(touch.offsets, spread), [""] * len(spread.registers)
    masks = masks if touch.mask is None else e.values.get(touch.mask, spread)
    access(e, touch.memory, touch.writes)
    return list(zip(offsets, masks))


def gather(e: Emission, node: Node) -> Registers:
    """Elements at offsets."""
    memory, touch, spread = node.inputs[0], touch_of(node), e.values.spread_of(node)
    seen: dict[tuple[str, str], str] = {}
    elements = elements_of(e, touch, spread)
    for at, mask in dict.fromkeys(elements):
        where = element_address(e, touch, at)
        (seen[at, mask],) = read_run(e, where, load_form(memory), memory.dtype, guard=mask)
    return e.values.loaded(node, [seen[key] for key in elements])


# ---- scatter ------------------------------------------------------------------------------------


def scatter(e: Emission, node: Node) -> None:
    """Elements to offsets."""
    (memory, value, offset), touch = node.inputs[:3], touch_of(node)
    held = [n for n in (value, offset, *node.inputs[3:]) if n.shape and not e.plan.free(n)]
    spread = e.plan.spread(held[0]) if held else e.values.spread_of(offset)
    ordered = not (e.body.notes.get("distinct") or differ(e, offset))
    if ordered:
        spread = blocked(offset.shape, e.threads.count, 1)
    registers = e.values.get(value, spread, value.dtype)
    elements = elements_of(e, touch, spread)
    owner = e.threads.owner(spread)
    guards = [e.threads.and_guards(mask, owner) for _, mask in elements]
    if ordered:
        offsets = e.values.get(offset, spread, offset.dtype)
        guards = last_of_equal(e, spread, offsets, guards)
    for register, (at, _), guard in zip(registers, elements, guards):
        where = element_address(e, touch, at)
        write_run(e, where, f"st.{space_of(memory)}", memory.dtype, [register], guard)


def differ(e: Emission, offset: Node) -> bool:
    """Whether all elements of a Tile are seen to differ: counted numbers, moved and scaled."""
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


def last_of_equal(e: Emission, spread: Spread, offsets: Registers, guards: Registers) -> Registers:
    """Guards that hold for the last element of each offset, of those whose own guard holds."""
    count, steps = math.prod(spread.shape), steps_of(spread.shape)
    base, owner = e.shared.scratch(8 * count), e.threads.owner(spread)
    part = e.threads.offset(spread, steps) or e.threads.constant(0)
    numbers = [e.add(part, offset) for offset in offsets_of(spread, steps)]
    none = e.copy("b64", -1)
    live = [e.value("selp.b64", at, none, g) if g else at for at, g in zip(offsets, guards)]
    for number, at in zip(numbers, live):
        e.put("st.shared.b64", f"[{e.mad(number, 8, base)}]", at, guard=owner)
    e.shared.written()
    return [search(e, base, e.add(number, 1), count, at) for number, at in zip(numbers, live)]


def search(e: Emission, base: str, place: str, count: int, at: str) -> str:
    """Whether there is an offset, and it does not occur again from a place on."""
    alone = e.test("ge.s64", at, 0)
    never = e.test("ne.s32", e.threads.constant(0), 0)
    address = e.mad(place, 8, base)
    with e.loop("look", "looked") as leave:
        leave(e.test("ge.s32", place, count))
        same = e.test("eq.s64", e.value("ld.shared.b64", f"[{address}]"), at)
        e.move([alone], [never], "pred", same)
        e.put("add.s32", address, address, "8")
        e.put("add.s32", place, place, "1")
    return alone


# ---- atomics ------------------------------------------------------------------------------------


def atomic_add(e: Emission, node: Node) -> Registers:
    """Elements added at offsets; what was there before."""
    (memory, value), touch = node.inputs[:2], touch_of(node)
    dtype, values = memory.dtype, e.values
    if dtype.name not in ATOMS:
        raise InternalError("ptx.emit", f"no atomic addition of {dtype}")
    spread = e.plan.spread(node)
    registers = values.get(value, spread, dtype)
    elements = elements_of(e, touch, spread)
    form = f"atom.relaxed.gpu.{space_of(memory)}.add.{ATOMS[dtype.name]}"
    kind, owner, found = kind_of(dtype), e.threads.owner(spread), []
    for register, (at, mask) in zip(registers, elements):
        where = element_address(e, touch, at)
        found.append(e.copy(kind, 0))
        e.put(form, found[-1], where, register, guard=e.threads.and_guards(mask, owner))
    if not owner:
        return found
    if spread.shape:
        return e.shared.exchange(found, spread, spread, dtype)
    return [e.shared.tell([(found[0], owner)], dtype)]
