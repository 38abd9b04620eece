"""Products of rows in groups: sort, products and outer products on every kind of machine, held to
the Graph interpreter; derivatives against torch; what is not picked is not read."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from interpreted import run_interpreted
from judge import check, compare

sys.path.insert(0, str(Path(__file__).parent.parent / "targets"))

from simulated import check_graph

import tilegrad as tg
from tilegrad.compiler.breaks import breaks_of
from tilegrad.compiler.compile import schedule_for
from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.core.config import override
from tilegrad.core.dtype import BY_NUMPY, bfloat16, int32
from tilegrad.core.errors import ShapeError, UserError
from tilegrad.core.target import A100, AVX512, AVX512_AMX, H200, Target
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node, topological
from tilegrad.ir.symbol import symbol
from tilegrad.kernels.matmul.matvec import MatvecPlan
from tilegrad.kernels.matmul.shape import WidePlan
from tilegrad.nn.experts import routed
from tilegrad.schedule.schedule import Launch
from tilegrad.tensor.matmul import group_rows, grouped_dot
from tilegrad.tile.plan import Plan

BF16 = ml_dtypes.bfloat16


def given(rows: int, groups: int, k: int, n: int, dtype: object, axis: int = 2) -> list:
    """x, weights, offsets of which some groups have no rows, and a factor for each row."""
    draw = np.random.default_rng(rows * groups + n)
    ids = np.sort(draw.integers(0, groups, rows) // 2 * 2)
    offsets = np.searchsorted(ids, np.arange(groups + 1)).astype(np.int32)
    shape = (groups, n, k) if axis == 2 else (groups, k, n)
    sizes = ((rows, k), shape, (rows, 1))
    x, weights, factor = (draw.standard_normal(s).astype(dtype) for s in sizes)
    return [x, weights, offsets, factor]


def product(axis: int):
    """silu(x w) times a factor for each row."""

    def made(x: Node, weights: Node, offsets: Node, factor: Node) -> Node:
        y = ops.grouped_dot(x, weights, offsets, axis=axis, block=0)
        return build.multiply(build.multiply(y, ops.sigmoid(y)), factor)

    return made


def on(target: Target, function, *values: np.ndarray) -> None:
    """Compare a Schedule for another machine, interpreted."""
    nodes = [build.input_(v.shape, BY_NUMPY[v.dtype]) for v in values]
    made = function(*nodes)
    outputs = [made] if isinstance(made, Node) else made
    expected = interpret(outputs, dict(zip(nodes, values)))
    found = run_interpreted(target, nodes, outputs, values)
    for node, a, b in zip(outputs, found, expected):
        compare(node, a, b)


@pytest.mark.parametrize("axis", [2, 1])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("sizes", [(5, 8, 33, 17), (70, 4, 24, 48), (40, 1, 600, 20)])
def test_on_this_machine(sizes: tuple, dtype: object, axis: int) -> None:
    check(product(axis), *given(*sizes, dtype, axis))


@pytest.mark.parametrize("target", [AVX512, AVX512_AMX, A100, H200], ids=lambda t: t.name)
@pytest.mark.parametrize("axis", [2, 1])
def test_on_other_machines(target: Target, axis: int) -> None:
    on(target, product(axis), *given(37, 3, 64, 48, BF16, axis))


@pytest.mark.parametrize("target", [None, A100], ids=["here", "a100"])
def test_outer_products(target: Target | None) -> None:
    x, _, offsets, _ = given(40, 3, 20, 8, np.float32)
    y = given(40, 3, 70, 8, np.float32)[0]
    if target is None:
        check(ops.grouped_outer, x, y, offsets)
        check(ops.grouped_outer, x.astype(np.float64), y.astype(np.float64), offsets)
    else:
        on(target, ops.grouped_outer, x, y, offsets)


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_rows_are_sorted_by_group(rows: int) -> None:
    ids = np.random.default_rng(rows).integers(0, 9, rows)
    order, places, offsets = (x.numpy() for x in tg.jit(lambda i: group_rows(i, 9))(tg.tensor(ids)))
    np.testing.assert_array_equal(order, np.argsort(ids, kind="stable"))
    np.testing.assert_array_equal(order[places], np.arange(rows))
    np.testing.assert_array_equal(offsets, np.searchsorted(np.sort(ids), np.arange(10)))
    node = build.input_((rows,), BY_NUMPY[ids.dtype])
    made = build.items(ops.group_rows(node, groups=9))
    for found, expected in zip(
        run_interpreted(A100, [node], made, [ids]), (order, places, offsets)
    ):
        np.testing.assert_array_equal(found, expected)


def test_a_group_has_no_neighbours() -> None:
    """What is not finite in a row is in its own group's outer product alone."""
    x, y = np.ones((6, 4), np.float32), np.ones((6, 4), np.float32)
    y[3] = np.inf
    check(ops.grouped_outer, x, y, np.array([0, 3, 6], np.int32))


