"""Loads and stores of Tiles at an index: vectors of up to 16 bytes, masks.

Runs of neighbouring elements whose place is known to be aligned move as one; where a mask may cut
runs apart, a thread that is wholly inside still moves them whole. What is seen of a mask says which
runs it never cuts. Invariant: a masked-off element is never touched, and of several threads that
hold a copy of an element one writes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...core.dtype import DType, float32, int64
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import Size, high
from ...tile.bounds import Bounds
from ...tile.row import Touch, memory_of, moved_tile, touch_of, touches_of
from .addresses import addresses_of, load_form, space_of, uniform_address
from .element import kind_of
from .emission import Emission
from .moves import Run, read_run, write_run
from .spread import SCALAR, Spread
from .write import Registers, several, vector

PLAIN = ("load", "store")
LINE = 128  # bytes that caches keep together


# ---- order ----------------------------------------------------------------------------------


def access(e: Emission, memory: Node, writes: bool) -> None:
    """An access by a plain op: threads meet before it where another's must come first."""
    if memory in e.memo.ever("private", lambda: _private(e)):
        return
    if memory_of(memory).scope != "global" or memory in e.memo.ever("reread", lambda: _reread(e)):
        e.shared.touch(memory, writes)


def _reread(e: Emission) -> set[Node]:
    """Global Memories that the Body reads as well as writes, not only at one index."""
    ways: dict[Node, set[object]] = {}
    touches = [(node, touch) for node in e.nodes for touch in touches_of(node)]
    for node, touch in touches:
        ways.setdefault(touch.memory, set()).add(_way(e, node))
    read, written = ({t.memory for _, t in touches if t.writes is way} for way in (False, True))
    return {m for m in read & written if len(ways[m]) > 1}


def _way(e: Emission, node: Node) -> object:
    """How a plain op goes over a Memory; any other op goes its own way."""
    if node.op.name not in PLAIN:
        return node
    touch = touch_of(node)
    return touch.index, touch.axes, e.values.spread_of(moved_tile(node))


def _private(e: Emission) -> set[Node]:
    """Shared places of which every element belongs to one thread: all accesses are of Tiles
    of one Spread, at multiples of their size."""
    ways: dict[Node, set[object]] = {}
    for node in e.nodes:
        for memory in node.inputs:
            if memory.op.name == "allocate":
                ways.setdefault(memory, set()).add(_share(e, node, memory))
    return {m for m, found in ways.items() if len(found) == 1 and found != {None}}


def _share(e: Emission, node: Node, memory: Node) -> object:
    """How a line of a place is shared out between threads, None where it is not known."""
    if node.op.name not in PLAIN or node.inputs[0] is not memory or len(memory.shape) != 1:
        return None
    value, (start,) = moved_tile(node), touch_of(node).nodes
    if len(value.shape) != 1 or e.bounds.divisor(start) % value.shape[0]:
        return None
    spread = e.values.spread_of(value)
    return None if e.plan.free(value) or spread.copies(e.threads.count) else spread


# ---- moving Tiles ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """Where the registers of a Tile lie in memory, and which of them move."""

    addresses: Registers
    runs: list[Run]
    mask: Registers | None
    whole: bool  # no run is cut by the mask

    @property
    def plain(self) -> bool:
        """Whether all runs can move as they are, each under one guard."""
        return self.mask is None or self.whole or all(n == 1 for _, n in self.runs)


def reached(e: Emission, touch: Touch, spread: Spread) -> Reached:
    """A box as threads reach it; they meet before where another's access must come first."""
    mask = None if touch.mask is None else e.values.get(touch.mask, spread)
    access(e, touch.memory, touch.writes)
    addresses, runs = addresses_of(e, touch, spread)
    whole = touch.mask is not None and uncut(e.bounds, touch.mask, spread, runs)
    return Reached(addresses, runs, mask, whole)


