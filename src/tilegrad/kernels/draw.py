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

from typing import Any

from .. import tile
from ..core.dtype import float32, int32, int64, uint32
from ..tile.define import Definition
from ..tile.trace import tracer

ONE = 0x3F800000  # the key of probability 1
LAST = 0x7FFFFFFF
GOLDEN, SILVER = 0x9E3779B9, 0xB5297A4D
FIRST_KEYS = (0x37000000, 0x39800000, 0x3C000000)  # 2**-17, 2**-12, 2**-7
ROUNDS = 18  # a range of 2**30 keys is narrowed to one by 15, from the second on
MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)  # of murmur3's last step: every bit reaches every other
# -log2(1 - t) / t by powers of t, up to 1/2: within 1e-6 (fitted at Chebyshev points)
LOGARITHM = (1.4426965, 0.7210807, 0.48900133, 0.27007574, 0.7559917, -0.92356813, 1.4312626)


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
def listed_at(p: Any, tokens: Any, row: Any, start: Any, size: Any, block: int) -> Any:
    """(probabilities, ids) of a block of a row's listed tokens; 0 beyond their end."""
    columns = p.shape[1]
    inside = tile.cast(tile.arange(block), int32) + tile.cast(start, int32) < size
    token = tile.load(tokens, (row, start), (block,), mask=inside, other=0)
    token = tile.fill(token, 0)
    first = tile.cast(row, int32) * whole(columns)
    return tile.load(p, first + token, mask=inside, other=0.0), token


