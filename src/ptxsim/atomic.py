"""Atomic instructions of the simulator: atom and red, lanes one after another.

Invariant: a lane's read, change and write are one step, and they race with plain accesses but
not with each other. The docstring names decode_atom, which is long because one closure needs
all that it decodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import UninitialisedError
from .memory import aligned, covering, note_store, resolve, space_of, synchronise, width_of
from .text import Instruction
from .values import LANES, TYPES, Array, Decoder, Mask, Run

if TYPE_CHECKING:
    from .machine import Warp


def _rmw(operation: str, dtype: np.dtype[Any]) -> Any:
    def bounded(old: Any, x: Any) -> Any:
        return dtype.type(0) if old >= x else old + dtype.type(1)

    def down(old: Any, x: Any) -> Any:
        return x if old == 0 or old > x else old - dtype.type(1)

    return {
        "add": lambda old, x: (
            (old.astype(np.float32) + x.astype(np.float32)).astype(dtype)
            if dtype.itemsize == 2
            else old + x
        ),
        "and": lambda old, x: old & x,
        "or": lambda old, x: old | x,
        "xor": lambda old, x: old ^ x,
        "min": lambda old, x: min(old, x),
        "max": lambda old, x: max(old, x),
        "exch": lambda old, x: x,
        "inc": bounded,
        "dec": down,
    }[operation]


OPERATIONS = ("add", "and", "or", "xor", "min", "max", "exch", "inc", "dec", "cas")


def decode_atom(d: Decoder, i: Instruction) -> Run:
    """atom and red: lanes one after another."""
    words, kind, count = i.words, space_of(i.words), width_of(i.words)
    operation = next(w for w in words if w in OPERATIONS)
    type_ = words[-1]
    gives = words[0] == "atom"
    operands = i.operands[1:] if gives else i.operands
    where = d.address(operands[0])
    sources = operands[1].parts if count > 1 else operands[1:2]
    reads = [d.read(o, type_) for o in sources]
    other = d.read(operands[2], type_) if operation == "cas" else None
    outs = (i.operands[0].parts if count > 1 else i.operands[:1]) if gives else ()
    puts = [d.put(o, type_) for o in outs]
    element = TYPES[type_[:-2]] if type_ in ("f16x2", "bf16x2") else TYPES[type_]
    change = None if operation == "cas" else _rmw(operation, element)
    acquire, release = (
        bool({"acquire", "acq_rel"} & set(words)),
        bool({"release", "acq_rel"} & set(words)),
    )

    def one(warp: Warp, lane: int, old: Array, new: Array) -> Array:
        if other is None:
            assert change is not None
            return np.array([change(x, y) for x, y in zip(old, new)], element)
        return np.array([other(warp)[lane]]) if (old == new).all() else old

    def run(warp: Warp, mask: Mask) -> None:
        lanes = np.arange(LANES) if mask is None else np.flatnonzero(mask)
        address = where(warp)[lanes]
        values = np.ascontiguousarray(np.stack([r(warp) for r in reads], 1))
        bytes_ = values.dtype.itemsize * count
        aligned(address, bytes_)
        before = np.zeros((LANES, count), TYPES[type_])
        synchronise(warp, kind, address, acquire, release)
        for space, offset, chosen in resolve(warp, kind, address):
            index = covering(space, offset, bytes_)
            note_store(warp, space, index, True, lanes[chosen])
            if space.defined is not None and not space.defined[index].all():
                raise UninitialisedError(f"{space.name} is read where nothing was written")
            for lane, place in zip(lanes[chosen], index):
                old = space.data[place].view(element)
                before[lane] = old.view(TYPES[type_])
                new = one(warp, lane, old, values[lane].view(element))
                space.data[place] = new.view(np.uint8)
        for number, put in enumerate(puts):
            put(warp, mask, np.ascontiguousarray(before[:, number]))

    return run


def decode(d: Decoder, i: Instruction) -> Run | None:
    """Decode an atomic instruction; None if it is not one."""
    if i.words[0] in ("atom", "red") and "async" not in i.words:
        return decode_atom(d, i)
    return None
