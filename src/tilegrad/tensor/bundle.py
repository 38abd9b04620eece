"""Bundles of functions: recorded while they run or are traced, and loaded to be called again.

    with tg.record() as recorder:
        step(w, x)                              # a jitted function, called as it will be
    tg.save_bundle("step.bundle", recorder)     # for this machine; or tg.record("h200")

    bundle = tg.load_bundle("step.bundle")      # in another process
    bundle["step"](w, x)                        # or call `step` itself: it is not traced

Invariant: a loaded function computes what the recorded one did, or refuses the arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..compiler.loader import Opened, Wanted, leave_bundle, listening, use_bundle
from ..core.errors import UserError
from ..core.target import Target, target_named
from ..runtime.buffer import HOST, Buffer
from ..runtime.bundle import Bundle
from .bundled import from_record, recorders, to_record
from .container import flatten
from .lowered import Lowered, States
from .tensor import Tensor, values
from .trace import traced_for


class Recorder:
    """What was traced and asked for while it listened, for a Target or for this machine's CPU."""

    def __init__(self, target: Target | None = None) -> None:
        self.target = target
        self.graphs: list[Wanted] = []
        self.traces: list[tuple[str, str, Lowered, list[Buffer]]] = []

    def asked(self, wanted: Wanted) -> None:
        """A Graph that something wants to run."""
        self.graphs.append(wanted)

    def traced(
        self, name: str, key: str, lowered: Lowered, leaves: Sequence[Any], states: States
    ) -> None:
        """A function that was traced; the bytes of weights that it reads are held."""
        held = [self._bytes(lowered, s, leaves, states) for s in lowered.sources]
        self.traces.append((name, key, lowered, held))

    def _bytes(
        self, lowered: Lowered, source: Any, leaves: Sequence[Any], states: States
    ) -> Buffer:
        if not source.stored:
            return Buffer(0, 0, None)
        return values[lowered._tensor_of(source, leaves, states)._node.inputs[0]]


@contextmanager
def record(target: Target | str | None = None) -> Iterator[Recorder]:
    """Within the block, note every function that is traced and every Graph that is run, for
    `save_bundle`. Functions that were traced before are not: use fresh ones. Those that are traced
    here have the ranges of Symbols that the Target's kernels ask for: a machine that is not here
    ("h200", "sm_80", "x86-64-v3", "aarch64"), or this machine's CPU."""
    recorder = Recorder(target_named(target) if isinstance(target, str) else target)
    recorders.append(recorder)
    try:
        with traced_for(recorder.target), listening(recorder.asked):
            yield recorder
    finally:
        recorders.remove(recorder)


def save_bundle(
    path: str | os.PathLike[str],
    recorder: Recorder,
    *,
    target: Target | str | None = None,
    files: Callable[[Path], str] | None = None,
    **more: Any,
) -> str:
    """Compile what was recorded into a Bundle, for the Target that it was recorded for, or for
    another one where nothing recorded has Symbols with ranges; its path. `files` puts a model's
    files into the folder and gives its name; `more` goes into the manifest."""
    from ..compiler.bundle import Maker

    other = target_named(target) if isinstance(target, str) else target
    if other is not None and other != recorder.target:
        _refuse_other_ranges(recorder, other)
    maker = Maker(path, other or recorder.target)
    writer = maker.writer
    for name, key, lowered, held in recorder.traces:
        if not lowered.outputs:
            continue
        wanted = Wanted(lowered.inputs, lowered.outputs, lowered.donate, HOST, lowered.requirements)
        recipe = "" if lowered.breaks else maker.add(wanted, held)
        record = to_record(lowered, key, recipe)
        writer.functions.setdefault(name, []).append(record)
    for wanted in recorder.graphs:
        maker.add(wanted)
    if not writer.recipes:
        raise UserError("nothing was recorded", op="save_bundle", hint="call a jitted function")
    if files is not None:
        writer.model = files(writer.folder)
    return str(maker.finish(**more))


