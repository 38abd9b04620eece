"""Every library kernel and a set of generated ones, once each at small sizes, on a GPU.

    PYTHONPATH=src python tests/gpu/sanitize.py [--only attention] [--without attention]
    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/gpu/sanitize.py

Results are checked against NumPy in float64 (generated kernels: against the Graph interpreter).
Memories of library kernels are allocated to the byte, so that a tool sees an access just beyond
them; those of attention are in sanitize_attention.py, matvecs and quantised products in
sanitize_quantised.py. Prints one row per kernel and ends with a status other than 0 if any failed.
Run by hand, not collected by pytest.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))

import sanitize_attention
import sanitize_quantised
from product_bodies import joint_matmul, thread_matmul, wide_matmul

import tilegrad as tg
import tilegrad.nn.functional as F
from tilegrad.core.dtype import BY_NUMPY, DType, bfloat16, float8_e4m3, float16, float32
from tilegrad.kernels.matmul.shape import Operands, WidePlan
from tilegrad.kernels.matmul.threads_matmul import ThreadPlan
from tilegrad.nn.experts import routed
from tilegrad.runtime.buffer import Buffer
from tilegrad.tensor.matmul import grouped_dot
from tilegrad.tile.build import Body, fill

ROUNDING = {float32: 1e-5, bfloat16: 2.0**-8, float16: 2.0**-10, float8_e4m3: 2.0**-4}


@dataclass
class Run:
    """A launch: the Body, its memories, and what some of them hold afterwards (by number)."""

    body: Body
    memories: list[np.ndarray[Any, Any]]
    wanted: dict[int, np.ndarray[Any, Any]]
    inner: float = 1e-5  # rounding of the sums, in parts of the largest element


# ---- library kernels ------------------------------------------------------------------------


def operands(
    m: int, n: int, k: int, dtype: DType = bfloat16, result: DType | None = None, **more: Any
) -> Operands:
    """Operands whose result has their own dtype, if not said otherwise."""
    return Operands(m, n, k, dtype, result or dtype, **more)


NN, TT, TN = (
    {"a_along_k": a, "b_along_k": b} for a, b in ((True, False), (False, True), (False, False))
)
TURNED = {"turned": True}
WIDE: dict[str, tuple[Operands, WidePlan]] = {
    "several tiles a program": (operands(264, 136, 200), WidePlan((128, 64, 64), 3, 2, 2)),
    "a (m, k) b (k, n)": (operands(136, 72, 136, **NN), WidePlan((128, 64, 64), 3, 2)),
    "a (k, m) b (n, k)": (operands(136, 72, 136, **TT), WidePlan((128, 64, 64), 3, 2)),
    "a (k, m) b (k, n)": (operands(136, 72, 136, **TN), WidePlan((128, 64, 64), 3, 2)),
    "batch": (operands(72, 72, 136, batch=3), WidePlan((128, 64, 64), 3, 4)),
    "batch, b (k, n)": (operands(72, 72, 72, batch=2, **NN), WidePlan((64, 64, 64), 2, 3)),
    "float16": (operands(72, 72, 72, float16), WidePlan((64, 64, 64), 2, 3)),
    "float16 to float32": (operands(72, 72, 72, float16, float32),
                           WidePlan((64, 64, 64), 2, 3, staged=32)),
    "bfloat16 to float32": (operands(72, 72, 72, bfloat16, float32),
                            WidePlan((128, 64, 64), 2, 1, staged=32)),
    "tf32": (operands(72, 72, 72, float32), WidePlan((64, 64, 32), 3, 3, staged=32)),
    "e4m3 to bfloat16": (operands(136, 80, 272, float8_e4m3, bfloat16),
                         WidePlan((128, 64, 128), 3, 2)),
    "e4m3 to e4m3": (operands(136, 144, 272, float8_e4m3), WidePlan((128, 128, 128), 3, 2)),
    "e4m3 to e4m3, width 112": (operands(24, 240, 272, float8_e4m3),
                                WidePlan((64, 112, 128), 3, 3, staged=112)),
    "e4m3 to e4m3, turned": (operands(208, 24, 272, float8_e4m3, **TURNED),
                             WidePlan((64, 24, 128), 3, 2, 1, 24)),
    "e4m3 to bfloat16, turned split": (operands(144, 16, 528, float8_e4m3, bfloat16, **TURNED),
                                       WidePlan((64, 16, 128), 3, 6, 1, 8, split=2)),
    "one row of everything": (operands(1, 8, 8), WidePlan((64, 64, 64), 2, 1)),
    "odd rows": (operands(77, 72, 104), WidePlan((64, 64, 64), 4, 3)),
    "more programs than tiles": (operands(64, 64, 200), WidePlan((64, 64, 64), 2, 5)),
    "width 160": (operands(72, 168, 72), WidePlan((128, 160, 64), 3, 2, staged=32)),
    "width 192": (operands(136, 200, 72), WidePlan((128, 192, 64), 2, 1, 2)),
    "width 256": (operands(300, 520, 264), WidePlan((128, 256, 64), 4, 4)),
    "pieces two at a time": (operands(72, 200, 72), WidePlan((128, 192, 64), 3, 1, together=2)),
    "cluster, b (k, n) in blocks": (operands(256, 136, 136, **NN),
                                    WidePlan((128, 128, 64), 3, 2, cluster=2)),
    "cluster, a (k, m) b (k, n) batch": (operands(256, 72, 72, batch=2, **TN),
                                         WidePlan((128, 128, 64), 2, 4, cluster=2)),
    "late": (operands(136, 72, 200), WidePlan((128, 64, 64), 3, 2, early=False)),
    "early": (operands(136, 72, 200), WidePlan((128, 64, 64), 3, 2)),
    "turned": (operands(200, 24, 136, **TURNED), WidePlan((64, 24, 64), 3, 2, 1, 24)),
    "turned, one token": (operands(136, 1, 136, **TURNED),
                          WidePlan((64, 8, 128), 3, 2, 1, 8)),
    "turned, 256 rows": (operands(264, 8, 136, **TURNED), WidePlan((256, 8, 64), 3, 2, 1, 8)),
    "cluster along m": (operands(300, 72, 200), WidePlan((128, 64, 64), 3, 2, cluster=2)),
    "cluster along m, dependent": (operands(300, 72, 200),
                                   WidePlan((128, 64, 64), 3, 2, cluster=2)),
    "cluster along n": (operands(136, 136, 200),
                        WidePlan((128, 64, 64), 3, 2, cluster=2, across=True)),
    "cluster of four": (operands(200, 40, 200), WidePlan((64, 64, 64), 3, 4, cluster=4)),
    "turned cluster": (operands(200, 16, 136, **TURNED),
                       WidePlan((64, 16, 64), 3, 4, 1, 16, cluster=2)),
    "rows of tokens": (operands(24, 200, 200),
                       WidePlan((64, 40, 128), 3, 5, staged=40)),
    "width 72": (operands(77, 136, 136), WidePlan((128, 72, 64), 3, 2, staged=72)),
    "split 2": (operands(72, 72, 200), WidePlan((64, 64, 64), 2, 8, staged=32, split=2)),
    "split 4": (operands(72, 64, 520), WidePlan((128, 64, 64), 2, 4, staged=16, split=4)),
    "turned split": (operands(136, 16, 400, **TURNED),
                     WidePlan((64, 16, 64), 3, 6, 1, 8, split=2)),
    "split and cluster along m": (operands(200, 64, 200),
                                  WidePlan((64, 64, 64), 2, 8, staged=32, split=2, cluster=2)),
    "split and cluster along n": (operands(72, 200, 200),
                                  WidePlan((128, 96, 64), 2, 8, staged=48, split=2, cluster=2,
                                           across=True)),
}  # fmt: skip
BESIDE: dict[str, tuple[Operands, WidePlan]] = {
    "added": (operands(264, 136, 200), WidePlan((128, 128, 64), 3, 2)),
    "added, width 96": (operands(72, 200, 136), WidePlan((128, 96, 64), 3, 2, staged=32)),
    "added, batch": (operands(72, 136, 136, batch=3), WidePlan((128, 128, 64), 3, 4)),
    "added, cluster along m": (
        operands(300, 136, 200),
        WidePlan((128, 128, 64), 3, 2, cluster=2),
    ),
    "added, cluster along n": (
        operands(136, 264, 200),
        WidePlan((128, 128, 64), 3, 2, cluster=2, across=True),
    ),
}
THREADS: dict[str, tuple[Operands, ThreadPlan]] = {
    "threads": (operands(136, 72, 136), ThreadPlan((64, 64, 64), (2, 2), 3, 2, (64, 64))),
    "threads, persistent": (
        operands(200, 136, 72),
        ThreadPlan((64, 64, 32), (2, 2), 3, 2, (64, 64), 3),
    ),
    "threads, b (k, n)": (
        operands(72, 72, 72, **NN),
        ThreadPlan((64, 64, 64), (2, 2), 3, 2, (64, 64)),
    ),
    "threads, float16": (
        operands(77, 72, 104, float16, float32),
        ThreadPlan((64, 64, 64), (2, 2), 3, 2, (64, 32)),
    ),
}
JOINT: dict[str, tuple[Operands, WidePlan]] = {
    "joint": (operands(136, 208, 136, weights=(72, 136)), WidePlan((128, 64, 64), 3, 2)),
    "gated": (
        operands(136, 104, 136, weights=(104, 104), gated=True),
        WidePlan((128, 128, 64), 3, 2, staged=32),
    ),
    "gated, turned": (
        operands(104, 16, 136, weights=(104, 104), gated=True, **TURNED),
        WidePlan((128, 16, 64), 3, 2, 1, 16),
    ),
    "gated, e4m3": (
        operands(24, 112, 272, float8_e4m3, bfloat16, weights=(112, 112), gated=True),
        WidePlan((64, 224, 128), 3, 1, staged=112),
    ),
}


def draw(seed: int, dtype: DType, *shape: int) -> np.ndarray[Any, Any]:
    """Random numbers that the dtype holds."""
    random = np.random.default_rng([seed, *shape])
    return random.standard_normal(shape, np.float32).astype(dtype.numpy)


def unwritten(dtype: DType, *shape: int) -> np.ndarray[Any, Any]:
    """A result that nothing has been stored to."""
    return np.full(shape, np.nan, np.float32).astype(dtype.numpy)


def turned_if(x: np.ndarray[Any, Any], turned: bool) -> np.ndarray[Any, Any]:
    """Contiguous, with its last two axes swapped if asked."""
    return np.ascontiguousarray(x.swapaxes(-1, -2) if turned else x)


def one_product(body: Body, x: Operands) -> Run:
    """Memories of a plain product."""
    lead = () if x.batch == 1 else (x.batch,)
    a, b = draw(0, x.dtype, *lead, x.m, x.k), draw(1, x.dtype, *lead, x.k, x.n)
    product = a.astype(np.float64) @ b.astype(np.float64)
    product = turned_if(product, x.turned)
    memories = [
        turned_if(a, not x.a_along_k),
        turned_if(b, x.b_along_k),
        unwritten(x.result, *product.shape),
    ]
    return Run(body, memories, {2: product}, sums_of(x))


def sums_of(x: Operands) -> float:
    """Rounding of sums: tf32 has 11 bits of an element, units of e4m3 keep 14 of a sum."""
    return 2e-3 if x.dtype in (float32, float8_e4m3) else 1e-5


def added_product(x: Operands, plan: WidePlan) -> Run:
    """A product to which a matrix is added that comes through the ring."""

    def add(b: Any, inputs: Any, added: Any) -> Any:
        return b.apply("add", inputs[0], b.cast(inputs[-1], float32))

    run = one_product(fill(wide_matmul(x, plan, residuals=1), "epilogue", add), x)
    given = draw(2, x.dtype, *run.memories[2].shape)
    return Run(run.body, [*run.memories, given], {2: run.wanted[2] + given.astype(np.float64)})


def joint_products(x: Operands, plan: WidePlan) -> Run:
    """One input and several weights; gated, the product of both results is stored."""
    body = joint_matmul(x, plan)
    if x.gated:
        body = fill(body, "epilogue", lambda b, inputs, added: b.apply("multiply", *inputs[:2]))
    else:
        for number in range(len(x.weights)):
            body = fill(body, f"epilogue{number}", lambda b, inputs, added: inputs[0])
    tokens = x.n if x.turned else x.m
    given = draw(0, x.dtype, tokens, x.k)
    weights = [draw(1 + i, x.dtype, n, x.k) for i, n in enumerate(x.weights)]
    products = [given.astype(np.float64) @ w.astype(np.float64).T for w in weights]
    if x.gated:
        products = [products[0] * products[1]]
    results = [unwritten(x.result, *p.shape) for p in products]
    wanted = {1 + len(weights) + i: p for i, p in enumerate(products)}
    return Run(body, [given, *weights, *results], wanted, sums_of(x))


def plain(body: Body) -> Body:
    """With an epilogue that changes nothing."""
    return fill(body, "epilogue", lambda b, inputs, added: inputs[0])


def library() -> Iterator[tuple[str, Callable[[], Run]]]:
    """Every kind of library kernel."""
    for name, (x, wide) in WIDE.items():
        yield f"wide: {name}", lambda x=x, p=wide: one_product(plain(wide_matmul(x, p)), x)
    for name, (x, wide) in BESIDE.items():
        yield f"wide: {name}", lambda x=x, p=wide: added_product(x, p)
    for name, (x, thread) in THREADS.items():
        yield name, lambda x=x, p=thread: one_product(plain(thread_matmul(x, p)), x)
    for name, (x, joint) in JOINT.items():
        yield name, lambda x=x, p=joint: joint_products(x, p)


def run_library(device: Any, run: Run) -> str:
    """Launch twice on memory of exactly its size, the second time dependent; compare."""
    from tilegrad.targets.ptx.assemble import assemble, find_ptxas
    from tilegrad.targets.ptx.cuda_api import call
    from tilegrad.targets.ptx.emit import emit
    from tilegrad.targets.ptx.launch import Prepared

    text, entry = emit(run.body, "kernel", device.target)
    code: bytes | str = assemble(text, device.arch).cubin if find_ptxas() else text
    function = device.load(code).function("kernel")
    prepared = Prepared(function, entry)
    places = [
        Buffer(int(call("cuMemAlloc", m.nbytes)), m.nbytes, None, device.name) for m in run.memories
    ]
    try:
        for place, memory in zip(places, run.memories):
            device.write(place, memory)
        for dependent in (False, True):
            prepared.point([p.pointer for p in places])
            prepared.start(dependent=dependent)
        device.synchronize()
        for number, wanted in run.wanted.items():
            memory = run.memories[number]
            found = device.download(places[number], memory.shape, memory.dtype)
            close(found, wanted, run.inner)
    finally:
        for place in places:
            call("cuMemFree", place.pointer)
    return f"{entry.grid} programs of {entry.threads} threads, cluster {entry.cluster}"


def close(
    found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], inner: float, looser: float = 1.0
) -> None:
    """Up to the rounding of the result and of the sums within."""
    wanted = wanted.astype(np.float64)
    finite = np.abs(wanted[np.isfinite(wanted)])
    scale = float(finite.max()) if finite.size else 1.0
    relative = looser * ROUNDING.get(BY_NUMPY[found.dtype], 0.0)
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=relative, atol=inner * scale)


# ---- generated kernels ----------------------------------------------------------------------


def rotary(q: Any, cos: Any, sin: Any) -> Any:
    half = q.shape[-1] // 2
    turned = tg.cat([-q[..., half:], q[..., :half]], -1)
    return q * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def norm_gradients(x: Any, w: Any, upstream: Any) -> Any:
    return tg.vjp(lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-5), x, w)[1](upstream)


def loss_and_gradient(x: Any, targets: Any) -> Any:
    return tg.value_and_grad(lambda x: F.cross_entropy(x.float(), targets))(x)


HALF = ml_dtypes.bfloat16


def floats(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.random.default_rng(shape).standard_normal(shape, np.float32).astype(dtype)


def whole(high: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(shape).integers(0, high, shape)


def experts(x: tg.Tensor, scores: tg.Tensor, *weights: tg.Tensor) -> tg.Tensor:
    """A layer of experts: routing, grouped products of rows that they gather, the way back."""
    gate, up, down = weights
    shares, picked = F.softmax(scores, -1).topk(4, -1)
    shares = shares / shares.sum(-1, keepdim=True)

    def compute(rows: tg.Tensor, offsets: tg.Tensor, owners: tg.Tensor) -> tg.Tensor:
        a, b = (grouped_dot(rows, w, offsets) for w in (gate, up))
        return grouped_dot(F.silu(a) * b, down, offsets)

    return x + routed(x, picked, shares, scores.shape[1], compute)


def of_experts(tokens: int, width: int = 128, hidden: int = 64) -> tuple[np.ndarray[Any, Any], ...]:
    """Values for `experts`."""
    sizes = (16, hidden, width), (16, hidden, width), (16, width, hidden)
    weights = [floats(*size, dtype=HALF) for size in sizes]
    return floats(tokens, width, dtype=HALF), floats(tokens, 16), *weights


GENERATED: dict[str, tuple[Callable[..., Any], tuple[np.ndarray[Any, Any], ...]]] = {
    "elementwise": (lambda x, y: F.silu(x) * y + 1, (floats(33, 65, dtype=HALF),) * 2),
    "broadcast": (lambda x, y: x * y + y, (floats(33, 65), floats(65))),
    "row softmax": (lambda x: F.softmax(x, -1), (floats(9, 1000, dtype=HALF),)),
    "long rows": (lambda x: F.softmax(x, -1), (floats(2, 20001),)),
    "layer norm": (lambda x, w: F.layer_norm(x, (513,), w), (floats(7, 513), floats(513))),
    "norm gradients": (norm_gradients, (floats(300, 700), floats(700), floats(300, 700))),
    "column sums": (lambda x: (x.sum(0), x.max(0).values), (floats(700, 33),)),
    "whole sum": (lambda x: x.sum(), (floats(70001),)),
    "transpose": (lambda x, y: x.transpose(0, 1) + y, (floats(70, 33), floats(33, 70))),
    "rotary": (rotary, (floats(6, 4, 64), floats(6, 64), floats(6, 64))),
    "gather": (lambda x, i: x[i], (floats(50, 40), whole(50, 33))),
    "cross-entropy": (loss_and_gradient, (floats(5, 1003, dtype=HALF), whole(1003, 5))),
    "sort": (lambda x: tg.sort(x, -1), (floats(3, 200),)),
    "long sort": (lambda x: tg.sort(x, -1), (floats(5000),)),
    "top-k": (lambda x: tg.topk(x, 5, -1), (floats(3, 300),)),
    "experts, one token": (experts, of_experts(1)),
    "experts, streamed": (experts, of_experts(2, 512, 768)),
    "experts, few tokens": (experts, of_experts(9)),
    "experts, one program": (experts, of_experts(64)),
    "experts, many tokens": (experts, of_experts(150)),
    "running sum": (lambda x: x.cumsum(-1), (floats(3, 5000),)),
    "rows added at indices": (
        lambda x, i, v: x.index_add(0, i, v), (floats(40, 30), whole(40, 500), floats(500, 30))),
    "dot of odd sizes": (lambda x, w: x @ w, (floats(17, 19), floats(19, 23))),
    "dot": (lambda x, w: F.silu(F.linear(x, w)),
            (floats(72, 136, dtype=HALF), floats(72, 136, dtype=HALF))),
    "dot with bias and residual": (
        lambda x, w, b, r: r + F.linear(x, w, b),
        (floats(72, 136, dtype=HALF), floats(200, 136, dtype=HALF), floats(200, dtype=HALF),
         floats(72, 200, dtype=HALF))),
    "gate of two dots": (
        lambda x, w, u: F.silu(F.linear(x, w)) * F.linear(x, u),
        (floats(72, 136, dtype=HALF), floats(200, 136, dtype=HALF),
         floats(208, 136, dtype=HALF)[8:])),
    "dots of one input": (
        lambda x, w, u: (F.linear(x, w), F.linear(x, u)),
        (floats(24, 136, dtype=HALF), floats(200, 136, dtype=HALF), floats(72, 136, dtype=HALF))),
    "dot of one row": (lambda x, w: F.linear(x, w),
                       (floats(1, 256, dtype=HALF), floats(72, 256, dtype=HALF))),
    "matvec after a norm, with a residual": (
        lambda x, n, w, r: r + F.linear(F.rms_norm(x, (2048,), n), w),
        (floats(1, 2048, dtype=HALF), floats(2048, dtype=HALF), floats(72, 2048, dtype=HALF),
         floats(1, 72, dtype=HALF))),
    "matvec, gate of two": (
        lambda x, w, u: F.silu(F.linear(x, w)) * F.linear(x, u),
        (floats(1, 2048, dtype=HALF), floats(40, 2048, dtype=HALF),
         floats(48, 2048, dtype=HALF)[8:])),
    "concatenate and pad": (lambda x, y: F.pad(tg.cat([x, y], 1), (1, 2)),
                            (floats(9, 20), floats(9, 13))),
}  # fmt: skip


def run_generated(device: Any, function: Callable[..., Any], arrays: Sequence[Any]) -> str:
    """The jitted function on the GPU against the Graph interpreter."""
    from tilegrad.graph.interpret import interpret
    from tilegrad.ir.node import topological
    from tilegrad.tensor.container import flatten

    jitted = tg.jit(function)
    tensors = [tg.tensor(a, device="cuda") for a in arrays]
    lowered = jitted.lower(*tensors)
    named = {s.index: a for s, a in zip(lowered.sources, lowered.inputs) if s.kind == "leaf"}
    if len(named) != len(lowered.inputs):
        raise AssertionError("inputs that are no arguments")
    values = {node: np.asarray(arrays[index]) for index, node in named.items()}
    wanted = interpret(list(lowered.outputs), values)
    has_dot = any(n.op.name == "dot" for n in topological(lowered.outputs))  # perhaps in tf32
    found, _ = flatten(jitted(*tensors))
    device.synchronize()
    for place, tensor in zip(lowered.outcomes, found):
        expected, got = np.asarray(wanted[place.number]), np.asarray(tensor.cpu().numpy())
        half = got.dtype == HALF  # the interpreter rounds what lies between, too
        close(got, expected, 1e-2 if half else 2e-3 if has_dot else 1e-4, 4.0)
    steps = jitted.lower(*tensors).executable.recipe.steps
    return f"{sum(s.kind == 'kernel' for s in steps)} kernels"


# ---- all ------------------------------------------------------------------------------------


def checks(device: Any) -> Iterator[tuple[str, Callable[[], str]]]:
    """Every kernel by name."""
    for name, make in library():
        yield name, lambda make=make: run_library(device, make())
    for name, steps in (*sanitize_attention.cases(), *sanitize_quantised.cases()):
        yield name, lambda steps=steps: sanitize_attention.run(device, steps())
    for name, (function, arrays) in GENERATED.items():
        yield f"generated: {name}", lambda f=function, a=arrays: run_generated(device, f, a)


def main() -> int:
    """Run the kernels; the number that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="those whose names hold this")
    parser.add_argument("--without", default="", help="not those whose names hold this")
    given = parser.parse_args()
    from tilegrad.targets.ptx.driver import open_device

    device = open_device(0)
    failed = count = 0
    for name, run in checks(device):
        if given.only not in name or (given.without and given.without in name):
            continue
        count += 1
        try:
            print(f"ok   {name}: {run()}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAIL {name}: {type(error).__name__}: {str(error).strip()[:400]}", flush=True)
            if given.only:
                traceback.print_exc()
    print(f"{count} kernels, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main()))
