"""How many bits each layer gets: what rounding costs it, and a search under a budget of bytes.

A layer's cost at so many bits is the share of its results' squares that rounding changes, on inputs
that were seen. The search begins with the fewest bits everywhere and gives more to the layer that
gains most for each byte. Invariant: what is chosen takes no more bytes than the budget.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.dtype import float32
from ..core.errors import UserError
from ..nn.module import Module
from ..tensor.creation import tensor
from ..tensor.tensor import no_grad
from . import recipes
from .layerwise import Recipe, Run, Shared, seen_by, values_of

Array = np.ndarray[Any, Any]
BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Option:
    """A layer in so many bits: what it takes and what it costs."""

    bits: int
    bytes: int
    cost: float


def sensitivity(
    block: Module,
    groups: Sequence[Shared],
    states: Sequence[Array],
    run: Run,
    recipe: Recipe,
    tried: Sequence[int] = BITS,
) -> tuple[list[Array], dict[str, list[Option]]]:
    """The samples behind a block that stays as it is, and the options of its layers."""
    if recipe.input_format or recipe.bits > 8:
        expected = "a recipe of weights alone in groups, as gptq-int4"
        raise UserError(
            "bits are not chosen here", op="quantise", expected=expected, got=recipe.name
        )
    found: dict[str, list[Option]] = {}
    for group, seen in zip(groups, seen_by(block, groups, states, run)):
        for name in group.layers:
            weight = values_of(block, name)
            whole = recipes.loss(weight, seen.products) or 1.0
            found[name] = []
            for bits in tried:
                coded = recipes.plain(weight, bits, recipe.group)
                cost = recipes.loss(coded.values() - weight, seen.products) / whole
                found[name].append(Option(bits, len(weight) * coded.raw().shape[1], cost))
    with no_grad():
        return [np.array(run(tensor(s)).to(float32).numpy()) for s in states], found


def choose(options: Mapping[str, Sequence[Option]], most_bytes: float) -> dict[str, Option]:
    """One option for each layer, together within so many bytes."""
    ladders = {name: _hull(given) for name, given in options.items()}
    at = dict.fromkeys(ladders, 0)
    total = sum(ladder[0].bytes for ladder in ladders.values())
    if total > most_bytes:
        raise UserError(
            "the budget is too small",
            op="quantise",
            expected=f"at least {total} bytes",
            got=int(most_bytes),
        )
    steps = [_gain(ladder, 0, name) for name, ladder in ladders.items() if len(ladder) > 1]
    heapq.heapify(steps)
    while steps:
        _, name = heapq.heappop(steps)
        ladder, now = ladders[name], at[name]
        more = ladder[now + 1].bytes - ladder[now].bytes
        if total + more > most_bytes:
            continue  # another layer's step may still fit
        total, at[name] = total + more, now + 1
        if now + 2 < len(ladder):
            heapq.heappush(steps, _gain(ladder, now + 1, name))
    return {name: ladders[name][place] for name, place in at.items()}


def _gain(ladder: Sequence[Option], at: int, name: str) -> tuple[float, str]:
    """What the next step gains for each byte, the most first."""
    here, there = ladder[at], ladder[at + 1]
    return (there.cost - here.cost) / (there.bytes - here.bytes), name


def _hull(options: Sequence[Option]) -> list[Option]:
    """The options worth taking, from few bytes to many: each step gains less than the last."""
    found: list[Option] = []
    for one in sorted(options, key=lambda o: (o.bytes, o.cost)):
        if found and (one.cost >= found[-1].cost or one.bytes == found[-1].bytes):
            continue
        found.append(one)
        while len(found) > 2 and _gain(found, -3, "") >= _gain(found, -2, ""):
            del found[-2]
    return found


def recipe_of(recipe: Recipe, option: Option) -> Recipe:
    """A recipe with other bits; 8 of plain rounding are searched, as int8 rounds inputs too."""
    name = f"{recipe.name[:-1]}{option.bits}"
    return replace(recipe, name="searched-int8" if name == "int8" else name)


__all__ = ["BITS", "Option", "choose", "recipe_of", "sensitivity"]
