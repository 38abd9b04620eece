"""Rewriting reaches the fixed point, in Blocks too, keeps locations and finds loops."""

from __future__ import annotations

import pytest
from toy_dialect import (
    VECTOR,
    add,
    allocate,
    branch,
    expand,
    load,
    loop,
    multiply,
    negate,
    store,
)

from tilegrad.core.dtype import float32
from tilegrad.core.errors import InternalError, Location
from tilegrad.ir.block import Block, argument, pure_block
from tilegrad.ir.node import located, topological
from tilegrad.ir.pattern import Rule, RuleSet, any_, of
from tilegrad.ir.rewrite import Log, live, rebuild, replace, rewrite, rewrite_block

x, y = any_("x"), any_("y")
CANCEL = RuleSet(
    "cancel",
    [
        Rule("double_negate", of(negate, of(negate, x)), lambda m: m.x),
        Rule("move_out", of(add, of(negate, x), of(negate, y)), lambda m: negate(add(m.x, m.y))),
    ],
)


@pytest.fixture
def values():
    return [argument(name, VECTOR) for name in "abc"]


def test_fixed_point_in_one_call(values):
    a, b, c = values
    node = negate(add(add(negate(a), negate(b)), negate(c)))
    log = Log()
    (after,) = rewrite([node], CANCEL, log)
    assert after is add(add(a, b), c)
    assert log.fired == {"move_out": 2, "double_negate": 1}
    assert rewrite([after], CANCEL) == [after]


def test_nothing_to_do_gives_the_same_nodes(values):
    a, b, _ = values
    roots = [add(a, negate(b)), multiply(a, b), a]
    log = Log()
    assert rewrite(roots, CANCEL, log) == roots
    assert log.fired == {} and log.settled == len(topological(roots))


def test_rules_are_tried_in_order(values):
    rules = RuleSet(
        "ordered",
        [
            Rule("first", of(multiply, x, y), lambda m: m.x),
            Rule("second", of(multiply, x, y), lambda m: m.y),
        ],
    )
    assert rewrite([multiply(values[0], values[1])], rules) == [values[0]]


def test_shared_nodes_are_seen_once(values):
    node = values[0]
    for _ in range(60):  # 2 ** 60 paths
        node = add(node, node)
    log = Log()
    rewrite([negate(negate(node))], CANCEL, log)
    assert log.settled < 200


def test_deep_chain(values):
    node = values[0]
    for _ in range(10_000):
        node = negate(multiply(node, values[1]))
    log = Log()
    assert rewrite([node], CANCEL, log) == [node]
    shifted = replace([node], {values[0]: values[2]})
    assert len(topological(shifted)) == len(topological([node]))


def test_location_survives(values):
    a, b, _ = values
    here = Location("model.py", 7)
    with located(here):
        node = add(negate(a), negate(b))
    (after,) = rewrite([node], CANCEL)
    assert after.op is negate and after.location is here and after.inputs[0].location is here


def test_a_changed_type_is_an_error(values):
    rules = RuleSet("bad", [Rule("widen", of(negate, x), lambda m: expand(m.x, shape=(2, 4)))])
    with pytest.raises(InternalError, match=r"rule widen.*another type"):
        rewrite([negate(values[0])], rules)


LOOPS = {
    "swap": [Rule("swap", of(multiply, x, y), lambda m: multiply(m.y, m.x))],
    "there and back": [
        Rule("there", of(negate, x), lambda m: multiply(m.x, m.x)),
        Rule("back", of(multiply, x, x), lambda m: negate(m.x)),
    ],
    "around itself": [Rule("wrap", of(multiply, x, y), lambda m: negate(m.root))],
    "growing": [Rule("grow", of(multiply, x, y), lambda m: multiply(multiply(m.y, m.x), m.x))],
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_found(name, values):
    a, b, _ = values
    node = negate(a) if name == "there and back" else multiply(a, b)
    with pytest.raises(InternalError, match="loop"):
        rewrite([node], RuleSet(name, LOOPS[name]))


# ---- Blocks ---------------------------------------------------------------------------------


def test_closed_block(values):
    inner = argument("inner", VECTOR)
    block = pure_block("body", (inner,), (negate(negate(inner)),))
    node = loop(values[0], count=3, blocks=(block,))
    (after,) = rewrite([negate(negate(node))], CANCEL)
    assert after.op is loop and after.blocks[0].results == (inner,)
    assert after.blocks[0].nodes == [] and after.location is node.location
    assert rewrite([after], CANCEL) == [after]
    assert rewrite_block(block, CANCEL).results == (inner,)
    same = pure_block("body", (inner,), (negate(inner),))
    assert rewrite_block(same, CANCEL) is same


def test_captured_values_stay_outside(values):
    a, b, _ = values
    inner = argument("inner", VECTOR)
    outer = add(negate(a), negate(b))
    block = pure_block("body", (inner,), (negate(negate(add(inner, outer))),), lambda n: n is outer)
    node = loop(a, count=3, blocks=(block,))
    (after,) = rewrite([node], CANCEL)
    moved = negate(add(a, b))
    assert after.blocks[0].captures() == (moved,)
    assert after.blocks[0].nodes == [add(inner, moved)]


def test_blocks_with_effects_keep_their_order(values):
    place = allocate(shape=(4,), dtype=float32, scope="shared")
    first = load(place, shape=(4,))
    twice = negate(negate(first))
    wrote = store(place, twice)
    second = load(place, shape=(4,))
    last = store(place, second)
    block = Block("body", (), [place, first, negate(first), twice, wrote, second, last], ())
    after = rewrite_block(block, CANCEL)
    assert [n.op for n in after.nodes] == [allocate, load, negate, store, load, store]
    assert after.nodes[3].inputs == (place, first)
    nested = branch(values[0], blocks=(block,))
    (outer,) = rewrite([nested], CANCEL)
    assert len(outer.blocks[0].nodes) == 6


def test_replace_reaches_captures(values):
    a, b, c = values
    inner = argument("inner", VECTOR)
    block = pure_block("body", (inner,), (add(inner, negate(a)),), lambda n: n is a)
    node = loop(b, count=2, blocks=(block,))
    (after,) = replace([node], {a: c})
    assert after.blocks[0].captures() == (c,)
    assert after.blocks[0].results == (add(inner, negate(c)),)
    assert replace([node], {c: a}) == [node]
    assert rebuild(node, {b: c}).inputs == (c,) and rebuild(node, {b: c}).blocks == node.blocks


def test_live_leaves_arguments_out(values):
    node = negate(values[0])
    assert live([values[0], node]) == [node]
