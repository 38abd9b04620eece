"""Softmax as people write it: probabilities over keys read as what was exponentiated.

exp(t) / sum(exp(t)) with any shift that does not depend on the key, exp of a log-softmax, sinks
as a further column or a further term of the sum, dropout on top. What is summed is read at the
keys: there it must be what is divided; where it has one column more, that is the sink.
Invariant: what is read gives the values of what was written, up to rounding and rows that see
nothing (`guarded` says what those give); else NoMatch says why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..ir.node import Node
from ..ir.types import product
from . import build, ops
from .axes import FIRST, Atoms, AxisIndex, Indices, atoms_of, flat, size_of, split, strip
from .recognize_mask import known
from .recognize_scores import NoMatch, Term, constant_factor, terms

Value = tuple[Node, Indices]


@dataclass(frozen=True)
class Dropout:
    """Random bits that keep a probability, and at what rate they do not."""

    rate: float
    bits: Node
    indices: Indices


@dataclass(frozen=True)
class Softmax:
    """Terms of the scores, of the sink's logit (none: no sink), dropout; the exp and its axes;
    whether the divisor is guarded against 0."""

    scores: list[Term]
    sinks: list[Term]
    dropout: Dropout | None
    power: Value
    guarded: bool


def find_softmax(node: Node, indices: Indices, keys: Atoms) -> Softmax:
    """Probabilities over the keys as what was exponentiated."""
    node, indices, dropout = _kept(node, indices)
    power, found, divisor = _quotient(node, indices)
    total, others, guarded = _total(*divisor)
    of_keys = set(flat(keys))
    lie = tuple([a for a in atoms_of(power[1]) if a in of_keys])
    if set(lie) != of_keys or of_keys & set(atoms_of(total.indices)):
        raise NoMatch("the softmax is not over the keys")
    sinks = _column(total, lie, found)
    if others:
        if sinks or len(others) != 1:
            raise NoMatch("the sum has more than one further term")
        sinks = _further(others[0])
    scores, sinks = _unshifted(_settled(found), _settled(sinks), keys)
    return Softmax(scores, sinks, dropout, power, guarded)


def _kept(node: Node, indices: Indices) -> tuple[Node, Indices, Dropout | None]:
    """Probabilities before dropout."""
    gain, dropout = 1.0, None
    while True:
        node, indices = strip(node, indices)
        scaled = constant_factor(node, indices)
        dropped = _dropped(node, indices) if node.op is ops.where else None
        if scaled is not None:
            gain, node = gain * scaled[0], scaled[1]
        elif dropped is not None and dropout is None:
            node, dropout = dropped
        else:
            break
    wanted = 1.0 if dropout is None else 1.0 / (1.0 - dropout.rate)
    if not math.isclose(gain, wanted, rel_tol=1e-6 if dropout is None else 4e-3):
        raise NoMatch(f"the probabilities are multiplied by {gain:g} after softmax")
    return node, indices, dropout


def _dropped(node: Node, indices: Indices) -> tuple[Node, Dropout] | None:
    """where(rate < uniform, x, 0) of 24 random bits."""
    keep, x, zero = node.inputs
    if known(zero, indices) != 0:
        return None
    test, at = strip(keep, indices)
    if test.op is not ops.less:
        return None
    rate = known(test.inputs[0], at)
    scaled, at = strip(test.inputs[1], at)
    found = constant_factor(scaled, at)
    if rate is None or found is None or found[0] != 2.0**-24 or not 0.0 < rate < 1.0:
        return None
    node, at = strip(found[1], at)
    while node.op is ops.cast:
        node, at = strip(node.inputs[0], at)
    if node.op is not ops.shift_right or known(node.inputs[1], at) != 8:
        return None
    bits, at = strip(node.inputs[0], at)
    return (x, Dropout(float(rate), bits, at)) if bits.op is ops.random_bits else None


# ---- what is divided, and by what -----------------------------------------------------------


def _quotient(node: Node, indices: Indices) -> tuple[Value, list[Term], Value]:
    """(exp, its terms, what it is divided by) of x / y, x * (1 / y) and exp(t - log(y))."""
    if node.op is ops.exp:
        found = terms(node.inputs[0], indices)
        logs = [t for t in found if t.factor == -1.0 and t.node.op is ops.log]
        if len(logs) != 1:
            raise NoMatch("exp before the last dot is not divided by a sum")
        rest = [t for t in found if t is not logs[0]]
        return (node, indices), rest, (logs[0].node.inputs[0], logs[0].indices)
    for x, y in _divisions(node, indices):
        power, at = strip(x, indices)
        if power.op is ops.exp:
            return (power, at), terms(power.inputs[0], at), y
    quiet = node.op in (ops.add, ops.subtract)  # the derivative of a cross entropy, say
    raise NoMatch(f"what the values are multiplied by is {node.op.name}, not a softmax", quiet)


def _divisions(node: Node, indices: Indices) -> Iterator[tuple[Node, Value]]:
    """x / y, and x * (1 / y) either way."""
    if node.op is ops.divide:
        yield node.inputs[0], (node.inputs[1], indices)
    for x, other in (node.inputs, node.inputs[::-1]) if node.op is ops.multiply else ():
        inverse, at = strip(other, indices)
        over_one = inverse.op is ops.divide and known(inverse.inputs[0], at) == 1
        if inverse.op is ops.reciprocal or over_one:
            yield x, (inverse.inputs[-1], at)


def _total(node: Node, indices: Indices) -> tuple[Term, list[Term], bool]:
    """The sum a divisor is, what is added to it, and whether it is guarded against 0."""
    node, indices = strip(node, indices)
    guarded = node.op is ops.where
    if guarded:
        node, indices = _unguarded(node, indices)
    parts = terms(node, indices)
    sums = [t for t in parts if t.node.op is ops.sum_ and t.factor == 1.0]
    if len(sums) != 1:
        raise NoMatch(f"the divisor is {node.op.name}, not the sum of what is divided")
    return sums[0], [t for t in parts if t is not sums[0]], guarded


def _unguarded(node: Node, indices: Indices) -> Value:
    """where(total == 0, c, total)."""
    test, at = strip(node.inputs[0], indices)
    if test.op in (ops.equal, ops.not_equal):
        total = strip(node.inputs[2 if test.op is ops.equal else 1], indices)
        for a, b in (test.inputs, test.inputs[::-1]):
            if known(b, at) == 0 and strip(a, at) == total:
                return total
    raise NoMatch("the divisor chooses between values")


# ---- what is summed -------------------------------------------------------------------------


def _column(total: Term, keys: Atoms, found: list[Term]) -> list[Term]:
    """What is summed beside the keys, if that is what is divided at the keys."""
    for here, column in _at_keys(total, keys):
        if Counter(_settled(_exponent(total, here))) == Counter(_settled(found)):
            return [] if column is None else _exponent(total, column)
    raise NoMatch("the divisor sums something else than what is divided")


def _at_keys(total: Term, keys: Atoms) -> Iterator[tuple[Indices, Indices | None]]:
    """Where what is summed has the keys, and where the one column that is no key."""
    axes, source = sorted(total.node.attrs["axes"]), total.node.inputs[0]

    def at(found: Sequence[AxisIndex]) -> Indices:
        summed, rest = iter(found), iter(total.indices)
        return tuple([next(summed if a in axes else rest) for a in range(len(source.shape))])

    sizes = [source.shape[a] for a in axes]
    count = size_of(keys)
    if product(tuple(sizes)) == count:
        parts = split(keys, sizes)
        if parts is not None:
            yield at([AxisIndex(p) for p in parts]), None
    elif sizes == [count + 1]:
        yield at([AxisIndex(keys)]), at([AxisIndex((), count)])
        yield at([AxisIndex(keys, 1)]), at([FIRST])
    else:
        raise NoMatch("the softmax is over more than the keys and one column")


def _exponent(total: Term, at: Indices) -> list[Term]:
    """The terms of what is summed, under its exp."""
    power, at = strip(total.node.inputs[0], at)
    if power.op is not ops.exp:
        raise NoMatch("the divisor sums something else than what is divided")
    return terms(power.inputs[0], at)


def _further(term: Term) -> list[Term]:
    """The logit of a further term of the sum: of exp, or of a constant."""
    value = known(term.node, term.indices)
    if term.factor == 1.0 and value is not None and value > 0:
        return [Term(1.0, build.constant(math.log(value), term.node.dtype), ())]
    if term.factor != 1.0 or term.node.op is not ops.exp:
        raise NoMatch("the sum has a further term that is no exp")
    return terms(term.node.inputs[0], term.indices)


# ---- shifts ---------------------------------------------------------------------------------


def _settled(found: list[Term]) -> list[Term]:
    """The terms with Atoms that are split no more, so that equal ones compare equal."""
    return [
        t._replace(indices=tuple([p._replace(atoms=flat(p.atoms)) for p in t.indices]))
        for t in found
    ]


def _unshifted(scores: list[Term], sinks: list[Term], keys: Atoms) -> tuple[list[Term], list[Term]]:
    """Terms of scores and sink without what is subtracted from both."""
    shifts = [t for t in scores if t.factor < 0 and not t.on(keys)]
    if not sinks:
        return [t for t in scores if t not in shifts], []
    if any(t not in sinks for t in shifts):
        raise NoMatch("the sink has another shift")
    shared = [t for t in scores if t in sinks and not t.on(keys)]
    logit = [t for t in sinks if t not in shared]
    zero = Term(1.0, build.constant(0.0, sinks[0].node.dtype), ())
    return [t for t in scores if t not in shared], logit or [zero]
