"""What matrix products on GPUs agree on: operands, Plans of the wide kernel, and how tiles lie.

Invariant: what a Plan's tiles, places and programs are follows from operands and Plan alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ... import tile
from ...core.dtype import DType, float32, int32
from ...ir.node import Node
from ...ir.symbol import Size, ceil_divide, high, multiply
from ...ir.types import Memory

P = TypeVar("P")
Where = tuple[Size, Size, Size]  # batch, row, column
# (piece of 64 rows of each product, of each residual, where they begin) -> what is stored
Epilogue = Callable[..., Node]
# (consumer, where its tokens begin, how many) -> before the first product: what epilogues share
Prologue = Callable[[int, Size, int], None]
# (rows and columns of a piece, where it begins): asks for what its epilogue will read
Ask = Callable[[tuple[int, int], Where], None]


@dataclass(frozen=True)
class WidePlan:
    """Choices of `WideMatmul`: the tile, the ring, programs, and how tiles are ordered."""

    tile: tuple[int, int, int] = (128, 256, 64)
    stages: int = 4
    programs: int = 132
    group: int = 8  # rows of tiles that are taken together
    staged: int = 64  # columns of a piece of the result on its way out
    cluster: int = 1  # programs with neighbouring tiles that share what they read
    across: bool = False  # neighbours along n, who share a; else along m, who share b
    split: int = 1  # programs that share a tile, each with a part of k; one tile each
    early: bool = True  # lets the next launch begin at its own start, not at its end
    together: int = 1  # pieces of the result that are staged at once


@dataclass(frozen=True)
class Choice(Generic[P]):
    """A Plan, whether the operands are turned (weights as rows), and the time expected."""

    plan: P
    turned: bool
    seconds: float


@dataclass(frozen=True)
class Operands:
    """a (m, k), b (k, n) and the result, as they lie: strides in elements, one of them 1."""

    m: Size
    n: Size
    k: Size
    dtype: DType
    result: DType
    a_along_k: bool = True  # a is stored (m, k), else (k, m)
    b_along_k: bool = True  # b is stored (n, k), else (k, n)
    batch: Size = 1
    turned: bool = False  # the result is stored (n, m): a are the weights, b few tokens
    weights: tuple[int, ...] = ()  # sizes of several b with one a; n is their sum, or each
    gated: bool = False  # the epilogue makes one result of the products with all weights
    block: int = 0  # rows of a block, where rows are in groups: a batch is a group's weights
    sparse: bool = False  # of the weights two of every four along k are stored
    scaled: bool = False  # blocks of k have scales, and their sums are added to a total

    @property
    def most(self) -> tuple[int, int, int, int]:
        """m, n, k and batch, at most."""
        return high(self.m), high(self.n), high(self.k), high(self.batch)

    @property
    def sums(self) -> DType:
        """The dtype that products are added in."""
        return float32 if self.dtype.is_float else int32

    @property
    def products(self) -> int:
        """Products that the epilogue makes one result of."""
        return len(self.weights) if self.gated else 1

    @property
    def parameters(self) -> list[tuple[str, Memory]]:
        """a, b and the result as parameters of a Body; weights are constants."""
        lead = () if self.batch == 1 else (self.batch,)
        a, b = side(self.m, self.k, self.a_along_k), side(self.n, self.k, self.b_along_k)
        c = side(self.m, self.n, not self.turned)
        uses = side("value", "constant", not self.turned)
        return [
            ("a", Memory((*lead, *a), self.dtype, use=uses[0])),
            ("b", Memory((*lead, *b), self.dtype, use=uses[1])),
            ("c", Memory((*lead, *c), self.result, use="result")),
        ]

    def span(self, tile: tuple[int, int, int]) -> tuple[int, int]:
        """Rows and columns of results that a tile computes: those of each weight, if gated."""
        rows, columns, _ = tile
        parts = self.products
        return (rows // parts, columns) if self.turned else (rows, columns // parts)


def side(rows: Any, columns: Any, plain: bool) -> tuple[Any, Any]:
    """Two of a matrix in the order it is stored in."""
    return (rows, columns) if plain else (columns, rows)


def of_batch(memory: Any, batch: Any) -> Any:
    """The matrix of a batch; one that all share has two axes."""
    return memory if len(memory.shape) == 2 else memory[batch]


def box(memory: Any, at: tuple[Any, Any], shape: tuple[int, int]) -> Any:
    """The part of a matrix that begins somewhere."""
    (row, column), (rows, columns) = at, shape
    return memory[row : row + rows, column : column + columns]


def positions(size: int, start: Any) -> Any:
    """start, start + 1, ..."""
    return tile.arange(size) + start


def tile_at(at: Any, x: Operands, counts: tuple[Size, Size], group: int) -> tuple[Any, Any, Any]:
    """(batch, row, column) of a tile by its number, counted in tiles: groups of rows are taken
    down, then across, so that what is read stays in the cache."""
    down, across = counts
    batch, rest = 0, at
    if x.batch != 1:
        batch, rest = at // (down * across), at % (down * across)
    wide = across * group
    first = rest // wide * group
    rows = tile.maximum(tile.minimum(down - first, group), 1)
    within = rest % wide
    return batch, first + within % rows, within // rows


@tile.function
def among(along: Any, starts: Sequence[int], do: Callable[[int], None], number: int = 0) -> None:
    """do(number of the part that `along` is in), by branches that all threads take alike."""
    if number == len(starts) - 1 or along < starts[number + 1]:
        do(number)
    else:
        among(along, starts, do, number + 1)


def tile_counts(x: Operands, plan: WidePlan) -> tuple[Size, Size]:
    """Tiles along m and n, in what a cluster takes at once; no tile spans two weights."""
    rows, columns = x.span(plan.tile)
    near_m, near_n = (1, plan.cluster) if plan.across else (plan.cluster, 1)
    down, across = ceil_divide(x.m, rows * near_m), ceil_divide(x.n, columns * near_n)
    if x.weights and not x.gated:
        tiles = sum(ceil_divide(n, rows if x.turned else columns) for n in x.weights)
        if x.turned:
            down = ceil_divide(tiles, near_m)
        else:
            across = ceil_divide(tiles, near_n)
    return down, across


def rows_stay(x: Operands, plan: WidePlan) -> bool:
    """Whether all tiles that a program has are of the same rows, as `tile_at` shares them out."""
    down = high(tile_counts(x, plan)[0])
    clusters = plan.programs // (plan.cluster * plan.split)
    return waves(x, plan) == 1 or (x.batch == 1 and down <= plan.group and clusters % down == 0)


def in_ring(x: Operands, plan: WidePlan, dtype: DType) -> bool:
    """Whether a matrix like the result that the epilogue reads can come through the ring.

    It takes a's place in a stage, 64 rows of columns that whole pieces divide, and b's below it
    where b lies along k.
    """
    _, tn, tk = plan.tile
    wide = tk if x.a_along_k else 64
    placed_as = x.a_along_k or tk == 64
    plain = not x.turned and not x.weights and plan.split == 1
    return plain and placed_as and dtype is x.dtype and wide % plan.staged == 0 and wide <= tn


def waves(x: Operands, plan: WidePlan) -> int:
    """How many tiles a program has, at most."""
    tiles = high(x.batch) * high(multiply(*tile_counts(x, plan)))
    return ceil_divide(tiles, max(1, plan.programs // (plan.cluster * plan.split)))


def exchanged(plan: WidePlan) -> int:
    """Bytes that a program with a part of k gets from the others that share its tile."""
    return plan.tile[0] * plan.tile[1] // plan.split * (plan.split - 1) * float32.size


def staged_rooms(x: Operands, plan: WidePlan) -> int:
    """Places of pieces on their way out: one for each where all pieces of a tile go at once (those
    of the tile before have left by then), else two in turn."""
    pieces = x.span(plan.tile)[1] // plan.split // plan.staged
    if x.block:
        return 2
    if plan.together >= pieces:
        return pieces
    return min(max(2, plan.together), waves(x, plan) * pieces)


def first_wrong(found: Sequence[tuple[Any, str]]) -> str:
    """The first reason that holds, of some (whether it does, reason); '' for none."""
    return next((why for is_wrong, why in found if is_wrong), "")


def why_not(x: Operands, plan: WidePlan) -> str:
    """Why no Body with a Plan can be right; '' where one can."""
    tm, tn = x.span(plan.tile)
    wrong = [
        (plan.stages < 2, "a ring has two stages or more"),
        (plan.programs % (plan.cluster * plan.split), "programs come in whole clusters"),
        (tn % (8 * plan.split), "a split k divides the columns in eights"),
        (plan.split > 1 and waves(x, plan) > 1, "with a split k a program has one tile"),
        (tn // plan.split % plan.staged, "staged pieces divide the columns"),
        (plan.across and (tm // 64) % plan.cluster, "a shared a comes in 64 rows a program"),
    ]
    return first_wrong(wrong)


def swizzle_of(columns: int, dtype: DType) -> str:
    """The swizzle whose span is one row (or a part) of so many columns; '' for none."""
    bytes_ = columns * dtype.size
    fits = [span for span in (128, 64, 32) if bytes_ % span == 0]
    return f"swizzle{fits[0]}" if fits and bytes_ & (bytes_ - 1) == 0 else ""
