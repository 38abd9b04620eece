"""From a Body to LLVM IR text: one function per Body, explicit vectors, structured control.

A tile of shape (..., lanes) is a list of LLVM vectors of `lanes` elements, one per leading
index; a scalar is one value. The function runs grid programs [start, stop):

    void name(ptr args, ptr scalars, i64 start, i64 stop, ptr scratch)

`args` holds one pointer per Memory parameter (and, where there are `require` ops, one to the
launch's fault word), `scalars` the values of the Body's Symbols in
sorted order, `scratch` memory private to the worker. Invariant: pure text, no state; the same
Body gives the same text.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import InternalError
from ...core.target import Target
from ...ir.block import Block
from ...ir.node import Node
from ...ir.types import Tile
from ...tile.build import Body, body_sites, body_symbols
from .emit_memory import MemoryEmitter
from .emit_shape import Values, count_of, in_matrix_unit, lanes_of
from .rules import convert, literal, row_for, scalar_type, splat_constant, vector


def emit(body: Body, name: str | None = None, target: Target | None = None) -> tuple[str, int]:
    """The LLVM IR of a Body and the scratch bytes it needs."""
    native = frozenset() if target is None else target.feature_set
    return Emitter(body, native).run(name or body.name)


ANGLES = ("sin", "cos", "tan")


def _is_near(node: Node) -> bool:
    from ...tile.magnitude import near_angle  # not needed where nothing has an angle

    return near_angle(node)


class Emitter(MemoryEmitter):
    """Emits one Body."""

    # ---- frame ----------------------------------------------------------------------------

    def run(self, name: str) -> tuple[str, int]:
        """Emit the function."""
        w = self.w
        w.start("entry")
        for i, parameter in enumerate(self.body.parameters):
            slot = w.value(f"getelementptr ptr, ptr %args, i64 {i}")
            self.values[parameter] = [w.value(f"load ptr, ptr {slot}")]
        for i, symbol in enumerate(body_symbols(self.body)):
            slot = w.value(f"getelementptr i64, ptr %scalars, i64 {i}")
            self.symbols[symbol] = w.value(f"load i64, ptr {slot}")
        self.sites = {node: i + 1 for i, node in enumerate(body_sites(self.body))}
        if self.sites:
            slot = w.value(f"getelementptr ptr, ptr %args, i64 {len(self.body.parameters)}")
            self.fault = w.value(f"load ptr, ptr {slot}")
        self.program_loop()
        w.line("ret void")
        head = (
            f"define void @{name}(ptr noalias %args, ptr noalias %scalars, i64 %start, i64 %stop, "
            "ptr noalias align 64 %scratch) #0 {"
        )
        entry, *lines = w.lines
        text = "\n".join([head, entry, *w.stack, *lines, "}", *w.defined.values()])
        declares = "\n".join(sorted(w.declared.values()))
        attributes = "attributes #0 = { nounwind }\n"
        if w.defined:
            attributes += "attributes #1 = { nounwind noinline }\n"
        return f"{text}\n{declares}\n{attributes}", self.scratch

    def program_loop(self) -> None:
        """The loop over this worker's programs."""
        w = self.w
        head, inside, done = (w.fresh_label(n) for n in ("programs", "program", "done"))
        before = w.label
        w.line(f"br label %{head}")
        w.start(head)
        number, after = w.name(), w.name()
        slot = len(w.lines)
        w.line("")  # the phi, written when the last label is known
        going = w.value(f"icmp slt i64 {number}, %stop")
        w.line(f"br i1 {going}, label %{inside}, label %{done}")
        w.start(inside)
        self.programs = self.delinearize(number)
        self.block(self.body.block)
        w.line(f"{after} = add nsw i64 {number}, 1")
        w.lines[slot] = f"  {number} = phi i64 [ %start, %{before} ], [ {after}, %{w.label} ]"
        w.line(f"br label %{head}")
        w.start(done)

    def delinearize(self, number: str) -> list[str]:
        """Program numbers per grid axis, the last fastest."""
        grid = self.body.grid
        found: list[str] = []
        for size in reversed(grid[1:]):
            extent = self.size(size)
            found.append(self.w.value(f"urem i64 {number}, {extent}"))
            number = self.w.value(f"udiv i64 {number}, {extent}")
        return [number, *reversed(found)]

    # ---- blocks ---------------------------------------------------------------------------

    def block(self, block: Block) -> None:
        """Emit the Nodes of a Block in order."""
        for node in block.nodes:
            self.node(node)

    def node(self, node: Node) -> None:
        """Emit one Node."""
        handler = getattr(self, "emit_" + node.op.name, None)
        if handler is not None:
            handler(node)
        elif node.op.group in ("unary", "binary", "compare", "ternary"):
            self.elementwise(node)
        else:
            raise InternalError("llvm.emit", f"no way to emit {node.op}")

    def elementwise(self, node: Node) -> None:
        """One row of `rules`, for every vector of the tile."""
        inputs = [self.values[i] for i in node.inputs]
        dtype = node.inputs[-1].dtype
        lanes = lanes_of(node.type)
        row = row_for(node.op.name, node.op.name in ANGLES and _is_near(node))
        self.values[node] = [row(self.w, dtype, lanes, list(parts)) for parts in zip(*inputs)]

    def emit_program(self, node: Node) -> None:
        self.values[node] = [self.programs[node.attrs["axis"]]]

    def emit_symbol(self, node: Node) -> None:
        self.values[node] = [self.symbols[node.attrs["value"]]]

    def emit_constant(self, node: Node) -> None:
        one = splat_constant(node.attrs["value"], node.dtype, lanes_of(node.type))
        self.values[node] = [one] * count_of(node.type)

    def emit_iota(self, node: Node) -> None:
        size, dtype = node.attrs["size"], node.dtype
        if size == 1:
            self.values[node] = [literal(0, dtype)]
            return
        lanes, found = lanes_of(node.type), []
        for start in range(0, size, lanes):
            each = [literal(i, dtype) for i in range(start, start + lanes)]
            items = ", ".join(f"{scalar_type(dtype)} {x}" for x in each)
            found.append(each[0] if lanes == 1 else f"<{items}>")
        self.values[node] = found

    def emit_cast(self, node: Node) -> None:
        source, lanes = node.inputs[0].dtype, lanes_of(node.type)
        self.values[node] = [
            convert(self.w, source, node.dtype, lanes, x) for x in self.values[node.inputs[0]]
        ]

    def emit_bitcast(self, node: Node) -> None:
        lanes = lanes_of(node.type)
        a = vector(scalar_type(node.inputs[0].dtype), lanes)
        b = vector(scalar_type(node.dtype), lanes)
        found = self.values[node.inputs[0]]
        self.values[node] = (
            found if a == b else [self.w.value(f"bitcast {a} {x} to {b}") for x in found]
        )

    # ---- conditions -----------------------------------------------------------------------

    def emit_require(self, node: Node) -> None:
        """The first Site whose condition does not hold leaves its number."""
        w, (whole, *rest) = self.w, self.values[node.inputs[0]]
        lanes = lanes_of(node.inputs[0].type)
        mask = vector("i1", lanes)
        for other in rest:
            whole = w.value(f"and {mask} {whole}, {other}")
        if lanes > 1:
            name = f"llvm.vector.reduce.and.v{lanes}i1"
            whole = w.intrinsic(name, "i1", (mask, whole))
        bad, after = w.fresh_label("fault"), w.fresh_label("held")
        w.line(f"br i1 {whole}, label %{after}, label %{bad}")
        w.start(bad)
        w.value(f"cmpxchg ptr {self.fault}, i32 0, i32 {self.sites[node]} monotonic monotonic")
        w.line(f"br label %{after}")
        w.start(after)

    # ---- control --------------------------------------------------------------------------

    def emit_get(self, node: Node) -> None:
        index, source = node.attrs["index"], node.inputs[0]
        results = source.blocks[0].results
        start = sum(self.width(r) for r in results[:index])
        self.values[node] = self.values[source][start : start + self.width(results[index])]

    def width(self, node: Node) -> int:
        """Vectors (or matrix registers) that hold a value."""
        return 1 if in_matrix_unit(node) else count_of(node.type)

    def emit_loop(self, node: Node) -> None:
        lower, upper = self.values[node.inputs[0]][0], self.values[node.inputs[1]][0]
        carried = [x for i in node.inputs[2:] for x in self.values[i]]
        unroll, step = node.attrs["unroll"], node.attrs["step"]
        if unroll > 1:
            span = self.w.value(f"sub nsw i64 {upper}, {lower}")
            wide = step * unroll
            whole = self.w.value(f"sdiv i64 {span}, {wide}")
            whole = self.w.value(f"mul nsw i64 {whole}, {wide}")
            middle = self.w.value(f"add nsw i64 {lower}, {whole}")
            carried = self.one_loop(node, lower, middle, wide, unroll, carried)
            lower = middle
        self.values[node] = self.one_loop(node, lower, upper, step, 1, carried)

    def one_loop(
        self, node: Node, lower: str, upper: str, step: int, copies: int, carried: Values
    ) -> Values:
        """A loop whose body is written `copies` times."""
        w, block = self.w, node.blocks[0]
        types = self.register_types(block.results)
        head, inside, done = (w.fresh_label(n) for n in (block.name, "in", "out"))
        before = w.label
        w.line(f"br label %{head}")
        w.start(head)
        index, following = w.name(), w.name()
        phis = [w.name() for _ in carried]
        slot = len(w.lines)
        w.lines.extend([""] * (1 + len(phis)))
        going = w.value(f"icmp slt i64 {index}, {upper}")
        w.line(f"br i1 {going}, label %{inside}, label %{done}")
        w.start(inside)
        current, place = list(phis), index
        for copy in range(copies):
            if copy:
                place = w.value(f"add nsw i64 {index}, {copy * node.attrs['step']}")
            current = self.loop_body(block, place, current)
        w.line(f"{following} = add nsw i64 {index}, {step}")
        w.lines[slot] = f"  {index} = phi i64 [ {lower}, %{before} ], [ {following}, %{w.label} ]"
        for i, (phi, first, last, type_) in enumerate(zip(phis, carried, current, types)):
            pair = f"[ {first}, %{before} ], [ {last}, %{w.label} ]"
            w.lines[slot + 1 + i] = f"  {phi} = phi {type_} {pair}"
        w.line(f"br label %{head}")
        w.start(done)
        return phis

    def register_types(self, nodes: Sequence[Node]) -> list[str]:
        """LLVM types of the vectors (or matrix registers) that hold some values."""
        found = []
        for node in nodes:
            type_ = node.type
            assert isinstance(type_, Tile)
            one = (
                "x86_amx"
                if in_matrix_unit(node)
                else vector(scalar_type(type_.dtype), lanes_of(type_))
            )
            found += [one] * self.width(node)
        return found

    def loop_body(self, block: Block, index: str, carried: Values) -> Values:
        """Emit a loop's Block once; gives the carried vectors for the next trip."""
        self.values[block.arguments[0]] = [index]
        position = 0
        for argument, result in zip(block.arguments[1:], block.results):
            count = self.width(result)
            self.values[argument] = carried[position : position + count]
            position += count
        self.block(block)
        return [x for r in block.results for x in self.values[r]]

    def emit_branch(self, node: Node) -> None:
        w = self.w
        condition = self.values[node.inputs[0]][0]
        yes, no, join = (w.fresh_label(n) for n in ("then", "otherwise", "join"))
        w.line(f"br i1 {condition}, label %{yes}, label %{no}")
        ends = []
        for label, block in zip((yes, no), node.blocks):
            w.start(label)
            self.block(block)
            ends.append(([x for r in block.results for x in self.values[r]], w.label))
            w.line(f"br label %{join}")
        w.start(join)
        types = self.register_types(node.blocks[0].results)
        (first, first_label), (second, second_label) = ends
        self.values[node] = [
            w.value(f"phi {t} [ {a}, %{first_label} ], [ {b}, %{second_label} ]")
            for t, a, b in zip(types, first, second)
        ]
