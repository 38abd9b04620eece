"""A person's settings: the one reader of the environment.

| variable           | means                                             | default              |
|--------------------|---------------------------------------------------|----------------------|
| TILEGRAD_THREADS   | worker threads on the CPU                         | cores we may use     |
| TILEGRAD_CACHE     | folder of compiled programs ("" turns it off)     | XDG cache / tilegrad |
| TILEGRAD_CACHE_MB  | most MiB that folder may hold                     | 2048                 |
| TILEGRAD_KEEP      | most compiled Graphs kept in memory, of each kind | 256                  |
| TILEGRAD_DEVICE    | device new tensors live on                        | cpu                  |
| TILEGRAD_CHIP      | chip of the device npu:0: a preset or a file      | 16x16                |
| TILEGRAD_LOG       | debug, info, warning or error                     | warning              |
| TILEGRAD_VERIFY    | run the IR verifiers after every pass (0 or 1)    | 1 under pytest       |
| TILEGRAD_EAGER     | run op by op with NaN guards, for debugging       | 0                    |
| TILEGRAD_MEMORY_MB | most MiB all Buffers may hold (0: no limit)       | 0                    |
| TILEGRAD_CUDA_SYNC | wait after each GPU kernel, to name one at fault  | 0                    |
| TILEGRAD_CHECKED   | guard indices of tile kernels on a GPU too        | 0                    |
| TILEGRAD_PLANS     | file of the PlanTable ("" for none: untuned)      | yours, then shipped  |
| TILEGRAD_DETERMINISM | fast, reproducible or invariant; see `Config`   | reproducible         |
| TILEGRAD_DOTS      | exact, tf32 or int8: how products round; see `Config` | exact            |
| TILEGRAD_API_KEYS  | keys of `tilegrad serve`, between commas or spaces | none                 |

`configure` sets for the whole process; within an `override` block, for that block. A block belongs
to the thread and context (an asyncio task, say) that entered it: others do not see it. Invariant: a
`Config` never changes, it is replaced. Nothing else in the package reads `os.environ`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from .errors import UserError

MOST_THREADS = 1024  # each has scratch of its own; more would take the memory, not give speed
LOG_LEVELS = ("debug", "info", "warning", "error")
LEVELS = ("reproducible", "fast", "invariant")
CHOICES = {"determinism": LEVELS, "dots": ("exact", "tf32", "int8")}


@dataclass(frozen=True)
class Config:
    """A person's settings."""

    threads: int
    cache_folder: str
    cache_bytes: int = 2048 << 20
    keep: int = 256  # compiled Graphs in memory, and as many of each jitted function
    device: str = "cpu"
    chip: str = "16x16"
    log_level: str = "warning"
    verify: bool = False
    eager_debug: bool = False
    memory_bytes: int = 0
    cuda_sync: bool = False
    checked: bool = False  # indices of tile kernels are guarded on a GPU, as they are on a CPU
    plan_table: str | None = None  # a file, "" for none; None: the person's, then the shipped
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # of clients of a server
    # fast: a sum's order may differ from run to run; reproducible: same inputs, same bits;
    # invariant: a row's bits depend neither on how many rows there are nor on what was compiled
    determinism: str = "reproducible"
    # tf32: float32 operands of products on a GPU are rounded to 10 bits; int8: on a CPU, what is
    # multiplied by quantised weights is rounded to 8 bits, with a scale for every 32 (exact: to 16)
    dots: str = "exact"

    @cached_property
    def numerics(self) -> tuple[str, ...]:
        """The settings that results depend on, in the order of `CHOICES`."""
        return tuple(getattr(self, name) for name in CHOICES)