def test_more_groups_than_ids_of_a_byte() -> None:
    ids = np.array([5, 0, 127, 5, 3], np.int8)
    for groups in (128, 200):
        order, _, offsets = tg.jit(lambda i, g=groups: group_rows(i, g))(tg.tensor(ids))
        np.testing.assert_array_equal(order.numpy(), np.argsort(ids, kind="stable"))
        ends = np.searchsorted(np.sort(ids.astype(int)), np.arange(groups + 1))
        np.testing.assert_array_equal(offsets.numpy(), ends)


def test_rows_alone_read_their_own_weights() -> None:
    """No more rows than groups: on vectors no product with packed weights."""
    for rows, left in ((8, False), (9, True)):
        nodes = [build.input_(v.shape, BY_NUMPY[v.dtype]) for v in given(rows, 8, 16, 8, BF16)]
        (made,), _ = run_pipeline(nodes, [product(2)(*nodes)], AVX512)
        assert left == any(n.op is ops.grouped_dot for n in topological([made]))


def test_only_picked_weights_count() -> None:
    """Weights of a group without rows may be anything."""
    x, weights, offsets, factor = given(60, 6, 16, 8, np.float32)
    expected = check(product(2), x, weights, offsets, factor)[0]
    weights[1::2] = np.nan
    np.testing.assert_array_equal(check(product(2), x, weights, offsets, factor)[0], expected)


def test_derivatives_against_torch() -> None:
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(5)
    x, up = draw.standard_normal((12, 6)), draw.standard_normal((5, 8, 6))
    down, chances = draw.standard_normal((5, 6, 8)), draw.standard_normal((12, 5))
    picked = np.argsort(-chances, axis=1, kind="stable")[:, :2]

    def ours(x, up, down, shares):
        def compute(rows, offsets, owners):
            return grouped_dot(tg.tanh(grouped_dot(rows, up, offsets)), down, offsets)

        return (routed(x, tg.tensor(picked), shares, 5, compute) ** 2).sum()

    arrays = [x, up, down, np.take_along_axis(chances, picked, 1)]
    arrays = [a.astype(np.float32) for a in arrays]
    value, found = tg.jit(tg.value_and_grad(ours, argnums=(0, 1, 2, 3)))(*map(tg.tensor, arrays))
    tensors = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in arrays]
    own_up, own_down = (w[torch.tensor(picked)] for w in tensors[1:3])  # (12, 2, ...)
    inner = torch.tanh(torch.einsum("nc,nkfc->nkf", tensors[0], own_up))
    out = torch.einsum("nkf,nkcf,nk->nc", inner, own_down, tensors[3])
    (out**2).sum().backward()
    assert abs(value.item() - float((out**2).sum())) < 1e-4 * abs(value.item())
    for mine, theirs in zip(found, tensors):
        expected = theirs.grad.numpy()
        np.testing.assert_allclose(mine.numpy(), expected, atol=1e-5 * np.abs(expected).max())


def test_nothing_is_added_out_of_order() -> None:
    """The way back of sorted rows is a gather too: no scatter in forward or backward."""

    def loss(x):
        order, places, _ = group_rows(tg.tensor(np.array([2, 0, 1, 2])), 3)
        return (x.index_select(0, order) ** 3).index_select(0, places).sum()

    lowered = tg.jit(tg.grad(loss)).lower(tg.ones(4, 2))
    kinds = {n.op for n in topological(lowered.outputs)}
    assert ops.gather in kinds and ops.update not in kinds


