"""Bound: a jitted function on Buffers that stay, run again and again for next to no host time.

`Jitted.bind(*args)` chooses every Buffer once: inputs are those of the arguments as they are, state
is written into the Buffers it has, results get Buffers that each run overwrites. `run` then costs
one launch (a native call on a CPU, a graph on a GPU), however many Tensors the state has. Small
inputs are changed with `write`: an argument that is written to gets a Buffer of the Bound's own
first, state is changed where it is, for plain calls and other Bounds too.

An expression that was built on state or results before a run cannot be read after it (StateError);
NumPy arrays that share a CPU Buffer's memory show what is there now. `bound_inputs` says how.
State whose new value is computed while the old one is still read is copied to its place at the end
of a run where it is small (see `Bound.copied`). A Bound is for one thread at a time. Invariant:
state that runs write is in the same memory before and after; what could not be is an error at
`bind` that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.config import config
from ..core.errors import DTypeError, ShapeError, StateError, UserError
from ..ir.symbol import evaluate
from ..runtime.buffer import HOST, Buffer
from ..runtime.profile import Profile
from ..runtime.recipe import Back
from .bound_copies import Pending, read_later, write
from .bound_inputs import Inputs, moment
from .lowered import Lowered, Outcome, Write
from .ownership import is_kept
from .placement import copy_of, moved
from .tensor import Tensor
from .trace import Source

BACK_BYTES = 64 << 10  # state up to this size may be copied to its place at the end of a run
RESTORED_BYTES = 1 << 20  # state up to this size is put back after a profile's runs


class Bound:
    """A jitted function with all its Buffers chosen; see the module's docstring."""

    def __init__(
        self,
        lowered: Lowered,
        leaves: Sequence[Any],
        states: Mapping[int, dict[str, Tensor]],
        symbols: Mapping[str, int] | None,
        paths: Sequence[str],
    ) -> None:
        refuse(lowered)
        self.name, self.device, self.symbols = lowered.name, lowered.device, dict(symbols or {})
        self._lowered, self._leaves, self._paths = lowered, list(leaves), list(paths)
        self._states = {i: dict(held) for i, held in states.items()}
        self._executable = lowered.compiled()
        self._inputs = Inputs(self.name, self.device, self._leaves)
        self._at: dict[tuple[int, str], int] = {}  # numbers of leaves and of Tensors of state
        for node, source in zip(lowered.inputs, lowered.sources):
            self._add(source, node)
        self._inputs.changing.update(lowered.donate)
        self._placed: dict[int, int] = {}
        self._back: list[Back] = []
        for change in lowered.writes:
            self._settle(change)
        shown = [self._shown(outcome) for outcome in lowered.outcomes]
        buffers = self._inputs.buffers()
        self._replay = self._executable.replay(buffers, self.symbols, self._placed, self._back)
        del buffers
        self._results = [self._value(outcome, at) for outcome, at in zip(lowered.outcomes, shown)]
        self._inputs.results = [t for t in self._results if isinstance(t, Tensor)]
        self._names = self._name_all()
        self.outputs: Any = lowered.structure.unflatten(self._results)
        self._inputs.arm()

    def __repr__(self) -> str:
        return f"<bound {self.name} on {self.device}: {self.launches} launches>"

    @property
    def launches(self) -> int:
        """Kernels and copies that a run puts on the device."""
        return self._replay.launches

    @property
    def copied(self) -> list[str]:
        """Names of state (or `result`) that each run copies to its place at its end."""
        return [self._inputs.labels[c.target] for c in self._back]

    @property
    def ranges(self) -> Mapping[str, tuple[int, int]]:
        """Of Symbols by name, the ranges that it was compiled for; others have all their values."""
        return self._lowered.ranges

    def covers(self, name: str, value: int) -> bool:
        """Whether it was compiled for this value of a Symbol that no shape has."""
        low, high = self._lowered.ranges.get(name, (value, value))
        return low <= value <= high

    # ---- running --------------------------------------------------------------------------

    def run(self) -> Any:
        """Run once more; gives `outputs`, which the next run overwrites. On a GPU the values come
        later: reading them waits."""
        if moment() != self._inputs.moment:
            self._look()
        if self._lowered.randomness:
            self._draw()
        self._replay.run()
        return self.outputs

    def write(self, argument: int | str, array: Any, row: int | None = None) -> None:
        """Copy an array into the Buffer of an argument (number or name; "cache.table" is state), or
        into one row of it; on a GPU this is before the next run, and nobody waits."""
        key = self._key(argument)
        if moment() != self._inputs.moment:
            self._look()
        at = self._at.get(key, -1)
        if at not in self._inputs.changing:
            at = self._make_changing(at, key)
            if at < 0:
                return  # the function does not use it
        shape, dtype = self._kind(key)
        offset = 0
        if row is not None:
            if not shape or not 0 <= row < shape[0]:
                raise ShapeError("no such row", op="write", expected=f"a row of {shape}", got=row)
            shape = shape[1:]
        array = fitted(array, shape, dtype, argument)
        if row is not None:
            offset = row * array.nbytes
        write(self.device, self._inputs.pointers[at] + offset, array)

    def read(self, output: int | str = 0) -> np.ndarray[Any, Any]:
        """A copy of a result (by number), or of state by name, as it is after the runs so far."""
        return self.read_later(output).wait()

    def read_later(self, output: int | str = 0) -> Pending:
        """The same without waiting: what runs after this does not change what `wait` gives."""
        tensor = self._readable(output)
        return read_later(tensor.buffer(self.device), tensor.shape, tensor.dtype)

    def profile(self, runs: int = 5, bytes: Mapping[str, float] | None = None) -> Profile:
        """What each kernel takes and moves, from `runs` runs. State of up to 1 MiB a Tensor is put
        back after each; more is as a run leaves it. `bytes`: see `Profile.with_bytes`."""
        if moment() != self._inputs.moment:
            self._look()
        if self._lowered.randomness:
            self._draw()
        found = self._replay.profile(self.name, max(1, runs), self._inputs.snapshot(RESTORED_BYTES))
        return found.with_bytes(bytes or {})

    @property
    def replay(self) -> Any:
        """The graph that a run launches, on a GPU; None on a CPU."""
        return getattr(self._replay.captured, "graph", None)

    def _look(self) -> None:
        """Follow what happened since the last run."""
        if self._inputs.look():
            self._point()

    def _point(self) -> None:
        self._replay.point(self._inputs.buffers())
        self._inputs.arm()

    def _draw(self) -> None:
        """Fresh random numbers for this run."""
        drawn = {id(g): g.reserve(count) for g, count in self._lowered.randomness}
        for at, source in enumerate(self._lowered.sources):
            if source.kind in ("key", "offset"):
                value = drawn[id(source.holder)][0 if source.kind == "key" else 1]
                write(self.device, self._inputs.pointers[at], np.array(value, np.uint32))

    # ---- binding --------------------------------------------------------------------------

    def _add(self, source: Source, node: Any) -> int:
        """One more Buffer to run on; its number."""
        tensor: Tensor | None = None
        own: Buffer | None = None
        if source.kind in ("leaf", "state"):
            tensor = self._lowered._tensor_of(source, self._leaves, self._states)
        elif source.kind == "captured":
            if not source.stored:
                self._lowered._captured(source.holder, node)
            tensor = source.holder
        elif source.kind == "constant":
            own = source.holder
        else:
            value = self._leaves[source.index] if source.kind == "number" else 0
            own = self._new(np.array(value, node.dtype.numpy))
        at = self._inputs.add(source, self._path(source), tensor, own)
        if source.kind in ("leaf", "state", "number"):
            self._at[source.index, source.name] = at
            if source.kind == "number":
                self._inputs.changing.add(at)
        return at

    def _new(self, array: np.ndarray[Any, Any]) -> Buffer:
        """A Buffer of our own with these values."""
        wrapped = Buffer.wrap(array)
        return copy_of(wrapped) if self.device == HOST else moved(wrapped, self.device)

    def _settle(self, change: Write) -> None:
        """Decide how a changed Tensor comes to its place, or refuse."""
        source, outcome, executable = change.target, change.outcome, self._executable
        at = self._at.get((source.index, source.name), -1)
        if at >= 0 and any(p.kind == "input" and p.number == at for p in self._lowered.outcomes):
            raise self._not_in_place(source, "the function gives back what it was before")
        owner = executable.owners[outcome.number] if outcome.kind == "root" else -1
        there = outcome.number if outcome.kind == "input" else executable.input_of.get(owner, -1)
        if at >= 0 and there == at:
            return  # written where it is
        if at < 0:
            at = self._add(source, None)
        self._inputs.changing.add(at)
        if there < 0 and self._is_free(at, owner):
            self._placed[outcome.number] = at  # all that read the old value are done by then
            return
        size = outcome.type.dtype.size * int(evaluate(outcome.type.size, self.symbols))
        if there >= 0 and self._inputs.sources[there].kind == "state":
            raise self._not_in_place(source, "its new value is where other state is")
        if is_kept(self._leaves, source) or size > BACK_BYTES:
            why = "its new value is computed elsewhere, while the old one is still read"
            raise self._not_in_place(source, f"{why} ({size} bytes)")
        self._back.append(Back(there < 0, outcome.number if there < 0 else there, at, size))

    def _is_free(self, at: int, owner: int) -> bool:
        """Whether the Slot of an output may lie in Buffer `at`."""
        executable, recipe = self._executable, self._executable.recipe
        if owner in {executable.owners[o] for o in self._placed}:
            return False
        return at >= len(recipe.inputs) or recipe.ends_before(recipe.inputs[at], owner)

    def _not_in_place(self, source: Source, why: str) -> StateError:
        return StateError(
            f"the state {self._path(source)} is not written in place: {why}",
            op=f"bind {self.name}",
            expected="state that is written into the Buffer it has",
            got=why,
            hint="change it after its last use, or part of it: x[i] = value",
        )

    def _shown(self, outcome: Outcome) -> int:
        """The number of the Buffer that a result is in; -1 if it is one of the run's own."""
        executable, at = self._executable, outcome.number
        if outcome.kind == "root":
            owner = executable.owners[outcome.number]
            placed = {executable.owners[o]: a for o, a in self._placed.items()}
            at = placed.get(owner, executable.input_of.get(owner, -1))
        inputs = self._inputs
        if at < 0 or inputs.sources[at].kind != "leaf" or at in inputs.changing:
            return at
        size = outcome.type.dtype.size * int(evaluate(outcome.type.size, self.symbols))
        own = self._new(np.zeros(size, np.uint8))  # `write` gives the argument another Buffer
        copy = inputs.add(Source("result"), "result", None, own)
        self._back.append(Back(False, at, copy, size))
        return copy

    def _value(self, outcome: Outcome, at: int) -> Any:
        """A result: over a Buffer of its own, or the Tensor that has it."""
        if outcome.kind == "fixed":
            return outcome.value
        tensor = self._inputs.tensors[at] if at >= 0 else None
        if tensor is not None:
            return tensor
        own: Any = self._replay.result(outcome.number) if at < 0 else self._inputs.own[at]
        there = Outcome("input", 0, False, outcome.type, outcome.symbolic)
        return self._lowered._value(there, [own.part(0, own.bytes)], (), self.symbols, None)

    # ---- names ----------------------------------------------------------------------------

    def _path(self, source: Source) -> str:
        if source.kind not in ("leaf", "state", "number"):
            return source.kind
        path = self._paths[source.index]
        return f"{path}.{source.name}" if source.name else path

    def _name_all(self) -> dict[int | str, tuple[int, str]]:
        """What arguments are called: by number of the leaf, by path, by path and name of state."""
        found: dict[int | str, tuple[int, str]] = {}
        for i, path in enumerate(self._paths):
            if i in self._states:
                found.update({f"{path}.{name}": (i, name) for name in self._states[i]})
            elif isinstance(self._leaves[i], (Tensor, int, float)):
                found[i] = found[path] = (i, "")
        return found

    def _key(self, argument: int | str) -> tuple[int, str]:
        found = self._names.get(argument)
        if found is None:
            names = [str(n) for n in self._names if isinstance(n, str)]
            shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
            raise UserError(
                "no such argument",
                op=f"bound {self.name}",
                expected=f"one of {shown}",
                got=repr(argument),
            )
        return found

    def _kind(self, key: tuple[int, str]) -> tuple[tuple[int, ...], Any]:
        at = self._at[key]
        if at < len(self._lowered.inputs):
            type_: Any = self._lowered.inputs[at].type
        else:
            type_ = self._states[key[0]][key[1]]._node.type
        return tuple(int(evaluate(s, self.symbols)) for s in type_.shape), type_.dtype

    def _make_changing(self, at: int, key: tuple[int, str]) -> int:
        """Make an input one that may be written to; -1 if nothing would see it."""
        if at < 0 and not key[1]:
            return -1
        if at < 0:
            at = self._add(Source("state", *key), None)
        inputs = self._inputs
        if inputs.sources[at].kind == "leaf":
            shape, dtype = self._kind(key)
            inputs.tensors[at] = None
            inputs.own[at] = self._new(np.zeros(shape, dtype.numpy))
        inputs.make_changing(at)
        self._point()
        return at

    def _readable(self, output: int | str) -> Tensor:
        found: Any = None
        if isinstance(output, str):
            index, name = self._key(output)
            found = self._states[index][name] if name else self._leaves[index]
        elif -len(self._results) <= output < len(self._results):
            found = self._results[output]
        if not isinstance(found, Tensor):
            raise UserError(
                "no such result",
                op=f"bound {self.name}",
                got=repr(output),
                expected=f"a number below {len(self._results)}, or a name of state",
            )
        return found


