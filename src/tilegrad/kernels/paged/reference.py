"""What the kernels of a paged cache mean, in NumPy: the work list, and attention in float64.

Invariant: nothing here is shared with the kernels but the names of columns.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from ...ir.symbol import high
from .append import Rotary
from .shape import (
    BLOCKS,
    CUT,
    CUT_HEAD,
    CUT_PARTS,
    CUT_SLOT,
    CUT_TOKEN,
    CUT_TOKENS,
    FIRST,
    FROM,
    HEAD,
    PARTS,
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
    item_rows,
    listed,
    per,
    walkers,
)

Array = np.ndarray[Any, Any]


def work_list(
    x: PagedShape, plan: PagedPlan, lengths: Array, query_starts: Array
) -> tuple[Array, Array]:
    """(items, cuts) of a step; rows that nothing says anything of are 0."""
    many = walkers(x, plan)
    items = np.zeros((high(item_rows(x, plan)), RECORD), np.int32)
    cuts = np.zeros((many, CUT), np.int32)
    found = _pairs(x, plan, lengths, query_starts)
    total = sum(one[BLOCKS] for one in found)
    busy = min(many, total)
    bounds = [p * total // max(1, busy) for p in range(busy + 1)]
    items[busy:many, STOP] = -1
    unit = number = 0
    begun: set[int] = set()
    for one in found:
        stop, at, pieces = unit + one[BLOCKS], unit, []
        while at < stop:
            program = bisect_right(bounds, at) - 1
            pieces.append((program, at, min(stop, bounds[program + 1])))
            at = pieces[-1][2]
        for part, (program, at, end) in enumerate(pieces):
            place = program if program not in begun else many + number + part - program - 1
            if program not in begun:
                items[place, START] = number + part
            begun.add(program)
            items[program, STOP] = number + part
            fields = {
                **one,
                FIRST: one[FIRST] + at - unit,
                BLOCKS: end - at,
                SLOT: -1 if len(pieces) == 1 else number + part,
                FROM: number,
                PARTS: len(pieces),
            }
            for column, value in fields.items():
                items[place, column] = value
        if len(pieces) > 1:
            values = {
                CUT_SLOT: number,
                CUT_PARTS: len(pieces),
                CUT_TOKEN: one[TOKEN],
                CUT_TOKENS: one[TOKENS],
                CUT_HEAD: one[HEAD],
            }
            for column, value in values.items():
                cuts[pieces[1][0], column] = value
        unit, number = stop, number + len(pieces)
    return items, cuts


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
            for head in range(listed(x, plan)):
                found.append(
                    {
                        REQUEST: request,
                        HEAD: head,
                        TOKEN: start,
                        TOKENS: tokens,
                        SEES: sees,
                        FIRST: begin,
                        BLOCKS: blocks,
                    }
                )
    return found


def attention(
    x: PagedShape,
    q: Array,
    keys: Array,
    values: Array,
    table: Array,
    lengths: Array,
    query_starts: Array,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Array:
    """(tokens, heads, value_width) in float64; rows of no request are 0."""
    out = np.zeros((*q.shape[:2], x.value_width))
    for request, length in enumerate(lengths.tolist()):
        first, last = int(query_starts[request]), int(query_starts[request + 1])
        chosen = table[request, : -(-length // x.page)]
        by_head = (
            m[chosen].swapaxes(0, 1).reshape(x.key_heads, -1, m.shape[3])[:, :length]
            for m in (keys, values)
        )
        k, v = (m.astype(np.float64) * scale for m, scale in zip(by_head, scales))
        for token in range(first, last):
            end = length - (last - token) + 1
            begin = max(0, end - x.window) if x.window else 0
            for head in range(x.heads if end > 0 else 0):
                rows = head // x.group, slice(begin, end)
                s = x.scale * (k[rows] @ q[token, head].astype(np.float64))
                if x.softcap:
                    s = x.softcap * np.tanh(s / x.softcap)
                p = np.exp(s - s.max())
                out[token, head] = p @ v[rows] / p.sum()
    return out


def append(
    x: PagedShape,
    rotary: Rotary,
    q: Array,
    k: Array,
    v: Array,
    frequencies: Array,
    table: Array,
    lengths: Array,
    query_starts: Array,
    keys: Array,
    values: Array,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Array:
    """Turned queries in float64; keys and values (float64 arrays) get the new tokens' rows, and
    the rest of a page that is new zeros for values."""
    turned = np.zeros(q.shape)
    for request, length in enumerate(lengths.tolist()):
        first, last = int(query_starts[request]), int(query_starts[request + 1])
        for token in range(first, last):
            place = length - (last - token)
            page, within = table[request, place // x.page], place % x.page
            turned[token] = _turned(q[token], rotary, place, frequencies)
            keys[page, :, within] = _turned(k[token], rotary, place, frequencies) / scales[0]
            values[page, :, within] = v[token].astype(np.float64) / scales[1]
        if last > first and (length - 1) // x.page * x.page >= length - (last - first):
            values[table[request, (length - 1) // x.page], :, (length - 1) % x.page + 1 :] = 0
    return turned


def _turned(heads: Array, rotary: Rotary, place: int, frequencies: Array) -> Array:
    """Some heads of one token."""
    found, half = heads.astype(np.float64), rotary.width // 2
    angle = place * frequencies[:half].astype(np.float64)
    cosine, sine = np.cos(angle) * rotary.factor, np.sin(angle) * rotary.factor
    first, second = slice(0, half), slice(half, rotary.width)
    if rotary.interleaved:
        first, second = slice(0, rotary.width, 2), slice(1, rotary.width, 2)
    a, b = found[:, first].copy(), found[:, second].copy()
    found[:, first], found[:, second] = a * cosine - b * sine, b * cosine + a * sine
    return found
