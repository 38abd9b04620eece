"""Layers in int8: weights with a scale for each output channel, inputs with one for all, or each
row its own as it comes.

Weights are int8, or whole numbers of a Format: INT4 (of 4 bits), INT8_SPARSE (two of every four
kept, by size), INT4_SPARSE. Sums are int32 with the bias in them. With an output scale they become
int8 (and may be cut at 0 on the way), else float32. What comes in as int8 is taken as it is.
Invariant: everything between the integers in and the integers out is integer arithmetic, so every
device gives the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.dtype import float32, int8, int32
from ..core.errors import UserError
from ..core.format import Format, format_of
from ..nn.convolution import _Straight
from ..nn.linear import Linear
from ..nn.module import Module
from ..tensor.convolution import conv1d, conv2d, conv3d
from ..tensor.creation import tensor
from ..tensor.matmul import linear
from ..tensor.select import index_select
from ..tensor.tensor import Tensor, lift
from .numbers import Requantised, channels, requantise, rows_to_int8, to_int8
from .prune import magnitude
from .rounding import rounded, unpack

INT8 = "INT8"


class PackedLinear(Linear):
    """A Linear whose weights a file stores: with their columns in another order, which inputs are
    brought into, or with inputs rounded to a Format, as the file asks for."""

    def __init__(
        self,
        layer: Linear,
        order: np.ndarray[Any, Any] | None = None,
        input_format: str = "",
        input_scale: float | None = None,
    ) -> None:
        """`layer` gives its Parameters away."""
        Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias)
        self.input_format = input_format
        index = None if order is None else tensor(order.astype(np.int32))
        self.register_buffer("order", index)
        scale = None if input_scale is None else tensor(np.full((1, 1), input_scale, np.float32))
        self.register_buffer("input_scale", scale)

    def forward(self, x: Any) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        given = lift(x)
        if self.order is not None:
            given = index_select(given, -1, self.order)
        if self.input_format:
            given = rounded(given, self.input_format, self.input_scale)
        return linear(given, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes and what is done to inputs."""
        words = [super().extra_repr()]
        words += ["in another order"] if self.order is not None else []
        words += [f"inputs in {self.input_format}"] if self.input_format else []
        return ", ".join(words)


def _integers_in(form: str) -> Format:
    """A Format of whole numbers; an error where it is none."""
    found = format_of(form)
    if not found.whole:
        raise UserError(
            "weights in int8 are whole numbers",
            op="quant",
            expected="INT8, INT4, INT8_SPARSE or INT4_SPARSE",
            got=form,
        )
    return found


def _whole_rows(weight: np.ndarray[Any, Any], form: Format) -> np.ndarray[Any, Any]:
    """Weights as rows of whole blocks of a Format, pruned where it keeps two of four."""
    rows = weight.reshape(len(weight), -1)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % form.block)))
    return magnitude(rows) if form.sparse else rows


CONVOLUTIONS = {3: conv1d, 4: conv2d, 5: conv3d}  # by axes of the weights


