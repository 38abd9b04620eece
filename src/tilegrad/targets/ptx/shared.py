"""The threads that run a part of a Body, and the shared memory they have: scratch, barriers.

Threads of a portable Body meet where one would touch what another may still read or has just
written: `Hazards` keeps what was touched since the last meeting, through branches and round the
back of loops. Scratch is two buffers in turn, so that an exchange costs one barrier; where a loop's
turn has an odd number of them they change places at its end. A Memo keeps what may be used again
until the Block that made it ends. Invariant: between a write of shared memory by a plain op and any
other access of it lies a barrier, on every path, and a register is read only where the line that
writes it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...core.dtype import DType
from ...ir.types import Shape
from .moves import Run, offsets_of, read_run, runs_of, write_run
from .spread import Spread, steps_of
from .write import Registers, Writer

SWIZZLES = {"": 0, "held": 0, "swizzle32": 32, "swizzle64": 64, "swizzle128": 128, "xor": 128}
Accesses = set[tuple[Hashable, bool]]  # of what, and whether it is written
State = tuple[Accesses, list[bool]]


@dataclass
class Head:
    """What a loop's Block touches before the first barrier that every turn reaches."""

    touched: Accesses = field(default_factory=set)
    met: bool = False


@dataclass
class Hazards:
    """What was read and written since threads last met."""

    touched: Accesses = field(default_factory=set)
    heads: list[Head] = field(default_factory=list)

    def needs(self, what: Hashable, writes: bool) -> bool:
        """Whether threads must meet before an access."""
        return (what, True) in self.touched or (writes and (what, False) in self.touched)

    def touch(self, what: Hashable, writes: bool) -> None:
        """Note an access."""
        self.touched.add((what, writes))
        for head in self.heads:
            if not head.met:
                head.touched.add((what, writes))

    def meet(self) -> None:
        """All threads met."""
        self.touched = set()
        for head in self.heads:
            head.met = True

    def state(self) -> State:
        """What to come back to, or to join with."""
        return set(self.touched), [h.met for h in self.heads]

    def join(self, *states: State) -> None:
        """Any of some paths may have led here; one alone is gone back to."""
        self.touched = set().union(*(touched for touched, _ in states))
        for number, head in enumerate(self.heads):
            head.met = all(met[number] for _, met in states)

    def rename(self, names: Mapping[Hashable, Hashable]) -> None:
        """From here on some things go by other names."""
        self.touched = {(names.get(what, what), writes) for what, writes in self.touched}

    def turns(self, head: Head) -> bool:
        """Whether threads must meet before a loop's next turn."""
        return any(self.needs(what, writes) for what, writes in head.touched)


