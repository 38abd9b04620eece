"""CPU speed against PyTorch: matmul, fused rows, a block, attention, convolution, call cost.

    python bench/cpu.py                 all cases, 9 rounds, writes bench/results/cpu-<date>.json
    python bench/cpu.py --only softmax  cases whose name holds the word (repeatable)
    python bench/cpu.py --quick         small sizes and 3 rounds: to see that all cases run

Ours is the public API (`tilegrad.jit`); the peer is named with each case: torch, or the same
function under torch.compile. Both sides take the same random data and reuse their outputs. A
timed call ends when the result is in memory. Invariant: a case whose results differ from the
peer's counts as wrong, whatever its speed; a case is measured again only because the calibration
made it void, whatever its ratio.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import measure
import numpy as np
import torch
import torch.nn.functional as TF
from verdict import end, failures, verdict, wrong

import tilegrad
import tilegrad.nn.functional as F

THREADS = 2
PAUSE = 10.0  # seconds before a case that was void is measured again
PATIENCE = 5.0  # seconds of one call of the peer: beyond it one round must do
TOO_LONG = 60.0  # and beyond this, as its rate in the group says, a case is left out
# group: (least geometric mean, least single ratio), as the project demands of itself
BARS = {
    "matmul float32": (0.95, 0.88),
    "matmul bfloat16": (0.9, 0.9),
    "fused": (1.0, 0.92),
    "convolution": (0.6, 0.6),
    "attention float32": (1.0, 1.0),
    "attention bfloat16": (1.0, 1.0),
}
CALL_BAR = 20e-6
random = np.random.default_rng(0)


@dataclass
class Case:
    """One comparison; `make` gives (ours, peer, values of ours, values of the peer, floor)."""

    name: str
    group: str
    peer: str
    flops: float
    bytes: float
    make: Callable[[], tuple[Any, ...]]
    tolerance: float = 2e-4


def array(*shape: int) -> np.ndarray:
    """Random float32 data."""
    return random.standard_normal(shape, np.float32)


def pair(x: np.ndarray, dtype: str = "float32") -> tuple[Any, Any]:
    """The same data as a Tensor of ours and of torch."""
    ours, theirs = tilegrad.tensor(x), torch.from_numpy(x.copy())
    if dtype != "float32":
        ours, theirs = ours.to(dtype).realize(), theirs.to(getattr(torch, dtype))
    return ours, theirs


def floor_of(function: Any, args: Sequence[Any]) -> float:
    """Seconds below which no run can be, by the machine's estimated peaks."""
    return sum(k.floor for k in tilegrad.explain(function, *args, level="summary").kernels)


def flat(result: Any) -> list[Any]:
    """The Tensors of a nested result."""
    if isinstance(result, (tuple, list)):
        return [x for part in result for x in flat(part)]
    return [result]


# ---- how a case is made ---------------------------------------------------------------------


def against_torch(function: Any, peer: Any, arrays: Sequence[np.ndarray], dtype: str) -> Any:
    """Ours jitted against a torch function that writes to `out`."""
    pairs = [pair(x, dtype) for x in arrays]
    ours, theirs = [p[0] for p in pairs], [p[1] for p in pairs]
    jitted = tilegrad.jit(function)
    with torch.inference_mode():
        out = peer(*theirs)

    def run_peer() -> Any:
        with torch.inference_mode():
            return peer(*theirs, out) if peer is torch_matmul else peer(*theirs)

    return lambda: jitted(*ours), run_peer, floor_of(function, ours)


def torch_matmul(a: Any, b: Any, out: Any = None) -> Any:
    """a @ b into `out`."""
    return torch.matmul(a, b, out=out)


