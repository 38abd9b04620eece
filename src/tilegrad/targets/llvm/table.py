"""Step tables: what the native loop runs, as plain data.

A step is an array of 64-byte entries that every worker takes from entry 0 to the end. Workers
hold their own slots (buffer pointers) and counters, so control entries need no agreement.
`a`, `b`, `c` and the others mean, by kind:

| kind              | meaning                                                               |
|-------------------|-----------------------------------------------------------------------|
| KERNEL            | `function(args, scalars, start, stop, scratch)` over the grid         |
| JUMP              | go to entry a                                                         |
| JUMP_UNLESS       | go to entry a if the byte at slot b, offset c, is zero                |
| SET_COUNTER       | counter b = c                                                         |
| ADD_COUNTER       | counter b += c                                                        |
| JUMP_COUNTER_LESS | go to entry a if counter b < c                                        |
| SET_SLOT          | slot args = slot args_count + counter a * b + c (a < 0: no counter)   |
| SWAP_SLOTS        | slots b and c change places                                           |
| COPY              | grid bytes from slot args_count to slot args; they must not overlap   |

KERNEL arguments are the slots named by `index[args : args + args_count]`, its scalars start at
`scalars[scalars]`; workers draw `grain` programs at a time. KERNEL and COPY end in a barrier.

Invariant: `check_table` passes on every table that is run; the native loop itself checks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.errors import InternalError

ENTRY = np.dtype(
    [
        ("kind", "u4"),
        ("flags", "u4"),
        ("function", "u8"),
        ("args", "u4"),
        ("args_count", "u4"),
        ("scalars", "u4"),
        ("grain", "u4"),
        ("grid", "i8"),
        ("a", "i8"),
        ("b", "i8"),
        ("c", "i8"),
    ]
)

KERNEL = 1
JUMP = 2
JUMP_UNLESS = 3
SET_COUNTER = 4
ADD_COUNTER = 5
JUMP_COUNTER_LESS = 6
SET_SLOT = 7
SWAP_SLOTS = 8
COPY = 9

MOST_GRAIN = 2**32 - 1

SINGLE = 1  # KERNEL, COPY: worker 0 does all of it
GRID_SCALAR = 2  # KERNEL, COPY: `grid` is the number of the scalar that holds the grid
VALUE_SCALAR = 4  # counters: `c` is the number of the scalar that holds the value

COUNTER_LIMIT = 64
ARGUMENT_LIMIT = 1024


# Entries that steer, by the names of steps: their kind, and the fields that a step's Slots and then
# its numbers fill.
CONTROL = {
    "jump": (JUMP, ("a",)),
    "jump_unless": (JUMP_UNLESS, ("b", "a")),
    "set_counter": (SET_COUNTER, ("b", "c")),
    "add_counter": (ADD_COUNTER, ("b", "c")),
    "jump_counter_less": (JUMP_COUNTER_LESS, ("b", "c", "a")),
    "set_slot": (SET_SLOT, ("args", "args_count", "a", "b", "c")),
    "swap_slots": (SWAP_SLOTS, ("b", "c")),
}
COUNTED = ("set_counter", "add_counter", "jump_counter_less")  # whose second value may be a scalar


class TableBuilder:
    """Writes a step table entry by entry; each method returns the entry's number."""

    def __init__(self) -> None:
        self._rows: list[dict[str, int]] = []
        self._index: list[int] = []

    def kernel(
        self,
        function: int,
        slots: Sequence[int],
        grid: int,
        *,
        grain: int = 1,
        flags: int = 0,
        scalars: int = 0,
    ) -> int:
        """Run a kernel over `grid` programs."""
        at, count = len(self._index), len(slots)
        self._index.extend(slots)
        given = {"flags": flags, "function": function, "args": at, "args_count": count}
        return self._add(KERNEL, **given, scalars=scalars, grain=grain, grid=grid)

    def control(self, name: str, *values: int, flags: int = 0) -> int:
        """An entry of CONTROL, by its name and what its fields hold."""
        kind, fields = CONTROL[name]
        return self._add(kind, flags=flags, **dict(zip(fields, values)))

    def copy(self, to: int, source: int, bytes: int, *, flags: int = 0) -> int:
        """Copy bytes between slots that do not overlap."""
        return self._add(COPY, flags=flags, args=to, args_count=source, grid=bytes)

    def finish(self, n_slots: int, n_scalars: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """The checked table and its argument index."""
        entries = np.array([tuple(row.values()) for row in self._rows], dtype=ENTRY)
        index = np.array(self._index or [0], dtype=np.int32)
        check_table(entries, index, n_slots, n_scalars)
        return entries, index

    def _add(self, kind: int, **fields: int) -> int:
        self._rows.append({**dict.fromkeys(ENTRY.names or (), 0), "kind": kind, **fields})
        return len(self._rows) - 1


def check_table(entries: np.ndarray, index: np.ndarray, n_slots: int, n_scalars: int) -> None:
    """Raise InternalError where the native loop would leave its arrays."""
    if entries.dtype != ENTRY or index.dtype != np.int32 or ENTRY.itemsize != 64:
        raise InternalError("step table", "wrong dtypes of table or index")
    for number, entry in enumerate(entries):
        fault = _fault(entry, index, len(entries), n_slots, n_scalars)
        if fault:
            raise InternalError("step table", f"entry {number}: {fault}: {entry}")


def _fault(
    entry: np.void, index: np.ndarray, n_entries: int, n_slots: int, n_scalars: int
) -> str | None:
    kind, flags = int(entry["kind"]), int(entry["flags"])
    a, b, c, grid = (int(entry[name]) for name in ("a", "b", "c", "grid"))
    first, second = int(entry["args"]), int(entry["args_count"])
    used = {
        KERNEL: index[first : first + second].tolist(),
        JUMP_UNLESS: [b],
        SWAP_SLOTS: [b, c],
        SET_SLOT: [first, second],
        COPY: [first, second],
    }.get(kind, [])
    counts, scalars = kind in (SET_COUNTER, ADD_COUNTER, JUMP_COUNTER_LESS), range(n_scalars)
    jumps = kind in (JUMP, JUMP_UNLESS, JUMP_COUNTER_LESS)
    moved = kind in (KERNEL, COPY)
    faults = {
        "unknown kind": not KERNEL <= kind <= COPY,
        "jump out of the table": jumps and not 0 <= a <= n_entries,
        "no such counter": (counts and not 0 <= b < COUNTER_LIMIT)
        or (kind == SET_SLOT and a >= COUNTER_LIMIT),
        "no such scalar": counts and flags & VALUE_SCALAR and c not in scalars,
        "bad grid": moved and (grid < 0 or (flags & GRID_SCALAR and grid not in scalars)),
        "no function": kind == KERNEL and not int(entry["function"]),
        "too many arguments": kind == KERNEL and second > ARGUMENT_LIMIT,
        "arguments out of the index": kind == KERNEL and first + second > len(index),
        "no such slot": any(not 0 <= slot < n_slots for slot in used),
    }
    return next((fault for fault, found in faults.items() if found), None)
