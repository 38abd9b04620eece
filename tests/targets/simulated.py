"""Run Bodies and Schedules as emitted PTX on the CPU simulator, and hold them to the interpreters.

The texts of a test are kept, so that they can be assembled together where ptxas is here.
Invariant: a Body's results are compared with the Tile interpreter's, a Graph's with the Graph
interpreter's, never with another run of the same emitter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import interpreted
import numpy as np
import pytest
from assembled import assemble_all
from judge import compare
from simulator import simulate

from tilegrad.core.dtype import BY_NUMPY
from tilegrad.core.errors import Site
from tilegrad.core.target import H200, Target
from tilegrad.graph import build
from tilegrad.graph.interpret import interpret as interpret_graph
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import evaluate
from tilegrad.schedule.schedule import Launch
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret
from tilegrad.tile.build import Body, body_sites

TEXTS: dict[str, str] = {}  # of this test, by themselves


@pytest.fixture
def assembled():
    """Assemble every text that the test emitted; none may spill or use local memory."""
    TEXTS.clear()
    yield
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE: the emitted texts ran on the simulator but were not assembled")
    for made in assemble_all(TEXTS, H200.cpu).values():
        for report in made.reports.values():
            assert report.spill_stores == report.spill_loads == report.stack_bytes == 0
    TEXTS.clear()


def launch(
    body: Body,
    memories: Sequence[np.ndarray],
    symbols: Mapping[str, int],
    target: Target = H200,
    policy: str = "round",
) -> None:
    """Emit a Body and run it, changing memories in place."""
    text, entry = emit(body, "entry", target)
    TEXTS[text] = text
    if all(evaluate(size, symbols) for size in entry.grid):
        word, sites = np.zeros(4, np.uint32), body_sites(body)
        simulate(text, entry, [*memories, word] if sites else memories, symbols, policy=policy)
        if word[0]:
            raise Site(**sites[word[0] - 1].attrs).error()


class Machine(interpreted.Machine):
    """Runs the launches of a Schedule as PTX."""

    def launch(self, step: Launch) -> None:
        """One Body over its grid."""
        memories = [self.memory(n, p) for n, p in zip(step.slots, step.body.parameters)]
        launch(step.body, memories, self.symbols, self.target)


def run_graph(
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    values: Sequence[np.ndarray],
    symbols: Mapping[str, int] | None = None,
    donate: tuple[int, ...] = (),
    target: Target = H200,
) -> list[np.ndarray]:
    """The outputs of a Graph scheduled for a GPU and run as PTX."""
    plain = interpreted.Machine
    interpreted.Machine = Machine  # type: ignore[misc]
    try:
        return interpreted.run_interpreted(target, inputs, outputs, values, symbols, donate)
    finally:
        interpreted.Machine = plain  # type: ignore[misc]


def check_graph(
    function: Callable[..., Node | Sequence[Node]], *values: np.ndarray, looser: float = 1.0
) -> list[np.ndarray]:
    """Run function(nodes...) as PTX and compare it with the Graph interpreter."""
    values = tuple(np.asarray(v) for v in values)
    nodes = [build.input_(v.shape, BY_NUMPY[v.dtype]) for v in values]
    made = function(*nodes)
    outputs = [made] if isinstance(made, Node) else list(made)
    expected = interpret_graph(outputs, dict(zip(nodes, values)))
    got = run_graph(nodes, outputs, values)
    for node, a, b in zip(outputs, got, expected):
        compare(node, a, b, looser)
    return got


def check_body(
    body: Body,
    *memories: np.ndarray,
    symbols: Mapping[str, int] | None = None,
    rounding: float = 0.0,
    policies: Sequence[str] = ("round",),
) -> list[np.ndarray]:
    """Run a Body as PTX and compare all its memories with the Tile interpreter's.

    `rounding` is how far sums may differ, in parts of the largest element; 0 asks for the bits.
    """
    expected = [m.copy() for m in memories]
    interpret.run(body, expected, symbols or {})
    found: list[np.ndarray] = []
    for policy in policies:
        found = [m.copy() for m in memories]
        launch(body, found, symbols or {}, policy=policy)
        for got, want in zip(found, expected):
            if rounding and BY_NUMPY[got.dtype].is_float:
                wide, scale = want.astype(np.float64), max(1e-30, np.abs(want).max())
                np.testing.assert_allclose(got.astype(np.float64), wide, 0, rounding * scale)
            else:
                same = np.isnan(got) & np.isnan(want) if got.dtype.kind == "f" else False
                np.testing.assert_array_equal(np.where(same, 0, got), np.where(same, 0, want))
    return found
