"""Tuning: Plans tried on real arguments, Trials kept, the best by problem in a PlanTable."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`tune.matmul`, which brings what only a GPU needs, when it is first named."""
    if name != "matmul":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .matmul_search import matmul

    return matmul
