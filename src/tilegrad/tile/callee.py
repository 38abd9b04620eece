"""A kernel as a Graph calls it: Bodies, and which argument or result each parameter stands for.

A parameter that is *state* is an argument that the kernel writes in place; what it holds then is a
result of the call, after those that are stored, in the order of the arguments. The Schedule lets it
alias the argument where that is donated, and copies the argument first where it is not. A kernel
that was written once for all machines has a Source: its `launches` are for any machine (the
interpreter, the types of results), those for a Target are made in the Schedule. Invariant: the key
covers the text of every Body and the Source (of a TensorCallee the derivative too), so equal keys
compute the same and differentiate the same; a state is one argument and one result, with one type.

A batched kernel has one more grid axis. Every program of the new first axis sees its own part of
the batched Memories; arguments without a batch are shared. Program (i, ...) of the new Body does to
example i what program (...) of the old one did.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..core.errors import InternalError, ShapeError
from ..ir.callee import Callee
from ..ir.node import Node
from ..ir.symbol import Expr, Size, evaluate
from ..ir.text import ATTRIBUTE_PARSERS
from ..ir.types import Array, Memory, Type, product
from . import ops
from .build import Body, BodyBuilder, copy_block
from .row import memory_of
from .text import body_text, parse_body

if TYPE_CHECKING:
    from ..core.target import Target

Launches = tuple[tuple[Body, tuple[tuple[str, int], ...]], ...]


class Source(Protocol):
    """What makes the Bodies of a kernel for a Target."""

    @property
    def key(self) -> str:
        """All that decides what the Bodies are, but the Target; the same in every process."""

    @property
    def portable(self) -> Launches:
        """Bodies for any machine."""

    def launches(self, target: Target) -> Launches:
        """Bodies for a Target, with arguments and results as `portable` has them."""


class KernelCallee(Callee):
    """Bodies in order; the roles of their parameters are ('read', argument), ('store', result) or
    ('state', argument)."""

    text_name = "kernel"
    name = ""

    def __init__(
        self,
        name: str,
        launches: Launches,
        source: Source | None = None,
        source_key: str = "",
    ) -> None:
        self.name, self.launches, self.source = name, launches, source
        self.source_key = source_key if source is None else source.key

    @classmethod
    def named(
        cls, name: str, bodies: Sequence[Body], results: Sequence[str], states: Sequence[str] = ()
    ) -> KernelCallee:
        """Parameters of the same name are the same array: a result, a state, or an argument, in the
        order in which they are met."""
        arguments: dict[str, int] = {}

        def role(parameter: Node) -> tuple[str, int]:
            own = parameter.attrs["name"]
            if own in results:
                return "store", results.index(own)
            return "state" if own in states else "read", arguments.setdefault(own, len(arguments))

        launches = [(body, tuple(role(p) for p in body.parameters)) for body in bodies]
        return cls(name, tuple(launches))

    def __repr__(self) -> str:
        return f"<callee {self.name} {self.content}>"  # the same in every process

    @cached_property
    def content(self) -> str:
        """The hash of the Bodies' text: what is computed."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()[:32]

    @property
    def key(self) -> str:
        """The content; with derivatives it is more."""
        return self.content

    def launches_for(self, target: Target) -> Launches:
        """The Bodies that a Target launches."""
        return self.launches if self.source is None else self.source.launches(target)

    @property
    def level(self) -> str:
        """'placed' if a Body is, else 'portable'."""
        levels = [body.notes.get("level") for body, _ in self.launches]
        return "placed" if "placed" in levels else "portable"

    @cached_property
    def states(self) -> tuple[int, ...]:
        """Arguments that are written in place, in the order of their results."""
        return tuple(sorted({p for _, roles in self.launches for k, p in roles if k == "state"}))

    def types(self, role: str) -> tuple[Array, ...]:
        """Types of its arguments or results; see `types_of`."""
        return types_of(self.launches, role)

    def result_types(self, argument_types: tuple[Type, ...]) -> tuple[Type, ...]:
        """The types of the results."""
        wanted = self.types("read")
        if tuple(argument_types) != wanted:
            raise ShapeError(
                "the kernel was traced for other types",
                op=self.name,
                expected=wanted,
                got=argument_types,
            )
        return (*self.types("store"), *(wanted[i] for i in self.states))

    def to_text(self) -> str:
        """Name, Bodies and roles as JSON, and the key of the Source."""
        parts = [{"body": body_text(body), "roles": roles} for body, roles in self.launches]
        record: dict[str, Any] = {"name": self.name, "launches": parts}
        if self.source_key:
            record["source"] = self.source_key
        return json.dumps(record, sort_keys=True)

    def interpret(self, *arrays: Any) -> tuple[Any, ...]:
        """The results for NumPy arrays, by the Tile interpreter."""
        from .interpret import run

        symbols = bindings(self.types("read"), arrays)
        inputs = [
            np.array(a, order="C") if i in self.states else np.ascontiguousarray(a)
            for i, a in enumerate(arrays)
        ]
        results = []
        for type_ in self.types("store"):
            shape = tuple(evaluate(s, symbols) for s in type_.shape)
            results.append(np.zeros(shape, type_.dtype.numpy))
        for body, roles in self.launches:
            memories = [results[i] if kind == "store" else inputs[i] for kind, i in roles]
            run(body, memories, symbols)
        return (*results, *(inputs[i] for i in self.states))


