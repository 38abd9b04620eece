"""The holes of attention on CPUs: what is done to scores and probabilities, unknown to kernels.

A kernel makes raw scores (products of queries and keys) and hands Tiles of them to `score`, with
`Pairs` that say which queries and keys a Tile is of; it hands probabilities to `weight`, and takes
the maximum and the sum that a row begins with from `start`. Scores are powers of two: times log2 e.
Scale, cap, bias, slopes, masks, bands, sinks and dropout are named here and nowhere in a kernel.

Invariant: what is not seen is -inf; `slope` is the derivative of what `score` does to raw scores
(but for the factor that `first` has).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from ...core.dtype import float32, int32
from ...ir.node import Node
from ...ir.symbol import Size
from ...tile.build import BodyBuilder
from ..attention.dropout import keep as dropout_keep
from ..attention.shape import AttentionShape

LOG2_E = 1.4426950408889634


class Attention(Protocol):
    """Who knows the attention: a program may find out more of it."""

    x: AttentionShape


class Pairs(Protocol):
    """Which queries and keys a Tile of scores is of."""

    head: Size

    def extra(self, name: str) -> Node:
        """What an input has for them: a bias, or a mask."""

    def apart(self) -> tuple[Node, Size]:
        """Number of the key - number of the query: a Tile of int32, and what all have in common."""

    def limits(self) -> list[Node] | None:
        """Conditions that hold where a key is seen; None where the band says that."""


class Holes:
    """What one attention fills the holes with."""

    def __init__(self, b: BodyBuilder, of: Attention, memory: Mapping[str, Node]) -> None:
        x = of.x
        self.b, self.of, self.memory, self.sum = b, of, memory, x.sum_dtype
        # What raw scores are multiplied by before all else.
        self.first = x.scale / x.softcap if x.softcap else x.scale * LOG2_E

    @property
    def x(self) -> AttentionShape:
        """The attention, as far as a program knows it."""
        return self.of.x

    @property
    def plain(self) -> bool:
        """Whether a score is `first`, a positive number, times the raw one, where it is seen."""
        x = self.x
        return not x.softcap and x.scale > 0 and not {"bias", "slopes"} & {*x.extras}

    @property
    def everywhere(self) -> bool:
        """Whether any Tile may be changed, not only those that the limits of keys cut."""
        return not self.plain or "mask" in self.x.extras

    @property
    def bent(self) -> bool:
        """Whether `slope` is not 1."""
        return bool(self.x.softcap)

    def number(self, value: float) -> Node:
        """A number of the dtype of sums."""
        return self.b.constant(value, self.sum)

    def start(self, head: Size, counts: Node | None = None) -> tuple[Node, Node]:
        """The maximum and the sum that a row begins with; where `counts`, if that is given."""
        b = self.b
        most, total = self.number(-math.inf), self.number(0.0)
        if "sinks" not in self.x.extras:
            return most, total
        found = b.cast(b.load(self.memory["sinks"], (head,)), self.sum)
        own = b.apply("multiply", found, self.number(LOG2_E))
        there = b.apply("not_equal", found, self.number(-math.inf))
        if counts is not None:
            there = b.apply("bit_and", there, counts)
            own = b.apply("where", there, own, most)
        return own, b.apply("where", there, self.number(1.0), total)

    def score(
        self,
        s: Node,
        at: Pairs,
        scaled: bool = False,
        keep: Callable[[Node], None] = lambda bend: None,
    ) -> Node:
        """Scores from raw ones (`scaled`: times `first`). `keep` gets what `slope` asks for."""
        b, x = self.b, self.x
        if not scaled:
            s = b.apply("multiply", s, self.number(self.first))
        if x.softcap:
            s = b.apply("tanh", s)
            keep(s)
            s = b.apply("multiply", s, self.number(LOG2_E * x.softcap))
        if "bias" in x.extras:
            s = b.apply("multiply_add", b.cast(at.extra("bias"), self.sum), self.number(LOG2_E), s)
        if "slopes" in x.extras:
            slope = b.cast(b.load(self.memory["slopes"], (at.head,)), self.sum)
            slope = b.apply("multiply", slope, self.number(LOG2_E))
            tile, ahead = at.apart()
            distance = b.apply("add", tile, b.cast(b.index(ahead), int32))
            s = b.apply("multiply_add", b.cast(distance, self.sum), slope, s)
        return s

    def hidden(self, s: Node, at: Pairs) -> Node:
        """Scores, -inf where a key is not seen."""
        seen = at.extra("mask") if "mask" in self.x.extras else None
        limits = at.limits()
        for mask in self._band(at) if limits is None else limits:
            seen = self.b.logical_and(seen, mask)
        return s if seen is None else self.b.apply("where", seen, s, self.number(-math.inf))

    def _band(self, at: Pairs) -> list[Node]:
        b, (low, high) = self.b, self.x.band
        tile, ahead = at.apart()
        found = []
        if high is not None:
            found.append(b.apply("less_equal", tile, b.cast(b.index(high - ahead), int32)))
        if low is not None:
            found.append(b.apply("less_equal", b.cast(b.index(low - ahead), int32), tile))
        return found

    def slope(self, bend: Node) -> Node:
        """The derivative of scores by raw ones, from what `score` kept."""
        b = self.b
        return b.apply("subtract", self.number(1.0), b.apply("multiply", bend, bend))

    def weight(self, linear: Callable[[], Node]) -> Node | None:
        """What probabilities are multiplied by; `linear` numbers them as they lie in (batch, heads,
        queries, keys)."""
        b, rate = self.b, self.x.dropout
        if rate == 0.0:
            return None
        key, offset = (b.load(self.memory[name], ()) for name in ("key", "offset"))
        keep = dropout_keep(b, key, offset, linear(), rate)
        keep = b.apply("not_equal", keep, b.constant(0, float32))
        return b.apply("where", keep, self.number(1 / (1 - rate)), self.number(0.0))
