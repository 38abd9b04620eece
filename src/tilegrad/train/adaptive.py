"""RMSprop and Adagrad: steps scaled by the size of past gradients.

Invariant: the numbers follow PyTorch's, as those of `optimizer` do.
"""

from __future__ import annotations

import math
from typing import Any

from ..tensor.creation import full
from ..tensor.maths import sqrt
from ..tensor.tensor import Tensor, own_node, wrap
from .optimizer import Group, Moments, Optimizer, Rate, checked


class RMSprop(Optimizer):
    """Steps scaled by a running mean of squared gradients, centered and with momentum if asked."""

    def __init__(
        self,
        params: Any,
        lr: float | Rate = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        checked(
            "RMSprop",
            alpha=(alpha, 0.0, math.inf),
            eps=(eps, 0.0, math.inf),
            weight_decay=(weight_decay, 0.0, math.inf),
            momentum=(momentum, 0.0, math.inf),
        )
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "alpha": alpha,
                "eps": eps,
                "centered": centered,
                "weight_decay": weight_decay,
                "maximize": maximize,
            },
        )

    def _kept(self, group: Group) -> tuple[str, ...]:
        found = ["square_avg"]
        if group["momentum"]:
            found.append("momentum_buffer")
        return (*found, "grad_avg") if group["centered"] else tuple(found)

    def update(
        self,
        value: Tensor,
        gradient: Tensor,
        state: Moments,
        group: Group,
        rate: Tensor,
        step: Tensor,
    ) -> tuple[Tensor, Moments]:
        """value - rate * gradient / (sqrt(mean square - mean ** 2) + eps), through momentum."""
        alpha = group["alpha"]
        if group["weight_decay"]:
            gradient = gradient + value * group["weight_decay"]
        square = state["square_avg"] * alpha + gradient * gradient * (1.0 - alpha)
        after = {"square_avg": square}
        if group["centered"]:
            mean = state["grad_avg"] + (gradient - state["grad_avg"]) * (1.0 - alpha)
            after["grad_avg"] = mean
            square = square - mean * mean
        change = gradient / (sqrt(square) + group["eps"])
        if group["momentum"]:
            change = state["momentum_buffer"] * group["momentum"] + change
            after["momentum_buffer"] = change
        return value - change * rate, after


class Adagrad(Optimizer):
    """Steps scaled by the sum of all squared gradients so far."""

    def __init__(
        self,
        params: Any,
        lr: float | Rate = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        checked(
            "Adagrad",
            lr_decay=(lr_decay, 0.0, math.inf),
            eps=(eps, 0.0, math.inf),
            weight_decay=(weight_decay, 0.0, math.inf),
            initial_accumulator_value=(initial_accumulator_value, 0.0, math.inf),
        )
        super().__init__(
            params,
            {
                "lr": lr,
                "lr_decay": lr_decay,
                "eps": eps,
                "weight_decay": weight_decay,
                "initial_accumulator_value": initial_accumulator_value,
                "maximize": maximize,
            },
        )

    def _kept(self, group: Group) -> tuple[str, ...]:
        return ("sum",)

    def _fresh(self, parameter: Tensor, group: Group) -> Moments:
        (total,) = super()._fresh(parameter, group).values()
        start = full(total.shape, group["initial_accumulator_value"], dtype=total.dtype)
        return {"sum": wrap(own_node(start.node))}

    def update(
        self,
        value: Tensor,
        gradient: Tensor,
        state: Moments,
        group: Group,
        rate: Tensor,
        step: Tensor,
    ) -> tuple[Tensor, Moments]:
        """value - rate / (1 + step * lr_decay) * gradient / (sqrt(sum of squares) + eps)."""
        if group["weight_decay"]:
            gradient = gradient + value * group["weight_decay"]
        total = state["sum"] + gradient * gradient
        slowed = rate / (step * group["lr_decay"] + 1.0) if group["lr_decay"] else rate
        return value - gradient / (sqrt(total) + group["eps"]) * slowed, {"sum": total}


__all__ = ["Adagrad", "RMSprop"]
