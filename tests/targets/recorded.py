"""Graphs of the op suite, recorded while its tests run, and held to the interpreter as PTX.

The tests of functions of Tensors compare with torch; here each Graph that they compute is recorded
with its arguments, computed by the Graph interpreter, and cut into one Graph for each result.
Every such Case is then scheduled for a GPU, emitted, assembled and run on the simulator.

Invariant: a Case is right where its result is that of the Graph interpreter, none of its programs
spills, and none takes the assembler longer than `SECONDS`.
"""

from __future__ import annotations

import contextlib
import io
import math
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judge import TOLERANCE, compare
from simulated import TEXTS, run_graph

from tilegrad.compiler import lift
from tilegrad.compiler.compile import schedule_for
from tilegrad.core.target import Target
from tilegrad.graph import ops
from tilegrad.graph.interpret import REFERENCE, interpret
from tilegrad.ir.fingerprint import digest, structure
from tilegrad.ir.node import Node, topological
from tilegrad.ir.symbol import evaluate
from tilegrad.ir.types import Array
from tilegrad.runtime.buffer import Buffer
from tilegrad.schedule.schedule import Launch
from tilegrad.targets.ptx.assemble import assemble
from tilegrad.targets.ptx.emit import emit
from tilegrad.tensor import lowered

TESTS = Path(__file__).resolve().parents[1]
MOST = 60_000  # elements of all Nodes of a Graph that is simulated
UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
TIMES = 10.0  # what a last bit moves
DRAWS = 16  # of last bits
SUMS = (  # of terms, in any order and apart from one another
    *(ops.sum_, ops.cumulative, ops.dot, ops.picked_dot, ops.grouped_dot, ops.grouped_outer),
    *(ops.sparse_dot, ops.block_dot, ops.update, ops.add_listed),
)
EXACT = (  # of what is computed element by element
    *(ops.negative, ops.absolute, ops.sign, ops.floor, ops.ceil, ops.round_, ops.trunc),
    *(ops.maximum, ops.minimum, ops.remainder, ops.fmod, ops.floor_divide_),
    *(ops.cast, ops.bitcast, ops.fixed, ops.stop_gradient, ops.in_range),
)
ROUNDED = [x for x in REFERENCE if x.category in ("unary", "binary") and x not in EXACT]
ROUNDED.append(ops.prod)
SECONDS = 3.0  # of a processor, for one program in the assembler


@dataclass(frozen=True)
class Case:
    """One result of a recorded Graph, with the arguments that it needs."""

    name: str  # of the test
    inputs: tuple[Node, ...]
    output: Node
    values: tuple[np.ndarray, ...]
    symbols: dict[str, int]
    expected: np.ndarray

    @property
    def nodes(self) -> list[Node]:
        """The Graph."""
        return topological([self.output], set(self.inputs).__contains__)

    def __str__(self) -> str:
        names = dict.fromkeys(n.op.name for n in self.nodes if n.op.name != "input")
        shapes = ", ".join(str(n.type) for n in self.inputs)
        return f"{self.name} ({shapes}) -> {self.output.type}: {' '.join(names)}"

    @property
    def looser(self) -> float:
        """Than the result's dtype asks for: of the least precise float that is rounded to."""
        own = TOLERANCE.get(self.output.dtype.name, 1.0)
        dtypes = [n.dtype for n in self.nodes if isinstance(n.type, Array)]
        return 4 * max([own, *(TOLERANCE[d.name] for d in dtypes if d.is_float)]) / own

    @property
    def elements(self) -> int:
        """Of all Nodes together."""
        shapes = [n.shape for n in self.nodes if isinstance(n.type, Array)]
        return sum(math.prod(evaluate(s, self.symbols) for s in shape) for shape in shapes)

    @property
    def noise(self) -> np.ndarray:
        """What each element may be off by because its arguments and all that is computed on the
        way are rounded: terms that cancel, in any order of sums, also where the interpreter has
        two equal ones and another kernel does not; jumps, and fast functions of large arguments."""
        if not self.output.dtype.is_float:
            return np.zeros(())
        random = np.random.default_rng(0)
        most = np.zeros(self.expected.shape)
        for _ in range(DRAWS):
            moved = []
            for node, value in zip(self.inputs, self.values):
                unit = UNITS.get(node.dtype.name, 0.0) * random.choice((-1, 0, 1), value.shape)
                moved.append((value * (1 + unit)).astype(value.dtype) if np.any(unit) else value)
            with np.errstate(all="ignore"), rounded_elsewhere(random):
                (found,) = interpret([self.output], dict(zip(self.inputs, moved)), self.symbols)
                apart = np.abs(found.astype(np.float64) - self.expected.astype(np.float64))
            most = np.fmax(most, apart)
        return TIMES * np.where(np.isfinite(most), most, 0.0)


