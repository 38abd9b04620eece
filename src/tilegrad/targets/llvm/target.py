"""The Target of this computer: instruction sets by running them, sizes from the system.

The probes (`probe.py`) run in a child process, so a set that the flags promise but the machine
does not have costs a child, not us. What they found is kept in the Store.

Invariant: `host_target()` names no instruction set of x86 that did not run here, none of ARM that
neither Linux names nor every such CPU has, and no AMX unless this process has leave to use it; it
is the same object for the life of the process.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import re
import sys
from typing import Any

from ...core.config import cpu_flags, usable_cores
from ...core.target import GIB, Target, cpu_target
from ...runtime.store import content_key, default_store
from .driver import llvm, llvm_version, request_amx
from .probe import PROBES
from .probe import VERSION as PROBE_VERSION

LOG = logging.getLogger("tilegrad.target")
ARM_FEATURES = {"dotprod": "asimddp", "i8mm": "i8mm"}  # products of four bytes
PROBE_SECONDS = 20.0
# The LLVM features that each probe vouches for.
VOUCHED = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx512bf16": ("avx512bf16",),
    "avx512vnni": ("avx512vnni",),
    "avx512fp16": ("avx512fp16",),
    "amx-bf16": ("amx-tile", "amx-bf16"),
    "amx-int8": ("amx-tile", "amx-int8"),
}


@functools.cache
def host_target() -> Target:
    """The Target of this computer."""
    store = default_store()
    key = content_key("host", PROBE_VERSION, llvm_version(), _cpu_identity())
    record = _parsed(store.get(key))
    if record is None:
        record = find_host()
        store.put(key, json.dumps(record).encode())
    return host_from(record, amx_allowed=request_amx())


def find_host() -> dict[str, Any]:
    """What LLVM says of this CPU, its features put right by the probes."""
    binding = llvm()
    features = {name: bool(on) for name, on in binding.get_host_cpu_features().items()}
    if os.uname().machine == "x86_64":
        claimed = [n for n in PROBES if all(features.get(f) for f in VOUCHED[n])]
        proved = probe(claimed)
        for name in set(PROBES) - proved:
            for feature in set(VOUCHED[name]) - {"amx-tile"}:
                features[feature] = False
        if "avx512" not in proved:  # nothing that builds on it may stay
            features |= {f: False for f in features if f.startswith("avx512")}
        features["amx-tile"] = bool(proved & {"amx-bf16", "amx-int8"})
    elif os.uname().machine == "aarch64":  # LLVM leaves out what Linux says
        flags = cpu_flags()
        features |= {name: flag in flags for name, flag in ARM_FEATURES.items()}
        features.setdefault("neon", True)  # every one has it, where nobody says
    return {
        "cpu": binding.get_host_cpu_name(),
        "triple": binding.get_process_triple(),
        "features": features,
    }


def host_from(record: dict[str, Any], amx_allowed: bool) -> Target:
    """The Target that a record of `find_host` describes."""
    features = dict(record["features"])
    if not amx_allowed:
        features |= {name: False for name in features if name.startswith("amx")}
    if features.get("avx512f"):
        vector_bytes, registers = 64, 32
    elif features.get("avx2"):
        vector_bytes, registers = 32, 16
    else:
        vector_bytes, registers = 16, 32 if features.get("neon") else 16
    words = [f"{'+' if on else '-'}{name}" for name, on in sorted(features.items())]
    if features.get("avx512f"):
        words.append("-prefer-256-bit")  # whole 512-bit registers
    return cpu_target(
        "host",
        triple=record["triple"],
        cpu=record["cpu"],
        features=",".join(words),
        vector_bytes=vector_bytes,
        vector_registers=registers,
        cores=usable_cores(),
        hertz=_hertz(),
        caches=cache_sizes(),
        memory_bytes=_memory_bytes(),
    )


def probe(names: list[str]) -> set[str]:
    """The probes among `names` that pass, each run in a child process."""
    import subprocess

    proved: set[str] = set()
    left = list(names)
    spec = importlib.util.find_spec("llvmlite")
    if not sys.executable or spec is None or spec.origin is None:
        LOG.warning("no Python to start: the CPU's flags are trusted")
        return set(names) - {"amx-bf16", "amx-int8"}
    folder = os.path.dirname(os.path.dirname(spec.origin))
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "probe.py")
    while left:
        command = [sys.executable, "-I", "-S", script, folder, *left]
        try:
            found = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PROBE_SECONDS,
                check=False,
            )
            lines = found.stdout.split("\n")
        except (OSError, subprocess.SubprocessError) as error:
            LOG.warning("probe failed (%s); going on without %s", error, left)
            return proved
        answers = [line.split() for line in lines if line]
        proved |= {name for name, good in answers if good == "1"}
        if len(answers) < len(left):
            LOG.info("the CPU claims %s but it does not run", left[len(answers)])
        left = left[len(answers) + 1 :]
    return proved


def cache_sizes() -> dict[str, int]:
    """Bytes of the data caches as {'l1': ..., 'l2': ..., 'l3': ...}, where the system says."""
    sizes: dict[str, int] = {}
    root = "/sys/devices/system/cpu/cpu0/cache"
    for number in range(8):
        kind = _read(f"{root}/index{number}/type")
        if kind is None:
            break
        level, text = _read(f"{root}/index{number}/level"), _read(f"{root}/index{number}/size")
        match = re.match(r"(\d+)([KM]?)", text or "")
        if kind != "Instruction" and level and match:
            scale = {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]]
            sizes[f"l{level}"] = int(match[1]) * scale
    return {name: size for name, size in sizes.items() if size > 0}


def _cpu_identity() -> str:
    """The CPU's model and flags; only the first core is read, the file may be long."""
    try:
        with open("/proc/cpuinfo") as file:
            text = file.read(8192)
    except OSError:
        return " ".join(os.uname())
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")
    first = text.split("\n\n")[0].split("\n")
    return "\n".join(line for line in first if line.split("\t")[0].split(":")[0] in wanted)


def _hertz() -> float:
    """A guess at the clock under vector load: the base clock the CPU names, else 2.5 GHz."""
    text = _read("/sys/devices/system/cpu/cpu0/cpufreq/base_frequency")
    return float(text) * 1e3 if text and text.isdigit() else 2.5e9


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 16 * GIB


def _read(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def _parsed(data: bytes | None) -> dict[str, Any] | None:
    if data is None:
        return None
    try:
        record = json.loads(data)
        return record if {"cpu", "triple", "features"} <= set(record) else None
    except ValueError:
        return None
