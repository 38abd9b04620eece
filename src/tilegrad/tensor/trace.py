"""Trace: a function run once with inputs that have no values, to get its whole Graph.

While a thread has a Trace in progress, Tensors from outside keep their own Nodes untouched;
the Trace holds what stands for them inside. So a trace that fails leaves nothing behind, and
other threads never see one. Invariant: every input of the finished Graph has a Source that
says where its Buffer comes from at each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from dataclasses import replace as replace_field
from typing import Any

from ..core.dtype import uint32
from ..core.errors import Location, TraceError, user_location
from ..graph import build, ops
from ..ir.node import Node, topological
from ..ir.requirement import Requirement, gathering
from ..ir.rewrite import replace
from ..runtime.buffer import HOST
from .placement import check_device, elsewhere, is_stored, settled
from .tensor import Tensor, leaves, mode, stand_ins, unknown_value, values, wrap


@contextmanager
def traced_for(target: Any) -> Iterator[None]:
    """Within the block, trace for the Target of a machine that is not here; None: for the Devices
    here."""
    before, mode.target = mode.target, target
    try:
        yield
    finally:
        mode.target = before


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where an input's Buffer comes from at a call.

    `kind` is 'leaf' (argument leaf number `index`), 'number' (the same, a Python number),
    'state' (Tensor `name` of the object that is leaf `index`), 'grad' (the gradient of that),
    'captured' (the Tensor `holder`), 'key' and 'offset' (the Generator `holder`), 'constant'
    (the Buffer `holder`). `stored`: the Buffer is that of the bytes of weights of a file, which
    the trace unpacks.
    """

    kind: str
    index: int = -1
    name: str = ""
    holder: Any = None
    stored: bool = False


@dataclass(eq=False)
class Rebindable:
    """A Tensor from outside that the trace may rebind: an argument or a part of its state."""

    source: Source
    tensor: Tensor
    first: Node
    read_grad: bool | None = None  # whether there was a gradient when it was first read
    cleared: bool = False  # the gradient was written before it was read
    grad: Tensor | None = None

    @property
    def grad_seen(self) -> bool:
        """Whether the traced function looked at or set the gradient."""
        return self.read_grad is not None or self.cleared


@dataclass
class Randomness:
    """The random numbers a trace draws from one Generator."""

    key: Node
    offset: Node
    draws: int = 0


