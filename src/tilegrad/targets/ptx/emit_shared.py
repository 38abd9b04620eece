"""Shared memory of a program: places, scratch for exchanges, and the barriers they need.

Threads of a portable Body meet where one would touch what another may still read or has just
written: `Hazards` keeps what was touched since the last meeting, through branches and round the
back of loops. Scratch is two buffers in turn, so that an exchange costs one barrier; where a loop's
turn has an odd number of them they change places at its end. Invariant:
between a write of shared memory by a plain op and any other access of it lies a barrier, on
every path.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ...core.dtype import DType
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.types import Memory
from .element import kind_of
from .emit_moves import Moves, Run
from .spread import Spread

SWIZZLES = {"": 0, "held": 0, "swizzle32": 32, "swizzle64": 64, "swizzle128": 128, "xor": 128}


@dataclass
class Head:
    """What a loop's Block touches before the first barrier that every turn reaches."""

    reads: set[Hashable] = field(default_factory=set)
    writes: set[Hashable] = field(default_factory=set)
    met: bool = False


@dataclass
class Hazards:
    """What was read and written since threads last met."""

    reads: set[Hashable] = field(default_factory=set)
    writes: set[Hashable] = field(default_factory=set)
    heads: list[Head] = field(default_factory=list)

    def needs(self, what: Hashable, writes: bool) -> bool:
        """Whether threads must meet before an access."""
        return what in self.writes or (writes and what in self.reads)

    def touch(self, what: Hashable, writes: bool) -> None:
        """Note an access."""
        (self.writes if writes else self.reads).add(what)
        for head in self.heads:
            if not head.met:
                (head.writes if writes else head.reads).add(what)

    def meet(self) -> None:
        """All threads met."""
        self.reads, self.writes = set(), set()
        for head in self.heads:
            head.met = True

    def state(self) -> tuple[set[Hashable], set[Hashable], list[bool]]:
        """What to come back to, or to join with."""
        return set(self.reads), set(self.writes), [h.met for h in self.heads]

    def reset(self, state: tuple[set[Hashable], set[Hashable], list[bool]]) -> None:
        """Go back to a state."""
        self.reads, self.writes = set(state[0]), set(state[1])
        for head, met in zip(self.heads, state[2]):
            head.met = met

    def join(self, *states: tuple[set[Hashable], set[Hashable], list[bool]]) -> None:
        """Any of some paths may have led here."""
        self.reads = set().union(*(s[0] for s in states))
        self.writes = set().union(*(s[1] for s in states))
        for number, head in enumerate(self.heads):
            head.met = all(s[2][number] for s in states)

    def rename(self, names: Mapping[Hashable, Hashable]) -> None:
        """From here on some things go by other names."""
        self.reads = {names.get(r, r) for r in self.reads}
        self.writes = {names.get(w, w) for w in self.writes}

    def turns(self, head: Head) -> bool:
        """Whether threads must meet before a loop's next turn."""
        return bool(head.writes & (self.reads | self.writes) or head.reads & self.writes)


