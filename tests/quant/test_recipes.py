"""quant/recipes.py and layerwise.py: what recipes cost, against plain rounding and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import nn
from tilegrad.core.errors import UserError
from tilegrad.quant import recipes
from tilegrad.quant.layerwise import Recipe, Shared, round_block, seen_by


def layer(rows: int = 48, columns: int = 128, tokens: int = 512, outliers: int = 4) -> Any:
    """Weights, and inputs that are correlated and large in a few channels."""
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((rows, columns)).astype(np.float32) * 0.05
    mixed = draw.standard_normal((columns // 4, columns)) + 0.3 * np.eye(columns // 4, columns)
    x = draw.standard_normal((tokens, columns // 4)) @ mixed
    x += 0.1 * draw.standard_normal(x.shape)
    x[:, draw.permutation(columns)[:outliers]] *= 30
    return weight, x.astype(np.float32)


def test_plain_codes_are_those_of_the_format() -> None:
    weight, _ = layer()
    coded = recipes.plain(weight, 4, 32)
    form = coded.format
    assert form.name == "INT4_G32_F16_ZERO"
    np.testing.assert_array_equal(form.to_float32(coded.raw()), coded.values())
    np.testing.assert_allclose(coded.values(), form.to_float32(form.pack(weight)), atol=2e-2)
    step = np.ptp(weight.reshape(48, 4, 32), axis=-1) / 15
    assert (np.abs(coded.values() - weight).reshape(48, 4, 32).max(-1) < 0.51 * step + 1e-4).all()


@pytest.mark.parametrize("bits", [3, 4])
def test_gptq_costs_less_than_half_of_plain_rounding(bits: int) -> None:
    weight, x = layer()
    products = x.T @ x
    plain = recipes.plain(weight, bits, 64)
    found = recipes.gptq(weight, products, bits, 64)
    before = recipes.loss(plain.values() - weight, products)
    after = recipes.loss(found.values() - weight, products)
    assert after < 0.5 * before
    exact = x.astype(np.float64) @ (found.values() - weight).astype(np.float64).T
    assert abs((exact**2).sum() - after) < 1e-2 * after
    np.testing.assert_array_equal(found.format.to_float32(found.raw()), found.values())


@pytest.mark.parametrize("size", [1, 33, 63, 64, 200, 577])
def test_the_factor_of_an_inverse_by_halves(size: int) -> None:
    x = np.random.default_rng(size).standard_normal((2 * size, size))
    whole = x.T @ x + np.eye(size)
    found = recipes._inverse(np.linalg.cholesky(whole[::-1, ::-1])[::-1, ::-1])
    np.testing.assert_allclose(found, np.linalg.cholesky(np.linalg.inv(whole)).T, atol=1e-10)


def test_gptq_with_channels_that_are_never_seen() -> None:
    weight, x = layer()
    x[:, :10] = 0
    found = recipes.gptq(weight, x.T @ x, 4, 64)
    assert np.isfinite(found.values()).all()


def test_awq_finds_factors_for_large_channels() -> None:
    weight, x = layer()
    products, mean = x.T @ x, np.abs(x).mean(0)
    factors = recipes.awq([weight, weight[:16]], mean, products, 4, 64)
    plain = recipes.plain(weight, 4, 64).values()
    near = recipes.plain(weight * factors, 4, 64).values() / factors
    cost, before = (recipes.loss(v - weight, products) for v in (near, plain))
    assert cost < 0.75 * before
    assert factors[mean > 10 * np.median(mean)].min() > 1.5 * np.median(factors)


def test_smoothing_makes_int8_of_both_cheaper() -> None:
    weight, x = layer()

    def cost(factors: Any) -> float:
        given, near = recipes._by_rows(x / factors), recipes._by_rows(weight * factors)
        return float(((given @ near.T - x @ weight.T) ** 2).sum())

    factors = recipes.smooth([weight], x, np.abs(x).max(0))
    assert cost(factors) < 0.5 * cost(np.ones_like(factors))


class Two(nn.Module):
    """A norm, two layers that read it, and one behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate, self.up = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        return x + self.down(self.gate(y).silu() * self.up(y))


GROUPS = [Shared(("gate", "up"), "norm"), Shared(("down",), "up")]


def block() -> tuple[Two, list[np.ndarray]]:
    draw = np.random.default_rng(3)
    made = Two().requires_grad_(False)
    for parameter in made.parameters():
        shape = tuple(parameter.shape)
        value = draw.standard_normal(shape).astype(np.float32) * 0.1 + (len(shape) == 1)
        parameter.assign(tg.tensor(value.astype(np.float32)))
    mixed = draw.standard_normal((16, 64))
    states = []
    for _ in range(2):
        x = draw.standard_normal((2, 32, 16)) @ mixed
        x[..., :3] *= 20
        states.append(x.astype(np.float32))
    return made, states


def test_what_is_seen() -> None:
    made, states = block()
    seen = seen_by(made, GROUPS, states, made)
    assert isinstance(made.gate, nn.Linear)
    y = np.concatenate([made.norm(tg.tensor(s)).numpy().reshape(-1, 64) for s in states])
    np.testing.assert_allclose(seen[0].products, y.T @ y, rtol=2e-3, atol=1e-2)
    np.testing.assert_allclose(seen[0].most, np.abs(y).max(0), rtol=1e-5)
    assert seen[0].count == 128 and seen[1].products.shape == (128, 128)


def cost_of(name: str) -> float:
    made, states = block()
    exact = [made(tg.tensor(s)).numpy() for s in states]
    recipe = Recipe(name, group=32)
    found, layers = round_block(made, GROUPS, states, made, recipe)
    assert [one.name for one in layers] == ["gate", "up", "down"]
    assert all(0 < one.error < 0.2 for one in layers)
    for one, state in zip(found, states):  # the block reads what was made
        np.testing.assert_allclose(made(tg.tensor(state)).numpy(), one, rtol=1e-4, atol=1e-3)
    size = sum(((e - s) ** 2).sum() for e, s in zip(exact, states))
    return sum(((f - e) ** 2).sum() for f, e in zip(found, exact)) / size


def test_recipes_over_a_block() -> None:
    plain, int8 = cost_of("int4"), cost_of("int8")
    assert cost_of("gptq-int4") < 0.6 * plain and cost_of("awq-int4") < 0.8 * plain
    assert int8 < 0.05 * plain
    assert cost_of("awq-gptq-int4") < 0.6 * plain and cost_of("gptq-int6") < 0.1 * plain
    assert int8 < 0.75 * cost_of("plain-int8")


def test_what_recipes_refuse() -> None:
    weight, _ = layer()
    with pytest.raises(UserError, match="multiple of the group"):
        recipes.plain(weight, 4, 100)
    with pytest.raises(UserError, match="no such recipe"):
        Recipe("int9")
    made, _ = block()
    with pytest.raises(UserError, match="needs samples"):
        round_block(made, GROUPS, [], made, Recipe("gptq-int4", group=32))


@pytest.mark.parametrize("name", ["int4", "gptq-int4", "awq-int4", "int8", "fp8", "2:4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    made, _ = block()
    weight = made.up.weight.numpy().copy()
    weight[3, 5] = bad
    made.up.weight.assign(tg.tensor(weight))
    seen = [np.ones((1, 4, 64), np.float32)] if Recipe(name).needs_samples else []
    with pytest.raises(UserError, match=r"finite numbers in up(.|\n)*1 of 8192"):
        round_block(made, GROUPS, seen, made, Recipe(name, group=32))
