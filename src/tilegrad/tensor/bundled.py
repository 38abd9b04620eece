"""Traced functions as plain data: what a Bundle keeps of a Lowered, and a Lowered from it.

A signature says what a trace depended on, without the objects of the process that traced it: how
arguments are nested, types of Tensors with their Symbols, names and types of state, settings and
static values as text, and the function's own code. Where a jitted function meets a signature that
an opened Bundle has, it is not traced. Invariant: `from_record(to_record(lowered))` runs the same
Recipe on the same arguments; what cannot be plain data (a Tensor of the process that was captured,
a derivative to come) is refused when a Bundle is made.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..compiler.loader import Opened, opened_bundles
from ..core.dtype import DType, dtype_of
from ..core.errors import UserError
from ..graph import build
from ..graph.ops import unpack
from ..ir.fingerprint import digest
from ..ir.requirement import Requirement
from ..ir.symbol import high, low
from ..ir.types import Array
from ..runtime.buffer import HOST, Buffer
from ..runtime.recipe import read_size, size_text
from .container import LEAF, NONE, Structure, _intern, is_stateful
from .lowered import Lowered, Outcome, States, Write
from .placement import state, tag
from .tensor import Tensor, mode
from .trace import Source

if TYPE_CHECKING:
    from .jit import Jitted

PLAIN = (type(None), bool, int, float, str)
KINDS = {"tuple": tuple, "list": list, "dict": dict}


def signature(name: str, code: str, rows: Sequence[tuple[str, str]]) -> str:
    """What a trace depended on, as one name."""
    return digest(name, code, tuple(rows))


def rows_of(
    jitted: Jitted,
    given: tuple[Any, ...],
    leaves: list[Any],
    structure: Structure,
    states: States,
    within: Mapping[str, Any] | None,
) -> list[tuple[str, str]]:
    """What a trace of a jitted function depends on, as text that is the same in every process."""
    rows = [
        ("structure", repr(structure)),
        ("grad", str(mode.grad_enabled)),
        ("donate", str(sorted(jitted._donate))),
        ("ranges", str({n: (low(s), high(s)) for n, s in (within or {}).items()})),
    ]
    axes = jitted._axes_of(structure)
    for i, (path, leaf) in enumerate(zip(jitted._paths(structure), leaves)):
        if isinstance(leaf, Tensor):  # whose values are not looked at
            shape = leaf._node.shape
            if axes is not None and axes[i]:
                shape = jitted._bind_symbols(i, shape, axes, {}, structure)
            text = f"{leaf.dtype}{[size_text(s) for s in shape]} {leaf._requires_grad}"
        elif type(leaf) in (int, float):
            text = type(leaf).__name__
        elif is_stateful(leaf):
            text = f"{type(leaf).__qualname__} {settings_of(leaf)}"
        else:
            text = repr(leaf)
        rows.append((path, text))
        for name, tensor in states.get(i, {}).items():
            node = tensor._node
            form = node.attrs["format"] if node.op is unpack else ""
            rows.append((f"{path}.{name}", f"{node.type} {tensor._requires_grad} {form}"))
    return rows + [(jitted.names[p], repr(given[p])) for p in jitted._static]


def describe_leaf(leaf: Any) -> str:
    """An argument for people: its type, device and whether it has a derivative."""
    if isinstance(leaf, Tensor):
        where = f" on {tag(leaf._node)}" if state.active and tag(leaf._node) else ""
        return repr(leaf._node.type) + where + (" requires_grad" if leaf._requires_grad else "")
    if leaf.__class__ in (int, float):
        return leaf.__class__.__name__
    return f"{type(leaf).__name__} object" if is_stateful(leaf) else repr(leaf)


def code_of(function: Any) -> str:
    """What tells one function's code from another's: its instructions and constants, and those of
    functions defined inside of it. Code that it calls is the release's, or the caller's care."""
    code = getattr(function, "__code__", None)
    return "" if code is None else digest(_code(code))


def _code(code: Any) -> tuple[Any, ...]:
    constants = tuple(_code(c) if hasattr(c, "co_code") else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, constants


def settings_of(value: Any) -> str:
    """What a trace may depend on of an object that holds state: plain attributes, all the way
    down, as text. Attributes that start with _ are not looked at."""
    modules = value.modules() if callable(getattr(value, "modules", None)) else (value,)
    return digest([_plain(vars(m), 0) for m in modules if hasattr(m, "__dict__")])


def _plain(value: Any, depth: int) -> Any:
    if type(value) in PLAIN:
        return repr(value)
    if depth > 8:
        return type(value).__qualname__
    if isinstance(value, (tuple, list)):
        return [_plain(v, depth + 1) for v in value]
    if isinstance(value, dict):
        items = [(str(k), v) for k, v in value.items() if not str(k).startswith("_")]
        return [(k, _plain(v, depth + 1)) for k, v in sorted(items, key=lambda item: item[0])]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, _plain(vars(value), depth + 1)]
    if isinstance(value, DType):
        return value.name
    return getattr(value, "__qualname__", type(value).__qualname__)


recorders: list[Any] = []  # who is told of every trace; see `bundle.record`


def find(jitted: Jitted, *call: Any) -> Lowered | None:
    """What an opened Bundle has for a call of a jitted function."""
    key = signature(jitted.name, code_of(jitted.function), rows_of(jitted, *call))
    for opened in opened_bundles():
        for record in opened.bundle.functions.get(jitted.name, ()):
            if record["signature"] == key:
                return from_record(record, opened)
    return None


def tell(jitted: Jitted, lowered: Lowered, *call: Any) -> None:
    """Tell who records of a function that was traced."""
    key = signature(jitted.name, code_of(jitted.function), rows_of(jitted, *call))
    for recorder in recorders:
        recorder.traced(jitted.name, key, lowered, call[1], call[3])


# ---- writing ------------------------------------------------------------------------------------


def to_record(lowered: Lowered, key: str, recipe: str) -> dict[str, Any]:
    """A Lowered as JSON can hold it; `recipe` is the name of its Graph."""
    if lowered.homes:
        raise _refuse(lowered, "it runs on several Devices", "bundle what runs on each")
    if lowered.tracked:
        raise _refuse(lowered, "its results have derivatives", "call it under no_grad()")
    return {
        "name": lowered.name,
        "signature": key,
        "recipe": recipe,
        "inputs": [_type(n.type) for n in lowered.inputs],
        "outputs": [_type(n.type) for n in lowered.outputs],
        "sources": [_source(lowered, s) for s in lowered.sources],
        "structure": _structure(lowered, lowered.structure),
        "outcomes": [_outcome(lowered, p) for p in lowered.outcomes],
        "writes": [
            [_source(lowered, w.target), w.what, _outcome(lowered, w.outcome)]
            for w in lowered.writes
        ],
        "donate": list(lowered.donate),
        "given": sorted(lowered.given),
        "guards": [list(g) for g in lowered.guards],
        "breaks": {name: list(at) for name, at in lowered.breaks.items()},
        "ranges": {name: list(at) for name, at in lowered.ranges.items()},
        "draws": [count for _, count in lowered.randomness],
        "requirements": [r.to_text() for r in lowered.requirements],
    }


def _refuse(lowered: Lowered, why: str, hint: str) -> UserError:
    return UserError(f"{lowered.name} cannot be bundled: {why}", op="bundle", hint=hint)


def _type(type_: Any) -> list[Any]:
    return [[size_text(s) for s in type_.shape], type_.dtype.name]


def _source(lowered: Lowered, source: Source) -> list[Any]:
    found: list[Any] = [source.kind, source.index, source.name, source.stored]
    if source.kind == "captured":
        raise _refuse(
            lowered,
            "it reads a Tensor that is not among its arguments",
            "pass the Tensor, or the Module that holds it, as an argument",
        )
    if source.kind == "constant":
        held = source.holder
        found.append(held.array((held.bytes,), np.uint8).tobytes().hex())
    if source.kind in ("key", "offset"):
        found.append([g is source.holder for g, _ in lowered.randomness].index(True))
    return found


def _outcome(lowered: Lowered, outcome: Outcome) -> list[Any]:
    if outcome.kind == "fixed" and type(outcome.value) not in PLAIN:
        raise _refuse(
            lowered, f"it gives back a {type(outcome.value).__name__}", "give back Tensors"
        )
    type_ = None if outcome.type is None else _type(outcome.type)
    return [outcome.kind, outcome.number, outcome.value, type_, outcome.symbolic]


def _structure(lowered: Lowered, structure: Structure) -> Any:
    if structure.kind in ("leaf", "none"):
        return structure.kind
    cls = structure.cls
    if not all(type(k) in PLAIN for k in structure.keys):
        raise _refuse(lowered, "its results have keys that are no text", "use texts and numbers")
    parts = [_structure(lowered, p) for p in structure.parts]
    named = cls.__name__ if cls in KINDS.values() else f"{cls.__module__}:{cls.__qualname__}"
    return [structure.kind, named, list(structure.keys), parts, list(structure.order)]


# ---- reading ------------------------------------------------------------------------------------


def from_record(record: dict[str, Any], opened: Opened) -> Lowered:
    """The Lowered that `to_record` wrote, over the Executable of its Bundle."""
    from .random import default_generator

    kind = opened.bundle.device
    where = kind if kind == HOST else f"{kind}:0"
    requirements = [Requirement.from_text(r) for r in record["requirements"]]
    generators = [(default_generator(), count) for count in record["draws"]]
    inputs, outputs = (
        tuple(build.input_(t.shape, t.dtype) for t in map(_read_type, record[side]))
        for side in ("inputs", "outputs")
    )
    lowered = Lowered(
        record["name"],
        inputs,
        tuple(_read_source(s, generators) for s in record["sources"]),
        outputs,
        _read_structure(record["structure"]),
        [_read_outcome(p) for p in record["outcomes"]],
        [Write(_read_source(s, ()), what, _read_outcome(p)) for s, what, p in record["writes"]],
        tuple(record["donate"]),
        frozenset(record["given"]),
        guards=[(i, name, present) for i, name, present in record["guards"]],
        randomness=list(generators),
        device=where,
        requirements=requirements,
    )
    lowered.breaks = record["breaks"]
    lowered.ranges = {name: (low, high) for name, (low, high) in record["ranges"].items()}
    if lowered.breaks:  # it says where ranges end, and is not run
        return lowered
    lowered.executable = opened.named(record["recipe"], where, requirements)
    if lowered.executable is None:
        raise UserError("this bundle lacks a Recipe", op="load_bundle", got=record["name"])
    return lowered


def _read_type(found: Sequence[Any]) -> Array:
    shape, dtype = found
    return Array(tuple(read_size(s) for s in shape), dtype_of(dtype))


def _read_source(found: Sequence[Any], generators: Sequence[tuple[Any, int]]) -> Source:
    kind, index, name, stored, *more = found
    holder: Any = None
    if kind == "constant":
        data = np.frombuffer(bytes.fromhex(more[0]), np.uint8).copy()
        holder = Buffer.allocate(max(1, data.nbytes))
        holder.array((data.nbytes,), np.uint8)[:] = data
    elif kind in ("key", "offset"):
        holder = generators[more[0]][0]
    return Source(kind, index, name, holder, stored)


def _read_outcome(found: Sequence[Any]) -> Outcome:
    kind, number, value, type_, symbolic = found
    return Outcome(kind, number, value, None if type_ is None else _read_type(type_), symbolic)


def _read_structure(found: Any) -> Structure:
    if isinstance(found, str):
        return LEAF if found == "leaf" else NONE
    kind, named, keys, parts, order = found
    cls = KINDS.get(named)
    if cls is None:  # of a module that is loaded already: a Bundle imports nothing
        module, _, name = named.partition(":")
        cls = sys.modules.get(module)  # type: ignore[assignment]
        for part in name.split("."):
            cls = getattr(cls, part, None)
        if not isinstance(cls, type):
            raise UserError("this bundle's results are of a class that is not here", got=named)
    return _intern(kind, cls, tuple(keys), tuple(_read_structure(p) for p in parts), tuple(order))


__all__ = [
    "describe_leaf",
    "find",
    "from_record",
    "opened_bundles",
    "recorders",
    "tell",
    "to_record",
]
