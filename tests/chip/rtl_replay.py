"""Replays what a lockstep run showed at the ports of an NPU through Verilator, with coverage."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from rtl_run import lockstep, ports

from tilegrad.chip.rtl.coverage import Coverage, read
from tilegrad.targets.npu.parameters import Parameters

MAIN = """#include "Vnpu_top.h"
#include "verilated.h"
#include "verilated_cov.h"
#include <fstream>
#include <iostream>
#include <string>
// Each line of the trace: what every port shows before an edge; '-' where it is not known.
static bool wrong = false;
static void compare(const std::string& word, unsigned long long found, const char* name, long at) {
    if (word == "-" || std::stoull(word, nullptr, 16) == found || wrong) return;
    std::cout << name << " cycle " << at << ": " << std::hex << found << " " << word << std::endl;
    wrong = true;
}
int main(int argc, char** argv) {
    VerilatedContext context;
    Vnpu_top top{&context};
    std::ifstream trace(argv[1]);
    std::string word;
    long at = 0;
    while (trace >> word) {
        top.clk = 1;
        top.eval();
%(read)s
        top.clk = 0;
        top.eval();
%(compare)s
        ++at;
    }
    top.final();
    context.coveragep()->write("coverage.dat");
    if (!wrong) std::cout << at << " cycles are equal" << std::endl;
    return wrong;
}
"""


def main_text() -> str:
    """The C++ that replays a trace."""
    lines, checks = [], []
    for i, (direction, name) in enumerate(ports()):
        step = "" if i == 0 else "        trace >> word; "
        if direction == "input":
            lines.append(f'{step}if (word != "-") top.{name} = std::stoull(word, nullptr, 16);')
        else:
            lines.append(f"{step}std::string o_{name} = word;")
            checks.append(f'compare(o_{name}, top.{name}, "{name}", at);')
    return MAIN % {"read": "\n".join(lines), "compare": "\n".join(checks)}


def why_not() -> str:
    """What is missing for a replay."""
    gone = [tool for tool in ("verilator", "make", "c++") if shutil.which(tool) is None]
    return f"not installed: {', '.join(gone)}" if gone else ""


def replay(p: Parameters, seeds: list[int], folder: Path) -> tuple[str, Coverage]:
    """Records programs in lockstep, then runs them through Verilator: what it said, coverage."""
    assert p.dma_bytes <= 8, "ports of at most 64 bits"
    trace = folder / "trace.txt"
    found = lockstep(p, seeds, folder, trace=trace)
    assert found == "", found
    (folder / "main.cpp").write_text(main_text())
    sources = sorted((folder / "rtl").glob("*.sv"), key=lambda f: f.name != "npu_words.sv")
    command = ["verilator", "--cc", "--exe", "--build", "-j", "2", "--coverage-line"]
    command += ["-Wno-fatal", "--top-module", "npu_top", "-CFLAGS", "-O0"]
    command += [*map(str, sources), "main.cpp"]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr[-3000:]
    run = [str(folder / "obj_dir" / "Vnpu_top"), str(trace)]
    ran = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=600)
    return ran.stdout.strip(), read([folder / "coverage.dat"])


__all__ = ["replay", "why_not"]
