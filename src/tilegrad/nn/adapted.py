"""Linear layers with low-rank adapters, of which each row of a batch picks one or none (LoRA).

An adapter changes a weight W into W + up.T @ down, of a small rank; here the change is computed
beside the product with W, which may be quantised, and rows of one batch have different ones. Which
row has which is data: `Picks` holds the Tensor of it while a model computes. Invariant: a row's
result depends on its own adapter and on no other; rows without one get those of the plain layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..core.errors import ShapeError
from ..tensor.matmul import picked_dot
from ..tensor.tensor import Tensor, lift
from .linear import Linear
from .module import Module


class Picks:
    """Which adapter each row has; the layers of a model share one."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None

    @contextmanager
    def of(self, rows: Any) -> Iterator[None]:
        """Within this, row t of what a layer is given has the adapter rows[t]; negative: none."""
        before, self.rows = self.rows, lift(rows)
        try:
            yield
        finally:
            self.rows = before


class AdaptedLinear(Linear):
    """A Linear and its adapters: `down` (adapters, rank, in) and `up` (adapters, rank, out)."""

    def __init__(self, base: Linear, down: Tensor, up: Tensor, picks: Picks) -> None:
        Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        expected = ((*down.shape[:2], base.in_features), (*down.shape[:2], base.out_features))
        if (tuple(down.shape), tuple(up.shape)) != expected:
            raise ShapeError(
                "the adapters do not fit the layer",
                op="AdaptedLinear",
                expected=f"{expected[0]} and {expected[1]}",
                got=f"{tuple(down.shape)} and {tuple(up.shape)}",
            )
        self.register_buffer("down", down, persistent=False)
        self.register_buffer("up", up, persistent=False)
        self.picks = picks

    def forward(self, x: Any) -> Tensor:
        """(T, in_features) -> (T, out_features); where nothing is picked, of any shape."""
        found, rows = super().forward(x), self.picks.rows
        if rows is None:
            return found
        return found + picked_dot(picked_dot(x, self.down, rows, axis=2), self.up, rows)

    def extra_repr(self) -> str:
        """Sizes."""
        adapters, rank, _ = self.down.shape
        return f"{super().extra_repr()}, adapters={adapters}, rank={rank}"


def replaced(module: Module, layers: Mapping[str, Module], prefix: str = "") -> Module:
    """A Module that shares all of another's values but has other layers at some dotted names."""
    made = object.__new__(type(module))
    inside = {
        name: below and layers.get(prefix + name, replaced(below, layers, f"{prefix}{name}."))
        for name, below in module._modules.items()
    }
    made.__dict__.update({**module.__dict__, "_modules": inside})
    return made


__all__ = ["AdaptedLinear", "Picks", "replaced"]
