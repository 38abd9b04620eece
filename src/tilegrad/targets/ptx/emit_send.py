"""What programs of a cluster send one another: stores whose bytes land on the receiver's barrier.

`st.async` needs no fence and no arrival: the receiver expects bytes and waits. Of a value that is
cut, each thread finds by its rows which program its registers go to; a whole value goes to all, and
where every warp holds all of it, the warps share the programs. Invariant: each program gets
every byte once.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.types import Memory
from .emit_placed import PlacedEmitter
from .spread import Spread

WARP = 32
WORD = 4  # bytes of an element
STORE = "st.async.shared::cluster.mbarrier::complete_tx::bytes"


class SendEmitter(PlacedEmitter):
    """Emits send."""

    def emit_send(self, node: Node) -> None:
        place, value, barrier, stage = node.inputs[:4]
        type_, spread = place.type, self.spread_of(value)
        assert isinstance(type_, Memory)
        one = node.attrs["to"] == "one"
        if type_.layout not in (("", "held") if one else ("",)) or type_.dtype.size != WORD:
            raise InternalError("ptx.emit", f"no stores of {type_} to other programs")
        registers = self.get(value, spread)
        if one:
            self.send_one(node, registers, spread)
            return
        base = self.lead_address(place, node.inputs[4:])
        landing = self.barrier_address(barrier, stage)
        steps = [int(s) for s in type_.element_strides()[len(node.inputs) - 4 :]]
        if node.attrs["to"] == "shares":
            each = int(type_.shape[len(node.inputs) - 4])
            self.send_shares(registers, spread, base, landing, steps, each)
        else:
            self.send_whole(registers, spread, base, landing, steps)

    def send_shares(
        self,
        registers: list[str],
        spread: Spread,
        base: str,
        landing: str,
        steps: list[int],
        each: int,
    ) -> None:
        """Rows to the programs that they belong to, `each` to a program."""
        w, owner = self.w, self.owner(spread)
        if each & (each - 1) or steps[0] % 4:
            raise InternalError("ptx.emit", f"shares of {each} rows of {steps[0]} elements")
        row = self.thread_part(spread.fields, 0) or self.constant32(0)
        along = self.thread_offset(spread, [0, *(s * WORD for s in steps[1:])])
        base = base if along is None else w.value("b32", "add.s32", base, along)
        for start, count in self.runs(spread, steps, 16, WORD):
            at = spread.registers[start]
            mine = w.value("b32", "add.s32", row, str(at[0])) if at[0] else row
            rank = w.value("b32", "shr.u32", mine, str(each.bit_length() - 1))
            inner = w.value("b32", "and.b32", mine, str(each - 1))
            address = w.value("b32", "mad.lo.s32", inner, str(steps[0] * WORD), base)
            fixed = sum(c * s for c, s in zip(at[1:], steps[1:])) * WORD
            if fixed:
                address = w.value("b32", "add.s32", address, str(fixed))
            self.send_run(address, landing, rank, registers[start : start + count], owner)

    def send_whole(
        self, registers: list[str], spread: Spread, base: str, landing: str, steps: list[int]
    ) -> None:
        """All of a value to all programs."""
        w, bytes_ = self.w, [s * WORD for s in steps]
        programs, warps = int(self.body.notes["cluster"][0]), self.threads // WARP
        own = self.thread_offset(spread, bytes_)
        base = base if own is None else w.value("b32", "add.s32", base, own)
        ranks, owner = [self.constant32(r) for r in range(programs)], self.owner(spread)
        if programs % warps == 0 and all(s + width <= 5 for s, width, _, _ in spread.fields):
            warp = w.value("b32", "shr.u32", self.thread, "5")
            ranks = [w.value("b32", "add.s32", warp, str(r)) for r in range(0, programs, warps)]
            lane = w.value("b32", "and.b32", self.thread, str(spread.copies(WARP)))
            owner = w.value("pred", "setp.eq.s32", lane, "0")
        for start, count in self.runs(spread, steps, 16, WORD):
            fixed = sum(c * s for c, s in zip(spread.registers[start], bytes_))
            address = w.value("b32", "add.s32", base, str(fixed)) if fixed else base
            for rank in ranks:
                self.send_run(address, landing, rank, registers[start : start + count], owner)

    def send_one(self, node: Node, registers: list[str], spread: Spread) -> None:
        """All of a value to one program."""
        place, _, barrier, stage, rank, *index = node.inputs
        w, owner, to = self.w, self.owner(spread), self.index32(rank)
        start, landing = (
            w.value("b32", "mapa.shared::cluster.u32", a, to)
            for a in (self.pointers[place], self.barrier_address(barrier, stage))
        )
        for where, first, count in self.place_runs(place, tuple(index), spread, start):
            self.store_async(where, landing, registers[first : first + count], owner)

    def send_run(
        self, address: str, landing: str, rank: str, registers: Sequence[str], owner: str
    ) -> None:
        """Neighbouring elements, to a place like this program's own in the program of a rank."""
        there, barrier = (
            self.w.value("b32", "mapa.shared::cluster.u32", a, rank) for a in (address, landing)
        )
        self.store_async(f"[{there}]", barrier, registers, owner)

    def store_async(self, there: str, barrier: str, registers: Sequence[str], owner: str) -> None:
        """Neighbouring elements to an address of the cluster."""
        count = len(registers)
        form = f"{STORE}.b32" if count == 1 else f"{STORE}.v{count}.b32"
        given = registers[0] if count == 1 else "{" + ", ".join(registers) + "}"
        self.w.put(form, there, given, f"[{barrier}]", guard=owner)