class SharedEmitter(Moves):
    """Places in shared memory and exchanges through it."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.pointers: dict[Node, str] = {}  # global address (b64) or shared address (b32)
        self.hazards = Hazards()
        self.shared_bytes = 0
        self.scratch_turn = 0
        self.scratch_key: Hashable = None
        self.scratch_bytes: dict[Hashable, int] = {}
        self.scratch_bases: dict[Hashable, str] = {}
        self.scratch_swapped = False  # both must be as large as either
        self.toggles: dict[str, int] = {}  # registers that begin with a value
        self.in_role = False
        self.role_number = 0

    # ---- barriers -------------------------------------------------------------------------

    def sync(self) -> None:
        """All threads of the program (or of the role) meet."""
        if self.in_role:
            self.role_sync()
        else:
            self.w.put("bar.sync", "0")
        self.hazards.meet()

    def role_sync(self) -> None:
        """The threads of a role meet."""
        raise InternalError("ptx.emit", "no roles here")

    def touch(self, place: Node, writes: bool) -> None:
        """An access of a place: a barrier where plain order would be broken between threads."""
        if self.in_role:
            return  # a placed Body says itself when things happen
        if self.hazards.needs(place, writes):
            self.sync()
        self.hazards.touch(place, writes)

    # ---- scratch --------------------------------------------------------------------------

    def scratch(self, bytes_: int) -> str:
        """The address of shared bytes to write for one exchange."""
        for _ in range(2):
            self.scratch_turn += 1
            key = ("scratch", self.role_number if self.in_role else -1, self.scratch_turn % 2)
            if not self.hazards.needs(key, True):
                break
        else:
            self.sync()
        self.hazards.touch(key, True)
        self.scratch_key = key
        return self.scratch_base(key, bytes_)

    def scratch_base(self, key: Hashable, bytes_: int) -> str:
        """The register with the address of some shared bytes, set at the entry's start."""
        self.scratch_bytes[key] = max(self.scratch_bytes.get(key, 0), bytes_)
        if key not in self.scratch_bases:
            self.scratch_bases[key] = self.w.new("b32")
        return self.scratch_bases[key]

    def swap_scratch(self, head: Head) -> bool:
        """At the end of a loop's turn: let the two buffers change places where the next turn need
        not wait then. Only in an outermost loop: no other keeps what was touched by name. And only
        where threads meet in every turn: else what a turn read has either name some turns later."""
        first, second = self.scratch_keys()
        names = {first: second, second: first}
        if self.in_role or len(self.hazards.heads) != 1 or not head.met:
            return False
        self.hazards.rename(names)
        if self.hazards.turns(head):
            self.hazards.rename(names)
            return False
        one, other = (self.scratch_base(key, 0) for key in names)
        kept = self.w.value("b32", "mov.b32", one)
        self.w.put("mov.b32", one, other)
        self.w.put("mov.b32", other, kept)
        self.scratch_swapped = True
        return True

    def scratch_keys(self) -> tuple[Hashable, Hashable]:
        """The names of the two buffers of a program's threads."""
        return ("scratch", -1, 0), ("scratch", -1, 1)

    def scratch_written(self) -> None:
        """What was written is there for all to read."""
        self.sync()
        self.hazards.touch(self.scratch_key, False)

    def exchange(self, registers: list[str], own: Spread, to: Spread, dtype: DType) -> list[str]:
        """Move a Tile between Spreads through shared memory, row-major."""
        self.leave_in_scratch(registers, own, dtype)
        return self.take_from_scratch(own.shape, (0,) * len(own.shape), to, dtype)

    def leave_in_scratch(self, registers: list[str], own: Spread, dtype: DType) -> None:
        """Write a Tile to scratch, row-major."""
        size = max(1, dtype.size)
        steps = row_major_steps(own.shape)
        base = self.scratch(size * steps[0] * own.shape[0])
        address, offsets, runs = self.row_major(base, own, steps, size, 16)
        owner = self.owner(own)
        for start, count in runs:
            self.write_run(
                f"[{address}+{offsets[start]}]",
                "st.shared",
                dtype,
                registers[start : start + count],
                owner,
            )

    def take_from_scratch(
        self, shape: tuple[int, ...], start: tuple[int, ...], to: Spread, dtype: DType
    ) -> list[str]:
        """Read a Tile, or a part of it from an index on, from scratch."""
        size = max(1, dtype.size)
        steps = row_major_steps(shape)
        first = sum(c * s for c, s in zip(start, steps))
        base = self.scratch_bases[self.scratch_key]
        self.scratch_written()
        address, offsets, runs = self.row_major(base, to, steps, size, first | 16)
        return [
            r
            for at, count in runs
            for r in self.read_run(
                f"[{address}+{offsets[at] + first * size}]", "ld.shared", dtype, count
            )
        ]

    def row_major(
        self, base: str, spread: Spread, steps: Sequence[int], size: int, align: int
    ) -> tuple[str, list[int], list[Run]]:
        """The address of the thread, bytes to add for each register, and runs."""
        part = self.thread_offset(spread, [s * size for s in steps])
        address = base if part is None else self.w.value("b32", "add.s32", base, part)
        offsets = [sum(c * s for c, s in zip(at, steps)) * size for at in spread.registers]
        return address, offsets, self.runs(spread, steps, align & -align, size)

    # ---- one word a thread ------------------------------------------------------------------

    def put_word(self, where: str, register: str, dtype: DType, guard: str) -> None:
        """Leave one value in shared memory, in 4 or 8 bytes."""
        w, kind = self.w, kind_of(dtype)
        if kind == "pred":
            register = w.value("b32", "selp.b32", "1", "0", register)
        elif kind == "b16":
            register = w.value("b32", "cvt.u32.u16", register)
        w.put("st.shared.b64" if kind == "b64" else "st.shared.b32", where, register, guard=guard)

    def get_word(self, where: str, dtype: DType) -> str:
        """Take it back."""
        w, kind = self.w, kind_of(dtype)
        if kind == "b64":
            return w.value("b64", "ld.shared.b64", where)
        word = w.value("b32", "ld.shared.b32", where)
        if kind == "pred":
            return w.value("pred", "setp.ne.s32", word, "0")
        return w.value("b16", "cvt.u16.u32", word) if kind == "b16" else word

    # ---- places ---------------------------------------------------------------------------

    def reserve(self, bytes_: int, align: int) -> int:
        """Bytes of the program's shared memory; gives their offset."""
        at = -(-self.shared_bytes // align) * align
        self.shared_bytes = at + bytes_
        return at

    def shared_runs(
        self, memory: Node, index: Sequence[Node], spread: Spread, axes: Sequence[int]
    ) -> tuple[str, list[int], list[Run]]:
        """(shared address of the thread, bytes to add for each register, runs) in a place."""
        type_ = memory.type
        assert isinstance(type_, Memory)
        if SWIZZLES[type_.layout]:
            raise InternalError("ptx.emit", "a swizzled place is read and written whole")
        size = max(1, type_.dtype.size)
        strides = [int(s) for s in type_.element_strides()]
        w, total = self.w, self.pointers[memory]
        for node, stride in zip(index, strides):
            if self.bounds.range(node) == (0, 0):
                continue
            part = w.value("b32", "mul.lo.s32", self.index32(node), str(stride * size))
            total = w.value("b32", "add.s32", total, part)
        steps = [strides[a] for a in axes]
        return self.row_major(total, spread, steps, size, self.alignment(type_, index) or 16)


def row_major_steps(shape: Sequence[int]) -> list[int]:
    """Elements between neighbours along each axis."""
    steps: list[int] = []
    step = 1
    for size in reversed(shape):
        steps.insert(0, step)
        step *= size
    return steps
