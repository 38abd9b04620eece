"""Symbols of a jitted function: their values in a call, and the ranges that are compiled.

Between breakpoints (`compiler/breaks.py`) one trace serves every value. Invariant: the ranges of a
Symbol do not overlap, and leave none of its values out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import ShapeError
from ..core.recent import SecondChance
from ..ir.symbol import Expr, Size, atoms, combine, high, low, symbol
from .container import Structure
from .lowered import Lowered


def narrowed(
    breaks: Mapping[str, Sequence[int]], symbols: Mapping[str, Expr], values: Mapping[str, int]
) -> dict[str, Size]:
    """Symbols that have breakpoints, each bound to the range that its value is in: a number where
    that is one value."""
    found: dict[str, Size] = {}
    for name, firsts in breaks.items():
        whole = symbols[name]
        bounds = [whole.low, *firsts, whole.high + 1]
        place = bisect_right(bounds, values[name]) - 1
        found[name] = symbol(name, bounds[place], bounds[place + 1] - 1)
    return found


def inside_of(axes: list[Any] | None, within: Mapping[str, Size]) -> list[Any] | None:
    """Symbolic axes of leaves with Symbols bound to ranges."""
    if not axes or not within:
        return axes
    return [{axis: _bound(size, within) for axis, size in mine.items()} for mine in axes]


def _bound(size: Any, within: Mapping[str, Size]) -> Any:
    if not isinstance(size, Expr):
        return size
    (own,) = atoms(size)
    return combine(within.get(own.name, own), size.constant, 1)


class Symbolic:
    """The part of a jitted function that knows its symbolic sizes."""

    name: str
    names: tuple[str, ...]  # of parameters
    dynamic: dict[str, dict[Any, Any]]
    symbols: dict[str, Expr]
    _static: tuple[int, ...]  # positions of parameters that are no leaves
    _dynamic_leaves: dict[Structure, list[Any] | None]
    _lowered: SecondChance[Lowered]

    def _paths(self, structure: Structure) -> list[str]:
        """What the leaves of the arguments are called."""
        free = [n for i, n in enumerate(self.names) if i not in self._static]
        return [path for n, part in zip(free, structure.parts) for path in part.paths(n)]

    def _axes_of(self, structure: Structure) -> list[Any] | None:
        """For each leaf, its symbolic axes {axis: Expr}; None if there are none."""
        if not self.dynamic:
            return None
        found = self._dynamic_leaves.get(structure)
        if structure not in self._dynamic_leaves:
            found = []
            for path in self._paths(structure):
                name = path.split("[")[0].split(".")[0]
                found.append(self.dynamic.get(path) or self.dynamic.get(name) or {})
            self._dynamic_leaves[structure] = found
        return found

    def _bind_symbols(
        self,
        index: int,
        shape: tuple[Any, ...],
        axes: list[Any],
        symbols: dict[str, Any],
        structure: Structure,
    ) -> tuple[Any, ...]:
        """The shape with Symbols at its symbolic axes; their values go into `symbols`."""
        result = list(shape)
        for axis, size in axes[index].items():
            place = axis if axis >= 0 else axis + len(shape)
            if not 0 <= place < len(shape):
                raise self._size_error(index, structure, f"at least {abs(axis)} axes", shape)
            if not isinstance(size, Expr):
                continue
            (own,) = atoms(size)
            value = shape[place] - size.constant
            if not own.low <= value <= own.high:
                raise self._size_error(
                    index,
                    structure,
                    f"{own.low} <= {own.name} <= {own.high}",
                    f"{own.name} = {value} (axis {axis} of {shape})",
                )
            before = symbols.setdefault(own.name, value)
            if before != value:
                first = self._first_with(axes, own, structure)
                raise self._size_error(
                    index,
                    structure,
                    f"{own.name} = {before}, as in argument {first}",
                    f"{own.name} = {value} (axis {axis} of {shape})",
                )
            result[place] = size
        return tuple(result)

    def _bind_number(
        self, index: int, value: Any, size: Expr, symbols: Any, structure: Structure
    ) -> None:
        """Take an argument's value for that of the Symbol it is."""
        if value.__class__ is not int or not size.low <= value <= size.high:
            wanted = f"a whole number, {size.low} <= {size.name} <= {size.high}"
            raise self._size_error(index, structure, wanted, value)
        if symbols.setdefault(size.name, value) != value:
            raise self._size_error(index, structure, f"{size.name} = {symbols[size.name]}", value)

    def range_of(self, name: str, value: int) -> tuple[int, int]:
        """The range of a Symbol that a value is in, as far as traces so far tell."""
        breaks = {n: b for one in list(self._lowered.values()) for n, b in one.breaks.items()}
        if name not in breaks:
            return self.symbols[name].low, self.symbols[name].high
        found = narrowed({name: breaks[name]}, self.symbols, {name: value})[name]
        return low(found), high(found)

    def _first_with(self, axes: list[Any], size: Expr, structure: Structure) -> str:
        for path, mine in zip(self._paths(structure), axes):
            if any(size in atoms(one) for one in mine.values()):
                return path
        return "?"

    def _size_error(self, index: int, structure: Structure, expected: str, got: Any) -> ShapeError:
        return ShapeError(
            f"argument {self._paths(structure)[index]} does not fit its symbolic sizes",
            op=f"jit {self.name}",
            expected=expected,
            got=got,
        )


__all__ = ["Symbolic", "inside_of", "narrowed"]
