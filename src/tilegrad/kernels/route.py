"""Kernels that send tokens to experts: the largest scores of each token, and rows sorted by expert.

A program holds the scores of some tokens as one tile, a row for each. The largest are found one
after the other: a score and its column are one integer (a *key*), so that a single maximum finds
both, and of equals the first column. What is picked is then a matrix of ones: running sums down its
columns are places within an expert, and its column sums the rows of each. So rows come out sorted
without a sort, an atomic operation or a value read back by another thread.

Few tokens are one program, and one launch (`route`). Many are two: `count_routes` leaves what each
program picked and how many for each expert, and `place_routes` adds up what programs before have.

Invariant: nothing depends on the order in which programs run; every token gets as many experts
as it asks for, all different, whatever its scores are.
"""

from __future__ import annotations

from typing import Any

from .. import tile
from ..core.dtype import float32, int32, int64
from ..tile.define import Definition
from .grouped import lanes_of, list_of, numbers, scatter, whole, write_list

NOT_A_NUMBER, SIGN = 0x7FC00000, 0x7FFFFFFF
LEAST_KEY = -(1 << 63)  # below any key
COUNTED = 32  # programs whose counts are added up at a time


@tile.function
def keys(x: Any, experts: int) -> Any:
    """Integers in the order of scores, then of columns from the last to the first."""
    lanes = x.shape[1]
    bits = tile.bitcast(tile.where(x == 0.0, 0.0, x), int32)
    bits = tile.where(x == x, bits, NOT_A_NUMBER)  # comes first, as in a sort
    bits = tile.where(bits < 0, bits ^ SIGN, bits)
    column = tile.arange(lanes)
    found = bits.to(int64) * (1 << 32) + (lanes - 1 - column)[None, :]
    return tile.where((column < experts)[None, :], found, LEAST_KEY)


@tile.function
def picked(
    scores: Any, start: Any, tokens: int, count: int, powers: bool, shared: bool
) -> tuple[Any, Any, Any]:
    """(1 where an expert was picked, its rank among those, the number of each token) of some
    tokens, whose shares are written to a result (N, count)."""
    rows, experts = scores.shape
    shares = tile.result((rows, count), float32, fill="none")
    x = tile.load(scores, (start, 0), (tokens, lanes_of(experts))).to(float32)
    if powers:
        x = tile.fill(x, -tile.INF)
        x = tile.exp(x - tile.max(x, axis=1)[:, None])
        x = x / tile.sum(x, axis=1)[:, None]
    x = tile.fill(x, 0.0)
    key, ranks = keys(x, experts), tile.full(x.shape, -1, int32)
    for number in tile.range(0, count):
        here = key == tile.max(key, axis=1)[:, None]
        ranks = tile.where(here, tile.cast(number, int32), ranks)
        key = tile.where(here, LEAST_KEY, key)
    if shared:
        x = x / tile.sum(tile.where(ranks >= 0, x, 0.0), axis=1)[:, None]
    own, token = own_of(ranks, start, rows)
    scatter(shares, token * count + ranks, x, own)
    return own, ranks, token


@tile.function
def own_of(ranks: Any, start: Any, rows: Any) -> tuple[Any, Any]:
    """(1 where an expert was picked, the number of each token): none for rows past the end."""
    token = numbers(ranks.shape[0], start)
    return (ranks >= 0) & (token < rows)[:, None], tile.broadcast(token[:, None], ranks.shape)


@tile.function
def write_sorted(results: Any, own: Any, ranks: Any, token: Any, first: Any, count: int) -> None:
    """Places of picked rows, of which those of an expert begin at `first`."""
    order, inverse, tokens = results
    place = first[None, :] + tile.cumsum(own.to(int32), axis=0) - 1
    row = token * count + ranks
    for to, at, value in ((order, place, row), (inverse, row, place), (tokens, place, token)):
        scatter(to, at, value, own)


@tile.function
def write_groups(offsets: Any, out: Any, total: Any, block: int) -> None:
    """Where experts begin, and the list of their blocks."""
    ends = tile.cumsum(total)
    tile.store(offsets, (0,), whole(0), unique=True)
    tile.store(offsets, (1,), ends, unique=True)
    if block:
        write_list(out, ends - total, total, block)


def results_of(rows: Any, experts: int, block: int, most: Any) -> tuple[Any, Any, Any]:
    """order, places and tokens (rows,), offsets (E + 1,), and a list where blocks have rows."""
    sorted_ = [tile.result((rows,), int32, fill="none") for _ in range(3)]
    offsets = tile.result((experts + 1,), int32, fill="none")
    return sorted_, offsets, list_of(most) if block else None


@Definition
def route(
    scores: Any, *, count: int, powers: bool, shared: bool, tokens: int, block: int, most: Any
) -> None:
    """shares, order, places, tokens, offsets of scores (N, E), and a list of blocks: one program
    for all tokens."""
    tile.grid(1)
    rows, experts = scores.shape
    own, ranks, token = picked(scores, 0, tokens, count, powers, shared)
    sorted_, offsets, out = results_of(rows * count, experts, block, most)
    total = tile.sum(own.to(int32), axis=0)
    write_sorted(sorted_, own, ranks, token, tile.cumsum(total) - total, count)
    write_groups(offsets, out, total, block)


@Definition
def count_routes(scores: Any, *, count: int, powers: bool, shared: bool, tokens: int) -> None:
    """shares (N, count), experts (N, count), and counts (programs, E): how many tokens of each
    program picked each expert."""
    rows, experts = scores.shape
    programs = tile.ceil_divide(rows, tokens)
    program = tile.grid(programs)
    own, ranks, token = picked(scores, program * tokens, tokens, count, powers, shared)
    found = tile.result((rows, count), int32, fill="none")
    counts = tile.result((programs, experts), int32)
    scatter(found, token * count + ranks, numbers(ranks.shape[1])[None, :], own)
    tile.store(counts, (program, 0), tile.sum(own.to(int32), axis=0))


@Definition
def place_routes(picks: Any, counts: Any, *, tokens: int, block: int, most: Any) -> None:
    """order, places, tokens, offsets and a list of blocks, of what `count_routes` left."""
    (rows, count), (programs, experts) = picks.shape, counts.shape
    program, lanes = tile.grid(programs), lanes_of(experts)
    sorted_, offsets, out = results_of(rows * count, experts, block, most)
    mine, total = tile.cast(program, int32), tile.zeros((lanes,), int32)
    before = total
    for start in tile.range(0, programs, COUNTED):
        some = tile.fill(tile.load(counts, (start, 0), (COUNTED, lanes)), 0)
        total = total + tile.sum(some, axis=0)
        earlier = (numbers(COUNTED, start) < mine)[:, None]
        before = before + tile.sum(tile.where(earlier, some, 0), axis=0)
    column = numbers(lanes)[None, :]
    ranks = tile.full((tokens, lanes), -1, int32)
    for number in tile.range(0, count):
        expert = tile.fill(tile.load(picks, (program * tokens, number), (tokens,), axes=(0,)), -1)
        ranks = tile.where(expert[:, None] == column, tile.cast(number, int32), ranks)
    own, token = own_of(ranks, program * tokens, rows)
    write_sorted(sorted_, own, ranks, token, tile.cumsum(total) - total + before, count)
    if mine < 1:
        write_groups(offsets, out, total, block)
