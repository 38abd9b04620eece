"""Smoke test of the CUDA path on a machine with a GPU: run by hand, not collected by pytest.

    PYTHONPATH=src python tests/gpu/smoke.py [--trials] [--only name]

Prints one row per check and ends with a status other than 0 if any failed. `--trials` also
hangs and faults a kernel in child processes, to see them killed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

HEAD = ".version 8.5\n.target sm_90a\n.address_size 64\n"
PLAIN_HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"

VECTOR_ADD = (
    PLAIN_HEAD
    + """
.visible .entry vector_add(.param .u64 a, .param .u64 b, .param .u64 c, .param .s64 count)
{
    .reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %d<12>;
    mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x;
    mad.lo.u32 %r3, %r0, %r1, %r2;
    cvt.u64.u32 %d0, %r3;
    ld.param.u64 %d1, [count];
    setp.ge.s64 %p0, %d0, %d1;
    @%p0 bra $end;
    ld.param.u64 %d2, [a]; ld.param.u64 %d3, [b]; ld.param.u64 %d4, [c];
    cvta.to.global.u64 %d2, %d2; cvta.to.global.u64 %d3, %d3; cvta.to.global.u64 %d4, %d4;
    shl.b64 %d5, %d0, 2;
    add.s64 %d6, %d2, %d5; add.s64 %d7, %d3, %d5; add.s64 %d8, %d4, %d5;
    ld.global.b32 %r4, [%d6]; ld.global.b32 %r5, [%d7];
    add.rn.f32 %r6, %r4, %r5;
    st.global.b32 [%d8], %r6;
$end:
    ret;
}
"""
)

CHAIN = (
    HEAD
    + """
.visible .entry chain(.param .u64 x, .param .u64 y)
.maxntid 128, 1, 1
{
    .reg .b32 %r<6>; .reg .b64 %d<6>;
    griddepcontrol.launch_dependents;
    mov.u32 %r0, %ctaid.x; mov.u32 %r2, %tid.x;
    mad.lo.u32 %r3, %r0, 128, %r2;
    mul.wide.u32 %d0, %r3, 4;
    ld.param.u64 %d1, [x]; ld.param.u64 %d2, [y];
    cvta.to.global.u64 %d1, %d1; cvta.to.global.u64 %d2, %d2;
    add.s64 %d3, %d1, %d0; add.s64 %d4, %d2, %d0;
    griddepcontrol.wait;
    ld.global.b32 %r4, [%d3];
    add.s32 %r4, %r4, 1;
    st.global.b32 [%d4], %r4;
    ret;
}
"""
)

TILE_LOAD = (
    HEAD
    + """
.visible .entry tile_load(.param .align 64 .b8 map[128], .param .u64 out, .param .s64 row,
                          .param .s64 column)
.maxntid 128, 1, 1
{
    .reg .pred %p<4>; .reg .b32 %r<12>; .reg .b64 %d<8>;
    .shared .align 1024 .b8 tile[4096];
    .shared .align 8 .b64 full;
    mov.u32 %r0, %tid.x; mov.u32 %r1, tile; mov.u32 %r2, full;
    setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
    @%p0 fence.mbarrier_init.release.cluster;
    bar.sync 0;
    @!%p0 bra $wait;
    mov.b64 %d0, map; cvta.param.u64 %d0, %d0;
    ld.param.u64 %d1, [row]; ld.param.u64 %d2, [column];
    cvt.u32.u64 %r3, %d1; cvt.u32.u64 %r4, %d2;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 4096;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%d0, {%r4, %r3}], [%r2];
$wait:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0;
    @!%p1 bra $wait;
    ld.param.u64 %d3, [out]; cvta.to.global.u64 %d3, %d3;
    mov.u32 %r5, %r0;
$copy:
    shl.b32 %r6, %r5, 2; add.u32 %r7, %r1, %r6;
    ld.shared.b32 %r8, [%r7];
    mul.wide.u32 %d4, %r5, 4; add.s64 %d5, %d3, %d4;
    st.global.b32 [%d5], %r8;
    add.u32 %r5, %r5, 128;
    setp.lt.u32 %p2, %r5, 1024;
    @%p2 bra $copy;
    ret;
}
"""
)

CLUSTER = (
    HEAD
    + """
