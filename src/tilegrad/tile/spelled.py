"""Which function of a target emits a Tile op: the one that has its name.

Invariant: a function with an op's name, in a file that is asked, emits that op and does no more.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from . import placed  # noqa: F401  (defines the ops of the placed level)
from .row import tile


def emitters(*files: ModuleType) -> dict[str, Any]:
    """By op, what emits it; a file's own functions may begin with '_'."""
    return {
        op: function
        for file in files
        for name, function in vars(file).items()
        if (op := name.lstrip("_")) in tile.ops
        and getattr(function, "__module__", "") == file.__name__
    }