def test_errors() -> None:
    x, weights, offsets, _ = map(tg.tensor, given(5, 4, 6, 3, np.float32))
    with pytest.raises(ShapeError, match="sizes do not fit"):
        grouped_dot(x, weights, offsets, axis=1)
    with pytest.raises(ShapeError, match="sizes do not fit"):
        grouped_dot(x, weights, offsets[:-1])
    with pytest.raises(ShapeError, match="row of ids"):
        group_rows(offsets.reshape(1, -1), 4)
    with pytest.raises(UserError, match="out of range"):
        group_rows(tg.tensor(np.array([0, 4])), 4)[0].numpy()
    with pytest.raises(UserError, match="grouped_dot: an index is out of range"):
        grouped_dot(x, weights, tg.tensor(np.array([0, 1, 2, 3, 6], np.int32))).numpy()


def test_a_list_keeps_to_its_room() -> None:
    """Of offsets that fall and rise again too: more blocks than rows ever need."""
    from tilegrad.kernels.grouped import block_list, most_blocks

    for offsets in ([0, 40, 0, 40, 0, 40], [0, 3, 17, 17, 30, 40]):
        node = build.input_((6,), int32)
        static = {"block": 8, "most": most_blocks(40, 5, 8)}
        plan = Plan().with_(warps=4)
        callee = block_list.callee(block_list.bind([node.type], static, plan), plan, H200)
        made = ops.call(node, callee=callee)
        (found,) = run_interpreted(H200, [node], [made], [np.array(offsets, np.int32)])
        (total, *_), *blocks = found.tolist()
        assert total <= static["most"]
        assert all(0 <= a < b <= 40 for _, a, b, _ in blocks[:total])


# ---- the kernel of asynchronous matrix units ----------------------------------------------------


def gated(x: Node, weights: Node, offsets: Node, _: Node, other: Node) -> Node:
    """silu(x w) times x v."""
    y, z = (ops.grouped_dot(x, w, offsets, axis=2, block=0) for w in (weights, other))
    return build.multiply(build.multiply(y, ops.sigmoid(y)), z)


def two_weights(*sizes: int) -> list:
    values = given(*sizes, BF16)
    draw = np.random.default_rng(3)
    return [*values, draw.standard_normal(values[1].shape).astype(BF16)]


