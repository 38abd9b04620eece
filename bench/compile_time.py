"""How long the compiler takes: the GPT-2 124M training step cold and from the disk, and import.

    python bench/compile_time.py            writes bench/results/compile-<date>.json
    python bench/compile_time.py --quick    a small model, no file

Each figure comes from a fresh process. The step is forward, loss, backward and AdamW in float32
at batch 1 and 512 tokens. Compile time is the first call less a later one, so that neither the
import nor the step itself counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import measure
import numpy as np

COLD_BAR, WARM_BAR, IMPORT_BAR, OWN_IMPORT_BAR = 20.0, 3.0, 0.25, 0.08
FULL = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257, "tokens": 512}
SMALL = {"layers": 3, "width": 64, "heads": 4, "vocabulary": 200, "tokens": 32}


# ---- the model, over the public API ---------------------------------------------------------


def parameters_of(size: dict[str, int]) -> dict[str, np.ndarray]:
    """Random parameters by name."""
    random = np.random.default_rng(0)
    d = size["width"]
    shapes: dict[str, tuple[int, ...]] = {
        "wte": (size["vocabulary"], d),
        "wpe": (1024, d),
        "ln_f.w": (d,),
        "ln_f.b": (d,),
    }
    for i in range(size["layers"]):
        shapes |= {
            f"h{i}.ln_1.w": (d,),
            f"h{i}.ln_1.b": (d,),
            f"h{i}.qkv.w": (3 * d, d),
            f"h{i}.qkv.b": (3 * d,),
            f"h{i}.out.w": (d, d),
            f"h{i}.out.b": (d,),
            f"h{i}.ln_2.w": (d,),
            f"h{i}.ln_2.b": (d,),
            f"h{i}.fc.w": (4 * d, d),
            f"h{i}.fc.b": (4 * d,),
            f"h{i}.proj.w": (d, 4 * d),
            f"h{i}.proj.b": (d,),
        }
    return {n: random.standard_normal(s, np.float32) * np.float32(0.02) for n, s in shapes.items()}


def loss_of(p: dict[str, Any], tokens: Any, targets: Any, size: dict[str, int]) -> Any:
    """Mean cross-entropy of a GPT-2 with parameters `p`."""
    import tilegrad.nn.functional as F

    batch, length = tokens.shape
    d, heads = size["width"], size["heads"]
    x = p["wte"][tokens] + p["wpe"][:length]  # (batch, tokens, width)
    for i in range(size["layers"]):
        h = F.layer_norm(x, (d,), p[f"h{i}.ln_1.w"], p[f"h{i}.ln_1.b"])
        qkv = F.linear(h, p[f"h{i}.qkv.w"], p[f"h{i}.qkv.b"])
        qkv = qkv.reshape(batch, length, 3, heads, d // heads)
        q, k, v = (qkv[:, :, j].transpose(1, 2) for j in range(3))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, d)
        x = x + F.linear(mixed, p[f"h{i}.out.w"], p[f"h{i}.out.b"])
        h = F.layer_norm(x, (d,), p[f"h{i}.ln_2.w"], p[f"h{i}.ln_2.b"])
        h = F.gelu(F.linear(h, p[f"h{i}.fc.w"], p[f"h{i}.fc.b"]), approximate="tanh")
        x = x + F.linear(h, p[f"h{i}.proj.w"], p[f"h{i}.proj.b"])
    x = F.layer_norm(x, (d,), p["ln_f.w"], p["ln_f.b"])
    logits = F.linear(x, p["wte"])  # (batch, tokens, vocabulary)
    return F.cross_entropy(logits.reshape(batch * length, -1), targets.reshape(batch * length))


def make_step(size: dict[str, int]) -> Any:
    """(parameters, first, second, count, tokens, targets) -> (loss, and the three anew)."""
    import tilegrad

    def step(p: Any, first: Any, second: Any, count: float, tokens: Any, targets: Any) -> Any:
        loss, grads = tilegrad.value_and_grad(loss_of)(p, tokens, targets, size)
        new_p, new_first, new_second = {}, {}, {}
        for name, w in p.items():
            g = grads[name]
            m = new_first[name] = 0.9 * first[name] + 0.1 * g
            v = new_second[name] = 0.999 * second[name] + 0.001 * g * g
            fix = tilegrad.sqrt(1 - 0.999**count) / (1 - 0.9**count)
            new_p[name] = w * (1 - 3e-4 * 0.1) - 3e-4 * fix * m / (tilegrad.sqrt(v) + 1e-8)
        return loss, new_p, new_first, new_second

    return tilegrad.jit(step, donate=("p", "first", "second"))


# ---- in a child process ---------------------------------------------------------------------


def child(size: dict[str, int], explain: bool) -> dict[str, Any]:
    """First call, later calls and counters of a fresh process."""
    import tilegrad
    from tilegrad.compiler.compile import counters

    random = np.random.default_rng(1)
    given = parameters_of(size)
    state = [
        {n: tilegrad.tensor(x) for n, x in given.items()},
        *({n: tilegrad.tensor(np.zeros_like(x)) for n, x in given.items()} for _ in range(2)),
    ]
    tokens, targets = (
        tilegrad.tensor(random.integers(0, size["vocabulary"], (1, size["tokens"])))
        for _ in range(2)
    )
    step = make_step(size)
    if explain:
        found = tilegrad.explain(step, *state, 1.0, tokens, targets, level="summary")
        return {
            "kernels": len(found.kernels),
            "programs": len(found.programs),
            "most_kernels_of_a_program": max(len(p.kernels) for p in found.programs),
            "peak_bytes": found.peak_bytes,
        }
    times, losses = [], []
    for i in range(4):
        start = time.perf_counter()
        loss, *state = step(*state, float(i + 1), tokens, targets)
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    assert all(math.isfinite(x) for x in losses), losses
    return {
        "compile_seconds": times[0] - min(times[1:]),
        "step_seconds": min(times[1:]),
        "losses": losses,
        "counters": dict(counters),
    }


def spawn(kind: str, size: dict[str, int], cache: str) -> dict[str, Any]:
    """Run `child` in a fresh process with a cache folder."""
    environment = {**bytecode_kept(), "TILEGRAD_CACHE": cache}
    command = [sys.executable, __file__, "--child", kind, json.dumps(size)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if found.returncode:
        return {"failed": found.stderr.strip().splitlines()[-1:]}
    return json.loads(found.stdout.splitlines()[-1])


def bytecode_kept() -> dict[str, str]:
    """The environment, with Python free to keep its bytecode: imports are timed warm."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def import_times(count: int = 10) -> dict[str, float]:
    """Best of `count` fresh imports: all of it, and our own modules alone."""
    whole, own = [], []
    environment = bytecode_kept()
    script = "import time; t = time.perf_counter(); import tilegrad; print(time.perf_counter() - t)"
    for _ in range(count):
        found = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        whole.append(float(found.stdout))
        found = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", "import tilegrad"],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        rows = [line.split("|") for line in found.stderr.splitlines() if line.count("|") == 2]
        own.append(
            sum(int(r[0].split(":")[1]) for r in rows if r[2].strip().split(".")[0] == "tilegrad")
            / 1e6
        )
    return {"import_seconds": min(whole), "own_import_seconds": min(own)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, size = options.child
        print(json.dumps(child(json.loads(size), kind == "explain")))
        return
    size = SMALL if options.quick else FULL
    calibration = measure.settle()
    imports = import_times(3 if options.quick else 10)
    with tempfile.TemporaryDirectory() as cache:
        cold = spawn("run", size, cache)
        warm = spawn("run", size, cache)
        shape = spawn("explain", size, cache)
    record = measure.facts(
        kind="compile",
        calibration=calibration,
        size=size,
        cold=cold,
        warm=warm,
        schedule=shape,
        **imports,
    )
    print(
        f"import: {imports['import_seconds']:.3f} s (at most {IMPORT_BAR}), our own modules "
        f"{imports['own_import_seconds']:.3f} s (at most {OWN_IMPORT_BAR})"
    )
    for name, found, bar in (("cold", cold, COLD_BAR), ("warm", warm, WARM_BAR)):
        if "failed" in found:
            print(f"{name}: FAILED {found['failed']}")
        else:
            print(
                f"{name}: compile {found['compile_seconds']:.2f} s (at most {bar}), step "
                f"{found['step_seconds']:.3f} s, {found['counters']}"
            )
    print(f"schedule: {shape}")
    if not options.quick:
        print(f"written: {measure.save('compile', record)}")


if __name__ == "__main__":
    main()
