"""The dataflow explorer: what a loop nest costs on an array of multipliers and memories."""

from .accelerator import Accelerator, Level, load
from .cost import Cost, cost, cost_of
from .count import EXACT, EYERISS, TIMELOOP, Conventions, count
from .mapping import Batch, Cut, Mapping, batch_of
from .problem import Operand, Problem, convolution, gemm

__all__ = [
    "EXACT",
    "EYERISS",
    "TIMELOOP",
    "Accelerator",
    "Batch",
    "Conventions",
    "Cost",
    "Cut",
    "Level",
    "Mapping",
    "Operand",
    "Problem",
    "batch_of",
    "convolution",
    "cost",
    "cost_of",
    "count",
    "gemm",
    "load",
]