def load_runs(e: Emission, at: Reached, form: str, dtype: DType) -> Registers:
    """Load all registers of a Spread; 0 where a mask does not hold."""
    if at.plain:
        guards = at.mask or [""] * len(at.addresses)
        runs = [(at.addresses[i], n, guards[i]) for i, n in at.runs]
        return [r for where, n, guard in runs for r in read_run(e, where, form, dtype, n, guard)]
    kind = kind_of(dtype)
    result = several(e, kind, len(at.addresses))
    for part in arms(e, at):
        e.move(result, load_runs(e, part, form, dtype), kind)
    return result


def store_runs(
    e: Emission, at: Reached, form: str, dtype: DType, registers: Registers, owner: str
) -> None:
    """Store all registers of a Spread."""
    if at.plain:
        for i, n in at.runs:
            guard = owner if at.mask is None else e.threads.and_guards(at.mask[i], owner)
            write_run(e, at.addresses[i], form, dtype, registers[i : i + n], guard)
        return
    for part in arms(e, at):
        store_runs(e, part, form, dtype, registers, owner)


def arms(e: Emission, at: Reached) -> Iterator[Reached]:
    """What moves in an arm for threads whose mask holds everywhere, then in one for the rest."""
    whole = e.all_of(at.mask or ())
    apart, done = e.label("apart"), e.label("done")
    e.put("bra", apart, guard=f"!{whole}")
    with e.memo.inside():
        yield replace(at, mask=None)
    e.put("bra", done)
    e.place(apart)
    with e.memo.inside():
        yield replace(at, runs=[(i, 1) for i in range(len(at.addresses))])
    e.place(done)


# ---- ops ------------------------------------------------------------------------------------


def load(e: Emission, node: Node) -> Registers:
    """A Tile at an index."""
    touch, spread = touch_of(node), e.plan.spread(node)
    type_, found = memory_of(touch.memory), reached(e, touch, spread)
    form = load_form(touch.memory)
    if (type_.scope, type_.use) == ("global", "constant"):
        steps = [type_.element_strides()[axis] for axis in touch.axes]
        bytes_ = side_by_side(spread, steps) * type_.dtype.size
        form = constant_form(e, not 0 < high(bytes_) < LINE)
    return e.values.loaded(node, load_runs(e, found, form, type_.dtype))


def constant_form(e: Emission, whole_lines: bool) -> str:
    """How constants are read. Where a Body without roles waits for the launch before, constants
    are read where it says so, once: ptxas would move a load that is known to be of constants behind
    the wait, and apart. What a warp leaves of a line stays near for the next load."""
    stays = e.waits_before is not None or (e.has("grid_dependency_wait") and not e.has("role"))
    once = "ld.global.L1::no_allocate" if whole_lines else "ld.global"
    return once if stays else "ld.global.nc"


def side_by_side(spread: Spread, steps: Sequence[Size]) -> Size:
    """Elements from lane to lane of a warp that follow one another; 0 where all hold the same."""
    count: Size = 0
    for shift, width, axis, stride in spread.fields:
        step = steps[axis] * stride
        if shift >= 5 or step != (count or step):
            break
        count = step << min(width, 5 - shift) if isinstance(step, int) else LINE
    return count


def store(e: Emission, node: Node) -> None:
    """A Tile to an index."""
    memory, value = node.inputs[:2]
    spread, registers = e.values.own(value, value.dtype)
    found, owner = reached(e, touch_of(node), spread), e.threads.owner(spread)
    store_runs(e, found, f"st.{space_of(memory)}", memory.dtype, registers, owner)


def store_add(e: Emission, node: Node) -> None:
    """A Tile added to what lies at an index."""
    memory, value = node.inputs[:2]
    if memory.dtype is not float32:
        raise InternalError("ptx.emit", f"no addition of tiles of {memory.dtype}")
    spread, registers = e.values.own(value)
    owner = e.threads.owner(spread)
    addresses, runs = addresses_of(e, touch_of(node), spread)
    for at, count in runs:
        form, given = vector("red.relaxed.gpu.global.add", "f32", registers[at : at + count])
        e.put(form, addresses[at], given, guard=owner)


