"""ArrayWork: what a Body computes, in the terms of an array of multipliers with a vector unit.

A product of (M, K) by (K, N) matrices, or none, then steps of the vector unit over rows of sums,
then what is stored. A Body that an array takes has one in its notes: its target folder makes
instructions of it, and the Body itself says the same values in Tile IR. Invariant: plain data;
`ArrayWork.of_text(work.to_text()) == work`. Views are Graphs as text, from a parameter to a
(batch, rows, columns) array.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..ir.literal import read_size, size_text
from ..ir.symbol import Size, evaluate, high

LEFT, RIGHT = "left", "right"  # of the product
MIXED, SPARSE = "mixed", "sparse"  # rates: two weights in the place of one; two kept of each four
HELD, FULL = "held", "full"  # a row for all rows as it is computed; an element for each
ROWS = {"row_sum": "sum", "row_max": "max"}  # steps from a row to one number in all its columns


@dataclass(frozen=True)
class Operand:
    """A parameter of the Body as the array reads it."""

    parameter: int
    role: str  # left, right, held or full
    dtype: str
    shape: tuple[Size, ...]  # of the parameter
    view: str  # the Graph that gives its (batch, rows, columns)
    # Elements of the parameter from one batch, row and column to the next, and before the first;
    # none where they are not one number each.
    strides: tuple[Size, ...] = ()
    pruned: bool = False  # two of every four along k are 0


@dataclass(frozen=True)
class VectorStep:
    """value = kind(first, second), shifted right to the nearest; the second may be a number, or
    is none (0) for steps along rows and functions of one value."""

    kind: str
    first: int
    second: int
    number: bool = False
    shift: int = 0

    @property
    def values(self) -> tuple[int, ...]:
        """The values that it reads."""
        return (self.first,) if self.number else (self.first, self.second)


@dataclass(frozen=True)
class Output:
    """A value that is stored: 32 bits as they are, or narrow: times scale over 2**shift."""

    value: int
    parameter: int
    dtype: str
    shape: tuple[Size, ...]
    relu: bool = False
    scale: int = 1
    shift: int = 0


@dataclass(frozen=True)
class ArrayWork:
    """Values are numbered: the product (if K > 0), then held and full Operands, then steps."""

    batch: Any  # sizes: numbers, or with Symbols
    M: Any
    N: Any
    K: Any
    operands: tuple[Operand, ...]
    steps: tuple[VectorStep, ...]
    outputs: tuple[Output, ...]
    turned: bool = False  # computed as the (N, M) result of the operands exchanged
    rate: str = ""  # of the weights: one a step, MIXED or SPARSE

    @property
    def macs(self) -> int:
        """Multiplications of the product."""
        return int(self.batch * self.M * self.N * self.K)

    @property
    def vector_operands(self) -> tuple[Operand, ...]:
        """The Operands of the vector unit."""
        return tuple(o for o in self.operands if o.role in (HELD, FULL))

    def at_most(self) -> ArrayWork:
        """The same with every Symbol at its upper bound."""
        return self._sized(high)

    def bound(self, symbols: Mapping[str, int]) -> ArrayWork:
        """The same with Symbols bound."""
        return self._sized(lambda size: evaluate(size, symbols))

    def _sized(self, number: Callable[[Size], Any]) -> ArrayWork:
        def shaped(one: Any) -> Any:
            return replace(one, shape=tuple(number(s) for s in one.shape))

        return replace(
            self,
            batch=number(self.batch),
            M=number(self.M),
            N=number(self.N),
            K=number(self.K),
            operands=tuple(
                replace(shaped(o), strides=tuple(number(s) for s in o.strides))
                for o in self.operands
            ),
            outputs=tuple(map(shaped, self.outputs)),
        )

    def to_text(self) -> str:
        """JSON; sizes with Symbols are text."""
        return json.dumps(asdict(self._sized(size_text)), sort_keys=True)

    @staticmethod
    def of_text(text: str) -> ArrayWork:
        """The ArrayWork that `to_text` wrote."""
        record: dict[str, Any] = json.loads(text)
        record["operands"] = tuple(Operand(**o) for o in record["operands"])
        record["outputs"] = tuple(Output(**o) for o in record["outputs"])
        record["steps"] = tuple(VectorStep(**s) for s in record["steps"])
        return ArrayWork(**record)._sized(read_size)