def against_compile(
    function: Any,
    peer: Any,
    arrays: Sequence[np.ndarray],
    fixed: Sequence[np.ndarray] = (),
    backward: bool = False,
) -> Any:
    """Ours jitted against torch.compile; backward takes derivatives of `arrays`."""
    ours = [tilegrad.tensor(x) for x in (*arrays, *fixed)]
    theirs = [torch.from_numpy(x.copy()) for x in (*arrays, *fixed)]
    compiled = torch.compile(peer)
    count = len(arrays)
    if not backward:
        jitted = tilegrad.jit(function)
        with torch.no_grad():
            compiled(*theirs)

        def run_peer() -> Any:
            with torch.no_grad():
                return compiled(*theirs)

        return lambda: jitted(*ours), run_peer, floor_of(function, ours)

    for x in theirs[:count]:
        x.requires_grad_()
    shape = compiled(*theirs).shape
    seed = array(*shape) if shape else np.ones((), np.float32)
    seed_ours, seed_theirs = pair(seed)

    def both(seed: Any, *args: Any) -> Any:
        value, pull = tilegrad.vjp(lambda *xs: function(*xs, *args[count:]), *args[:count])
        return value, pull(seed)

    jitted = tilegrad.jit(both)

    def run_both() -> Any:
        value = compiled(*theirs)
        return value, torch.autograd.grad(value, theirs[:count], seed_theirs)

    return lambda: jitted(seed_ours, *ours), run_both, floor_of(both, [seed_ours, *ours])


# ---- the cases ------------------------------------------------------------------------------


def matmuls(quick: bool) -> Iterator[Case]:
    """Square products, and a vector by a matrix."""
    sizes = (64, 128) if quick else (512, 1024, 2048, 4096)
    long = 256 if quick else 4096
    for dtype in ("float32", "bfloat16"):
        wanted = [(n, n, n) for n in sizes if dtype == "float32" or n > 512 or quick]
        if dtype == "float32":
            wanted.append((1, long, long))
        width = 4 if dtype == "float32" else 2
        for m, k, n in wanted:

            def make(m: int = m, k: int = k, n: int = n, dtype: str = dtype) -> Any:
                return against_torch(
                    lambda a, b: a @ b, torch_matmul, [array(m, k), array(k, n)], dtype
                )

            name = f"matmul {dtype} {m}x{k}x{n}"
            yield Case(
                name,
                f"matmul {dtype}",
                "torch",
                2.0 * m * k * n,
                width * (m * k + k * n + m * n),
                make,
                2e-4 if dtype == "float32" else 2e-2,
            )


def chain(x: Any, y: Any) -> Any:
    """An elementwise chain into softmax, ours."""
    return tilegrad.softmax(tilegrad.tanh(x * 0.5 + y) * tilegrad.sigmoid(y) - x, -1)


def chain_peer(x: Any, y: Any) -> Any:
    """The same in torch."""
    return torch.softmax(torch.tanh(x * 0.5 + y) * torch.sigmoid(y) - x, -1)


def rows(quick: bool) -> Iterator[Case]:
    """Softmax, norms and cross-entropy, forward and forward+backward."""
    n = 128 if quick else 2048
    r, c = (128, 64) if quick else (4096, 1024)
    batch, classes = (64, 500) if quick else (1024, 50304)
    labels = random.integers(0, classes, batch)
    w, b = array(c), array(c)
    table = [
        ("chain into softmax", chain, chain_peer, [array(n, n), array(n, n)], (), (3, 8)),
        (
            "softmax",
            lambda x: tilegrad.softmax(x, -1),
            lambda x: torch.softmax(x, -1),
            [array(n, n)],
            (),
            (2, 5),
        ),
        (
            "layernorm",
            lambda x, w, b: F.layer_norm(x, (c,), w, b),
            lambda x, w, b: TF.layer_norm(x, (c,), w, b),
            [array(r, c), w, b],
            (),
            (2, 5),
        ),
        (
            "rmsnorm",
            lambda x, w: F.rms_norm(x, (c,), w, 1e-5),
            lambda x, w: TF.rms_norm(x, (c,), w, 1e-5),
            [array(r, c), w],
            (),
            (2, 5),
        ),
        (
            "cross-entropy",
            lambda x, y: F.cross_entropy(x, y),
            lambda x, y: TF.cross_entropy(x, y),
            [array(batch, classes)],
            [labels],
            (1, 3),
        ),
    ]
    for name, ours, theirs, arrays, fixed, passes in table:
        yield from both_ways(
            name, ours, theirs, arrays, fixed, 0.0, [4.0 * arrays[0].size * p for p in passes]
        )


