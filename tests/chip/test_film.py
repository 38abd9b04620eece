"""A small product through the mesh, as data for a picture."""

from __future__ import annotations

import numpy as np
import pytest

from tilegrad.chip.film import SOON, film
from tilegrad.core.errors import UserError


@pytest.mark.parametrize("dataflow", ["ws", "os", "is"])
@pytest.mark.parametrize("sizes", [(4, 4, 5), (2, 3, 1), (1, 1, 1), (8, 5, 8)])
def test_the_last_frame_has_the_product(dataflow: str, sizes: tuple[int, int, int]) -> None:
    rows, columns, length = sizes
    found = film(dataflow, rows, columns, length, seed=3)
    inputs, weights = np.array(found.inputs), np.array(found.weights)
    assert (np.array(found.product) == inputs @ weights).all()
    out = np.array(found.frames[-1].out)
    assert ((out.T if dataflow == "is" else out) == inputs @ weights).all()
    skew = rows + columns - 1
    expected = length + skew - 1 if dataflow == "os" else rows + length + skew
    assert len(found.frames) == expected + (rows if dataflow == "os" else 0)


@pytest.mark.parametrize("dataflow", ["ws", "os", "is"])
def test_what_is_shown_to_come_comes(dataflow: str) -> None:
    found = film(dataflow, 3, 4, 5)
    for now, then in zip(found.frames, found.frames[1:]):
        for lane, soon in enumerate(now.left):
            assert len(soon) == SOON
            assert then.inputs[lane][0] == (soon[0] or 0)
        for lane, soon in enumerate(now.top):
            assert then.still[0][lane] == (soon[0] or 0)
    assert bool(found.frames[0].top) == (dataflow == "os")


def test_bad_films() -> None:
    with pytest.raises(UserError, match="bad rows") as raised:
        film(rows=9)
    assert "1 to 8" in str(raised.value)
    with pytest.raises(UserError, match="bad dataflow"):
        film("rs")
    with pytest.raises(UserError, match="bad length"):
        film(length="5")  # type: ignore[arg-type]
