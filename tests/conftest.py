"""What tests of every folder may ask for."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

SPREAD = 0.618  # multiples of it, less their whole part, come to lie evenly, whatever the axes

if sys.dont_write_bytecode:
    # Tests start many processes: what one compiles of a module is there for the next, in the cache.
    folder = os.environ.get("TILEGRAD_CACHE") or os.path.expanduser("~/.cache/tilegrad")
    sys.pycache_prefix = os.path.abspath(os.path.join(folder, "python"))
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a sweep marked `sampled(n)`, one case in n runs by default; the others are slow."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None:
            continue
        sweep = item.nodeid.partition("[")[0]
        if seen[sweep] * SPREAD % 1 * mark.args[0] >= 1:
            item.add_marker(pytest.mark.slow)
        seen[sweep] += 1


def pytest_collection_finish() -> None:
    """All that was imported stays: no collection looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def quick_collect() -> Iterator[None]:
    """`gc.collect` looks only at what the test itself made, not at all that the process holds."""
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()
