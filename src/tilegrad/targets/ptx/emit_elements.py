"""Elements at offsets that values give: gather, scatter, atomics; and their sort.

A scatter takes equal offsets of a Tile in order. Where it cannot be seen that offsets differ, the
Tile's offsets (and values, where they are combined) are laid out in shared memory: for each element
its thread looks for others with the same offset, and the last one writes, or the first one combines
them all. A Body noted as `distinct` says that no two offsets of a scatter are equal. The stable
sort of keys by all threads of a program is a sorting network whose pairs always rise: partners
mirrored within a run, then halves nearer and nearer. Pairs that reach past the count are left
alone, as if what lies there were larger than all keys, so any count is sorted. Equal keys are told
apart by where they came from, which the second scratch Memory keeps. Invariant: what is in memory
afterwards does not depend on which thread runs first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...core.dtype import DType, int32, int64
from ...core.errors import InternalError
from ...ir.node import Node
from ...tile.numeric import SCATTER
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


def element_at(e: Emission, memory: Node, at: str, dtype: DType, guard: str = "") -> str:
    """The element of a number, 0 where a guard does not hold."""
    where = f"[{element_address(e, memory, at, dtype)}]"
    return read_run(e, where, load_form(memory), memory.dtype, guard=guard)[0]


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
            seen[at, mask] = element_at(e, memory, at, e.values.dtype(offset), mask)
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
        if node.attrs["mode"] != "set":
            old = read_run(e, where, load_form(memory), memory.dtype, guard=guard)[0]
            name = SCATTER[node.attrs["mode"]]
            register = rules.apply(e, name, memory.dtype, old, register)
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
    combined = node.attrs["mode"] != "set"
    base = e.shared.scratch(count * (16 if combined else 8))
    numbers = line_numbers(e, plain)
    owner = e.threads.owner(plain)
    for number, at, x in zip(numbers, offsets, registers):
        address = e.mad(number, 8, base)
        e.put("st.shared.b64", f"[{address}]", at, guard=owner)
        if combined:
            put_word(e, f"[{address}+{8 * count}]", x, memory.dtype, owner)
    e.shared.written()
    for number, at, x in zip(numbers, offsets, registers):
        live = e.threads.and_guards(e.test("ge.s64", at, 0), owner)
        where = f"[{element_address(e, memory, at, int64)}]"
        if combined:
            first_combines(e, node, base, count, number, at, where, live)
        else:
            alone = search(e, base, e.add(number, 1), str(count), at, live)
            write_run(e, where, store_form(memory), memory.dtype, [x], alone)


def line_numbers(e: Emission, spread: Spread) -> Registers:
    """The place of every register's element in the Tile, row by row."""
    steps = steps_of(spread.shape)
    part = e.threads.offset(spread, steps) or e.threads.constant(0)
    return [e.add(part, offset) for offset in offsets_of(spread, steps)]


def first_combines(
    e: Emission, node: Node, base: str, count: int, number: str, at: str, where: str, live: str
) -> None:
    """If an element is the first of its offset, it combines all of them."""
    memory = node.inputs[0]
    alone = search(e, base, e.copy("b32", 0), number, at, live)
    kind = rules.kind_of(memory.dtype)
    total = e.new(kind)
    e.move([total], read_run(e, where, load_form(memory), memory.dtype, guard=alone), kind)

    def take(address: str, same: str) -> None:
        other = get_word(e, f"[{address}+{8 * count}]", memory.dtype)
        new = rules.apply(e, SCATTER[node.attrs["mode"]], memory.dtype, total, other)
        e.move([total], [new], kind, same)

    over_offsets(e, base, e.copy("b32", number), str(count), at, take)
    write_run(e, where, store_form(memory), memory.dtype, [total], alone)


def search(e: Emission, base: str, start: str, stop: str, at: str, live: str) -> str:
    """`live`, unless the offset occurs again between two places."""
    alone = e.copy("pred", live)
    never = e.test("ne.s32", e.threads.constant(0), 0)
    over_offsets(e, base, start, stop, at, lambda _, same: e.move([alone], [never], "pred", same))
    return alone


