"""Chips as data, and what each makes of a model."""

from .chips import CHIPS, chip
from .figure import FIELDS, Chip, Figure, load_chip
from .parallelism import Parallelism
from .predict import PHASES, Assumptions, Prediction, Sizes, predict, roofline

__all__ = [
    "CHIPS",
    "FIELDS",
    "PHASES",
    "Assumptions",
    "Chip",
    "Figure",
    "Parallelism",
    "Prediction",
    "Sizes",
    "chip",
    "load_chip",
    "predict",
    "roofline",
]