def prefetch(e: Emission, node: Node) -> None:
    """One thread asks for the line, where the index is inside."""
    memory, index = node.inputs[0], node.inputs[1:]
    type_, and_guards = memory_of(memory), e.threads.and_guards
    if type_.scope != "global":
        return
    guard = e.test("eq.s32", e.threads.number, 0)
    for at, size in zip(index, type_.shape):
        low, most = e.bounds.range(at)
        (wide,) = e.values.get(at, SCALAR, int64)
        if low < 0:
            guard = and_guards(guard, e.test("ge.s64", wide, 0))
        if not isinstance(size, int) or most >= high(size):
            limit = size if isinstance(size, int) else e.values.size64(size)
            guard = and_guards(guard, e.test("lt.s64", wide, limit))
    e.put("prefetch.global.L2", f"[{uniform_address(e, memory, index)}]", guard=guard)


# ---- what masks cut -----------------------------------------------------------------------------


def grain(bounds: Bounds, node: Node, axis: int) -> int:
    """Aligned groups of so many elements along an axis have one value of a mask: 0 for all.

    `less` of counted places and a bound both divisible by n changes only at multiples of n.
    """
    node, axis = unrepeated(node, axis)
    if axis < 0:
        return 0
    name, last = node.op.name, len(node.shape) - 1
    if name == "reshape" and axis == last and node.shape[axis] == node.inputs[0].shape[-1]:
        return grain(bounds, node.inputs[0], len(node.inputs[0].shape) - 1)
    if name in ("bit_and", "bit_or", "bit_xor", "bit_not"):
        return math.gcd(*(grain(bounds, i, axis) for i in node.inputs))
    if name in ("less", "less_equal"):
        counted, bound = node.inputs if name == "less" else reversed(node.inputs)
        start = counts(bounds, counted, axis)
        if start is not None and constant_along(bound, axis):
            return math.gcd(start, bounds.divisor(bound))
    return 1


def counts(bounds: Bounds, node: Node, axis: int) -> int | None:
    """What divides the start of a value that counts up along an axis; None where it does
    something else."""
    node, axis = unrepeated(node, axis)
    name = node.op.name if axis >= 0 else ""
    if name == "iota":
        return 0
    if name == "cast":
        return counts(bounds, node.inputs[0], axis)
    if name == "add":
        for one, other in (node.inputs, node.inputs[::-1]):
            start = counts(bounds, one, axis)
            if start is not None and constant_along(other, axis):
                return math.gcd(start, bounds.divisor(other))
    return None


def constant_along(node: Node, axis: int) -> bool:
    """Whether a value does not change along an axis."""
    node, axis = unrepeated(node, axis)
    computed = node.op.category in ("unary", "binary")
    return axis < 0 or (computed and all(constant_along(i, axis) for i in node.inputs))


def unrepeated(node: Node, axis: int) -> tuple[Node, int]:
    """What is repeated to a value, and its axis for one of the value's; -1 where that value is the
    same all along."""
    while node.op.name == "broadcast" and axis >= 0:
        axis += len(node.inputs[0].shape) - len(node.shape)
        node = node.inputs[0]
    alike = axis < 0 or node.op.name == "constant" or node.shape == () or node.shape[axis] == 1
    return node, -1 if alike else axis


def uncut(bounds: Bounds, mask: Node, spread: Spread, runs: list[Run]) -> bool:
    """Whether every run is wholly inside or outside of a mask."""
    for start, count in runs:
        if count == 1:
            continue
        run = spread.registers[start : start + count]
        for axis in range(len(spread.shape)):
            coordinates = sorted({at[axis] for at in run})
            many = len(coordinates)
            if many == 1:
                continue
            align = coordinates[0]
            for _, _, a, stride in spread.fields:
                align = math.gcd(align, stride) if a == axis else align
            near = coordinates == list(range(coordinates[0], coordinates[0] + many))
            if not near or align % many or grain(bounds, mask, axis) % many:
                return False
    return True
