"""quant/mixed.py: what layers cost at how many bits, and what a budget buys."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import nn
from tilegrad.core.errors import UserError
from tilegrad.quant import recipes
from tilegrad.quant.layerwise import Recipe, Shared, round_block
from tilegrad.quant.mixed import BITS, Option, choose, recipe_of, sensitivity

GROUPS = [Shared(("up",)), Shared(("down",))]


def block() -> tuple[Any, list[np.ndarray]]:
    """Two layers, the second with one column of inputs far above the others."""
    draw = np.random.default_rng(2)
    made = nn.Sequential()
    made.up, made.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
    for layer in (made.up, made.down):
        value = draw.standard_normal(tuple(layer.weight.shape)).astype(np.float32)
        layer.weight.assign(tg.tensor(value))
    made.down.weight.assign(made.down.weight.detach() ** 3)  # few are large: costly to round
    return made.requires_grad_(False), [draw.standard_normal((64, 32)).astype(np.float32)]


def test_what_layers_cost() -> None:
    made, states = block()
    after, found = sensitivity(made, GROUPS, states, made, Recipe("gptq-int4", 32))
    assert list(found) == ["up", "down"]
    for options in found.values():
        assert [o.bits for o in options] == list(BITS)
        assert all(a.cost > b.cost > 0 for a, b in itertools.pairwise(options))
    weight = made.up.weight.numpy()
    coded = recipes.plain(weight, 4, 32)
    near = states[0].astype(np.float64) @ (coded.values() - weight).T.astype(np.float64)
    exact = (near**2).sum() / ((states[0].astype(np.float64) @ weight.T) ** 2).sum()
    four = found["up"][2]
    assert abs(four.cost - exact) < 1e-3 * exact and four.bytes == coded.raw().nbytes
    assert found["down"][2].cost > found["up"][2].cost
    np.testing.assert_allclose(after[0], made(tg.tensor(states[0])).numpy(), rtol=1e-5)


def drawn(seed: int) -> dict[str, list[Option]]:
    draw = np.random.default_rng(seed)
    found = {}
    for name in "abcd":
        size, height = int(draw.integers(10, 40)), float(draw.uniform(0.1, 10))
        found[name] = [Option(b, size * b, height * 4.0**-b) for b in (2, 3, 4, 6)]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_search_is_near_the_best_of_all(seed: int) -> None:
    options = drawn(seed)
    least, most = (sum(o[i].bytes for o in options.values()) for i in (0, -1))
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        budget = least + share * (most - least)
        found = choose(options, budget)
        assert sum(o.bytes for o in found.values()) <= budget
        cost = sum(o.cost for o in found.values())
        every = itertools.product(*options.values())
        best = min(sum(o.cost for o in c) for c in every if sum(o.bytes for o in c) <= budget)
        worst = sum(o[0].cost for o in options.values())
        assert cost - best <= 0.15 * (worst - best) + 1e-12
    assert all(o.bits == 6 for o in choose(options, most).values())


def test_options_that_never_pay_are_left_out() -> None:
    options = {
        "a": [Option(2, 10, 1.0), Option(3, 20, 0.99), Option(4, 30, 0.1), Option(5, 40, 0.2)]
    }
    assert choose(options, 29)["a"].bits == 2  # the step to 3 alone is no corner
    assert choose(options, 30)["a"].bits == 4
    assert choose(options, 99)["a"].bits == 4


def test_each_layer_is_rounded_by_its_own_recipe() -> None:
    made, states = block()
    recipe = Recipe("gptq-int4", 32)
    each = {"down": recipe_of(recipe, Option(6, 0, 0.0))}
    _, layers = round_block(made, GROUPS, states, made, recipe, each=each)
    names = [one.format.name for one in layers]
    assert names == ["INT4_G32_F16_ZERO", "INT6_G32_F16_ZERO"]
    assert recipe_of(Recipe("int4"), Option(8, 0, 0.0)).name == "searched-int8"


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="too small"):
        choose(drawn(0), 1)
    made, states = block()
    for word in ("fp8", "2:4", "int8"):
        with pytest.raises(UserError, match="bits are not chosen"):
            sensitivity(made, GROUPS, states, made, Recipe(word))
