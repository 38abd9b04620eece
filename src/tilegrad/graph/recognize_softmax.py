"""Softmax as people write it: probabilities over keys read as what was exponentiated.

exp(t) / sum(exp(t)) with any shift that does not depend on the key, exp of a log-softmax, sinks
as a further column or a further term of the sum, dropout on top.
Invariant: what is read gives the values of what was written, up to rounding and rows that see
nothing (`guarded` says what those give); else NoMatch says why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..ir.node import Node
from . import build, ops
from .axes import FIRST, Atom, Atoms, AxisIndex, Indices, depends, down, flat, fresh, size_of, strip
from .recognize_mask import known
from .recognize_terms import NoMatch, Term, constant_factor, terms


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
    power: tuple[Node, Indices]
    guarded: bool = False


def find_softmax(node: Node, indices: Indices, keys: Atoms) -> Softmax:
    """Probabilities over the keys as what was exponentiated."""
    gain, dropout = 1.0, None
    while True:
        node, indices = strip(node, indices)
        scaled = constant_factor(node, indices)
        dropped = _dropped(node, indices) if node.op is ops.where else None
        if scaled is not None and node.op is ops.multiply:
            gain, node = gain * scaled[0], scaled[1]
        elif dropped is not None and dropout is None:
            node, dropout = dropped
        else:
            break
    wanted = 1.0 if dropout is None else 1.0 / (1.0 - dropout.rate)
    if not math.isclose(gain, wanted, rel_tol=1e-6 if dropout is None else 4e-3):
        raise NoMatch(f"the probabilities are multiplied by {gain:g} after softmax")
    if node.op is ops.exp:
        scores, sinks = _log_form(node, indices, keys)
        return Softmax(scores, sinks, dropout, (node, indices))
    power, at, divisor, under = _quotient(node, indices)
    scores, sinks = _normalised(power, at, divisor, under, keys)
    return Softmax(scores, sinks, dropout, (power, at), strip(divisor, under)[0].op is ops.where)


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


def _quotient(node: Node, indices: Indices) -> tuple[Node, Indices, Node, Indices]:
    """exp(t) / sum(exp(t)), or the product with the reciprocal."""
    pairs: list[tuple[Node, Node]] = []
    if node.op is ops.divide:
        pairs = [(node.inputs[0], node.inputs[1])]
    elif node.op is ops.multiply:
        for a, b in (node.inputs, node.inputs[::-1]):
            inverse, at = strip(b, indices)
            if inverse.op is ops.reciprocal or (
                inverse.op is ops.divide and known(inverse.inputs[0], at) == 1
            ):
                pairs.append((a, b))
    for a, b in pairs:
        power, at = strip(a, indices)
        if power.op is not ops.exp:
            continue
        below, under = b, indices
        if node.op is ops.multiply:
            below, under = strip(b, indices)
            below = below.inputs[-1]
        return power, at, below, under
    quiet = node.op in (ops.add, ops.subtract)  # the derivative of a cross entropy, say
    raise NoMatch(f"what the values are multiplied by is {node.op.name}, not a softmax", quiet)


def _normalised(
    power: Node, indices: Indices, divisor: Node, under: Indices, keys: Atoms
) -> tuple[list[Term], list[Term]]:
    total, at, others = _total(divisor, under)
    source = total.inputs[0]
    inside, wide = _summed_indices(total, at)
    same, reached = strip(source, inside)
    if same is not power:
        raise NoMatch("the divisor sums something else than what is divided")
    found = _meeting(reached, indices, wide)
    shifted = terms(power.inputs[0], indices)
    above = [t for t in shifted if not _on(t, keys)]
    if not covers(found, keys, len(wide)):
        if others:
            raise NoMatch("the sum has more than one further term")
        return _column(terms(power.inputs[0], reached), indices, wide, found, keys)
    if others:
        return shifted_out(shifted, keys), _further(others, above)
    return shifted_out(shifted, keys), []


def _log_form(node: Node, indices: Indices, keys: Atoms) -> tuple[list[Term], list[Term]]:
    """exp(t - log(sum(exp(t)))), where both may have a shift."""
    found = terms(node.inputs[0], indices)
    logs = [t for t in found if t.factor == -1.0 and t.node.op is ops.log]
    if len(logs) != 1:
        raise NoMatch("exp before the last dot is not divided by a sum")
    rest = [t for t in found if t is not logs[0]]
    total, at, others = _total(logs[0].node.inputs[0], logs[0].indices)
    inside, wide = _summed_indices(total, at)
    power, at = strip(total.inputs[0], inside)
    if power.op is not ops.exp or others:
        raise NoMatch("the logarithm is not of a sum of exp")
    summed_terms = terms(power.inputs[0], at)
    if len(summed_terms) != len(rest):
        raise NoMatch("the logarithm is of a sum of something else")
    met: dict[Atom, AxisIndex] = {}
    for term in summed_terms:
        for other in rest:
            if term.factor == other.factor and term.node is other.node:
                try:
                    met.update(_meeting(term.indices, other.indices, wide))
                except NoMatch:
                    continue
                rest.remove(other)
                break
        else:
            raise NoMatch("the logarithm is of a sum of something else")
    if not covers(met, keys, len(wide)):
        raise NoMatch("the softmax is not over the keys")
    return shifted_out([t for t in found if t is not logs[0]], keys), []


def _total(node: Node, indices: Indices) -> tuple[Node, Indices, list[Term]]:
    """The sum a divisor is, where it guards against 0 too, and what is added to it."""
    node, indices = strip(node, indices)
    if node.op is ops.where:
        node, indices = _unguarded(node, indices)
    parts = terms(node, indices)
    sums = [t for t in parts if t.node.op is ops.sum_ and t.factor == 1.0]
    if len(sums) != 1:
        raise NoMatch(f"the divisor is {node.op.name}, not the sum of what is divided")
    return sums[0].node, sums[0].indices, [t for t in parts if t is not sums[0]]


def _unguarded(node: Node, indices: Indices) -> tuple[Node, Indices]:
    """where(total == 0, c, total)."""
    test, at = strip(node.inputs[0], indices)
    if test.op in (ops.equal, ops.not_equal):
        total = strip(node.inputs[2 if test.op is ops.equal else 1], indices)
        for a, b in (test.inputs, test.inputs[::-1]):
            if known(b, at) == 0 and strip(a, at) == total:
                return total
    raise NoMatch("the divisor chooses between values")


def _summed_indices(total: Node, indices: Indices) -> tuple[Indices, dict[Atom, AxisIndex]]:
    """Indices of what is summed, and those of the axes that are."""
    source, axes = total.inputs[0], total.attrs["axes"]
    rest = iter(indices)
    own = fresh(source.shape)
    found = tuple([own[a] if a in axes else next(rest) for a in range(len(own))])
    return found, {own[a].atoms[0]: own[a] for a in axes if own[a].atoms}


def _meeting(
    inside: Indices, indices: Indices, wide: dict[Atom, AxisIndex]
) -> dict[Atom, AxisIndex]:
    """Which AxisIndex each summed Atom has in the value that is divided."""
    found: dict[Atom, AxisIndex] = {}
    wanted = set(flat(tuple(wide)))
    for a, b in zip(inside, indices):
        own = flat(a.atoms)
        if set(own) <= wanted and own:
            if len(own) != 1 or not a.plain:
                raise NoMatch("the sum is over parts of an axis")
            found[own[0]] = b
        elif (own, a.start, a.step) != (flat(b.atoms), b.start, b.step):
            raise NoMatch("the softmax is not over the keys")
    return found


def covers(met: dict[Atom, AxisIndex], keys: Atoms, count: int) -> bool:
    """Whether what is summed are the keys and nothing else."""
    if len(met) != count:
        raise NoMatch("the sum repeats a value")
    atoms = [a for p in met.values() for a in flat(p.atoms)]
    if set(atoms) != set(flat(keys)):
        raise NoMatch("the softmax is not over the keys")
    return all(p.plain and size_of(p.atoms) == a.size for a, p in met.items())


def _on(term: Term, atoms: Atoms) -> bool:
    return bool(depends(term.node, term.indices) & set(flat(atoms)))


def shifted_out(found: list[Term], keys: Atoms) -> list[Term]:
    """Terms without what is subtracted from all keys alike."""
    return [t for t in found if t.factor > 0 or _on(t, keys)]


def _further(others: list[Term], above: list[Term]) -> list[Term]:
    """The logit of a further term exp(sink - shift) or of a constant."""
    if len(others) != 1 or others[0].factor != 1.0:
        raise NoMatch("the sum has more than one further term")
    (term,) = others
    value = known(term.node, term.indices)
    if value is not None and value > 0:
        logit = build.constant(math.log(value), term.node.dtype)
        found, rest = [Term(1.0, logit, ())], []
    elif term.node.op is ops.exp:
        found = terms(term.node.inputs[0], term.indices)
        rest = [t for t in found if t in above]
    else:
        raise NoMatch("the sum has a further term that is no exp")
    if len(rest) != len(above):
        raise NoMatch("a further term of the sum has another shift")
    return [t for t in found if t not in above]


def _column(
    found: list[Term],
    indices: Indices,
    wide: dict[Atom, AxisIndex],
    met: dict[Atom, AxisIndex],
    keys: Atoms,
) -> tuple[list[Term], list[Term]]:
    """Scores and sink of a softmax over one column more than there are keys."""
    joined = [t for t in found if depends(t.node, t.indices) & set(flat(tuple(wide)))]
    if len(met) != 1 or len(joined) != 1 or joined[0].node.op is not ops.concatenate:
        raise NoMatch("the softmax is over more than the keys")
    (term,), (atom,) = joined, wide
    axis = term.node.attrs["axis"]
    if term.factor != 1.0 or term.indices[axis] != AxisIndex((atom,)):
        raise NoMatch("the softmax is over more than the keys")
    here = (*term.indices[:axis], met[atom], *term.indices[axis + 1 :])
    part = down(term.node, here)
    columns = [p for p in term.node.inputs if part is None or p is not part[0]]
    if part is None or not part[1][axis].plain or part[0].shape[axis] != size_of(keys):
        raise NoMatch("the softmax is over more than the keys")
    if len(columns) != 1 or columns[0].shape[axis] != 1 or len(term.node.inputs) != 2:
        raise NoMatch("more than one column is dropped after softmax")
    column = (*term.indices[:axis], FIRST, *term.indices[axis + 1 :])
    return terms(*part), [Term(1.0, columns[0], column)]
