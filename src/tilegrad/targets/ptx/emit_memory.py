"""Loads and stores of Tiles at an index: addresses, vectors of up to 16 bytes, masks.

An address is a base every thread shares, the thread's own part, and a fixed part for each run
of registers. Runs of neighbouring elements whose place is known to be aligned move as one; where
a mask may cut runs apart, a thread that is wholly inside still moves them whole. Pointers are
multiples of 16 bytes. Invariant: a masked-off element is never touched, and of several threads
that hold a copy of an element one writes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

from ...core.dtype import DType, float32, int32, int64
from ...core.errors import InternalError
from ...ir.block import Block
from ...ir.node import Node
from ...ir.symbol import Size
from ...ir.types import Memory
from ...tile.bounds import divisor_of
from . import rules
from .emit_shared import SWIZZLES, Run, SharedEmitter
from .spread import SCALAR, Spread, blocked

__all__ = ["SWIZZLES", "MemoryEmitter", "Run", "all_nodes"]
READS, WRITES = ("load", "gather", "atomic_add"), ("store", "scatter", "atomic_add")
PLAIN = ("load", "store")
FAR = 1 << 30  # bytes that a 32-bit offset does not reach any more
REACH = 21  # bits of the bytes that are left to an instruction's own offset


def all_nodes(block: Block) -> list[Node]:
    """Every Node of a Block, those of inner Blocks too."""
    found: list[Node] = []
    for node in block.nodes:
        found.append(node)
        for inner in node.blocks:
            found += all_nodes(inner)
    return found


def apart(node: Node) -> tuple[Node | None, int]:
    """An index as another one (None for 0) and a constant that is added to it."""
    fixed = 0
    while node.op.name == "add":
        for one, other in (node.inputs, node.inputs[::-1]):
            if other.op.name == "constant" and one.shape == ():
                fixed, node = fixed + int(other.attrs["value"]), one
                break
        else:
            return node, fixed
    if node.op.name == "constant":
        return None, fixed + int(node.attrs["value"])
    return node, fixed


class MemoryEmitter(SharedEmitter):
    """Emits load and store."""

    # ---- order ----------------------------------------------------------------------------

    @cached_property
    def reread(self) -> set[Node]:
        """Global Memories that the Body reads as well as writes, not only at one index."""
        seen: dict[Node, set[str]] = {}
        ways: dict[Node, set[object]] = {}
        for node in all_nodes(self.body.block):
            if node.op.name not in READS and node.op.name not in WRITES:
                continue
            memory = node.inputs[0]
            kinds = seen.setdefault(memory, set())
            kinds.update(
                kind
                for kind, names in (("read", READS), ("write", WRITES))
                if node.op.name in names
            )
            first = 1 if node.op.name in READS else 2
            value = node if node.op.name in READS else node.inputs[1]
            way: object = (
                (
                    node.inputs[first : first + len(memory.shape)],
                    node.attrs["axes"],
                    self.spread_of(value),
                )
                if node.op.name in PLAIN
                else node
            )
            ways.setdefault(memory, set()).add(way)
        return {m for m, kinds in seen.items() if len(kinds) == 2 and len(ways[m]) > 1}

    @cached_property
    def private(self) -> set[Node]:
        """Shared places of which every element belongs to one thread: all accesses are of Tiles
        of one Spread, at multiples of their size."""
        ways: dict[Node, set[object]] = {}
        for node in all_nodes(self.body.block):
            for memory in node.inputs:
                if memory.op.name == "allocate":
                    ways.setdefault(memory, set()).add(self._way(node, memory))
        return {m for m, found in ways.items() if len(found) == 1 and found != {None}}

    def _way(self, node: Node, memory: Node) -> object:
        """How a line of a place is shared out between threads, None where it is not known."""
        if node.op.name not in PLAIN or node.inputs[0] is not memory or len(memory.shape) != 1:
            return None
        value, first = (node, 1) if node.op.name == "load" else (node.inputs[1], 2)
        if len(value.shape) != 1 or self.bounds.divisor(node.inputs[first]) % value.shape[0]:
            return None
        spread = self.spread_of(value)
        return None if self.plan.free(value) or spread.copies(self.threads) else spread

    def access(self, memory: Node, writes: bool) -> None:
        """An access by a plain op: threads meet before it where another's must come first."""
        if memory in self.private:
            return
        if memory.type.scope != "global" or memory in self.reread:  # type: ignore[union-attr]
            self.touch(memory, writes)

    # ---- addresses ------------------------------------------------------------------------

    def uniform_address(self, memory: Node, index: Sequence[Node | None]) -> str:
        """The 64-bit address of an index, the same in all threads."""
        w, type_ = self.w, memory.type
        assert isinstance(type_, Memory)
        address = self.pointers[memory]
        for node, stride in zip(index, type_.element_strides()):
            if node is None or self.bounds.range(node) == (0, 0):
                continue
            bytes_ = stride * type_.dtype.size if isinstance(stride, int) else 0
            if self.dtype(node) is int32 and 0 < bytes_ < FAR:
                address = w.value("b64", "mad.wide.s32", self.scalar(node), str(bytes_), address)
                continue
            wide = self.resize(self.scalar(node), self.dtype(node), int64)
            step = str(bytes_) if isinstance(stride, int) else self.step64(stride, type_)
            address = w.value("b64", "mad.lo.s64", wide, step, address)
        return address

    def based_address(
        self, memory: Node, index: Sequence[Node], own: str | None
    ) -> tuple[str, int]:
        """A 64-bit address and the bytes to add to it for an index, `own` bytes of the thread in
        the first: what differs from an index before by a constant shares that one's address."""
        w, type_ = self.w, memory.type
        assert isinstance(type_, Memory)
        strides = type_.element_strides()
        parts = [apart(n) if isinstance(s, int) else (n, 0) for n, s in zip(index, strides)]
        fixed = sum(c * s * type_.dtype.size for (_, c), s in zip(parts, strides) if c)
        far = fixed >> REACH << REACH
        key = ("address", memory, tuple(n for n, _ in parts), own, far)
        found = self.known(key)
        if found is None:
            found = self.uniform_address(memory, [n for n, _ in parts])
            if own is not None:
                found = w.value("b64", "add.s64", found, w.value("b64", "cvt.s64.s32", own))
            if far:
                found = w.value("b64", "add.s64", found, str(far))
            self.keep(key, found)
        return found, fixed - far

    def step64(self, stride: Size, type_: Memory) -> str:
        """Bytes of a stride that depends on Symbols, in a register."""
        key = ("step", stride, type_.dtype.size)
        found = self.known(key)
        if found is None:
            found = self.keep(
                key, self.w.value("b64", "mul.lo.s64", self.size64(stride), str(type_.dtype.size))
            )
        return found

    def global_places(
        self, memory: Node, index: Sequence[Node], spread: Spread, axes: Sequence[int]
    ) -> tuple[list[str], list[Run]]:
        """The operands that address each register of a Tile, and its runs."""
        type_ = memory.type
        assert isinstance(type_, Memory)
        size, strides = type_.dtype.size, [type_.element_strides()[a] for a in axes]
        reach = [n * s * size if isinstance(s, int) else FAR for n, s in zip(spread.shape, strides)]
        near = [int(s) * size if r < FAR // 4 else 0 for s, r in zip(strides, reach)]
        address, fixed = self.based_address(memory, index, self.thread_offset(spread, near))
        far = [a for a, r in enumerate(reach) if r >= FAR // 4]
        bases: dict[tuple[int, ...], str] = {}
        places = []
        for at in spread.registers:
            key = tuple(at[a] for a in far)
            if key not in bases:
                bases[key] = self.far_address(address, spread, type_, far, key, strides)
            places.append(f"[{bases[key]}+{fixed + sum(c * s for c, s in zip(at, near))}]")
        steps = [
            divisor_of(s) * (1 + (1 << 48)) if a in far else int(s) for a, s in enumerate(strides)
        ]
        return places, self.runs(spread, steps, self.alignment(type_, index), size)

    def far_address(
        self,
        address: str,
        spread: Spread,
        type_: Memory,
        far: list[int],
        key: tuple[int, ...],
        strides: Sequence[Size],
    ) -> str:
        """Add coordinates along axes of long or symbolic strides."""
        w = self.w
        for axis, fixed in zip(far, key):
            part = self.thread_part(spread.fields, axis)
            if part is None and not fixed:
                continue
            if part is None:
                place = w.value("b64", "mov.b64", str(fixed))
            else:
                if fixed:
                    part = w.value("b32", "add.s32", part, str(fixed))
                place = w.value("b64", "cvt.s64.s32", part)
            stride = strides[axis]
            step = (
                str(stride * type_.dtype.size)
                if isinstance(stride, int)
                else (self.step64(stride, type_))
            )
            address = w.value("b64", "mad.lo.s64", place, step, address)
        return address

    # ---- masks ----------------------------------------------------------------------------

    def grain(self, node: Node, axis: int) -> int:
        """Aligned groups of so many elements along an axis have one value of a mask: 0 for all.

        `less` of counted places and a bound both divisible by n changes only at multiples of n.
        """
        if node.shape == () or node.shape[axis] == 1 or node.op.name == "constant":
            return 0
        name = node.op.name
        if name == "broadcast":
            inner = axis - len(node.shape) + len(node.inputs[0].shape)
            return self.grain(node.inputs[0], inner) if inner >= 0 else 0
        if (
            name == "reshape"
            and node.shape[axis] == node.inputs[0].shape[-1]
            and (axis == len(node.shape) - 1)
        ):
            return self.grain(node.inputs[0], len(node.inputs[0].shape) - 1)
        if name in ("bit_and", "bit_or", "bit_xor", "bit_not"):
            return math.gcd(*(self.grain(i, axis) for i in node.inputs))
        if name in ("less", "less_equal"):
            counted, bound = node.inputs if name == "less" else reversed(node.inputs)
            start = self.counts(counted, axis)
            if start is not None and self.fixed(bound, axis):
                return math.gcd(start, self.bounds.divisor(bound))
        return 1

    def counts(self, node: Node, axis: int) -> int | None:
        """What divides the start of a value that counts up along an axis; None where it does
        something else."""
        name = node.op.name
        if node.shape == () or node.shape[axis] == 1:
            return None
        if name == "iota":
            return 0
        if name == "broadcast":
            inner = axis - len(node.shape) + len(node.inputs[0].shape)
            return self.counts(node.inputs[0], inner) if inner >= 0 else None
        if name == "cast":
            return self.counts(node.inputs[0], axis)
        if name == "add":
            for one, other in (node.inputs, node.inputs[::-1]):
                start = self.counts(one, axis)
                if start is not None and self.fixed(other, axis):
                    return math.gcd(start, self.bounds.divisor(other))
        return None

    def fixed(self, node: Node, axis: int) -> bool:
        """Whether a value does not change along an axis."""
        if node.shape == () or node.shape[axis] == 1 or node.op.name == "constant":
            return True
        if node.op.name == "broadcast":
            inner = axis - len(node.shape) + len(node.inputs[0].shape)
            return inner < 0 or self.fixed(node.inputs[0], inner)
        return node.op.group in ("unary", "binary") and all(
            self.fixed(i, axis) for i in node.inputs
        )

    def uncut(self, mask: Node, spread: Spread, runs: list[Run]) -> bool:
        """Whether every run is wholly inside or outside of a mask."""
        for start, count in runs:
            if count == 1:
                continue
            run = spread.registers[start : start + count]
            for axis in range(len(spread.shape)):
                places = sorted({at[axis] for at in run})
                many = len(places)
                if many == 1:
                    continue
                align = places[0]
                for _, _, a, stride in spread.fields:
                    align = math.gcd(align, stride) if a == axis else align
                near = places == list(range(places[0], places[0] + many))
                if not near or align % many or self.grain(mask, axis) % many:
                    return False
        return True

    # ---- moving Tiles -----------------------------------------------------------------------

    def load_runs(
        self,
        places: list[str],
        runs: list[Run],
        form: str,
        dtype: DType,
        mask: list[str] | None,
        uncut: bool = False,
    ) -> list[str]:
        """Load all registers of a Spread; 0 where a mask does not hold."""
        if mask is None:
            return [r for at, n in runs for r in self.read_run(places[at], form, dtype, n)]
        single = [(i, 1) for i in range(len(places))]
        if uncut or all(n == 1 for _, n in runs):
            return [
                r for at, n in runs for r in self.read_run(places[at], form, dtype, n, mask[at])
            ]
        kind = rules.kind_of(dtype)
        result = [self.w.new(kind) for _ in places]
        with self.arms(mask) as otherwise:
            self.move(result, self.load_runs(places, runs, form, dtype, None), kind)
            otherwise()
            self.move(result, self.load_runs(places, single, form, dtype, mask), kind)
        return result

    def store_runs(
        self,
        places: list[str],
        runs: list[Run],
        form: str,
        dtype: DType,
        registers: list[str],
        mask: list[str] | None,
        owner: str,
        uncut: bool = False,
    ) -> None:
        """Store all registers of a Spread."""
        if mask is None or uncut or all(n == 1 for _, n in runs):
            for at, n in runs:
                guard = owner if mask is None else self.both(mask[at], owner)
                self.write_run(places[at], form, dtype, registers[at : at + n], guard)
            return
        single = [(i, 1) for i in range(len(places))]
        with self.arms(mask) as otherwise:
            self.store_runs(places, runs, form, dtype, registers, None, owner)
            otherwise()
            self.store_runs(places, single, form, dtype, registers, mask, owner)

    def both(self, a: str, b: str) -> str:
        """Two guards as one; '' holds."""
        if not a or not b:
            return a or b
        key = ("both", a, b)
        found = self.known(key)
        return found or self.keep(key, self.w.value("pred", "and.pred", a, b))

    @contextmanager
    def arms(self, mask: list[str]) -> Iterator[Callable[[], None]]:
        """One arm for threads whose mask holds everywhere, another for the rest."""
        w = self.w
        whole = mask[0]
        for other in dict.fromkeys(mask[1:]):
            if other != mask[0]:
                whole = w.value("pred", "and.pred", whole, other)
        apart, done = w.label("apart"), w.label("done")

        def otherwise() -> None:
            self.made.pop()
            self.made.append({})
            w.put("bra", done)
            w.place(apart)

        w.put("bra", apart, guard=f"!{whole}")
        self.made.append({})
        yield otherwise
        self.made.pop()
        w.place(done)

    def spread_of(self, value: Node) -> Spread:
        """The planned Spread; a default for values that are free."""
        if value.shape == ():
            return SCALAR
        return self.default(value) if self.plan.free(value) else self.plan.spread(value)

    def default(self, value: Node) -> Spread:
        """The Spread of a free value that is stored."""
        return blocked(value.shape, self.threads, max(1, 16 // max(1, value.dtype.size)))

    # ---- ops ------------------------------------------------------------------------------

    def emit_load(self, node: Node) -> None:
        memory, index = node.inputs[0], list(node.inputs[1:])
        mask = index.pop() if node.attrs["masked"] else None
        spread = self.plan.spread(node)
        registers = self.read_tile(memory, index, spread, node.attrs["axes"], mask)
        if node.dtype is int64 and self.dtype(node) is int32:
            registers = [self.resize(r, int64, int32) for r in registers]
        self.held[node] = registers

    def read_tile(
        self,
        memory: Node,
        index: list[Node],
        spread: Spread,
        axes: Sequence[int],
        mask: Node | None,
    ) -> list[str]:
        """A Tile at an index, in a Spread."""
        type_ = memory.type
        assert isinstance(type_, Memory)
        given = None if mask is None else self.get(mask, spread)
        self.access(memory, writes=False)
        if type_.scope == "global":
            places, runs = self.global_places(memory, index, spread, axes)
            form = self.constant_form if type_.use == "constant" else "ld.global"
        else:
            places, runs = self.shared_places(memory, index, spread, axes)
            form = "ld.shared"
        uncut = mask is not None and self.uncut(mask, spread, runs)
        return self.load_runs(places, runs, form, type_.dtype, given, uncut)

    @cached_property
    def constant_form(self) -> str:
        """How constants are read. Where a Body without roles says itself when it waits for the
        launch before, constants are read where it says so, once: ptxas would move a load that is
        known to be of constants behind the wait, and apart."""
        names = {n.op.name for n in all_nodes(self.body.block)}
        stays = "grid_dependency_wait" in names and "role" not in names
        return "ld.global.L1::no_allocate" if stays else "ld.global.nc"

    def shared_places(
        self, memory: Node, index: Sequence[Node], spread: Spread, axes: Sequence[int]
    ) -> tuple[list[str], list[Run]]:
        """The operands that address each register of a Tile in a place, and its runs."""
        address, offsets, runs = self.shared_runs(memory, index, spread, axes)
        return [f"[{address}+{offset}]" for offset in offsets], runs

    def emit_store(self, node: Node) -> None:
        memory, value, index = node.inputs[0], node.inputs[1], list(node.inputs[2:])
        mask = index.pop() if node.attrs["masked"] else None
        spread = self.spread_of(value)
        registers = self.widened((value,) * len(spread.registers), tuple(self.get(value, spread)))
        type_ = memory.type
        assert isinstance(type_, Memory)
        given = None if mask is None else self.get(mask, spread)
        self.access(memory, writes=True)
        if type_.scope == "global":
            places, runs = self.global_places(memory, index, spread, node.attrs["axes"])
        else:
            places, runs = self.shared_places(memory, index, spread, node.attrs["axes"])
        form = "st.global" if type_.scope == "global" else "st.shared"
        uncut = mask is not None and self.uncut(mask, spread, runs)
        self.store_runs(
            places, runs, form, type_.dtype, registers, given, self.owner(spread), uncut
        )

    def emit_store_add(self, node: Node) -> None:
        memory, value, index = node.inputs[0], node.inputs[1], node.inputs[2:]
        if memory.dtype is not float32:
            raise InternalError("ptx.emit", f"no addition of tiles of {memory.dtype}")
        spread = self.spread_of(value)
        registers, owner = self.get(value, spread), self.owner(spread)
        places, runs = self.global_places(memory, index, spread, node.attrs["axes"])
        for at, count in runs:
            form = f"red.relaxed.gpu.global.add{f'.v{count}' if count > 1 else ''}.f32"
            given = registers[at : at + count]
            self.w.put(
                form,
                places[at],
                "{" + ", ".join(given) + "}" if count > 1 else given[0],
                guard=owner,
            )
