"""Dots are found in every spelling, with the same type and values, and only where they pay."""

from __future__ import annotations

import random

import pytest
from rule_examples import agree, fires, given

from tilegrad.core.dtype import bfloat16, bool_, float16, float32, float64, int8, int32
from tilegrad.graph import build, ops
from tilegrad.graph.attention import attention
from tilegrad.graph.recognize import RECOGNIZE
from tilegrad.graph.simplify import SIMPLIFY
from tilegrad.ir.node import topological
from tilegrad.ir.rewrite import rewrite
from tilegrad.ir.symbol import symbol


def f(*shape, dtype=float32):
    return given(*shape, dtype=dtype)


def product_sum(a, b, axes, op=build.multiply):
    return build.sum_(op(a, b), axes)


def moved(order, *shape):
    return ops.permute(f(*shape), order=order)


def casted(x, dtype):
    return build.cast(x, dtype)


def matmul_spelled(a, b):
    """(m, k), (k, n) as a[:, :, None] * b[None] summed over k."""
    return product_sum(build.unsqueeze(a, 2), build.unsqueeze(b, 0), 1)


EXAMPLES = {
    "sum_of_product": lambda: matmul_spelled(f(3, 4), f(4, 5)),
    "sum_of_cast_product": lambda: build.sum_(
        casted(build.multiply(f(3, 4, dtype=bfloat16), f(4, dtype=bfloat16)), float32), 1
    ),
    "dot_cast": lambda: build.matmul(
        casted(f(3, 4, dtype=bfloat16), float32), casted(f(4, 5, dtype=bfloat16), float32)
    ),
    "dot_moved_left": lambda: build.matmul(moved((1, 0), 4, 3), f(4, 5)),
    "dot_moved_right": lambda: build.matmul(f(3, 4), moved((1, 0), 5, 4)),
    "band of attention": lambda: attention(
        f(1, 1, 3, 4),
        f(1, 1, 3, 4),
        f(1, 1, 3, 4),
        {"mask": build.less_equal(*[build.iota_along((1, 1, 3, 3), axis) for axis in (3, 2)])},
        scale=1.0,
        band=(None, None),
        softcap=0.0,
        dropout=0.0,
        orders=("bhtd",) * 4,
    )[0],
}

FOUND = {
    "matmul": lambda: matmul_spelled(f(3, 4), f(4, 5)),
    "transposed operands": lambda: matmul_spelled(moved((1, 0), 4, 3), moved((1, 0), 5, 4)),
    "transposed result": lambda: product_sum(
        build.unsqueeze(f(4, 5), 1), build.unsqueeze(f(4, 3), 2), 0
    ),
    "linear": lambda: product_sum(build.unsqueeze(f(2, 3, 4), 2), f(5, 4), -1),
    "batched": lambda: product_sum(
        build.unsqueeze(f(2, 6, 3, 4), 4), build.unsqueeze(f(2, 6, 4, 5), 2), 3
    ),
    "broadcast batch": lambda: product_sum(
        build.unsqueeze(f(2, 6, 3, 4), 4), build.unsqueeze(f(1, 6, 4, 5), 2), 3
    ),
    "two contracted": lambda: product_sum(
        build.reshape(f(3, 4, 5), (3, 1, 4, 5)), f(7, 4, 5), (2, 3)
    ),
    "contracted around": lambda: product_sum(
        build.reshape(f(4, 3, 5), (4, 3, 1, 5)), build.reshape(f(4, 7, 5), (4, 1, 7, 5)), (0, 3)
    ),
    "matrix times vector": lambda: product_sum(f(3, 4), f(4), 1),
    "vector times matrix": lambda: product_sum(build.unsqueeze(f(4), 1), f(4, 5), 0),
    "batched vectors": lambda: product_sum(f(2, 3, 4), build.unsqueeze(f(2, 4), 1), 2),
    "kept axis": lambda: build.sum_(build.multiply(f(3, 4), f(4)), 1, keep=True),
    "units": lambda: product_sum(build.reshape(f(3, 4), (1, 3, 4, 1)), f(1, 1, 4, 5), 2),
    "casts outside": lambda: product_sum(
        casted(build.expand(f(3, 4, 1, dtype=float16), (3, 4, 5)), float32),
        casted(build.expand(f(1, 4, 5, dtype=float16), (3, 4, 5)), float32),
        1,
    ),
    "integers": lambda: product_sum(
        casted(build.unsqueeze(f(3, 4, dtype=int8), 2), int32),
        casted(build.unsqueeze(f(4, 5, dtype=int8), 0), int32),
        1,
    ),
    "double": lambda: matmul_spelled(f(3, 4, dtype=float64), f(4, 5, dtype=float64)),
    "half": lambda: matmul_spelled(f(3, 4, dtype=bfloat16), f(4, 5, dtype=bfloat16)),
    "same value twice": lambda: (lambda x: matmul_spelled(x, build.transpose(x)))(f(3, 4)),
    "windows": lambda: product_sum(build.windows(f(9, 2), 0, 3), f(2, 3), (1, 2)),
    "sum of permuted product": lambda: build.sum_(
        build.permute(build.multiply(build.unsqueeze(f(3, 4), 2), f(4, 5)), (2, 1, 0)), 1
    ),
}