.visible .entry cluster_rank(.param .u64 out)
.explicitcluster
{
    .reg .b32 %r<4>; .reg .b64 %d<4>;
    mov.u32 %r0, %ctaid.x; mov.u32 %r1, %cluster_ctarank;
    ld.param.u64 %d0, [out]; cvta.to.global.u64 %d0, %d0;
    mul.wide.u32 %d1, %r0, 4; add.s64 %d2, %d0, %d1;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    st.global.b32 [%d2], %r1;
    ret;
}
"""
)

SHARED = (
    HEAD
    + """
.extern .shared .align 128 .b8 place[];
.visible .entry shared_use(.param .u64 out, .param .s64 bytes)
{
    .reg .b32 %r<6>; .reg .b64 %d<4>;
    ld.param.u64 %d0, [bytes]; cvt.u32.u64 %r0, %d0;
    mov.u32 %r1, place; add.u32 %r2, %r1, %r0;
    mov.u32 %r3, 7; st.shared.b32 [%r2+-4], %r3; ld.shared.b32 %r4, [%r2+-4];
    ld.param.u64 %d1, [out]; cvta.to.global.u64 %d1, %d1; st.global.b32 [%d1], %r4;
    ret;
}
"""
)

FAULT = (
    PLAIN_HEAD
    + """
.visible .entry wild_store()
{
    .reg .b32 %r<2>; .reg .b64 %d<2>;
    mov.u64 %d0, 16; mov.u32 %r0, 1; st.global.b32 [%d0], %r0;
    ret;
}
"""
)

HANG = (
    PLAIN_HEAD
    + """
