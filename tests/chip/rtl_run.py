"""Runs the lockstep bench of an NPU's RTL: emit, build, and compare by cocotb."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilegrad.chip.rtl.emit import write
from tilegrad.targets.npu.parameters import Parameters

HERE = Path(__file__).resolve().parent


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
    options = {"icarus": ["-g2012"], "verilator": ["-Wno-fatal", "-CFLAGS", "-std=c++20"]}
    runner.build(
        sources=files,
        hdl_toplevel="npu_top",
        build_dir=folder / "build",
        build_args=options[simulator],
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


__all__ = ["lockstep", "why_not"]