@contextlib.contextmanager
def rounded_elsewhere(random: np.random.Generator) -> Iterator[None]:
    """Results of the interpreter are a last bit off inside; a sum is so by a last bit of the sum
    of the sizes of its terms."""

    def off(row: Any, sums: bool) -> Any:
        def run(inputs: list[Any], attrs: dict[str, Any]) -> Any:
            result = row(inputs, attrs)
            unit = UNITS.get(result.dtype.name, 0.0)
            if not unit or {attrs.get("mode"), attrs.get("kind")} & {"set", "max", "min"}:
                return result
            sizes = [np.abs(x) if x.dtype.name in UNITS else x for x in inputs]
            size = (row(sizes, attrs) if sums else result).astype(np.float64)
            by = np.where(np.isfinite(size), size, 0.0) * random.choice((-1, 0, 1), size.shape)
            return (result.astype(np.float64) + by * unit).astype(result.dtype)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for op in (*ROUNDED, *SUMS):
            patch.setitem(REFERENCE, op, off(REFERENCE[op], op in SUMS))
        yield


@dataclass(eq=False)
class Recorder:
    """Computes Graphs with the interpreter and keeps their Cases; a plugin of pytest."""

    cases: dict[str, Case] = field(default_factory=dict)
    name: str = ""

    def take(self, inputs: Sequence[Node], outputs: Sequence[Node], *_: Any) -> Interpreted:
        """An Executable in the place of the compiler's."""
        return Interpreted(self, tuple(inputs), tuple(outputs))

    def keep(
        self,
        inputs: Sequence[Node],
        outputs: Sequence[Node],
        values: Sequence[np.ndarray],
        symbols: Mapping[str, int],
        expected: Sequence[np.ndarray],
    ) -> None:
        """One Case for each result."""
        for output, want in zip(outputs, expected):
            if output in inputs:
                continue
            reached = set(topological([output], set(inputs).__contains__))
            own = {n: v for n, v in zip(inputs, values) if n in reached}
            key = digest(structure(tuple(own), (output,)), tuple(sorted(symbols.items())))
            if key not in self.cases:
                given = tuple(np.array(v, order="C") for v in own.values())
                self.cases[key] = Case(
                    self.name, tuple(own), output, given, dict(symbols), np.array(want)
                )

    def pytest_runtest_setup(self, item: Any) -> None:
        """Know which test runs."""
        self.name = item.nodeid.rpartition("/")[2]


class Interpreted:
    """An Executable by the Graph interpreter, that tells the Recorder what it computed."""

    def __init__(
        self, recorder: Recorder, inputs: tuple[Node, ...], outputs: tuple[Node, ...]
    ) -> None:
        self.recorder, self.inputs, self.outputs = recorder, inputs, outputs

    def run(self, buffers: Sequence[Buffer], symbols: Mapping[str, int] | None = None) -> Any:
        """The results."""
        known = dict(symbols or {})
        shapes = [tuple(evaluate(s, known) for s in n.shape) for n in self.inputs]
        values = [b.array(s, n.dtype) for b, s, n in zip(buffers, shapes, self.inputs)]
        with np.errstate(all="ignore"):
            found = interpret(list(self.outputs), dict(zip(self.inputs, values)), known)
        self.recorder.keep(self.inputs, self.outputs, values, known, found)
        return [Buffer.wrap(np.array(x, order="C")) for x in found]


def record(files: Sequence[str]) -> list[Case]:
    """The Cases of test files, in the order they ran; a test that needs more is left out."""
    said = io.StringIO()
    with recording() as recorder, contextlib.redirect_stdout(said):
        pytest.main(
            [
                "-q",
                "-p",
                "no:cacheprovider",
                "--tb=no",
                "--rootdir",
                str(TESTS.parent),
                *(str(TESTS / f) for f in files),
            ],
            plugins=[recorder],
        )
    if not recorder.cases:
        raise RuntimeError(f"nothing was recorded:\n{said.getvalue()[-2000:]}")
    return list(recorder.cases.values())


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """What is computed inside is computed by the Graph interpreter, and recorded."""
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lift, "executable_on_numbers", lambda *given: (recorder.take(*given), []))
        patch.setattr(lowered, "executable_for", recorder.take)
        yield recorder


@dataclass
class Took:
    """What the programs of a Case took: of the assembler, and of a thread."""

    seconds: float = 0.0
    programs: int = 0
    simulated: bool = False


def run_case(case: Case, target: Target) -> Took:
    """Schedule, emit, assemble and simulate; raises where one of them fails."""
    TEXTS.clear()
    took = Took(simulated=case.elements <= MOST)
    if took.simulated:
        with np.errstate(all="ignore"):
            (got,) = run_graph(case.inputs, [case.output], case.values, case.symbols, target=target)
    else:
        schedule = schedule_for(case.inputs, [case.output], target, ())
        steps = [s for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
        TEXTS.update({text: text for text in (emit(s.body, "entry", target)[0] for s in steps)})
    for text in TEXTS:
        start = processor_seconds()
        made = assemble(text, target.cpu)
        took.seconds = max(took.seconds, processor_seconds() - start)
        took.programs += 1
        for report in made.reports.values():
            if report.spill_stores or report.stack_bytes:
                raise AssertionError(
                    f"spills {report.spill_stores} bytes, stack {report.stack_bytes}"
                )
    if took.seconds > SECONDS:
        raise AssertionError(f"the assembler took {took.seconds:.1f} s")
    if took.simulated:
        try:
            compare(case.output, got, case.expected, case.looser)
        except AssertionError:
            compare(case.output, got, case.expected, case.looser, case.noise)
    return took


def processor_seconds() -> float:
    """Of the programs that this process has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
