"""The state of a paged cache: keys and values of all layers, tables and lengths of requests.

A jitted step takes the cache as an argument; `append` writes the new tokens of a layer into their
pages, `attend` reads them, `step` does both. They name requests by `table`, `lengths` and
`query_starts`, as `tensor.paged` explains them: rows of the cache's own `table` and `lengths`, or
others.
On a CPU pages that no token was written to cost no memory, so a cache may be made for more than
is used. Invariant: each layer's keys and values are one Buffer, from the first step to the last;
what would copy one is an error.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from ..core.dtype import DType, bfloat16, float32, int8, int32
from ..core.errors import ShapeError, StateError, UserError
from ..tensor.creation import tensor, zeros_of_own
from ..tensor.paged import paged_append, paged_attention, paged_step
from ..tensor.placement import default_device, use
from ..tensor.tensor import Tensor, mode

LABEL = "paged cache"  # of its Buffers


class PagedCache:
    """Keys and values in pages; `requests` rows of a table say which pages are whose."""

    never_copied = ("keys.", "values.")  # jit writes these in place, or it is an error

    def __init__(
        self,
        layers: int,
        pages: int,
        page: int,
        key_heads: int,
        width: int,
        *,
        requests: int,
        most_pages: int,
        value_width: int | None = None,
        dtype: DType = bfloat16,
        scales: Any = (1.0, 1.0),
        device: Any = None,
    ) -> None:
        """Keys and values of 8 bits (float8_e4m3, int8) have `scales`: (2,) for keys and values, or
        (layers, 2, key_heads), or what broadcasts to that once it has axes for layers and heads."""
        if not (dtype.is_float or dtype is int8):
            raise UserError(
                "keys and values are not kept in this dtype",
                op="PagedCache",
                expected="floats or int8",
                got=dtype,
            )
        lead, values = (pages, key_heads, page), width if value_width is None else value_width
        device = default_device() if device is None else use(device, "PagedCache")
        self.pages, self.page = pages, page
        self.most_pages, self.requests = most_pages, requests
        self.keys, self.values = (
            [zeros_of_own((*lead, last), dtype, device, LABEL) for _ in range(layers)]
            for last in (width, values)
        )
        self.table = zeros_of_own((requests, most_pages), int32, device, LABEL)
        self.lengths = zeros_of_own((requests,), int32, device, LABEL)
        self.kind = str(dtype)  # all that pages depend on besides what is written to them
        self.scales: list[Tensor] = []  # (2, key heads) of each layer kept in 8 bits
        if dtype.bits == 8:
            every = _scales(scales, layers, key_heads)
            self.kind += f" {blake2b(every.tobytes(), digest_size=16).hexdigest()}"
            self.scales = [tensor(one, dtype=float32, device=device) for one in every]

    def __repr__(self) -> str:
        layers = len(self.keys)
        kind = self.keys[0].node.type if layers else "nothing"
        return f"<paged cache: {layers} layers of {kind}, {self.requests} requests>"

    @property
    def device(self) -> str:
        """Where the cache lives."""
        return self.table.device

    @property
    def bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.numel() * t.dtype.size for t in (*self.keys, *self.values))

    def tensors(self) -> dict[str, Tensor]:
        """All of its state by name, for `jit`."""
        found = {"table": self.table, "lengths": self.lengths}
        of_layers = {"keys": self.keys, "values": self.values, "scales": self.scales}
        for name, several in of_layers.items():
            found.update({f"{name}.{i}": t for i, t in enumerate(several)})
        return found

    def scales_of(self, layer: int) -> Tensor | None:
        """What a layer's keys and values are multiplied with, if they have 8 bits."""
        return self.scales[layer] if self.scales else None

    def append(self, layer: int, q: Any, k: Any, v: Any, *where: Any, **rotation: Any) -> Tensor:
        """Put a layer's new keys and values, rotated, into their pages; gives q rotated. `where`
        are table, lengths and query_starts; how they turn (frequencies, interleaved, factor) is as
        `paged_append` says."""
        return self._changed(paged_append, layer, (q, k, v), where, rotation)

    def step(self, layer: int, q: Any, k: Any, v: Any, *where: Any, **how: Any) -> Tensor:
        """`append` and `attend` at once: attention of the new tokens; see `paged_step`."""
        return self._changed(paged_step, layer, (q, k, v), where, how)

    def _changed(self, function: Any, layer: int, new: Any, where: Any, how: Any) -> Tensor:
        """The first result of a function whose others are a layer's keys and values from now on."""
        if mode.trace is None:
            raise StateError(
                "a cache is appended to within a jitted function only",
                op=function.__name__,
                expected="a step that is jitted and takes the cache as an argument",
                hint="outside of one the whole cache would be copied",
            )
        cache = self.keys[layer], self.values[layer]
        found, *after = function(*new, *cache, *where, scales=self.scales_of(layer), **how)
        for before, now in zip(cache, after):
            before.assign(now)
        return found

    def attend(self, layer: int, q: Any, *where: Any, **how: Any) -> Tensor:
        """Attention of q (tokens, heads, width) over a layer's pages; `where` as for `append`,
        options as `paged_attention` has them."""
        cache = self.keys[layer], self.values[layer]
        return paged_attention(q, *cache, *where, scales=self.scales_of(layer), **how)


def _scales(given: Any, layers: int, key_heads: int) -> np.ndarray[Any, Any]:
    """(layers, 2, key_heads), as they are given or broadcast."""
    try:
        found = np.asarray(given, np.float32)
        found = found[:, None] if found.shape == (2,) else found
        found = np.broadcast_to(found, (layers, 2, key_heads))
    except (TypeError, ValueError, OverflowError):
        raise ShapeError(
            "the scales do not fit",
            op="PagedCache",
            expected=f"(2,) or ({layers}, 2, {key_heads}) numbers",
            got=repr(given)[:80],
        ) from None
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise UserError(
            "a scale is no positive number", op="PagedCache", expected="above 0", got=found.min()
        )
    return found


__all__ = ["PagedCache"]