def both_ways(
    name: str, ours: Any, theirs: Any, arrays: Any, fixed: Any, flops: float, moved: list[float]
) -> Iterator[Case]:
    """The forward case and the forward+backward case."""
    for backward in (False, True):

        def make(backward: bool = backward) -> Any:
            return against_compile(ours, theirs, arrays, fixed, backward)

        yield Case(
            name + (" fwd+bwd" if backward else " fwd"),
            "fused",
            "torch.compile",
            flops * (3 if backward else 1),
            moved[backward],
            make,
            1e-3,
        )


def gpt2_block(functional: Any, attention: Any, heads: int) -> Any:
    """A GPT-2 block over either library: x and 12 parameters -> x."""

    def block(
        x: Any,
        n1: Any,
        b1: Any,
        wqkv: Any,
        bqkv: Any,
        wo: Any,
        bo: Any,
        n2: Any,
        b2: Any,
        wi: Any,
        bi: Any,
        wp: Any,
        bp: Any,
    ) -> Any:
        batch, tokens, width = x.shape  # (batch, tokens, width)
        h = functional.layer_norm(x, (width,), n1, b1)
        qkv = functional.linear(h, wqkv, bqkv).reshape(batch, tokens, 3, heads, width // heads)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))  # (batch, heads, tokens, ..)
        mixed = attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, width)
        x = x + functional.linear(mixed, wo, bo)
        h = functional.layer_norm(x, (width,), n2, b2)
        h = functional.gelu(functional.linear(h, wi, bi), approximate="tanh")
        return x + functional.linear(h, wp, bp)

    return block


def blocks(quick: bool) -> Iterator[Case]:
    """The GPT-2 block at batch 1."""
    d, heads, t = (64, 4, 32) if quick else (768, 12, 512)

    def weight(*shape: int) -> np.ndarray:
        return array(*shape) / np.float32(math.sqrt(shape[-1]))

    ones, zeros = np.ones(d, np.float32), np.zeros(d, np.float32)
    arrays = [
        array(1, t, d),
        ones,
        zeros,
        weight(3 * d, d),
        np.zeros(3 * d, np.float32),
        weight(d, d),
        zeros,
        ones,
        zeros,
        weight(4 * d, d),
        np.zeros(4 * d, np.float32),
        weight(d, 4 * d),
        zeros,
    ]
    flops = 2.0 * t * 12 * d * d + 2 * 2.0 * t * t * d
    yield from both_ways(
        "gpt2 block",
        gpt2_block(F, F.scaled_dot_product_attention, heads),
        gpt2_block(TF, TF.scaled_dot_product_attention, heads),
        arrays,
        (),
        flops,
        [4.0 * 12 * d * d, 3 * 4.0 * 12 * d * d],
    )


def attention_ours(causal: bool) -> Any:
    """Attention, ours."""
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


def attention_peer(causal: bool) -> Any:
    """The same in torch."""
    return lambda q, k, v: TF.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


def attentions(quick: bool) -> Iterator[Case]:
    """Prefill (causal and full) and decode, with heads that share keys too."""
    tokens, keys = (64, 128) if quick else (2048, 4096)
    table = [
        ("prefill", 1, 12, 12, tokens, tokens, 64),
        ("prefill", 1, 8, 8, tokens, tokens, 128),
        ("decode", 1, 32, 32, 1, keys, 128),
        ("decode", 8, 32, 32, 1, keys, 128),
        ("decode", 1, 32, 8, 1, keys, 128),
        ("decode", 8, 32, 8, 1, keys, 128),
        ("decode", 1, 12, 12, 1, keys, 64),
    ]
    for dtype in ("float32", "bfloat16"):
        for name, batch, heads, key_heads, tq, tk, width in table:
            for causal in (False, True) if name == "prefill" else (False,):

                def make(
                    b: int = batch,
                    h: int = heads,
                    hk: int = key_heads,
                    tq: int = tq,
                    tk: int = tk,
                    d: int = width,
                    causal: bool = causal,
                    dtype: str = dtype,
                ) -> Any:
                    arrays = [array(b, h, tq, d), array(b, hk, tk, d), array(b, hk, tk, d)]
                    return against_torch(
                        attention_ours(causal), attention_peer(causal), arrays, dtype
                    )

                flops = 4.0 * batch * heads * tq * tk * width * (0.5 if causal else 1.0)
                moved = (4 if dtype == "float32" else 2) * 2.0 * batch * key_heads * tk * width
                shape = f"{batch}x{heads}/{key_heads}x{width}"
                yield Case(
                    f"{name} {dtype} {shape}{' causal' * causal}",
                    f"attention {dtype}",
                    "torch",
                    flops,
                    moved,
                    make,
                    2e-4 if dtype == "float32" else 2e-2,
                )


