"""The Tiny Tapeout block: clean, and right on random bytes."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tilegrad.chip.rtl.tiny import FILES, TOP, info, write_tiny
from tilegrad.chip.rtl.verify import LINTERS, lint, missing


@pytest.mark.parametrize("tool", LINTERS)
def test_front_ends_are_silent(tool: str, tmp_path: Path) -> None:
    gone = missing(LINTERS)
    if tool in gone:
        pytest.skip(f"{tool} is not installed: {gone[tool]}")
    assert lint(tool, write_tiny(tmp_path), TOP) == []


def test_the_info_names_every_pin_and_file() -> None:
    text = info()
    assert all(f'- "{name}"' in text for name in FILES) and TOP in text
    assert all(f"  {p}[{i}]: " in text for p in ("ui", "uo", "uio") for i in range(8))


def bench(steps: list[tuple[int, int]]) -> str:
    """A testbench that applies (command, byte) a cycle and prints both sums at the end."""
    lines = [f"    ui = {byte}; uio = {command}; #10;" for command, byte in steps]
    shows = [f'    uio = {i << 3}; #1; $display("%0d", uo);' for i in range(8)]
    return "\n".join(
        [
            "`timescale 1ns/1ns\nmodule bench;",
            "  reg clk = 0; always #5 clk = !clk;",
            "  reg rst_n = 0; reg [7:0] ui = 0, uio = 0; wire [7:0] uo, a, b;",
            f"  {TOP} dut (.ui_in(ui), .uo_out(uo), .uio_in(uio), .uio_out(a), .uio_oe(b),",
            "    .ena(1'b1), .clk(clk), .rst_n(rst_n));",
            "  initial begin\n    #20; rst_n = 1;",
            *lines,
            "    uio = 0; ui = 0; #20;",
            *shows,
            "    $finish;\n  end\nendmodule",
        ]
    )


def test_sums_of_random_bytes(tmp_path: Path) -> None:
    if shutil.which("iverilog") is None:
        pytest.skip(f"iverilog is not installed: {LINTERS['iverilog']}")
    r = random.Random(0)
    weights = [r.randrange(-128, 128), r.randrange(-128, 128)]
    data = [r.randrange(-128, 128) for _ in range(40)]
    steps = [(3, 99), (0, 0), (4, 0), (1, weights[0] & 255), (2, weights[1] & 255)]
    steps += [(3, x & 255) for x in data]
    files = write_tiny(tmp_path)
    (tmp_path / "bench.sv").write_text(bench(steps))
    out = tmp_path / "bench.vvp"
    command = ["iverilog", "-g2012", "-o", str(out), *map(str, files), str(tmp_path / "bench.sv")]
    subprocess.run(command, check=True, timeout=120)
    made = subprocess.run(
        ["vvp", str(out)], capture_output=True, text=True, timeout=120, check=True
    )
    found = bytes(int(x) for x in made.stdout.split()[:8])
    sums = [int.from_bytes(found[i : i + 4], "little", signed=True) for i in (0, 4)]
    assert sums == [w * sum(data) for w in weights]
