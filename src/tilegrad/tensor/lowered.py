"""Lowered: the Graph of one traced signature, and how a call binds to it.

It says where each input's Buffer comes from, where each result goes, and what state changes;
`trace_function` makes it. `Lowered.run` is the path of every later call. Invariant: `run` does no
work that depends on the size of the Graph; a Buffer is given away only if it was donated, or if it
is the old value of changed state that nobody else holds; state whose name starts with an entry of
its object's `never_copied` is never copied instead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import numpy as np

from ..compiler.loader import Wanted, executable_for
from ..core.config import CHOICES, config, override
from ..core.errors import AxisError, DTypeError, ShapeError, StateError, TraceError, user_location
from ..graph import build, ops
from ..ir.node import Node, next_serial
from ..ir.requirement import Requirement
from ..ir.rewrite import replace
from ..ir.symbol import Expr, evaluate
from ..ir.types import Array
from ..runtime.buffer import HOST, Buffer
from .autograd import histories
from .container import Structure
from .ownership import is_alone, is_exclusive, is_kept, would_copy
from .placement import check_device, copy_of, elsewhere
from .tensor import Tensor, from_buffer, values, wrap
from .tensor import leaves as leaf_tensors
from .trace import Source

LOG = logging.getLogger("tilegrad.jit")
States = dict[int, dict[str, Tensor]]
known: dict[Any, Buffer] = values.data  # type: ignore[attr-defined]
# by weak reference: `known.get(ref(node))` is a plain dict lookup
# What such a reference does when its Node is gone.
forget: Any = values._remove  # type: ignore[attr-defined]


@dataclass(slots=True)
class Outcome:
    """What a result is after a run: root `number`, input `number`, or a fixed `value`."""

    kind: str  # 'root', 'input', 'fixed'
    number: int = -1
    value: Any = None
    type: Any = None
    symbolic: bool = False


@dataclass(slots=True)
class Write:
    """A change of state after a run: of a Tensor's value, or of its gradient."""

    target: Source
    what: str  # 'value', 'grad', 'add grad'
    outcome: Outcome