def convolutions(quick: bool) -> Iterator[Case]:
    """3x3 and 1x1 convolutions of ResNet-50, batch 1."""
    shapes = [(8, 14), (16, 7)] if quick else [(64, 56), (128, 28), (256, 14), (512, 7)]
    for kernel in (3, 1):
        for channels, size in shapes:
            out = channels if kernel == 3 else 4 * channels
            pad = kernel // 2

            def make(
                c: int = channels, s: int = size, k: int = kernel, out: int = out, pad: int = pad
            ) -> Any:
                return against_torch(
                    lambda x, w: F.conv2d(x, w, padding=pad),
                    lambda x, w: TF.conv2d(x, w, padding=pad),
                    [array(1, c, s, s), array(out, c, k, k) * np.float32(1 / k / c**0.5)],
                    "float32",
                )

            yield Case(
                f"conv {kernel}x{kernel} {channels}->{out} {size}x{size}",
                "convolution",
                "torch",
                2.0 * size * size * channels * out * kernel * kernel,
                4.0 * (size * size * (channels + out) + channels * out * kernel**2),
                make,
            )


def calls(quick: bool) -> Iterator[Case]:
    """What a call of a tiny jitted function costs, its value read."""

    def make() -> Any:
        a, b = pair(array(8)), pair(array(8))
        jitted = tilegrad.jit(lambda x, y: (x * y).sum())
        compiled = torch.compile(lambda x, y: (x * y).sum())

        def peer() -> Any:
            with torch.inference_mode():
                return compiled(a[1], b[1]).item()

        return lambda: jitted(a[0], b[0]).item(), peer, 0.0

    yield Case("jit call, 2 arguments", "call", "torch.compile", 16, 68, make)


FAMILIES = (matmuls, rows, blocks, attentions, convolutions, calls)


# ---- running --------------------------------------------------------------------------------


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference of the results, relative to the largest value of each."""
    worst = 0.0
    for a, b in zip(flat(ours), flat(theirs), strict=True):
        x = np.asarray(a.numpy() if isinstance(a, tilegrad.Tensor) else a).astype(np.float64)
        y = np.asarray(b.detach().double() if isinstance(b, torch.Tensor) else b, np.float64)
        worst = max(worst, float(np.abs(x - y).max() / (np.abs(y).max() + 1e-30)))
    return worst


def run_case(case: Case, rounds: int, least: float, tries: int) -> dict[str, Any]:
    """Measure one case, again while the machine is busy; a mistake in it is recorded, the others
    go on."""
    row: dict[str, Any] = {
        "name": case.name,
        "group": case.group,
        "peer": case.peer,
        "flops": case.flops,
        "bytes": case.bytes,
    }
    try:
        ours, theirs, floor = case.make()
        start = time.perf_counter()
        first = ours()
        row["compile_seconds"] = time.perf_counter() - start
        start = time.perf_counter()
        peer = theirs()
        if time.perf_counter() - start > PATIENCE:
            rounds = 1
        row["difference"] = difference(first, peer)
        del first, peer
        for row["tries"] in range(1, tries + 1):
            row["calibration"] = measure.calibrate()
            row |= measure.interleave(ours, theirs, rounds, least)
            row["calibration"] = max(row["calibration"], measure.calibrate())
            row["void"] = measure.busy(row["calibration"])
            if not row["void"] or row["tries"] == tries:
                break
            time.sleep(PAUSE)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return row
    row["floor_seconds"] = floor
    row["wrong"] = not row["difference"] <= case.tolerance
    return row


def expected(case: Case, rows: list[dict[str, Any]]) -> float:
    """Seconds of one call of the peer, at its best rate in cases of the group so far."""
    known = [r for r in rows if r["group"] == case.group and r["flops"] and "failed" not in r]
    return min((r["peer_seconds"] / r["flops"] * case.flops for r in known), default=0.0)


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    head = f"{row['name']:28} {row['peer']:14}"
    if "failed" in row:
        failures.append("FAILED")
        return f"{head} FAILED {row['failed']}"
    seconds = row["ours_seconds"]
    rate = (
        f"{row['flops'] / seconds / 1e9:8.1f} GF/s"
        if row["flops"]
        else f"{row['bytes'] / seconds / 1e9:8.1f} GB/s"
    )
    notes = wrong(not row["wrong"]) + " void" * row["void"]
    return (
        f"{head} {row['ratio']:6.2f}x [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}] "
        f"{1e6 * seconds:11.1f} us {1e6 * row['peer_seconds']:11.1f} us {rate} "
        f"floor {1e6 * row['floor_seconds']:9.1f} us  cal {row['calibration']:.0f}"
        f"{notes}"
    )


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each group's geometric mean and least ratio against its bars."""
    found = []
    for group, (mean_bar, least_bar) in BARS.items():
        mine = [r for r in rows if r["group"] == group]
        good = [r["ratio"] for r in mine if "failed" not in r and not r["wrong"]]
        if not mine:
            continue
        mean, least = measure.geometric_mean(good), min(good, default=math.nan)
        found.append(
            {
                "group": group,
                "mean": mean,
                "mean_bar": mean_bar,
                "least": least,
                "least_bar": least_bar,
                "cases": len(mine),
                "met": len(good) == len(mine) and mean >= mean_bar and least >= least_bar,
                "void": any(r.get("void") for r in mine),
            }
        )
    for row in (r for r in rows if r["group"] == "call" and "failed" not in r):
        found.append(
            {
                "group": "jit call",
                "seconds": row["ours_seconds"],
                "bar": CALL_BAR,
                "met": row["ours_seconds"] <= CALL_BAR,
                "void": row["void"],
            }
        )
    return found


