"""Pooling and resizing layers: windows reduced, sizes changed, nothing trained.

Invariant: each is a function of `tensor` with its settings kept; names and defaults are
PyTorch's.
"""

from __future__ import annotations

from typing import Any

from ..tensor import convolution, pooling, resize
from .setting import Setting

MAXIMUM: dict[str, Any] = {
    "stride": None,
    "padding": 0,
    "dilation": 1,
    "return_indices": False,
    "ceil_mode": False,
}
MEAN: dict[str, Any] = {"stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True}


class Largest(Setting):
    """The largest of windows, or (the largest, their places) with `return_indices`."""

    def forward(self, *inputs: Any) -> Any:
        """The largest, and their places where they are asked for."""
        return super().forward(*inputs)


class MaxPool1d(Largest):
    """The largest of each window of (..., channels, length)."""

    function = staticmethod(pooling.max_pool1d)
    required = ("kernel_size",)
    defaults = MAXIMUM


class MaxPool2d(Largest):
    """The largest of each window of (..., channels, height, width)."""

    function = staticmethod(pooling.max_pool2d)
    required = ("kernel_size",)
    defaults = MAXIMUM


class MaxPool3d(Largest):
    """The largest of each window of (..., channels, depth, height, width)."""

    function = staticmethod(pooling.max_pool3d)
    required = ("kernel_size",)
    defaults = MAXIMUM


class AvgPool1d(Setting):
    """The mean of each window of (..., channels, length)."""

    function = staticmethod(pooling.avg_pool1d)
    required = ("kernel_size",)
    defaults = MEAN


class AvgPool2d(Setting):
    """The mean of each window of (..., channels, height, width)."""

    function = staticmethod(pooling.avg_pool2d)
    required = ("kernel_size",)
    defaults = {**MEAN, "divisor_override": None}


class AvgPool3d(Setting):
    """The mean of each window of (..., channels, depth, height, width)."""

    function = staticmethod(pooling.avg_pool3d)
    required = ("kernel_size",)
    defaults = {**MEAN, "divisor_override": None}


class AdaptiveAvgPool1d(Setting):
    """Means of so many windows of (..., channels, length)."""

    function = staticmethod(pooling.adaptive_avg_pool1d)
    required = ("output_size",)


class AdaptiveAvgPool2d(Setting):
    """Means of so many windows of (..., channels, height, width)."""

    function = staticmethod(pooling.adaptive_avg_pool2d)
    required = ("output_size",)


class AdaptiveAvgPool3d(Setting):
    """Means of so many windows of (..., channels, depth, height, width)."""

    function = staticmethod(pooling.adaptive_avg_pool3d)
    required = ("output_size",)


class AdaptiveMaxPool1d(Largest):
    """The largest of so many windows of (..., channels, length)."""

    function = staticmethod(pooling.adaptive_max_pool1d)
    required = ("output_size",)
    defaults = {"return_indices": False}


class AdaptiveMaxPool2d(Largest):
    """The largest of so many windows of (..., channels, height, width)."""

    function = staticmethod(pooling.adaptive_max_pool2d)
    required = ("output_size",)
    defaults = {"return_indices": False}


class AdaptiveMaxPool3d(Largest):
    """The largest of so many windows of (..., channels, depth, height, width)."""

    function = staticmethod(pooling.adaptive_max_pool3d)
    required = ("output_size",)
    defaults = {"return_indices": False}


class LPPool1d(Setting):
    """The p-norm of each window of (..., channels, length)."""

    function = staticmethod(pooling.lp_pool1d)
    required = ("norm_type", "kernel_size")
    defaults = {"stride": None, "ceil_mode": False}


class LPPool2d(Setting):
    """The p-norm of each window of (..., channels, height, width)."""

    function = staticmethod(pooling.lp_pool2d)
    required = ("norm_type", "kernel_size")
    defaults = {"stride": None, "ceil_mode": False}


class Upsample(Setting):
    """(batch, channels, *space) resized to a size or by a factor."""

    function = staticmethod(resize.interpolate)
    defaults = {
        "size": None,
        "scale_factor": None,
        "mode": "nearest",
        "align_corners": None,
        "recompute_scale_factor": None,
    }


class UpsamplingNearest2d(Setting):
    """Images resized by the nearest element."""

    function = staticmethod(resize.upsample_nearest)
    defaults = {"size": None, "scale_factor": None}


class UpsamplingBilinear2d(Setting):
    """Images resized bilinearly, corner to corner."""

    function = staticmethod(resize.upsample_bilinear)
    defaults = {"size": None, "scale_factor": None}


class PixelShuffle(Setting):
    """Channels moved into space."""

    function = staticmethod(resize.pixel_shuffle)
    required = ("upscale_factor",)


class PixelUnshuffle(Setting):
    """Space moved into channels."""

    function = staticmethod(resize.pixel_unshuffle)
    required = ("downscale_factor",)


class Unfold(Setting):
    """Windows as columns."""

    function = staticmethod(convolution.unfold)
    required = ("kernel_size",)
    defaults = {"dilation": 1, "padding": 0, "stride": 1}


class Fold(Setting):
    """Columns added back into an image."""

    function = staticmethod(convolution.fold)
    required = ("output_size", "kernel_size")
    defaults = {"dilation": 1, "padding": 0, "stride": 1}


__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "Fold",
    "LPPool1d",
    "LPPool2d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "PixelShuffle",
    "PixelUnshuffle",
    "Unfold",
    "Upsample",
    "UpsamplingBilinear2d",
    "UpsamplingNearest2d",
]