def over_offsets(
    e: Emission, base: str, start: str, stop: str, at: str, each: Callable[[str, str], None]
) -> None:
    """A loop over places of the Tile; each(address, whether its offset is the same)."""
    address = e.mad(start, 8, base)
    head, done, more = e.label("look"), e.label("looked"), e.new("pred")
    e.put("setp.ge.s32", more, start, stop)
    e.put("bra", done, guard=more)
    e.place(head)
    with e.memo.inside():
        same = e.test("eq.s64", e.value("ld.shared.b64", f"[{address}]"), at)
        each(address, same)
    e.put("add.s32", address, address, "8")
    e.put("add.s32", start, start, "1")
    e.put("setp.lt.s32", more, start, stop)
    e.put("bra", head, guard=more)
    e.place(done)


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


# ---- sort ---------------------------------------------------------------------------------------


Item = tuple[str, ...]  # registers of key, place and origin


def sort(e: Emission, node: Node) -> None:
    """Sort keys, and places with them."""
    keys, numbers, _, origins, count_node = node.inputs
    for memory in (keys, numbers, origins):
        e.shared.touch(memory, writes=True)
    count = e.values.index32(count_node)
    each(
        e,
        count,
        lambda at: leave_at(e, origins, at, rules.convert(e, int32, origins.dtype, at)),
    )
    e.shared.sync()
    log_half, half = e.copy("b32", 0), e.copy("b32", 1)
    with e.until(("runs", "sorted"), "bra.uni", "ge.s32", half, count):
        last = e.sub(e.shl(half, 1), 1)
        step(e, node, log_half, count, lambda low: e.xor(low, last))
        near = e.sub(log_half, 1)
        with e.until(("halves", "next"), "bra.uni", "lt.s32", near, "0"):
            distance = e.shl("1", near)
            step(e, node, near, count, lambda low: e.add(low, distance))
            e.put("sub.s32", near, near, "1")
        e.put("add.s32", log_half, log_half, "1")
        e.put("shl.b32", half, half, "1")


def each(e: Emission, count: str, function: Callable[[str], None]) -> None:
    """Numbers below a count, spread over the threads."""
    at = e.copy("b32", e.threads.number)
    with e.until(("each", "done"), "bra", "ge.s32", at, count):
        with e.memo.inside():
            function(at)
        e.put("add.s32", at, at, str(e.threads.count))


def step(e: Emission, node: Node, shift: str, count: str, partner: Callable[[str], str]) -> None:
    """All pairs whose lower one has a zero digit at `shift`."""
    memories = node.inputs[0], node.inputs[1], node.inputs[3]

    def pair(number: str) -> None:
        above = e.shr(number, shift)
        inside = e.sub(number, e.shl(above, shift))
        low = e.add(e.shl(e.shl(above, shift), 1), inside)
        high = partner(low)
        skip = e.label("skip")
        e.put("bra", skip, guard=e.test("ge.s32", high, count))
        first, second = (
            tuple(element_at(e, memory, at, int32) for memory in memories) for at in (low, high)
        )
        e.put("bra", skip, guard=f"!{before(e, node, second, first)}")
        for at, item in ((low, second), (high, first)):
            for memory, register in zip(memories, item):
                leave_at(e, memory, at, register)
        e.place(skip)

    each(e, count, pair)
    e.shared.sync()


def leave_at(e: Emission, memory: Node, at: str, register: str) -> None:
    """Write an element at a number."""
    where = f"[{element_address(e, memory, at, int32)}]"
    write_run(e, where, store_form(memory), memory.dtype, [register], "")


def before(e: Emission, node: Node, a: Item, b: Item) -> str:
    """Whether one item comes before another; nan is larger than all numbers."""
    dtype = node.inputs[0].dtype
    small, large = (b[0], a[0]) if node.attrs["descending"] else (a[0], b[0])
    less = rules.apply(e, "less", dtype, small, large)
    same = rules.apply(e, "equal", dtype, a[0], b[0])
    if dtype.is_float:
        nan = [rules.apply(e, "not_equal", dtype, x, x) for x in (small, large)]
        number = e.value("not.pred", nan[0])
        less = e.value("or.pred", less, e.and_predicates(number, nan[1]))
        same = e.value("or.pred", same, e.and_predicates(*nan))
    sooner = rules.apply(e, "less", node.inputs[3].dtype, a[2], b[2])
    return e.value("or.pred", less, e.and_predicates(same, sooner))
