"""Training that knows of rounding: layers compute with rounded weights, and train what is behind.

`prepare` puts a `QatLinear` in the place of every Linear: its weights are rounded in each step to
what a Format holds, its inputs too where that is asked for, and derivatives go straight through.
`convert` packs what was trained. Scales of groups stay as they were found at the start, so that a
weight moves from one value to the next and not the grid below it; a row in int8 or fp8 is scaled by
its absmax as it is. Invariant: after `convert` the model computes with the same values as before
it, outside of training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.dtype import float32, uint8
from ..core.errors import UserError
from ..core.format import format_of
from ..nn.linear import Linear
from ..nn.module import Module
from ..tensor.creation import tensor
from ..tensor.matmul import linear
from ..tensor.tensor import Tensor, lift, no_grad
from . import recipes
from .calibrate import layers_of, put
from .layerwise import FP8, INT8, Rounding, take, values_of
from .rounding import rounded

ROWS = {"int8": INT8, "fp8": FP8}  # a scale for each row
GROUPS = tuple(f"int{bits}" for bits in range(2, 8))  # a scale and a zero point for each group


class QatLinear(Linear):
    """A Linear that computes with rounded weights, and trains what they were rounded from."""

    def __init__(
        self,
        layer: Linear,
        grid: recipes.Coded | None = None,
        row_format: str = "",
        input_format: str = "",
    ) -> None:
        """`layer` gives its Parameters away; `grid` has the scales and zero points of groups."""
        Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias)
        self.row_format, self.input_format = row_format, input_format
        self.bits = 0 if grid is None else grid.bits
        for name in ("scale", "zero"):
            value = None if grid is None else getattr(grid, name).astype(np.float32)[..., None]
            held = None if value is None else tensor(value, device=layer.weight.device)
            self.register_buffer(name, held)

    def codes(self) -> Tensor:
        """Whole numbers (rows, groups, columns of a group) of weights in groups, in float32."""
        scale, zero = self.scale, self.zero
        cut = self.weight.detach().to(float32).reshape(*scale.shape[:2], -1)
        return ((cut / scale).round() + zero).clip(0.0, float((1 << self.bits) - 1))

    def near(self) -> Tensor:
        """The rounded weights."""
        weight = self.weight
        if self.scale is None:
            return rounded(weight, self.row_format, straight_through=self.training)
        found = ((self.codes() - self.zero) * self.scale).reshape(weight.shape).to(weight.dtype)
        return weight + (found - weight).detach() if self.training else found

    def forward(self, x: Any) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        given = lift(x)
        if self.input_format:
            given = rounded(given, self.input_format, straight_through=self.training)
        return linear(given, self.near(), self.bias)

    def extra_repr(self) -> str:
        """Sizes and what is rounded."""
        form = self.row_format or f"INT{self.bits} in {self.scale.shape[1]} groups"
        more = f", inputs in {self.input_format}" if self.input_format else ""
        return f"{super().extra_repr()}, weights in {form}{more}"


def prepare(
    model: Module,
    to: str = "int4",
    group: int = 128,
    inputs: bool = False,
    skip: Callable[[str], bool] | None = None,
    start: Mapping[str, Rounding] | None = None,
) -> Module:
    """The model with its linear layers rounded as it trains; changed in place.

    `to` is int2 to int7 in groups of columns, int8 or fp8 by rows; `inputs` are rounded by rows, to
    fp8 with fp8 and else to int8. `start` has layers that another recipe rounded to groups of the
    same size, by name: their grids are taken over, and of GPTQ the weights as they were before each
    was rounded. Layers that `skip` names, and those that share their weights with another, stay. An
    error leaves the model as it was.
    """
    if to not in (*ROWS, *GROUPS):
        expected = ", ".join((*GROUPS, *ROWS))
        raise UserError("no such numbers", op="qat", expected=expected, got=to)
    if start and to in ROWS:
        expected = f"no start: rows of {to} have no grid that stays"
        raise UserError("another start", op="qat", expected=expected, got=sorted(start))
    used = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    layers: dict[str, Any] = {n: o for n, o in layers_of(model).items() if isinstance(o, Linear)}
    unknown = set(start or ()) - set(layers)
    if unknown:
        raise UserError("no such layer", op="qat", expected=list(layers), got=sorted(unknown))
    if isinstance(model, Linear):
        expected = "a model that has layers, as nn.Sequential(layer)"
        raise UserError("a layer is not replaced in itself", op="qat", expected=expected)
    for name, one in model.named_modules():
        if isinstance(one, QatLinear) and not (skip is not None and skip(name)):
            expected = "a model as it was before, or `skip` of these layers"
            raise UserError("a layer is prepared already", op="qat", expected=expected, got=name)
    left = {
        name: layer
        for name, layer in layers.items()
        if used[id(layer.weight)] == 1 and not (skip is not None and skip(name))
    }
    if not left:
        expected = "a Linear that is not skipped and shares its weights with no other"
        raise UserError("nothing to prepare", op="qat", expected=expected, got=list(layers))
    given, bits = start or {}, int(to[3:]) if to in GROUPS else 0
    grids = {n: _grid(model, n, bits, group, given.get(n)) for n in left} if bits else {}
    input_format = (FP8 if to == "fp8" else INT8) if inputs else ""
    for name, layer in left.items():
        if name in given and given[name].before is not None:
            before = tensor(given[name].before, device=layer.weight.device)
            with no_grad():
                layer.weight.assign(before.to(layer.weight.dtype))
        put(model, name, QatLinear(layer, grids.get(name), ROWS.get(to, ""), input_format))
    return model


def _grid(model: Module, name: str, bits: int, group: int, start: Rounding | None) -> recipes.Coded:
    if start is None:
        return recipes.searched(values_of(model, name), bits, group, None)
    layer: Any = model.get_submodule(name)
    fields, columns = start.format.split(start.raw), start.shape[1]
    fits = start.format.name.startswith(f"INT{bits}_G{group}_") and "zero" in fields
    if not fits or tuple(start.shape) != tuple(layer.weight.shape):
        shape = tuple(layer.weight.shape)
        expected = f"INT{bits} in groups of {group} with zero points, {shape}"
        raise UserError("another start", op="qat", expected=expected, got=start.format.name)
    scale = fields["scale"].reshape(len(start.raw), -1)
    zero = fields["zero"].reshape(scale.shape)
    return recipes.Coded(np.zeros((len(scale), columns), np.uint8), scale, zero, bits)


def convert(model: Module) -> list[Rounding]:
    """Pack the weights of all layers that `prepare` made, in place; the layers as they were
    rounded, with the share of the weights that it costs."""
    layers = {n: one for n, one in model.named_modules() if isinstance(one, QatLinear)}
    if not layers:
        raise UserError("nothing to convert", op="qat", expected="a model that was prepared")
    with no_grad():
        made = [_packed(name, layer, values_of(model, name)) for name, layer in layers.items()]
    for one in made:
        take(model, one.name, one, layers[one.name].input_format)
    return made


def _packed(name: str, layer: QatLinear, weight: Any) -> Rounding:
    if layer.scale is None:
        form = format_of(layer.row_format)
        raw = form.pack(weight)
        near = form.to_float32(raw)
    else:
        codes = layer.codes().to(uint8).numpy().reshape(weight.shape)
        scale = layer.scale.numpy()[..., 0].astype(np.float16)
        zero = layer.zero.numpy()[..., 0].astype(np.uint8)
        coded = recipes.Coded(codes, scale, zero, layer.bits)
        form, raw, near = coded.format, coded.raw(), coded.values()
    return Rounding.of(name, form, raw, weight, near)


__all__ = ["QatLinear", "convert", "prepare"]
