"""NVIDIA GPUs as Devices: how many there are, and opening one.

Invariant: nothing of CUDA is loaded before the first question about a GPU is asked.
"""

from __future__ import annotations

from . import cuda_api
from .driver import Device, open_device


class Kind:
    """The GPUs that the CUDA driver shows."""

    def count(self) -> int:
        """How many there are."""
        return cuda_api.count()

    def open(self, number: int) -> Device:
        """The one with this number."""
        return open_device(number)


KIND = Kind()