.visible .entry endless(.param .u64 flag)
{
    .reg .pred %p<2>; .reg .b32 %r<2>; .reg .b64 %d<2>;
    ld.param.u64 %d0, [flag]; cvta.to.global.u64 %d0, %d0;
$again:
    ld.volatile.global.b32 %r0, [%d0]; setp.eq.s32 %p0, %r0, 0; @%p0 bra $again;
    ret;
}
"""
)
TEXTS = {
    "vector_add": VECTOR_ADD,
    "chain": CHAIN,
    "tile_load": TILE_LOAD,
    "cluster_rank": CLUSTER,
    "shared_use": SHARED,
    "wild_store": FAULT,
    "endless": HANG,
}

Check = Callable[[Any], str]
CHECKS: dict[str, Check] = {}


class Skipped(Exception):
    """A check that cannot be made here."""


def check(function: Check) -> Check:
    """Register a check."""
    CHECKS[function.__name__] = function
    return function


def same(found: Any, wanted: Any, **tolerance: float) -> None:
    np.testing.assert_allclose(
        np.asarray(found, np.float64),
        np.asarray(wanted, np.float64),
        **(tolerance or {"rtol": 0, "atol": 0}),
    )


def function_of(device: Any, name: str) -> Any:
    """The function, assembled by ptxas where it is here."""
    from tilegrad.targets.ptx.assemble import assemble, find_ptxas

    text = TEXTS[name]
    arch = "sm_90a" if "sm_90a" in text else "sm_80"
    code = assemble(text, arch).cubin if find_ptxas() and arch == device.arch else text
    return device.load(code).function(name)


# ---- the driver ------------------------------------------------------------------------------


@check
def facts(device: Any) -> str:
    a = device.attributes
    assert device.target.cores == a["multiprocessor_count"]
    from tilegrad.targets.ptx.assemble import find_ptxas

    return (
        f"{a['name']}, {device.arch}, driver {a['driver_version']}, target {device.target.name}"
        f", ptxas {'here' if find_ptxas() else 'absent'}"
    )


@check
def copies(device: Any) -> str:
    data = np.random.default_rng(0).integers(0, 255, (40 << 20) + 13).astype(np.uint8)
    start = time.perf_counter()
    buffer = device.upload(data)
    device.synchronize()
    up = time.perf_counter() - start
    start = time.perf_counter()
    back = device.download(buffer)
    down = time.perf_counter() - start
    assert np.array_equal(back, data)
    return f"up {data.nbytes / up / 1e9:.1f} GB/s, down {data.nbytes / down / 1e9:.1f} GB/s"


@check
def vector_add(device: Any) -> str:
    from direct import launch, timed

    count = 1 << 22
    a, b = (np.random.default_rng(i).standard_normal(count, np.float32) for i in range(2))
    x, y, z = device.upload(a), device.upload(b), device.allocate(a.nbytes)
    results = []
    for code in ("jit", "ptxas"):
        if code == "jit":
            function = device.load(VECTOR_ADD).function("vector_add")
        else:
            function = function_of(device, "vector_add")
        device.fill(z)
        launch(function, (count // 256,), 256, [x, y, z, count])
        same(device.download(z, (count,), np.float32), a + b)
        results.append(
            min(
                timed(
                    device, lambda f=function: launch(f, (count // 256,), 256, [x, y, z, count]), 20
                )
            )
        )
    return f"{3 * a.nbytes / min(results) / 1e12:.2f} TB/s"


@check
def device_copy(device: Any) -> str:
    from direct import timed

    size = 1 << 30
    a, b = device.allocate(size), device.allocate(size)
    device.fill(a, 3)
    seconds = min(timed(device, lambda: device.copy_bytes(b.pointer, a.pointer, size), 10))
    return f"{2 * size / seconds / 1e12:.2f} TB/s"


@check
def allocator(device: Any) -> str:
    first = device.allocate(1 << 20)
    at = first.pointer
    del first
    second = device.allocate(1 << 20)
    assert second.pointer == at
    start = time.perf_counter()
    for _ in range(1000):
        held = device.allocate(4096)
        del held
    cost = (time.perf_counter() - start) / 1000
    from tilegrad.core.errors import MemoryLimitError

    try:
        device.allocate(1 << 45)
    except MemoryLimitError as error:
        assert "MiB on cuda:0" in str(error)
    else:
        raise AssertionError("32 TiB were allocated")
    return f"{cost * 1e6:.2f} us an allocation, reserved {device.pool.reserved >> 20} MiB"


@check
def shared_memory(device: Any) -> str:
    from direct import launch

    most = device.attributes["max_shared_memory_per_block_optin"]
    function = function_of(device, "shared_use")
    out = device.allocate(4)
    for size in (1024, 64 << 10, most):
        device.fill(out)
        launch(function, (1,), 32, [out, size], shared=size)
        same(device.download(out, (1,), np.int32), [7])
    return f"{most} bytes"


@check
def clusters(device: Any) -> str:
    from direct import launch

    function, out = function_of(device, "cluster_rank"), device.allocate(4 * 64)
    for size in (2, 4, 8, 16):
        launch(function, (64,), 32, [out], cluster=(size,))
        same(device.download(out, (64,), np.int32), np.arange(64) % size)
    return "2, 4, 8, 16"


@check
def tensor_map(device: Any) -> str:
    from direct import launch

    from tilegrad.core.dtype import float32
    from tilegrad.targets.ptx.launch import Prepared
    from tilegrad.targets.ptx.maps import encoded, shape_of
    from tilegrad.targets.ptx.program import Entry, TensorMap

    data = np.random.default_rng(1).standard_normal((100, 96)).astype(np.float32)
    x, out = device.upload(data), device.allocate(4096)
    function = function_of(device, "tile_load")
    for swizzle in (0, 128):
        map_ = TensorMap(0, float32, (100, 96), (96, 1), (32, 32), swizzle)
        for row, column in ((0, 0), (16, 64), (80, 80)):  # the last hangs over both edges
            launch(function, (1,), 128, [encoded(shape_of(map_), x.pointer), out, row, column])
            found = device.download(out, (32, 32), np.float32)
            wanted = np.zeros((32, 32), np.float32)
            part = data[row : row + 32, column : column + 32]
            wanted[: part.shape[0], : part.shape[1]] = part
            same(found, swizzled(wanted) if swizzle else wanted)
    arguments = (("map", map_), ("pointer", 1), ("symbol", "row"), ("symbol", "column"))
    prepared = Prepared(
        function, Entry("tile_load", arguments, (1,), 128), {"row": 0, "column": 32}
    )
    prepared.launch((x.pointer, out.pointer))
    same(device.download(out, (32, 32), np.float32), swizzled(data[:32, 32:64]))
    return "plain and 128-byte swizzle, over the edges, from an Entry"


def swizzled(tile: np.ndarray) -> np.ndarray:
    """What a tile of 128-byte rows looks like in shared memory with the 128-byte swizzle."""
    chunks = tile.reshape(32, 8, 4)  # 16 bytes each
    return np.stack([chunks[r][np.arange(8) ^ (r % 8)] for r in range(32)]).reshape(32, 32)


def chain_operations(device: Any, buffers: list[Any], count: int, dependent: bool) -> list[Any]:
    from tilegrad.targets.ptx.launch import Prepared
    from tilegrad.targets.ptx.launcher import Operation
    from tilegrad.targets.ptx.program import Entry

    entry = Entry("chain", (("pointer", 0), ("pointer", 1)), (132,), 128, dependent=dependent)
    prepared = Prepared(function_of(device, "chain"), entry)
    places = [buffers[i % 2].pointer for i in range(count + 1)]
    return [Operation(prepared, (places[i], places[i + 1])) for i in range(count)]


@check
def graphs(device: Any) -> str:
    from direct import timed

    from tilegrad.targets.ptx.launcher import LaunchGraph

    size, count, said = 132 * 128 * 4, 200, []
    for dependent in (False, True):
        buffers = [device.allocate(size) for _ in range(2)]
        device.fill(buffers[0])
        replay = LaunchGraph(device, chain_operations(device, buffers, count, dependent))
        replay.launch()
        same(device.download(buffers[0], (132 * 128,), np.int32), np.full(132 * 128, count))
        seconds = sorted(timed(device, replay.launch, 30, 5))[15]
        others = [device.allocate(size) for _ in range(2)]
        device.fill(others[0])
        operations = chain_operations(device, others, count, dependent)
        pairs = zip(operations, replay.operations)
        assert replay.patch([type(o)(a.prepared, o.pointers) for o, a in pairs])
        replay.launch()
        same(device.download(others[0], (132 * 128,), np.int32), np.full(132 * 128, count))
        word = "dependent" if dependent else "plain"
        said.append(f"{word} {seconds / count * 1e6:.2f} us a kernel")
    return ", ".join(said) + f"; edges {edges(replay)}"


def edges(replay: Any) -> str:
    """How many edges of a graph are programmatic."""
    from tilegrad.targets.ptx.cuda_api import api

    found = api().cuGraphGetEdges(replay.graph)
    if found[0]:
        return str(found[0])
    numbers = int(found[-1])
    status, _, _, data, _ = api().cuGraphGetEdges(replay.graph, numbers)
    if status:
        return str(status)
    return f"{sum(int(d.type) == 1 for d in data)} of {numbers} programmatic"


@check
def host_cost(device: Any) -> str:
    from tilegrad.targets.ptx.launch import Prepared
    from tilegrad.targets.ptx.launcher import LaunchGraph
    from tilegrad.targets.ptx.program import Entry

    buffers = [device.allocate(132 * 128 * 4) for _ in range(3)]
    entry = Entry("chain", (("pointer", 0), ("pointer", 1)), (132,), 128)
    prepared = Prepared(function_of(device, "chain"), entry)
    places = [b.pointer for b in buffers]
    repeats, said = 300, []
    for label, work in (
        ("same pointers", lambda i: prepared.launch((places[0], places[1]))),
        ("other pointers", lambda i: prepared.launch((places[i % 2], places[2]))),
    ):
        said.append(f"{label} {per_call(device, work, repeats) * 1e6:.1f} us")
    replay = LaunchGraph(device, chain_operations(device, buffers, 20, True))
    said.append(f"graph of 20 {per_call(device, lambda i: replay.launch(), 100) * 1e6:.1f} us")
    return ", ".join(said)


def per_call(device: Any, work: Callable[[int], Any], repeats: int) -> float:
    """Host seconds of one call, the stream never full."""
    best = float("inf")
    for _ in range(5):
        device.synchronize()
        start = time.perf_counter()
        for i in range(repeats):
            work(i)
        best = min(best, (time.perf_counter() - start) / repeats)
    device.synchronize()
    return best


# ---- Tensors ---------------------------------------------------------------------------------


@check
def tensor_round_trip(device: Any) -> str:
    import tilegrad as tg

    data = np.random.default_rng(2).standard_normal((33, 65)).astype(np.float32)
    x = tg.tensor(data).to("cuda")
    assert x.device == "cuda:0"
    same(x.numpy(), data)
    same(x.cpu().numpy(), data)
    half = tg.tensor(data).bfloat16()
    same(half.cuda().cpu().float().numpy(), half.float().numpy())
    return "float32, bfloat16"


def need_emitter() -> None:
    try:
        import tilegrad.targets.ptx.emit
        import tilegrad.targets.ptx.target  # noqa: F401
    except ImportError as error:
        raise Skipped(f"NOT CHECKED, no emitter: {error}") from None


@check
def tensor_ops(device: Any) -> str:
    need_emitter()
    import tilegrad as tg

    a, b = (
        np.random.default_rng(i).standard_normal((257, 130)).astype(np.float32) for i in range(2)
    )
    x, y = tg.tensor(a, device="cuda"), tg.tensor(b, device="cuda")
    bad = []
    cases: dict[str, tuple[Callable[..., Any], Any]] = {
        "add": (lambda x, y: x + y, a + b),
        "sum": (lambda x, y: (x + y).sum(), (a + b).astype(np.float64).sum()),
        "rows": (lambda x, y: (x * y).sum(1), (a * b).sum(1)),
        "columns": (
            lambda x, y: x.max(0).values if hasattr(x.max(0), "values") else x.max(0),
            a.max(0),
        ),
        "softmax": (lambda x, y: x.softmax(1), np.exp(a) / np.exp(a).sum(1, keepdims=True)),
        "transpose": (lambda x, y: x.T + y.T, (a + b).T),
        "matmul": (lambda x, y: x @ y.T, a @ b.T),
        "gather": (lambda x, y: x[[3, 1, 200]], a[[3, 1, 200]]),
    }
    for name, (function, wanted) in cases.items():
        for kind, run in (("eager", function), ("jit", tg.jit(function))):
            try:
                same(run(x, y).numpy(), wanted, rtol=2e-4, atol=2e-3)
            except Exception as error:
                bad.append(f"{name} ({kind}): {str(error).strip().splitlines()[0]}")
    assert not bad, "; ".join(bad)
    return ", ".join(cases)


@check
def tensor_control(device: Any) -> str:
    need_emitter()
    import tilegrad as tg

    loop = tg.jit(lambda x: tg.while_loop(lambda v: v < 100.0, lambda v: v * 2, x))
    assert float(loop(tg.tensor(1.0, device="cuda").to("cuda"))) == 128.0
    rows = np.random.default_rng(3).standard_normal((12, 40)).astype(np.float32)
    scan = tg.jit(lambda r: tg.scan(lambda c, v: (c + v, c * 1.0), r[0] * 0, r)[0])
    same(scan(tg.tensor(rows, device="cuda")).numpy(), rows.sum(0), rtol=1e-4, atol=1e-4)
    tg.manual_seed(5)
    here = tg.rand(1000).numpy()
    tg.manual_seed(5)
    same(tg.rand(1000, device="cuda").numpy(), here)
    return "while_loop on the host, scan as a graph, random numbers as on the CPU"


@check
def jit_host_cost(device: Any) -> str:
    """In processes of its own: one and the same call takes 10 us in some and 15 in others."""
    need_emitter()
    from tilegrad.tune.worker import Worker

    ours, theirs = [], []
    for _ in range(4):
        with Worker() as worker:
            outcome = worker.run(jit_costs, seconds=60)
        assert outcome.good, outcome
        ours.append(outcome.value[0])
        theirs.append(outcome.value[1])
    bar = min(theirs) if all(theirs) else 15e-6  # on a slow host both are slow
    said = f"{1e6 * min(ours):.1f} us of {', '.join(f'{1e6 * x:.1f}' for x in ours)}"
    said += f", torch eager {1e6 * bar:.1f} us for its two kernels" if all(theirs) else " (bar 15)"
    assert min(ours) < bar, said
    return said


def jit_costs() -> tuple[float, float | None]:
    """Host seconds of a jitted call, and of torch's two kernels where torch is."""
    import tilegrad as tg
    from tilegrad.targets.ptx.driver import open_device

    device, f = open_device(0), tg.jit(lambda a, b: a * 2 + b)
    x, y = (tg.rand(64, 64, device="cuda").realize() for _ in range(2))
    f(x, y)
    seconds = per_call(device, lambda i: f(x, y), 300)
    try:
        import torch
    except ImportError:
        return seconds, None
    p, q = (torch.rand(64, 64, device="cuda") for _ in range(2))
    return seconds, per_call(device, lambda i: p * 2 + q, 300)


