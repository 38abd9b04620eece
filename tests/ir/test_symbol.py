"""Symbolic integers: what the simplifier builds always means what was written."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilegrad.core.errors import InternalError, UserError
from tilegrad.ir.symbol import (
    Expr,
    atoms,
    ceil_divide,
    coefficient,
    evaluate,
    floor_divide,
    high,
    loop_index,
    low,
    maximum,
    minimum,
    modulo,
    proves_less,
    show,
    substitute,
    symbol,
)

N = symbol("N", 1, 1024)
M = symbol("M", 1, 60)
X = symbol("X", -20, 20)
I = loop_index("i", 64)  # noqa: E741
J = loop_index("j", 6)
K = loop_index("k", 8)
SYMBOLS = [N, M, X, I, J, K]

leaves = st.one_of(st.integers(-12, 70), st.sampled_from(SYMBOLS))


def grow(children):
    pair = st.tuples(children, children)
    return st.one_of(
        st.tuples(st.sampled_from(["+", "-", "+", "min", "max"]), pair),
        st.tuples(st.just("*"), st.tuples(children, st.one_of(st.integers(-9, 16), children))),
        st.tuples(
            st.sampled_from(["//", "%", "up", "//", "%"]),
            st.tuples(children, st.one_of(st.integers(1, 24), st.sampled_from([N, M]))),
        ),
    )


trees = st.recursive(leaves, grow, max_leaves=14)
bindings = st.fixed_dictionaries({s.name: st.integers(s.low, s.high) for s in SYMBOLS})

BUILD = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": floor_divide,
    "%": modulo,
    "up": ceil_divide,
    "min": minimum,
    "max": maximum,
}
DIRECT = {**BUILD, "min": min, "max": max, "//": lambda a, b: a // b, "%": lambda a, b: a % b}
DIRECT["up"] = lambda a, b: -(-a // b)


def build(tree):
    if not isinstance(tree, tuple):
        return tree
    return BUILD[tree[0]](*map(build, tree[1]))


def direct(tree, values):
    if isinstance(tree, tuple):
        return DIRECT[tree[0]](*(direct(t, values) for t in tree[1]))
    return values[tree.name] if isinstance(tree, Expr) else tree


@settings(max_examples=300, deadline=None)
@given(trees, st.lists(bindings, min_size=4, max_size=4))
def test_simplified_equals_direct(tree, samples):
    built = build(tree)
    for values in samples:
        value = evaluate(built, values)
        assert value == direct(tree, values)
        assert low(built) <= value <= high(built)


@settings(max_examples=100, deadline=None)
@given(trees)
def test_rebuilding_a_canonical_form_changes_nothing(tree):
    built = build(tree)
    assert substitute(built, {N: N, X: X}) is built or built == substitute(built, {N: N})
    assert pickle.loads(pickle.dumps(built)) is built or isinstance(built, int)


@settings(max_examples=100, deadline=None)
@given(trees, trees, bindings)
def test_substitute(tree, replacement, values):
    # The value put in place of a symbol must respect the symbol's bounds.
    inside = minimum(maximum(build(replacement), X.low), X.high)
    result = substitute(build(tree), {X: inside})
    assert evaluate(result, values) == direct(tree, {**values, "X": evaluate(inside, values)})


@settings(max_examples=100, deadline=None)
@given(trees, st.integers(1, 40))
def test_quotient_and_remainder_make_the_whole(tree, divisor):
    value = build(tree)
    whole = floor_divide(value, divisor) * divisor + modulo(value, divisor)
    for index in range(8):
        values = {s.name: s.low + (index * 37) % (s.high - s.low + 1) for s in SYMBOLS}
        assert evaluate(whole, values) == evaluate(value, values)


@pytest.mark.parametrize(
    "value",
    [N, X, N + 3, 6 * I + 1, I * 8 + K, N * 4 + I, 5 * N + 7 * X, I * J, minimum(N, 50) + K],
    ids=str,
)
@pytest.mark.parametrize("divisor", [2, 3, 4, 8, 12])
def test_merge_is_exact(value, divisor):
    assert (value // divisor) * divisor + value % divisor is value
    assert M * (value // divisor) * divisor + M * (value % divisor) is M * value


def test_merge_with_symbolic_divisor():
    flat = loop_index("flat", 4096)
    assert (flat // N) * N + flat % N is flat
    assert (N - 1) // N == 0
    assert (I * N + N - 1) % N is N - 1
    assert (I * N) // N is I


def test_unflatten_then_flatten():
    flat = loop_index("flat", 4 * 6 * 8)
    a, b, c = flat // 48, flat // 8 % 6, flat % 8
    assert a * 48 + b * 8 + c is flat
    assert b * 8 + c is flat % 48
    again = I * 64 + J * 8 + K
    assert (again // 64, again // 8 % 8, again % 8) == (I, J, K)
    assert (again % 64) // 8 is J
    assert (I * 64 + J * 8 + K) // 16 is I * 4 + J // 2


def test_canonical_identity():
    assert N + M is M + N
    assert (N + 1) * (N - 1) is N * N - 1
    assert N - N == 0
    assert (N // 4) // 3 is N // 12
    assert (4 * N) % 8 is 4 * (N % 2)
    assert (N % 12) // 4 is (N // 4) % 3
    assert minimum(N, N + 3) is N
    assert maximum(N, N + 3) is N + 3
    assert loop_index("i", 64) is I
    assert symbol("N", 1, 2048) is not N
    assert symbol("one", 7, 7) == 7


def test_comparisons_answer_only_what_is_proved():
    assert N > 0 and N >= 1 and N < 1025
    assert N < N + 1
    assert proves_less(K, 8) and not proves_less(K, 7)
    with pytest.raises(UserError, match="depends on the value"):
        _ = N < 5
    with pytest.raises(UserError, match="no fixed value"):
        range(N)
    assert bool(N)
    with pytest.raises(UserError):
        bool(X)


def test_bad_bounds_and_divisors():
    with pytest.raises(UserError, match="empty bounds"):
        symbol("Z", 3, 2)
    with pytest.raises(InternalError, match="is negative"):
        _ = N // -N
    assert evaluate((N * 3) // (N - 2), {"N": 5}) == 5  # a size that requirements keep from below 0
    with pytest.raises(TypeError):
        _ = 1.5 - N


def test_coefficient():
    value = 4 * I + N * J + 3 * K + 7
    assert coefficient(value, I) == 4
    assert coefficient(value, J) is N
    assert coefficient(value, X) == 0
    assert coefficient(I * I, I) is None
    assert coefficient(I // 3 + I, I) is None
    assert coefficient(12, I) == 0


def test_atoms_and_evaluate():
    value = minimum(N, I + 3) // 2 + M
    assert set(atoms(value)) == {N, I, M}
    assert evaluate(value, {"N": 9, "i": 4, "M": 1}) == 4
    with pytest.raises(InternalError, match="N has no value"):
        evaluate(value, {"i": 1, "M": 2})


def test_text_does_not_depend_on_the_order_of_building():
    late = symbol("A_late", 1, 9)
    assert show(N + late) == "(A_late + N)"
    assert show(2 * N * late - 3) == "(2*A_late*N + -3)"
    assert show(minimum(N, late)) == "min(A_late, N)"
    assert show((N + 1) // 5 % 3) == "(((N + 1) // 5) % 3)"
