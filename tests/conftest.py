"""What tests of every folder may ask for."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

if sys.dont_write_bytecode:
    # Tests start many processes: what one compiles of a module is there for the next, in the cache.
    folder = os.environ.get("TILEGRAD_CACHE") or os.path.expanduser("~/.cache/tilegrad")
    sys.pycache_prefix = os.path.abspath(os.path.join(folder, "python"))
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a sweep marked `sampled(n)`, one case in n runs by default; the others are slow.

    Those that run lie on diagonals: each value of an axis is in one, where another axis has n
    values. Ids that the mark names with `also`, whole or the part of an axis, run as well.
    """
    seen: dict[Any, dict[Any, int]] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None:
            continue
        spec, sweep = item.callspec, item.nodeid.partition("[")[0]  # type: ignore[attr-defined]
        place = 0
        for axis in axes(item, list(spec.params)):
            values = seen.setdefault((sweep, axis), {})
            place += values.setdefault(tuple(id(spec.params[n]) for n in axis), len(values))
        named = {spec.id, *spec.id.split("-")} & set(mark.kwargs.get("also", ()))
        if place % mark.args[0] and not named:
            item.add_marker(pytest.mark.slow)


def axes(item: pytest.Item, names: list[str]) -> list[tuple[str, ...]]:
    """The axes of a sweep: names that are swept together are one."""
    found = []
    for mark in item.iter_markers("parametrize"):
        given = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        found.append(tuple(name.strip() for name in given))
    return found + [(n,) for n in names if not any(n in axis for axis in found)]


def pytest_collection_finish() -> None:
    """All that was imported stays: no collection looks at it again, and others are rare.

    What the compiler keeps from one test to the next makes a whole collection slow: with Python's
    own thresholds they are a tenth of the tests' time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="session", autouse=True)
def known_forms() -> Iterator[None]:
    """Every line of PTX that a test writes has a form of the table."""
    import isa

    from tilegrad.targets.ptx.write import Operand, Writer

    put = Writer.put

    def checked(self: Writer, form: str, *operands: Operand, guard: str = "") -> None:
        isa.check(form, [str(operand) for operand in operands])
        put(self, form, *operands, guard=guard)

    Writer.put = checked  # type: ignore[method-assign]
    yield
    Writer.put = put  # type: ignore[method-assign]


@pytest.fixture
def quick_collect() -> Iterator[None]:
    """`gc.collect` looks only at what the test itself made, not at all that the process holds."""
    gc.freeze()
    yield
    gc.unfreeze()  # a whole collection here takes longer than the tests
