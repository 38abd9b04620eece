"""Values that are rounded to 16 bits before anybody sees them are computed by quick ops."""

from __future__ import annotations

from tilegrad.compiler.compile import schedule_for
from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.target import H200
from tilegrad.graph import build, ops
from tilegrad.ir.block import Block
from tilegrad.schedule.schedule import Launch
from tilegrad.schedule.values import rounded_nodes


def sigmoid(x):
    """1 / (1 + exp(-x))."""
    one = build.full(x.shape, 1.0, x.dtype)
    small = build.unary(ops.exp, build.unary(ops.negative, x))
    return build.binary(ops.divide, one, build.binary(ops.add, one, small))


def names(block: Block) -> set[str]:
    """The ops of a Block, inner ones too."""
    found = set()
    for node in block.nodes:
        found.add(node.op.name)
        for inner in node.blocks:
            found |= names(inner)
    return found


def used(inputs, outputs) -> set[str]:
    """The Tile ops of a Graph's kernels for an H200."""
    schedule = schedule_for(inputs, outputs, H200)
    steps = [s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    return set().union(*(names(s.body.block) for s in steps))


def test_a_result_of_16_bits_takes_quick_ops() -> None:
    x = build.input_((64, 256), bfloat16)
    y = build.cast(sigmoid(build.cast(x, float32)), bfloat16)
    found = used([x], [y])
    assert {"quick_exp", "quick_reciprocal"} <= found
    assert not {"exp", "divide", "reciprocal"} & found


def test_a_result_of_32_bits_does_not() -> None:
    x = build.input_((64, 256), float32)
    found = used([x], [sigmoid(x)])
    assert "exp" in found and not {"quick_exp", "quick_reciprocal"} & found


def test_a_difference_is_not_hidden() -> None:
    """1 - exp(x) near 0 would lose the bits that a quick exp does not have."""
    x = build.input_((64,), float32)
    e = build.unary(ops.exp, x)
    y = build.cast(build.binary(ops.subtract, build.full((64,), 1.0, float32), e), bfloat16)
    assert e not in rounded_nodes([y])


def test_a_second_use_in_32_bits_is_seen() -> None:
    x = build.input_((64,), float32)
    e = build.unary(ops.exp, x)
    assert e in rounded_nodes([build.cast(e, bfloat16)])
    assert e not in rounded_nodes([build.cast(e, bfloat16), e])
    assert e not in rounded_nodes([build.cast(e, bfloat16), build.sum_(e, (0,))])


def test_exp_below_the_largest_is_quick_in_any_dtype() -> None:
    x = build.input_((8, 512), float32)
    largest = build.max_(x, (1,))
    spread = build.expand(build.reshape(largest, (8, 1)), (8, 512))
    e = build.unary(ops.exp, build.binary(ops.subtract, x, spread))
    total = build.expand(build.reshape(build.sum_(e, (1,)), (8, 1)), (8, 512))
    found = used([x], [build.binary(ops.divide, e, total)])
    assert "quick_exp2" in found and not {"exp", "exp2"} & found
