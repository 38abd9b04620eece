"""What launching and compiling for a GPU cost.

    python bench/launch.py                        all parts
    python bench/launch.py --part replay          one of replay, call, matmul, gpt2 (repeatable)

replay: a graph of 200 dependent small kernels of 132 blocks, a kernel's share of its time.
call:   host time of calling a jitted function of one kernel, torch's eager ops beside it.
matmul: one library matmul compiled in a fresh process, nothing kept on disk: our passes and
        emission, then assembling.
gpt2:   the training step of bench/compile_time.py on the GPU, cold; and its phases by themselves.
`matmul` and the phases of `gpt2` need no GPU, only ptxas.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import compile_time
from verdict import end, failures, verdict

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "gpu"))

REPLAY_BAR, CALL_BAR = 0.9e-6, 15e-6
EMIT_BAR, ASSEMBLE_BAR, GPT2_BAR = 0.3, 0.5, 15.0
CHAIN, BLOCKS = 200, 132
MATMUL = (2048, 14336, 4096)


# ---- replay ---------------------------------------------------------------------------------


def replay() -> dict[str, Any]:
    """Time of a kernel in a replayed chain: hand-written and generated, plain and dependent."""
    from smoke import chain_operations, edges, same

    from tilegrad.targets.ptx.driver import open_device

    device = open_device(0)
    found: dict[str, Any] = {"part": "replay", "kernels": CHAIN, "blocks": BLOCKS}
    size = BLOCKS * 128 * 4
    for word, dependent in (("plain", False), ("dependent", True)):
        buffers = [device.allocate(size) for _ in range(2)]
        device.fill(buffers[0])
        made, seconds = chain_time(device, chain_operations(device, buffers, CHAIN, dependent))
        turns = made.turns * CHAIN  # the chain goes back and forth, so every replay adds to it
        same(device.download(buffers[0], (BLOCKS * 128,), "int32"), [turns] * (BLOCKS * 128))
        found[f"{word}_us"] = 1e6 * seconds
        found[f"{word}_edges"] = edges(made.replay)
    operations, blocks = generated_chain(device)
    found["generated_us"] = 1e6 * chain_time(device, operations)[1]
    found["generated_blocks"] = blocks
    found["met"] = found["dependent_us"] <= 1e6 * REPLAY_BAR
    print(
        f"replay of {CHAIN} dependent kernels of {BLOCKS} blocks: plain {found['plain_us']:.2f}"
        f" us a kernel, dependent {found['dependent_us']:.2f} us (bar {1e6 * REPLAY_BAR:.1f}:"
        f" {verdict(found['dependent_us'] <= 1e6 * REPLAY_BAR)}; edges:"
        f" {found['dependent_edges']}), generated kernels of {blocks} blocks"
        f" {found['generated_us']:.2f} us",
        flush=True,
    )
    return found


class Counted:
    """A graph that counts its launches."""

    def __init__(self, device: Any, operations: Sequence[Any]) -> None:
        from tilegrad.targets.ptx.launcher import LaunchGraph

        self.replay, self.turns = LaunchGraph(device, operations), 0

    def launch(self) -> None:
        """Once more."""
        self.turns += 1
        self.replay.launch()


def chain_time(device: Any, operations: Sequence[Any]) -> tuple[Counted, float]:
    """A graph of the operations, and the median seconds of one of them in a replay."""
    from direct import timed

    made = Counted(device, operations)
    seconds = sorted(timed(device, made.launch, 31, 5))[15]
    return made, seconds / len(operations)


def generated_chain(device: Any) -> tuple[list[Any], int]:
    """The same with a kernel that the compiler made, waiting for its dependency by itself."""
    from jitted import Launches

    import tilegrad as tg
    from tilegrad.targets.ptx.launcher import Operation

    x = tg.rand(BLOCKS * 512, device="cuda").realize()
    other = tg.rand(BLOCKS * 512, device="cuda").realize()
    (first,) = Launches(device, tg.jit(lambda x: x + 1), x).operations
    a, b = x.buffer(), other.buffer()
    pointers = {True: (a.pointer, b.pointer), False: (b.pointer, a.pointer)}
    assert first.pointers[0] == a.pointer != b.pointer, "its input comes first"
    operations = [Operation(first.prepared, pointers[i % 2 == 0]) for i in range(CHAIN)]
    generated_chain.held = (x, other)  # type: ignore[attr-defined]
    return operations, first.prepared.grid[0]


# ---- calls ----------------------------------------------------------------------------------


def call() -> dict[str, Any]:
    """Host time of a jitted function of one kernel, and of torch's eager ops."""
    from smoke import per_call

    import tilegrad as tg
    from tilegrad.targets.ptx.driver import open_device

    device = open_device(0)
    function = tg.jit(lambda a, b: a * 2 + b)
    x, y = (tg.rand(64, 64, device="cuda").realize() for _ in range(2))
    function(x, y)
    ours = per_call(device, lambda i: function(x, y), 300)
    found = {"part": "call", "ours_us": 1e6 * ours, "met": ours <= CALL_BAR}
    said = ""
    try:
        import torch
    except ImportError:
        said = ", no torch here"
    else:
        p, q = (torch.rand(64, 64, device="cuda") for _ in range(2))
        cases: dict[str, Callable[[int], Any]] = {
            "torch_two_kernels_us": lambda i: p * 2 + q,
            "torch_one_kernel_us": lambda i: torch.add(q, p, alpha=2),
        }
        for name, work in cases.items():
            found[name] = 1e6 * per_call(device, work, 300)
        said = (
            f"; torch eager {found['torch_one_kernel_us']:.1f} us for one kernel,"
            f" {found['torch_two_kernels_us']:.1f} us for two"
        )
    print(
        f"calling a jitted function of one kernel: {1e6 * ours:.1f} us of host time"
        f" (bar {1e6 * CALL_BAR:.0f}: {verdict(ours <= CALL_BAR)}){said}",
        flush=True,
    )
    return found


