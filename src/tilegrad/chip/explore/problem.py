"""Problems of the explorer: a nest of loops and the Operands it reads and writes.

A convolution has seven loops (N, M, C, P, Q, R, S; with groups an eighth, G) and a matrix product
three. Each axis of an Operand is a sum of loops times whole numbers: the height of an input is
`stride * P + dilation * R`. Invariant: a loop takes part in at most one axis of an Operand; the
last Operand is the result, and loops that it lacks are summed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...core.errors import UserError

Term = tuple[str, int]  # loop, factor


@dataclass(frozen=True)
class Operand:
    """One tensor of a Problem: its axes as sums of loops, and the bits of an element."""

    name: str
    axes: tuple[tuple[Term, ...], ...]
    bits: int = 16

    @property
    def loops(self) -> frozenset[str]:
        """The loops whose turn changes what is read."""
        return frozenset(loop for axis in self.axes for loop, _ in axis)

    def words(self, sizes: Mapping[str, int]) -> int:
        """Elements of the box that loops of such sizes touch."""
        return math.prod(1 + sum(f * (sizes[loop] - 1) for loop, f in axis) for axis in self.axes)


@dataclass(frozen=True)
class Problem:
    """A nest of loops: sizes, the Operands read, and last the result."""

    name: str
    sizes: dict[str, int]
    operands: tuple[Operand, ...]
    count: int = 1  # how often a network has it
    facts: dict[str, int] = field(default_factory=dict)  # stride and the like, for people
    density: float = 1.0  # of the multiplications, those that are not by a pruned zero

    def __post_init__(self) -> None:
        for loop, size in self.sizes.items():
            if not isinstance(size, int) or size < 1:
                raise UserError(
                    f"loop {loop} of {self.name} has a bad size",
                    op="Problem",
                    expected="a whole number >= 1",
                    got=size,
                )
        for operand in self.operands:
            used = [loop for axis in operand.axes for loop, _ in axis]
            unknown = set(used) - set(self.sizes)
            if unknown or len(used) != len(set(used)):
                raise UserError(
                    f"{operand.name} of {self.name} has bad axes",
                    op="Problem",
                    expected=f"each of {', '.join(self.sizes)} at most once",
                    got=", ".join(used),
                )

    @property
    def loops(self) -> tuple[str, ...]:
        """Names of the loops."""
        return tuple(self.sizes)

    @property
    def result(self) -> Operand:
        """The Operand that is written."""
        return self.operands[-1]

    @property
    def macs(self) -> int:
        """Multiplications with addition, of one such Problem."""
        return math.prod(self.sizes.values())

    def words(self, operand: Operand) -> int:
        """Elements of an Operand."""
        return operand.words(self.sizes)

    def bytes(self) -> float:
        """Bytes of all Operands, each once."""
        return sum(self.words(o) * o.bits / 8 for o in self.operands)

    def operand(self, name: str) -> Operand:
        """An Operand by name."""
        return next(o for o in self.operands if o.name == name)


def summed(*terms: Term, sizes: Mapping[str, int]) -> tuple[Term, ...]:
    """An axis: terms without loops of size 1, divided by what all factors share.

    So elements that no turn of any loop touches are not counted.
    """
    kept = [(loop, factor) for loop, factor in terms if sizes[loop] > 1] or [terms[0]]
    shared = math.gcd(*(factor for _, factor in kept))
    return tuple((loop, factor // shared) for loop, factor in kept)


def convolution(
    *,
    N: int = 1,
    M: int,
    C: int,
    P: int,
    Q: int,
    R: int = 1,
    S: int = 1,
    G: int = 1,
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    bits: int | Sequence[int] = 16,
    name: str = "convolution",
    count: int = 1,
) -> Problem:
    """N batch, M filters and C channels (of a group), P x Q results, R x S windows, G groups.

    `bits` is for all Operands, or for weights, inputs and outputs.
    """
    down, across = (stride, stride) if isinstance(stride, int) else stride
    spread_down, spread_across = (dilation, dilation) if isinstance(dilation, int) else dilation
    sizes = {"N": N, "M": M, "C": C, "P": P, "Q": Q, "R": R, "S": S}
    group: tuple[tuple[Term, ...], ...] = ()
    if G > 1:
        sizes["G"], group = G, ((("G", 1),),)
    weight, given, result = _bits(bits)

    def plain(*loops: str) -> tuple[tuple[Term, ...], ...]:
        return group + tuple(((loop, 1),) for loop in loops)

    height = summed(("P", down), ("R", spread_down), sizes=sizes)
    width = summed(("Q", across), ("S", spread_across), sizes=sizes)
    operands = (
        Operand("weights", plain("M", "C", "R", "S"), weight),
        Operand("inputs", (*plain("N", "C"), height, width), given),
        Operand("outputs", plain("N", "M", "P", "Q"), result),
    )
    return Problem(name, sizes, operands, count, {"stride": down, "dilation": spread_down})


def gemm(
    *,
    M: int,
    N: int,
    K: int,
    B: int = 1,
    bits: int | Sequence[int] = 16,
    name: str = "gemm",
    count: int = 1,
) -> Problem:
    """M rows of inputs times a K x N matrix of weights, B times with other values.

    It is a convolution of 1 x 1 windows in the names of its loops: rows are P, features of the
    sum C, columns M. So one set of constraints says a dataflow for both.
    """
    return convolution(P=M, M=N, C=K, Q=1, G=B, bits=bits, name=name, count=count)


def pruned(problem: Problem) -> Problem:
    """The same with weights pruned to two of four: half of them, each with a 2-bit index.

    A 2:4 unit (`macs_a_cycle = 2`) needs half the cycles; without it only the bytes are fewer.
    """
    weights = problem.operand("weights")
    depth = problem.sizes.get("C", 1)
    if depth % 4 or weights.bits % 2:
        raise UserError(
            f"{problem.name} cannot be pruned to two of four",
            op="Problem",
            expected="C a multiple of 4, and weights of an even number of bits",
            got=f"C = {depth}, {weights.bits} bits",
            hint=f"C = {4 * math.ceil(depth / 4)} would fit",
        )
    half = replace(weights, bits=weights.bits // 2 + 1)
    operands = tuple(half if o is weights else o for o in problem.operands)
    return replace(problem, operands=operands, density=problem.density / 2)


def _bits(bits: int | Sequence[int]) -> tuple[int, int, int]:
    found = (bits,) * 3 if isinstance(bits, int) else tuple(bits)
    if len(found) != 3 or not all(isinstance(b, int) and 1 <= b <= 64 for b in found):
        raise UserError("bad bits", op="Problem", expected="1 to 64, one or three", got=bits)
    return found


__all__ = ["Operand", "Problem", "Term", "convolution", "gemm", "pruned", "summed"]
