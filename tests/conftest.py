"""What tests of every folder may ask for."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest

if sys.dont_write_bytecode and "PYTEST_XDIST_WORKER" not in os.environ:
    # Tests start many processes: what one compiles of a module is there for the next.
    KEPT = tempfile.mkdtemp(prefix="tilegrad-pycache-")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = KEPT
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
else:
    KEPT = ""


def pytest_unconfigure() -> None:
    """Nothing is left of the run."""
    if KEPT:
        shutil.rmtree(KEPT, ignore_errors=True)


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
