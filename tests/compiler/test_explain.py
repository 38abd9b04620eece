"""`explain` shows every stage, says which Rules fired, and counts work and memory."""

from pathlib import Path

import pytest

import tilegrad
from tilegrad.compiler.explain import LEVELS, SECTIONS, explain_graph, scaled, seconds
from tilegrad.core.dtype import float32
from tilegrad.core.errors import UserError
from tilegrad.core.target import NEON
from tilegrad.graph import build
from tilegrad.ir.text import parse_block, print_block


def expression(a, b, c):
    return (a * b + c).sum()


def arguments(size=64):
    return [tilegrad.rand(size, size).realize() for _ in range(3)]


def test_all_sections_are_there():
    found = tilegrad.explain(expression, *arguments())
    text = str(found)
    places = [
        text.index(f"== {name} ==")
        for name in SECTIONS
        if name not in ("final graph", "ptx", "placement")
    ]
    assert places == sorted(places)
    assert "multiply(%a, %b)" in found.graph and "define void @" in text
    assert "fadd <" in found.section("llvm") and "ret" in found.section("assembly")
    assert repr(found) == text


def test_tile_text_has_no_notes_of_passes():
    found = tilegrad.explain(expression, *arguments())
    for program in found.programs:
        program.body.notes["work"] = 1  # as `work_of_body` leaves it
        assert "work" not in program.tile


def test_graph_text_has_the_users_line_and_parses_again():
    found = tilegrad.explain(expression, *arguments(), level="graph")
    assert f"{Path(__file__).name}:" in found.graph
    assert print_block(parse_block(found.graph), "graph", locations=True) == found.graph


def test_passes_name_their_rules():
    found = tilegrad.explain(lambda x: x * 1.0 + 2.0, tilegrad.rand(8, 8), level="summary")
    assert found.passes[0].name == "simplify"
    assert found.passes[0].fired["multiply_one"] == 1
    assert "multiply_one x1" in str(found)
    assert "multiply" not in found.final_graph


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "ptx"])
def test_level_shows_only_its_sections(level):
    text = str(tilegrad.explain(expression, *arguments(8), level=level))
    shown = {name for name in SECTIONS if f"== {name} ==" in text}
    assert shown == set(LEVELS[level]) - {"final graph", "ptx", "placement"}  # this is for the CPU


def test_work_and_memory_are_counted():
    found = tilegrad.explain(lambda a, b: (a @ b + a).sum(), *arguments(64)[:2])
    flops = sum(kernel.flops for kernel in found.kernels)
    assert flops == 2 * 64**3 + 2 * 64 * 64  # the product, the addition, the sum
    assert found.input_bytes == 2 * 64 * 64 * 4 and found.output_bytes == 4
    assert found.peak_bytes == found.input_bytes + 4 + found.schedule_ir.arena_bytes
    assert f"peak {found.peak_bytes} bytes" in found.schedule


def test_bound_is_told_by_intensity():
    matmul = tilegrad.explain(lambda a, b: a @ b, *arguments(512)[:2], level="summary")
    addition = tilegrad.explain(lambda a, b: a + b, *arguments(512)[:2], level="summary")
    assert [k.bound for k in matmul.kernels] == ["compute"]
    assert [k.bound for k in addition.kernels] == ["memory"]
    assert addition.kernels[0].bytes == 3 * 512 * 512 * 4
    assert addition.kernels[0].floor == 3 * 512 * 512 * 4 / addition.target.peak_bytes()


def test_equal_kernels_share_a_program():
    def layers(x, weights):
        for weight in weights:
            x = (x @ weight).tanh()
        return x

    weights = [tilegrad.rand(32, 32) for _ in range(6)]
    found = tilegrad.explain(layers, tilegrad.rand(32, 32), weights, level="summary")
    assert len(found.programs) < len(found.kernels)
    assert max(len(p.kernels) for p in found.programs) == 6
    assert f"{len(found.kernels)} kernels served by {len(found.programs)} program" in str(found)


def test_jitted_functions_and_lazy_tensors():
    jitted = tilegrad.jit(expression)
    assert "sum(" in tilegrad.explain(jitted, *arguments()).graph
    lazy = (tilegrad.tensor([1.0, 2.0]) * 3).sum()
    assert "multiply(" in tilegrad.explain(lazy, level="graph").graph
    lazy.realize()
    with pytest.raises(UserError, match="nothing left to compile"):
        tilegrad.explain(lazy)


def test_nothing_runs(monkeypatch):
    from tilegrad.runtime.executable import Executable

    given = arguments()

    def run(*_):
        raise AssertionError("explain ran an Executable")

    monkeypatch.setattr(Executable, "run", run)
    str(tilegrad.explain(expression, *given))


def test_other_targets():
    """The Graph of one machine explained for another: Arm assembly from anywhere."""
    x = build.input_((64,), float32)
    found = explain_graph([x], [build.add(x, x)], target=NEON, level="assembly")
    assert "fadd" in found.section("assembly")


def test_mistakes_are_named():
    with pytest.raises(UserError, match="no such level"):
        tilegrad.explain(expression, *arguments(8), level="everything")
    with pytest.raises(UserError, match="nothing is computed"):
        tilegrad.explain(lambda x: x, tilegrad.rand(2))
    with pytest.raises(TypeError, match="needs a function"):
        tilegrad.explain(3)


def test_numbers_for_people():
    assert [scaled(n) for n in (0, 999, 12_345, 5e9)] == ["0 ", "999 ", "12.3 k", "5 G"]
    assert [seconds(t) for t in (8e-7, 1.5e-3, 2.0)] == ["800 ns", "1.5 ms", "2 s"]


def test_loops_count_one_step():
    def repeat(x, weights):
        return tilegrad.scan(lambda h, w: (tilegrad.tanh(h @ w), h.sum()), x, weights)

    found = tilegrad.explain(repeat, tilegrad.rand(16, 16), tilegrad.rand(100, 16, 16))
    assert "counts the work of one step" in str(found)
    assert sum(k.flops for k in found.kernels) < 100 * 2 * 16**3


def test_symbolic_sizes_count_their_upper_bounds():
    jitted = tilegrad.jit(lambda x: x + 1, dynamic={"x": {0: ("N", 1, 64)}})
    found = tilegrad.explain(jitted, tilegrad.rand(5, 8))
    assert "symbols N in 1..64" in found.graph
    assert found.kernels[0].flops == 64 * 8 and found.output_bytes == 64 * 8 * 4


def test_a_given_value_is_not_looked_into():
    product = (tilegrad.rand(4, 4) @ tilegrad.rand(4, 4)).realize()
    assert "dot" not in tilegrad.explain((product + 1).sum(), level="graph").graph
