"""From a Graph to an Executable, remembered by structure in memory and on disk.

The key is taken from the Graph as it was traced, before any pass, together with the Target, the
compiler's version and (where kernels of the library may be chosen) the PlanTable's content, so a
warm start runs no pass at all, and imports none. The user's lines are in the key of what is in
memory, since errors name them, and not in the key of what is on disk. Invariant: two Graphs of
equal structure share one Recipe per Target and PlanTable, and what is raised names the line of the
Graph at hand.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.config import adopt, config
from ..core.errors import InternalError
from ..core.lock import COMPILER, awaited_rlock
from ..core.recent import Recent
from ..core.target import Target
from ..graph import build, ops
from ..ir.fingerprint import UserLine, digest, structure
from ..ir.node import Node, located, topological
from ..ir.requirement import Requirement
from ..ir.rewrite import replace
from ..runtime.buffer import HOST, Buffer
from ..runtime.device import Device, target_for
from ..runtime.device import device as opened
from ..runtime.language import language_of
from ..runtime.recipe import Recipe
from ..runtime.store import default_store
from ..schedule.outside import outside
from .loader import Wanted, bind, counters

if TYPE_CHECKING:
    from ..schedule.schedule import Schedule
    from ..tile.callee import KernelCallee, Launches

LOG = logging.getLogger("tilegrad.compile")

BODIES = 8  # lowered Bodies that are kept for each Executable that is
TABLES = 16  # Targets, and PlanTables of them, whose Bodies are kept

_memory: Recent[Any] = Recent(lambda: config().keep)
_lock = awaited_rlock(COMPILER)
_bodies: Recent[Recent[Any]] = Recent(lambda: TABLES)  # lowered Bodies by Target and PlanTable


ABOVE = ("tensor", "nn", "cli", "train", "models", "tune")  # folders that compile nothing


def _files(folder: str | Path) -> list[os.DirEntry[str]]:
    """The files below a folder that the compiler is made of, in order."""
    found: list[os.DirEntry[str]] = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.endswith(".py"):
            found.append(entry)
        elif entry.name not in ("__pycache__", *ABOVE) and entry.is_dir():
            found += _files(entry.path)
    return found


@functools.cache
def version() -> str:
    """A hash of the package's own source: a changed compiler misses the cache."""
    from ..targets.llvm.driver import llvm_version

    try:
        llvm = llvm_version()
    except InternalError:
        llvm = "none"  # a GPU can be compiled for without it
    state = hashlib.sha256(llvm.encode())
    for entry in _files(Path(__file__).resolve().parents[1]):
        info = entry.stat()
        state.update(f"{entry.name}{info.st_size}{info.st_mtime_ns}".encode())
    return state.hexdigest()[:16]


def host() -> Target:
    """The Target of this machine's CPU, with the Config's number of workers."""
    return target_for(HOST)


def launches_on(callee: KernelCallee, device: str) -> Launches:
    """The Bodies that a kernel is launched with on a device."""
    return callee.launches_for(target_for(device))


def executable_for(
    inputs: tuple[Node, ...],
    outputs: tuple[Node, ...],
    donate: tuple[int, ...] = (),
    device: str = HOST,
    requirements: Sequence[Requirement] = (),
    homes: tuple[str, ...] = (),
) -> Any:
    """The Executable that computes outputs from inputs (in that order) on a device; `donate`
    numbers the inputs whose Buffers it may overwrite, `requirements` are what it needs of its
    Symbols, `homes` the Devices of the inputs where they differ. `run(buffers, symbols) ->
    buffers`, `check(symbols)`."""
    if config().eager_debug:
        from .guard import GuardedExecutable

        return GuardedExecutable(inputs, outputs, device, requirements, homes)
    where = circumstances(device)
    if homes or build.Transfers.used:
        where = (where, homes, other_targets(outputs, homes))
    key: tuple[Any, ...] = (structure(inputs, outputs), donate, where)
    if requirements:
        key += (tuple(requirements),)
    found = _memory.get(key)
    if found is None:
        with _lock:
            found = _memory.get(key)
            if found is None:
                found = _memory[key] = _make(
                    key, inputs, outputs, donate, device, requirements, homes
                )
    return found


