"""Graphs over several Devices: random ones against the interpreter, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from toy_device import install

import tilegrad as tg
from tilegrad.compiler.compile import executable_for, schedule_for
from tilegrad.core.config import override
from tilegrad.core.dtype import float32
from tilegrad.core.errors import UserError
from tilegrad.core.target import AVX512
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.runtime.buffer import Buffer
from tilegrad.runtime.device import device
from tilegrad.schedule.schedule import Transfer
from tilegrad.tensor.placement import on_host

DEVICES = ("cpu", "toy:0", "toy:1")
SHAPE = (3, 5)


@pytest.fixture(autouse=True)
def toys():
    kinds, languages = install()
    with kinds, languages, override(cache_folder="", verify=True):
        yield


def random_graph(seed: int):
    """Arguments with their Devices, and results: values wander between three machines."""
    random = np.random.default_rng(seed)
    homes = ["cpu", *map(str, random.choice(DEVICES, 2))]
    arguments = [build.input_(SHAPE, float32) for _ in homes]
    scalar = build.input_((), float32)
    values = dict(zip(arguments, homes))
    for _ in range(random.integers(6, 16)):
        nodes = list(values)
        x = nodes[random.integers(len(nodes))]
        where = values[x]
        beside = [n for n in nodes if values[n] == where]
        y = beside[random.integers(len(beside))]
        kind = random.integers(7)
        if kind < 3:
            there = str(random.choice([d for d in DEVICES if d != where]))
            values[build.transfer(x, where, there)] = there
        elif kind == 3:
            values[build.multiply(x, build.broadcast_to(scalar, SHAPE))] = where
        elif kind == 4:
            made = build.broadcast_to(build.add(scalar, 0.5), SHAPE)  # of no Device
            if where != "cpu":
                made = build.transfer(made, "cpu", where)
            values[build.add(x, made)] = where
        elif kind == 5:
            total = build.broadcast_to(build.sum_(x, (0,), keep=True), SHAPE)
            values[build.subtract(total, y)] = where
        else:
            values[build.maximum(build.multiply(x, y), build.negative(y))] = where
    made = [n for n in values if n.op is not ops.input_]
    results = [made[-1], *(made[i] for i in random.choice(len(made), 2))]
    return [*arguments, scalar], [*homes, "cpu"], list(dict.fromkeys(results)), values


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs(seed: int) -> None:
    arguments, homes, results, where = random_graph(seed)
    random = np.random.default_rng(seed)
    arrays = [random.standard_normal(a.shape).astype(np.float32) for a in arguments]
    wanted = interpret(results, dict(zip(arguments, arrays)))
    made = executable_for(tuple(arguments), tuple(results), (), "cpu", (), tuple(homes))
    given = [
        Buffer.wrap(x) if home == "cpu" else device(home).upload(x)
        for x, home in zip(arrays, homes)
    ]
    for _ in range(2):
        for node, buffer, expected in zip(results, made.run(given), wanted):
            assert buffer.device == where[node]
            found = on_host(buffer, SHAPE, np.float32)
            assert np.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_kernels_name_their_device_and_memory_is_apart() -> None:
    x = build.input_((64, 64), float32)
    there = build.transfer(ops.exp(x), "cpu", "toy:0")
    back = build.transfer(build.sum_(build.multiply(there, there), (1,)), "toy:0", "cpu")
    schedule = schedule_for([x], [build.add(back, build.sum_(x, (0,)))], AVX512, (), (), "cpu")
    by_kernel = [(k.kind == "transfer", k.device) for k in schedule.kernels]
    assert (True, "toy:0") in by_kernel and (True, "") in by_kernel
    assert (False, "toy:0") in by_kernel and (False, "") in by_kernel
    for kernel in schedule.kernels:
        for step in kernel.steps:
            if isinstance(step, Transfer):
                source, target = (schedule.slots[slot].device for slot in step.slots)
                assert source != target
    assert schedule.arenas["toy:0"] >= 64 * 64 * 4 and schedule.arena_bytes >= 64 * 64 * 4


def test_a_graph_of_one_device_has_no_parts() -> None:
    x = build.input_((8,), float32)
    schedule = schedule_for([x], [ops.exp(x)], AVX512)
    assert all(k.device == "" for k in schedule.kernels) and not schedule.arenas


def test_short_loops_and_functions_may_move_values() -> None:
    @tg.checkpoint
    def away(x):
        return (x * 2).to("toy").to("cpu")

    x = tg.tensor(np.ones((3, 4), np.float32))
    found = tg.jit(lambda x: tg.scan(lambda c, row: (away(c) + row, c), tg.zeros(4), x)[0])(x)
    assert found.tolist() == [7.0] * 4
    gradient = tg.jit(tg.grad(lambda x: (away(x) ** 2).sum()))(x)
    assert gradient.tolist() == [[8.0] * 4] * 3


def test_what_is_refused() -> None:
    x, y = build.input_((4,), float32), build.input_((4,), float32)
    with pytest.raises(UserError, match="different devices"):
        executable_for((x, y), (build.add(x, y),), (), "cpu", (), ("cpu", "toy:0"))
    long = tg.tensor(np.ones((40, 4), np.float32))
    with pytest.raises(UserError, match="inside a loop"):
        tg.jit(lambda x: tg.scan(lambda c, r: ((c + r).to("toy").to("cpu"), c), tg.zeros(4), x)[0])(
            long
        )
