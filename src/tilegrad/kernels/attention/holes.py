"""What stands in the holes of attention's template, in the tile language: score, seen, weight.

A block of scores s has queries from `row` on and keys from `key` on; where it is `turned` keys are
its rows. `score` gives the exponent's argument but for `factor`, `seen` which keys count, `weight`
what dropout leaves of the weights. Invariant: all kernels that fill their holes here compute one
function, whatever their tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.dtype import float32, int32, int64, uint32
from ...ir.symbol import high
from ...tile.value import TileValue, index_of, tracer
from . import dropout
from .parts import LOG2_E
from .shape import AttentionShape

EXTRAS = ("bias", "mask", "slopes", "sinks", "key_lengths", "key", "offset")


@dataclass(frozen=True)
class Holes:
    """The holes of one attention, for one batch and head."""

    x: AttentionShape
    extras: Mapping[str, Any]
    batch: Any
    head: Any
    turned: bool = False

    @property
    def factor(self) -> float:
        """What scores are multiplied by in the exponent of 2."""
        if self.extras.keys() & {"bias", "slopes"}:
            return LOG2_E
        return (self.x.softcap or self.x.scale) * LOG2_E

    @property
    def limit(self) -> Any:
        """How many keys there are."""
        if "key_lengths" not in self.extras:
            return index_of(self.x.keys)
        length = tile.cast(tile.load(self.extras["key_lengths"], (self.batch,), ()), int64)
        length = tile.maximum(tile.minimum(length, index_of(self.x.keys)), 0)
        return tile.index(length, 0, high(self.x.keys))

    # ---- the holes --------------------------------------------------------------------------

    def score(self, s: Any, row: Any, key: Any) -> Any:
        """Scores with soft limit, bias and slopes, but for the factor of the exponent."""
        x, more = self.x, self.extras.keys() & {"bias", "slopes"}
        if x.softcap:
            s = quick_tanh(s, x.scale / x.softcap)
        if more:
            s = s * (x.softcap or x.scale)
        if "bias" in more:
            s = s + tile.cast(self.beside("bias", s.shape, row, key), float32)
        if "slopes" in more:
            i, j = self.places(s.shape, row, key)
            slope = tile.load(self.extras["slopes"], (self.head,), ())
            s = tile.multiply_add(tile.cast(j - i, float32), slope, s)
        return s

    def bent(self, s: Any) -> Any:
        """By what a soft limit's result grows with its score, but for the scale."""
        t = quick_tanh(s, self.x.scale / self.x.softcap)
        return tile.multiply_add(t, -t, 1.0)

    def seen(self, shape: tuple[int, ...], row: Any, key: Any, limit: Any, ends: bool) -> Any:
        """Which keys each query sees; those past the limit are looked for where `ends`."""
        i, j = self.places(shape)  # of the block: what moves with it are the limits
        tests = []
        lowest, highest = (None if s is None else index_of(s) for s in self.x.band)
        if highest is not None:
            tests.append(j <= i + tile.cast(row + highest - key, int32))
        if lowest is not None:
            tests.append(i + tile.cast(row + lowest - key, int32) <= j)
        if ends:
            tests.append(j < tile.cast(limit - key, int32))
        if "mask" in self.extras:
            tests.append(self.beside("mask", shape, row, key))
        seen = tests[0]
        for test in tests[1:]:
            seen = seen & test
        return seen

    def weight(self, p: Any, row: Any, key: Any) -> Any:
        """Weights, 0 where dropout drops them; the rest is to grow by `grown`."""
        x = self.x
        if not x.dropout:
            return p
        b = tracer("attention").builder
        i, j = self.places(p.shape, row, key)
        lane = self.batch * x.heads + self.head
        first = (lane * index_of(x.queries)) * index_of(x.keys)
        linear = tile.cast(i, int64) * index_of(x.keys) + tile.cast(j, int64) + first
        seed, offset = (tile.load(self.extras[name], (), ()) for name in ("key", "offset"))
        drawn = TileValue(dropout.bits(b, seed.node, offset.node, linear.node))
        kept = (drawn >> tile.full((), 8, uint32)) > dropout.threshold(x.dropout)
        return tile.where(kept, p, 0.0)

    @property
    def grown(self) -> float:
        """What is left of the weights is multiplied by this."""
        return 1 / (1 - self.x.dropout)

    # ---- where ------------------------------------------------------------------------------

    def places(self, shape: tuple[int, ...], row: Any = 0, key: Any = 0) -> tuple[Any, Any]:
        """(numbers of queries, numbers of keys) of a block, as tiles that broadcast to it."""
        sizes = shape[::-1] if self.turned else shape
        i, j = (
            tile.arange(0, size, int32) + tile.cast(start, int32)
            for size, start in zip(sizes, (row, key))
        )
        return (i[None, :], j[:, None]) if self.turned else (i[:, None], j[None, :])

    def beside(self, name: str, shape: tuple[int, ...], row: Any, key: Any) -> Any:
        """A block of the bias or mask, 0 beyond its ends."""
        memory = self.extras[name]
        whole = [isinstance(size, int) and size == 1 for size in memory.type.shape]
        index = [0 if one else at for one, at in zip(whole, (self.batch, self.head, row, key))]
        walked = (3, 2) if self.turned else (2, 3)
        axes = tuple(a for a in walked if not whole[a])
        sizes = tuple(n for n, a in zip(shape, walked) if not whole[a])
        if any(isinstance(i, int) and high(n) <= i for i, n in zip(index, memory.type.shape)):
            return tile.full(shape, 0, memory.dtype)  # all of it lies beyond
        found = tile.load(memory, tuple(index), sizes, axes=axes)
        for _ in sizes:
            found = tile.fill(found, 0)
        if len(axes) == 1:
            found = found[:, None] if axes[0] == walked[0] else found[None, :]
        return tile.broadcast(found, shape)


def quick_tanh(x: Any, factor: float) -> Any:
    """tanh(factor * x) = 1 - 2 / (e**(2 factor x) + 1), off by 2**-22 or so."""
    inverse = tile.quick_reciprocal(tile.quick_exp2(x * (2 * factor * LOG2_E)) + 1.0)
    return tile.multiply_add(inverse, -2.0, 1.0)


__all__ = ["EXTRAS", "Holes", "quick_tanh"]
