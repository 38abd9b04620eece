"""Blocks: captures, order, the Builder."""

import pytest
from toy_dialect import VECTOR, add, loop, multiply, negate, store, wait

from tilegrad.core.errors import InternalError
from tilegrad.ir.block import Block, Builder, argument, pure_block


def test_pure_block_finds_the_order_and_leaves_out_what_is_not_needed():
    a, b = argument("a", VECTOR), argument("b", VECTOR)
    total = add(a, b)
    negate(total)  # not needed
    result = multiply(total, a)
    block = pure_block("main", (a, b), (result,))
    assert block.nodes == [total, result]
    assert block.captures() == ()


def test_captures_of_nested_blocks():
    a, b, c = (argument(n, VECTOR) for n in "abc")
    inner_sum = add(a, c)
    inner = Block("inner", (c,), [inner_sum], (inner_sum,))
    looped = loop(b, count=2, blocks=(inner,))
    outer = Block("outer", (b,), [looped], (looped,))
    assert inner.captures() == (a,)
    assert outer.captures() == (a,)
    closed = Block("closed", (a, b), [looped], (looped,))
    assert closed.captures() == ()


def test_a_result_from_outside_is_captured():
    a = argument("a", VECTOR)
    assert Block("body", (), [], (a,)).captures() == (a,)


def test_builder_keeps_the_order_of_effects_and_pulls_in_inputs():
    a, b = argument("a", VECTOR), argument("b", VECTOR)
    builder = Builder()
    with builder.block("body", (a, b)) as block:
        first = builder.add(wait())
        second = builder.add(store(a, negate(b)))
        third = builder.add(wait())
    assert block.nodes == [first, second.inputs[1], second, third]


def test_builder_nests():
    a = argument("a", VECTOR)
    builder = Builder()
    with builder.block("outer", (a,)) as outer:
        before = builder.add(negate(a))
        with builder.block("inner") as inner:
            used = builder.add(add(before, a))
            assert builder.add(negate(a)) is before
        after = builder.add(loop(a, count=1, blocks=(Block("b", (), [used], (used,)),)))
    assert inner.nodes == [used]
    assert outer.nodes == [before, after]
    with pytest.raises(InternalError, match="no Block is open"):
        builder.add(before)
