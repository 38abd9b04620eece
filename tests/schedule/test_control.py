"""Control in the Schedule: scan, while_loop and cond against the interpreter, and their plans."""

from __future__ import annotations

import numpy as np
import pytest
from judge import check, compare, run

from tilegrad.compiler.compile import host, schedule_for
from tilegrad.core import dtype as dtypes
from tilegrad.core.config import override
from tilegrad.core.errors import StateError
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.symbol import evaluate, symbol
from tilegrad.schedule.schedule import Control, Copy, Launch

LENGTH = 12


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def places(*shape: int, high: int = 7) -> np.ndarray:
    return np.random.default_rng(1).integers(0, high, shape)


def scan(body, carries, slices, length=LENGTH, reverse=False):
    last, stacked = build.scan(body, carries, slices, length, reverse)
    return [*last, *stacked]


def adding(c, s):
    return [build.add(c[0], s[0])], [build.multiply(c[0], 2.0)]


def halving(c, s):
    return [build.add(build.multiply(c[0], 0.5), s[0])], []


def scattering(c, s):
    return [build.update(c[0], s[0], [s[1]], [0], "add")], [build.sum_(c[0])]


def kernels(function, *values: np.ndarray, donate=()):
    """The Kernels of the Schedule of a function."""
    nodes = [build.input_(v.shape, dtypes.BY_NUMPY[v.dtype]) for v in values]
    made = function(*nodes)
    outputs = list(made) if isinstance(made, list) else [made]
    return schedule_for(nodes, outputs, host(), donate)


# ---- scan -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 8, 12])
def test_scan_lengths(length: int, reverse: bool) -> None:
    check(lambda c, x: scan(adding, [c], [x], length, reverse), floats(7), floats(length, 7))


CARRIES = {
    "fibonacci": (lambda c, s: ([c[1], build.add(c[0], c[1])], [c[0]]), 2),
    "exchange": (lambda c, s: ([c[1], c[0]], []), 2),
    "rotation": (lambda c, s: ([c[1], c[2], c[0]], [c[1]]), 3),
    "unchanged": (lambda c, s: ([c[0], build.add(c[1], c[0])], []), 2),
    "one for two": (lambda c, s: ([build.multiply(c[1], 0.5)] * 2, [c[0], c[0]]), 2),
}


@pytest.mark.parametrize("name", CARRIES)
@pytest.mark.parametrize("length", [9, 10])
def test_scan_carries(name: str, length: int) -> None:
    body, count = CARRIES[name]
    check(lambda *c: scan(body, list(c), [], length), *(floats(5, seed=i) for i in range(count)))


def test_scan_of_computed_values() -> None:
    def several(c, x):
        one = scan(adding, [build.multiply(c, 2.0)], [build.unary(ops.exp, x)])
        two = scan(adding, [build.constant(0.0, dtypes.float32)], [build.sum_(x, 1)])
        three = scan(adding, [one[0]], [build.permute(build.permute(x, (1, 0)), (1, 0))])
        return [*one, build.sum_(two[1]), three[0], build.add(c, 1.0)]

    check(several, floats(7), floats(LENGTH, 7))


def test_recurrent_layer() -> None:
    def layer(h, x, w, u):
        def step(c, s):
            new = build.unary(ops.tanh, build.add(build.matmul(c[0], w), build.matmul(s[0], u)))
            return [new], [new]

        return scan(step, [h], [x], 20)

    check(layer, floats(16, 32), floats(20, 16, 24), floats(32, 32) * 0.2, floats(24, 32) * 0.2)