@check
def torch_exchange(device: Any) -> str:
    try:
        import torch
    except ImportError:
        raise Skipped("no torch") from None
    import tilegrad as tg

    source = torch.randn(17, 9, device="cuda", dtype=torch.bfloat16)
    x = tg.from_torch(source)
    assert x.device == "cuda:0" and x.buffer().pointer == source.data_ptr()
    same(x.cpu().float().numpy(), source.float().cpu().numpy())
    back = x.torch()
    assert back.data_ptr() == source.data_ptr() and torch.equal(back, source)
    ours = tg.tensor(np.arange(12, dtype=np.float32).reshape(3, 4), device="cuda")
    theirs = torch.from_dlpack(ours)
    assert theirs.data_ptr() == ours.buffer().pointer
    same((theirs * 2).cpu().numpy(), ours.numpy() * 2)
    del ours
    same(theirs.cpu().numpy().sum(), 66)
    return "bfloat16 and float32, no copies"


# ---- trials ----------------------------------------------------------------------------------


def run_kernel(name: str) -> float:
    """What a trial does: launch a kernel and wait."""
    from direct import launch

    from tilegrad.targets.ptx.driver import open_device

    device = open_device(0)
    flag = device.allocate(4)
    device.fill(flag)
    start = time.perf_counter()
    launch(function_of(device, name), (1,), 32, [flag] if name == "endless" else [])
    device.synchronize()
    return time.perf_counter() - start