def _refuse_other_ranges(recorder: Recorder, wanted: Target) -> None:
    """An error where a Target would have other ranges of Symbols than were traced."""
    from ..compiler.breaks import breaks_of

    for name, _, lowered, _ in recorder.traces:
        if not lowered.ranges and breaks_of(lowered.outputs, wanted) != lowered.breaks:
            raise UserError(
                f"{name} was traced for ranges of Symbols that suit another machine",
                op="save_bundle",
                expected=wanted.name,
                got="this CPU" if recorder.target is None else recorder.target.name,
                hint="name the Target before tracing: with tg.record(target) as recorder",
            )


class LoadedBundle:
    """A Bundle that serves this process, and its functions by name."""

    def __init__(self, opened: Opened) -> None:
        self.opened, self.bundle = opened, opened.bundle

    def __repr__(self) -> str:
        return repr(self.bundle)

    def __iter__(self) -> Iterator[str]:
        return iter(self.bundle.functions)

    def __getitem__(self, name: str) -> BundledFunction:
        if name not in self.bundle.functions:
            raise UserError(
                "no such function",
                op="load_bundle",
                expected=", ".join(self.bundle.functions) or "none",
                got=name,
            )
        return BundledFunction(name, self)

    def close(self) -> None:
        """Let it serve no longer."""
        leave_bundle(self.bundle)


class BundledFunction:
    """A function of a Bundle, called with positional arguments as the recorded one was. State
    (a Module) is taken by the names and types of its Tensors."""

    def __init__(self, name: str, owner: LoadedBundle) -> None:
        self.name = name
        found = owner.bundle.functions[name]
        self.lowered = [from_record(record, owner.opened) for record in found]

    def __repr__(self) -> str:
        return f"<bundled {self.name}: {len(self.lowered)} signatures>"

    def __call__(self, *args: Any) -> Any:
        leaves, _ = flatten(args)
        states = {i: x.tensors() for i, x in enumerate(leaves) if hasattr(x, "tensors")}
        for lowered in (x for x in self.lowered if not x.breaks):
            symbols = _symbols(lowered, leaves, states)
            if symbols is not None:
                return lowered.run(leaves, states, symbols)
        raise UserError(
            "the arguments fit no signature of the bundle",
            op=self.name,
            expected="; or ".join(_shown(x) for x in self.lowered),
            got=", ".join(str(x._node.type) if isinstance(x, Tensor) else repr(x) for x in leaves),
        )


def _symbols(lowered: Lowered, leaves: Sequence[Any], states: States) -> dict[str, int] | None:
    """The Symbols that arguments give a signature; None where they do not fit it."""
    from ..ir.symbol import Expr, atoms

    symbols: dict[str, int] = {}
    for node, source in zip(lowered.inputs, lowered.sources):
        if source.kind == "number":
            if source.index >= len(leaves) or type(leaves[source.index]) not in (int, float):
                return None
            continue
        if source.kind not in ("leaf", "state"):
            continue
        try:
            tensor = lowered._tensor_of(source, leaves, states)
        except (IndexError, KeyError):
            return None
        if not isinstance(tensor, Tensor):
            return None
        found = tensor._node.inputs[0] if source.stored else tensor._node
        if found.dtype is not node.dtype or len(found.shape) != len(node.shape):
            return None
        for have, want in zip(found.shape, node.shape):
            if not isinstance(want, Expr):
                if have != want:
                    return None
                continue
            (own,) = atoms(want)
            value = have - want.constant
            if not own.low <= value <= own.high or symbols.setdefault(own.name, value) != value:
                return None
    return symbols


def _shown(lowered: Lowered) -> str:
    return ", ".join(str(n.type) for n in lowered.inputs)


def load_bundle(path: str | os.PathLike[str]) -> LoadedBundle:
    """Open a Bundle and let it serve this process; refused with the reason where it is stale,
    damaged or for another machine."""
    return LoadedBundle(use_bundle(Bundle(path)))


__all__ = ["BundledFunction", "LoadedBundle", "Recorder", "load_bundle", "record", "save_bundle"]
