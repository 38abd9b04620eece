"""What tests of the wide matmul share: operands, wanted products, and who judges a broken Body."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import mutants
import numpy as np
from simulator import simulate

from ptxsim import SimulationError
from tilegrad.core.dtype import DType, bfloat16, float16, float32
from tilegrad.core.errors import InternalError
from tilegrad.core.target import H200
from tilegrad.kernels.matmul.shape import Operands
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret
from tilegrad.tile.build import Body
from tilegrad.tile.check import Finding
from tilegrad.tile.prove import check_body

ROUNDING = {float32: 1e-5, bfloat16: 2.0**-8, float16: 2.0**-10}
NN, TT, TN = ({"a_along_k": a, "b_along_k": b} for a, b in ((1, 0), (0, 1), (0, 0)))

# why some mutants do no harm
LONE = "the barrier of the last consumer alone may have any number"
EARLY = "at the start all stages are expected before any is waited for"


def errors(body: Body) -> list[Finding]:
    """Findings of level 'error'."""
    return [f for f in check_body(body, H200) if f.severity == "error"]


def numbers(x: Operands, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """a, b and an unwritten result as they lie, and the product in float64 as it will lie."""
    draw = np.random.default_rng(seed)
    lead = () if x.batch == 1 else (x.batch,)
    a = draw.standard_normal((*lead, x.m, x.k)).astype(x.dtype.numpy)
    b = draw.standard_normal((*lead, x.k, x.n)).astype(x.dtype.numpy)
    product = a.astype(np.float64) @ b.astype(np.float64)
    product = product.swapaxes(-1, -2) if x.turned else product
    stored = [a if x.a_along_k else a.swapaxes(-1, -2), b.swapaxes(-1, -2) if x.b_along_k else b]
    result = np.full(product.shape, np.nan, np.float32).astype(x.result.numpy)
    return [*(np.ascontiguousarray(s) for s in stored), result], product


def agree(found: np.ndarray, product: np.ndarray, x: Operands, inner: float = 1e-5) -> None:
    """Up to the rounding of the result and of the sums within."""
    scale = float(np.abs(product).max())
    np.testing.assert_allclose(
        found.astype(np.float64), product, rtol=ROUNDING[x.result], atol=inner * scale
    )


def operands(
    m: int, n: int, k: int, dtype: DType = bfloat16, result: DType | None = None, **more: object
) -> Operands:
    """Operands whose result has their own dtype, if not said otherwise."""
    return Operands(m, n, k, dtype, result or dtype, **more)  # type: ignore[arg-type]


Given = Callable[[Operands], tuple[list[np.ndarray], np.ndarray]]


class Judges:
    """Who catches a broken Body: the static check, the interpreter, or the PTX simulator."""

    def __init__(self, body: Body, x: Operands, given: Given = numbers) -> None:
        self.x, self.given = x, given
        assert not errors(body)
        self.expected = self.interpreted(body, None)
        self.simulated_as = self.simulated(body)
        agree(self.expected, given(x)[1], x)
        agree(self.simulated_as, given(x)[1], x)

    def interpreted(self, body: Body, seed: int | None) -> np.ndarray:
        """The result in the interpreter."""
        memories, _ = self.given(self.x)
        interpret.run(body, memories, seed=seed)
        return memories[2]

    def simulated(self, body: Body) -> np.ndarray:
        """The result of the emitted PTX."""
        text, entry = emit(body, "broken", H200)
        memories, _ = self.given(self.x)
        simulate(text, entry, memories)
        return memories[2]

    def judge(self, body: Body) -> str:
        """The first who says that it is broken."""
        if errors(body):
            return "check"
        try:
            found = [self.interpreted(body, seed) for seed in (None, 0, 1)]
            if any(not np.array_equal(f, self.expected, equal_nan=True) for f in found):
                return "interpreter"
        except InternalError:
            return "interpreter"
        try:
            found = [self.simulated(body)]
        except (SimulationError, InternalError):
            return "simulator"
        same = np.array_equal(found[0], self.simulated_as, equal_nan=True)
        return "nobody" if same else "simulator"


def break_all(
    name: str,
    body: Body,
    x: Operands,
    harmless: dict[str, str],
    given: Given = numbers,
    step: int = 1,
) -> None:
    """Every `step`-th mutant of a Body is caught, but for those that do no harm."""
    judges, by, missed = Judges(body, x, given), Counter[str](), set()
    chosen = list(mutants.mutants(body))[::step]
    for label, broken in chosen:
        judge = judges.judge(broken)
        by[judge] += 1
        if judge == "nobody":
            missed.add(label)
    print(f"{name}: {sum(by.values())} mutants, caught by {dict(by)}")
    expected = set(harmless) & {label for label, _ in chosen}
    assert missed == expected, missed ^ expected
    assert by["check"] > 0.85 * sum(by.values())