def trials(device: Any) -> str:
    from tilegrad.tune.worker import Worker

    said = []
    with Worker() as worker:
        outcome = worker.run(run_kernel, "wild_store", seconds=60)
        assert outcome.kind == "error" and "wild_store" in outcome.error, outcome
        said.append("a fault is named")
        start = time.perf_counter()
        outcome = worker.run(run_kernel, "endless", seconds=20)
        assert outcome.kind == "timeout", outcome
        said.append(f"a hang was killed after {time.perf_counter() - start:.1f} s")
    device.synchronize()
    return ", ".join(said)


def main() -> int:
    """Run the checks; the number that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", action="store_true")
    parser.add_argument("--only", action="append", default=[])
    options = parser.parse_args()
    from tilegrad.targets.ptx.driver import open_device

    device = open_device(0)
    chosen = {n: f for n, f in CHECKS.items() if not options.only or n in options.only}
    if options.trials:
        chosen["trials"] = trials
    failed = 0
    for name, function in chosen.items():
        start = time.perf_counter()
        try:
            state, said = "ok", function(device)
            device.synchronize()
        except Skipped as reason:
            state, said = "SKIP", str(reason)
        except BaseException as error:
            failed += 1
            state, said = "FAIL", f"{type(error).__name__}: {error}"
            if len(chosen) == 1:
                traceback.print_exc()
        seconds = time.perf_counter() - start
        print(f"{state:4s} {name:18s} {seconds:6.2f} s  {said}", flush=True)
    print(f"{len(chosen)} checks, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main()))