# ---- compiling ------------------------------------------------------------------------------


def phases(lowered: Any) -> dict[str, Any]:
    """Seconds of scheduling, emission and assembling of a traced Graph for an H200."""
    from tilegrad.compiler.compile import schedule_for
    from tilegrad.compiler.flatten import recipe_of
    from tilegrad.core.config import adopt, config
    from tilegrad.core.target import H200
    from tilegrad.targets.ptx.assemble import assemble, find_ptxas

    times = [time.perf_counter()]
    schedule = schedule_for(lowered.inputs, lowered.outputs, H200, lowered.donate)
    times.append(time.perf_counter())
    recipe, texts = recipe_of(schedule, H200)
    times.append(time.perf_counter())
    found = {
        "kernels": len(schedule.kernels),
        "programs": len(texts),
        "launches": sum(s.kind == "kernel" for s in recipe.steps),
    }
    if find_ptxas() is not None:
        with ThreadPoolExecutor(initializer=adopt, initargs=(config(),)) as pool:
            made = list(pool.map(lambda text: assemble(text, H200.cpu), texts.values()))
        times.append(time.perf_counter())
        reports = [r for m in made for r in m.reports.values()]
        found |= {
            "assemble_seconds": times[3] - times[2],
            "cores": os.cpu_count(),
            "spilling_programs": sum(r.spill_stores > 0 for r in reports),
        }
    return {**found, "schedule_seconds": times[1] - times[0], "emit_seconds": times[2] - times[1]}


def child(kind: str) -> dict[str, Any]:
    """In a fresh process, without a cache on disk."""
    import tilegrad as tg

    def product(x: Any, w: Any) -> Any:
        return x @ w.transpose(0, 1)

    if kind.startswith("matmul"):
        m, n, k = MATMUL
        if kind == "matmul":  # modules are imported by compiling something else first
            small = [tg.zeros(64, 64), tg.zeros(64, 64)]
            phases(tg.jit(lambda x, y: (x + y).sum(1)).lower(*small))
        start = time.perf_counter()
        kinds = tg.zeros(m, k, dtype=tg.bfloat16), tg.zeros(n, k, dtype=tg.bfloat16)
        lowered = tg.jit(product).lower(*kinds)
    else:
        size = compile_time.FULL if kind == "gpt2" else compile_time.SMALL
        shapes = {n: x.shape for n, x in compile_time.parameters_of(size).items()}
        state = [{n: tg.zeros(*s) for n, s in shapes.items()} for _ in range(3)]
        tokens = tg.zeros(1, size["tokens"], dtype=tg.int64)
        targets = tg.ones(1, size["tokens"], dtype=tg.int64)
        start = time.perf_counter()
        lowered = compile_time.make_step(size).lower(*state, 1.0, tokens, targets)
    traced = time.perf_counter() - start
    return {"trace_seconds": traced, **phases(lowered)}