class Shared:
    """The program's shared memory: what is reserved, scratch, and who must meet."""

    def __init__(self, threads: Threads) -> None:
        self.w, self.threads = threads.w, threads
        self.hazards = Hazards()
        self.bytes = 0
        self.base = ""  # where the program's own memory begins
        self.turn = 0
        self.key: Hashable = None  # of the scratch in use
        self.sizes: dict[Hashable, int] = {}
        self.bases: dict[Hashable, str] = {}
        self.swapped = False  # both scratches must be as large as either
        self.toggles: dict[str, int] = {}  # registers that begin with a value

    def reserve(self, bytes_: int, align: int) -> int:
        """Bytes of the program's shared memory; gives their offset."""
        at = -(-self.bytes // align) * align
        self.bytes = at + bytes_
        return at

    # ---- barriers -------------------------------------------------------------------------

    def sync(self) -> None:
        """All threads of the program (or of the role) meet."""
        self.threads.meet()
        self.hazards.meet()

    def touch(self, place: Hashable, writes: bool) -> None:
        """An access of a place: a barrier where plain order would be broken between threads."""
        if self.threads.role >= 0:
            return  # a placed Body says itself when things happen
        if self.hazards.needs(place, writes):
            self.sync()
        self.hazards.touch(place, writes)

    @contextmanager
    def loop(self) -> Iterator[None]:
        """A loop: its turns, and no turn at all, lead to its end."""
        before, head = self.hazards.state(), Head()
        self.hazards.heads.append(head)
        yield
        if self.hazards.turns(head) and not self._swap(head):
            self.sync()
        self.hazards.heads.pop()
        self.hazards.join(before, self.hazards.state())

    # ---- scratch --------------------------------------------------------------------------

    def scratch(self, bytes_: int) -> str:
        """The address of shared bytes to write for one exchange."""
        for _ in range(2):
            self.turn += 1
            self.key = ("scratch", self.threads.role, self.turn % 2)
            if not self.hazards.needs(self.key, True):
                break
        else:
            self.sync()
        self.hazards.touch(self.key, True)
        return self.base_of(self.key, bytes_)

    def base_of(self, key: Hashable, bytes_: int) -> str:
        """The register with the address of some shared bytes, set at the entry's start."""
        self.sizes[key] = max(self.sizes.get(key, 0), bytes_)
        if key not in self.bases:
            self.bases[key] = self.w.new("b32")
        return self.bases[key]

    def _swap(self, head: Head) -> bool:
        """At the end of a loop's turn: let the two buffers change places where the next turn need
        not wait then. Only in an outermost loop: no other keeps what was touched by name. And only
        where threads meet in every turn: else what a turn read has either name some turns later."""
        first, second = _KEYS
        names: dict[Hashable, Hashable] = {first: second, second: first}
        if self.threads.role >= 0 or len(self.hazards.heads) != 1 or not head.met:
            return False
        self.hazards.rename(names)
        if self.hazards.turns(head):
            self.hazards.rename(names)
            return False
        one, other = (self.base_of(key, 0) for key in names)
        kept = self.w.copy("b32", one)
        self.w.move((one, other), (other, kept), "b32")
        self.swapped = True
        return True

    def written(self) -> None:
        """What was written is there for all to read."""
        self.sync()
        self.hazards.touch(self.key, False)

    def frame(self) -> None:
        """Where scratch lies, and registers with a first value: for the entry's start."""
        if self.bases and not self.base:
            self.base = self.w.value("mov.u32", "dynamic_shared")
        if self.swapped:
            self.sizes.update(dict.fromkeys(_KEYS, max(self.sizes[key] for key in _KEYS)))
        for key, register in self.bases.items():
            at = self.reserve(self.sizes[key], 128)
            self.w.put("add.s32", register, self.base, at)
        for register, value in self.toggles.items():
            self.w.put("mov.b32", register, value)

    # ---- exchanges ------------------------------------------------------------------------

    def tell(self, told: Iterable[tuple[str, str]], dtype: DType) -> str:
        """The one register, of those under guards, whose guard holds in some thread, for all."""
        base = self.scratch(8)
        for register, guard in told:
            write_run(self.w, f"[{base}]", "st.shared", dtype, [register], guard)
        self.written()
        return read_run(self.w, f"[{base}]", "ld.shared", dtype)[0]

    def exchange(
        self, registers: Registers, own: Spread, to: Spread, dtype: DType, start: Shape = ()
    ) -> Registers:
        """Move a Tile, or a part of it from an index on, between Spreads, row-major."""
        steps = steps_of(own.shape)
        first = sum(c * s for c, s in zip(start, steps))
        base = self.scratch(dtype.size * steps[0] * own.shape[0])
        self.lay(registers, base, own, steps, dtype)
        self.written()
        addresses, runs = self.addresses(base, to, steps, dtype.size, first | 16, first)
        return [
            r
            for at, count in runs
            for r in read_run(self.w, addresses[at], "ld.shared", dtype, count)
        ]

    def lay(
        self, registers: Sequence[str], base: str, own: Spread, steps: Sequence[int], dtype: DType
    ) -> None:
        """Write a Tile at an address, its coordinates times steps apart."""
        addresses, runs = self.addresses(base, own, steps, dtype.size, 16)
        owner = self.threads.owner(own)
        for at, count in runs:
            write_run(self.w, addresses[at], "st.shared", dtype, registers[at : at + count], owner)

    def addresses(
        self,
        base: str,
        spread: Spread,
        steps: Sequence[int],
        size: int,
        align: int,
        first: int = 0,
    ) -> tuple[Registers, list[Run]]:
        """Where each register lies, `first` elements on, and the runs that move at once."""
        address = self.threads.after(base, spread, [s * size for s in steps])
        at = [(first + offset) * size for offset in offsets_of(spread, steps)]
        runs = runs_of(spread, steps, align & -align, size)
        return [f"[{address}+{offset}]" for offset in at], runs


_KEYS = ("scratch", -1, 0), ("scratch", -1, 1)  # the two buffers of a program's threads


# ---- threads ------------------------------------------------------------------------------------


class Memo:
    """What was made under a key, by Block."""

    def __init__(self) -> None:
        self.scopes: list[dict[Any, Any]] = [{}]

    def known(self, key: Any) -> Any:
        """What was made under a key in this Block or around it, else None."""
        for scope in reversed(self.scopes):
            if key in scope:
                return scope[key]
        return None

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made under a key, made now and kept to the end of this Block where it is new."""
        found = self.known(key)
        if found is None:
            found = make()
            self.scopes[-1][key] = found
        return found

    def ever(self, key: Any, make: Callable[[], Any]) -> Any:
        """The same, kept to the end of the entry."""
        if key not in self.scopes[0]:
            self.scopes[0][key] = make()
        return self.scopes[0][key]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A Block within: what is made in it ends with it."""
        self.scopes.append({})
        yield
        self.scopes.pop()


@dataclass
class Threads:
    """This thread's number within its role, how many there are, and what follows from that."""

    w: Writer
    memo: Memo
    count: int
    number: str = ""  # the register
    role: int = -1  # the role's number; -1 outside of roles
    single: bool = False  # this role is one warp, one of whose threads acts

    def bits(self, shift: int, width: int) -> str:
        """Some bits of the thread's number."""
        value = self.w.shr(self.number, shift) if shift else self.number
        return self.w.mask(value, (1 << width) - 1) if 1 << shift + width < self.count else value

    def part(self, spread: Spread, axis: int) -> str:
        """The thread's part of a coordinate (32 bits); '' where it has none."""
        return self.offset(spread, [int(a == axis) for a in range(len(spread.shape))])

    def offset(self, spread: Spread, steps: Sequence[int]) -> str:
        """The thread's part of an offset: coordinates times steps (bytes); '' where it has none."""
        mine = tuple((s, w, stride * steps[a]) for s, w, a, stride in spread.fields if steps[a])

        def make() -> str:
            total = ""
            for shift, width, step in mine:
                part = self.bits(shift, width)
                part = self.w.mul(part, step) if step != 1 else part
                total = self.w.add(total, part) if total else part
            return total

        return self.memo.once(("offset", self.number, mine), make)

    def after(self, base: str, spread: Spread, steps: Sequence[int]) -> str:
        """A shared address with the thread's part of an offset."""
        own = self.offset(spread, steps)
        return self.w.add(base, own) if own else base

    def owner(self, spread: Spread) -> str:
        """A predicate that holds for one of the threads with copies; '' where all are alone."""
        copies = spread.copies(self.count)
        if not copies:
            return ""
        return self.memo.once(
            ("owner", self.number, copies),
            lambda: self.w.test("eq.s32", self.w.mask(self.number, copies), 0),
        )

    def first(self) -> str:
        """Holds for one thread of the role."""
        return self.memo.once(("first", self.number), lambda: self.w.test("eq.s32", self.number, 0))

    def one_lane(self) -> str:
        """The warp's lanes meet; then holds for one of them."""
        self.w.put("bar.warp.sync", "-1")
        return self.memo.once(
            ("lane 0", self.number), lambda: self.w.test("eq.s32", self.bits(0, 5), 0)
        )

    def alike(self, number: str) -> str:
        """A number that is the same in all lanes of a warp, known as such."""
        return self.w.value("shfl.sync.idx.b32", number, "0", "31", "-1")

    def group(self) -> str:
        """The number of this warpgroup within its role, the same in all of its threads."""
        return self.memo.once(
            ("group", self.number), lambda: self.alike(self.w.shr(self.number, 7))
        )

    def constant(self, value: int) -> str:
        """A 32-bit constant in a register."""
        return self.memo.once(("constant", value), lambda: self.w.copy("b32", value))

    def always(self) -> str:
        """A predicate that holds."""
        return self.memo.once(("always", True), lambda: self.w.test("eq.s32", self.constant(0), 0))

    def and_guards(self, a: str, b: str) -> str:
        """Two guards as one; '' holds."""
        if not a or not b:
            return a or b
        return self.memo.once(("and_guards", a, b), lambda: self.w.and_predicates(a, b))

    def meet(self) -> None:
        """The threads of the role meet; outside of roles all threads of the program."""
        if self.role < 0:
            self.w.put("bar.sync", 0)
        else:  # at a barrier of its own: others may wait at the program's
            self.w.put("bar.sync", 15 - self.role, self.count)
