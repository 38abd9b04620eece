"""einsum: sums of products written with index letters, as in PyTorch.

Each operand is first brought to distinct letters (repeated ones are diagonals, those nobody
else needs are summed); then pairs are contracted, the cheapest first, each as one `dot`.
Invariant: an operand is always a Tensor and the string of its axes' letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import DTypeError, ShapeError, UserError
from ..graph import build
from ..ir.symbol import Size, high
from .matmul import matched
from .tensor import Tensor, lift, node_of, wrap

Term = tuple[Tensor, str]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def einsum(equation: Any, *operands: Any) -> Tensor:
    """The sum of products that the equation says: "bij,bjk->bik"."""
    if not isinstance(equation, str):
        equation, operands = _from_lists(equation, operands)
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not operands:
        raise UserError("needs operands", op="einsum", expected="at least one Tensor", got="none")
    tensors = [lift(o) for o in operands]
    if len(tensors) > 1:
        tensors = matched("einsum", *tensors)
    letters, output = _parse(equation, tensors)
    sizes = _sizes(equation, letters, tensors)
    terms = [_distinct(t, names, sizes) for t, names in zip(tensors, letters)]
    while len(terms) > 1:
        i, j = _cheapest(terms, output, sizes)
        first, second = terms[i], terms[j]
        rest = [t for k, t in enumerate(terms) if k not in (i, j)]
        needed = set(output).union(*(names for _, names in rest))
        terms = [*rest, _contract(first, second, needed)]
    return _finish(terms[0], output, sizes)


# ---- the equation ---------------------------------------------------------------------------


def _from_lists(first: Any, rest: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """The form with lists of numbers: einsum(a, [0, 1], b, [1, 2], [0, 2])."""
    values = [first, *rest]
    paired = len(values) - len(values) % 2
    texts = [
        "".join("..." if n is Ellipsis else LETTERS[n] for n in row) for row in values[1:paired:2]
    ]
    equation = ",".join(texts)
    if len(values) % 2:
        equation += "->" + "".join("..." if n is Ellipsis else LETTERS[n] for n in values[-1])
    return equation, tuple(values[:paired:2])


def _parse(equation: str, tensors: list[Tensor]) -> tuple[list[str], str]:
    """The letters of each operand and of the output; digits stand for the ellipsis."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    parts = left.split(",")
    if len(parts) != len(tensors):
        raise UserError(
            "the equation does not fit the operands",
            op="einsum",
            expected=f"{len(parts)} operands for {equation!r}",
            got=len(tensors),
        )
    extra = [
        t.ndim - len(p.replace("...", "")) if "..." in p else 0 for p, t in zip(parts, tensors)
    ]
    most = max([0, *extra])
    hidden = "".join(chr(0x100 + i) for i in range(most))
    letters = [p.replace("...", hidden[most - max(e, 0) :]) for p, e in zip(parts, extra)]
    for part, names, tensor in zip(parts, letters, tensors):
        bad = [c for c in part.replace("...", "") if c not in LETTERS]
        if bad or len(names) != tensor.ndim:
            raise ShapeError(
                "an operand does not fit its letters",
                op="einsum",
                expected=f"{part!r}: letters for {tensor.ndim} axes",
                got=f"{equation!r} with shape {build.show(tensor.shape)}",
            )
    if arrow:
        output = right.replace("...", hidden)
    else:
        every = "".join(letters)
        output = hidden + "".join(
            sorted(c for c in set(every) - set(hidden) if every.count(c) == 1)
        )
    unknown = set(output) - set("".join(letters))
    if unknown or len(set(output)) != len(output):
        raise UserError(
            "bad output",
            op="einsum",
            got=repr(equation),
            expected="distinct letters that an operand has",
        )
    return letters, output


def _sizes(equation: str, letters: list[str], tensors: list[Tensor]) -> dict[str, Size]:
    sizes: dict[str, Size] = {}
    for names, tensor in zip(letters, tensors):
        for name, size in zip(names, tensor.shape):
            known = sizes.get(name, 1)
            if known != 1 and size != 1 and known != size:
                raise ShapeError(
                    f"letter {name!r} has two sizes",
                    op="einsum",
                    expected=f"{known}",
                    got=f"{size} in {equation!r}",
                )
            if name not in sizes or known == 1:
                sizes[name] = size
    return sizes


# ---- the products ---------------------------------------------------------------------------


def _distinct(x: Tensor, names: str, sizes: dict[str, Size]) -> Term:
    """Diagonals for repeated letters; axes of size 1 that broadcast are dropped."""
    for name in dict.fromkeys(names):
        while names.count(name) > 1:
            first = names.index(name)
            second = names.index(name, first + 1)
            if x.shape[first] != x.shape[second]:
                raise ShapeError(
                    f"repeated letter {name!r} has two sizes",
                    op="einsum",
                    expected=x.shape[first],
                    got=x.shape[second],
                )
            x = x.diagonal(0, first, second)
            names = names[:first] + names[first + 1 : second] + names[second + 1 :] + name
    gone = [i for i, n in enumerate(names) if x.shape[i] == 1 and sizes[n] != 1]
    if gone:
        x = x.squeeze(gone)
        names = "".join(n for i, n in enumerate(names) if i not in gone)
    return x, names


def _summed(term: Term, needed: set[str]) -> Term:
    x, names = term
    axes = [i for i, n in enumerate(names) if n not in needed]
    if not axes:
        return term
    return x.sum(axes), "".join(n for n in names if n in needed)


def _cheapest(terms: list[Term], output: str, sizes: dict[str, Size]) -> tuple[int, int]:
    """The pair whose result is smallest for what it takes in."""
    pairs = [(i, j) for i in range(len(terms)) for j in range(i + 1, len(terms))]

    def cost(pair: tuple[int, int]) -> tuple[int, int]:
        i, j = pair
        needed = set(output).union(*(n for k, (_, n) in enumerate(terms) if k not in pair))
        names = set(terms[i][1]) | set(terms[j][1])
        size, work = 1, 1
        for name in names:
            work *= high(sizes[name])
            size *= high(sizes[name]) if name in needed else 1
        return work, size

    return min(pairs, key=cost)


def _contract(first: Term, second: Term, needed: set[str]) -> Term:
    """One dot: shared letters are batch axes where still needed, else contracted."""
    a, left = _summed(first, needed | set(second[1]))
    b, right = _summed(second, needed | set(first[1]))
    if a.dtype is not b.dtype:  # one was summed alone, in int64
        a, b = a.long(), b.long()
    shared = [n for n in left if n in right]
    batch = [n for n in shared if n in needed]
    inner = [n for n in shared if n not in needed]
    node = build.dot(
        node_of(a),
        node_of(b),
        ([left.index(n) for n in batch], [right.index(n) for n in batch]),
        ([left.index(n) for n in inner], [right.index(n) for n in inner]),
    )
    names = batch + [n for n in left if n not in shared] + [n for n in right if n not in shared]
    return wrap(node, a, b), "".join(names)


def _finish(term: Term, output: str, sizes: dict[str, Size]) -> Tensor:
    x, names = _summed(term, set(output))
    missing = [n for n in output if n not in names]  # broadcast axes of size 1
    if missing:
        x, names = x.reshape(*x.shape, *[1] * len(missing)), names + "".join(missing)
    if any(sizes[n] != x.shape[names.index(n)] for n in output):
        raise DTypeError("letters were lost", op="einsum", got=names)
    return x.permute([names.index(n) for n in output])
