"""Gradients kept within bounds.

Invariant: only `.grad` of the parameters given changes, and only if it is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..core.errors import StateError, UserError
from ..tensor.elementwise import clamp
from ..tensor.maths import cast
from ..tensor.movement import stack
from ..tensor.reduce import norm
from ..tensor.tensor import Tensor, lift, no_grad


def _with_gradients(parameters: Any) -> list[Tensor]:
    found: Iterable[Tensor] = [parameters] if isinstance(parameters, Tensor) else parameters
    return [p for p in found if p.grad is not None]


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm."""
    given = _with_gradients(parameters)
    if not max_norm > 0:
        raise UserError("bad max_norm", op="clip_grad_norm_", expected="max_norm > 0", got=max_norm)
    with no_grad():
        if not given:
            return lift(0.0)
        sizes = [norm(p.grad, norm_type, dtype="float32") for p in given]
        total = norm(stack(sizes), norm_type)
        if error_if_nonfinite and not math.isfinite(float(total)):
            raise StateError(
                "the norm of the gradients is not finite",
                op="clip_grad_norm_",
                expected="finite gradients",
                got=float(total),
            )
        factor = clamp(max_norm / (total + 1e-6), max=1.0)
        for p in given:
            p.grad = p.grad * cast(factor, p.grad.dtype)  # type: ignore[union-attr, operator]
        return total


def clip_grad_value_(parameters: Any, clip_value: float) -> None:
    """Keep each element of the gradients within -clip_value..clip_value."""
    if not clip_value >= 0:
        raise UserError(
            "bad clip_value", op="clip_grad_value_", expected="clip_value >= 0", got=clip_value
        )
    with no_grad():
        for p in _with_gradients(parameters):
            p.grad = clamp(p.grad, -clip_value, clip_value)


__all__ = ["clip_grad_norm_", "clip_grad_value_"]
