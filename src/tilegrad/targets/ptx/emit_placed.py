"""Places in shared memory and in registers: made, read, written whole, sent to other programs.

A place in registers keeps its registers as long as it lives, so that products in flight may write
them; what is read of it is a copy. What programs of a cluster send one another lands on the
receiver's barrier: `st.async` needs no fence and no arrival: the receiver expects bytes and waits.
Of a value that is cut, each thread finds by its rows which program its registers go to; a whole
value goes to all, and where every warp holds all of it, the warps share the programs. Invariant:
each program gets every byte once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.types import product
from ...tile.row import Touch, memory_of, touch_of
from .addresses import by_matrix, lead_address, matrix_rows, place_runs, steps_along
from .emission import Emission
from .emit_barriers import barrier_address, there
from .emit_matrix import operand_words, operands_of
from .moves import load_matrices, offsets_of, packed, read_run, runs_of, unpacked, write_run
from .shared import SWIZZLES
from .spread import Spread
from .values import Carried
from .write import Registers, braced, vector

HELD = {"read_place", "write_place", "send"}  # what a place held by threads allows


def allocate(e: Emission, node: Node) -> None:
    """A place."""
    type_ = memory_of(node)
    if type_.scope == "register":
        register_tile(e, node)
        return
    users = {n.op.name for n in e.nodes if node in n.inputs}
    if type_.layout == "held" and not users <= HELD:
        raise InternalError("ptx.emit", f"{node!r} lies as threads hold it: read or write it")
    swizzle, bytes_ = SWIZZLES[type_.layout], int(product(type_.shape)) * type_.dtype.size
    at = e.shared.reserve(bytes_, 8 * swizzle if swizzle else 128)
    e.pointers[node] = e.add(e.shared.base, at)


def register_tile(e: Emission, node: Node) -> None:
    """A place in registers."""
    if node in operands_of(e):
        e.carried[node] = Carried(node, operand_words(e, node), "b32", True)
    else:
        e.carried[node] = e.values.carried(node)


def read_place(e: Emission, node: Node) -> Registers:
    """What a place holds."""
    touch = touch_of(node)
    place = touch.memory
    if place in e.carried:
        one = e.carried[place]
        return replace(one, registers=[e.copy(one.kind, r) for r in one.registers]).held(e)
    spread = e.plan.spread(node)
    if by_matrix(e, place, spread):
        rows = matrix_rows(e, touch, spread)
        return [r for at, _ in rows for r in unpacked(e, load_matrices(e, at), place.dtype)]
    return [
        register
        for where, _, count in place_runs(e, touch, spread)
        for register in read_run(e, where, "ld.shared", place.dtype, count)
    ]


def write_place(e: Emission, node: Node) -> None:
    """Set what a place holds."""
    (place, value), touch = node.inputs[:2], touch_of(node)
    if place in e.carried:
        e.values.put(e.carried[place], value)
        return
    spread, registers = e.values.own(value)
    if by_matrix(e, place, spread) and e.overlaps:  # sm_80 has no stmatrix
        for where, first in matrix_rows(e, touch, spread):
            words = packed(e, registers[first : first + 8], place.dtype)
            e.put("stmatrix.sync.aligned.m8n8.x4.shared.b16", where, braced(words))
        return
    owner = e.threads.owner(spread)
    for where, at, count in place_runs(e, touch, spread):
        write_run(e, where, "st.shared", place.dtype, registers[at : at + count], owner)


# ---- stores to other programs -------------------------------------------------------------------


WARP = 32
WORD = 4  # bytes of an element
STORE = "st.async.shared::cluster.mbarrier::complete_tx::bytes"


def send(e: Emission, node: Node) -> None:
    """A value to another program, its rows to all of them, or all of it to all."""
    place, value, barrier, stage, *rank = node.inputs[:5]
    touch = touch_of(node)
    type_, spread, to = memory_of(place), e.values.spread_of(value), node.attrs["to"]
    allowed = ("", "held") if to == "one" else ("",)
    if type_.layout not in allowed or type_.dtype.size != WORD:
        raise InternalError("ptx.emit", f"no stores of {type_} to other programs")
    registers = e.values.get(value, spread)
    landing = barrier_address(e, barrier, stage)
    if to == "shares":
        send_shares(e, registers, spread, touch, landing)
        return
    if to == "one":
        ranks, owner = [e.values.index32(r) for r in rank], e.threads.owner(spread)
    else:
        ranks, owner = ranks_of(e, spread)
    for one in ranks:
        start, its_landing = there(e, e.pointers[place], one), there(e, landing, one)
        for where, at, count in place_runs(e, touch, spread, start):
            store_async(e, where, its_landing, registers[at : at + count], owner)


def ranks_of(e: Emission, spread: Spread) -> tuple[Registers, str]:
    """The programs that this warp sends all of a value to, and who does."""
    threads, programs = e.threads, int(e.body.notes["cluster"][0])
    warps = threads.count // WARP
    if programs % warps or any(s + width > 5 for s, width, _, _ in spread.fields):
        return [threads.constant(r) for r in range(programs)], threads.owner(spread)
    warp = e.shr(threads.number, 5)
    owner = e.test("eq.s32", e.mask(threads.number, spread.copies(WARP)), 0)
    return [e.add(warp, r) for r in range(0, programs, warps)], owner


def send_shares(
    e: Emission, registers: Registers, spread: Spread, touch: Touch, landing: str
) -> None:
    """Rows to the programs that they belong to, as many as a place has to a program."""
    each, steps = touch.shape[0], steps_along(touch)
    base, owner = lead_address(e, touch), e.threads.owner(spread)
    if each & (each - 1) or steps[0] % 4:
        raise InternalError("ptx.emit", f"shares of {each} rows of {steps[0]} elements")
    row = e.threads.part(spread, 0) or e.threads.constant(0)
    bytes_ = [0, *(s * WORD for s in steps[1:])]
    base, offsets = e.threads.after(base, spread, bytes_), offsets_of(spread, bytes_)
    for start, count in runs_of(spread, steps, 16, WORD):
        first = spread.registers[start][0]
        mine = e.add(row, first) if first else row
        rank = e.shr(mine, each.bit_length() - 1)
        address = e.mad(e.mask(mine, each - 1), steps[0] * WORD, base)
        where = f"[{there(e, address, rank)}+{offsets[start]}]"
        part = registers[start : start + count]
        store_async(e, where, there(e, landing, rank), part, owner)


def store_async(
    e: Emission, where: str, barrier: str, registers: Sequence[str], owner: str
) -> None:
    """Neighbouring elements to an address of the cluster."""
    form, given = vector(STORE, "b32", registers)
    e.put(form, where, given, f"[{barrier}]", guard=owner)
