"""The matmul by threads: the interpreter and the PTX simulator against NumPy in float64, the
checks before launch against Bodies with a mistake, and what ptxas makes of Plans of real size.
"""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from product_bodies import thread_matmul
from simulator import simulate

import tilegrad as tg
from tilegrad import kernel, tile
from tilegrad.compiler.compile import schedule_for
from tilegrad.core.dtype import bfloat16, float16, float32
from tilegrad.core.errors import InternalError
from tilegrad.core.target import A100, H200
from tilegrad.graph import build
from tilegrad.graph.interpret import interpret as interpret_graph
from tilegrad.ir.symbol import symbol
from tilegrad.kernels.matmul.shape import Operands
from tilegrad.kernels.matmul.threads_matmul import (
    ThreadPlan,
    ranked_threads,
    residents,
)
from tilegrad.schedule.schedule import Launch
from tilegrad.targets.ptx.assemble import assemble, find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile import interpret, placed
from tilegrad.tile.build import Body, fill, rebuild
from tilegrad.tile.check import verify_body
from tilegrad.tile.concurrent import RaceError
from tilegrad.tile.prove import check_body
from tilegrad.tile.text import body_text, parse_body

SMALL = ThreadPlan((64, 64, 32), (2, 2), 3, 2, (64, 64))
HELD = replace(H200, name="h200-warps", matrix=A100.matrix)  # an H200 held to a warp's units


def plain(x: Operands, plan: ThreadPlan) -> Body:
    """The Body that only rounds."""
    return fill(thread_matmul(x, plan), "epilogue", lambda b, inputs, added: inputs[0])


