"""What an Executable is kept under: everything that it depends on."""

from __future__ import annotations

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.compiler import compile as compiler
from tilegrad.core.recent import Recent


def test_bounds_of_symbols_are_in_the_key_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Graph of the same text whose Symbol may be larger has a larger arena."""

    def product(x):
        return (x * 2.0).cumsum(0).softmax(0) @ x.T

    compiled = compiler.counters["compiled"]
    for most in (7, 300, 7):
        monkeypatch.setattr(compiler, "_memory", Recent(lambda: 8))  # as in another process
        run = tg.jit(product, dynamic={"x": {0: ("rows_of_this_test", 1, most)}})
        x = np.random.default_rng(most).random((most, 16), np.float32)
        wide = (x.astype(np.float64) * 2).cumsum(0)
        wanted = np.exp(wide - wide.max(0))
        wanted = wanted / wanted.sum(0) @ x.T
        np.testing.assert_allclose(run(tg.tensor(x)).numpy(), wanted, rtol=1e-4, atol=1e-6)
    assert compiler.counters["compiled"] - compiled in (0, 2)  # 0 where both are in the store
