"""Quantisers: models in few bits, rounded as they are or trained to be."""

from .calibrate import calibrate, quantise, quantise_rows
from .layers import Int8Conv, Int8Linear, PackedLinear
from .numbers import Requantised, requantise, scale_of, to_int8
from .rounding import pack, rounded, unpack

__all__ = [
    "Int8Conv",
    "Int8Linear",
    "PackedLinear",
    "Requantised",
    "calibrate",
    "pack",
    "quantise",
    "quantise_rows",
    "requantise",
    "rounded",
    "scale_of",
    "to_int8",
    "unpack",
]
