"""quant/prune.py: two of every four stay, the ones that matter, and a Format holds them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tilegrad.core.errors import UserError
from tilegrad.core.format import format_of
from tilegrad.quant import prune, recipes


def layer() -> tuple[np.ndarray, np.ndarray]:
    """Weights, and inputs whose columns differ in size."""
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((24, 64)).astype(np.float32)
    x = draw.standard_normal((256, 16)) @ draw.standard_normal((16, 64))
    x += draw.standard_normal(x.shape)
    return weight, (x * draw.uniform(0.05, 4.0, 64)).astype(np.float32)


def test_two_of_four_stay_as_they_were() -> None:
    weight, x = layer()
    for found in (prune.magnitude(weight), prune.wanda(weight, x.T @ x)):
        fours = found.reshape(-1, 4)
        assert ((fours != 0).sum(-1) <= 2).all() and ((fours != 0).sum(-1) == 2).any()
        assert ((found == weight) | (found == 0)).all()


def test_magnitude_is_the_best_of_all_pairs_by_size() -> None:
    weight, _ = layer()
    found = (prune.magnitude(weight).reshape(-1, 4) ** 2).sum(-1)
    fours = weight.reshape(-1, 4) ** 2
    pairs = [fours[:, list(pair)].sum(-1) for pair in itertools.combinations(range(4), 2)]
    np.testing.assert_allclose(found, np.max(pairs, axis=0), rtol=1e-6)


def test_wanda_costs_no_more_than_magnitude_on_what_was_seen() -> None:
    weight, x = layer()
    products = x.T @ x
    plain = recipes.loss(prune.magnitude(weight) - weight, products)
    found = recipes.loss(prune.wanda(weight, products) - weight, products)
    assert found < 0.7 * plain
    alone = np.diag(np.diag(products))  # where inputs are independent it is the best there is
    assert recipes.loss(prune.wanda(weight, alone) - weight, alone) <= recipes.loss(
        prune.magnitude(weight) - weight, alone
    )


@pytest.mark.parametrize("name", ["BF16_SPARSE", "F16_SPARSE"])
def test_a_format_holds_what_was_pruned(name: str) -> None:
    weight, x = layer()
    form = format_of(name)
    pruned = prune.wanda(weight, x.T @ x)
    raw = form.pack(pruned)
    assert raw.nbytes == weight.size * 9 // 8  # half of the values in 2 bytes, 2 bits for each
    kind = form.element.dtype.numpy
    np.testing.assert_array_equal(form.to_float32(raw), pruned.astype(kind).astype(np.float32))
    fields = form.split(raw)
    places = (fields["places"].reshape(24, -1, 1) >> np.array([0, 2, 4, 6])) & 3
    codes = fields["codes"].reshape(24, -1).astype(np.float32)
    again = np.zeros_like(weight)
    for row in range(24):
        for at, place in enumerate(places[row].reshape(-1)):
            again[row, at // 2 * 4 + place] = codes[row, at]
    np.testing.assert_array_equal(again, form.to_float32(raw))


def test_equal_weights_and_zeros() -> None:
    same = prune.magnitude(np.ones((2, 8), np.float32))
    np.testing.assert_array_equal(same.reshape(-1, 4), [[1, 1, 0, 0]] * 4)
    assert not prune.magnitude(np.zeros((2, 8), np.float32)).any()


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="not whole fours"):
        prune.magnitude(np.ones((2, 6), np.float32))
    with pytest.raises(UserError, match="other columns"):
        prune.wanda(np.ones((2, 8), np.float32), np.eye(4, dtype=np.float32))