@dataclass(slots=True)
class Lowered:
    """A traced Graph (`inputs`, `outputs`) and the plan of its calls."""

    name: str
    inputs: tuple[Node, ...]
    sources: tuple[Source, ...]
    outputs: tuple[Node, ...]
    structure: Structure
    outcomes: list[Outcome]
    writes: list[Write] = field(default_factory=list)
    donate: tuple[int, ...] = ()  # inputs whose Buffers the Executable may overwrite
    given: frozenset[int] = frozenset()  # argument leaves donated by the caller
    guards: list[tuple[int, str, bool]] = field(default_factory=list)
    randomness: list[tuple[Any, int]] = field(default_factory=list)
    tracked: bool = False  # results have derivatives
    device: str = HOST
    requirements: Sequence[Requirement] = ()  # what the ops need of the Symbols
    homes: tuple[str, ...] = ()  # devices of the inputs, where they are on several
    breaks: Mapping[str, Sequence[int]] = field(default_factory=dict)  # where kernels would differ
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # that it was traced for
    numerics: tuple[str, ...] = field(default_factory=lambda: config().numerics)  # it is made for
    executable: Any = None
    other: Lowered | None = None
    used: bool = False  # since it was last looked at for being kept
    _direct: tuple[int, ...] | None = None
    _lock: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        plain = all(s.kind == "leaf" for s in self.sources)
        if plain and not (self.writes or self.given or self.tracked or self.homes):
            self._direct = tuple(s.index for s in self.sources)

    def matches(self, states: States) -> bool:
        """Whether the gradients that the trace looked at are there (or not) as they were."""
        for index, name, present in self.guards:
            if (states[index][name]._grad is not None) is not present:
                return False
        return True

    # ---- running --------------------------------------------------------------------------

    def run(self, leaves: Sequence[Any], states: States, symbols: dict[str, int] | None) -> Any:
        """Bind, run, and wrap the results."""
        direct = self._direct
        executable = self.executable
        if executable is None:
            executable = self.compiled()
        if direct is not None:
            buffers = []
            for i in direct:
                leaf = leaves[i]
                buffer = known.get(ref(leaf._node))
                buffers.append(leaf.buffer(self.device) if buffer is None else buffer)
            nodes: list[Node] | None = None
        else:
            buffers = self._buffers(leaves, states)
            nodes = self._nodes(leaves, states, buffers) if self.tracked else None
            if self.requirements:
                executable.check(symbols)
            buffers = self._give_away(leaves, states, buffers)
        try:
            results = executable.run(buffers, symbols)
        except AxisError as error:  # an index was out of range: the state has what was computed
            for write in self.writes if error.results is not None else ():
                self._write(write, leaves, states, buffers, error.results, symbols)  # type: ignore[arg-type]
            raise
        for write in self.writes:
            self._write(write, leaves, states, buffers, results, symbols)
        outcomes = self.outcomes
        if len(outcomes) == 1 and self.structure.kind == "leaf":
            return self._value(outcomes[0], buffers, results, symbols, nodes)
        return self.structure.unflatten(
            [self._value(p, buffers, results, symbols, nodes) for p in outcomes]
        )

    def is_direct(self, count: int) -> bool:
        """Whether a run takes the Buffers of `count` arguments as they come and changes nothing."""
        return self._direct == tuple(range(count)) and bool(self.outputs)

    def run_on(self, buffers: list[Buffer]) -> Any:
        """The same as `run` where `is_direct`, on the Buffers of the arguments."""
        results = self.executable.run(buffers, None)
        outcomes = self.outcomes
        if len(outcomes) == 1 and self.structure.kind == "leaf":
            return self._value(outcomes[0], buffers, results, None, None)
        return self.structure.unflatten(
            [self._value(p, buffers, results, None, None) for p in outcomes]
        )

    @property
    def wanted(self) -> Wanted:
        """The Graph as the compiler is asked for it, on one device."""
        return Wanted(self.inputs, self.outputs, self.donate, self.device, self.requirements)

    def compiled(self) -> Any:
        """The Executable; compiled or loaded at the first call."""
        with self._lock:
            if self.executable is None:
                given = (self.inputs, self.outputs, self.donate)
                with override(**dict(zip(CHOICES, self.numerics))):
                    self.executable = executable_for(
                        *given, self.device, self.requirements, self.homes
                    )
            return self.executable

    def _value(
        self,
        outcome: Outcome,
        buffers: Sequence[Buffer],
        results: Sequence[Buffer],
        symbols: dict[str, int] | None,
        nodes: list[Node] | None,
    ) -> Any:
        if outcome.kind == "fixed":
            return outcome.value
        buffer = results[outcome.number] if outcome.kind == "root" else buffers[outcome.number]
        tensor = Tensor.__new__(Tensor)
        tensor._node = node = _known_node(_concrete(outcome, symbols), buffer)
        tensor._grad = tensor.trace = None
        tensor.label = ""
        tensor._requires_grad = nodes is not None and outcome.value is True
        if nodes is not None and tensor._requires_grad:
            histories[node] = self._history(outcome, nodes)
        return tensor

    def _history(self, outcome: Outcome, nodes: list[Node]) -> Callable[[], Node]:
        """How a result is computed from the Nodes of this call, for derivatives."""

        def build_it() -> Node:
            if outcome.kind == "input":
                return nodes[outcome.number]
            if any(isinstance(s, Expr) for n in self.inputs for s in n.shape):
                raise TraceError(
                    "no derivative through a jitted function with symbolic sizes from outside",
                    op=f"jit {self.name}",
                    expected="backward() or grad() inside of it",
                    got="backward() on its result",
                )
            return replace([self.outputs[outcome.number]], dict(zip(self.inputs, nodes)))[0]

        return build_it

    # ---- binding --------------------------------------------------------------------------

    def _buffers(self, leaves: Sequence[Any], states: States) -> list[Buffer]:
        drawn = {id(g): g.reserve(count) for g, count in self.randomness}
        found = []
        homes = self.homes or (self.device,) * len(self.inputs)
        for node, source, home in zip(self.inputs, self.sources, homes):
            kind = source.kind
            if kind == "leaf":
                found.append(leaves[source.index].buffer(home))
            elif source.stored:
                found.append(
                    bytes_of(self._tensor_of(source, leaves, states), self.name, node.type)
                )
            elif kind == "state":
                found.append(states[source.index][source.name].buffer(home))
            elif kind == "number":
                found.append(_number(leaves[source.index], node, self.name))
            elif kind == "captured":
                found.append(self._captured(source.holder, node))
            elif kind == "constant":
                found.append(source.holder)
            elif kind == "grad":
                grad: Any = self._tensor_of(source, leaves, states)._grad
                found.append(grad.buffer(self.device))
            else:
                value = drawn[id(source.holder)][0 if kind == "key" else 1]
                found.append(Buffer.wrap(np.array(value, np.uint32)))
        return found

    def _captured(self, tensor: Tensor, node: Node) -> Buffer:
        if tensor._node.type != node.type:
            raise ShapeError(
                f"a Tensor that {self.name} captured has changed",
                op=f"jit {self.name}",
                expected=str(node.type),
                got=str(tensor._node.type),
                hint="pass it as an argument",
            )
        if elsewhere():
            check_device(self.device, tensor._node, self.name)
        return tensor.buffer(self.device)

    def _tensor_of(self, source: Source, leaves: Sequence[Any], states: States) -> Tensor:
        if source.kind == "captured":
            return source.holder
        if source.name:
            return states[source.index][source.name]
        return leaves[source.index]

    def _nodes(self, leaves: Sequence[Any], states: States, buffers: list[Buffer]) -> list[Node]:
        """The Nodes of the caller behind the inputs."""
        found = []
        for node, source, buffer in zip(self.inputs, self.sources, buffers):
            if source.stored:
                found.append(self._tensor_of(source, leaves, states)._node.inputs[0])
            elif source.kind in ("leaf", "state"):
                found.append(self._tensor_of(source, leaves, states)._node)
            elif source.kind == "captured":
                found.append(source.holder._node)
            else:
                found.append(from_buffer(buffer, node.shape, node.dtype))
        return found

    # ---- donation and state ---------------------------------------------------------------

    def _give_away(
        self, leaves: Sequence[Any], states: States, buffers: list[Buffer]
    ) -> list[Buffer]:
        """The Buffers to run on: donated ones ended for the caller, shared state copied."""
        if not self.donate and not self.given:
            return buffers
        exclusive = {}
        for p in self.donate:
            source = self.sources[p]
            if not self._is_given(source):
                look = is_alone if is_kept(leaves, source) else is_exclusive
                exclusive[p] = look(self._tensor_of(source, leaves, states), buffers, p)
        result = list(buffers)
        for p, alone in exclusive.items():
            if not alone:
                if is_kept(leaves, self.sources[p]):
                    raise would_copy(self.name, self.sources[p].name, "something else holds it")
                LOG.debug(
                    "jit %s: state %s is shared and was copied", self.name, self.sources[p].name
                )
                result[p] = copy_of(buffers[p])
        if self.given:
            self._end_given(leaves, buffers, result)
        return result

    def _is_given(self, source: Source) -> bool:
        return source.kind in ("leaf", "state") and source.index in self.given

    def _passed_twice(self, source: Source, leaves: Sequence[Any]) -> bool:
        """Whether the very Tensor of a donated argument is another argument too."""
        if source.kind != "leaf":
            return True
        return sum(leaf is leaves[source.index] for leaf in leaves) > 1

    def _end_given(
        self, leaves: Sequence[Any], buffers: list[Buffer], result: list[Buffer]
    ) -> None:
        where = user_location()
        ended: dict[int, int] = {}
        kept: set[int] = set()
        for p, (source, buffer) in enumerate(zip(self.sources, buffers)):
            if self._is_given(source):
                if buffers.count(buffer) > 1:
                    if self._passed_twice(source, leaves):
                        raise StateError(
                            "a donated Buffer is passed twice",
                            op=f"jit {self.name}",
                            expected="no other argument that shares it",
                            hint="pass a clone()",
                        )
                    result[p] = copy_of(buffer)  # equal constants share one Buffer
                    kept.add(source.index)
                    continue
                ended[p] = source.index
        for p in ended:
            buffer = result[p] if result[p].writable else copy_of(result[p])
            result[p] = buffer.donate(where)
            if buffer is not buffers[p]:
                buffers[p].donate(where)
        for i in self.given - set(ended.values()) - kept:  # not needed by the Graph, yet given
            if isinstance(leaves[i], Tensor):
                leaves[i].buffer().donate(where)

    def _write(
        self,
        write: Write,
        leaves: Sequence[Any],
        states: States,
        buffers: Sequence[Buffer],
        results: Sequence[Buffer],
        symbols: dict[str, int] | None,
    ) -> None:
        tensor = self._tensor_of(write.target, leaves, states)
        new = self._value(write.outcome, buffers, results, symbols, None)
        if write.what == "value":
            tensor._node = new._node
            if tensor._requires_grad:
                leaf_tensors[new._node] = tensor
        elif write.what == "grad" or tensor._grad is None:
            tensor._grad = new
        else:
            tensor._grad = wrap(build.add(tensor._grad._node, new._node))