@dataclass(eq=False)
class Trace:
    """What stands for outside Tensors while a function is traced."""

    name: str
    device: str = HOST  # where the function will run
    location: Location | None = field(default_factory=user_location)
    sources: dict[Node, Source] = field(default_factory=dict)
    rebindable: dict[int, Rebindable] = field(default_factory=dict)  # by id of the Tensor
    nodes: dict[int, Node] = field(default_factory=dict)  # outside Tensors, by id
    kept: list[Tensor] = field(default_factory=list)
    randomness: dict[int, tuple[Any, Randomness]] = field(default_factory=dict)
    requirements: dict[Any, Requirement] = field(default_factory=dict)  # of symbolic sizes
    devices: dict[Node, str] = field(default_factory=dict)  # of values, as far as asked for
    homes: dict[Node, str] = field(default_factory=dict)  # of inputs on another device

    # ---- inputs ---------------------------------------------------------------------------

    def add_input(self, source: Source, shape: tuple[Any, ...], dtype: Any) -> Node:
        """A fresh input that gets its Buffer from the source."""
        node = build.input_(shape, dtype)
        self.sources[node] = source
        return node

    def add_leaf(self, source: Source, outside: Tensor, shape: tuple[Any, ...]) -> Tensor:
        """The traced Tensor for an argument; called while the Trace is in progress."""
        node = self.add_input(source, shape, outside._node.dtype)
        self._settle(node, outside)
        inside = Tensor.__new__(Tensor)
        inside._bind(node, outside._requires_grad)
        if outside._requires_grad:
            leaves[node] = inside
        self.rebindable[id(inside)] = Rebindable(source, inside, node)
        return inside

    def add_state(self, source: Source, outside: Tensor) -> None:
        """Let a Tensor held by an argument object be read and rebound."""
        if id(outside) in self.nodes:
            return
        if outside.trace is not None:
            raise unknown_value(outside._node)
        node = self._stand_for(source, outside)
        self._settle(node, outside)
        self.rebindable[id(outside)] = Rebindable(source, outside, node)

    def _settle(self, node: Node, outside: Tensor) -> None:
        """Note where an argument is, if that is not where the function runs."""
        if elsewhere():
            home = next(iter(settled([outside._node])), self.device)
            if home != self.device:
                self.homes[node] = home

    def _stand_for(self, source: Source, outside: Tensor) -> Node:
        node = outside._node
        if is_stored(node):
            (raw,) = node.inputs
            given = self.add_input(replace_field(source, stored=True), raw.shape, raw.dtype)
            node = ops.unpack(given, **node.attrs)
        else:
            node = self.add_input(source, node.shape, node.dtype)
        self.nodes[id(outside)] = node
        self.kept.append(outside)
        if outside._requires_grad and leaves.get(outside._node) is outside:
            leaves[node] = outside
        return node

    def device_of(self, node: Node) -> str:
        """Where a value is computed: where its inputs are, or where a transfer takes it."""
        for one in topological([node], stop=self.devices.__contains__):
            if one in self.devices:
                continue
            if one.op is ops.transfer:
                self.devices[one] = one.attrs["device"]
            elif one in self.homes:
                self.devices[one] = self.homes[one]
            else:
                found = [self.devices[i] for i in one.inputs if i.op is not ops.input_ or i.shape]
                placed = [d for d in found if d != self.device]
                self.devices[one] = placed[0] if placed else self.device
        return self.devices[node]

    # ---- what Tensor asks while the Trace is in progress ----------------------------------

    def node_of(self, tensor: Tensor) -> Node:
        """The Node that stands for an outside Tensor here."""
        found = self.nodes.get(id(tensor))
        if found is not None:
            return found
        if tensor.trace is not None:  # kept from inside another trace
            raise unknown_value(tensor._node)
        if elsewhere():
            check_device(self.device, tensor._node, self.name)
        return self._stand_for(Source("captured", holder=tensor), tensor)

    def check_assign(self, tensor: Tensor) -> None:
        """Refuse to change a Tensor that is neither made here nor reached by an argument."""
        if tensor.trace is not self and id(tensor) not in self.rebindable:
            raise self._side_effect("assigned to", tensor)

    def _side_effect(self, what: str, tensor: Tensor) -> TraceError:
        label = f" {tensor.label!r}" if tensor.label else ""
        return TraceError(
            f"the jitted function {self.name} {what} a Tensor{label} from outside",
            op="jit",
            expected="a function that changes only what it is given",
            got=f"a change of a captured Tensor {tensor._node.type}",
            hint="pass the Tensor (or the Module or optimizer that holds it) as an argument, "
            "or return the new value",
        )

    def rebind(self, tensor: Tensor, node: Node) -> None:
        """Take another Node for an outside Tensor, within the trace."""
        self.check_assign(tensor)
        self.nodes[id(tensor)] = node

    def grad_of(self, tensor: Tensor) -> Tensor | None:
        """The gradient of an outside Tensor, as seen here."""
        outer = self.rebindable.get(id(tensor))
        if outer is None:
            return tensor._grad
        if not outer.grad_seen:
            before = tensor._grad
            outer.read_grad = before is not None
            if before is not None:
                source = Source("grad", outer.source.index, outer.source.name)
                outer.grad = wrap(self.add_input(source, before._node.shape, before._node.dtype))
        return outer.grad

    def set_grad(self, tensor: Tensor, value: Tensor | None) -> None:
        """Set the gradient of an outside Tensor, within the trace."""
        outer = self.rebindable.get(id(tensor))
        if outer is None:
            raise self._side_effect("set the gradient of", tensor)
        outer.cleared = outer.cleared or not outer.grad_seen
        outer.grad = value

    def random(self, generator: Any) -> tuple[Node, Node]:
        """Key and offset of the next draw from a Generator: they change at every call."""
        entry = self.randomness.get(id(generator))
        if entry is None:
            key = self.add_input(Source("key", holder=generator), (), uint32)
            offset = self.add_input(Source("offset", holder=generator), (), uint32)
            entry = self.randomness[id(generator)] = (generator, Randomness(key, offset))
        drawn = entry[1]
        offset = build.add(drawn.offset, build.constant(drawn.draws, uint32))
        drawn.draws += 1
        return drawn.key, offset

    # ---- the end --------------------------------------------------------------------------

    def finish(self, roots: Sequence[Node]) -> tuple[list[Node], list[Node]]:
        """(inputs, roots) of the traced Graph; every input has a Source."""
        roots = list(roots)
        while True:
            inputs = [n for n in topological(roots) if n.op is ops.input_]
            unknown = [n for n in inputs if n not in self.sources]
            standing = {n: stand_ins[n] for n in unknown if n in stand_ins}
            if not standing:
                break
            roots = replace(roots, standing)
        for node in unknown:
            if node not in values:
                raise unknown_value(node)
            self.sources[node] = Source("constant", holder=values[node])
        order = {n: i for i, n in enumerate(self.sources)}
        return sorted(inputs, key=order.__getitem__), roots


class Tracing:
    """`with Tracing(trace):` makes it the one in progress in this thread."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.gathering = gathering(trace.requirements)

    def __enter__(self) -> Trace:
        if mode.trace is not None:
            raise TraceError("a trace is already in progress", op="jit")
        mode.trace = self.trace
        self.gathering.__enter__()
        return self.trace

    def __exit__(self, *_: Any) -> None:
        mode.trace = None
        self.gathering.__exit__(None, None, None)
