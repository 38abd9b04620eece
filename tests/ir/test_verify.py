"""The verifier finds each kind of fault and shows the Node."""

import pytest
from toy_dialect import (
    VECTOR,
    add,
    constant,
    expand,
    given,
    loop,
    multiply,
    negate,
    sine,
    store,
    wait,
)

from tilegrad.core.dtype import float32
from tilegrad.core.errors import InternalError
from tilegrad.ir.block import Block, argument, pure_block
from tilegrad.ir.types import Array
from tilegrad.ir.verify import verify

A, B = argument("a", VECTOR), argument("b", VECTOR)


def fails(block, message, **options):
    with pytest.raises(InternalError, match=message) as caught:
        verify(block, "toy", where="some_pass", **options)
    assert "internal error in some_pass" in str(caught.value)
    return str(caught.value)


def test_a_good_block_with_nesting_passes():
    carried = argument("carried", VECTOR)
    step = add(carried, B)
    body = Block("body", (carried,), [step], (step,))
    looped = loop(A, count=3, blocks=(body,))
    after = negate(looped)
    verify(Block("main", (A, B), [looped, after], (after, A)), "toy")


def test_the_node_and_the_users_line_are_shown():
    text = fails(Block("main", (A,), [add(A, B)], ()), "input 1")
    assert "add(%a, %b) : float32[4]" in text
    assert "test_verify.py:" in text


def test_order():
    inner = negate(A)
    outer = negate(inner)
    verify(Block("main", (A,), [inner, outer], (outer,)), "toy")
    fails(Block("main", (A,), [outer, inner], (outer,)), "earlier Node")


def test_results_must_be_visible():
    fails(Block("main", (A,), [], (B,)), "result of the Block main is not visible")


def test_values_of_an_inner_block_are_not_visible_outside():
    step = negate(A)
    looped = loop(A, count=3, blocks=(Block("body", (), [step], (step,)),))
    fails(Block("main", (A,), [looped, negate(step)], ()), "neither an argument")


def test_dialect():
    block = Block("main", (A,), [sine(A)], ())
    fails(block, "toy_other.sine is not of the dialects")
    verify(block, ("toy", "toy_other"))


def test_types():
    wrong = negate.make((A,), {}, type=Array((5,), float32))
    fails(Block("main", (A,), [wrong], ()), r"float32\[5\] where float32\[4\] is inferred")
    C = argument("c", Array((5,), float32))
    mixed = add.make((A, C), {}, type=VECTOR)
    fails(Block("main", (A, C), [mixed], ()), "cannot be inferred")
    verify(Block("main", (A,), [given.make((A,), {"tag": 1}, type=VECTOR)], ()), "toy")
    fails(Block("main", (A,), [given(A, tag=1)], ()), "no type")


def test_attrs():
    odd = expand.make((A,), {"shape": (1, 4)})
    odd.attrs["shape"] = [1, 4]
    fails(Block("main", (A,), [odd], ()), "not hashable")
    del odd.attrs["shape"]
    fails(Block("main", (A,), [odd], ()), "attrs are")


def test_an_effect_has_one_place():
    once = wait()
    fails(Block("main", (), [once, once], ()), "twice")
    looped = loop(A, count=3, blocks=(Block("body", (), [once], (A,)),))
    fails(Block("main", (A,), [once, looped], ()), "elsewhere too")


def test_a_pure_node_may_be_in_an_outer_and_an_inner_block():
    shared = negate(A)
    looped = loop(A, count=3, blocks=(Block("body", (), [shared], (shared,)),))
    verify(Block("main", (A,), [shared, looped], (looped,)), "toy")


def test_cycles():
    body = Block("body", (), [], (A,))
    looped = loop(A, count=3, blocks=(body,))
    body.nodes.append(looped)
    fails(Block("main", (A,), [looped], (looped,)), "contains itself")
    body.nodes[0] = add(A, looped)
    fails(Block("main", (A,), [looped], (looped,)), "input 1")


def test_arguments():
    fails(Block("main", (negate(A),), [], ()), "is not one")
    fails(Block("main", (), [A], ()), "among the Nodes")


def test_rules_see_the_enclosing_nodes():
    place = store(A, B)
    looped = loop(A, count=3, blocks=(Block("body", (), [place], (A,)),))
    seen = []

    def no_stores_in_loops(node, enclosing):
        seen.append((node.op.name, [n.op.name for n in enclosing]))
        inside = any(n.op is loop for n in enclosing)
        return "a store inside a loop" if node.op is store and inside else None

    block = Block("main", (A, B), [looped], ())
    fails(block, "a store inside a loop", rules=[no_stores_in_loops])
    assert seen == [("store", ["loop"])]
    verify(Block("main", (A, B), [place], ()), "toy", [no_stores_in_loops])


def test_a_long_chain_is_quick():
    chain = A
    for _ in range(10_000):
        chain = negate(chain)
    one = multiply(chain, chain)
    verify(pure_block("main", (A,), (one,)), "toy")
    assert constant(value=1.0, dtype=float32).type == Array((), float32)