@tile.function
def at_least(x: Any, key: Any, counted: bool) -> Any:
    """1 for each probability at or above a key, or the probability itself."""
    found = tile.bitcast(x, int32) >= key
    return tile.cast(found, int32) if counted else tile.where(found, x, 0.0)


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
    slot = tile.load(slots, (row,), ())
    k, share = tile.load(top_k, (slot,), ()), tile.load(floats, (slot, top_p), ())
    floor = least(floats, slot, min_p)
    limited = (k > 1) | ((k == 0) & (share < 1.0))
    blocks = -(-columns // block)
    first, last = part * blocks // parts, (part + 1) * blocks // parts  # of this program's race
    last = tile.where(limited | (k < 0), 0, last)
    size, total = whole(-1), tile.full((), 0.0, float32)
    if limited & tile.less_equal(part, 0):
        k, total, bound = bound_of(p, row, k, share, floor, block)
        if (k > 0) | (share < 1.0):
            size = listed(p, tokens, row, bound, block, skip)
        else:
            last = tile.full((), blocks, int64)
    words = words_of(seeds, slot, tile.load(positions, (row,), ()))
    top, token = race(p, row, first, last, block, k == 1, floor, words)
    tile.store(sizes, (row, part), tile.where(k < 0, whole(0), size))
    tile.store(limits, (row, part), tile.maximum(k, whole(0)))
    tile.store(sums, (row, part), total)
    tile.store(early, (row, part), top)
    tile.store(winners, (row, part), token)


@tile.function
def listed(p: Any, tokens: Any, row: Any, bound: Any, block: int, skip: bool) -> Any:
    """How many tokens of a row are at or above a key; they are written, in order."""
    columns, size = p.shape[1], whole(0)
    for start in tile.range(0, columns, block):
        x = tile.fill(tile.load(p, (row, start), (block,)), 0.0)
        here = tile.cast(tile.arange(block), int32) + tile.cast(start, int32)
        wanted = tile.bitcast(x, int32) >= bound
        some = tile.max(tile.cast(wanted, int32)) if skip else whole(1)
        if some > 0:
            place = tile.cumsum(tile.cast(wanted, int32))
            at = tile.cast(row, int32) * whole(columns) + size + place - whole(1)
            tracer().hints["distinct"] = True  # of those that are written
            tile.store(tokens, at, here, mask=wanted, unique=True)
            size = size + tile.sum(tile.cast(wanted, int32))
    return size


@tile.function
def least(floats: Any, slot: Any, min_p: int) -> Any:
    """The key that min-p sets for a slot: 0 has none above it."""
    return tile.maximum(tile.bitcast(tile.load(floats, (slot, min_p), ()), int32), whole(1))


@tile.function
def bound_of(p: Any, row: Any, k: Any, share: Any, floor: Any, block: int) -> Any:
    """(k, or 0 if there are no more; the sum of what min-p leaves; a key the cut is not below)."""
    columns = p.shape[1]
    first, second, third = (tile.maximum(whole(key), floor) for key in FIRST_KEYS)
    n0, n1, n2, n3 = (tile.zeros((block,), int32) for _ in range(4))
    m0, m1, m2, m3 = (tile.zeros((block,), float32) for _ in range(4))
    for start in tile.range(0, columns, block):
        x = tile.fill(tile.load(p, (row, start), (block,)), 0.0)
        n0, m0 = n0 + at_least(x, floor, True), m0 + at_least(x, floor, False)
        n1, m1 = n1 + at_least(x, first, True), m1 + at_least(x, first, False)
        n2, m2 = n2 + at_least(x, second, True), m2 + at_least(x, second, False)
        n3, m3 = n3 + at_least(x, third, True), m3 + at_least(x, third, False)
    n0, n1, n2, n3 = tile.sum(n0), tile.sum(n1), tile.sum(n2), tile.sum(n3)
    m0, m1, m2, m3 = tile.sum(m0), tile.sum(m1), tile.sum(m2), tile.sum(m3)
    k = tile.where(n0 > k, k, whole(0))
    wanted = share * m0
    one = tile.where(k > 0, tile.cast(n1 >= k, int32), tile.cast(m1 >= wanted, int32))
    two = tile.where(k > 0, tile.cast(n2 >= k, int32), tile.cast(m2 >= wanted, int32))
    three = tile.where(k > 0, tile.cast(n3 >= k, int32), tile.cast(m3 >= wanted, int32))
    bound = tile.where(
        three > 0, third, tile.where(two > 0, second, tile.where(one > 0, first, floor))
    )
    return k, m0, bound


# ---- the cut ---------------------------------------------------------------------------------


@tile.function
def search(
    p: Any,
    tokens: Any,
    row: Any,
    size: Any,
    floor: Any,
    wanted: Any,
    rounds: Any,
    counted: bool,
    block: int,
) -> Any:
    """The highest key, not below `floor`, at or above which there is `wanted`.

    If counting, also a lower key with the same tokens at or above it. Without rounds, the floor.
    """
    low, high, busy = floor, whole(ONE + 1), whole(1)
    first, second, third = low, low, low
    for _ in tile.range(0, rounds):
        if busy > 0:
            dtype = int32 if counted else float32
            one, two, three = (tile.zeros((block,), dtype) for _ in range(3))
            fewest, most = tile.full((block,), ONE + 1, int32), tile.full((block,), -1, int32)
            for start in tile.range(0, size, block):
                x, _ = listed_at(p, tokens, row, start, size, block)
                key = tile.bitcast(x, int32)
                one = one + at_least(x, first, counted)
                two = two + at_least(x, second, counted)
                three = three + at_least(x, third, counted)
                inside = (key >= low) & (key < high)
                fewest = tile.minimum(fewest, tile.where(inside, key, whole(ONE + 1)))
                most = tile.maximum(most, tile.where(inside, key, whole(-1)))
            one, two, three = tile.sum(one), tile.sum(two), tile.sum(three)
            exact = whole(0)
            if counted:
                exact = tile.cast((one == wanted) | (two == wanted) | (three == wanted), int32)
            up = tile.where(
                one < wanted,
                first,
                tile.where(two < wanted, second, tile.where(three < wanted, third, high)),
            )
            down = tile.where(
                three >= wanted,
                third,
                tile.where(two >= wanted, second, tile.where(one >= wanted, first, low)),
            )
            low = tile.maximum(tile.maximum(low, down), tile.min(fewest))
            high = tile.minimum(tile.minimum(high, up), tile.max(most) + whole(1))
            step = tile.maximum((high - low) >> whole(2), whole(1))
            first, second, third = low + step, low + step + step, low + step + step + step
            busy = tile.cast(high - low > 1, int32) * (whole(1) - exact)
    return low


@tile.function
def measure(p: Any, tokens: Any, row: Any, size: Any, key: Any, block: int) -> Any:
    """How many lie above a key and their sum, and how many are at it."""
    above, at = tile.zeros((block,), int32), tile.zeros((block,), int32)
    total = tile.zeros((block,), float32)
    for start in tile.range(0, size, block):
        x, _ = listed_at(p, tokens, row, start, size, block)
        found = tile.bitcast(x, int32)
        above = above + tile.cast(found > key, int32)
        total = total + tile.where(found > key, x, 0.0)
        at = at + tile.cast(found == key, int32)
    return tile.sum(above), tile.sum(total), tile.sum(at)


@tile.function
def place_of(p: Any, tokens: Any, row: Any, size: Any, key: Any, number: Any, block: int) -> Any:
    """The id of the token that is the `number`th of those at a key."""
    seen, place = whole(0), whole(p.shape[1])
    for start in tile.range(0, size, block):
        x, token = listed_at(p, tokens, row, start, size, block)
        at = tile.cast(tile.bitcast(x, int32) == key, int32)
        more = tile.sum(at)
        if (seen < number) & (seen + more >= number):
            here = (at > 0) & (tile.cumsum(at) + seen == number)
            place = tile.max(tile.where(here, token, whole(0)))
        seen = seen + more
    return place


@tile.function
def cut(
    p: Any, tokens: Any, row: Any, size: Any, k: Any, share: Any, total: Any, floor: Any, block: int
) -> Any:
    """(key, place): tokens above the key are kept, and those at it up to the place."""
    columns, none = p.shape[1], whole(0)
    rounds = tile.where(k > 0, whole(ROUNDS), none)
    lowest = search(p, tokens, row, size, floor, k, rounds, True, block)
    above, more, at = measure(p, tokens, row, size, lowest, block)
    most = tile.where(k > 0, k - above, whole(columns))
    more = more + tile.cast(most, float32) * tile.bitcast(lowest, float32)
    wanted = share * tile.where(k > 0, more, total)
    rounds = tile.where(share < 1.0, whole(ROUNDS), none)
    key = search(p, tokens, row, size, lowest, wanted, rounds, False, block)
    above, more, at = measure(p, tokens, row, size, key, block)
    need = tile.ceil((wanted - more) / tile.bitcast(key, float32))
    need = tile.cast(tile.minimum(tile.maximum(need, 1.0), 1.0 * columns), int32)
    need = tile.where(share < 1.0, need, most)
    kept = tile.where(key == lowest, tile.minimum(most, need), need)
    reach = tile.where(kept < at, size, none)
    return key, place_of(p, tokens, row, reach, key, kept, block)


# ---- the race --------------------------------------------------------------------------------


@tile.function
def words_of(seeds: Any, slot: Any, position: Any) -> Any:
    """The two words that tell the draws of a seed and a position from all others."""
    low, high = tile.load(seeds, (slot, 0), ()), tile.load(seeds, (slot, 1), ())
    number = tile.cast(position, uint32)
    first = mixed(mixed(low + number * word(GOLDEN)) + high)
    second = mixed(mixed(high + number * word(SILVER) + word(GOLDEN)) ^ (low + word(SILVER)))
    return first, second


@tile.function
def times(token: Any, first: Any, second: Any) -> Any:
    """An exponential time of each token: -log2(1 - u) of its uniform number u.

    1 - u is 2**-k w, and -log2(w) a polynomial of 1 - w that is 0 at 0; up to 1/2 that is u
    itself, so the smallest times are as exact as any. The same bits on every Target.
    """
    drawn = mixed(mixed(tile.cast(token, uint32) * word(GOLDEN) + first) ^ second)
    unit = tile.cast(drawn, float32) * 2.0**-32 + 2.0**-33
    bits = tile.bitcast(1.0 - unit, int32)
    w = tile.bitcast((bits & whole(0x7FFFFF)) | whole(0x3F000000), float32)  # within [1/2, 1)
    k = tile.maximum(whole(126) - (bits >> whole(23)), whole(0))
    t = tile.where(unit < 0.5, unit, 1.0 - w)
    sum = tile.full(t.shape, LOGARITHM[-1], float32)
    for factor in LOGARITHM[-2::-1]:
        sum = tile.multiply_add(sum, t, tile.full(t.shape, factor, float32))
    return tile.multiply_add(sum, t, tile.cast(k, float32))


@tile.function
def raced(early: Any, token: Any, keep: Any, before: Any) -> Any:
    """(how early, token) of the first to arrive in each lane, after a block's tokens."""
    best, winner = before
    sooner = keep & (early > best)
    return tile.where(sooner, early, best), tile.where(sooner, token, winner)


@tile.function
def nobody(lanes: int) -> Any:
    """What `raced` begins with: anybody is sooner."""
    return tile.full((lanes,), -1.0, float32), tile.full((lanes,), 0, int32)


@tile.function
def first_of(early: Any, winner: Any) -> Any:
    """(how early, which token) the first of all is."""
    top = tile.max(early)
    return top, tile.min(tile.where(early == top, winner, whole(LAST)))


@tile.function
def race(
    p: Any, row: Any, first: Any, last: Any, block: int, sure: Any, floor: Any, words: Any
) -> Any:
    """(how early, token) of the first of some blocks of a row; by probability where it is sure."""
    blocks = -(-p.shape[1] // block)
    best, winner = nobody(block)
    for number in tile.range(first, last, bounds=(0, blocks - 1)):
        start = number * block
        x = tile.fill(tile.load(p, (row, start), (block,)), 0.0)
        token = tile.cast(tile.arange(block), int32) + tile.cast(start, int32)
        early = tile.where(sure, x, tile.quick_divide(x, times(token, *words)))
        keep = tile.bitcast(x, int32) >= floor
        best, winner = raced(early, token, keep, (best, winner))
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
    size = tile.load(sizes, (row, 0), ())
    parts = tile.load(early, (row, 0), (early.shape[1],))
    _, token = first_of(parts, tile.load(winners, (row, 0), (early.shape[1],)))
    if size > 0:
        slot = tile.load(slots, (row,), ())
        words = words_of(seeds, slot, tile.load(positions, (row,), ()))
        share, k = tile.load(floats, (slot, top_p), ()), tile.load(limits, (row, 0), ())
        floor, total = least(floats, slot, min_p), tile.load(sums, (row, 0), ())
        key, place = cut(p, tokens, row, size, k, share, total, floor, block)
        best, winner = nobody(block)
        for start in tile.range(0, size, block):
            x, here = listed_at(p, tokens, row, start, size, block)
            found = tile.bitcast(x, int32)
            keep = (found > key) | ((found == key) & (here <= place))
            sooner = tile.quick_divide(x, times(here, *words))
            best, winner = raced(sooner, here, keep, (best, winner))
        _, token = first_of(best, winner)
    tile.store(out, (row,), tile.where(token < columns, token, whole(0)))  # p was not a number


# ---- around it -------------------------------------------------------------------------------


@Definition
def biased(x: Any, biases: Any, ids: Any, values: Any, slots: Any, *, block: int) -> None:
    """Logits x (rows, columns) with the biases of each row's slot: biases[slot] of ids, values."""
    rows, columns = x.shape
    row, start = tile.grid(rows, tile.ceil_divide(columns, block))
    out = tile.result(x.shape, float32)
    slot = tile.load(slots, (row,), ())
    here = tile.cast(tile.arange(block), int32) + tile.cast(start * block, int32)
    y = tile.load(x, (row, start * block), (block,))
    for number in tile.range(0, tile.load(biases, (slot,), ())):
        token, value = (tile.load(of, (slot, number), ()) for of in (ids, values))
        y = y + tile.where(here == token, value, 0.0)
    tile.store(out, (row, start * block), y)


@Definition
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
        tile.store(out, (row, number), tile.minimum(at, whole(columns - 1)))  # if all are NaN
