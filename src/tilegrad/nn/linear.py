"""Linear layers, embeddings, dropout and changes of shape.

Invariant: weights have PyTorch's orientation (out, in) and default initial values.
"""

from __future__ import annotations

import math
from typing import Any

from ..core.errors import ShapeError, UserError
from ..graph import build
from ..ir.whole import whole
from ..tensor.creation import empty
from ..tensor.matmul import bilinear, linear
from ..tensor.norm import embedding, embedding_bag
from ..tensor.random import dropout
from ..tensor.tensor import Tensor, lift, no_grad
from . import init
from .module import Module, Parameter


def new_parameter(*shape: int, dtype: Any = None) -> Parameter:
    """A Parameter whose value is yet to be drawn."""
    return Parameter(empty(*shape, dtype=dtype))


class Identity(Module):
    """Gives back what it gets."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, x: Any) -> Any:
        """x."""
        return x


class Linear(Module):
    """x @ weight.T + bias; weight is (out_features, in_features)."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: Any = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = new_parameter(out_features, in_features, dtype=dtype)
        self.register_parameter("bias", new_parameter(out_features, dtype=dtype) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values."""
        init.kaiming_uniform_(self.weight, a=math.sqrt(5.0))
        if self.bias is not None:
            bound = 1.0 / math.sqrt(self.in_features) if self.in_features else 0.0
            init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Any) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )


class Bilinear(Module):
    """a @ weight[k] @ b for each output k; weight is (out, in1, in2)."""

    def __init__(
        self,
        in1_features: int,
        in2_features: int,
        out_features: int,
        bias: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in1_features, self.in2_features = in1_features, in2_features
        self.out_features = out_features
        self.weight = new_parameter(out_features, in1_features, in2_features, dtype=dtype)
        self.register_parameter("bias", new_parameter(out_features, dtype=dtype) if bias else None)
        bound = 1.0 / math.sqrt(in1_features)
        for parameter in self.parameters():
            init.uniform_(parameter, -bound, bound)

    def forward(self, a: Any, b: Any) -> Tensor:
        """(..., in1), (..., in2) -> (..., out)."""
        return bilinear(a, b, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes."""
        return (
            f"in1_features={self.in1_features}, in2_features={self.in2_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )


class Embedding(Module):
    """Rows of a table by index."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        num_embeddings = whole(num_embeddings, "Embedding", "num_embeddings")
        if padding_idx is not None:
            padding_idx = whole(padding_idx, "Embedding", "padding_idx")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise UserError(
                "padding_idx is not a row",
                op="Embedding",
                got=padding_idx,
                expected=f"within {num_embeddings} rows",
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.weight = new_parameter(num_embeddings, embedding_dim, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values; zeros at `padding_idx`."""
        init.normal_(self.weight)
        if self.padding_idx is not None:
            with no_grad():
                value = self.weight.detach()
                value[self.padding_idx] = 0.0
                self.weight.assign(value)

    @classmethod
    def from_pretrained(
        cls, embeddings: Any, freeze: bool = True, padding_idx: int | None = None
    ) -> Embedding:
        """A table with values given."""
        table = lift(embeddings)
        if table.ndim != 2:
            raise ShapeError(
                "not a table",
                op="Embedding.from_pretrained",
                expected="(rows, features)",
                got=build.show(table.shape),
            )
        made = cls(*table.shape, padding_idx=padding_idx, dtype=table.dtype)  # type: ignore[misc]
        made.weight = Parameter(table, requires_grad=not freeze)
        return made

    def forward(self, index: Any) -> Tensor:
        """(...) -> (..., embedding_dim)."""
        return embedding(index, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        """Sizes."""
        rest = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{rest}"


class EmbeddingBag(Module):
    """The sum, mean or max of rows of a table in each bag of indices."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        self.include_last_offset, self.padding_idx = include_last_offset, padding_idx
        self.weight = new_parameter(num_embeddings, embedding_dim, dtype=dtype)
        init.normal_(self.weight)

    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:
        """Rows of indices, or a line of them with offsets -> (bags, embedding_dim)."""
        return embedding_bag(
            input,
            self.weight,
            offsets,
            self.mode,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"


class Dropout(Module):
    """In training, zeros with probability p, the rest scaled by 1 / (1 - p)."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise UserError(
                "not a probability", op=type(self).__name__, expected="0 <= p <= 1", got=p
            )
        self.p, self.inplace = p, inplace

    def forward(self, x: Tensor) -> Tensor:
        """x with elements dropped."""
        return dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        """The probability."""
        return f"p={self.p}, inplace={self.inplace}"


class _ChannelDropout(Dropout):
    """Whole channels dropped."""

    def forward(self, x: Tensor) -> Tensor:
        """x with channels (axis 1) dropped."""
        if not self.training or self.p == 0.0:
            return x
        ones = x.detach().new_ones(*x.shape[:2], *(1,) * (x.ndim - 2))
        return x * dropout(ones, self.p, True)


class Dropout1d(_ChannelDropout):
    """Channels of (batch, channels, length) dropped."""


class Dropout2d(_ChannelDropout):
    """Channels of (batch, channels, height, width) dropped."""


class Dropout3d(_ChannelDropout):
    """Channels of (batch, channels, depth, height, width) dropped."""


class Flatten(Module):
    """The axes from start to end joined into one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Tensor) -> Tensor:
        """x with axes joined."""
        return x.flatten(self.start_dim, self.end_dim)

    def extra_repr(self) -> str:
        """The axes."""
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"


class Unflatten(Module):
    """One axis cut into several."""

    def __init__(self, dim: int, unflattened_size: Any) -> None:
        super().__init__()
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def forward(self, x: Tensor) -> Tensor:
        """x with an axis cut."""
        return x.unflatten(self.dim, self.unflattened_size)

    def extra_repr(self) -> str:
        """The axis and its sizes."""
        return f"dim={self.dim}, unflattened_size={self.unflattened_size}"


__all__ = [
    "Bilinear",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "Embedding",
    "Flatten",
    "Identity",
    "Linear",
    "Unflatten",
    "new_parameter",
]
