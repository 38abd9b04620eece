"""Nodes: interning, identity of attrs, locations, order."""

import gc
import sys

import pytest
from toy_dialect import VECTOR, add, constant, expand, fact, loop, negate, pair, store, toy, wait

from tilegrad.core.dtype import float32, float64
from tilegrad.core.errors import InternalError, Location
from tilegrad.ir import node as node_module
from tilegrad.ir.block import Block, argument
from tilegrad.ir.node import Op, topological, users
from tilegrad.ir.types import Array


def test_pure_nodes_are_interned():
    a, b = argument("a", VECTOR), argument("b", VECTOR)
    assert add(a, b) is add(a, b)
    assert add(a, b) is not add(b, a)
    assert add(a, b).type == VECTOR
    assert add(a, b).shape == (4,) and add(a, b).dtype is float32
    assert argument("a", VECTOR) is not a


def test_effects_and_owners_of_blocks_are_not_interned():
    assert wait() is not wait()
    a = argument("a", VECTOR)
    body = Block("body", (), [], (a,))
    assert loop(a, count=3, blocks=(body,)) is not loop(a, count=3, blocks=(body,))


def zero(value):
    return constant(value=value, dtype=float32)


def test_constants_that_compare_equal_stay_apart():
    zeros = [zero(0.0), zero(-0.0), zero(0), zero(False)]
    assert len(set(zeros)) == 4
    assert zero(-0.0) is zeros[1]
    assert str(zeros[1].attrs["value"]) == "-0.0"
    assert constant(value=1.0, dtype=float32) is not constant(value=1.0, dtype=float64)


def test_equal_values_inside_tuples_stay_apart():
    facts = [fact(fact=(0.0, 1)), fact(fact=(-0.0, 1)), fact(fact=(0, 1)), fact(fact=(0, True))]
    assert len(set(facts)) == 4
    assert fact(fact=((1, 2), "a")) is fact(fact=((1, 2), "a"))


def test_nan_is_one_constant():
    assert zero(float("nan")) is zero(float("inf") - float("inf"))


@pytest.mark.usefixtures("quick_collect")
def test_interned_nodes_are_freed():
    a = argument("a", VECTOR)
    gc.collect()  # what other tests left
    before = len(node_module._interned)
    chain = a
    for _ in range(100):
        chain = negate(chain)
    assert len(node_module._interned) == before + 100
    del chain
    gc.collect()
    assert len(node_module._interned) == before


def test_locations_are_the_users_and_survive():
    a, b = argument("a", VECTOR), argument("b", VECTOR)
    made = add(a, b)
    line = sys._getframe().f_lineno - 1
    assert (made.location.file, made.location.line) == (__file__, line)
    moved = made.with_inputs((b, a))
    assert moved.inputs == (b, a)
    assert moved.location is made.location
    assert made.with_inputs((a, b)) is made
    given = add.make((b, b), {}, location=Location("model.py", 3))
    assert repr(given.location) == "model.py:3"


def test_mistakes_in_making():
    with pytest.raises(InternalError, match="attr 'shape' is missing"):
        expand(argument("a", VECTOR))
    with pytest.raises(InternalError, match="defined twice"):
        Op(toy, "add", lambda a: a.type)
    with pytest.raises(AttributeError):
        _ = argument("a", VECTOR).nonsense


def test_topological_order_of_a_deep_chain():
    chain = argument("a", VECTOR)
    for _ in range(20_000):
        chain = negate(chain)
    order = topological([chain])
    assert len(order) == 20_001 and order[-1] is chain
    seen = set()
    for node in order:
        assert all(source in seen for source in node.inputs)
        seen.add(node)


def test_topological_order_puts_captures_first():
    a, outer = argument("a", VECTOR), argument("outer", VECTOR)
    captured = negate(outer)
    carried = argument("carried", VECTOR)
    body = Block("body", (carried,), [add(carried, captured)], (add(carried, captured),))
    looped = loop(a, count=2, blocks=(body,))
    order = topological([looped])
    assert order.index(captured) < order.index(looped)
    assert carried not in order


def test_users():
    a = argument("a", Array((), float32))
    twice = add(a, a)
    both = pair(a, twice)
    assert users([twice, both]) == {a: [twice, both], twice: [both]}
    assert store(a, twice) is not None
