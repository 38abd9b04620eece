"""Kernels that draw tokens: where a row's probabilities are cut, and a race among what is kept.

No row is sorted. The order of tokens is by probability, then by place; top-k, top-p and min-p all
keep a beginning of that order, so a probability and a place say which. Probabilities p are at
most 1 and not negative, so their bits, taken as integers (*keys*), are in the same order: a search
narrows a range of keys, each walk over the row measuring (counting or adding up) what is at or
above three keys, until one value is left in the range.

The race: token i with probability p(i) arrives after an exponential time of that rate; the first
to arrive is the draw. Its uniform number is a hash of the row's two words and i, so no cumulative
sum is needed and no draw depends on another.

Invariant: a row's token depends on its probabilities, limits and words alone: not on other rows,
on the block size, nor on how many programs run.
"""

from __future__ import annotations

from typing import Any

from ... import tile
from ...core.dtype import float32, int32, uint32
from ...tensor.kernel import kernel
from .sampling_state import FLOATS

ONE = 0x3F800000  # the key of probability 1
GOLDEN = 0x9E3779B9
FIRST_KEYS = (0x38000000, 0x3A800000, 0x3D000000)  # 2**-15, 2**-10, 2**-5
WALKS = 18  # a range of 2**30 keys is narrowed to one by 15, from the second on
MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)  # of murmur3's last step: every bit reaches every other


def word(value: int) -> Any:
    """A uint32."""
    return tile.full((), value, uint32)


def whole(value: int) -> Any:
    """An int32."""
    return tile.full((), value, int32)


def mixed(x: Any) -> Any:
    """32 bits mixed well."""
    first, second = (word(m) for m in MULTIPLIERS)
    x = (x ^ (x >> word(16))) * first
    x = (x ^ (x >> word(13))) * second
    return x ^ (x >> word(16))


@tile.function
def probabilities(p: Any, row: Any, start: Any, block: int) -> Any:
    """A block of a row, 0 beyond its end."""
    return tile.fill(tile.load(p, (row, start), (block,)), 0.0)


@tile.function
def weights_of(x: Any, key: Any, counted: bool) -> Any:
    """1 for each probability at or above a key, or the probability itself."""
    at_least = tile.bitcast(x, int32) >= key
    return tile.cast(at_least, int32) if counted else tile.where(at_least, x, 0.0)


@tile.function
def search(p: Any, row: Any, floor: Any, wanted: Any, counted: bool, block: int) -> Any:
    """The highest key, not below `floor`, at or above which there is `wanted`.

    If counting, also a lower key with the same tokens at or above it.
    """
    columns = p.shape[1]
    low, high, busy = floor, whole(ONE + 1), whole(1)
    first, second, third = (whole(key) for key in FIRST_KEYS)
    for _ in tile.range(0, WALKS):
        if busy > 0:
            dtype = int32 if counted else float32
            one, two, three = (tile.zeros((block,), dtype) for _ in range(3))
            least, most = tile.full((block,), ONE + 1, int32), tile.full((block,), -1, int32)
            for start in tile.range(0, columns, block):
                x = probabilities(p, row, start, block)
                key = tile.bitcast(x, int32)
                one = one + weights_of(x, first, counted)
                two = two + weights_of(x, second, counted)
                three = three + weights_of(x, third, counted)
                inside = (key >= low) & (key < high)
                least = tile.minimum(least, tile.where(inside, key, whole(ONE + 1)))
                most = tile.maximum(most, tile.where(inside, key, whole(-1)))
            one, two, three = tile.sum(one), tile.sum(two), tile.sum(three)
            smallest, largest = tile.min(least), tile.max(most)
            exact = whole(0)
            if counted:
                exact = tile.cast((one == wanted) | (two == wanted) | (three == wanted), int32)
            up = tile.where(one < wanted, first, tile.where(
                two < wanted, second, tile.where(three < wanted, third, high)))  # fmt: skip
            down = tile.where(three >= wanted, third, tile.where(
                two >= wanted, second, tile.where(one >= wanted, first, low)))  # fmt: skip
            low = tile.maximum(tile.maximum(low, down), smallest)
            high = tile.minimum(tile.minimum(high, up), largest + whole(1))
            step = tile.maximum((high - low) >> whole(2), whole(1))
            first, second, third = low + step, low + step + step, low + step + step + step
            busy = tile.cast(high - low > 1, int32) * (whole(1) - exact)
    return low


@tile.function
def measure(p: Any, row: Any, key: Any, block: int) -> Any:
    """How many lie above a key and their sum, and how many are at it."""
    columns = p.shape[1]
    above, at = tile.zeros((block,), int32), tile.zeros((block,), int32)
    total = tile.zeros((block,), float32)
    for start in tile.range(0, columns, block):
        x = probabilities(p, row, start, block)
        found = tile.bitcast(x, int32)
        above = above + tile.cast(found > key, int32)
        total = total + tile.where(found > key, x, 0.0)
        at = at + tile.cast(found == key, int32)
    return tile.sum(above), tile.sum(total), tile.sum(at)


