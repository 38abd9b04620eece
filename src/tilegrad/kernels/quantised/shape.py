"""What the kernels of quantised products agree on: sizes, and what a kernel file offers.

A product is x (tokens, columns) times the transpose of weights (rows, columns) whose rows are
stored in blocks of a Format. The weights are repacked once into *parts*, named arrays in the
layout that a machine's kernels read; they stay quantised. There is a kernel file for each kind of
Target, `cpu` and `gpu`, with the same functions:

- `ROWS`: rows that are repacked together; a chunk of rows begins at a multiple of it.
- `why_not(shape, target) -> str`: why no kernel takes this, '' where one does.
- `parts(shape) -> list[(name, shape, dtype)]`: the parts in order. They depend on format, rows and
  columns alone. The first axis of each is cut as the rows are: of `round_up(shape.rows, ROWS)` rows
  (or of as many as there are, where ROWS divides them) it has an equal share for every ROWS.
- `pack(shape, raw) -> dict[name, array]`: bytes (n, row bytes) of n rows of the Format as the
  parts of n rows, however many `shape` has. Where n is no multiple of ROWS, rows are added that
  count for nothing.
- `callee(shape, target, around) -> KernelCallee`: the product, and with it, where that is given,
  what is `Around` it in a decoder, in one launch. Arguments: x (tokens, columns) in `shape.dtype`,
  then the parts in order. Result: (tokens, rows) in `shape.dtype`; sums in float32.
- `grouped_callee(shape, target, block)`: the product of `shape.groups` groups of rows of x, each
  with its own rows of the weights. Arguments: x, where groups begin (on CPUs the offsets, on GPUs a
  list of blocks of `block` rows; see `kernels.grouped`), then the parts.
- `take_callee(shape, target) -> KernelCallee`: rows by number. Arguments: ids (tokens,) int32,
  each within the rows, then the parts. Result: (tokens, columns) in `shape.dtype`.
- `why_not_around(shape, target, around)`: why no kernel takes a product with that around it.
- `many(form, dtype, target)`: tokens of 16 bits from which a product had better unpack its weights
  to scratch memory first and be an ordinary one; 0 for never. Else `unpack_callee(shape, target)`
  has the parts as arguments and (rows, columns) in `shape.dtype` as its result.

Invariant: what the parts hold are the values of `Format.unpack` to float32 rounding; `tokens` may
be a Symbol and nothing else may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.dtype import DType, bfloat16, float16, float32
from ...core.format import Format
from ...ir.symbol import Size
from ...ir.types import Memory
from .layout import LAYOUTS, Layout

Part = tuple[str, tuple[int, ...], DType]  # a name, sizes, a dtype


@dataclass(frozen=True)
class QuantisedShape:
    """A product of tokens with weights of a Format."""

    format: Format
    rows: int  # outputs
    columns: int  # inputs, whole blocks of the Format
    tokens: Size = 1
    dtype: DType = float32  # of x and of the result
    groups: int = 1  # of rows of x, which have as many rows of the weights each

    @property
    def outputs(self) -> int:
        """Columns of the result: rows of the weights of a group."""
        return self.rows // self.groups

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as the Format stores it."""
        return self.format.row_bytes(self.columns)

    @property
    def layout(self) -> Layout:
        """How the codes are kept."""
        return LAYOUTS[self.format.name]

    def why_not(self, block: int) -> str:
        """Why no kernel with such blocks of rows takes this; '' where one may."""
        if self.format.name not in LAYOUTS:
            return f"weights of {self.format} are not quantised"
        if self.rows % (block * self.groups) and self.groups > 1:
            return f"rows of a group are a multiple of {block}"
        if self.dtype not in (float32, bfloat16, float16):
            return "tokens are float32, bfloat16 or float16"
        return ""


@dataclass(frozen=True)
class Around:
    """What is computed with a product. Parameters: x, `norm` (columns,), the parts, `bias`
    (rows,), `residual` like the result; the last three where they are there."""

    norm: float | None = None  # x is divided by the root of its mean square plus this, times norm
    offset: float = 0.0  # that is added to norm
    bias: bool = False
    gated: str = ""  # 'silu': rows are gates, then what they gate; results are half as many
    residual: bool = False
    splits: tuple[int, ...] = ()  # rows of several results that follow one another

    def results(self, shape: QuantisedShape) -> tuple[int, ...]:
        """Rows of each result."""
        return self.splits or (shape.outputs // (2 if self.gated else 1),)

    def starts(self, shape: QuantisedShape) -> list[int]:
        """Where the rows of each result begin."""
        sizes = self.results(shape)
        return [sum(sizes[:i]) for i in range(len(sizes))]

    def names(self, shape: QuantisedShape) -> list[str]:
        """The names of the results."""
        return [f"out{i}" for i in range(len(self.results(shape)))]

    def why_not(self, shape: QuantisedShape, block: int) -> str:
        """Why a kernel that takes rows in blocks has no such product; '' where it has."""
        if self.gated not in ("", "silu"):
            return f"the activation {self.gated}"
        if self.gated and (self.bias or self.splits or shape.rows % (2 * block)):
            return f"gates of rows that are no multiple of {2 * block}, or with more around them"
        if self.splits and (
            self.residual or sum(self.splits) != shape.rows or any(s % block for s in self.splits)
        ):
            return f"results of rows that are no multiple of {block}"
        return ""


NOTHING = Around()


def constants(parts: Sequence[Part]) -> list[tuple[str, Memory]]:
    """The parts as parameters of a Body."""
    return [(name, Memory(sizes, dtype, use="constant")) for name, sizes, dtype in parts]


def parameters(
    shape: QuantisedShape, parts: Sequence[Part], around: Around = NOTHING
) -> list[tuple[str, Memory]]:
    """The parameters of a product, in the order of `Around`, then its results."""
    dtype, results = shape.dtype, around.results(shape)
    made = [("x", Memory((shape.tokens, shape.columns), dtype))]
    if around.norm is not None:
        made.append(("norm", Memory((shape.columns,), dtype, use="constant")))
    made += constants(parts)
    if around.bias:
        made.append(("bias", Memory((shape.rows,), dtype, use="constant")))
    if around.residual:
        made.append(("residual", Memory((shape.tokens, results[0]), dtype)))
    for name, size in zip(around.names(shape), results):
        made.append((name, Memory((shape.tokens, size), dtype, use="result")))
    return made