def operands(x: Operands, m: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """a and b as they lie, an empty result, and what it should be."""
    draw = np.random.default_rng(seed)
    lead = () if x.batch == 1 else (x.batch,)
    a = draw.standard_normal((*lead, m, x.k)).astype(x.dtype.numpy)
    b = draw.standard_normal((*lead, x.n, x.k)).astype(x.dtype.numpy)
    wanted = a.astype(np.float64) @ np.swapaxes(b.astype(np.float64), -1, -2)
    c = np.full((*lead, m, x.n), np.nan, x.result.numpy)
    a = a if x.a_along_k else np.ascontiguousarray(np.swapaxes(a, -1, -2))
    b = b if x.b_along_k else np.ascontiguousarray(np.swapaxes(b, -1, -2))
    return a, b, c, wanted


def near(c: np.ndarray, wanted: np.ndarray, dtype: object) -> None:
    """As near as float32 sums and rounding to the result's dtype allow."""
    part = {float32: 0.0, float16: 2.0**-11, bfloat16: 2.0**-8}[dtype]
    error = np.abs(c.astype(np.float64) - wanted)
    assert np.all(error <= part * np.abs(wanted) + 2e-5), error.max()


CASES = {
    "rows": (Operands(72, 88, 80, bfloat16, bfloat16), SMALL),
    "half": (Operands(64, 64, 64, float16, float16), SMALL),
    "a_turned": (Operands(72, 88, 80, bfloat16, bfloat16, a_along_k=False), SMALL),
    "b_turned": (Operands(72, 88, 80, bfloat16, float32, b_along_k=False), SMALL),
    "batch": (
        Operands(72, 88, 136, bfloat16, float32, False, False, batch=2),
        ThreadPlan((64, 128, 64), (2, 2), 3, 8, (64, 64)),
    ),
    "persistent": (Operands(200, 136, 104, bfloat16, bfloat16), replace(SMALL, programs=3)),
    "persistent_batch": (
        Operands(72, 88, 136, bfloat16, bfloat16, False, False, batch=3),
        replace(SMALL, programs=2),
    ),
    "idle_programs": (
        Operands(72, 88, 136, bfloat16, bfloat16, batch=2),
        replace(SMALL, programs=11),
    ),
    "odd_tile": (
        Operands(100, 88, 80, bfloat16, bfloat16),
        ThreadPlan((96, 64, 32), (2, 2), 3, 2, (32, 64), 2),
    ),
    "deep": (Operands(72, 88, 32, bfloat16, bfloat16), replace(SMALL, stages=5)),
    "few": (
        Operands(3, 136, 272, bfloat16, bfloat16),
        ThreadPlan((16, 64, 128), (1, 4), 4, 8, (16, 64)),
    ),
    "few_turned": (
        Operands(8, 136, 272, bfloat16, bfloat16, False, False),
        ThreadPlan((16, 64, 64), (1, 4), 4, 8, (16, 64)),
    ),
    "eight_warps": (
        Operands(128, 256, 192, bfloat16, bfloat16),
        ThreadPlan((128, 256, 64), (2, 4), 3, 8, (64, 64)),
    ),
    "eight_down": (
        Operands(256, 136, 64, bfloat16, bfloat16, b_along_k=False),
        ThreadPlan((256, 128, 32), (4, 2), 4, 8, (64, 64)),
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_against_numpy(name: str) -> None:
    x, plan = CASES[name]
    body = plain(x, plan)
    verify_body(body, "placed", A100)
    assert body_text(parse_body(body_text(body))) == body_text(body)
    assert not check_body(body, A100)
    a, b, c, wanted = operands(x, x.m)
    interpret.run(body, [a, b, c], seed=1)
    near(c, wanted, x.result)
    text, entry = emit(body, "matmul", A100)
    assert ".target sm_80" in text
    found = np.full_like(c, np.nan)
    simulate(text, entry, [a, b, found], {}, policy="random")
    near(found, wanted, x.result)


@pytest.mark.parametrize("m", [1, 64, 100])
def test_symbolic_rows(m: int) -> None:
    size = symbol("M", 1, 512)
    x = Operands(size, 88, 80, bfloat16, bfloat16)
    for plan in (SMALL, replace(SMALL, programs=2)):
        body = plain(x, plan)
        a, b, c, wanted = operands(x, m)
        interpret.run(body, [a, b, c], {"M": m})
        near(c, wanted, bfloat16)
        text, entry = emit(body, "matmul", A100)
        found = np.full_like(c, np.nan)
        simulate(text, entry, [a, b, found], {"M": m})
        near(found, wanted, bfloat16)


def test_the_ring_must_fit_the_steps_of_persistent_programs() -> None:
    with pytest.raises(InternalError, match="stages"):
        thread_matmul(Operands(64, 64, 32, bfloat16, bfloat16), replace(SMALL, programs=2))


def test_in_the_tile_language() -> None:
    @kernel
    def product(a, b):
        (m, k), n = a.shape, b.shape[0]
        i, j = tile.grid(m // 64, n // 64)
        out = tile.result((m, n), tile.f32)
        left = tile.shared((64, 64), a.dtype, layout="swizzle128")
        right = tile.shared((64, 64), b.dtype, layout="swizzle128")
        staged = tile.shared((64, 64), tile.f32, layout="swizzle128")
        with tile.role("threads", warps=4):
            total = tile.register((64, 64), tile.f32, fill=0.0)
            operands = [tile.register((64, 16), a.dtype) for _ in range(2)]
            for s in tile.range(k // 64):
                tile.named_sync(0, 128)
                tile.copy_threads(left, a[i * 64 : i * 64 + 64, s * 64 : s * 64 + 64])
                tile.copy_threads(right, b[j * 64 : j * 64 + 64, s * 64 : s * 64 + 64])
                tile.commit_threads()
                tile.wait_threads(0)
                tile.named_sync(0, 128)
                for start in range(0, 64, 16):
                    tile.load_operand(operands[0], left, start)
                    tile.load_operand(operands[1], right, start)
                    tile.matrix_sync(total, *operands, (2, 2))
            tile.write(staged, tile.read(total))
            tile.named_sync(0, 128)
            tile.store_threads(out[i * 64 : i * 64 + 64, j * 64 : j * 64 + 64], staged)

    x = Operands(64, 128, 128, bfloat16, float32)
    a, b, c, wanted = operands(x, x.m)
    (body,) = product.lower(tg.tensor(a), tg.tensor(b))
    assert not check_body(body, A100)
    interpret.run(body, [a, b, c])
    near(c, wanted, float32)
    text, entry = emit(body, "product", A100)
    found = np.full_like(c, np.nan)
    simulate(text, entry, [a, b, found], {})
    near(found, wanted, float32)


# ---- mistakes ---------------------------------------------------------------------------------


def without(name: str, number: int | None = None) -> Body:
    """The Body without an op (its occurrence of a number, or all)."""
    seen = 0

    def replaced(b, node, inputs):
        nonlocal seen
        if node.op.name != name:
            return None
        seen += 1
        return (
            node
            if number is not None and seen - 1 != number
            else b.add(placed.grid_launch_dependents())
        )

    def keep(b, node, inputs):
        found = replaced(b, node, inputs)
        return None if found is node else found

    return rebuild(plain(CASES["rows"][0], SMALL), keep)


def test_copies_that_nobody_waited_for_are_races() -> None:
    x = CASES["rows"][0]
    a, b, c, _ = operands(x, x.m)
    for body in (without("wait_threads", 0), without("named_sync", 0), without("wait_threads", 1)):
        assert any(f.rule in ("race", "phase") for f in check_body(body))
        with pytest.raises(RaceError):
            interpret.run(body, [a, b, c], seed=3)


def test_warps_that_have_not_met_are_found() -> None:
    found = check_body(without("named_sync", 1))
    assert any(f.severity == "error" and f.rule in ("warps", "race") for f in found)


def test_copies_under_way_at_the_end_are_found() -> None:
    assert any(f.rule == "unfinished" for f in check_body(without("wait_threads", 2)))


# ---- machines ---------------------------------------------------------------------------------

LARGE = (
    Operands(4096, 4096, 4096, bfloat16, bfloat16),
    Operands(4096, 4096, 4096, bfloat16, bfloat16, False, False),
    Operands(symbol("M", 1, 8192), 4096, 4096, bfloat16, bfloat16),
)


@pytest.mark.parametrize("target", [A100, HELD], ids=["sm_80", "sm_90a"])
def test_large_plans_do_not_spill(target) -> None:
    if find_ptxas() is None:
        pytest.skip("NO PTXAS HERE")
    for x in LARGE:
        text, _ = emit(plain(x, ranked_threads(x, target)[0].plan), "matmul", target)
        made = assemble(text, target.cpu)
        made.check_library("matmul")
        report = made.reports["matmul"]
        assert report.spill_stores == report.spill_loads == report.stack_bytes == 0


def test_instructions_of_a_step() -> None:
    """A step of 64 x 64 x 64 a warp: 128 products, 32 loads of operands, one barrier."""
    plan = ThreadPlan((128, 256, 64), (2, 4), 3, 8, (64, 64))
    text, _ = emit(plain(LARGE[0], plan), "matmul", A100)
    start = text.rindex("$loop_", 0, text.index("mma.sync"))
    label = text[start : text.index(":", start)]
    loop = text[start : text.index(f"bra.uni {label};", start)]
    assert loop.count("mma.sync.aligned.m16n8k16") == 128
    assert loop.count("ldmatrix.sync.aligned.m8n8.x4.shared") == 32
    assert loop.count("cp.async.cg.shared.global") == 12
    assert loop.count("bar.sync") == loop.count("cp.async.wait_group") == 1
    assert not re.search(r"wgmma|cp\.async\.bulk|setmaxnreg|mbarrier|stmatrix|griddep", text)


def test_plans_fit_their_machine() -> None:
    for target in (A100, HELD):
        for m, n, k in ((1, 4096, 4096), (64, 6144, 4096), (2048, 28672, 4096), (8192, 4096, 64)):
            x = Operands(m, n, k, bfloat16, bfloat16)
            choices = ranked_threads(x, target)
            assert choices[0].seconds <= choices[-1].seconds
            for choice in choices:
                body = plain(x, choice.plan)
                verify_body(body, "placed", target)
                assert residents(x, choice.plan, target) >= 1
    assert not ranked_threads(Operands(64, 64, 36, bfloat16, bfloat16), A100)


# ---- Graphs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [A100, HELD], ids=["a100", "held"])
def test_dots_of_a_graph_take_it(target) -> None:
    x, w = (build.input_((n, 96), bfloat16) for n in (136, 72))
    bias, skip = build.input_((72,), bfloat16), build.input_((136, 72), bfloat16)
    product = build.matmul(x, build.transpose(w))
    out = build.add(build.maximum(build.add(product, bias), 0.0), skip)
    nodes = [x, w, bias, skip]
    schedule = schedule_for(nodes, [out], target, ())
    steps = [s for kernel in schedule.kernels for s in kernel.steps if isinstance(s, Launch)]
    assert len(steps) == 1
    body = steps[0].body
    assert isinstance(body.notes["plan"], ThreadPlan)
    draw = np.random.default_rng(0)
    values = [draw.standard_normal(v.shape).astype(ml_dtypes.bfloat16) for v in nodes]
    wanted = interpret_graph([out], dict(zip(nodes, values)))[0]
    slots = {number: v.reshape(-1) for number, v in zip(schedule.inputs, values)}
    found = np.zeros(136 * 72, ml_dtypes.bfloat16)
    memories = [slots.get(number, found) for number in steps[0].slots]
    text, entry = emit(body, "entry", target)
    simulate(text, entry, memories, {})
    error = np.abs(found.astype(np.float64).reshape(136, 72) - wanted.astype(np.float64))
    assert error.max() <= 2e-2 * np.abs(wanted.astype(np.float64)).max()
