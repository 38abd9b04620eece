"""Networks in int8 on chips and on this CPU in one table: cycles, time, energy, utilisation.

Chips are counted by closed forms (what the host does beside them is its share of FLOPs, and not in
the cycles). The CPU runs the same int8 kernels and is timed; its cycles and energy follow from the
clock and the watts given here, its utilisation from the peak of its Target.

python bench/npu_table.py [--chips 16x16,edge] [--clock 3.0] [--watts 3] [--only resnet-18]
python bench/npu_table.py --speed     # of the register level, in multiplications a second
Either with --out FILE writes its rows to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import numpy as np

import tilegrad as tg
from tilegrad import nn, quant
from tilegrad.core.config import config
from tilegrad.exchange.fetch import kept_models
from tilegrad.models.resnet import resnet
from tilegrad.quant import fixed
from tilegrad.runtime.device import target_for
from tilegrad.targets.npu.parameters import Parameters
from tilegrad.targets.npu.product import Product

RNG = np.random.default_rng(0)
Case = tuple[Callable[..., Any], list[Any]]  # a function, and its arguments


def pictures(depth: int) -> Case:
    """A ResNet of pictures of 224 x 224; its weights do not matter to times."""
    with nn.init.skipped():
        model = resnet(depth).requires_grad_(False)
    named = (nn.Linear, nn.Conv2d)
    layers = [name for name, one in model.named_modules() if isinstance(one, named)]
    quant.quantise(model, dict.fromkeys(layers, 4.0))
    return model, [tg.zeros((1, 3, 224, 224))]


def speech() -> Case | str:
    """A chunk of 32 ms through Silero VAD."""
    from tilegrad.models.silero import load_silero

    found = sorted((Path(config().cache_folder) / "models").glob("silero_vad-*.whl"))
    if not found:
        return "the wheel of silero-vad is not in the cache"
    model = load_silero(found[0])
    chunks = [tg.tensor(RNG.standard_normal((1, 576)).astype(np.float32)) for _ in range(2)]

    def run(given: list[tg.Tensor]) -> None:
        state = None
        for chunk in given:
            _, state = model(chunk, state)

    quant.quantise(model, quant.calibrate(model, [chunks], run))
    return model, [chunks[0], tg.zeros((2, 1, 128))]


def language() -> Case | str:
    """The first two layers of SmolLM2 over 64 tokens."""
    from tilegrad.generate.load import load_model

    kept = {model.name: model.path for model in kept_models()}
    if "smollm2" not in kept:
        return "smollm2 was not fetched"
    model = load_model(kept["smollm2"], "cpu", tg.float32, lambda *_: None).model
    model.blocks = nn.ModuleList(list(model.blocks)[:2])
    quant.quantise_rows(model.blocks)

    def hidden(model: Any, tokens: tg.Tensor) -> tg.Tensor:
        positions = tg.arange(int(tokens.shape[1])).to(tokens.device)
        return model.hidden(tokens, positions, model._causal)

    return hidden, [model, tg.tensor(np.arange(64)[None])]


def heads() -> Case:
    """Nine heads of attention over 64 tokens, in fixed point."""
    given = [RNG.integers(-128, 128, (9, 64, 64)).astype(np.int8) for _ in range(3)]
    return lambda q, k, v: fixed.attention(q, k, v, 1e-4), [tg.tensor(a) for a in given]


def norms() -> Case:
    """64 rows of 576 over their root mean square, in fixed point."""
    real = fixed.norm_factors(RNG.standard_normal(576), 4 / 127)
    x = RNG.integers(-128, 128, (64, 576)).astype(np.int8)
    return lambda x, f: fixed.rms_norm(x, f, real.shift), [tg.tensor(x), tg.tensor(real.factors)]


CASES: dict[str, Callable[[], Case | str]] = {
    "resnet-18": lambda: pictures(18),
    "resnet-50": lambda: pictures(50),
    "silero-vad": speech,
    "smollm2, 2 layers": language,
    "attention": heads,
    "rms norm": norms,
}


def timed(function: Callable[..., Any], given: list[Any]) -> float:
    """Seconds of a run on this CPU, the median of some."""
    jitted = tg.jit(function)

    def run() -> float:
        start = time.perf_counter()
        found = jitted(*given)
        for one in found if isinstance(found, tuple) else (found,):
            one.numpy()
        return time.perf_counter() - start

    run()
    return statistics.median(run() for _ in range(5))


def rows(name: str, chips: list[str], clock: float, watts: float) -> list[dict[str, Any]]:
    """The lines of a network, printed."""
    case = CASES[name]()
    if isinstance(case, str):
        print(f"| {name} | left out: {case} |")
        return [{"network": name, "left_out": case}]
    function, given = case
    flops, made = 0.0, []
    for chip in chips:
        found = tg.placement(function, *given, device=tg.device("npu", chip=chip))
        flops = found.flops
        totals = {what: found.total(what) for what in ("cycles", "seconds", "energy")}
        shares = {"host_share": found.host_share, "utilisation": found.utilisation}
        made.append({"network": name, "on": chip, **totals, **shares})
    seconds, peak = (
        timed(function, given),
        target_for("cpu").flops["int8"] * target_for("cpu").cores,
    )
    made.append(
        {
            "network": name,
            "on": "CPU, measured",
            "cycles": seconds * clock * 1e9,
            "seconds": seconds,
            "energy": seconds * watts,
            "utilisation": flops / (seconds * peak),
        }
    )
    for one in made:
        host = f"{100 * one['host_share']:.1f}% " if "host_share" in one else ""
        print(
            f"| {name} | {one['on']} | {host}| {one['cycles']:,.0f} | {1e3 * one['seconds']:.3g} | "
            f"{1e3 * one['energy']:.3g} | {100 * one['utilisation']:.0f}% |"
        )
    return made


def speed() -> list[dict[str, Any]]:
    """Multiplications a second that the register level simulates at 16 x 16."""
    made: list[dict[str, Any]] = []
    for element, port in (("int8", 16), ("bf16", 32)):
        for flow in ("ws", "os"):
            p = Parameters(dataflow=flow, element=element, dma_bytes=port, dram_bandwidth=port)
            m, n, k = 1024, 64, 256
            kind = np.int8 if element == "int8" else np.uint16
            shapes = ((m, k), (k, n))
            operands = [RNG.integers(-100, 100, s).astype(np.int8).astype(kind) for s in shapes]
            if element == "bf16":  # bits of numbers near 1
                operands = [(RNG.integers(0, 128, s) + 0x3F80).astype(kind) for s in shapes]
            start = time.process_time()
            _, cycles = Product(p, m, n, k).run(*operands)
            spent = time.process_time() - start
            print(
                f"{element} {flow}: {cycles:,} cycles, {cycles / spent:,.0f} a second, "
                f"{m * n * k / spent / 1e6:.2f} M MAC/s"
            )
            found = {"cycles": cycles, "seconds": spent, "macs_per_second": m * n * k / spent}
            made.append({"element": element, "dataflow": flow, **found})
    return made


def main() -> None:
    """The table, or the speed of the register level."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--chips", default="16x16,edge")
    parser.add_argument("--clock", type=float, default=3.0, help="GHz of this CPU")
    parser.add_argument("--watts", type=float, default=3.0, help="of the cores that work")
    parser.add_argument("--only", default="")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    made = []
    if given.speed:
        made = speed()
    else:
        titles = "| network | on | host, of FLOPs | cycles | ms | mJ | busy |"
        print(f"{titles}\n|---|---|---|---|---|---|---|")
        for name in CASES:
            if given.only in name:
                made += rows(name, given.chips.split(","), given.clock, given.watts)
    if given.out:
        settings = {"clock_ghz": given.clock, "watts": given.watts}
        record = {"kind": "npu_table", **measure.facts(**settings), "rows": made}
        Path(given.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
