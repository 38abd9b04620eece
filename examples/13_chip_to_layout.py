"""From a parameter file to RTL and layout: one record, four views of the same chip.

The third lesson on chips. A designer changes one file and sees what follows: cycles of a product
from the simulator, SystemVerilog that equals it in every cycle, area and clock from synthesis, and
a layout. Tools from outside are optional; what is missing is named.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from tilegrad.chip.rtl.emit import write
from tilegrad.chip.rtl.verify import LINTERS, lint, missing
from tilegrad.chip.synth import tools
from tilegrad.chip.synth.flow import synthesise
from tilegrad.targets.npu.parameters import Parameters
from tilegrad.targets.npu.product import Product

folder = Path(tempfile.mkdtemp())
file = folder / "mine.json"  # or .toml
fields = {"preset": "edge", "rows": 4, "columns": 4, "dma_bytes": 4, "dram_bandwidth": 8.0}
file.write_text(json.dumps(fields))

# 1. The parameters. A field out of its bounds is an error that says what would fit.
chip = Parameters.load(file)
print(f"{chip.name}: {chip.rows} x {chip.columns} {chip.element}, {chip.dataflow}")

# 2. A product on it: every register of the chip, cycle by cycle, and the same by closed forms.
random = np.random.default_rng(0)
left, right = (random.integers(-128, 128, s).astype(np.int8) for s in ((16, 24), (24, 8)))
product = Product(chip, M=16, N=8, K=24)
found, cycles = product.run(left, right)
assert (found == left.astype(int) @ right).all() and cycles == product.cycles()
busy = 16 * 24 * 8 / (chip.peak_macs * cycles)
print(f"16 x 24 @ 24 x 8: {cycles} cycles, multipliers {busy:.0%} busy")

# 3. The same chip as SystemVerilog. Tests hold it equal to the simulator in every cycle.
files = write(chip, folder / "rtl")
lines = sum(len(f.read_text().splitlines()) for f in files)
print(f"RTL: {len(files)} files, {lines} lines")
here = [tool for tool in ("iverilog", "verilator") if tool not in missing(LINTERS)]
for tool in here:
    said = lint(tool, files)
    print(f"  {tool}: {'clean' if not said else said[0]}")

# 4. One multiplier in cells of an open library: what the clock of the parameters would need.
if tools.find("yosys") and tools.OSU018.is_file():
    made = synthesise(chip, folder / "cells", part="pe")
    print(f"a multiplier: {made.cells} cells, {made.area:,.0f} um2, {made.path.period:.2f} ns")
    many, speed = chip.peak_macs, made.megahertz
    print(f"{many} of them: {many * made.area / 1e6:.3f} mm2")
    print(
        f"at {speed:.0f} MHz: {2e-3 * many * speed:.1f} GOP/s; the file asks for {chip.clock:g} MHz"
    )
    slow = max(made.path.steps, key=lambda step: step.delay)
    print(
        f"slowest path: {len(made.path.steps)} cells, the slowest {slow.kind}, {slow.delay:.2f} ns"
    )
    print("no wires yet: a bound, no sign-off")
for name, (gives, how) in tools.missing().items():
    print(f"  {name} is not installed: it gives {gives} ({how})")

# 5. The whole chip with a report, and the layout of a 2 x 2 mesh (minutes):
print(f"tilegrad chip synth {file.name} --out made --layout")