class _Int8(Module):
    """What layers in int8 share: integers, scales, and how sums leave."""

    def __init__(
        self,
        weight: np.ndarray[Any, Any],
        bias: np.ndarray[Any, Any] | None,
        input_scale: float | None,
        output_scale: float | None = None,
        relu: bool = False,
        form: str = INT8,
    ) -> None:
        super().__init__()
        self.form = _integers_in(form)
        rows = _whole_rows(weight, self.form)
        integers, scales = channels(rows, self.form.element.bits)  # type: ignore[union-attr]
        unit = 1.0 if input_scale is None else np.float64(np.float32(input_scale))
        sums = scales.astype(np.float64) * unit  # what 1 in a sum stands for
        self.input_scale, self.output_scale = input_scale, output_scale
        self.relu = relu
        self.weight_shape = weight.shape
        stored = (
            integers.reshape(weight.shape) if self.form.name == INT8 else self.form.pack(integers)
        )
        self.register_buffer("weight", tensor(stored))
        if bias is not None and input_scale is not None:
            wide = np.round(bias.astype(np.float64) / sums)
            bias = np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32)
        self.register_buffer("bias", None if bias is None else tensor(bias))
        if input_scale is None and output_scale is not None:
            raise UserError("rows with scales of their own end in floats", op="quant")
        if output_scale is None:
            self.shift = 0
            self.register_buffer("factors", tensor(sums.astype(np.float32)))
        else:
            made = Requantised.of(sums / np.float64(np.float32(output_scale)))
            self.shift = made.shift
            self.register_buffer("factors", tensor(made.factors))

    def weights(self) -> Tensor:
        """The weights as int8."""
        if self.form.name == INT8:
            return self.weight
        rows = unpack(self.weight, self.form, int8)
        return rows[:, : math.prod(self.weight_shape[1:])].reshape(self.weight_shape)

    def integers(self, x: Any) -> Tensor:
        """What comes in, as int8."""
        given = lift(x)
        assert self.input_scale is not None
        return given if given.dtype is int8 else to_int8(given, self.input_scale)

    def leave(self, sums: Tensor, shape: tuple[int, ...]) -> Tensor:
        """int32 sums as they go on; `shape` puts channels where they are."""
        if self.bias is not None:
            sums = sums + self.bias.reshape(shape)
        factors = self.factors.reshape(shape)
        if self.output_scale is not None:
            return requantise(sums, factors, self.shift, self.relu)
        found = sums.to(float32) * factors
        return found.relu() if self.relu else found


class Int8Linear(_Int8):
    """A Linear in int8; without an input scale every row is scaled by its own absmax."""

    @staticmethod
    def of(
        layer: Linear,
        input_scale: float | None,
        output_scale: float | None = None,
        relu: bool = False,
        form: str = INT8,
    ) -> Int8Linear:
        """Of a layer in floats."""
        bias = None if layer.bias is None else layer.bias.to(float32).numpy()
        weight = layer.weight.to(float32).numpy()
        return Int8Linear(weight, bias, input_scale, output_scale, relu, form)

    def forward(self, x: Any) -> Tensor:
        """(..., in) -> (..., out)."""
        if self.input_scale is None:
            return self._by_rows(lift(x))
        sums = self.integers(x).to(int32) @ self.weights().to(int32).mT
        return self.leave(sums, (-1,))

    def _by_rows(self, x: Tensor) -> Tensor:
        integers, scales = rows_to_int8(x)
        sums = integers.to(int32) @ self.weights().to(int32).mT
        found = sums.to(float32) * scales * self.factors
        if self.bias is not None:
            found = found + self.bias.to(float32)
        return (found.relu() if self.relu else found).to(x.dtype)

    def extra_repr(self) -> str:
        """Sizes and scales."""
        scale = "of each row" if self.input_scale is None else f"{self.input_scale:.3g}"
        return f"{self.weight_shape} {self.form}, scale={scale}, relu={self.relu}"


class Int8Conv(_Int8):
    """A convolution in int8, of one to three axes."""

    def __init__(
        self,
        weight: np.ndarray[Any, Any],
        bias: np.ndarray[Any, Any] | None,
        input_scale: float,
        output_scale: float | None = None,
        relu: bool = False,
        form: str = INT8,
        **geometry: Any,
    ) -> None:
        super().__init__(weight, bias, input_scale, output_scale, relu, form)
        self.geometry = geometry  # stride, padding, dilation, groups

    @staticmethod
    def of(
        layer: _Straight,
        input_scale: float,
        output_scale: float | None = None,
        relu: bool = False,
        form: str = INT8,
    ) -> Int8Conv:
        """Of a layer in floats."""
        bias = None if layer.bias is None else layer.bias.to(float32).numpy()
        weight = layer.weight.to(float32).numpy()
        names = ("stride", "padding", "dilation", "groups")
        geometry = {name: getattr(layer, name) for name in names}
        return Int8Conv(weight, bias, input_scale, output_scale, relu, form, **geometry)

    def forward(self, x: Any) -> Tensor:
        """(batch, in, ...) -> (batch, out, ...)."""
        given = self.integers(x)
        weight = self.weights()
        function: Any = CONVOLUTIONS[weight.ndim]
        sums = function(given.to(int32), weight.to(int32), **self.geometry)
        return self.leave(sums, (1, -1, *(1,) * (weight.ndim - 2)))


__all__ = ["Int8Conv", "Int8Linear", "PackedLinear"]