def cpu_flags() -> set[str]:
    """What Linux says that this CPU has; empty where it does not say."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return set(value.split())
    except OSError:
        pass
    return set()


def usable_cores() -> int:
    """How many cores this process may use: its affinity, cut by a container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()[:2]
        cores = min(cores, -(-int(quota) // int(period)))
    except (OSError, ValueError):  # no control group, or the quota reads "max"
        pass
    return max(1, cores)


def environment_of_tools(folder: str) -> dict[str, str]:
    """What programs that are started have around them: they are looked for in a folder first."""
    return {**os.environ, "PATH": os.pathsep.join([folder, os.environ.get("PATH", "")])}


def read_environment(environment: Mapping[str, str]) -> Config:
    """The Config that `environment` asks for."""
    home = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    level = environment.get("TILEGRAD_LOG", "warning").lower()
    if level not in LOG_LEVELS:
        raise UserError("bad TILEGRAD_LOG", expected=", ".join(LOG_LEVELS), got=level)
    return Config(
        threads=_whole(environment, "TILEGRAD_THREADS", usable_cores(), 1, MOST_THREADS),
        cache_folder=environment.get("TILEGRAD_CACHE", os.path.join(home, "tilegrad")),
        cache_bytes=_whole(environment, "TILEGRAD_CACHE_MB", 2048) << 20,
        keep=_whole(environment, "TILEGRAD_KEEP", 256, least=1),
        device=environment.get("TILEGRAD_DEVICE", "cpu"),
        chip=environment.get("TILEGRAD_CHIP", "16x16"),
        log_level=level,
        verify=_flag(environment, "TILEGRAD_VERIFY", "PYTEST_VERSION" in environment),
        eager_debug=_flag(environment, "TILEGRAD_EAGER", False),
        memory_bytes=_whole(environment, "TILEGRAD_MEMORY_MB", 0) << 20,
        cuda_sync=_flag(environment, "TILEGRAD_CUDA_SYNC", False),
        checked=_flag(environment, "TILEGRAD_CHECKED", False),
        plan_table=environment.get("TILEGRAD_PLANS"),
        api_keys=tuple(environment.get("TILEGRAD_API_KEYS", "").replace(",", " ").split()),
        **{name: _choice(environment, name) for name in CHOICES},
    )


_process: Config | None = None
_block: ContextVar[Config | None] = ContextVar("tilegrad config", default=None)


def config() -> Config:
    """The Config of the `override` block around, else of the process: that one is read from the
    environment at the first call."""
    return _block.get() or _process or _of_the_process()


def invariant() -> bool:
    """Whether the bits of a row must depend on that row alone."""
    return config().determinism == "invariant"


def _of_the_process() -> Config:
    global _process
    if _process is None:
        _process = read_environment(os.environ)
    return _process


def configure(**changes: Any) -> Config:
    """Change settings of the process, or of the `override` block around; the new Config."""
    global _process
    new = _changed(changes)
    if _block.get() is None:
        _process = new
    else:
        _block.set(new)
    return new


_NONE = object()


def _changed(changes: Mapping[str, Any]) -> Config:
    now = config()
    if all(getattr(now, name, _NONE) == value for name, value in changes.items()):
        return now  # every step of an engine says its level, which is mostly there
    try:
        new = replace(now, **changes)
    except TypeError:
        unknown = sorted(set(changes) - set(Config.__dataclass_fields__))
        raise UserError(
            "unknown setting", expected=", ".join(Config.__dataclass_fields__), got=unknown
        ) from None
    for name, known in CHOICES.items():
        if getattr(new, name) not in known:
            raise UserError(
                f"bad setting: {name}", expected=", ".join(known), got=repr(getattr(new, name))
            )
    return new


def set_threads(count: int) -> None:
    """Use `count` threads from the next run on."""
    if not hasattr(count, "__index__") or not 1 <= count <= MOST_THREADS:
        limits = f"a whole number >= 1 and <= {MOST_THREADS}"
        raise UserError("bad thread count", expected=limits, got=count)
    configure(threads=count.__index__())


@contextmanager
def override(**changes: Any) -> Iterator[Config]:
    """Within the block, in this thread and context, the Config has `changes`."""
    before = _block.get()
    new = _changed(changes)
    _block.set(new)
    try:
        yield new
    finally:
        _block.set(before)


def adopt(settings: Config) -> None:
    """Have, in a thread of ours, the settings of the thread that started it."""
    _block.set(settings)


def _choice(environment: Mapping[str, str], name: str) -> str:
    known = CHOICES[name]
    text = environment.get(f"TILEGRAD_{name.upper()}", "").strip().lower() or known[0]
    if text not in known:
        raise UserError(f"bad TILEGRAD_{name.upper()}", expected=", ".join(known), got=text)
    return text


def _whole(
    environment: Mapping[str, str], name: str, default: int, least: int = 0, most: int = 1 << 62
) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        limit = f" and <= {most}" if most < 1 << 62 else ""
        raise UserError(f"bad {name}", expected=f"a whole number >= {least}{limit}", got=repr(text))
    return value


def _flag(environment: Mapping[str, str], name: str, default: bool) -> bool:
    text = environment.get(name, "").strip().lower()
    if not text:
        return default
    if text not in ("0", "1", "true", "false", "on", "off"):
        raise UserError(f"bad {name}", expected="0 or 1", got=repr(text))
    return text in ("1", "true", "on")