STAYS = {
    "squares": lambda: (lambda x: product_sum(x, x, 1))(f(3, 4)),
    "same axes": lambda: product_sum(f(3, 4), f(3, 4), 1),
    "scaled": lambda: build.sum_(build.multiply(f(3, 4), 0.5), 1),
    "scale per row": lambda: product_sum(f(3, 4), f(3, 1), 1),
    "outer": lambda: build.sum_(build.multiply(f(3, 1), f(4)), 1),
    "bools": lambda: product_sum(f(3, 4, dtype=bool_), f(4, dtype=bool_), 1),
}


def settle(roots):
    for rules in (SIMPLIFY, RECOGNIZE, SIMPLIFY):
        roots = rewrite(roots, rules)
    return roots


def ops_of(roots):
    return {n.op for n in topological(roots)}


def test_every_rule_has_an_example():
    assert sorted(EXAMPLES) == sorted(r.name for r in RECOGNIZE.rules)


@pytest.mark.parametrize("name", EXAMPLES)
def test_rule(name):
    example = EXAMPLES[name]()
    agree([example], [fires(RECOGNIZE, name, example)], close=0.1 if "cast" in name else 1e-5)


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    before = [FOUND[name]()]
    after = settle(before)
    assert ops.dot in ops_of(after)
    assert not {ops.multiply, ops.sum_, ops.expand} & ops_of(after)
    agree(before, after, close=5e-2 if name == "half" else 1e-4)
    agree(before, rewrite(before, RECOGNIZE), close=5e-2 if name == "half" else 1e-4)


@pytest.mark.parametrize("name", STAYS)
def test_stays(name):
    before = [STAYS[name]()]
    after = settle(before)
    assert ops.dot not in ops_of(after)
    agree(before, after, close=1e-5)


def test_no_movement_is_left_around_a_plain_matmul():
    a, b = f(3, 4), f(4, 5)
    (after,) = settle([matmul_spelled(a, b)])
    assert after is build.matmul(a, b)
    (after,) = settle([build.matmul(a, build.transpose(moved((1, 0), 4, 5)))])
    assert after.op is ops.dot and all(i.op is ops.input_ for i in after.inputs)


def test_narrow_operands_are_read_as_they_are():
    a, b = f(3, 4, dtype=bfloat16), f(4, 5, dtype=bfloat16)
    (after,) = settle([matmul_spelled(casted(a, float32), casted(b, float32))])
    assert after.op is ops.dot and after.inputs == (a, b) and after.dtype is float32


def test_repeated_batch_is_not_repeated():
    """Grouped queries: keys of one head serve several without being copied."""
    q, k = f(2, 3, 4, 5, 8), f(2, 3, 1, 7, 8)
    before = [build.matmul(q, build.transpose(build.expand(k, (2, 3, 4, 7, 8))))]
    after = settle(before)
    assert ops.expand not in ops_of(after)
    agree(before, after, close=1e-4)


def test_the_operand_moves_rather_than_the_result():
    x = build.permute(f(2, 5, 3, 4), (0, 2, 1, 3))  # (2, 3, 5, 4) from (2, 5, 3, 4)
    (after,) = settle([build.matmul(x, f(4, 7))])
    assert after.op is ops.dot and after.inputs[0] is x


