"""Loops of a builder by a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilegrad.ir.node import Node
from tilegrad.ir.symbol import Size
from tilegrad.tile.build import BodyBuilder


def looped(
    b: BodyBuilder,
    name: str,
    lower: Size,
    upper: Size,
    step: int,
    body: Callable[[Size, list[Node]], Sequence[Node] | None],
    carried: Sequence[Node] = (),
    unroll: int = 1,
    bounds: tuple[int, int] | None = None,
) -> list[Node]:
    """`each` with a function: body(index, carried) -> carried."""
    state = list(carried)
    for index in b.each(name, lower, upper, step, state, unroll, bounds):
        state[:] = body(index, list(state)) or ()
    return state
