"""Normalisation layers.

Invariant: running statistics are buffers, moved only by a call in training; weights start at
one and biases at zero, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import ShapeError, UserError
from ..graph import build
from ..ir.whole import wholes
from ..tensor.creation import ones, tensor, zeros
from ..tensor.norm import (
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    local_response_norm,
    rms_norm,
)
from ..tensor.tensor import Tensor, mode, no_grad, realize
from .module import Module, Parameter


def _shape(op: str, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    return wholes(normalized_shape, op, "a size")


class LayerNorm(Module):
    """Mean 0 and variance 1 over the last axes, then weight and bias."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape, self.eps = _shape(type(self).__name__, normalized_shape), eps
        self.elementwise_affine = elementwise_affine
        shape = self.normalized_shape
        weight = Parameter(ones(*shape, dtype=dtype)) if elementwise_affine else None
        offset = Parameter(zeros(*shape, dtype=dtype)) if elementwise_affine and bias else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", offset)

    def forward(self, x: Any) -> Tensor:
        """x, normalised."""
        return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Settings."""
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        )


class RMSNorm(Module):
    """x over the root of its mean square over the last axes, times weight."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape, self.eps = _shape(type(self).__name__, normalized_shape), eps
        self.elementwise_affine = elementwise_affine
        weight = Parameter(ones(*self.normalized_shape, dtype=dtype))
        self.register_parameter("weight", weight if elementwise_affine else None)

    def forward(self, x: Any) -> Tensor:
        """x, normalised."""
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Settings."""
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        )


class GroupNorm(Module):
    """Mean 0 and variance 1 over groups of channels."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise UserError(
                "channels do not divide into groups",
                op="GroupNorm",
                expected=f"a multiple of {num_groups}",
                got=num_channels,
            )
        self.num_groups, self.num_channels = num_groups, num_channels
        self.eps, self.affine = eps, affine
        weight = Parameter(ones(num_channels, dtype=dtype)) if affine else None
        bias = Parameter(zeros(num_channels, dtype=dtype)) if affine else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)

    def forward(self, x: Any) -> Tensor:
        """x, normalised."""
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Settings."""
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"


class _Tracking(Module):
    """Weights, and running statistics where tracked."""

    ranks: tuple[int, ...] = ()

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        weight = Parameter(ones(num_features, dtype=dtype)) if affine else None
        bias = Parameter(zeros(num_features, dtype=dtype)) if affine else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        track = track_running_stats
        self.register_buffer("running_mean", zeros(num_features, dtype=dtype) if track else None)
        self.register_buffer("running_var", ones(num_features, dtype=dtype) if track else None)
        self.register_buffer("num_batches_tracked", tensor(0) if track else None)

    def reset_running_stats(self) -> None:
        """Forget what was seen."""
        if self.track_running_stats:
            self.running_mean.assign(0.0)
            self.running_var.assign(1.0)
            self.num_batches_tracked.assign(0)

    def _check(self, x: Tensor) -> None:
        if x.ndim not in self.ranks or x.shape[1] != self.num_features:
            raise ShapeError(
                "the input does not fit",
                op=type(self).__name__,
                got=build.show(x.shape),
                expected=f"{' or '.join(map(str, self.ranks))} axes, {self.num_features} channels",
            )

    def extra_repr(self) -> str:
        """Settings."""
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, "
            f"affine={self.affine}, track_running_stats={self.track_running_stats}"
        )


class _BatchNorm(_Tracking):
    def forward(self, x: Tensor) -> Tensor:
        """x, normalised by its batch in training, by what was seen otherwise."""
        self._check(x)
        momentum: Any = self.momentum
        if self.training and self.track_running_stats:
            self._count()
            if momentum is None:  # the mean of all that was seen
                momentum = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype)
        from_batch = self.training or self.running_mean is None
        keep = self.track_running_stats
        return batch_norm(
            x,
            self.running_mean if keep else None,
            self.running_var if keep else None,
            self.weight,
            self.bias,
            from_batch,
            0.0 if momentum is None else momentum,
            self.eps,
        )

    def _count(self) -> None:
        with no_grad():
            self.num_batches_tracked.assign(self.num_batches_tracked + 1)
        if mode.trace is None and not mode.depth:
            realize([self.num_batches_tracked])


class BatchNorm1d(_BatchNorm):
    """Batch normalisation of (batch, channels) or (batch, channels, length)."""

    ranks = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Batch normalisation of (batch, channels, height, width)."""

    ranks = (4,)


class BatchNorm3d(_BatchNorm):
    """Batch normalisation of (batch, channels, depth, height, width)."""

    ranks = (5,)


class _InstanceNorm(_Tracking):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x, normalised for each example and channel."""
        single = x.ndim == self.ranks[0]
        batch = x.unsqueeze(0) if single else x
        self._check(batch)
        if self.training and self.track_running_stats:
            with no_grad():
                self.num_batches_tracked.assign(self.num_batches_tracked + 1)
        result = instance_norm(
            batch,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            self.momentum,
            self.eps,
        )
        return result.squeeze(0) if single else result


class InstanceNorm1d(_InstanceNorm):
    """Instance normalisation of (batch, channels, length)."""

    ranks = (2, 3)


class InstanceNorm2d(_InstanceNorm):
    """Instance normalisation of (batch, channels, height, width)."""

    ranks = (3, 4)


class InstanceNorm3d(_InstanceNorm):
    """Instance normalisation of (batch, channels, depth, height, width)."""

    ranks = (4, 5)


class LocalResponseNorm(Module):
    """x over a power of the mean square of neighbouring channels."""

    def __init__(self, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> None:
        super().__init__()
        self.size, self.alpha, self.beta, self.k = size, alpha, beta, k

    def forward(self, x: Any) -> Tensor:
        """x, normalised."""
        return local_response_norm(x, self.size, self.alpha, self.beta, self.k)

    def extra_repr(self) -> str:
        """Settings."""
        return f"{self.size}, alpha={self.alpha}, beta={self.beta}, k={self.k}"


__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LocalResponseNorm",
    "RMSNorm",
]
