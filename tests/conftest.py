"""What tests of every folder may ask for."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def quick_collect() -> Iterator[None]:
    """`gc.collect` looks only at what the test itself made, not at all that the process holds."""
    gc.freeze()
    yield
    gc.unfreeze()
