"""Families from outside the package, and what of them is in every compile key.

It stands apart from the table of Families so that a warm start, which only needs the key, imports
none of it. Invariant: two processes with the same `outside()` select the same Families.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from ..runtime.registry import Registry

if TYPE_CHECKING:
    from .families import Row

GROUP = "tilegrad.families"  # of entry points
OUTSIDE: Registry[Row] = Registry("family", GROUP, {})


@lru_cache(maxsize=1)
def outside() -> tuple[str, ...]:
    """What is registered: names with a hash of their code."""
    names = OUTSIDE.names()
    if not names:
        return ()
    import hashlib
    import inspect

    from .families import family_of

    found = []
    for row in map(OUTSIDE.get, names):
        source = inspect.getsource(type(family_of(row)))
        code = hashlib.sha256(source.encode()).hexdigest()[:16]
        found.append(f"{row.name} {','.join(row.anchors)} {code}")
    return tuple(sorted(found))
