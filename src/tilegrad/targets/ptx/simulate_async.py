"""Copies of the simulator that run on their own."""

from __future__ import annotations

from typing import Any

from .program import TensorMap
from .simulate_text import Instruction
from .simulate_values import Decoder, Run


class Map:
    """A tensor map bound to its memory."""

    def __init__(self, given: TensorMap, grid: Any) -> None:
        self.given, self.grid = given, grid


def decode(d: Decoder, i: Instruction) -> Run | None:
    """Decode a copy; None if it is not one."""
    return None
