"""Equal loops become one: results of one custom function, copies in derivatives, loops in loops."""

from __future__ import annotations

import numpy as np

import tilegrad as tg
from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.compiler.share import block_key, share_loops
from tilegrad.ir.node import topological
from tilegrad.ir.rewrite import Log


def loops(function, *shapes):
    """Owners of Blocks in the Graph after the pipeline."""
    lowered = tg.jit(function).lower(*[tg.zeros(*s) for s in shapes])
    results, _ = run_pipeline(lowered.inputs, lowered.outputs)
    return [n for n in topological(results) if n.blocks]


def running(x, factor=2.0):
    return tg.scan(lambda c, y: (c * factor + y, c.sin()), tg.zeros(3), x)


def test_results_of_a_custom_function_share_its_loop():
    function = tg.custom_jvp(running)
    function.defjvp(lambda primals, tangents: (function(*primals), function(*tangents)))
    assert len(loops(lambda x: function(x), (20, 3))) == 1
    assert len(loops(lambda x: (function(x), function(x)), (20, 3))) == 1


def test_a_loop_written_twice_is_one_and_another_is_not():
    assert len(loops(lambda x: running(x)[0] + running(x)[0], (20, 3))) == 1
    assert len(loops(lambda x: running(x)[0] + running(x, 3.0)[0], (20, 3))) == 2
    assert len(loops(lambda x, y: running(x)[0] + running(y)[0], (20, 3), (20, 3))) == 2


def test_a_scan_and_its_derivative_run_it_once():
    """Forward and backward: the carries that the way back reads come from the one forward scan."""

    def both(x):
        return tg.value_and_grad(lambda x: running(x)[1].sum())(x)

    assert len(loops(both, (20, 3))) == 2
    x = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    value, gradient = tg.jit(both)(tg.tensor(x / 1e6))
    c, total = np.zeros(3), 0.0
    back = np.zeros((20, 3))
    for step in range(20):
        total += np.sin(c).sum()
        back[:step] += np.cos(c) * 2.0 ** np.arange(step - 1, -1, -1)[:, None]
        c = 2 * c + x[step] / 1e6
    np.testing.assert_allclose(value.numpy(), total, rtol=1e-4)
    np.testing.assert_allclose(gradient.numpy(), back, rtol=1e-4)


def test_equal_loops_inside_of_a_loop():
    def outer(x):
        def body(c, y):
            inner = tg.stack([y] * 20)
            return c + running(inner)[0] * running(inner)[0], None

        return tg.scan(body, tg.zeros(3), x)[0]

    (one,) = loops(outer, (20, 3))
    assert len([n for n in one.blocks[0].nodes if n.blocks]) == 1


def test_a_value_and_its_gradient_are_read_together():
    """The derivative holds a rewritten copy of the loop; the arguments of both stay apart."""
    x = tg.linspace(0.0, 1.0, 60).reshape(20, 3).requires_grad_()
    last, every = tg.checkpoint(lambda x: running(x.reshape(3, 20).reshape(20, 3) * 1.0), x)
    ((last * last).sum() + every.sum()).backward()
    lone = x.grad.clone().numpy()
    tg.realize([last, every, x.grad])
    np.testing.assert_array_equal(x.grad.numpy(), lone)


def test_nothing_is_done_without_loops():
    lowered = tg.jit(lambda x: x.exp().sum()).lower(tg.zeros(3))
    log = Log()
    assert share_loops(lowered.inputs, lowered.outputs, log) == list(lowered.outputs)
    assert not log.fired


def test_keys_do_not_depend_on_names():
    lowered = [tg.jit(lambda x: running(x)).lower(tg.zeros(20, 3)) for _ in range(2)]
    first, second = (next(n for n in topological(one.outputs) if n.blocks) for one in lowered)
    assert first is not second and first.blocks[0].arguments != second.blocks[0].arguments
    assert block_key(first.blocks[0]) == block_key(second.blocks[0])