def bytes_of(tensor: Tensor, name: str, type_: Any = None) -> Buffer:
    """The Buffer of the bytes of weights of a file, which must be so yet."""
    now = tensor._node
    raw = now.inputs[0] if now.op is ops.unpack else now
    found = known.get(ref(raw))
    if found is None or not found.is_source or (type_ is not None and raw.type != type_):
        raise StateError(
            f"weights of a file that {name} reads were assigned another value",
            op=f"jit {name}",
            expected="the weights as they were when it was traced",
            got=str(now.type),
            hint="pass the Module that holds them as an argument, and bind again",
        )
    return found


def _concrete(outcome: Outcome, symbols: dict[str, int] | None) -> Array:
    if not outcome.symbolic:
        return outcome.type
    return Array(tuple(evaluate(s, symbols or {}) for s in outcome.type.shape), outcome.type.dtype)


def _known_node(type_: Array, buffer: Buffer) -> Node:
    """An input Node with a value; made by hand, since every result of every call needs one."""
    node = Node.__new__(Node)
    node.op, node.inputs, node.blocks = ops.input_, (), ()
    node.attrs = {"key": ops.fresh_key(), "shape": type_.shape, "dtype": type_.dtype}
    node.type, node.location, node.serial = type_, None, next_serial()
    known[ref(node, forget)] = buffer
    return node


def _number(value: Any, node: Node, name: str) -> Buffer:
    try:
        return Buffer.wrap(np.array(value, node.dtype.numpy))
    except OverflowError:
        raise DTypeError(
            "a Python int does not fit in 64 bits",
            op=f"jit {name}",
            got=value,
            hint="mark the argument static",
        ) from None


__all__ = ["Lowered", "Outcome", "Write"]