def test_dots_with_movement_keep_values():
    cases = [
        build.matmul(build.expand(f(1, 3, 4), (2, 3, 4)), build.expand(f(1, 4, 5), (2, 4, 5))),
        build.matmul(build.reshape(f(4), (1, 4)), f(4, 5)),
        build.matmul(moved((2, 0, 1), 3, 4, 2), moved((1, 2, 0), 5, 2, 4)),
        build.matmul(f(3, 1), f(1, 5)),
        build.matmul(f(3, 4), build.expand(f(1, 5), (4, 5))),
        build.matmul(build.expand(f(3, 1), (3, 4)), f(4, 5)),
        build.dot(moved((1, 0, 2), 3, 2, 4), f(4, 2, 5), ((0,), (1,)), ((2,), (0,))),
    ]
    agree(cases, settle(cases), close=1e-4)


def random_factor(choose, shape, kept=None):
    """A value with some of the axes, in some order, brought to the shape as people do."""
    own = [i for i in range(len(shape)) if choose.random() < 0.65 or i == kept]
    order = choose.sample(own, len(own))
    core = f(*[shape[i] for i in order])
    if choose.random() < 0.3:
        core = casted(casted(core, float64), float32)
    node = build.permute(core, [order.index(i) for i in own])
    node = build.reshape(node, [s if i in own else 1 for i, s in enumerate(shape)])
    return build.expand(node, shape) if choose.random() < 0.5 else node


@pytest.mark.parametrize("seed", range(80))
def test_random_products(seed):
    choose = random.Random(seed)
    shape = tuple(choose.choice((1, 2, 3, 4, 5)) for _ in range(choose.randint(1, 5)))
    product = build.multiply(random_factor(choose, shape), random_factor(choose, shape))
    rank = len(product.shape)
    axes = choose.sample(range(rank), choose.randint(1, rank)) if rank else ()
    before = [build.sum_(product, axes)]
    agree(before, rewrite(before, RECOGNIZE), close=1e-4)
    agree(before, settle(before), close=1e-4)


@pytest.mark.parametrize("seed", range(40))
def test_random_dots(seed):
    choose = random.Random(seed)
    names = {n: choose.choice((1, 2, 3)) for n in "abcdf"} | {"e": 2}
    left = choose.sample("abcd", choose.randint(0, 4)) + ["e"]
    right = choose.sample("abcdf", choose.randint(1, 4))
    shared = [n for n in left if n in right]
    inner = [n for n in shared if choose.random() < 0.6]
    lead = [n for n in shared if n not in inner]
    a, b = ([names[n] for n in side] for side in (left, right))
    x, y = random_factor(choose, tuple(a), len(a) - 1), random_factor(choose, tuple(b))
    x, y = build.expand(x, tuple(a)), build.expand(y, tuple(b))
    before = [
        build.dot(
            x,
            y,
            ([left.index(n) for n in lead], [right.index(n) for n in lead]),
            ([left.index(n) for n in inner], [right.index(n) for n in inner]),
        )
    ]
    agree(before, settle(before), close=1e-4)


def test_dot_of_two_vectors():
    before = [build.matmul(build.reshape(f(4), (1, 4)), build.reshape(f(4), (4, 1)))]
    agree(before, settle(before), close=1e-4)


def test_symbolic_sizes():
    n, k = symbol("n", 1, 32), symbol("k", 1, 32)
    before = [
        matmul_spelled(f(n, k), f(k, 5)),
        build.sum_(build.multiply(f(n, k), f(k)), 1),
        build.matmul(build.transpose(f(k, n)), f(k, 5)),
    ]
    after = settle(before)
    assert ops.sum_ not in ops_of(after)
    agree(before, after, symbols={"n": 3, "k": 4}, close=1e-4)


def test_recognition_in_a_block():
    def body(carry, _):
        return [matmul_spelled(carry[0], f(4, 4))], []

    (last,), _ = build.scan(body, [f(3, 4)], [], 2)
    (after,) = settle([last])
    assert ops.dot in {n.op for n in after.inputs[0].blocks[0].nodes}
    agree([last], [after], close=1e-4)
