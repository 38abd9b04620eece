"""The dataflow explorer: what a loop nest costs on an array of multipliers and memories."""

from .accelerator import Accelerator, Level, load
from .cost import Cost, cost, cost_of
from .count import EXACT, EYERISS, TIMELOOP, Conventions, count
from .mapping import Cut, Mapping, Mappings, mappings_of
from .problem import Operand, Problem, convolution, gemm

__all__ = [
    "EXACT",
    "EYERISS",
    "TIMELOOP",
    "Accelerator",
    "Conventions",
    "Cost",
    "Cut",
    "Level",
    "Mapping",
    "Mappings",
    "Operand",
    "Problem",
    "convolution",
    "cost",
    "cost_of",
    "count",
    "gemm",
    "load",
    "mappings_of",
]
