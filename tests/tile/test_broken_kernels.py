"""300 wrong kernels: each is refused while traced, or ends in an error that names its line, and no
memory outside of its Buffers is touched; right ones of the same shapes are accepted and right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import broken_kernels
import pytest

import tilegrad as tg
from tilegrad import kernel
from tilegrad.core.config import config, override
from tilegrad.tile.build import body_sites

TRACED = list(broken_kernels.traced())


def test_there_are_enough() -> None:
    cases = broken_kernels.cases()
    assert len(cases) >= 300 and len({case.name for case in cases}) == len(cases)
    assert len({case.function for case in cases}) >= 25


@pytest.mark.parametrize(
    "function", dict.fromkeys(c.function for c in TRACED), ids=lambda f: f.__name__
)
def test_what_is_known_is_refused_while_tracing(function) -> None:
    found = {c.name: broken_kernels.refused(c) for c in TRACED if c.function is function}
    assert not {name: why for name, why in found.items() if why}


@pytest.mark.parametrize("side", ["end", "start"])
def test_what_data_decides_ends_in_an_error(side: str, tmp_path_factory) -> None:
    """In a process of its own: a read or write outside of a Buffer would end it."""
    script = Path(broken_kernels.__file__)
    cache = tmp_path_factory.getbasetemp() / "broken-kernels"
    done = subprocess.run(
        [sys.executable, str(script), side],
        capture_output=True,
        text=True,
        timeout=500,
        env={**__import__("os").environ, "TILEGRAD_CACHE": str(cache), "TILEGRAD_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert not said["amiss"] and said["ran"] >= 150


def test_gpus_are_guarded_where_one_asks() -> None:
    """The same kernel for a GPU has Sites only under checked=True."""
    from tilegrad.core.target import H200
    from tilegrad.ir.types import Array

    definition = kernel(broken_kernels.index_by_data).definition
    given = {"x": Array((24,), tg.float32), "at": Array((4,), tg.int64), "way": "load", "axis": 0}
    for checked, wanted in ((False, 0), (True, 1)):
        with override(checked=checked):
            plan = kernel(broken_kernels.index_by_data).plan
            callee = definition.callee(given, plan, H200)
        sites = [len(body_sites(body)) for body, _ in callee.launches]
        assert sum(sites) == wanted
    assert not config().checked