STATES = {
    "given": lambda c, x, i: scan(scattering, [c], [x, i]),
    "made": lambda c, x, i: scan(scattering, [build.full((7, 5), 0.0, dtypes.float32)], [x, i]),
    "then scaled": lambda c, x, i: scan(
        lambda c, s: ([build.multiply(scattering(c, s)[0][0], 0.5)], []), [c], [x, i]
    ),
    "crossed": lambda c, x, i: scan(
        lambda c, s: ([scattering([c[1]], s)[0][0], scattering([c[0]], s)[0][0]], []),
        [c, build.negative(c)],
        [x, i],
    ),
    "old one kept": lambda c, x, i: scan(
        lambda c, s: ([scattering(c, s)[0][0], c[0]], []), [c, build.negative(c)], [x, i]
    ),
    "updated after": lambda c, x, i: build.update(
        scan(adding, [c], [build.expand(build.unsqueeze(x, 1), (LENGTH, 7, 5))])[0],
        build.slice_axis(x, 0, 0, 3),
        [build.slice_axis(i, 0, 0, 3)],
        [0],
    ),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("donate", [(), (0,)])
def test_scan_of_states(name: str, donate: tuple[int, ...]) -> None:
    if name == "old one kept" and donate:
        with pytest.raises(StateError, match="it would be copied"):
            check(STATES[name], floats(7, 5), floats(LENGTH, 5), places(LENGTH), donate=donate)
        return
    check(STATES[name], floats(7, 5), floats(LENGTH, 5), places(LENGTH), donate=donate)


def test_state_of_a_scan_is_never_copied() -> None:
    """A donated carry that the body updates is one Buffer throughout."""
    made = kernels(
        lambda c, x, i: build.scan(lambda c, s: (scattering(c, s)[0], []), [c], [x, i], LENGTH)[0],
        floats(7, 5),
        floats(LENGTH, 5),
        places(LENGTH),
        donate=(0,),
    )
    steps = [s for k in made.kernels for s in k.steps]
    assert not any(isinstance(s, Copy) for s in steps)
    assert not any(isinstance(s, Control) and s.kind == "swap_slots" for s in steps)
    assert made.storage(made.outputs[0]) == made.inputs[0]


def test_slices_and_outputs_are_not_copied() -> None:
    made = kernels(
        lambda c, x: build.scan(
            lambda c, s: ([build.add(c[0], s[0])], [build.multiply(c[0], s[0])]), [c], [x], LENGTH
        )[1],
        floats(4096),
        floats(LENGTH, 4096),
    )
    inside = [k for k in made.kernels if k.depth]
    assert not any(isinstance(s, Copy) for k in inside for s in k.steps)
    assert sum(isinstance(s, Launch) for k in inside for s in k.steps) == 1


def test_short_scans_are_unrolled() -> None:
    def run_length(length: int):
        return kernels(
            lambda c, x: build.scan(halving, [c], [x], length)[0], floats(7), floats(length, 7)
        )

    assert len(run_length(8).kernels) == 1
    assert any(k.kind == "control" for k in run_length(9).kernels)


# ---- while_loop and cond --------------------------------------------------------------------


def counted(n, x):
    return build.while_loop(
        lambda c: build.less(c[0], 10),
        lambda c: [build.add(c[0], 1), build.multiply(c[1], 1.5)],
        [n, x],
    )


LOOPS = {
    "counted": (counted, np.int64(0), floats(5)),
    "never": (counted, np.int64(50), floats(5)),
    "by value": (
        lambda x: build.while_loop(
            lambda c: build.less(build.sum_(c[0]), 100.0),
            lambda c: [build.multiply(c[0], 1.5)],
            [x],
        ),
        np.abs(floats(5)),
    ),
    "by a carry": (
        lambda go, n: build.while_loop(
            lambda c: c[0], lambda c: [build.less(c[1], 7), build.add(c[1], 1)], [go, n]
        ),
        np.array(True),
        np.int64(0),
    ),
    "only exchanges": (
        lambda x, y: build.while_loop(
            lambda c: build.less(0.0, c[0]), lambda c: [c[1], c[0]], [x, y]
        ),
        np.float32(1),
        np.float32(-1),
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_while_loop(name: str) -> None:
    function, *values = LOOPS[name]
    check(function, *values)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_cond(first: bool, second: bool) -> None:
    def several(p, q, x):
        plain = build.cond(
            p, lambda: [build.add(x, 1.0), x], lambda: [build.multiply(x, 3.0), build.negative(x)]
        )
        yes = lambda: build.cond(q, lambda: [build.add(x, 1.0)], lambda: [x])  # noqa: E731
        no = lambda: build.cond(q, lambda: [x], lambda: [build.add(x, 4.0)])  # noqa: E731
        nested = build.cond(p, yes, no)
        return [*plain, build.sum_(build.multiply(nested[0], x))]

    check(several, np.array(first), np.array(second), floats(5))


def test_only_the_chosen_branch_runs() -> None:
    """The other branch would never end."""

    def forever():
        return build.while_loop(
            lambda c: build.less_equal(0, c[0]),
            lambda c: [build.constant(0, dtypes.int64)],
            [build.constant(0, dtypes.int64)],
        )

    inputs = [build.input_((), dtypes.bool_), build.input_((), dtypes.int64)]
    outputs = build.cond(inputs[0], forever, lambda: [build.add(inputs[1], 1)])
    (got,) = run(inputs, outputs, [np.array(False), np.int64(41)])
    assert got == 42


# ---- nested ---------------------------------------------------------------------------------

NESTED = {
    "scan in scan": (
        lambda c, x: scan(lambda c, s: (scan(halving, [c[0]], [s[0]], 9), [c[0]]), [c], [x]),
        (7,),
        (LENGTH, 9, 7),
    ),
    "with outputs": (
        lambda c, x: scan(
            lambda c, s: (lambda r: ([r[0]], [r[1], c[0]]))(scan(adding, [c[0]], [s[0]], 9, True)),
            [c],
            [x],
            9,
            True,
        ),
        (7,),
        (9, 9, 7),
    ),
    "three deep": (
        lambda c, x: scan(
            lambda c, s: (
                scan(
                    lambda d, t: (
                        scan(
                            lambda e, u: ([build.add(e[0], build.multiply(t[0], u[0]))], []),
                            [d[0]],
                            [x],
                            9,
                        ),
                        [],
                    ),
                    [c[0]],
                    [x],
                    9,
                ),
                [],
            ),
            [c],
            [x],
            9,
        ),
        (),
        (9,),
    ),
    "while in scan": (
        lambda c, x: scan(
            lambda c, s: (
                build.while_loop(
                    lambda q: build.less(build.sum_(q[0]), build.multiply(s[0], 9.0)),
                    lambda q: [build.add(q[0], 1.0)],
                    [c[0]],
                ),
                [c[0]],
            ),
            [c],
            [x],
        ),
        (7,),
        (LENGTH,),
    ),
    "cond in while": (
        lambda c, x: build.while_loop(
            lambda w: build.less(w[0], 10),
            lambda w: [
                build.add(w[0], 1),
                build.cond(
                    build.less(w[0], 5),
                    lambda: [build.add(w[1], 1.0)],
                    lambda: [build.multiply(w[1], 0.5)],
                )[0],
            ],
            [build.constant(0, dtypes.int64), build.add(c, x)],
        ),
        (5,),
        (5,),
    ),
    "scan in cond": (
        lambda c, x: build.cond(
            build.less(build.sum_(c), 99.0), lambda: scan(adding, [c], [x]), lambda: [c, x]
        ),
        (7,),
        (LENGTH, 7),
    ),
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_nested_control(name: str, threads: int) -> None:
    function, *shapes = NESTED[name]
    with override(threads=threads):
        check(function, *(floats(*s, seed=i) for i, s in enumerate(shapes)))


# ---- symbolic lengths -----------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_symbolic_scan(reverse: bool) -> None:
    n, m = symbol("N", 0, 40), symbol("M", 1, 9)
    nodes = [build.input_((m,), dtypes.float32), build.input_((n, m, m), dtypes.float32)]
    outputs = scan(
        lambda c, s: (scan(halving, [c[0]], [s[0]], m, reverse), [c[0]]),
        [nodes[0]],
        [nodes[1]],
        n,
        reverse,
    )
    for sizes in ((0, 1), (1, 3), (12, 9), (40, 2)):
        symbols = dict(zip(("N", "M"), sizes))
        values = [floats(*(evaluate(s, symbols) for s in x.shape)) for x in nodes]
        expected = interpret(outputs, dict(zip(nodes, values)), symbols)
        for node, got, want in zip(outputs, run(nodes, outputs, values, symbols), expected):
            compare(node, got, want)