def circumstances(device: str, target: Target | None = None) -> Any:
    """What an Executable on a device depends on besides its Graph; with its Target, the device is
    not asked."""
    host = (config().threads, *config().numerics)
    own = host if device == HOST else (device, (target or target_for(device)).key, *_choices())
    return (*own, *outside())


def recipe_name(
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    given: tuple[Any, ...],
    requirements: Sequence[Requirement],
    target: Target,
    lines: dict[UserLine, int],
) -> str:
    """The name of a Recipe in the Store; `given` is what is donated, and the circumstances. The
    user's lines in the Graph are added to `lines`."""
    needs = [r.to_text(placed=False) for r in requirements]
    symbols = ops.symbols([*inputs, *topological(outputs)])
    bounds = [(s.name, s.low, s.high) for s in symbols]  # sizes of the arena follow from them
    rows = structure(inputs, outputs, lines)
    return "recipe-" + digest(rows, bounds, given, needs, target.key, version())


def other_targets(outputs: Sequence[Node], homes: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The Devices that a Graph names, with what their Targets are now."""
    from .pipeline import transfers

    named = {name for n in transfers(outputs) for name in (n.attrs["source"], n.attrs["device"])}
    return tuple((name, target_for(name).key) for name in sorted(named | set(homes)))


def _choices() -> tuple[Any, ...]:
    """What Programs of a GPU depend on besides their Graph and Target."""
    from ..kernels.plan_table import plans

    return plans().digest, *config().numerics, config().checked


def compile_for(
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    target: Target,
    donate: Sequence[int] = (),
    device: str = HOST,
    without: Sequence[str] = (),
) -> Any:
    """An Executable for a given Target, past all caches of Executables (tests, tuning); passes
    named in `without` are left out."""
    from ..graph.sizes import size_requirements
    from .flatten import recipe_and_texts

    schedule = schedule_for(inputs, outputs, target, donate, without, device)
    recipe, texts = recipe_and_texts(schedule, target, size_requirements(inputs, outputs))
    machine = opened(device)
    return _bind(recipe, machine, _compile_all(texts, target, machine))


def _make(
    key: Any,
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    donate: Sequence[int],
    device: str,
    requirements: Sequence[Requirement],
    homes: Sequence[str],
) -> Any:
    """Load from disk, else compile and store."""
    machine = opened(device)
    target = machine.target
    lines: dict[UserLine, int] = {}
    name = recipe_name(inputs, outputs, key[1:3], requirements, target, lines)
    data = default_store().get(name)
    if data is not None:
        recipe = Recipe.from_text(data.decode())
        recipe.requirements = list(requirements)  # equal but for the lines
        recipe.move(list(lines))
        bound = _bind(recipe, machine)
        if bound is not None:
            counters["loaded"] += 1
            return bound
    from .flatten import recipe_and_texts

    start = time.perf_counter()
    schedule = schedule_for(inputs, outputs, target, donate, (), device, homes)
    recipe, texts = recipe_and_texts(schedule, target, requirements)
    recipe.lines = list(lines)
    bound = _bind(recipe, machine, _compile_all(texts, target, machine))
    default_store().put(name, recipe.to_text().encode())
    counters["compiled"] += 1
    LOG.info(
        "compiled %d kernels (%d programs) in %.0f ms",
        len(schedule.kernels),
        sum(map(len, texts.values())),
        1e3 * (time.perf_counter() - start),
    )
    return bound


def schedule_for(
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    target: Target,
    donate: Sequence[int] = (),
    without: Sequence[str] = (),
    device: str = HOST,
    homes: Sequence[str] = (),
) -> Schedule:
    """The Schedule of a Graph: all passes of the page but those named in `without`."""
    from .pipeline import schedule_graph

    with located(outputs[0].location if outputs else None):
        inputs, outputs = cut(inputs, outputs)
        choices = _choices() if target.has_threads else config().numerics
        key = (target.key, outside(), *choices, *without)
        bodies = _bodies.get(key)
        if bodies is None:
            bodies = _bodies[key] = Recent(lambda: BODIES * config().keep)
        given = (target, donate, bodies, without, device, homes)
        return schedule_graph(inputs, outputs, *given)[0]


def cut(inputs: Sequence[Node], outputs: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """The Graph with plain inputs for arguments: no pass may look into, or rewrite, a value
    that is given."""
    fresh = [n if n.op is ops.input_ else build.input_(n.shape, n.dtype) for n in inputs]
    return fresh, replace(outputs, {a: b for a, b in zip(inputs, fresh) if a is not b})


Code = dict[str, Any]  # loaded, by key


def _objects(
    texts: Mapping[str, str], target: Target, arch: str, side: int
) -> Iterator[tuple[str, bytes]]:
    """Object code of every text by key, so many made side by side, and stored."""
    compile_text = language_of(target).compile

    def one(key: str) -> tuple[str, bytes]:
        return key, compile_text(texts[key], target, arch)

    with ThreadPoolExecutor(min(len(texts), side), initializer=adopt, initargs=(config(),)) as pool:
        for key, data in pool.map(one, texts):
            default_store().put(f"object{arch}-{key}", data)
            counters["programs"] += 1
            yield key, data


def store_recipe(wanted: Wanted, target: Target, arch: str, expected: str, side: int = 1) -> None:
    """Compile a Graph for a Target of which no machine is opened, and store what `_make` loads."""
    from .flatten import recipe_of

    lines: dict[UserLine, int] = {}
    given = (wanted.donate, circumstances(wanted.device, target))
    graph = (wanted.inputs, wanted.outputs)
    name = recipe_name(*graph, given, wanted.requirements, target, lines)
    if name != expected:
        raise InternalError("compile", f"{name} is not {expected}: other settings, or another text")
    schedule = schedule_for(*graph, target, wanted.donate, (), wanted.device)
    recipe, texts = recipe_of(schedule, target, wanted.requirements)
    recipe.lines = list(lines)
    store = default_store()
    missing = {k: t for k, t in texts.items() if store.get(f"object{arch}-{k}") is None}
    if missing:
        deque(_objects(missing, target, arch, side), maxlen=0)
    store.put(name, recipe.to_text().encode())


def _compile(texts: Mapping[str, str], target: Target, device: Device) -> Code:
    """Object code of every text, in parallel, loaded by a Device."""
    held = {key: found for key in texts if (found := device.loaded(key)) is not None}
    wanted = {key: text for key, text in texts.items() if key not in held}
    if not wanted:
        return held
    for key, data in _objects(wanted, target, device.arch, max(1, config().threads)):
        held[key] = device.keep(key, data)
    return held


def _compile_all(texts: Mapping[str, Mapping[str, str]], target: Target, device: Device) -> Any:
    """The same for every Device of a Schedule; '' is the one that is given."""
    return {
        name: _compile(found, opened(name).target if name else target, opened(name or device.name))
        for name, found in texts.items()
    }


def _bind(recipe: Recipe, device: Device, held: Mapping[str, Code] | None = None) -> Any:
    """The Executable, or None if object code is missing."""
    held = held or {}
    machines: dict[str, tuple[Device, Code]] = {"": (device, {})}
    machines.update({name: (opened(name), {}) for name in recipe.devices()})
    used = dict.fromkeys((s.device, s.program) for s in recipe.steps if s.program >= 0)
    for name, program in used:
        machine, own = machines[name]
        key = recipe.programs[program][1]
        found = held.get(name, {}).get(key) or machine.loaded(key)
        if found is None:
            data = default_store().get(f"object{machine.arch}-{key}")
            if data is None:
                return None
            found = machine.keep(key, data)
        own[key] = found
    _, own = machines.pop("")
    return bind(recipe, own, device, layout_of, machines)


@functools.lru_cache(maxsize=1024)
def _layout(text: str) -> Any:
    from ..kernels.quantised.prepare import parse_preparation
    from .array_weights import KIND as CODES
    from .array_weights import parse_codes
    from .as_stored import KIND, parse_as_stored
    from .block_weights import KIND as BLOCKS
    from .block_weights import parse_blocks
    from .sparse_weights import KIND as KEPT
    from .sparse_weights import parse_kept

    kinds = {KIND: parse_as_stored, CODES: parse_codes, KEPT: parse_kept}
    kinds[BLOCKS] = parse_blocks
    known = [parse for kind, parse in kinds.items() if text.startswith(f'["{kind}"')]
    return known[0](text) if known else parse_preparation(text)


def layout_of(text: str, sources: Sequence[Buffer]) -> Any:
    """How weights are prepared, by the text of a Recipe."""
    return _layout(text)


__all__ = ["executable_for", "schedule_for"]
