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
from .addresses import lead_address
from .emission import Emission, memory_of
from .emit_barriers import barrier_address
from .moves import offsets_of, runs_of
from .placed_tiles import place_runs
from .spread import Spread
from .write import vector

WARP = 32
WORD = 4  # bytes of an element
STORE = "st.async.shared::cluster.mbarrier::complete_tx::bytes"


def send(e: Emission, node: Node) -> None:
    """A value to another program, its rows to all of them, or all of it to all."""
    place, value, barrier, stage, *index = node.inputs
    type_, spread, to = memory_of(place), e.values.spread_of(value), node.attrs["to"]
    allowed = ("", "held") if to == "one" else ("",)
    if type_.layout not in allowed or type_.dtype.size != WORD:
        raise InternalError("ptx.emit", f"no stores of {type_} to other programs")
    registers = e.values.get(value, spread)
    if to == "one":
        send_one(e, node, registers, spread)
        return
    base = lead_address(e, place, index)
    landing = barrier_address(e, barrier, stage)
    steps = [int(s) for s in type_.element_strides()[len(index) :]]
    if to == "shares":
        send_shares(e, registers, spread, base, landing, steps, int(type_.shape[len(index)]))
    else:
        send_whole(e, registers, spread, base, landing, steps)


def send_shares(
    e: Emission,
    registers: list[str],
    spread: Spread,
    base: str,
    landing: str,
    steps: list[int],
    each: int,
) -> None:
    """Rows to the programs that they belong to, `each` to a program."""
    w, owner = e.w, e.threads.owner(spread)
    if each & (each - 1) or steps[0] % 4:
        raise InternalError("ptx.emit", f"shares of {each} rows of {steps[0]} elements")
    row = e.threads.part(spread.fields, 0) or e.threads.constant(0)
    bytes_ = [0, *(s * WORD for s in steps[1:])]
    base, offsets = e.threads.after(base, spread, bytes_), offsets_of(spread, bytes_)
    for start, count in runs_of(spread, steps, 16, WORD):
        first = spread.registers[start][0]
        mine = w.add(row, first) if first else row
        rank = w.shr(mine, each.bit_length() - 1)
        address = w.mad(w.mask(mine, each - 1), steps[0] * WORD, base)
        address = w.add(address, offsets[start]) if offsets[start] else address
        send_run(e, address, landing, rank, registers[start : start + count], owner)


def send_whole(
    e: Emission, registers: list[str], spread: Spread, base: str, landing: str, steps: list[int]
) -> None:
    """All of a value to all programs."""
    w, threads, bytes_ = e.w, e.threads, [s * WORD for s in steps]
    programs, warps = int(e.body.notes["cluster"][0]), threads.count // WARP
    base, offsets = threads.after(base, spread, bytes_), offsets_of(spread, bytes_)
    ranks, owner = [threads.constant(r) for r in range(programs)], threads.owner(spread)
    if programs % warps == 0 and all(s + width <= 5 for s, width, _, _ in spread.fields):
        warp = w.shr(threads.number, 5)
        ranks = [w.add(warp, r) for r in range(0, programs, warps)]
        owner = w.test("eq.s32", w.mask(threads.number, spread.copies(WARP)), 0)
    for start, count in runs_of(spread, steps, 16, WORD):
        address = w.add(base, offsets[start]) if offsets[start] else base
        for rank in ranks:
            send_run(e, address, landing, rank, registers[start : start + count], owner)


def send_one(e: Emission, node: Node, registers: list[str], spread: Spread) -> None:
    """All of a value to one program."""
    place, _, barrier, stage, rank, *index = node.inputs
    owner, to = e.threads.owner(spread), e.values.index32(rank)
    landing = barrier_address(e, barrier, stage)
    start, landing = there(e, e.pointers[place], to), there(e, landing, to)
    for run in place_runs(e, place, index, spread, start):
        part = registers[run.first : run.first + run.count]
        store_async(e, run.where, landing, part, owner)


def there(e: Emission, address: str, rank: str) -> str:
    """An address like this program's own in the program of a rank."""
    return e.w.value("mapa.shared::cluster.u32", address, rank)


def send_run(
    e: Emission, address: str, landing: str, rank: str, registers: Sequence[str], owner: str
) -> None:
    """Neighbouring elements, to a place like this program's own in the program of a rank."""
    where = f"[{there(e, address, rank)}]"
    store_async(e, where, there(e, landing, rank), registers, owner)


def store_async(
    e: Emission, where: str, barrier: str, registers: Sequence[str], owner: str
) -> None:
    """Neighbouring elements to an address of the cluster."""
    form, given = vector(STORE, "b32", registers)
    e.w.put(form, where, given, f"[{barrier}]", guard=owner)
