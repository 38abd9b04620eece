"""Assemble PTX ahead of time: ptxas makes a cubin and says what each entry uses.

Without ptxas the driver can still take the text itself, so a missing one is an error only here.
What was assembled is kept in the Store by text, architecture and version of ptxas.

Invariant: an `Assembly` from the Store equals the one ptxas would make, reports and warnings
included; every note of ptxas about a wgmma pipeline (C75xx) is among the warnings.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...core.errors import InternalError, UserError
from ...runtime.store import content_key, default_store

FORMAT = "cubin-3"  # changes with what an entry of the Store holds
SECONDS = 600.0
OPTIONS = ("-v", "-O3")
WHEELS = ("cu13/bin/ptxas", "cuda_nvcc/bin/ptxas")  # where NVIDIA's wheels put it
LENGTH = struct.Struct("<Q")
BLOCKS = (1, 4, 2)  # of a processor, that a text which spills is given room for in turn
_BOUNDED = re.compile(r"\.(minnctapersm|maxnreg)\b")
_THREADS = re.compile(r"^(\.maxntid [^\n]*)$", re.M)


@dataclass(frozen=True)
class Report:
    """What ptxas says one entry uses: registers of a thread, bytes, named barriers."""

    registers: int = 0
    stack_bytes: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared_bytes: int = 0
    constant_bytes: int = 0
    barriers: int = 0

    @property
    def spills(self) -> bool:
        """Whether values are kept in a stack frame."""
        return bool(self.stack_bytes or self.spill_stores or self.spill_loads)


@dataclass(frozen=True)
class Assembly:
    """Machine code of one text, with a Report of every entry and the warnings of ptxas."""

    cubin: bytes
    reports: dict[str, Report] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def spills(self) -> bool:
        """Whether some entry keeps values in a stack frame."""
        return any(report.spills for report in self.reports.values())

    def check_library(self, name: str) -> None:
        """Raise InternalError when kernel `name` spills, has a stack frame or stalls wgmma."""
        faults = [w for w in self.warnings if re.match(r"C75\d\d: ", w)]
        for entry, report in self.reports.items():
            if report.spills:
                faults.append(
                    f"{entry} has a stack frame of {report.stack_bytes} bytes, spills"
                    f" {report.spill_stores} bytes and loads back {report.spill_loads}"
                )
        if faults:
            raise InternalError("ptx.assemble", f"kernel {name}: " + "; ".join(faults))


def find_ptxas() -> Path | None:
    """The ptxas on the PATH, else that of an installed wheel, else None."""
    found = shutil.which("ptxas")
    return Path(found) if found else _wheel_ptxas()


@functools.cache
def _wheel_ptxas() -> Path | None:
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for place in WHEELS:
            found = shutil.which(str(Path(folder) / place))
            if found:
                return Path(found)
    return None


@functools.cache
def _version(ptxas: Path) -> str:
    """The version of a ptxas, such as '13.0.88'."""
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"\bV(\d+(?:\.\d+)+)", said)
    if not found:
        raise InternalError("ptx.assemble", f"ptxas does not say its version: {said!r}")
    return found[1]


def assemble(text: str, arch: str = "sm_90a") -> Assembly:
    """The Assembly of a PTX text for `arch`; InternalError with ptxas' words where it fails."""
    ptxas = find_ptxas()
    if ptxas is None:
        raise UserError(
            "no ptxas here to assemble PTX",
            expected="ptxas on the PATH or in a wheel",
            hint="pip install 'nvidia-cuda-nvcc==13.0.*'",
        )
    store = default_store()
    key = content_key(FORMAT, text, arch, _version(ptxas), *OPTIONS)
    kept = _unpacked(store.get(key))
    if kept is not None:
        return kept
    made = _run(ptxas, text, arch)
    if made.spills and _BOUNDED.search(text) is None:
        # ptxas then aims at an occupancy of its own, and pays for it with spills
        others = (_run(ptxas, _THREADS.sub(rf"\1\n.minnctapersm {n}", text), arch) for n in BLOCKS)
        made = next((other for other in others if not other.spills), made)
    store.put(key, _packed(made))
    return made


def _run(ptxas: Path, text: str, arch: str) -> Assembly:
    with tempfile.TemporaryDirectory(prefix="tilegrad-ptx-") as folder:
        source, result = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        command = [str(ptxas), *OPTIONS, "-arch", arch, source.name, "-o", result.name]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InternalError("ptx.assemble", f"ptxas did not finish: {error}") from error
        said = done.stdout + done.stderr
        if done.returncode or not result.exists():
            raise InternalError("ptx.assemble", _failure(text, said, done.returncode))
        return Assembly(result.read_bytes(), reports_of(said), warnings_of(said))


def _failure(text: str, said: str, code: int) -> str:
    """What ptxas said, and under it the lines of the text that it names."""
    lines = text.splitlines()
    named = dict.fromkeys(int(n) for n in re.findall(r"\bline (\d+)", said))
    quoted = [f"{n:6d} | {lines[n - 1]}" for n in named if 0 < n <= len(lines)]
    words = [line for line in said.splitlines() if "info    :" not in line and line.strip()]
    return "\n".join([f"ptxas gave {code}:", *words[:40], *quoted[:40]])


# --- what ptxas says ----------------------------------------------------------------------------

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_FACTS = {
    "stack_bytes": re.compile(r"(\d+) bytes stack frame"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
    "registers": re.compile(r"Used (\d+) registers"),
    "barriers": re.compile(r"used (\d+) barriers"),
    "shared_bytes": re.compile(r"(\d+) bytes smem"),
    "constant_bytes": re.compile(r"(\d+) bytes cmem\[\d+\]"),
}
_WARNING = re.compile(r"ptxas (?:[^;\n]*; )?(warning|info)\s*: (?:\((C\d+)\) )?(.*)")


def reports_of(said: str) -> dict[str, Report]:
    """The Report of each entry in what `ptxas -v` wrote."""
    facts: dict[str, dict[str, int]] = {}
    now: dict[str, int] | None = None
    for line in said.splitlines():
        started, properties = _ENTRY.search(line), _PROPERTIES.search(line)
        if started:
            now = facts.setdefault(started[1], {})
        elif properties:  # of a function that an entry calls: not the entry's own
            now = facts.get(properties[1])
        elif now is not None:
            for name, pattern in _FACTS.items():
                for number in pattern.findall(line):
                    now[name] = now.get(name, 0) + int(number)
    return {entry: Report(**found) for entry, found in facts.items()}


def warnings_of(said: str) -> list[str]:
    """The warnings of ptxas, and its notes that have a code, as 'C7511: what it says'."""
    found = [match for match in map(_WARNING.match, said.splitlines()) if match]
    return [
        f"{code}: {words}" if code else words
        for kind, code, words in (match.groups() for match in found)
        if code or kind == "warning"
    ]


# --- the Store ----------------------------------------------------------------------------------


def _packed(made: Assembly) -> bytes:
    reports = {entry: asdict(report) for entry, report in made.reports.items()}
    head = json.dumps({"reports": reports, "warnings": made.warnings}).encode()
    return LENGTH.pack(len(head)) + head + made.cubin


def _unpacked(data: bytes | None) -> Assembly | None:
    if data is None:
        return None
    (length,) = LENGTH.unpack_from(data)
    head = json.loads(data[LENGTH.size : LENGTH.size + length])
    reports = {entry: Report(**report) for entry, report in head["reports"].items()}
    return Assembly(data[LENGTH.size + length :], reports, head["warnings"])
