"""A simulator of PTX on the CPU: `simulate(text, launch, memories)` runs it and reports faults."""

from .errors import SimulationError
from .grid import POLICIES, simulate
from .launch import Launch, TensorMap

__all__ = ["POLICIES", "Launch", "SimulationError", "TensorMap", "simulate"]