@tile.function
def place_of(p: Any, row: Any, key: Any, number: Any, block: int) -> Any:
    """Where the token is that is the `number`th of those at a key."""
    columns = p.shape[1]
    seen, place = whole(0), whole(columns)
    for start in tile.range(0, columns, block):
        at = tile.cast(tile.bitcast(probabilities(p, row, start, block), int32) == key, int32)
        more = tile.sum(at)
        if (seen < number) & (seen + more >= number):
            reached = tile.cast(tile.cumsum(at) + seen >= number, int32)
            place = tile.cast(start, int32) + whole(block) - tile.sum(reached)
        seen = seen + more
    return place


@tile.function
def cut(p: Any, row: Any, k: Any, share: Any, floor: Any, block: int) -> Any:
    """(key, place): tokens above the key are kept, and those at it up to the place."""
    columns = p.shape[1]
    key, place, kept = floor, whole(columns), whole(columns)
    if (k > 0) | (share < 1.0):
        more, total, at = measure(p, row, floor - whole(1), block)
        if (k > 0) & (more > k):
            key = search(p, row, floor, k, True, block)
            more, total, at = measure(p, row, key, block)
            kept = k - more
            total = total + tile.cast(kept, float32) * tile.bitcast(key, float32)
        if share < 1.0:
            wanted = share * total
            lowest = key
            key = search(p, row, lowest, wanted, False, block)
            more, total, at = measure(p, row, key, block)
            need = tile.ceil((wanted - total) / tile.bitcast(key, float32))
            need = tile.cast(tile.minimum(tile.maximum(need, 1.0), 1.0 * columns), int32)
            kept = tile.where(key == lowest, tile.minimum(kept, need), need)
        if kept < at:
            place = place_of(p, row, key, kept, block)
    return key, place


@tile.function
def arrivals(x: Any, token: Any, first: Any, second: Any) -> Any:
    """How early each token arrives: probabilities over exponential times."""
    drawn = mixed(mixed(token * word(GOLDEN) + first) ^ second)
    unit = (tile.cast(drawn, float32) + 0.5) * 2.0**-32
    return x / -tile.log1p(-tile.minimum(unit, 1.0 - 2.0**-24))


@kernel
def draw(
    p: Any, floats: Any, top_k: Any, seeds: Any, drawn: Any, slots: Any, *, block: int, skip: bool
) -> None:
    """A token for each row of probabilities p (rows, tokens), each row's largest being 1.

    Limits, seeds and the number of the draw are those of the row's slot. `skip` looks whether a
    block has tokens that are kept before it makes random numbers for them.
    """
    rows, columns = p.shape
    row = tile.grid(rows)
    out = tile.result((rows,), int32)
    slot = tile.load(slots, (row,), ())
    k = tile.load(top_k, (slot,), ())
    share, least = (tile.load(floats, (slot, FLOATS.index(n)), ()) for n in ("top_p", "min_p"))
    floor = tile.maximum(tile.bitcast(least, int32), whole(1))
    number = tile.cast(tile.load(drawn, (slot,), ()), uint32) * word(GOLDEN)
    first = mixed(tile.load(seeds, (slot, 0), ()) + number)
    second = mixed(tile.load(seeds, (slot, 1), ()) ^ first)
    key, place = cut(p, row, k, share, floor, block)
    best, token = tile.full((block,), -1.0, float32), tile.full((block,), 0, int32)
    lane = tile.cast(tile.arange(block), int32)
    for start in tile.range(0, columns, block):
        x = probabilities(p, row, start, block)
        here = lane + tile.cast(start, int32)
        found = tile.bitcast(x, int32)
        keep = (found > key) | ((found == key) & (here <= place))
        wanted = tile.max(tile.cast(keep, int32)) if skip else whole(1)
        if wanted > 0:
            early = tile.where(keep, arrivals(x, tile.cast(here, uint32), first, second), -1.0)
            token = tile.where(early > best, here, token)
            best = tile.maximum(early, best)
    winner = tile.max(best)
    tile.store(out, (row,), tile.min(tile.where(best == winner, token, whole(columns))))


@kernel
def largest(x: Any, *, count: int, block: int) -> None:
    """Places (rows, count) of the largest of each row, in order; of equals the first one first."""
    rows, columns = x.shape
    row = tile.grid(rows)
    out = tile.result((rows, count), int32)
    lane = tile.cast(tile.arange(block), int32)
    last, at = tile.full((), tile.INF, float32), whole(-1)
    for number in tile.range(0, count):
        best = tile.full((block,), -tile.INF, float32)
        place = tile.full((block,), columns, int32)
        for start in tile.range(0, columns, block):
            value = tile.fill(tile.load(x, (row, start), (block,)), -tile.INF)
            here = lane + tile.cast(start, int32)
            after = (value < last) | ((value == last) & (here > at))
            better = after & ((value > best) | (place == whole(columns))) & (here < columns)
            place = tile.where(better, here, place)
            best = tile.where(better, value, best)
        last = tile.max(best)
        at = tile.min(tile.where(best == last, place, whole(columns)))
        tile.store(out, (row, number), at)


__all__ = ["draw", "largest"]
