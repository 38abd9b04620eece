"""What attention kernels agree on: sizes, options, and how their parameters lie.

Axes are called b (batch), h (heads), t (tokens) and d (width). A matrix of tokens may lie in any
order of the first three; d is dense. Invariant: `parameters` is the order of every attention
kernel's parameters, and what the Graph's `attention` and `attention_backward` take and give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import tile
from ...core.dtype import DType, bfloat16, float16
from ...core.errors import InternalError
from ...ir.symbol import Size, high, low
from ...ir.types import Memory

PLAIN = ("bhtd", "bhtd", "bhtd", "bhtd")
ROWS = ("lse", "delta")  # what there is one of for each query
FORWARD, GRADIENTS = ("out", "lse"), ("dq", "dk", "dv")  # results
STARTS = ("query_starts", "key_starts")  # extras of sequences that lie one after another
Band = tuple[Size | None, Size | None]


@dataclass(frozen=True)
class AttentionShape:
    """One attention: softmax(scale q k^T, seen within the band and as extras say) v. What the types
    of the Graph's `attention` refuse does not come here."""

    batch: Size
    heads: int
    key_heads: int
    queries: Size
    keys: Size
    width: int
    value_width: int
    dtype: DType
    scale: float
    band: Band = (None, None)  # key number - query number lies within
    softcap: float = 0.0
    dropout: float = 0.0
    extras: tuple[str, ...] = ()  # names of the further inputs
    orders: tuple[str, str, str, str] = PLAIN  # axes of q, k, v and the result, as they lie

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.key_heads

    @property
    def packed(self) -> bool:
        """Whether sequences lie one after another."""
        return "query_starts" in self.extras

    def side(self, of_keys: bool) -> tuple[Size, int, int]:
        """Tokens, heads and query heads that share one of these: of keys, or of queries."""
        if of_keys:
            return self.keys, self.key_heads, self.group
        return self.queries, self.heads, 1

    def last_first(self, of_keys: bool) -> bool:
        """Whether the last of these tokens begin first: queries that see most."""
        return not of_keys and self.band[1] is not None

    def order(self, name: str) -> str:
        """The axes of q, k, v, out or of a gradient, as they lie."""
        return self.orders[("q", "k", "v", "out").index(name.removeprefix("d"))]

    def lying(self, name: str, b: Any, h: Any, t: Any, d: Any) -> tuple[Any, ...]:
        """What belongs to each axis, in the order of q, k, v, out or of a gradient."""
        of = {"b": b, "h": h, "t": t, "d": d}
        return tuple(of[axis] for axis in self.order(name))

    def sizes(self, name: str) -> tuple[Size, ...]:
        """The shape of q, k, v, out or of a gradient, in its order; of lse and delta."""
        if name in ROWS:
            return (self.batch, self.heads, self.queries)
        tokens, heads, _ = self.side(name[-1] in "kv")
        return self.lying(name, self.batch, heads, tokens, self.columns(name))

    def columns(self, name: str) -> int:
        """The width of q, k, v, out or of a gradient."""
        return self.width if name[-1] in "qk" else self.value_width

    def sides(self, turned: bool) -> Band:
        """Between which bounds key number - query number lies; the other way round if `turned`."""
        if not turned:
            return self.band
        least, most = self.band
        return None if most is None else -most, None if least is None else -least

    def ends(self, block: int) -> bool:
        """Whether some query that matters could see keys of a block past the last one."""
        if {"key_lengths", "key_starts"} & set(self.extras):
            return True
        lowest, highest = self.band
        if isinstance(self.keys, int) and self.keys % block == 0:
            return lowest is not None and high(self.queries + lowest - self.keys) > 0
        return highest is None or low(self.keys - (highest + self.queries)) < 0


def first_wrong(*wrong: tuple[Any, str]) -> str:
    """The first reason whose condition holds; '' where none does."""
    return next((why for is_wrong, why in wrong if is_wrong), "")


def refuse(where: str, why: str, *given: Any) -> None:
    """An error that says why something cannot be right, if there is a reason."""
    if why:
        raise InternalError(where, f"{why}: {given}")


def unit_why_not(x: AttentionShape, forward: bool = True) -> str:
    """Why no kernel on matrix units can be right, or none that goes forward; '' where one can."""
    odd = [w for w in (x.width, x.value_width) if w % 8 or not 8 <= w <= 256]
    return first_wrong(
        (x.dtype not in (bfloat16, float16), f"the matrix units take no {x.dtype}"),
        (odd, "widths are multiples of 8 up to 256"),
        (forward and not 0 < x.scale < math.inf, "the scale is not above 0"),
        (forward and low(x.keys) < 1, "there may be no keys"),
    )


Parameters = list[tuple[str, Memory]]


def parameters(
    x: AttentionShape, more: Sequence[Memory] = (), results: Sequence[str] = FORWARD
) -> Parameters:
    """Names and types of a kernel's parameters: q, k, v (for gradients also dout, lse and delta),
    the extras, results."""

    def named(names: Sequence[str], use: str) -> Parameters:
        dtypes = [x.dtype.wide if name in ROWS else x.dtype for name in names]
        return [(n, Memory(x.sizes(n), dtype, use=use)) for n, dtype in zip(names, dtypes)]

    given = ("q", "k", "v") if "out" in results else ("q", "k", "v", "dout", *ROWS)
    return [*named(given, "value"), *zip(x.extras, more), *named(results, "result")]


def swizzled(dtype: DType, *shape: int) -> Any:
    """A place in shared memory as matrix units that run beside the threads read it."""
    row = shape[-1] * dtype.size
    layout = next(f"swizzle{span}" for span in (128, 64, 32) if row % span == 0)
    return tile.shared(shape, dtype, layout)
