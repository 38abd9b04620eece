"""Which Device, which Target, which Language: what the compiler looks up by name.

Invariant: a target folder, and what it needs installed, is imported when a Device or a Language of
it is first used, never before.
"""

from __future__ import annotations

from ..core.target import Target
from ..runtime.device import device, device_name
from ..runtime.language import language_of


def target_for(name: str) -> Target:
    """The Target of a device, with the Config's number of workers on the CPU."""
    return device(name).target


__all__ = ["device", "device_name", "language_of", "target_for"]