def spawn(kind: str) -> dict[str, Any]:
    """Run `child` in a fresh process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **compile_time.bytecode_kept(),
            "TILEGRAD_CACHE": cache,
            "TILEGRAD_DEVICE": "cpu",
        }
        command = [sys.executable, __file__, "--child", kind]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-3:]}
    return json.loads(done.stdout.splitlines()[-1])


def own(found: dict[str, Any]) -> float:
    """Seconds of our tracing, passes, lowering and emission."""
    return found["trace_seconds"] + found["schedule_seconds"] + found["emit_seconds"]


def matmul() -> dict[str, Any]:
    """Cold compile of one library matmul."""
    found, first = spawn("matmul"), spawn("matmul first")
    for result in (found, first):
        if "failed" in result:
            print(f"matmul: FAILED {result['failed']}", flush=True)
            failures.append("FAILED")
            return {"part": "matmul", **result, "met": False}
    ours, assembling = own(found), found.get("assemble_seconds", float("nan"))
    met = ours <= EMIT_BAR and assembling <= ASSEMBLE_BAR
    print(
        f"cold compile of a {'x'.join(map(str, MATMUL))} matmul ({found['programs']} program):"
        f" ours {ours:.2f} s (bar {EMIT_BAR}: {verdict(ours <= EMIT_BAR)}; {own(first):.2f} s as"
        f" the first thing a process compiles), assembling {assembling:.2f} s"
        f" (bar {ASSEMBLE_BAR}: {verdict(assembling <= ASSEMBLE_BAR)})",
        flush=True,
    )
    return {
        "part": "matmul",
        "sizes": MATMUL,
        **found,
        "own_seconds": ours,
        "first_own_seconds": own(first),
        "met": met,
    }


def gpt2(small: bool = False, device: str = "cuda") -> dict[str, Any]:
    """The GPT-2 124M training step: phases without a GPU, then the first call on the GPU."""
    parts = spawn("gpt2 small" if small else "gpt2")
    print(f"gpt2 step, phases for an H200: {parts}", flush=True)
    size = compile_time.SMALL if small else compile_time.FULL
    before = os.environ.get("TILEGRAD_DEVICE")
    os.environ["TILEGRAD_DEVICE"] = device
    try:
        with tempfile.TemporaryDirectory() as cache:
            cold = compile_time.spawn("run", size, cache)
            warm = compile_time.spawn("run", size, cache)
    finally:
        os.environ.pop("TILEGRAD_DEVICE")
        if before is not None:
            os.environ["TILEGRAD_DEVICE"] = before
    seconds = cold.get("compile_seconds", float("inf"))
    for word, found in (("cold", cold), ("from the disk", warm)):
        print(f"gpt2 step on {device}, {word}: {found}", flush=True)
    print(
        f"gpt2 step compiles cold in {seconds:.2f} s (bar {GPT2_BAR:.0f}:"
        f" {verdict(seconds <= GPT2_BAR)})",
        flush=True,
    )
    return {
        "part": "gpt2",
        "size": size,
        "phases": parts,
        "cold": cold,
        "warm": warm,
        "met": seconds <= GPT2_BAR,
    }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "replay": replay,
    "call": call,
    "matmul": matmul,
    "gpt2": gpt2,
}


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="append", choices=list(PARTS), default=[])
    parser.add_argument("--out", default="", help="where the JSON goes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(given.child)))
        return
    rows = []
    for name in given.part or PARTS:
        try:
            rows.append(PARTS[name]())
        except Exception as failure:  # one part that fails must not end the others
            rows.append({"part": name, "failed": f"{type(failure).__name__}: {failure}"})
            print(f"{name}: FAILED {rows[-1]['failed'][:1000]}", flush=True)
            failures.append("FAILED")
    print("missed:", ", ".join(r["part"] for r in rows if not r.get("met")) or "none")
    if given.out:
        from gpu import Bench

        record = {"kind": "launch", **Bench().about(), "rows": rows}
        Path(given.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
    end()
