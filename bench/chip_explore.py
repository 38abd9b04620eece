"""Mappings a second that the explorer costs on one core, and ResNet-50 on seven NVDLAs.

    python bench/chip_explore.py            all
    python bench/chip_explore.py --rate     Mappings a second alone
    python bench/chip_explore.py --json F   also write what was measured

The rate is of `cost` (accesses, energy, cycles of every Level and Operand) on random Mappings of a
7-loop convolution over three Levels, in process time, so that other programs do not count. It must
be at least 100,000. A search of all of ResNet-50's 54 products (24 that differ) may take two
minutes of this process; its frames a second must lie between those of NVDLA's primer and 2.2 times
as many.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from tilegrad.chip.explore import convolution, cost
from tilegrad.chip.explore.dataflow import dataflow
from tilegrad.chip.explore.presets import NVDLA, eyeriss_energy, nvdla
from tilegrad.chip.explore.search import CHUNK
from tilegrad.chip.explore.space import Space
from tilegrad.chip.mapped import map_network
from tilegrad.chip.networks import resnet_50

BAR, SECONDS, MOST = 100_000, 120.0, 2.2
ROUNDS, BATCHES = 7, 20


def rate() -> float:
    """Mappings a second: the median of some rounds."""
    problem = convolution(N=16, M=384, C=256, P=13, Q=13, R=3, S=3)
    space = Space(problem, eyeriss_energy(), dataflow("any"))
    random = np.random.default_rng(0)
    picks = np.stack([random.integers(0, len(c), CHUNK) for c in space.chains.values()], axis=1)
    many = space.mappings(picks, (problem.loops,) * 3)
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(BATCHES):
            cost(problem, space.accelerator, many)
        found.append(BATCHES * CHUNK / (time.process_time() - start))
    return sorted(found)[ROUNDS // 2]


def networks() -> list[dict[str, Any]]:
    """ResNet-50 on the seven NVDLAs of the primer."""
    network = resnet_50().with_bits(8)
    rows = []
    for multipliers, (*_, published) in NVDLA.items():
        start = time.process_time()
        found = map_network(network, nvdla(multipliers), "nvdla", objective="cycles")
        seconds, frames = time.process_time() - start, 1 / found.seconds
        row = {
            "multipliers": multipliers,
            "frames_per_second": frames,
            "published": published,
            "utilisation": found.utilisation,
            "mappings": found.seen,
            "search_seconds": seconds,
            "good": published <= frames <= MOST * published and seconds <= SECONDS,
        }
        rows.append(row)
        print(
            f"{multipliers:5} multipliers: {frames:6.1f} frames/s ({published:.1f} published), "
            f"{100 * found.utilisation:.0f}% busy, {found.seen:,} Mappings, {seconds:.1f} s: "
            f"{row['good']}",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = rate()
    print(f"{found:,.0f} Mappings a second, at least {BAR:,} asked: {found >= BAR}", flush=True)
    record: dict[str, Any] = {"machine": platform.machine(), "mappings_per_second": found}
    if not options.rate:
        record["resnet_50"] = networks()
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