def plans_of(function, values: list) -> list:
    """The Plans of the launches for an H200."""
    nodes = [build.input_(v.shape, BY_NUMPY[v.dtype]) for v in values]
    schedule = schedule_for(nodes, [function(*nodes)], H200)
    launches = [s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    return [launch.body.notes.get("plan") for launch in launches]


def test_blocks_follow_the_rows() -> None:
    """A list, and one launch: few rows are small blocks, whatever the groups have."""
    for rows, block in ((20, 16), (64, 32), (2000, 128)):
        listed, plan = plans_of(product(2), given(rows, 4, 64, 64, BF16))
        assert listed is None and isinstance(plan, WidePlan) and plan.tile[1] == block
    listed, plan = plans_of(gated, two_weights(64, 4, 64, 64))
    assert listed is None and isinstance(plan, WidePlan) and plan.tile == (128, 32, 64)


def test_few_rows_are_streamed_but_at_the_level_invariant() -> None:
    """There the order of a sum may not depend on the number of rows."""
    values = given(8, 4, 64, 256, BF16)
    assert isinstance(plans_of(product(2), values)[1], MatvecPlan)
    with override(determinism="invariant"):
        assert not isinstance(plans_of(product(2), values)[1], MatvecPlan)


@pytest.mark.parametrize("rows", [20, 64, 256, 2000])
def test_a_core_has_one_program(rows: int) -> None:
    """Rings take more than half of its shared memory."""
    for function, values in ((product(2), given), (gated, lambda *s: two_weights(*s[:-1]))):
        _, plan = plans_of(function, values(rows, 4, 64, 768, BF16))
        tm, tn, tk = plan.tile
        assert tm >= 128 and 4 * plan.stages * (tm + tn) * tk > H200.memories["shared"].bytes


@pytest.mark.parametrize(
    "sizes, axis",
    [((9, 6, 128, 72), 2), ((150, 2, 64, 64), 1), ((20, 40, 64, 64), 2)],
    ids=["edges", "turned", "few"],
)
def test_simulated(sizes: tuple, axis: int) -> None:
    check_graph(product(axis), *given(*sizes, BF16, axis))


def test_two_weights_simulated() -> None:
    on(H200, gated, *two_weights(37, 3, 128, 136))
    check_graph(gated, *two_weights(37, 3, 64, 128))


def several(x: Node, weights: Node, offsets: Node, _: Node) -> list[Node]:
    """x w, and silu of it."""
    y = ops.grouped_dot(x, weights, offsets, axis=2, block=0)
    return [y, build.multiply(y, ops.sigmoid(y))]


def kept(x: Node, weights: Node, offsets: Node, _: Node, other: Node) -> list[Node]:
    """What the derivative of a gated product reads again: both products, and the gated one."""
    y, z = (ops.grouped_dot(x, w, offsets, axis=2, block=0) for w in (weights, other))
    return [y, z, build.multiply(build.multiply(y, ops.sigmoid(y)), z)]


@pytest.mark.parametrize("groups", [3, 1])
def test_results_beside_are_masked_too(groups: int) -> None:
    """Rows past a block's last are the next group's: no result of theirs is written."""
    on(H200, several, *given(37, groups, 128, 136, BF16))
    on(H200, kept, *two_weights(37, groups, 128, 136))


@pytest.mark.parametrize("function", [several, kept])
def test_results_beside_simulated(function) -> None:
    """Where programs that write one element differently are found."""
    values = two_weights(37, 3, 64, 128)
    check_graph(function, *(values if function is kept else values[:4]))


def test_other_groups_are_not_joined() -> None:
    """Two products of one x whose groups differ, with both lists there before either."""
    x, weights, offsets, _, other = two_weights(64, 4, 64, 64)

    def made(x: Node, weights: Node, offsets: Node, ends: Node, other: Node) -> Node:
        for _ in range(2):
            y = ops.grouped_dot(x, weights, offsets, axis=2, block=0)
            z = ops.grouped_dot(x, other, ends, axis=2, block=0)
            x = build.multiply(build.multiply(ops.sigmoid(y), z), 1 / 16)
        return x

    on(H200, made, x, weights, offsets, np.array([0, 10, 20, 30, 64], np.int32), other)


def test_one_group_of_two_weights() -> None:
    """Rows of a result are no multiple of a piece's; few rows ask for nothing before the list."""

    def made(x: Node, weights: Node, offsets: Node, factor: Node, other: Node) -> list[Node]:
        y, z = (ops.grouped_dot(x, w, offsets, axis=2, block=0) for w in (weights, other))
        return [build.multiply(y, factor), build.multiply(z, factor)]

    on(H200, made, *two_weights(20, 1, 64, 72))


def test_rows_that_lie_apart() -> None:
    """x is the transpose of what is stored: blocks of fewer rows than a span."""
    x, weights, offsets, factor = given(40, 4, 64, 64, BF16)

    def made(x: Node, weights: Node, offsets: Node, factor: Node) -> Node:
        return product(2)(build.permute(x, (1, 0)), weights, offsets, factor)

    check_graph(made, np.ascontiguousarray(x.T), weights, offsets, factor)


def test_layers_share_a_list() -> None:
    """Gate and up are one launch, down another, and one list serves both."""
    x, weights, offsets, factor, other = two_weights(64, 4, 64, 128)
    down = np.zeros((4, 64, 128), BF16)

    def layer(x, weights, offsets, factor, other, down):
        inner = gated(x, weights, offsets, factor, other)
        return ops.grouped_dot(inner, down, offsets, axis=2, block=0)

    assert len(plans_of(layer, [x, weights, offsets, factor, other, down])) == 3


def test_symbols_have_ranges() -> None:
    """Rows that are twice the tokens, of 8 groups."""
    tokens = symbol("tokens", 1, 1000)
    types = [((2 * tokens, 64), bfloat16), ((8, 64, 64), bfloat16), ((9,), int32)]
    nodes = [build.input_(shape, dtype) for shape, dtype in types]
    made = [ops.grouped_dot(*nodes, axis=2, block=0)]
    assert breaks_of(made, H200) == {"tokens": (17, 65)}
    assert breaks_of(made, AVX512) == {"tokens": (5,)}
    values = given(20, 8, 64, 64, BF16)[:3]
    expected = interpret(made, dict(zip(nodes, values)), {"tokens": 10})[0]
    (found,) = run_interpreted(H200, nodes, made, values, {"tokens": 10})
    compare(made[0], found, expected)
