"""Convolution layers in one, two and three axes of space.

One class per kind does the work and knows its rank; the numbered classes only name it.
Invariant: weights have PyTorch's shapes, (out, in / groups, *window) and transposed
(in, out / groups, *window), and its default initial values.
"""

from __future__ import annotations

import math
from typing import Any

from ..core.errors import UserError
from ..ir.whole import wholes
from ..tensor import convolution
from ..tensor.convolution import Sizes, per_axis
from ..tensor.padding import pad
from ..tensor.tensor import Tensor
from . import init
from .linear import new_parameter
from .module import Module

BORDERS = {
    "zeros": "constant",
    "reflect": "reflect",
    "replicate": "replicate",
    "circular": "circular",
}


class _Convolution(Module):
    """What both kinds share: sizes, weight and bias."""

    rank = 0
    transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Any = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        dtype: Any = None,
    ) -> None:
        super().__init__()
        name, rank = type(self).__name__, self.rank
        counts = (in_channels, out_channels, groups)
        in_channels, out_channels, groups = wholes(counts, name, "a count of channels or groups")
        if in_channels % groups or out_channels % groups:
            raise UserError(
                "channels do not divide into groups",
                op=name,
                expected=f"multiples of {groups}",
                got=f"in {in_channels}, out {out_channels}",
            )
        if padding_mode not in BORDERS:
            raise UserError(
                "unknown padding_mode",
                op=name,
                expected=" or ".join(BORDERS),
                got=repr(padding_mode),
            )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = per_axis(name, "kernel_size", kernel_size, rank, 1)
        self.stride = per_axis(name, "stride", stride, rank, 1)
        self.dilation = per_axis(name, "dilation", dilation, rank, 1)
        self.padding = (
            padding if isinstance(padding, str) else (per_axis(name, "padding", padding, rank, 0))
        )
        self.padding_mode = padding_mode
        first, second = (
            (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        )
        self.weight = new_parameter(first, second // groups, *self.kernel_size, dtype=dtype)
        self.register_parameter("bias", new_parameter(out_channels, dtype=dtype) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values."""
        init.kaiming_uniform_(self.weight, a=math.sqrt(5.0))
        if self.bias is not None:
            bound = 1.0 / math.sqrt(init.fans(self.weight)[0])
            init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        """What differs from the defaults."""
        text = (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}"
        )
        if self.padding not in ("valid", (0,) * self.rank):
            text += f", padding={self.padding}"
        if self.dilation != (1,) * self.rank:
            text += f", dilation={self.dilation}"
        if self.groups != 1:
            text += f", groups={self.groups}"
        if self.bias is None:
            text += ", bias=False"
        return text if self.padding_mode == "zeros" else f"{text}, padding_mode={self.padding_mode}"


class _Straight(_Convolution):
    def forward(self, x: Any) -> Tensor:
        """(batch, in_channels, *space) -> (batch, out_channels, *space)."""
        padding: Any = self.padding
        if self.padding_mode != "zeros" and padding != "valid":
            x = pad(x, self._amounts(), BORDERS[self.padding_mode])
            padding = 0
        run = getattr(convolution, f"conv{self.rank}d")
        return run(
            x,
            self.weight,
            self.bias,
            self.stride,
            padding,
            self.dilation,
            self.groups,
        )

    def _amounts(self) -> list[int]:
        if self.padding == "same":
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size)]
            pairs = [(t // 2, t - t // 2) for t in totals]
        else:
            given: Any = self.padding
            pairs = [(p, p) for p in given]
        return [amount for pair in reversed(pairs) for amount in pair]


class Conv1d(_Straight):
    """Convolution over (batch, channels, length)."""

    rank = 1


class Conv2d(_Straight):
    """Convolution over (batch, channels, height, width)."""

    rank = 2


class Conv3d(_Straight):
    """Convolution over (batch, channels, depth, height, width)."""

    rank = 3


class _Transposed(_Convolution):
    transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
        padding_mode: str = "zeros",
        dtype: Any = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            dtype,
        )
        if padding_mode != "zeros":
            raise UserError(
                "only zeros are padded here",
                op=type(self).__name__,
                expected="padding_mode='zeros'",
                got=repr(padding_mode),
            )
        self.output_padding = per_axis(
            type(self).__name__, "output_padding", output_padding, self.rank, 0
        )

    def forward(self, x: Any, output_size: Any = None) -> Tensor:
        """(batch, in_channels, *space) -> (batch, out_channels, *larger space)."""
        extra = self.output_padding if output_size is None else self._extra(x, output_size)
        run = getattr(convolution, f"conv_transpose{self.rank}d")
        return run(
            x,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            extra,
            self.groups,
            self.dilation,
        )

    def _extra(self, x: Tensor, output_size: Any) -> tuple[int, ...]:
        """The output padding that gives a size."""
        wanted = wholes(output_size, type(self).__name__, "a size")[-self.rank :]
        padding: Any = self.padding
        found = []
        for i, size in enumerate(wanted):
            least = (
                (x.shape[x.ndim - self.rank + i] - 1) * self.stride[i]
                - 2 * padding[i]
                + self.dilation[i] * (self.kernel_size[i] - 1)
                + 1
            )
            found.append(size - least)
            if not 0 <= size - least < max(self.stride[i], self.dilation[i]):
                raise UserError(
                    "output_size cannot be reached",
                    op=type(self).__name__,
                    got=size,
                    expected=f"{least}..{least + self.stride[i] - 1}",
                )
        return tuple(found)


class ConvTranspose1d(_Transposed):
    """Transposed convolution over (batch, channels, length)."""

    rank = 1


class ConvTranspose2d(_Transposed):
    """Transposed convolution over (batch, channels, height, width)."""

    rank = 2


class ConvTranspose3d(_Transposed):
    """Transposed convolution over (batch, channels, depth, height, width)."""

    rank = 3


__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]
