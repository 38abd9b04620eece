"""Runs the lockstep bench of an NPU's RTL: emit, build, and compare by cocotb."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilegrad.chip.rtl.emit import SOURCES, write
from tilegrad.targets.npu.parameters import Parameters

HERE = Path(__file__).resolve().parent
# What the bench reads inside the design, by module; Verilator keeps these and the ports alone.
SHOWN = {
    "npu_top": (
        *("pc", "front_state", "tokens", "waiting", "states", "finished"),
        *("scratch_write", "scratch_row", "scratch_d", "sum_write", "sum_write_row"),
    ),
    "npu_mesh": ("sums", "inputs", "still", "index"),
    "npu_accumulator": ("data",),
}
PORT = re.compile(r"^\s*(input|output)\s+logic\s+(?:\[[^\]]*\]\s+)?(\w+)", re.MULTILINE)


def why_not(simulator: str = "icarus") -> str:
    """What is missing for a lockstep run."""
    if importlib.util.find_spec("cocotb") is None:
        return "cocotb is not installed: pip install cocotb"
    if shutil.which({"icarus": "iverilog"}.get(simulator, simulator)) is None:
        return f"{simulator} is not installed: apt-get install iverilog verilator"
    return ""


def runner_of() -> Callable[[str], Any]:
    """cocotb's runner; Debian's Verilator 5.006 is known to cocotb 1.9, not to 2."""
    newer = int(importlib.metadata.version("cocotb").split(".")[0]) >= 2
    module = importlib.import_module("cocotb_tools.runner" if newer else "cocotb.runner")
    return module.get_runner  # type: ignore[no-any-return]


def ports() -> list[tuple[str, str]]:
    """(direction, name) of the top, the clock left out."""
    text = (SOURCES / "npu_top.sv").read_text()
    return [(d, n) for d, n in PORT.findall(text.split(");")[0]) if n != "clk"]


def verilator_options(folder: Path) -> list[str]:
    """Arguments of a quick build. cocotb's runner makes every signal public, which forbids most of
    what Verilator would simplify: a 16 x 16 mesh then takes several times as long to compile."""
    lines = ["`verilator_config"]
    for name in ("clk", *(name for _, name in ports())):
        lines.append(f'public_flat_rw -module "npu_top" -var "{name}"')
    for module, names in SHOWN.items():
        lines += [f'public_flat_rd -module "{module}" -var "{name}"' for name in names]
    shown = folder / "shown.vlt"
    shown.write_text("\n".join(lines) + "\n")
    words = "-std=c++20 -DVL_VALUE_STRING_MAX_WORDS=2048"  # registers of a mesh are one vector
    return ["-Wno-fatal", "-Wno-lint", "--no-public-flat-rw", "-CFLAGS", words, str(shown)]


def make_options() -> dict[str, str]:
    """What make is told: programs are short, so compiling costs more than running."""
    cached = {"OBJCACHE": "ccache"} if shutil.which("ccache") else {}
    return {"MAKEFLAGS": " -- OPT_FAST=-O0 OPT_SLOW=-O0 OPT_GLOBAL=-O1", **cached}


def lockstep(
    p: Parameters,
    seeds: Sequence[int],
    folder: Path,
    simulator: str = "icarus",
    change: Callable[[Path], None] | None = None,
    stalls: int | None = None,
    trace: Path | None = None,
) -> str:
    """Compares random programs; the first difference, or nothing. A trace gets what all ports of
    the top show in every cycle."""
    get_runner = runner_of()
    files = write(p, folder / "rtl")
    if change is not None:
        change(folder / "rtl")
    given = folder / "given.json"
    table = {"parameters": p.to_table(), "seeds": list(seeds), "stalls": stalls}
    table["trace"] = str(trace) if trace else ""
    given.write_text(json.dumps(table))
    for path in (HERE, HERE.parent / "targets"):  # the runner hands sys.path on
        if str(path) not in sys.path:
            sys.path.append(str(path))
    runner = get_runner(simulator)
    live = simulator == "verilator"
    os.environ.update(make_options() if live else {})
    runner.build(
        sources=files,
        hdl_toplevel="npu_top",
        build_dir=folder / "build",
        build_args=verilator_options(folder) if live else ["-g2012"],
        timescale=("1ns", "1ps"),
        log_file=folder / "build.log",
    )
    log = folder / "test.log"
    try:
        runner.test(
            hdl_toplevel="npu_top",
            test_module="npu_lockstep",
            build_dir=folder / "build",
            test_dir=folder / "build",
            extra_env={"NPU_LOCKSTEP": str(given)},
            log_file=log,
        )
    except SystemExit:  # how the runner says that a test failed
        pass
    else:
        if "programs are equal" in log.read_text():
            return ""
    lines = [x.strip() for x in log.read_text().splitlines()]
    return next((x for x in lines if "seed " in x and "Error" in x), "\n".join(lines[-40:]))


__all__ = ["lockstep", "ports", "why_not"]
