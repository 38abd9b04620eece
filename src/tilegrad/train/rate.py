"""Learning rates over time: functions of the step, counted from 0.

Invariant: a rate takes a Tensor (or a number) and gives one Tensor by Tensor expressions, so a
jitted training step follows it without a new trace. Each warms up linearly over `warmup` steps
and keeps its last value after the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..core.errors import UserError
from ..tensor.elementwise import clamp
from ..tensor.maths import cos, floating, pick
from ..tensor.tensor import Tensor, lift

Rate = Callable[[Any], Tensor]


def _checked(op: str, **values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise UserError(f"bad {name}", op=op, expected=f"{name} >= 0", got=value)


def _with_warmup(peak: float, warmup: int, after: Callable[[Tensor], Tensor]) -> Rate:
    """peak * (step + 1) / warmup at first, then `after(steps since)`."""

    def rate(step: Any) -> Tensor:
        here = floating(lift(step))
        if not warmup:
            return after(here)
        rising = (here + 1.0) * (peak / warmup)
        return pick(here < float(warmup), rising, after(clamp(here - float(warmup), min=0.0)))

    return rate


def constant(value: float, warmup: int = 0) -> Rate:
    """One value."""
    _checked("rate.constant", value=value, warmup=warmup)
    return _with_warmup(value, warmup, lambda step: step * 0.0 + value)


def linear(start: float, end: float, steps: int, warmup: int = 0) -> Rate:
    """From start to end in a line; `steps` counts the warmup."""
    _checked("rate.linear", start=start, end=end, steps=steps, warmup=warmup)
    length = float(max(steps - warmup, 1))
    return _with_warmup(
        start, warmup, lambda step: clamp(step / length, max=1.0) * (end - start) + start
    )


def cosine(peak: float, steps: int, warmup: int = 0, floor: float = 0.0) -> Rate:
    """From peak to floor along half a cosine; `steps` counts the warmup."""
    _checked("rate.cosine", peak=peak, steps=steps, warmup=warmup, floor=floor)
    length = float(max(steps - warmup, 1))

    def falling(step: Tensor) -> Tensor:
        share = clamp(step / length, max=1.0)
        return (cos(share * math.pi) + 1.0) * (0.5 * (peak - floor)) + floor

    return _with_warmup(peak, warmup, falling)


__all__ = ["constant", "cosine", "linear"]
