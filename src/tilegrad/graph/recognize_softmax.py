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
from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.types import product
from . import build, ops
from .axes import Atoms, AxisIndex, Place, flat, size_of, split
from .recognize_mask import known
from .recognize_scores import NoMatch, Term, pairs, terms, unscaled


@dataclass(frozen=True)
class Softmax:
    """Terms of the scores, of the sink's logit (none: no sink); the exp; whether the divisor is
    guarded against 0; random bits that keep a probability, and at what rate they do not."""

    scores: list[Term]
    sinks: list[Term]
    power: Place
    guarded: bool
    dropout: float
    bits: Place | None


def find_softmax(place: Place, keys: Atoms) -> Softmax:
    """Probabilities over the keys as what was exponentiated."""
    place, dropout, bits = _kept(place)
    power, found, divisor = _quotient(place)
    total, others, guarded = _total(divisor)
    of_keys = set(flat(keys))
    lie = tuple([a for a in power.atoms if a in of_keys])
    if set(lie) != of_keys or of_keys & set(total.atoms):
        raise NoMatch("the softmax is not over the keys")
    sinks = _column(total, lie, found)
    if others:
        if sinks or len(others) != 1 or others[0].factor != 1.0:
            raise NoMatch("the sum has more than one further term")
        sinks = _logarithm(others[0].place)
    scores, sinks = _unshifted(_settled(found), _settled(sinks), keys)
    return Softmax(scores, sinks, power, guarded, dropout, bits)


def _kept(place: Place) -> tuple[Place, float, Place | None]:
    """Probabilities before dropout, its rate and its bits."""
    gain, place = unscaled(place)
    place, rate, bits = _dropped(place) or (place, 0.0, None)
    factor, place = unscaled(place)
    if not math.isclose(gain * factor, 1.0 / (1.0 - rate), rel_tol=4e-3 if rate else 1e-6):
        raise NoMatch(f"the probabilities are multiplied by {gain * factor:g} after softmax")
    return place, rate, bits


def _dropped(place: Place) -> tuple[Place, float, Place] | None:
    """(x, rate, bits) of where(rate < uniform, x, 0) of 24 random bits."""
    if place.op is not ops.where:
        return None
    keep, x, zero = place.inputs
    test = keep.strip()
    if known(zero) != 0 or test.op is not ops.less:
        return None
    rate, (factor, top) = known(test.inputs[0]), unscaled(test.inputs[1])
    if rate is None or factor != 2.0**-24 or not 0.0 < rate < 1.0:
        return None
    while top.op is ops.cast:
        top = top.inputs[0].strip()
    if top.op is not ops.shift_right or known(top.inputs[1]) != 8:
        return None
    bits = top.inputs[0].strip()
    return (x, float(rate), bits) if bits.op is ops.random_bits else None


# ---- what is divided, and by what -----------------------------------------------------------


def _quotient(place: Place) -> tuple[Place, list[Term], Place]:
    """(exp, its terms, what it is divided by) of x / y, x * (1 / y) and exp(t - log(y))."""
    if place.op is ops.exp:
        found = terms(place.inputs[0])
        logs = [t for t in found if t.factor == -1.0 and t.place.op is ops.log]
        if len(logs) != 1:
            raise NoMatch("exp before the last dot is not divided by a sum")
        return place, [t for t in found if t is not logs[0]], logs[0].place.inputs[0]
    for x, y in pairs(place):
        power, y = x.strip(), y.strip()
        divides = place.op is ops.divide
        inverse = y.op is ops.reciprocal or (y.op is ops.divide and known(y.inputs[0]) == 1)
        if power.op is ops.exp and (divides or inverse):
            return power, terms(power.inputs[0]), y if divides else y.inputs[-1]
    quiet = place.op in (ops.add, ops.subtract)  # the derivative of a cross entropy, say
    raise NoMatch(f"what the values are multiplied by is {place.op.name}, not a softmax", quiet)


def _total(divisor: Place) -> tuple[Place, list[Term], bool]:
    """The sum a divisor is, what is added to it, and whether it is guarded against 0."""
    divisor = divisor.strip()
    guarded = divisor.op is ops.where
    parts = terms(_unguarded(divisor) if guarded else divisor)
    sums = [t for t in parts if t.place.op is ops.sum_ and t.factor == 1.0]
    if len(sums) != 1:
        raise NoMatch(f"the divisor is {divisor.op.name}, not the sum of what is divided")
    return sums[0].place, [t for t in parts if t is not sums[0]], guarded


def _unguarded(divisor: Place) -> Place:
    """where(total == 0, c, total)."""
    test = divisor.inputs[0].strip()
    if test.op in (ops.equal, ops.not_equal):
        total = divisor.inputs[2 if test.op is ops.equal else 1].strip()
        for a, b in (test.inputs, test.inputs[::-1]):
            if known(b) == 0 and a.strip() == total:
                return total
    raise NoMatch("the divisor chooses between values")


# ---- what is summed -------------------------------------------------------------------------


def _column(total: Place, keys: Atoms, found: list[Term]) -> list[Term]:
    """What is summed beside the keys, if that is what is divided at the keys."""
    axes, source = sorted(total.node.attrs["axes"]), total.node.inputs[0]

    def at(found: Sequence[AxisIndex]) -> list[Term]:
        summed, rest = iter(found), iter(total.indices)
        indices = [next(summed if a in axes else rest) for a in range(len(source.shape))]
        return _logarithm(Place(source, tuple(indices)).strip())

    sizes, count = [source.shape[a] for a in axes], size_of(keys)
    parts = split(keys, sizes) if product(tuple(sizes)) == count else None
    if parts is not None and _alike(at([AxisIndex(p) for p in parts]), found):
        return []
    if sizes == [count + 1]:  # the column is the last, or the first
        for start, column in ((0, count), (1, 0)):
            if _alike(at([AxisIndex(keys, start)]), found):
                return at([AxisIndex((), column)])
    raise NoMatch("the divisor sums something else than what is divided and one column")


def _logarithm(place: Place) -> list[Term]:
    """The terms of the logarithm of what is summed: of exp, or of a constant."""
    if place.op is ops.exp:
        return terms(place.inputs[0])
    value = known(place)
    if value is None or not value > 0:
        raise NoMatch("the divisor sums what is no exp")
    return [Term(1.0, Place(build.constant(math.log(value), place.node.dtype), ()))]


# ---- shifts ---------------------------------------------------------------------------------


def _settled(found: list[Term]) -> list[Term]:
    """The terms with Atoms that are split no more, so that equal ones compare equal."""
    return [
        Term(factor, Place(node, tuple([p._replace(atoms=flat(p.atoms)) for p in indices])))
        for factor, (node, indices) in found
    ]


def _alike(a: list[Term], b: list[Term]) -> bool:
    return Counter(_settled(a)) == Counter(_settled(b))


def _unshifted(scores: list[Term], sinks: list[Term], keys: Atoms) -> tuple[list[Term], list[Term]]:
    """Terms of scores and sink without what is subtracted from both."""
    shifts = [t for t in scores if t.factor < 0 and not t.place.changes_with(keys)]
    if not sinks:
        return [t for t in scores if t not in shifts], []
    if any(t not in sinks for t in shifts):
        raise NoMatch("the sink has another shift")
    shared = [t for t in scores if t in sinks and not t.place.changes_with(keys)]
    logit = [t for t in sinks if t not in shared]
    zero = Term(1.0, Place(build.constant(0.0, sinks[0].place.node.dtype), ()))
    return [t for t in scores if t not in shared], logit or [zero]
