"""Tensors over weights that a file stores quantised: `unpack` of its bytes, which stay there.

`stored` makes one; a trace takes the bytes for its input and unpacks them inside, so that the
compiler sees what reads them and chooses. Nothing here knows of a machine: what its kernels read is
prepared once, when something runs (see `runtime.prepared`). Invariant: the bytes are only read; a
Tensor that is assigned another value lets go of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from ..core.dtype import DType, float32, uint8
from ..core.errors import DTypeError, ShapeError
from ..core.format import Format
from ..graph import build
from ..runtime.prepared import Source
from .placement import is_stored, values
from .tensor import Tensor, wrap

Array = np.ndarray[Any, Any]


class StoredWeights(Protocol):
    """What `stored` takes: `exchange.Stored`, or anything with rows of a Format's bytes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns), or (experts, rows, columns)."""

    @property
    def format(self) -> Format:
        """How rows are stored."""

    @property
    def raw(self) -> Array:
        """Bytes (..., bytes of a row), with the axes of the shape before."""

    def drop(self) -> None:
        """Let the system take back the pages of the source."""


def stored(weights: StoredWeights, dtype: DType = float32) -> Tensor:
    """Weights (rows, columns) of a file, or (experts, rows, columns), as a Tensor; their bytes stay
    where they are."""
    form = weights.format
    if not form.quantised:
        raise DTypeError("these weights are not quantised", op="stored", got=form)
    if len(weights.shape) not in (2, 3):
        raise ShapeError(
            "weights are (rows, columns), of experts (experts, rows, columns)",
            op="stored",
            expected="two or three axes",
            got=weights.shape,
        )
    shape = (*weights.shape[:-1], form.row_bytes(weights.shape[-1]))
    raw = build.input_(shape, uint8)

    def read() -> Array:
        return weights.raw.reshape(-1, shape[-1])

    values[raw] = Source(shape, read, weights.drop, getattr(weights, "name", ""))
    return wrap(build.unpack(raw, form.name, dtype))


def stored_in(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of some Tensors that are weights of a file."""
    return [t for t in tensors if is_stored(t._node)]


def bytes_to_prepare(tensors: Iterable[Tensor], device: str) -> int:
    """Bytes that weights of files among some Tensors take on a device, prepared."""
    from ..compiler.weights import bytes_to_prepare as needed

    return sum(needed(t._node.attrs["format"], t.shape, device) for t in stored_in(tensors))


def multiplies_groups(form: str, given: str, sizes: tuple[int, ...], device: str) -> bool:
    """Whether a device multiplies rows rounded to a Format with weights (experts, rows, columns) as
    they are stored in another."""
    from ..compiler.weights import multiplies_groups as multiplies

    return multiplies(form, given, sizes, device)


__all__ = ["StoredWeights", "bytes_to_prepare", "multiplies_groups", "stored", "stored_in"]
