"""How several chips share a model: matrices, layers, requests.

Invariant: the parts of a Parallelism multiply to its chips; the bytes that links carry are counted
for each part as ring algorithms move them (a sum over n chips is 2 (n - 1) / n of the bytes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..networks import DECODERS


@dataclass(frozen=True)
class Parallelism:
    """Each matrix over `tensor` chips, layers over `pipeline`, requests over `data`."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def chips(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        parts = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        return " x ".join(f"{name} {n}" for name, n in parts.items() if n > 1) or "whole"


def ways(model: str, phase: str, chips: int, batch: int) -> Iterator[Parallelism]:
    """All ways to share: requests evenly; layers only in training, where stages fill."""
    layers = _config(model)["num_hidden_layers"] if model in DECODERS else 1
    for data in _divisors(chips):
        if batch % data:
            continue
        for pipeline in _divisors(chips // data):
            if pipeline == 1 or (phase == "training" and layers % pipeline == 0):
                yield Parallelism(chips // data // pipeline, pipeline, data)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _config(model: str) -> Any:
    return DECODERS[model]


def bubble(how: Parallelism, batch: int) -> float:
    """Times that a pipeline takes longer, filling and draining: each request is one part."""
    return 1.0 + (how.pipeline - 1) / (batch // how.data)


def linked_bytes(
    model: str, phase: str, how: Parallelism, tokens: int, parameters: float
) -> tuple[float, float, float] | None:
    """A chip's links in a step: bytes within layers, and of gradients, and how many sums; None:
    not known.

    `tokens` are those of one data part. Within a layer two sums of its features, in each pass;
    between stages the features once; gradients are summed over data parts in 16 bits.
    """
    passes = 2.0 if phase == "training" else 1.0
    inside = sums = 0.0
    if how.tensor > 1 or how.pipeline > 1:
        if model not in DECODERS:
            return None
        config = _config(model)
        features = 2.0 * tokens * int(config["hidden_size"])
        layers = int(config["num_hidden_layers"]) / how.pipeline
        inside = passes * 2 * layers * 2 * (how.tensor - 1) / how.tensor * features
        inside += passes * features / how.tensor * (how.pipeline > 1)
        sums = passes * 2 * layers * (how.tensor > 1)
    gradients = 0.0
    if phase == "training" and how.data > 1:
        held = 2.0 * parameters / how.tensor / how.pipeline
        gradients = 2 * (how.data - 1) / how.data * held
    return inside, gradients, sums


__all__ = ["Parallelism", "bubble", "linked_bytes", "ways"]
