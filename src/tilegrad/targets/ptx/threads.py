"""The threads that run a part of a Body, and their parts of coordinates.

A Memo keeps what may be used again until the Block that made it ends. Invariant: a register is
read only where the line that writes it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .spread import Field, Spread
from .write import Writer


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


class Threads:
    """This thread's number within its role, how many there are, and what follows from that."""

    def __init__(self, w: Writer, memo: Memo, count: int) -> None:
        self.w, self.memo, self.count = w, memo, count
        self.number = ""  # the register
        self.role = -1  # the role's number; -1 outside of roles
        self.single = False  # this role is one warp, one of whose threads acts

    def bits(self, shift: int, width: int) -> str:
        """Some bits of the thread's number."""
        value = self.w.shr(self.number, shift) if shift else self.number
        return self.w.mask(value, (1 << width) - 1) if 1 << shift + width < self.count else value

    def part(self, fields: Sequence[Field], axis: int) -> str | None:
        """The thread's part of a coordinate (32 bits), or None where it has none."""
        mine = tuple((shift, width, stride) for shift, width, a, stride in fields if a == axis)

        def make() -> str:
            total = ""
            for shift, width, stride in mine:
                part = self.bits(shift, width)
                part = self.w.mul(part, stride) if stride != 1 else part
                total = self.w.add(total, part) if total else part
            return total

        return self.memo.once(("thread", self.number, mine), make) if mine else None

    def offset(self, spread: Spread, steps: Sequence[int]) -> str:
        """The thread's part of an offset: coordinates times steps (bytes); '' where it has none."""

        def make() -> str:
            total = ""
            for shift, width, axis, stride in spread.fields:
                if steps[axis]:
                    part = self.w.mul(self.bits(shift, width), stride * steps[axis])
                    total = self.w.add(total, part) if total else part
            return total

        return self.memo.once(("offset", self.number, spread.fields, tuple(steps)), make)

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
            self.w.put("bar.sync", "0")
        else:
            self.meet_role()

    def meet_role(self) -> None:
        """The same at the role's own barrier, where others may wait at the program's."""
        self.w.put("bar.sync", str(15 - max(self.role, 0)), str(self.count))
