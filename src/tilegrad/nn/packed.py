"""Layers over quantised weights: `PackedLinear`, `PackedEmbedding`, and `joint` products.

Their weights are a `Packed` (see `tensor.quantised`), whose parts are buffers here: state for
`jit`, but left out of checkpoints and never cast. Layers that share one Packed each have some of
its rows; `joint` computes several of them in one product. Invariant: the parts of a Packed are the
same Tensors in every layer that has it.
"""

from __future__ import annotations

from typing import Any

from ..core.dtype import DType, float32
from ..core.errors import ShapeError
from ..tensor.quantised import Packed, quantised_matmul, take_rows
from ..tensor.tensor import Tensor, lift
from .module import Module, Parameter


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

    def __init__(self, packed: Packed, bias: Any = None,
                 rows: tuple[int, int] | None = None) -> None:  # fmt: skip
        super().__init__(packed)
        first, stop = self.rows = (0, packed.shape[0]) if rows is None else rows
        if not 0 <= first < stop <= packed.shape[0]:
            raise ShapeError("no such rows", op="PackedLinear", got=rows,
                             expected=f"within {packed.shape[0]}")  # fmt: skip
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


def joint(x: Any, *layers: Module) -> tuple[Tensor, ...]:
    """What each of several linear layers gives for x: one product where they share a Packed."""
    first = layers[0]
    if isinstance(first, PackedLinear) and all(
        isinstance(layer, PackedLinear) and layer.packed is first.packed for layer in layers
    ):
        product = quantised_matmul(lift(x), first.packed)
        return tuple(layer.part(product) for layer in layers)  # type: ignore[attr-defined]
    return tuple(layer(x) for layer in layers)


__all__ = ["PackedEmbedding", "PackedLinear", "joint"]
