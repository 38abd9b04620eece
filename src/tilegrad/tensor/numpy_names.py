"""NumPy's names of arguments beside PyTorch's: `axis` is `dim`, `keepdims` is `keepdim`.

PyTorch takes both wherever a function has the argument. Invariant: a name that a function has
itself is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

OURS = {"axis": "dim", "keepdims": "keepdim"}


def numpy_names(function: Function) -> Function:
    """The function, called with NumPy's names too; itself where it has no such argument."""
    own = _arguments(function)
    names = {theirs: ours for theirs, ours in OURS.items() if ours in own and theirs not in own}
    if not names:
        return function

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        for theirs, ours in names.items():
            if theirs in options and ours not in options:  # both are an error of the function's
                options[ours] = options.pop(theirs)
        return function(*args, **options)

    return run  # type: ignore[return-value]


def _arguments(function: Any) -> tuple[str, ...]:
    """Names of the arguments, below what wraps it; `inspect` would take long for all functions."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
