"""A load of requests for any endpoint that speaks as OpenAI's, and what it measured."""

from .client import Endpoint
from .load_run import model_of, run_load
from .plot import plotted
from .script import Lengths, Prefixes, at_rate, drawn, mini_sglang, of_file
from .summary import LATENCIES, PERCENTILES, limits_of, summed_up

__all__ = [
    "LATENCIES",
    "PERCENTILES",
    "Endpoint",
    "Lengths",
    "Prefixes",
    "at_rate",
    "drawn",
    "limits_of",
    "mini_sglang",
    "model_of",
    "of_file",
    "plotted",
    "run_load",
    "summed_up",
]
