"""The page: every pass is found, can be left out by name or says why not, and keeps the values."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "schedule"))
from interpreted import run_interpreted

import tilegrad as tg
from tilegrad.compiler.choose import CHOSEN
from tilegrad.compiler.compile import compile_for, host
from tilegrad.compiler.pipeline import GRAPH, KERNELS, PAGE, REGIONS, TILES
from tilegrad.compiler.row_dots import ROWS, SHORT_ROWS
from tilegrad.compiler.split import ARGMAX, PARTED, SPLIT
from tilegrad.compiler.unroll import UNROLL
from tilegrad.compiler.weights import APART
from tilegrad.core import dtype as dtypes
from tilegrad.core.errors import UserError
from tilegrad.core.target import A100, AVX512, H200
from tilegrad.graph import build, ops
from tilegrad.graph.decompose import DECOMPOSE
from tilegrad.graph.interpret import interpret
from tilegrad.graph.recognize import RECOGNIZE
from tilegrad.graph.simplify import STRIP
from tilegrad.graph.strength import STRENGTH
from tilegrad.ir.node import Node
from tilegrad.runtime.buffer import Buffer

FREE = [one.name for one in PAGE if not one.needed]


def block() -> tuple[list[Node], list[Node]]:
    """A norm, products that share their input, a gate, a residual sum, sums by row and by column,
    a long sum, a place of the largest, and a state that is updated."""
    bf, f32 = dtypes.bfloat16, dtypes.float32
    x, w = build.input_((8, 256), bf), build.input_((256,), bf)
    gate, up = build.input_((256, 128), bf), build.input_((256, 128), bf)
    down = build.input_((128, 256), bf)
    state, rows = build.input_((16, 256), bf), build.input_((8,), dtypes.int64)
    wide = build.cast(x, f32)
    squares = build.multiply(build.sum_(build.multiply(wide, wide), 1, True), 1 / 256)
    scaled = build.multiply(wide, ops.reciprocal(ops.square_root(build.add(squares, 1e-5))))
    y = build.cast(build.multiply(scaled, build.cast(w, f32)), bf)
    gated = build.multiply(ops.tanh(build.matmul(y, gate)), build.matmul(y, up))
    out = build.add(build.matmul(gated, down), x)
    values = [out, build.sum_(build.cast(out, f32)), build.sum_(build.cast(out, f32), 0)]
    values += [ops.argmax(out, axis=1), build.update(state, out, [rows], [0], "set")]
    return [x, w, gate, up, down, state, rows], values


def drawn(nodes: list[Node]) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    found = [0.1 * random.standard_normal(n.shape) for n in nodes[:-1]]
    given = [v.astype(ml_dtypes.bfloat16) for v in found]
    return [*given, np.arange(8, dtype=np.int64)[::-1].copy()]


def agree(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for number, (got, want) in enumerate(zip(found, expected)):
        if number != 3:  # places of the largest, which rounding may move
            np.testing.assert_allclose(
                got.astype(np.float64), want.astype(np.float64), rtol=0.05, atol=0.05
            )


def test_every_line_of_the_page_is_a_function() -> None:
    names = [one.name for one in PAGE]
    assert len(set(names)) == len(names) == len(GRAPH + REGIONS + TILES + KERNELS)
    for one in PAGE:
        assert callable(one.function) and one.function.__doc__, one.name


CASES = [
    pytest.param(one.name, target, id=f"{one.name}-{target.name}")
    for target in (H200, A100)
    for one in PAGE
    if not one.needed and (one.applies is None or one.applies(target))
]


def test_what_a_pass_does_nothing_without() -> None:
    """`on` names every op that the Rules of a pass begin with."""
    on = {one.name: set(one.on) for one in GRAPH}
    rules = {
        "strip": STRIP,
        "inline": DECOMPOSE,
        "recognize": RECOGNIZE,
        "strength": STRENGTH,
        "unroll": UNROLL,
        "weights": APART,
        "dots of a row": ROWS,
        "dots of a short row": SHORT_ROWS,
        "split reductions": SPLIT,
        "split parts": PARTED,
        "split argmax": ARGMAX,
    }
    for name, found in rules.items():
        roots = {op.name for op in found.roots} - {"get"}  # of what gives several results
        assert roots <= on[name], name
    assert {op.name for op in CHOSEN} <= on["choose kernels"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name,target", CASES)
def test_each_can_be_left_out_for_threads(name: str, target) -> None:
    nodes, outputs = block()
    values = drawn(nodes)
    expected = interpret(outputs, dict(zip(nodes, values)))
    agree(run_interpreted(target, nodes, outputs, values, without=[name]), expected)


@pytest.mark.parametrize("name", FREE)
def test_each_can_be_left_out_here(name: str) -> None:
    nodes, outputs = block()
    values = drawn(nodes)
    made = compile_for(nodes, outputs, host(), without=[name])
    found = made.run([Buffer.wrap(v.copy()) for v in values])
    got = [b.array(n.shape, n.dtype) for b, n in zip(found, outputs)]
    agree(got, interpret(outputs, dict(zip(nodes, values))))


def test_what_is_needed_says_so() -> None:
    nodes, outputs = block()
    for one in PAGE:
        if one.needed:
            with pytest.raises(UserError, match="cannot be left out") as error:
                compile_for(nodes, outputs, host(), without=[one.name])
            assert one.needed in str(error.value)
    with pytest.raises(UserError, match="no pass is called 'fly'"):
        compile_for(nodes, outputs, host(), without=["fly"])


@pytest.mark.parametrize("target", [H200, AVX512], ids=lambda t: t.name)
def test_explain_shows_every_pass(target) -> None:
    def f(x, w):
        return tg.softmax(x @ w, -1)

    given = tg.zeros((64, 64)), tg.zeros((64, 64))
    text = tg.explain(f, *given, target=target, without=["simplify"]).section("passes")
    assert [one.name for one in PAGE if one.name not in text] == []
    assert "left out: simplify" in text and "not for this Target: " in text
    named = tg.explain(f, *given, target=target.name, without="simplify").section("passes")
    assert named == text


def test_the_command(tmp_path: Path) -> None:
    from tilegrad.cli.main import app

    file = tmp_path / "mine.py"
    file.write_text("def f(x):\n    return (x - x.mean(-1, keepdim=True)) * x\n")
    run = CliRunner().invoke
    shown = run(app, ["explain", f"{file}:f", "float32[64,512]", "--target", "h200"])
    assert shown.exit_code == 0 and "for h200" in shown.output, shown.output
    less = run(
        app,
        [
            "explain",
            f"{file}:f",
            "float32[64,512]",
            "--target",
            "h200",
            "--without",
            "shallow sums",
        ],
    )
    assert less.exit_code == 0 and "left out: shallow sums" in less.output
    wrong = run(app, ["explain", f"{file}:f", "float32[64,512]", "--without", "fuse"])
    assert wrong.exit_code == 1 and "cannot be left out" in wrong.output
    assert run(app, ["explain", f"{file}:g", "float32[2]"]).exit_code == 1
    assert run(app, ["explain", f"{file}:f", "float32"]).exit_code == 1
