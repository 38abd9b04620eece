"""Instructions by which the lanes of a warp speak to each other.

Invariant: each names the lanes that take part, and all of them must be there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .errors import DivergenceError
from .text import Instruction
from .values import LANES, Array, Decoder, Mask, Run

if TYPE_CHECKING:
    from .machine import Warp

LANE = np.arange(LANES)


def bits_of(mask: Mask) -> int:
    """A mask of lanes as a number."""
    if mask is None:
        return 0xFFFFFFFF
    return int(np.packbits(mask, bitorder="little").view(np.uint32)[0])


def members(warp: Warp, mask: Mask, given: Array) -> None:
    """All lanes named must run this instruction, and those that run it must be named."""
    active = np.ones(LANES, np.bool_) if mask is None else mask
    named = int(given[active][0])
    here = bits_of(mask)
    expected = named & bits_of(warp.present())
    if warp.cluster.check and (expected & ~here or here & ~named):
        raise DivergenceError(f"the lanes {named:#010x} are named, but {here:#010x} are here")


def whole(warp: Warp, mask: Mask, what: str) -> None:
    """An `.aligned` instruction: all lanes that have not exited must run it together."""
    if mask is not None and warp.cluster.check and (warp.present() & ~mask).any():
        raise DivergenceError(f"{what} is run by lanes {bits_of(mask):#010x} only")


def decode_shfl(d: Decoder, i: Instruction) -> Run:
    """shfl.sync."""
    mode = i.words[2]
    pair = i.operands[0].kind == "pair"
    outs = i.operands[0].parts if pair else i.operands[:1]
    put = d.put(outs[0], "b32")
    flag = d.put(outs[1], "pred") if pair else None
    value, b, c, named = (d.read(o, "b32") for o in i.operands[1:5])

    def run(warp: Warp, mask: Mask) -> None:
        members(warp, mask, named(warp))
        source, by, clamp = value(warp), b(warp).astype(np.int64) & 31, c(warp).astype(np.int64)
        segment, limit = (clamp >> 8) & 31, clamp & 31
        most = (LANE & segment) | (limit & ~segment)
        least = LANE & segment
        if mode == "up":
            at = LANE - by
            inside = at >= most
        elif mode == "down":
            at = LANE + by
            inside = at <= most
        elif mode == "bfly":
            at = LANE ^ by
            inside = at <= most
        else:
            at = least | (by & ~segment)
            inside = at <= most
        at = np.where(inside, at, LANE)
        active = warp.present() if mask is None else mask
        if warp.cluster.check:
            needed = at if mask is None else at[mask]
            if not active[needed].all():
                raise DivergenceError("shfl reads a lane that does not run it")
        put(warp, mask, source[at])
        if flag is not None:
            flag(warp, mask, inside)

    return run


def decode_vote(d: Decoder, i: Instruction) -> Run:
    """vote.sync."""
    mode = i.words[2]
    put = d.put(i.operands[0], i.words[-1])
    value, named = d.read(i.operands[1], "pred"), d.read(i.operands[2], "b32")

    def run(warp: Warp, mask: Mask) -> None:
        members(warp, mask, named(warp))
        active = np.ones(LANES, np.bool_) if mask is None else mask
        chosen = value(warp) & active
        if mode == "ballot":
            put(warp, mask, np.full(LANES, bits_of(chosen), np.uint32))
            return
        every, some = bool(chosen[active].all()), bool(chosen.any())
        result = {"all": every, "any": some, "uni": every or not some}[mode]
        put(warp, mask, np.full(LANES, result, np.bool_))

    return run


def decode_match(d: Decoder, i: Instruction) -> Run:
    """match.any.sync and match.all.sync."""
    pair = i.operands[0].kind == "pair"
    outs = i.operands[0].parts if pair else i.operands[:1]
    put = d.put(outs[0], "b32")
    flag = d.put(outs[1], "pred") if pair else None
    value, named = d.read(i.operands[1], i.words[-1]), d.read(i.operands[2], "b32")
    everything = i.words[1] == "all"

    def run(warp: Warp, mask: Mask) -> None:
        members(warp, mask, named(warp))
        active = np.ones(LANES, np.bool_) if mask is None else mask
        values = value(warp)
        equal = (values[:, None] == values[None, :]) & active[None, :]
        result = np.array([bits_of(row) for row in equal], np.uint32)
        if everything:
            same = bool(equal[active][:, active].all())
            result = np.full(LANES, bits_of(mask) if same else 0, np.uint32)
            if flag is not None:
                flag(warp, mask, np.full(LANES, same))
        put(warp, mask, result)

    return run


def decode_redux(d: Decoder, i: Instruction) -> Run:
    """redux.sync."""
    type_ = i.words[-1]
    reduce: Callable[..., Array] = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[i.words[2]].reduce
    put = d.put(i.operands[0], type_)
    value, named = d.read(i.operands[1], type_), d.read(i.operands[2], "b32")

    def run(warp: Warp, mask: Mask) -> None:
        members(warp, mask, named(warp))
        values = value(warp)
        chosen = values if mask is None else values[mask]
        put(warp, mask, np.full(LANES, reduce(chosen, dtype=values.dtype), values.dtype))

    return run


def decode_elect(d: Decoder, i: Instruction) -> Run:
    """elect.sync: one of the lanes named, the same each time; which one, the machine chooses."""
    number, flag = i.operands[0].parts
    put, predicate = d.put(number, "b32"), d.put(flag, "pred")
    named = d.read(i.operands[1], "b32")

    def run(warp: Warp, mask: Mask) -> None:
        given = named(warp)
        members(warp, mask, given)
        active = warp.present() if mask is None else mask
        lanes = np.flatnonzero(active & ((int(given[active][0]) >> LANE) & 1).astype(np.bool_))
        leader = lanes[warp.cluster.grid.leader % lanes.size]
        put(warp, mask, np.full(LANES, leader, np.uint32))
        predicate(warp, mask, leader == LANE)

    return run


def decode(d: Decoder, i: Instruction) -> Run | None:
    """Decode an instruction between lanes; None if it is not one."""
    table = {
        "shfl": decode_shfl,
        "vote": decode_vote,
        "match": decode_match,
        "redux": decode_redux,
        "elect": decode_elect,
    }
    if i.words[0] in table:
        return table[i.words[0]](d, i)
    if i.words[0] == "activemask":
        put = d.put(i.operands[0], "b32")
        return lambda warp, mask: put(warp, mask, np.full(LANES, bits_of(mask), np.uint32))
    if i.name == "bar.warp.sync":
        named = d.read(i.operands[0], "b32")

        def meet(warp: Warp, mask: Mask) -> None:
            members(warp, mask, named(warp))
            if mask is None or not (warp.present() & ~mask).any():
                warp.meet()

        return meet
    return None
