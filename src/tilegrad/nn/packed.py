"""Layers over quantised weights: `PackedLinear`, `PackedEmbedding`, and `joint` products.

Their weights are a `Packed` (see `tensor.quantised`), whose parts are buffers here: state for
`jit`, but left out of checkpoints and never cast. Layers that share one Packed each have some of
its rows; `joint` computes several of them in one product, and `joint`, `gated` and `added` what
lies around products in a decoder with them, where kernels take it. Invariant: the parts of a
Packed are the same Tensors in every layer that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.dtype import DType, float32
from ..core.errors import ShapeError
from ..tensor.quantised import Packed, quantised_matmul, take_rows
from ..tensor.quantised_around import Norm, split_matmul, surrounded_matmul
from ..tensor.tensor import Tensor
from .module import Module, Parameter
from .normalization import RMSNorm


class PackedModule(Module):
    """Holds a Packed: its parts are buffers of this Module."""

    casts = False  # `Module.to` leaves the parts as they are

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self.packed = packed
        for name, tensor in packed.parts.items():
            self.register_buffer(name, tensor, persistent=False)

    def extra_repr(self) -> str:
        """Format and sizes."""
        rows, columns = self.packed.shape
        return f"{self.packed.format}, {rows} x {columns}"


class PackedLinear(PackedModule):
    """x times the transpose of packed weights, plus a bias; or of some of their rows."""

    def __init__(
        self, packed: Packed, bias: Any = None, rows: tuple[int, int] | None = None
    ) -> None:
        super().__init__(packed)
        first, stop = self.rows = (0, packed.shape[0]) if rows is None else rows
        if not 0 <= first < stop <= packed.shape[0]:
            raise ShapeError(
                "no such rows", op="PackedLinear", got=rows, expected=f"within {packed.shape[0]}"
            )
        self.in_features, self.out_features = packed.shape[1], stop - first
        given = bias if bias is None or isinstance(bias, Parameter) else Parameter(bias, False)
        self.register_parameter("bias", given)

    def forward(self, x: Any) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return self.part(quantised_matmul(x, self.packed))

    def part(self, product: Tensor) -> Tensor:
        """This layer's share of the product with all rows."""
        first, stop = self.rows
        own = product if stop - first == self.packed.shape[0] else product[..., first:stop]
        return own if self.bias is None else own + self.bias


class PackedEmbedding(PackedModule):
    """Rows of packed weights by index."""

    def __init__(self, packed: Packed, dtype: DType = float32) -> None:
        super().__init__(packed)
        self.num_embeddings, self.embedding_dim = packed.shape
        self.dtype = dtype

    def forward(self, index: Any) -> Tensor:
        """(...) -> (..., embedding_dim)."""
        return take_rows(self.packed, index, self.dtype)


def joint(x: Any, *layers: Module, norm: Module | None = None) -> tuple[Tensor, ...]:
    """What each of several linear layers gives for x (for its norm): one product where they share
    a Packed, which computes the norm too where it can."""
    packed = _shared(layers)
    if packed is None:
        x = x if norm is None else norm(x)
        return tuple(layer(x) for layer in layers)
    x, found = _norm_of(x, norm)
    rows = [layer.rows for layer in layers]  # type: ignore[attr-defined]
    ends = [0, *(stop for _, stop in rows)]
    if len(layers) > 1 and ends[-1] == packed.shape[0] and [a for a, _ in rows] == ends[:-1]:
        parts = split_matmul(x, packed, [stop - start for start, stop in rows], found)
        return tuple(y if layer.bias is None else y + layer.bias for layer, y in zip(layers, parts))
    product = surrounded_matmul(x, packed, norm=found)
    return tuple(layer.part(product) for layer in layers)  # type: ignore[attr-defined]


def gated(
    x: Any,
    gate: Module,
    up: Module,
    activation: str,
    act: Callable[[Tensor], Tensor],
    norm: Module | None = None,
) -> Tensor:
    """act(gate(x)) * up(x), of x's norm if given: one product where both share a Packed."""
    packed = _shared((gate, up))
    whole = packed is not None and (gate.rows, up.rows) == (
        (0, gate.out_features),
        (gate.out_features, packed.shape[0]),
    )
    if packed is None or not whole or gate.bias is not None or activation != "silu":
        first, second = joint(x, gate, up, norm=norm)
        return act(first) * second
    x, found = _norm_of(x, norm)
    return surrounded_matmul(x, packed, norm=found, gated="silu")


def added(x: Any, layer: Module, residual: Any = None) -> Tensor:
    """residual + layer(x), with the product where it can."""
    if isinstance(layer, PackedLinear) and layer.out_features == layer.packed.shape[0]:
        return surrounded_matmul(x, layer.packed, bias=layer.bias, residual=residual)
    found: Tensor = layer(x)
    return found if residual is None else residual + found


def _shared(layers: Sequence[Module]) -> Packed | None:
    """The Packed that all layers have rows of."""
    first = layers[0]
    if not isinstance(first, PackedLinear) or not all(
        isinstance(layer, PackedLinear) and layer.packed is first.packed for layer in layers
    ):
        return None
    return first.packed


def _norm_of(x: Any, norm: Module | None) -> tuple[Any, Norm | None]:
    """x, and its norm as a product takes it; a norm that no product knows is computed."""
    if isinstance(norm, RMSNorm) and norm.eps is not None and norm.weight is not None:
        return x, Norm(norm.weight, norm.eps, getattr(norm, "offset", 0.0))
    return (x if norm is None else norm(x)), None


__all__ = ["PackedEmbedding", "PackedLinear", "added", "gated", "joint"]
