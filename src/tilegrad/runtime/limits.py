"""What models ask of a device before they choose sizes of their own: a few numbers, no Target.

Invariant: nothing here says which machine it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.target import Target
from .device import target_for


@dataclass(frozen=True)
class Limits:
    """Sizes that suit a device."""

    page: int  # tokens of a page of a cache
    chunk: int  # tokens of a step that has prompts in it; more are no quicker


def limits_of(device: str | Target) -> Limits:
    """The Limits of a device, or of a machine that is not here."""
    found = (device if isinstance(device, Target) else target_for(device)).limits
    return Limits(found.get("page_tokens", 64), found.get("step_tokens", 512))