def refuse(lowered: Lowered) -> None:
    """An error for what cannot be bound."""
    why = ""
    if any(s.kind == "grad" for s in lowered.sources) or any(
        w.what != "value" for w in lowered.writes
    ):
        why = "it reads or leaves gradients"
    elif not lowered.outputs:
        why = "it computes nothing"
    elif lowered.homes:
        why = "its arguments are on several devices"
    elif config().eager_debug:
        why = "the Config says to run op by op"
    if why:
        raise UserError(
            f"{lowered.name} cannot be bound: {why}",
            op="bind",
            expected="a function of values and state",
            hint="call the jitted function",
        )


def fitted(
    array: Any, shape: tuple[int, ...], dtype: Any, argument: int | str
) -> np.ndarray[Any, Any]:
    """An array of the very shape and dtype, or an error."""
    given = np.asarray(array)
    if given.shape != shape:
        raise ShapeError(
            "an array does not fit its Buffer",
            op="write",
            expected=shape,
            got=f"{given.shape} for {argument}",
        )
    if given.dtype != dtype.numpy:
        if not isinstance(array, (int, float, list, tuple)) and not np.can_cast(
            given.dtype, dtype.numpy, "same_kind"
        ):
            raise DTypeError(
                "an array does not fit its Buffer",
                op="write",
                expected=dtype,
                got=f"{given.dtype} for {argument}",
            )
        given = given.astype(dtype.numpy)
    return np.ascontiguousarray(given).reshape(shape)


__all__ = ["Bound", "Pending"]
