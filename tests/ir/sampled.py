"""Tables of which the default run takes a sample: the rest is marked slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """The parameters of a test: those kept run by default, the others with `pytest -m slow`."""
    return [
        case
        if kept(case)
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
