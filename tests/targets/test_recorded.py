"""recorded.py: which Cases can be judged by their values."""

from __future__ import annotations

import numpy as np
from recorded import Case

from tilegrad.core.dtype import float32
from tilegrad.graph import build
from tilegrad.graph.interpret import interpret


def case(divided: bool) -> Case:
    """Shares of a maximum that is given: no number where nothing equals it."""
    values = np.linspace(0.1, 0.9, 7, dtype=np.float32)
    x, top = build.input_((7,), float32), build.input_((), float32)
    one = build.multiply(build.multiply(x, x), 3.0)
    found = build.cast(build.equal(one, build.broadcast_to(top, (7,))), float32)
    if divided:
        found = build.divide(found, build.broadcast_to(build.sum_(found), (7,)))
    given = (values, (values * values * np.float32(3)).max())
    (expected,) = interpret([found], dict(zip((x, top), given)))
    return Case("one", (x, top), found, given, {}, expected)


def test_equal_to_the_last_bit() -> None:
    assert case(divided=True).tied
    assert not case(divided=False).tied and case(divided=False).expected.sum() == 1
