"""Calibration: how large the inputs of each layer become, and a model with its layers in int8.

The model runs on samples, with an observer before every linear layer and convolution.
Invariant: `calibrate` leaves the model as it was; `quantise` replaces layers in place, and those
whose input was never seen, or that `skip` names, stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..core.dtype import float32
from ..core.errors import UserError
from ..nn.convolution import Conv1d, Conv2d, Conv3d
from ..nn.linear import Linear
from ..nn.module import Module
from ..tensor.movement import stack
from ..tensor.tensor import Tensor, lift, no_grad
from .layers import INT8, Int8Conv, Int8Linear
from .numbers import scale_of

KINDS = (Linear, Conv1d, Conv2d, Conv3d)


class Observer(Module):
    """A layer, and the largest absolute values that came in, one for each time."""

    def __init__(self, layer: Module) -> None:
        super().__init__()
        self.layer = layer
        self.seen: list[Tensor] = []

    def forward(self, x: Any) -> Any:
        """What the layer gives."""
        self.seen.append(lift(x).to(float32).abs().max())
        return self.layer(x)


def layers_of(model: Module) -> dict[str, Module]:
    """The layers that can be quantised, by name."""
    return {
        name: one
        for name, one in model.named_modules()
        if type(one) in KINDS and getattr(one, "padding_mode", "zeros") == "zeros"
    }


def put(model: Module, name: str, layer: Module) -> None:
    """Put a layer in the place of another."""
    where, _, last = name.rpartition(".")
    setattr(model.get_submodule(where) if where else model, last, layer)


def calibrate(
    model: Module, samples: Iterable[Any], run: Callable[[Any], Any] | None = None
) -> dict[str, float]:
    """The absmax of the input of every layer, over samples; `run(sample)` runs the model, by
    default `model(sample)`, or `model(*sample)` of a tuple."""
    layers = layers_of(model)
    if not layers:
        raise UserError("nothing to quantise", op="quant", expected="Linear or Conv1d to Conv3d")
    seen = {name: Observer(layer) for name, layer in layers.items()}
    most = dict.fromkeys(layers, 0.0)
    try:
        for name, one in seen.items():
            put(model, name, one)
        with no_grad():
            for sample in samples:
                if run is not None:
                    run(sample)
                else:
                    model(*sample) if isinstance(sample, tuple) else model(sample)
                _read(seen, most)
    finally:
        for name, layer in layers.items():
            put(model, name, layer)
    return most


def _read(seen: Mapping[str, Observer], most: dict[str, float]) -> None:
    """Take what observers saw into account, all in one run."""
    names = [name for name, one in seen.items() for _ in one.seen]
    if names:
        values = stack([x for one in seen.values() for x in one.seen]).numpy()
        for name, value in zip(names, values.tolist()):
            most[name] = max(most[name], value)
    for one in seen.values():
        one.seen.clear()


def quantise_rows(
    model: Module, skip: Callable[[str], bool] | None = None, form: str = INT8
) -> Module:
    """The model with its linear layers in int8, every row of inputs scaled by its own absmax as it
    comes: no calibration; changed in place. `form` is how weights are stored."""
    for name, layer in layers_of(model).items():
        if isinstance(layer, Linear) and not (skip is not None and skip(name)):
            put(model, name, Int8Linear.of(layer, None, form=form))
    return model


def quantise(
    model: Module,
    absmax: Mapping[str, float],
    skip: Callable[[str], bool] | None = None,
    form: str = INT8,
) -> Module:
    """The model with its layers in int8, inputs scaled by their absmax; changed in place. `form` is
    how weights are stored: INT8, INT4, INT8_SPARSE or INT4_SPARSE (two of every four kept)."""
    layers = layers_of(model)
    unknown = set(absmax) - set(layers)
    if unknown:
        raise UserError("no such layer", op="quant", expected=list(layers), got=sorted(unknown))
    for name, layer in layers.items():
        if not absmax.get(name) or (skip is not None and skip(name)):
            continue
        scale = float(scale_of(absmax[name]))
        if isinstance(layer, Linear):
            put(model, name, Int8Linear.of(layer, scale, form=form))
        else:
            assert isinstance(layer, (Conv1d, Conv2d, Conv3d))
            put(model, name, Int8Conv.of(layer, scale, form=form))
    return model


__all__ = ["calibrate", "quantise", "quantise_rows"]
