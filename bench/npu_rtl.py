"""Compares the NPU's RTL with its simulator in every cycle, over many chips; prints what was equal.

python bench/npu_rtl.py --seeds 20 [--simulator icarus] [--only "16x16"] [--json FILE]

`--simulator verilator` is live under cocotb: Debian's Verilator 5.006 with cocotb 1.9.2, newer ones
with cocotb 2. A chip is built once for all its programs; ccache is used where it is installed. The
file keeps what earlier runs of other chips wrote, and what it took: seconds of the clock and of
the processor (of all processes).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "chip"), str(ROOT / "tests" / "targets"), str(ROOT / "src")]
from npu_programs import small  # noqa: E402
from rtl_run import lockstep, why_not  # noqa: E402

ELEMENTS = (
    ("int8", "int8"),
    ("bf16", "bf16"),
    ("int8", "int4"),
    ("bf16", "fp8"),
    ("fp16", "fp8"),
)
SIZES = {"4x4": (4, 4, 2), "3x5": (3, 5, 5), "8x8": (8, 8, 4), "16x16": (16, 16, 4)}


def chips() -> dict[str, object]:
    """Every dataflow, all elements and weights, dense and 2:4, at each size."""
    made = {}
    for size, (rows, columns, lanes) in SIZES.items():
        for flow in ("ws", "os", "is"):
            for element, weights in ELEMENTS:
                for sparse in (False, True):
                    if sparse and rows % 2:
                        continue
                    both = element if weights == element else f"{element} x {weights}"
                    name = f"{size} {flow} {both} {'2:4' if sparse else 'dense'}"
                    made[name] = small(
                        rows=rows,
                        columns=columns,
                        lanes=lanes,
                        dataflow=flow,
                        element=element,
                        weights=weights,
                        sparse=sparse,
                        stochastic=sparse,
                        accumulator_rows=64,
                    )
    return made


def main() -> None:
    """One line a chip; ends with 1 where one differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--simulator", default="icarus")
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if why_not(given.simulator):
        sys.exit(why_not(given.simulator))
    known = given.json.exists() if given.json else False
    found_before = json.loads(given.json.read_text())["chips"] if known else {}
    bad = 0
    for name, p in chips().items():
        if not re.search(given.only, name):
            continue
        start, busy = time.time(), sum(os.times()[:4])
        with tempfile.TemporaryDirectory() as folder:
            found = lockstep(p, range(given.seeds), Path(folder), given.simulator)
            log = (Path(folder) / "test.log").read_text()
        bad += bool(found)
        said = next((x.split("INFO")[1] for x in log.splitlines() if "are equal" in x), found)
        said = said[said.find(next((w for w in said.split() if w.isdigit()), "")) :].strip()
        seconds, work = time.time() - start, sum(os.times()[:4]) - busy
        print(f"{name:28} {said} ({seconds:.0f} s)", flush=True)
        if given.json:
            cycles = int(said.split()[0]) if not found else 0
            one = {"equal": not found, "cycles": cycles, "programs": given.seeds}
            one |= {"machine": platform.machine(), "seconds": round(seconds), "cpu": round(work)}
            found_before[f"{given.simulator} {name}"] = one
            table = {"command": "python bench/npu_rtl.py", "chips": found_before}
            given.json.write_text(json.dumps(table, indent=1) + "\n")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
