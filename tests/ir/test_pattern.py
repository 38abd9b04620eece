"""Patterns match what they say, in every order they may, and Rules meet only what could fit."""

from __future__ import annotations

import pytest
from toy_dialect import VECTOR, add, constant, expand, multiply, negate

from tilegrad.core.dtype import float32
from tilegrad.core.errors import InternalError
from tilegrad.ir import pattern as patterns
from tilegrad.ir.block import argument, argument_op
from tilegrad.ir.pattern import Match, Rule, RuleSet, any_, of

x, y, z = any_("x"), any_("y"), any_("z")


@pytest.fixture
def values():
    return [argument(name, VECTOR) for name in "abc"]


def bound(pattern, node):
    """Every way the pattern matches, as dicts of names."""
    found = []
    for variant in pattern.variants():
        names = {}
        if variant.fits(node, names):
            found.append(names)
    return found


def test_any_binds(values):
    a, b, _ = values
    assert bound(x, a) == [{"x": a}]
    assert bound(of(multiply, x, y), multiply(a, b)) == [{"x": a, "y": b}]
    assert bound(of(multiply, x, y), add(a, b)) == []


def test_same_name_asks_for_the_same_node(values):
    a, b, _ = values
    assert bound(of(multiply, x, x), multiply(a, a)) == [{"x": a}]
    assert bound(of(multiply, x, x), multiply(a, b)) == []


def test_tests_and_ops_limit_a_match(values):
    a, b, _ = values
    special = any_("x", lambda n: n is b)
    assert bound(of(negate, special), negate(a)) == []
    assert bound(of(negate, special), negate(b)) == [{"x": b}]
    assert bound(of(negate, any_("x", ops=negate)), negate(a)) == []
    assert len(bound(of(negate, any_("x", ops=(negate, add))), negate(negate(a)))) == 1


def test_attrs_must_be_equal(values):
    a = values[0]
    wide = expand(a, shape=(2, 4))
    assert bound(of(expand, x, shape=(2, 4)), wide)
    assert not bound(of(expand, x, shape=(3, 4)), wide)


def test_one_of_several_ops(values):
    a, b, _ = values
    pattern = of((add, multiply), x, y)
    assert bound(pattern, multiply(a, b)) and bound(pattern, add(a, b))
    assert not bound(pattern, negate(a))
    assert len(pattern.variants()) == 1  # multiply does not commute here


def test_commutative_in_both_orders(values):
    a, b, c = values
    pattern = of(add, x, of(negate, y))
    assert bound(pattern, add(negate(a), b)) == [{"x": b, "y": a}]
    assert bound(pattern, add(b, negate(a))) == [{"x": b, "y": a}]
    nested = of(add, x, of(add, of(negate, y), z))
    for inner in (add(negate(b), c), add(c, negate(b))):
        for node in (add(a, inner), add(inner, a)):
            assert {"x": a, "y": b, "z": c} in bound(nested, node)
    assert len(of(add, x, x).variants()) == 1


def test_named_binds_the_inside(values):
    a = values[0]
    node = negate(negate(a))
    found = bound(of(negate, of(negate, x).named("inner")), node)
    assert found == [{"inner": node.inputs[0], "x": a}]


def test_rule_tries_the_next_order_when_declined(values):
    a, b, _ = values
    rule = Rule("second", of(add, x, y), lambda m: m.x if m.x is b else None)
    assert rule.apply(add(a, b)) is b
    assert rule.apply(add(a, a)) is None
    picky = Rule("when", of(add, x, y), lambda m: m.x, lambda m: m.y is a)
    assert picky.apply(add(a, b)) is b


def test_rule_on_ops_alone(values):
    a = values[0]
    rule = Rule("root", (negate, expand), lambda m: m.root.inputs[0])
    assert rule.apply(negate(a)) is a and rule.roots == (negate, expand)
    assert repr(rule) == "<rule root>"


def test_rule_that_gives_the_node_back_has_not_fired(values):
    assert Rule("same", negate, lambda m: m.root).apply(negate(values[0])) is None


def test_candidates_are_those_the_ops_allow(values):
    a, b, _ = values
    rules = RuleSet(
        "toy",
        [
            Rule("double", of(negate, of(negate, x)), lambda m: m.x),
            Rule("any", of(negate, x), lambda m: None),
            Rule("sum", of(add, of(negate, x), y), lambda m: None),
        ],
    )

    def names(node):
        return [rule.name for rule, _ in rules.candidates(node)]

    assert names(negate(a)) == ["any"]
    assert names(negate(negate(a))) == ["double", "any"]
    assert names(add(a, b)) == [] and names(multiply(a, b)) == []
    ((_, variants),) = rules.candidates(add(a, negate(b)))
    assert len(variants) == 1  # only the swapped order
    assert rules.candidates(negate(a)) is rules.candidates(negate(b))


def test_names_are_unique():
    one = Rule("one", negate, lambda m: None)
    with pytest.raises(InternalError, match="twice"):
        RuleSet("twice", [one, one])
    other = Rule("two", negate, lambda m: None)
    joined = RuleSet("a", [one]) + RuleSet("b", [other])
    assert joined.name == "a+b" and [r.name for r in joined.rules] == ["one", "two"]


def test_unknown_name(values):
    with pytest.raises(InternalError, match="nothing is bound to w"):
        _ = Match({"x": values[0]}, values[0]).w


def test_operators_and_numbers(monkeypatch, values):
    a, b, _ = values
    signs = {"+": add, "*": multiply, "neg": negate}
    monkeypatch.setattr(patterns, "OPERATORS", signs)
    lift = lambda v: any_("n", lambda n: n.attrs.get("value") == v)  # noqa: E731
    monkeypatch.setattr(patterns, "LIFT", [lift])
    assert bound(x + -y, add(a, negate(b))) == [{"x": a, "y": b}]
    assert bound(x * y, multiply(a, b)) == [{"x": a, "y": b}]
    one = constant(value=1, dtype=float32)
    assert bound(of(negate, 1), negate(one)) == [{"n": one}]
    assert bound(of(negate, 2), negate(one)) == []


def test_what_is_not_a_pattern(monkeypatch):
    monkeypatch.setattr(patterns, "LIFT", [])
    with pytest.raises(InternalError, match="not a pattern"):
        of(negate, "text")


def test_arity_must_fit(values):
    assert not bound(of(negate, x, y), negate(values[0]))
    assert argument_op not in RuleSet("none", []).roots
