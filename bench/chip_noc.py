"""An 8 x 8 mesh against BookSim's figures: latency by rate, and where it saturates.

    python bench/chip_noc.py [--json FILE]

Uniform traffic, packets of one flit, 8 virtual channels of 8 flits. BookSim2 gives 26.9 cycles
when idle, 27.2 at 0.1 flits a cycle, 27.9 at 0.2, 29.4 at 0.3, 38.7 at 0.4, and saturates at 0.425;
an idle 4 x 4 mesh takes 16.0 cycles.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from tilegrad.chip.noc import Network, measure, mesh, saturation

BOOKSIM = {0.1: 27.2, 0.2: 27.9, 0.3: 29.4, 0.4: 38.7}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record: dict[str, object] = {}
    for side, idle in ((4, 16.0), (8, 26.9)):
        found = mesh(side, side).zero_load()
        record[f"idle_{side}x{side}"] = {"ours": found, "booksim": idle}
        print(f"idle {side} x {side}: {found:.2f} cycles, BookSim {idle}")
    network = Network(mesh(8, 8))
    start = time.process_time()
    for rate, published in BOOKSIM.items():
        latency = measure(network, rate, cycles=6000, warm=2000).latency
        record[f"latency_{rate}"] = {"ours": latency, "booksim": published}
        print(f"rate {rate}: {latency:.1f} cycles, BookSim {published}", flush=True)
    rate = saturation(network, cycles=6000)
    record["saturation"] = {"ours": rate, "booksim": 0.425}
    record["seconds"] = time.process_time() - start
    print(f"saturates at {rate:.3f}, BookSim 0.425; {record['seconds']:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
