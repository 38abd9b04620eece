"""What a product's kernel takes along, what is left to a kernel that streams, and what is copied.

Emitted instructions are counted, since they are what the assembler's time follows from; numbers
are those of the Graph interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
from interpreted import run_interpreted
from judge import compare

from tilegrad.compiler.compile import schedule_for
from tilegrad.core.dtype import BY_NUMPY, bfloat16, float32
from tilegrad.core.target import A100, H200, Target
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import Node
from tilegrad.kernels.matmul.shape import WidePlan
from tilegrad.schedule.cost import EXACT, INSTRUCTIONS
from tilegrad.schedule.products import MOST_INSTRUCTIONS
from tilegrad.schedule.schedule import Kernel, Launch
from tilegrad.targets.ptx.emit import emit

BRANCHING = ("div.rn", "sqrt.rn", "rcp.rn", "bra ", "bra.uni")


def weight_of(text: str) -> int:
    """Instructions of a text, those that branch by what the assembler makes of them."""
    exact = sum(text.count(name) for name in BRANCHING)
    return sum(line.rstrip().endswith(";") for line in text.splitlines()) + (EXACT - 1) * exact


def kernels(inputs, outputs, target: Target = H200) -> list[Kernel]:
    return schedule_for(inputs, outputs, target, ()).kernels


def texts(found: list[Kernel], target: Target = H200) -> list[str]:
    return [
        emit(s.body, "entry", target)[0] for k in found for s in k.steps if isinstance(s, Launch)
    ]


@pytest.mark.parametrize("op", INSTRUCTIONS, ids=lambda op: op.name)
def test_instructions_of_an_element(op) -> None:
    """The table that epilogues are counted with is what is emitted, or more."""
    x = [build.input_((1 << 22,), float32) for _ in range(1 + (op.category == "binary"))]
    found = texts(kernels(x, [op(*x) if len(x) > 1 else build.unary(op, *x)]))
    plain, exact = INSTRUCTIONS[op]
    lines, branches = 0.0, 0.0  # of an element
    for text in found:
        width = 4 * text.count("st.global.v4.b32")
        lines += (sum(line.rstrip().endswith(";") for line in text.splitlines()) - 40) / width
        branches += sum(text.count(name) for name in BRANCHING) / width
    assert lines <= 2 * plain + 8 * exact
    assert branches <= exact + 0.25  # a slow path that all elements share


@pytest.mark.parametrize(
    "name,count", [("sin", 21), ("tan", 20), ("asin", 12), ("square_root", 60), ("erf_inverse", 12)]
)
def test_chains_of_costly_functions_are_cut(name: str, count: int) -> None:
    """As many instructions as ptxas takes 3 s for are in no program."""
    x = y = build.input_((1 << 22,), float32)
    for _ in range(count):
        y = build.unary(getattr(ops, name), y)
    for text in texts(kernels([x], [y])):
        branches = sum(text.count(name) for name in BRANCHING)
        assert len(text.splitlines()) + 24 * branches < 30_000


def adamw(w: Node, m: Node, v: Node, g: Node, rate: Node) -> list[Node]:
    """The next weights and moments."""
    g = build.cast(g, float32)
    mean = build.add(build.multiply(m, 0.9), build.multiply(g, 0.1))
    square = build.add(build.multiply(v, 0.99), build.multiply(build.multiply(g, g), 0.01))
    root = build.add(build.divide(build.unary(ops.square_root, square), rate), 1e-8)
    return [build.subtract(w, build.multiply(build.divide(mean, root), rate)), mean, square]


def update_of(k: int, m: int, n: int) -> tuple[list[Node], list[Node]]:
    """The update of weights by the gradient of a product."""
    a, b = build.input_((k, m), bfloat16), build.input_((k, n), bfloat16)
    state = [build.input_((m, n), float32) for _ in range(3)]
    rate = build.input_((), float32)
    product = build.dot(a, b, ((), ()), ((0,), (0,)), bfloat16)
    return [a, b, *state, rate], adamw(*state, product, rate)


@pytest.mark.parametrize("target", [H200, A100], ids=lambda t: t.name)
@pytest.mark.parametrize("m,n", [(768, 3072), (2304, 768), (768, 768), (50304, 768)])
def test_an_update_is_left_to_a_kernel_that_streams(m: int, n: int, target: Target) -> None:
    found = kernels(*update_of(16384, m, n), target)
    assert all(weight_of(text) < 1.2 * MOST_INSTRUCTIONS for text in texts(found, target))
    if target is H200 and m * n > 768 * 768:
        assert [k.kind for k in found] == ["dot", "loops"]


@pytest.mark.parametrize("name", ["exact", "approximate", "bias", "root"])
def test_short_epilogues_stay(name: str) -> None:
    """Also a root and a quotient, of which 16 bits are seen alone or which are few a thread."""
    x, w = build.input_((4096, 1024), bfloat16), build.input_((1024, 4096), bfloat16)
    b = build.input_((4096,), float32)
    y = build.add(build.cast(build.matmul(x, w), float32), b)
    if name == "exact":
        y = build.multiply(y, build.add(build.unary(ops.erf, build.multiply(y, 0.7)), 1.0))
    elif name == "approximate":
        y = build.multiply(y, build.add(build.unary(ops.tanh, build.multiply(y, 0.8)), 1.0))
    elif name == "root":
        y = build.divide(y, b)
    found = kernels([x, w, b], [build.cast(y, bfloat16)])
    assert [k.kind for k in found] == ["dot"]


@pytest.mark.parametrize("name", ["sin", "square_root", "asin"])
def test_slow_paths_stay_out_of_products(name: str) -> None:
    """Also where 16 bits are seen alone: these have no quick form."""
    x, w = build.input_((4096, 1024), bfloat16), build.input_((1024, 4096), bfloat16)
    y = build.unary(getattr(ops, name), build.cast(build.matmul(x, w), float32))
    found = kernels([x, w], [build.cast(y, bfloat16)])
    assert found[0].kind == "dot" and {k.kind for k in found[1:]} == {"loops"}


def run(inputs: list[Node], outputs: list[Node], target: Target = H200) -> None:
    """Hold the scheduled Graph to the interpreter; sums of products are exact."""
    random = np.random.default_rng(0)
    values = [
        (
            random.integers(0, 3, n.shape)
            if n.dtype is bfloat16
            else random.uniform(0.5, 2.0, n.shape)
        ).astype(n.dtype.numpy)
        if n.shape
        else np.asarray(0.5, n.dtype.numpy)
        for n in inputs
    ]
    expected = interpret(outputs, dict(zip(inputs, values)))
    for node, got, want in zip(outputs, run_interpreted(target, inputs, outputs, values), expected):
        assert BY_NUMPY[got.dtype] is node.dtype
        compare(node, got, want, 3)


@pytest.mark.parametrize("target", [H200, A100], ids=lambda t: t.name)
def test_a_cut_epilogue_computes_the_same(target: Target) -> None:
    inputs, outputs = update_of(64, 256, 512)
    run(inputs, outputs, target)


def test_a_cut_epilogue_and_who_reads_it() -> None:
    """A sum of the updated weights, and another product of them: the order stays right."""
    inputs, outputs = update_of(64, 256, 512)
    again = build.matmul(build.cast(outputs[0], bfloat16), build.transpose(inputs[1]))
    run(inputs, [*outputs, build.sum_(outputs[1], 1), again])


# ---- what is kept of a product, and what is copied for one ----------------------------------


def test_what_many_read_is_stored_as_they_read_it() -> None:
    """A sum with a bias that is rounded before anybody reads it is stored rounded."""
    x, w = build.input_((4096, 1024), bfloat16), build.input_((1024, 3072), bfloat16)
    b = build.input_((3072,), float32)
    wide = build.dot(x, w, ((), ()), ((1,), (0,)), float32)
    y = build.cast(build.add(wide, b), bfloat16)
    outputs = [
        build.unary(ops.exp, build.slice_axis(y, 1, i * 1024, i * 1024 + 1024)) for i in range(3)
    ]
    stored = {node.dtype for k in kernels([x, w, b], outputs) for node in k.region[1]}
    assert stored == {bfloat16}


def test_a_product_is_stored_as_what_it_is_cast_to() -> None:
    """A cast to fewer bits that is all that is read of a product, behind another shape too; not
    where the product is an output itself."""
    x, w = build.input_((64, 256), bfloat16), build.input_((256, 512), bfloat16)
    wide = build.dot(x, w, ((), ()), ((1,), (0,)), float32)
    narrow = build.cast(build.reshape(wide, (32, 2, 512)), bfloat16)
    sums = build.sum_(build.cast(narrow, float32), 2)  # which no product's kernel adds up
    made = build.unary(ops.exp, build.slice_axis(narrow, 1, 0, 1))
    inputs, outputs = [x, w], [made, sums]
    dots = [k for k in kernels(inputs, outputs) if k.kind == "dot"]
    assert [node.dtype for k in dots for node in k.region[1]] == [bfloat16]
    run(inputs, outputs)
    (kept,) = (k for k in kernels(inputs, [*outputs, wide]) if k.kind == "dot")
    assert [node.dtype for node in kept.region[1]] == [float32]


def heads(batch: int, count: int, tokens: int, size: int) -> tuple[list[Node], list[Node]]:
    """Heads side by side again, times weights."""
    x = build.input_((batch, count, tokens, size), bfloat16)
    w = build.input_((count * size, count * size), bfloat16)
    y = build.unary(ops.exp, x)
    rows = build.reshape(build.permute(y, (0, 2, 1, 3)), (batch, tokens, count * size))
    return [x, w], [build.dot(rows, w, ((), ()), ((2,), (1,)), bfloat16), build.sum_(y, 3)]


def test_an_operand_that_is_no_matrix_is_copied_for_a_large_product() -> None:
    found = kernels(*heads(16, 12, 1024, 64))
    plans = [s.body.notes.get("plan") for k in found for s in k.steps if k.kind == "dot"]
    assert len(plans) == 1 and isinstance(plans[0], WidePlan)
    small = kernels(*heads(1, 2, 16, 8))
    assert all(node.op is not ops.reshape for k in small for node in k.region[1])


def test_a_copied_operand_computes_the_same(monkeypatch) -> None:
    from tilegrad.schedule import products

    monkeypatch.setattr(products, "LAUNCH", -1.0)  # so that a small product pays
    run(*heads(2, 4, 64, 16))
