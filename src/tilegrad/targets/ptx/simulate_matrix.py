"""Matrix instructions of the simulator: ldmatrix, stmatrix, mma.sync and wgmma."""

from __future__ import annotations

from .simulate_text import Instruction, Module
from .simulate_values import Decoder, Run


def decode(d: Decoder, i: Instruction) -> Run | None:
    """Decode a matrix instruction; None if it is not one."""
    return None


def watched(module: Module) -> frozenset[int]:
    """The registers that wgmma uses."""
    return frozenset()
