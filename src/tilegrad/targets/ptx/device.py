"""NVIDIA GPUs as Devices: how many there are, and opening one.

Invariant: nothing of CUDA is loaded before the first question about a GPU is asked.
"""

from __future__ import annotations

from .cuda_api import available, call
from .driver import Device, open_device


class Kind:
    """The GPUs that the CUDA driver shows."""

    def count(self) -> int:
        """How many there are."""
        return int(call("cuDeviceGetCount")) if available() else 0

    def open(self, number: int) -> Device:
        """The one with this number."""
        return open_device(number)


KIND = Kind()


def number_of(name: str) -> int:
    """The number of the GPU called "cuda:0" or "cuda"; -1 for other names."""
    kind, _, number = name.partition(":")
    return int(number or 0) if kind == "cuda" and (number or "0").isdigit() else -1
