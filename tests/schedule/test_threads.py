"""Schedules for a Target whose programs are blocks of threads, run by the Tile interpreter.

The first part is every test of `test_against_interpreter` again with that Target.
"""

from __future__ import annotations

from collections.abc import Iterator

import judge
import pytest
import test_against_interpreter as cases
from interpreted import run_interpreted
from test_against_interpreter import *  # noqa: F403

from tilegrad.core.target import MemorySpace, Target

GPU = Target(
    "block-of-threads", "gpu", vector_bytes=16, vector_registers=255, cores=132,
    memories={
        "global": MemorySpace(141 << 30, 32, ("load", "store"), 4.8e12, shared=True),
        "shared": MemorySpace(227 << 10, 128, ("load", "store"), 1e11),
        "register": MemorySpace(256 << 10, 4),
    },
    limits={"threads_per_block": 1024},
)  # fmt: skip


@pytest.fixture(autouse=True)
def on_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything below runs on the Tile interpreter."""

    def run(inputs, outputs, values, symbols=None, donate=()):
        return run_interpreted(GPU, inputs, outputs, values, symbols, donate)

    monkeypatch.setattr(judge, "run", run)
    monkeypatch.setattr(cases, "run", run)
    yield
