"""What a kernel's function reaches: its code, the functions it calls, the values it closes over.

A function reaches what its code names: free variables, globals, defaults of arguments, members of
modules. Through functions of the user it goes on; the package's own are covered by the compiler's
version, and those of Python and of array libraries are taken as known. Invariant: `reached` gives
equal lists only for functions that trace alike, as far as plain values and code say; other objects
are told apart by their identity. `code_key` is the same in every process.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ..core.dtype import DType
from ..ir.node import exact

KNOWN = {__package__.partition(".")[0], "numpy", "ml_dtypes", "torch", *sys.stdlib_module_names}
PLAIN = (bool, int, float, complex, str, bytes, type(None), DType)


@functools.lru_cache(maxsize=4096)
def code_key(code: CodeType) -> str:
    """A hash of what a function does, the same in every process: its code, names, constants."""
    parts = [code.co_code, repr((code.co_names, code.co_freevars)).encode()]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            parts.append(code_key(constant).encode())
        elif isinstance(constant, frozenset):
            parts.append(repr(sorted(map(repr, constant))).encode())
        else:
            parts.append(repr(constant).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """Globals and attributes that a function names, and the functions inside it."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *[n for names in inner for n in names]]))


def reached(function: Callable[..., Any]) -> tuple[tuple[str, Any], ...]:
    """(name, key) of all that a function reaches, in a fixed order."""
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        now = inspect.unwrap(waiting.pop())
        if id(now) in seen:
            continue
        seen.add(id(now))
        found.append(("code", code_key(now.__code__)))
        for name, value in _values(now):
            if isinstance(value, FunctionType):
                if not _is_known(inspect.unwrap(value).__module__):
                    waiting.append(value)
            elif not isinstance(value, ModuleType):
                found.append((name, value_key(value)))
    return tuple(found)


def value_key(value: Any) -> Any:
    """A key of a plain value, or of tuples of them; of a function what it reaches; of any other
    object its identity."""
    if isinstance(value, PLAIN):
        return exact(value)
    if isinstance(value, tuple):
        return tuple([value_key(v) for v in value])
    if isinstance(value, FunctionType):
        return reached(value)
    return (type(value), id(value))


def stable(key: Any) -> str:
    """A key as text that is the same in every process: objects go by their type alone."""
    if isinstance(key, tuple):
        if len(key) == 2 and isinstance(key[0], type):
            kind, value = key
            plain = issubclass(kind, PLAIN)
            return f"{kind.__qualname__} {value!r}" if plain else kind.__qualname__
        return "(" + ", ".join([stable(k) for k in key]) + ")"
    return repr(key)


def _values(function: Any) -> Iterator[tuple[str, Any]]:
    """Values of the names that a function's code has."""
    names, space = _names(function.__code__), function.__globals__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            yield name, None
    yield from (("default", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    for name in names:
        if name in space:
            value = space[name]
            yield name, value
            if isinstance(value, ModuleType) and not _is_known(value.__name__):
                members = vars(value)
                for member in names:
                    if isinstance(members.get(member, ...), (FunctionType, *PLAIN)):
                        yield f"{name}.{member}", members[member]


def _is_known(module: str | None) -> bool:
    return (module or "").partition(".")[0] in KNOWN
