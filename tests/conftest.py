"""What tests of every folder may ask for."""

from __future__ import annotations

import gc

import pytest


def pytest_collection_finish() -> None:
    """All that was imported stays: no collection looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def quick_collect() -> None:
    """`gc.collect` looks only at what the test itself made, not at all that the process holds."""
    gc.freeze()