def types_of(launches: Launches, role: str) -> tuple[Array, ...]:
    """Types of the arguments ('read', states among them), or of the results that are stored
    ('store'), in order."""
    found: dict[int, Array] = {}
    for body, roles in launches:
        for parameter, (kind, place) in zip(body.parameters, roles):
            type_ = memory_of(parameter)
            if (kind == "store") is (role == "store"):
                found[place] = Array(type_.shape, type_.dtype)  # the last Body has it whole
    return tuple(found[i] for i in sorted(found))


def bindings(types: tuple[Array, ...], arrays: tuple[Any, ...]) -> dict[str, int]:
    """Values of the Symbols in the types, from the shapes of arrays."""
    found: dict[str, int] = {}
    for type_, array in zip(types, arrays):
        for size, value in zip(type_.shape, np.shape(array)):
            if isinstance(size, Expr) and size.kind == "symbol":
                found[size.name] = int(value)
    return found


def parse_callee(text: str) -> KernelCallee:
    """The Callee that `to_text` wrote, without its derivative and its Source."""
    record = json.loads(text)
    launches = tuple(
        (parse_body(part["body"]), tuple((kind, place) for kind, place in part["roles"]))
        for part in record["launches"]
    )
    return KernelCallee(record["name"], launches, source_key=record.get("source", ""))


ATTRIBUTE_PARSERS["kernel"] = parse_callee


# ---- batches ------------------------------------------------------------------------------------


INDEXED = {"load": 1, "store": 2, "matrix_load": 1, "matrix_store": 2, "prefetch": 1}  # first index
OFFSET = {"gather": 1, "scatter": 2, "atomic_add": 2}  # input with linear offsets


def batched_launches(launches: Launches, flags: Sequence[bool], size: Size) -> Launches:
    """The launches of a kernel over a batch; `flags` says which arguments have the batch."""
    found = []
    for body, roles in launches:
        own = [kind == "store" or flags[place] for kind, place in roles]
        found.append((_batched(body, own, size), roles))
    return tuple(found)


def _batched(body: Body, flags: Sequence[bool], size: Size) -> Body:
    """A Body over a batch: each program's number leads the index of batched Memories."""
    pairs = list(zip(body.parameters, flags))
    given = [(p.attrs["name"], _with_batch(p.type, size) if on else p.type) for p, on in pairs]
    b = BodyBuilder(body.name, given)  # type: ignore[arg-type]
    batched, number = {p for p, on in pairs if on}, b.add(ops.program(axis=0))

    def moved(_: BodyBuilder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        """An op that says which program it is of, or touches a batched Memory."""
        name, attrs = node.op.name, dict(node.attrs)
        if node.op is ops.program:
            attrs["axis"] += 1
        elif not node.inputs or node.inputs[0] not in batched:
            return None
        elif name in INDEXED:
            if "axes" in attrs:
                attrs["axes"] = tuple(a + 1 for a in attrs["axes"])
            inputs = (*inputs[: INDEXED[name]], number, *inputs[INDEXED[name] :])
        elif name in OFFSET:
            place, stride = OFFSET[name], product(memory_of(node.inputs[0]).shape)
            start = b.apply("multiply", number, stride)
            inputs = (*inputs[:place], b.apply("add", inputs[place], start), *inputs[place + 1 :])
        else:
            raise InternalError("tile.callee", f"no batch of {node.op}")
        return node.op.make(inputs, attrs, location=node.location)

    copy_block(b, body.block, b.parameters, moved)
    return b.finish((size, *body.grid), **body.notes)


def _with_batch(type_: Any, size: Size) -> Memory:
    strides = type_.strides
    if strides is not None:
        strides = (product(type_.shape), *strides)
    return replace(type_, shape=(size, *type_.shape), strides=strides)
