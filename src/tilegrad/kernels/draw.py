"""Kernels that draw tokens: where a row's probabilities are cut, and a race among what is kept.

No row is sorted. The order of tokens is by probability, then by place; top-k, top-p and min-p all
keep a beginning of that order, so a probability and a place say which. Probabilities p are at
most 1 and not negative, so their bits, taken as integers (*keys*), are in the same order.

`pick` counts and adds up what is at or above a few keys, takes the highest of them that the cut
cannot be below, and lists the tokens from there on: mostly some hundreds. `draw` finds the cut
among these: a search narrows a range of keys, each round over the list measuring what is at or
above three keys, until one value is left in the range.

The race: token i with probability p(i) arrives after an exponential time of that rate; the first
to arrive is the draw. Its uniform number is a hash of the row's seed, its position and i, so no
cumulative sum is needed and no draw depends on another. How early a token is (p over its time, to
a few units of the last place) is its own alone, so a race may be run in parts. Rows without limits
have no list: `pick` runs their race, several programs a row, and so it does for rows that keep one
token, where the likeliest is first. A row that nobody asks for (k below 0) is not read at all.

Invariant: a row's token depends on its probabilities, limits, seed and position alone, not on other
rows nor on how many programs run; the block size changes only how sums are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import tile
from ..core.dtype import float32, int32, int64, uint32
from ..tile.define import Definition
from .grouped import numbers, scatter, whole

ONE = 0x3F800000  # the key of probability 1
LAST = 0x7FFFFFFF
GOLDEN, SILVER = 0x9E3779B9, 0xB5297A4D
FIRST_KEYS = (0x37000000, 0x39800000, 0x3C000000)  # 2**-17, 2**-12, 2**-7
ROUNDS = 18  # a range of 2**30 keys is narrowed to one by 15, from the second on
MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)  # of murmur3's last step: every bit reaches every other
# -log2(1 - t) / t by powers of t, up to 1/2: within 1e-6 (fitted at Chebyshev points)
LOGARITHM = (1.4426965, 0.7210807, 0.48900133, 0.27007574, 0.7559917, -0.92356813, 1.4312626)


def mixed(x: Any) -> Any:
    """32 bits mixed well."""
    first, second = MULTIPLIERS
    x = (x ^ (x >> 16)) * first
    x = (x ^ (x >> 13)) * second
    return x ^ (x >> 16)


def key_of(x: Any) -> Any:
    """The keys of probabilities."""
    return tile.bitcast(x, int32)


def block_at(p: Any, row: Any, start: Any, block: int) -> Any:
    """Probabilities of a block of a row; 0 beyond its end."""
    return tile.fill(tile.load(p, (row, start), (block,)), 0.0)


def at_least(x: Any, key: Any, counted: bool) -> Any:
    """1 for each probability at or above a key, or the probability itself."""
    found = key_of(x) >= key
    return found.to(int32) if counted else tile.where(found, x, 0.0)


# ---- the list --------------------------------------------------------------------------------


@Definition
def pick(
    p: Any,
    floats: Any,
    top_k: Any,
    seeds: Any,
    slots: Any,
    positions: Any,
    *,
    block: int,
    parts: int,
    skip: bool,
    top_p: int,
    min_p: int,
) -> None:
    """What each row's draw needs: tokens (rows, columns); (rows, parts) how many (-1: no list), k
    (0: none), sum, of which the first of a row counts; who is how early in each part.

    The tokens listed are the first ones of a row; the sum is that of what min-p leaves. `skip`
    looks whether a block has any before it counts their places.
    """
    rows, columns = p.shape
    row, part = tile.grid(rows, parts)
    tokens = tile.result((rows, columns), int32, fill="none")  # those past the size are not read
    sizes, limits = (tile.result((rows, parts), int32) for _ in range(2))
    sums, early = (tile.result((rows, parts), float32) for _ in range(2))
    winners = tile.result((rows, parts), int32)
    slot = tile.load(slots[row])
    k, share = tile.load(top_k[slot]), tile.load(floats[slot, top_p])
    floor = least(floats, slot, min_p)
    limited = (k > 1) | ((k == 0) & (share < 1.0))
    blocks = -(-columns // block)
    first, last = part * blocks // parts, (part + 1) * blocks // parts  # of this program's race
    last = tile.where(limited | (k < 0), 0, last)
    size, total = whole(-1), tile.zeros(())
    if limited & (part <= 0):
        k, total, bound = bound_of(p, row, k, share, floor, block)
        if (k > 0) | (share < 1.0):
            size = listed(p, tokens, row, bound, block, skip)
        else:
            last = tile.full((), blocks, int64)
    words, sure = words_of(seeds, slot, tile.load(positions[row])), k == 1

    def arriving(number: Any) -> Any:
        x, token = block_at(p, row, number * block, block), numbers(block, number * block)
        early = tile.where(sure, x, tile.quick_divide(x, times(token, *words)))
        return early, token, key_of(x) >= floor

    top, token = race(tile.range(first, last, bounds=(0, blocks - 1)), arriving, block)
    found = (tile.where(k < 0, 0, size), tile.maximum(k, 0), total, top, token)
    for to, value in zip((sizes, limits, sums, early, winners), found):
        tile.store(to, (row, part), value)


@tile.function
def listed(p: Any, tokens: Any, row: Any, bound: Any, block: int, skip: bool) -> Any:
    """How many tokens of a row are at or above a key; they are written, in order."""
    columns, size = p.shape[1], whole(0)
    for start in tile.range(0, columns, block):
        wanted = key_of(block_at(p, row, start, block)) >= bound
        each = wanted.to(int32)
        if tile.max(each) > 0 if skip else True:
            at = tile.cast(row, int32) * columns + size + tile.cumsum(each) - 1
            scatter(tokens, at, numbers(block, start), wanted)
            size = size + tile.sum(each)
    return size


def least(floats: Any, slot: Any, min_p: int) -> Any:
    """The key that min-p sets for a slot: 0 has none above it."""
    return tile.maximum(key_of(tile.load(floats[slot, min_p])), 1)


@tile.function
def bound_of(p: Any, row: Any, k: Any, share: Any, floor: Any, block: int) -> Any:
    """(k, or 0 if there are no more; the sum of what min-p leaves; a key the cut is not below)."""
    keys = [floor, *(tile.maximum(key, floor) for key in FIRST_KEYS)]
    counts = [tile.zeros((block,), int32) for _ in keys]
    sums = [tile.zeros((block,)) for _ in keys]
    for start in tile.range(0, p.shape[1], block):
        x = block_at(p, row, start, block)
        counts = [n + at_least(x, key, True) for n, key in zip(counts, keys)]
        sums = [m + at_least(x, key, False) for m, key in zip(sums, keys)]
    counts, sums = ([tile.sum(v) for v in of] for of in (counts, sums))
    k, total, bound = tile.where(counts[0] > k, k, 0), sums[0], floor
    for key, n, m in zip(keys[1:], counts[1:], sums[1:]):
        enough = tile.where(k > 0, (n >= k).to(int32), (m >= share * total).to(int32))
        bound = tile.where(enough > 0, key, bound)
    return k, total, bound


# ---- the cut ---------------------------------------------------------------------------------


@dataclass
class Listed:
    """The listed tokens of a row, `size` of them, by blocks."""

    p: Any
    tokens: Any
    row: Any
    size: Any
    block: int

    def at(self, start: Any) -> Any:
        """(probabilities, their keys, ids) of a block; 0 beyond the end."""
        inside = numbers(self.block, start) < self.size
        token = tile.load(self.tokens, (self.row, start), (self.block,), mask=inside, other=0)
        token = tile.fill(token, 0)
        first = tile.cast(self.row, int32) * self.p.shape[1]
        x = tile.load(self.p, first + token, mask=inside, other=0.0)
        return x, key_of(x), token

    @tile.function
    def search(self, floor: Any, wanted: Any, searched: Any, counted: bool) -> Any:
        """The highest key, not below `floor`, at or above which there is `wanted`; the floor where
        nothing is searched for.

        If counting, also a lower key with the same tokens at or above it.
        """
        low, high, step, busy = floor, whole(ONE + 1), whole(0), whole(1)
        for _ in tile.range(0, tile.where(searched, whole(ROUNDS), 0)):
            if busy > 0:
                keys = [low + step, low + step + step, low + step + step + step]
                found = [tile.zeros((self.block,), int32 if counted else float32) for _ in keys]
                fewest = tile.full((self.block,), ONE + 1, int32)
                most = tile.full((self.block,), -1, int32)
                for start in tile.range(0, self.size, self.block):
                    x, own, _ = self.at(start)
                    found = [n + at_least(x, key, counted) for n, key in zip(found, keys)]
                    inside = (own >= low) & (own < high)
                    fewest = tile.minimum(fewest, tile.where(inside, own, ONE + 1))
                    most = tile.maximum(most, tile.where(inside, own, -1))
                found = [tile.sum(n) for n in found]
                up, down, exact = high, low, whole(0)
                for key, n in zip(keys, found):
                    down = tile.where(n >= wanted, key, down)
                    exact = exact | (n == wanted).to(int32) if counted else exact
                for key, n in zip(keys[::-1], found[::-1]):
                    up = tile.where(n < wanted, key, up)
                low = tile.maximum(tile.maximum(low, down), tile.min(fewest))
                high = tile.minimum(tile.minimum(high, up), tile.max(most) + 1)
                step = tile.maximum((high - low) >> 2, 1)
                busy = (high - low > 1).to(int32) * (1 - exact)
        return low

    @tile.function
    def measure(self, key: Any) -> Any:
        """How many lie above a key and their sum, and how many are at it."""
        above, at = tile.zeros((self.block,), int32), tile.zeros((self.block,), int32)
        total = tile.zeros((self.block,))
        for start in tile.range(0, self.size, self.block):
            x, own, _ = self.at(start)
            above = above + (own > key).to(int32)
            total = total + tile.where(own > key, x, 0.0)
            at = at + (own == key).to(int32)
        return tile.sum(above), tile.sum(total), tile.sum(at)

    @tile.function
    def place_of(self, key: Any, number: Any, size: Any) -> Any:
        """The id of the token that is the `number`th of those at a key, among `size`."""
        seen, place = whole(0), whole(self.p.shape[1])
        for start in tile.range(0, size, self.block):
            _, own, token = self.at(start)
            at = (own == key).to(int32)
            more = tile.sum(at)
            if (seen < number) & (seen + more >= number):
                here = (at > 0) & (tile.cumsum(at) + seen == number)
                place = tile.max(tile.where(here, token, 0))
            seen = seen + more
        return place

    def cut(self, k: Any, share: Any, total: Any, floor: Any) -> Any:
        """(key, place): tokens above the key are kept, and those at it up to the place."""
        columns = self.p.shape[1]
        lowest = self.search(floor, k, k > 0, True)
        above, more, at = self.measure(lowest)
        most = tile.where(k > 0, k - above, columns)
        more = more + most.to(float32) * tile.bitcast(lowest, float32)
        wanted = share * tile.where(k > 0, more, total)
        key = self.search(lowest, wanted, share < 1.0, False)
        above, more, at = self.measure(key)
        need = tile.ceil((wanted - more) / tile.bitcast(key, float32))
        need = tile.minimum(tile.maximum(need, 1.0), 1.0 * columns).to(int32)
        need = tile.where(share < 1.0, need, most)
        kept = tile.where(key == lowest, tile.minimum(most, need), need)
        return key, self.place_of(key, kept, tile.where(kept < at, self.size, 0))


# ---- the race --------------------------------------------------------------------------------


def words_of(seeds: Any, slot: Any, position: Any) -> Any:
    """The two words that tell the draws of a seed and a position from all others."""
    low, high = (tile.load(seeds[slot, i]) for i in range(2))
    number = position.to(uint32)
    first = mixed(mixed(low + number * GOLDEN) + high)
    second = mixed(mixed(high + number * SILVER + GOLDEN) ^ (low + SILVER))
    return first, second


@tile.function
def times(token: Any, first: Any, second: Any) -> Any:
    """An exponential time of each token: -log2(1 - u) of its uniform number u.

    1 - u is 2**-k w, and -log2(w) a polynomial of 1 - w that is 0 at 0; up to 1/2 that is u
    itself, so the smallest times are as exact as any. The same bits on every Target.
    """
    drawn = mixed(mixed(token.to(uint32) * GOLDEN + first) ^ second)
    unit = drawn.to(float32) * 2.0**-32 + 2.0**-33
    bits = key_of(1.0 - unit)
    w = tile.bitcast(bits & 0x7FFFFF | 0x3F000000, float32)  # within [1/2, 1)
    k = tile.maximum(126 - (bits >> 23), 0)
    t = tile.where(unit < 0.5, unit, 1.0 - w)
    sum = tile.full(t.shape, LOGARITHM[-1])
    for factor in LOGARITHM[-2::-1]:
        sum = tile.multiply_add(sum, t, tile.full(t.shape, factor))
    return tile.multiply_add(sum, t, k.to(float32))


def first_of(early: Any, winner: Any) -> Any:
    """(how early, which token) the first of all is."""
    top = tile.max(early)
    return top, tile.min(tile.where(early == top, winner, LAST))


@tile.function
def race(blocks: Any, arriving: Any, lanes: int) -> Any:
    """(how early, token) of the first of some blocks' tokens; `arriving` gives how early a block's
    are, their ids, and which of them run."""
    best, winner = tile.full((lanes,), -1.0), tile.zeros((lanes,), int32)
    for start in blocks:
        early, token, runs = arriving(start)
        sooner = runs & (early > best)
        best, winner = tile.where(sooner, early, best), tile.where(sooner, token, winner)
    return first_of(best, winner)


@Definition
def draw(
    p: Any,
    tokens: Any,
    sizes: Any,
    limits: Any,
    sums: Any,
    early: Any,
    winners: Any,
    floats: Any,
    seeds: Any,
    slots: Any,
    positions: Any,
    *,
    block: int,
    top_p: int,
    min_p: int,
) -> None:
    """A token for each row of probabilities p (rows, columns), each row's largest being 1.

    Tokens to winners are what `pick` gave; the seed is that of the row's slot. A list is read by
    `block` tokens.
    """
    rows, columns = p.shape
    row = tile.grid(rows)
    out = tile.result((rows,), int32)
    size = tile.load(sizes[row, 0])
    parts = early.shape[1]
    _, token = first_of(*(tile.load(of, (row, 0), (parts,)) for of in (early, winners)))
    if size > 0:
        slot, one = tile.load(slots[row]), Listed(p, tokens, row, size, block)
        words = words_of(seeds, slot, tile.load(positions[row]))
        share, k = tile.load(floats[slot, top_p]), tile.load(limits[row, 0])
        floor, total = least(floats, slot, min_p), tile.load(sums[row, 0])
        key, place = one.cut(k, share, total, floor)

        def arriving(start: Any) -> Any:
            x, own, here = one.at(start)
            kept = (own > key) | ((own == key) & (here <= place))
            return tile.quick_divide(x, times(here, *words)), here, kept

        _, token = race(tile.range(0, size, block), arriving, block)
    tile.store(out, (row,), tile.where(token < columns, token, 0))  # p was not a number


# ---- around it -------------------------------------------------------------------------------


@Definition
def biased(x: Any, biases: Any, ids: Any, values: Any, slots: Any, *, block: int) -> None:
    """Logits x (rows, columns) with the biases of each row's slot: biases[slot] of ids, values."""
    rows, columns = x.shape
    row, start = tile.grid(rows, tile.ceil_divide(columns, block))
    out = tile.result(x.shape, float32)
    slot, here = tile.load(slots[row]), numbers(block, start * block)
    y = tile.load(x, (row, start * block), (block,))
    for number in tile.range(0, tile.load(biases[slot])):
        token, value = (tile.load(of[slot, number]) for of in (ids, values))
        y = y + tile.where(here == token, value, 0.0)
    tile.store(out, (row, start * block), y)


@Definition
def largest(x: Any, *, count: int, block: int) -> None:
    """Places (rows, count) of the largest of each row, in order; of equals the first one first."""
    rows, columns = x.shape
    row = tile.grid(rows)
    out = tile.result((rows, count), int32)
    last, at = tile.full((), tile.INF), whole(-1)
    for number in tile.range(0, count):
        best = tile.full((block,), -tile.INF)
        place = tile.full((block,), columns, int32)
        for start in tile.range(0, columns, block):
            value = tile.fill(tile.load(x, (row, start), (block,)), -tile.INF)
            here = numbers(block, start)
            after = (value < last) | ((value == last) & (here > at))
            better = after & ((value > best) | (place == columns)) & (here < columns)
            place = tile.where(better, here, place)
            best = tile.where(better, value, best)
        last = tile.max(best)
        at = tile.min(tile.where(best == last, place, columns))
        tile.store(out, (row, number), tile.minimum(at, columns - 1))  # if all are NaN
