"""What stands in the holes of attention's template, in the tile language: score, seen, weight.

A block of scores s has queries from `row` on and keys from `key` on; where it is `turned` keys are
its rows. `score` gives the exponent's argument but for `factor`, `hidden` what counts of it, `kept`
what dropout leaves of the weights, `begun` the sum that a row has before its first key. Scale,
softcap, bias, slopes, masks, sinks and dropout are named here and in no kernel. Invariant: all
kernels that fill their holes here compute one function, whatever their tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.dtype import bool_, float32, int32, int64, uint32
from ...ir.symbol import high
from ...tile.trace import tracer
from ..random import random_bits
from .shape import AttentionShape
from .softmax import LANES, LOG2_E, and_masks, box_mask, clamped, finished, first_of, line, log_sums

ADDED = {"bias", "slopes"}  # what scores grow by


@dataclass(frozen=True)
class Holes:
    """The holes of one attention, for one batch and head."""

    x: AttentionShape
    memory: Mapping[str, Any]  # parameters of the kernel, the extras among them
    batch: Any
    head: Any
    turned: bool = False
    query_start: Any = 0  # the token of query 0, of sequences that lie one after another
    key_start: Any = 0
    # columns that are compared at once; 0: all, on vectors (a true tanh, bias and mask as they lie)
    lanes: int = LANES

    @property
    def unit(self) -> float:
        """What `bent` scores are multiplied by."""
        return self.x.softcap or self.x.scale

    @property
    def factor(self) -> float:
        """What scores are multiplied by in the exponent of 2."""
        return LOG2_E if self.summed else self.unit * LOG2_E

    @property
    def summed(self) -> bool:
        """Whether scores are multiplied by the unit: what is added is none of it, or it turns."""
        return bool(ADDED & set(self.x.extras)) or self.unit <= 0

    @property
    def changed(self) -> bool:
        """Whether scores are more than raw ones, where they are seen."""
        return bool(self.x.softcap) or self.summed

    @property
    def limit(self) -> Any:
        """How many keys there are."""
        keys = self.x.keys
        if "key_lengths" not in self.memory:
            return keys
        length = tile.cast(self.memory["key_lengths"][self.batch], int64)
        return tile.index(clamped(length, 0, keys), 0, high(keys))

    def tokens(self, name: str, token: Any, shape: tuple[int, ...], column: int = 0) -> Any:
        """Rows (tokens) and columns of q, k, v, the result or a gradient, from a token on."""
        head, start = self.head, self.query_start
        if name[-1] in "kv":
            head, start = head // self.x.group, self.key_start
        first = token + start
        rows, columns = slice(first, first + shape[0]), slice(column, column + shape[1])
        return self.memory[name][self.x.lying(name, self.batch, head, rows, columns)]

    # ---- scores -----------------------------------------------------------------------------

    def bent(self, s: Any) -> Any:
        """Raw scores under the soft limit, if there is one."""
        if not self.x.softcap:
            return s
        factor = self.x.scale / self.x.softcap
        if not self.lanes:
            return tile.tanh(s * factor)
        # tanh(y) = 1 - 2 / (e**(2 y) + 1), off by 2**-22 or so
        inverse = tile.quick_reciprocal(tile.quick_exp2(s * (2 * factor * LOG2_E)) + 1.0)
        return tile.multiply_add(inverse, -2.0, 1.0)

    def slope(self, bent: Any) -> Any | None:
        """By what `bent` scores grow with raw ones, but for the scale; None where that is 1."""
        return tile.multiply_add(bent, -bent, 1.0) if self.x.softcap else None

    def score(self, s: Any, row: Any, key: Any) -> Any:
        """Scores with soft limit, bias and slopes, but for the factor of the exponent."""
        return self.raised(self.bent(s), row, key)

    def raised(self, s: Any, row: Any, key: Any) -> Any:
        """Scores under the soft limit, with bias and slopes."""
        more, dtype = self.x.extras, self.x.dtype.wide
        if "bias" in more:
            bias = tile.cast(self.extra_block("bias", s.shape, row, key), dtype)
            s = tile.multiply_add(s, self.unit, bias)
        elif self.summed:
            s = s * self.unit
        if "slopes" in more:
            slope = tile.cast(self.memory["slopes"][self.head], dtype)
            s = tile.multiply_add(tile.cast(self.apart(s.shape, row, key), dtype), slope, s)
        return s

    def apart(self, shape: tuple[int, ...], row: Any, key: Any) -> Any:
        """Number of the key - number of the query."""
        start = key - row if self.turned else row - key
        down, across = (line(shape[0]) + tile.cast(start, int32))[:, None], line(shape[1])
        return down - across if self.turned else across - down

    # ---- what is seen -----------------------------------------------------------------------

    def hidden(self, s: Any, row: Any, key: Any, limit: Any, ends: bool) -> Any:
        """Scores, -inf where a query does not see a key; those past the limit are looked for where
        `ends`."""
        seen = self.inside(s.shape, row, key, limit - key if ends else None)
        if "mask" in self.x.extras:
            seen = and_masks(seen, self.extra_block("mask", s.shape, row, key))
        return s if seen is None else tile.where(seen, s, -tile.INF)

    def inside(self, shape: tuple[int, ...], row: Any, key: Any, end: Any | None) -> Any | None:
        """Which pairs lie within the band, and before the end of keys; None where all do.

        Rows and columns count from the block's corner. Columns are compared some lanes at a time
        with limits that move, so that no thread keeps the numbers of all its columns.
        """
        lowest, highest = self.sides(row, key)
        rows, columns = shape
        lanes = self.lanes or columns
        pieces = columns // lanes
        last = None if self.turned else end
        seen: Any | None = None
        if any(side is not None for side in (lowest, highest, last)):
            across, down = line(lanes)[None, None, :], line(rows)[:, None, None]
            steps = (line(pieces) * lanes)[None, :, None] if pieces > 1 else None

            def limit(at: Any, moving: bool) -> Any:
                """A limit as it is seen from every piece."""
                found = tile.cast(at, int32)
                found = down + found if moving else found
                return found if steps is None else found - steps

            if highest is not None:
                seen = across <= limit(highest, True)
            if lowest is not None:
                seen = and_masks(seen, limit(lowest, True) <= across)
            if last is not None:
                seen = and_masks(seen, across < limit(last, False))
            seen = tile.reshape(tile.broadcast(seen, (rows, pieces, lanes)), shape)
        below = None if end is None or not self.turned else first_of(rows, end)
        return seen if below is None else and_masks(seen, tile.broadcast(below[:, None], shape))

    def sides(self, row: Any, key: Any) -> tuple[Any | None, Any | None]:
        """The least and the most that column - row of a block may be; None is no limit."""
        apart = key - row if self.turned else row - key
        sides = self.x.sides(self.turned)
        return tuple(None if s is None else apart + s for s in sides)  # type: ignore[return-value]

    # ---- weights ----------------------------------------------------------------------------

    def drawn(self, shape: tuple[int, ...], row: Any, key: Any) -> Any:
        """Which weights dropout keeps: the same in every kernel."""
        x, keys = self.x, self.x.keys
        row, key = row + self.query_start, key + self.key_start
        lane = self.batch * x.heads + self.head
        start = (lane * x.queries + row) * keys + key
        steps = (1, keys) if self.turned else (keys, 1)
        down, across = (tile.arange(size) * step for size, step in zip(shape, steps))
        linear = down[:, None] + across + start
        seed, offset = (tile.load(self.memory[name], (), ()) for name in ("key", "offset"))
        drawn = random_bits(seed, offset, linear)
        least = int(float(float32.numpy.type(x.dropout)) * (1 << 24))  # the rate in 24 bits
        return (drawn >> tile.full((), 8, uint32)) > least

    def weight(self, p: Any, row: Any, key: Any) -> Any:
        """Weights, 0 where dropout drops them."""
        return tile.where(self.drawn(p.shape, row, key), p, 0.0) if self.x.dropout else p

    def kept(self, shape: tuple[int, ...], row: Any, key: Any) -> Any | None:
        """What weights are multiplied by, and what comes back to them; None for 1."""
        if not self.x.dropout:
            return None
        grown = tile.full((), self.grown, self.x.dtype.wide)
        return tile.where(self.drawn(shape, row, key), grown, 0.0)

    def known(self, row: Any, count: int, stop: Any | None = None) -> list[Any]:
        """-lse in units of log 2 and delta of some queries; exp2 of anything plus the first is 0
        from the query `stop` on, and where a query sees no key."""
        index = (self.batch, self.head, row + self.query_start)
        inside = None if stop is None else first_of(count, stop - row)
        lse, delta = (
            tile.fill(tile.load(self.memory[name], index, (count,), mask=inside), 0.0)
            for name in ("lse", "delta")
        )
        some = and_masks(inside, lse > -tile.INF)
        return [tile.where(some, lse * -LOG2_E, -tile.INF), delta]

    @property
    def grown(self) -> float:
        """What is left of the weights is multiplied by this."""
        return 1 / (1 - self.x.dropout)

    def begun(self) -> Any | None:
        """The exponent of 2 that every row's sum begins with; None where there are no sinks."""
        if "sinks" not in self.x.extras:
            return None
        return tile.cast(self.memory["sinks"][self.head], self.x.dtype.wide) * LOG2_E

    def ended(self, largest: Any, sums: Any, grown: float = 1.0) -> tuple[Any, Any]:
        """What sums over values are multiplied by at the end of rows, and log-sum-exps, from the
        rows' largest scores (-inf where nothing was seen) and sums."""
        over, sums, top = finished(sums, largest * self.factor, self.begun(), grown)
        return over, log_sums(sums, top)

    # ---- bias and mask ----------------------------------------------------------------------

    def extra_block(self, name: str, shape: tuple[int, ...], row: Any, key: Any) -> Any:
        """A block of the bias or mask, 0 beyond its ends."""
        memory, whole = self.memory[name], self.memory[name].type.shape
        starts = (self.batch, self.head, row + self.query_start, key + self.key_start)
        index = [0 if size == 1 else at for size, at in zip(whole, starts)]
        turns = self.turned and self.lanes > 0
        last_axes = (3, 2) if turns else (2, 3)
        axes = tuple(a for a in last_axes if whole[a] != 1)
        given = shape[::-1] if turns is not self.turned else shape
        sizes = tuple(n for n, a in zip(given, last_axes) if a in axes)
        if any(isinstance(i, int) and high(n) <= i for i, n in zip(index, whole)):
            return tile.full(shape, 0, memory.dtype)  # all of it lies beyond
        mask = None
        if tracer().trusts:  # else the language finds the ends
            there = [first_of(n, memory.shape[a] - index[a]) for n, a in zip(sizes, axes)]
            mask = box_mask(*[None, None, *there][-2:])
        found = tile.fill(tile.load(memory, tuple(index), sizes, axes=axes, mask=mask), 0)
        if axes == last_axes[:1]:
            found = found[:, None]
        if given is shape:
            return tile.broadcast(found, shape)
        return tile.broadcast(turned(found) if axes else found, shape)


def turned(x: Any) -> Any:
    """A tile turned, in registers: as float32, which a mask becomes too."""
    if x.ndim == 1 or 1 in x.shape:
        return tile.reshape(x, (*x.shape[::-1], 1)[:2])
    if x.dtype is bool_:
        return tile.where(x, 1.0, 0.0).T != 0.0
    return (tile.cast(x, float32) if x.dtype.bits < 32 else x).T
