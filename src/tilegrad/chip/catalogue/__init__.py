"""Chips as data, and what each makes of a model."""

from .chips import CHIPS, chip
from .cut import Cut
from .figure import FIELDS, Chip, Figure, load_chip
from .predict import PHASES, Assumptions, Prediction, Sizes, predict, roofline

__all__ = [
    "CHIPS",
    "FIELDS",
    "PHASES",
    "Assumptions",
    "Chip",
    "Cut",
    "Figure",
    "Prediction",
    "Sizes",
    "chip",
    "load_chip",
    "predict",
    "roofline",
]
