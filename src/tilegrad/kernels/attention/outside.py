"""What tokens of no sequence get, where sequences lie one after another: zeros.

The kernels on matrix units write the tokens of sequences alone. Those before the first start and
from the last end on see nothing: their results and gradients are 0, their log-sum-exps -inf, or
those of a sink, if heads have one. Invariant: no token of a sequence is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ... import tile
from ...ir.symbol import ceil_divide
from ...ir.types import Memory
from ...tile.build import Body, BodyBuilder
from .holes import Holes
from .shape import STARTS, AttentionShape, parameters
from .softmax import LN2
from .tile_order import bounded

ROWS = 64  # tokens of a program


def outside(x: AttentionShape, more: Sequence[Memory], results: Sequence[str], name: str) -> Body:
    """The Body for (out, lse), (dq,) or (dk, dv), which another launch writes too; `more` are the
    types of the extras."""
    of_keys = "dk" in results
    starts = STARTS[of_keys]
    tokens, heads, group = x.side(of_keys)
    given = dict(parameters(x, more, results))
    written = [(result, replace(given[result], use="state")) for result in results]
    b = BodyBuilder(name, [(n, given[n]) for n in (starts, "sinks") if n in given] + written)
    grid = ceil_divide(tokens, ROWS), heads
    with tile.into(b):
        block, head = tile.grid(*grid)
        first, memory = block * ROWS, tile.memories(b)
        line, holes = tile.arange(ROWS) + first, Holes(x, memory, 0, head * group)
        lines = memory[starts]
        begin, end = (bounded(lines[i], "end", tokens) for i in (0, lines.type.shape[0] - 1))
        there = ((line < begin) | (end <= line)) & (line < tokens)
        for result in results:
            if result == "lse":
                begun = holes.begun()  # a sink is all that they see
                sums = tile.full((), -tile.INF) if begun is None else begun * LN2
                lse = tile.broadcast(sums, (ROWS,))
                tile.store(memory["lse"], (0, head, first), lse, mask=there)
            else:
                zeros = tile.zeros((ROWS, x.columns(result)), x.dtype)
                tile.store(holes.tokens(result, first, zeros.shape), zeros, mask=there[:, None])
    return b.finish(grid)