def verdict_line(v: dict[str, Any]) -> str:
    """One verdict for people."""
    word = "void: busy machine" if v["void"] else verdict(v["met"])
    if "seconds" in v:
        return f"{v['group']}: {1e6 * v['seconds']:.1f} us, at most {1e6 * v['bar']:.0f} us: {word}"
    return (
        f"{v['group']}: geometric mean {v['mean']:.3f} (bar {v['mean_bar']}), least "
        f"{v['least']:.3f} (bar {v['least_bar']}) of {v['cases']}: {word}"
    )


def main() -> None:
    """Run the cases, print the table and the verdicts, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="cases whose name holds this")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tries", type=int, default=4, help="of a case while the machine is busy")
    parser.add_argument("--quick", action="store_true", help="small sizes, 3 rounds, no file")
    options = parser.parse_args()
    rounds, least = (3, 0.005) if options.quick else (options.rounds, 0.05)
    measure.reuse_memory()
    torch.set_num_threads(THREADS)
    tilegrad.set_threads(THREADS)
    calibration = measure.settle()
    cases = [c for family in FAMILIES for c in family(options.quick)]
    if options.only:
        cases = [c for c in cases if any(word in c.name for word in options.only)]
    results: list[dict[str, Any]] = []
    tries, measured = 1 if options.quick else options.tries, []
    for case in cases:
        wait = expected(case, results)
        if wait > TOO_LONG:
            print(f"{case.name:28} left out: {case.peer} would take {wait:.0f} s a call")
            continue
        results.append(run_case(case, rounds, least, tries))
        measured.append(case)
        print(line(results[-1]), flush=True)
        torch.compiler.reset()
    for at, case in enumerate(measured):  # what the machine can give was known later than these
        if measure.busy(results[at].get("calibration", math.inf)):
            results[at] = run_case(case, rounds, least, tries)
            print(line(results[at]), flush=True)
    summary = verdicts(results)
    print()
    for v in summary:
        print(verdict_line(v))
    void = sum(bool(r.get("void")) for r in results)
    if void:
        print(f"VOID: the machine was busy during {void} of {len(results)} cases; run again")
    if not options.quick:
        record = measure.facts(
            kind="cpu",
            threads=THREADS,
            calibration=calibration,
            partial=bool(options.only),
            cases=results,
            verdicts=summary,
        )
        print(f"written: {measure.save('cpu' if not options.only else 'cpu-partial', record)}")


if __name__ == "__main__":
    main()
    end()
