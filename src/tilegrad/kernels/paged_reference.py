"""What the kernels of a paged cache mean, in NumPy: the work list, and attention in float64.

Invariant: nothing here is shared with the kernels but the names of columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ir.symbol import high
from .paged_shape import (
    BLOCKS,
    FIRST,
    HEAD,
    PAIR,
    PAIR_HEAD,
    PAIR_PARTS,
    PAIR_SLOT,
    PAIR_TOKEN,
    PAIR_TOKENS,
    RECORD,
    REQUEST,
    SEES,
    SLOT,
    START,
    STOP,
    TOKEN,
    TOKENS,
    PagedPlan,
    PagedShape,
    pairs,
    per,
)

Array = np.ndarray[Any, Any]


def work_list(
    x: PagedShape, plan: PagedPlan, lengths: Array, query_starts: Array
) -> tuple[Array, Array]:
    """(items, pairs) of a step; rows that nothing says anything of are 0."""
    most = high(pairs(x, plan))
    items = np.zeros((most + plan.programs, RECORD), np.int32)
    records = np.zeros((most, PAIR), np.int32)
    found = _pairs(x, plan, lengths, query_starts)
    total = sum(one[BLOCKS] for one in found)
    programs = min(plan.programs, total)
    cuts = [p * total // max(1, programs) for p in range(programs + 1)]
    items[programs : plan.programs, STOP] = -1
    unit = number = 0
    begun: set[int] = set()
    for row, one in enumerate(found):
        stop, first, parts = unit + one[BLOCKS], number, 0
        at = unit
        while at < stop:
            program = next(p for p in range(programs) if cuts[p] <= at < cuts[p + 1])
            end = min(stop, cuts[program + 1])
            place = program if program not in begun else plan.programs + number - program - 1
            if program not in begun:
                items[place, START] = number
            begun.add(program)
            items[program, STOP] = number
            whole = at == unit and end == stop
            fields = {**one, FIRST: one[FIRST] + at - unit, BLOCKS: end - at,
                      SLOT: -1 if whole else number}  # fmt: skip
            for column, value in fields.items():
                items[place, column] = value
            at, number, parts = end, number + 1, parts + 1
        unit = stop
        values = {PAIR_SLOT: first, PAIR_PARTS: parts, PAIR_TOKEN: one[TOKEN],
                  PAIR_TOKENS: one[TOKENS], PAIR_HEAD: one[HEAD]}  # fmt: skip
        for column, value in values.items():
            records[row, column] = value
    return items, records


def _pairs(
    x: PagedShape, plan: PagedPlan, lengths: Array, query_starts: Array
) -> list[dict[int, int]]:
    """Row blocks and key heads, in order."""
    found, each = [], per(x, plan)
    for request, length in enumerate(lengths.tolist()):
        first, last = int(query_starts[request]), int(query_starts[request + 1])
        for start in range(first, last, each):
            tokens = min(each, last - start)
            sees = length - (last - start) + 1
            begin = max(0, sees - x.window) // plan.block if x.window else 0
            blocks = max(1, -(-max(0, sees + tokens - 1) // plan.block) - begin)
            for head in range(x.key_heads):
                found.append({REQUEST: request, HEAD: head, TOKEN: start, TOKENS: tokens,
                              SEES: sees, FIRST: begin, BLOCKS: blocks})  # fmt: skip
    return found


def attention(
    x: PagedShape, q: Array, keys: Array, values: Array, table: Array, lengths: Array,
    query_starts: Array, scales: tuple[float, float] = (1.0, 1.0),
) -> Array:  # fmt: skip
    """(tokens, heads, value_width) in float64; rows of no request are 0."""
    out = np.zeros((*q.shape[:2], x.value_width))
    for request, length in enumerate(lengths.tolist()):
        first, last = int(query_starts[request]), int(query_starts[request + 1])
        chosen = table[request, : -(-length // x.page)]
        k, v = (m[chosen].reshape(-1, *m.shape[2:])[:length].astype(np.float64) * scale
                for m, scale in ((keys, scales[0]), (values, scales[1])))  # fmt: skip
        for token in range(first, last):
            end = length - (last - token) + 1
            begin = max(0, end - x.window) if x.window else 0
            for head in range(x.heads if end > 0 else 0):
                rows = slice(begin, end), head // x.group
                s = x.scale * (k[rows] @ q[token, head].astype(np.float64))
                if x.softcap:
                    s = x.softcap * np.tanh(s / x.softcap)
                p = np.exp(s - s.max())
                out[token, head] = p @ v[rows] / p.sum()
    return out
