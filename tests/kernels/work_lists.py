"""What the work lists of a paged cache mean, in NumPy; `graph.paged_reference` has the rest.

Invariant: nothing here is shared with the kernels but the names of columns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np

from tilegrad.ir.symbol import high
from tilegrad.kernels.paged.shape import FIELDS, RECORD, PagedPlan, PagedShape

Array = np.ndarray[Any, Any]


def work_list(x: PagedShape, plan: PagedPlan, lengths: Array, query_starts: Array) -> Array:
    """Items of a step; rows that nothing says anything of are 0."""
    many = plan.ranges(x)
    items = np.zeros((high(plan.item_rows(x)), RECORD), np.int32)
    found = _pairs(x, plan, lengths, query_starts)
    total = sum(one["blocks"] for one in found)
    busy = min(many, total)
    bounds = [p * total // max(1, busy) for p in range(busy + 1)]
    items[busy:many, FIELDS.index("stop")] = -1
    unit = number = 0
    begun: set[int] = set()
    for one in found:
        stop, at, pieces = unit + one["blocks"], unit, []
        while at < stop:
            program = bisect_right(bounds, at) - 1
            pieces.append((program, at, min(stop, bounds[program + 1])))
            at = pieces[-1][2]
        for part, (program, at, end) in enumerate(pieces):
            place = program if program not in begun else many + number + part - program - 1
            if program not in begun:
                items[place, FIELDS.index("start")] = number + part
            begun.add(program)
            items[program, FIELDS.index("stop")] = number + part
            fields = {
                **one,
                "first": one["first"] + at - unit,
                "blocks": end - at,
                "partial": -1 if len(pieces) == 1 else number + part,
                "from": number,
                "parts": len(pieces),
            }
            for name, value in fields.items():
                items[place, FIELDS.index(name)] = value
        unit, number = stop, number + len(pieces)
    return items


def tile_list(
    x: PagedShape, tile: tuple[int, int], lengths: Array, query_starts: Array, least: int = 1
) -> Array:
    """The list of prefill tiles (queries, keys): those with the most keys first, then how many."""
    rows, keys = tile
    found = []
    for request, length, start, stop in _requests(x, lengths, query_starts):
        queries = stop - start
        for first in range(0, queries if queries >= least else 0, rows):
            seen = length - queries + min(first + rows, queries)
            seen = min(seen, x.window + rows) if x.window else seen
            found.append((max(1, -(-seen // keys)), (request, start, queries, length, first)))
    found.sort(key=lambda one: -one[0])
    tiles = np.zeros((high(x.tokens) // rows + len(lengths) + 2, 8), np.int32)
    for place, (_, record) in enumerate(found):
        tiles[place, :5] = record
    tiles[-1, 0] = len(found)
    return tiles


def _requests(
    x: PagedShape, lengths: Array, query_starts: Array
) -> Iterator[tuple[int, int, int, int]]:
    """(number, keys, first token, the one behind the last) of requests; the tokens of none are one
    more, without keys."""
    starts = [*query_starts.tolist(), high(x.tokens)]
    for request, length in enumerate([*lengths.tolist(), 0]):
        yield request, length, starts[request], starts[request + 1]


def _pairs(
    x: PagedShape, plan: PagedPlan, lengths: Array, query_starts: Array
) -> list[dict[str, int]]:
    """Row blocks, in order."""
    found, each = [], plan.per(x)
    for request, length, first, last in _requests(x, lengths, query_starts):
        if plan.below and last - first >= plan.below:
            continue
        for start in range(first, last, each):
            tokens = min(each, last - start)
            sees = length - (last - start) + 1
            begin = max(0, sees - x.window) // plan.block if x.window else 0
            blocks = max(1, -(-max(0, sees + tokens - 1) // plan.block) - begin)
            found.append(
                {
                    "request": request,
                    "token": start,
                    "tokens": tokens,
                    "sees": sees,
                    "first": begin,
                    "blocks": blocks,
                }
            )
    return found
