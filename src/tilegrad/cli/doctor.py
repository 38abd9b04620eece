"""What this machine has, what is missing, and whether a kernel compiles and runs.

Invariant: examining changes nothing but the cache of compiled programs, and never fails for a
missing optional part.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
import time
from importlib import metadata
from typing import Any

import numpy as np

from ..core.config import config
from ..core.errors import TilegradError, UserError

EXTRAS = {
    "cuda": "NVIDIA GPUs",
    "chip": "RTL of chips: simulation and lint",
    "serve": "the server, its router and its load",
    "ray": "replicas of a server on several machines",
    "peers": "comparison with PyTorch",
    "test": "running the tests",
}
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?P<rest>[^;]*);.*extra == ['\"](?P<extra>\w+)['\"]")
OLDER = re.compile(r"python_version < ['\"](\d+)\.(\d+)['\"]")
SETS = (
    "avx2",
    "avx512f",
    "avx512bf16",
    "avx512vnni",
    "avx512fp16",
    "amx-bf16",
    "amx-int8",
    "neon",
    "dotprod",
    "i8mm",
    "sve",
)


def examine(console: Any) -> bool:
    """Print all findings; whether the self-test passed."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (*machine_lines(), ("cache", cache_line())):
        table.add_row(Text(name, style="bold"), Text(value))
    console.print(table)
    console.print()
    extras = Table("extra", "for", "state", box=None, pad_edge=False)
    for name, meaning in EXTRAS.items():
        extras.add_row(name, meaning, Text(extra_line(name)))
    console.print(extras)
    console.print()
    good, line = self_test()
    console.print(Text.assemble(("self-test", "bold"), f" {line}"))
    return good


def machine_lines() -> list[tuple[str, str]]:
    """(name, value) facts of the machine and of the installation."""
    found = [("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    packages = ("tilegrad", "numpy", "ml_dtypes", "llvmlite")
    found.append(("packages", ", ".join(f"{p} {_version_of(p)}" for p in packages)))
    try:
        from ..targets.llvm.target import host_target

        target = host_target()
        words = {w[1:] for w in target.features.split(",") if w[:1] == "+"}
        sets = [s for s in SETS if s in words]
        found.append(("cpu", f"{target.cpu}: {', '.join(sets) or 'base set only'}"))
    except TilegradError as error:
        found.append(("cpu", f"could not be examined: {error}"))
    found.append(("gpu", gpu_line()))
    found.append(("threads", f"{config().threads} (TILEGRAD_THREADS changes it)"))
    found.append(("memory", _memory_line()))
    return found


def gpu_line() -> str:
    """The NVIDIA GPUs that can be used, or why there are none."""
    from ..targets.ptx.context import devices
    from ..targets.ptx.cuda_api import api

    if importlib.util.find_spec("cuda") is None:
        return "none: cuda-bindings is not installed"
    try:
        api()
        found = [
            f"cuda:{d['number']} {d['name']}, {d['total_memory'] / 2**30:.0f} GiB"
            for d in devices()
        ]
    except TilegradError as error:
        return f"none: {error.got}" if isinstance(error, UserError) else f"none: {error}"
    return ", ".join(found) or "none"


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _memory_line() -> str:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        whole, free = (page * os.sysconf(n) for n in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{whole / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"


def cache_line() -> str:
    """Where the cache of compiled programs is, and how full."""
    from ..runtime.store import default_store

    folder = config().cache_folder
    if not folder:
        return "off (TILEGRAD_CACHE is empty)"
    size, cap = default_store().size(), config().cache_bytes
    return f"{folder}: {size / 2**20:.1f} of at most {cap / 2**20:.0f} MiB"


def _asked(requirement: str) -> bool:
    """Whether this Python is among those that a requirement is for."""
    below = OLDER.search(requirement)
    return below is None or sys.version_info[:2] < (int(below[1]), int(below[2]))


def extra_line(extra: str) -> str:
    """Whether what an extra asks for is here, or what brings it."""
    try:
        asked = [REQUIREMENT.match(text) for text in metadata.requires("tilegrad") or ()]
    except metadata.PackageNotFoundError:
        return "unknown: tilegrad itself is not installed"
    missing = [
        f'"{one["name"]}{one["rest"].strip()}"'
        for one in asked
        if one
        and one["extra"] == extra
        and _asked(one[0])
        and _version_of(one["name"]) == "missing"
    ]
    return f"missing: pip install {' '.join(missing)}" if missing else "here"


def self_test() -> tuple[bool, str]:
    """Compile and run (a * b + c).sum() and a matmul; (passed, what to print)."""
    from ..tensor.jit import jit
    from ..tensor.tensor import Tensor

    random = np.random.default_rng(0)
    a, b, c = (random.standard_normal((64, 64)).astype(np.float32) for _ in range(3))
    start = time.perf_counter()
    try:
        run = jit(lambda a, b, c: ((a * b + c).sum(), a @ b))
        total, product = run(Tensor(a), Tensor(b), Tensor(c))
        seconds = time.perf_counter() - start
        right = np.isclose(float(total), (a * b + c).sum(), rtol=1e-3, atol=1e-2)
        right = right and np.allclose(product.numpy(), a @ b, atol=1e-3)
    except TilegradError as error:
        return False, f"failed: {error}"
    if not right:
        return False, "failed: the numbers are wrong (please report this)"
    return True, f"passed: two kernels compiled and ran in {seconds:.2f} s"


__all__ = ["examine", "extra_line", "machine_lines", "self_test"]
