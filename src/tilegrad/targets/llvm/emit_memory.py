"""Emit memory ops: loads and stores of tiles, gathers, scatters, and tiles of a matrix unit.

A tile is loaded vector by vector: contiguous where its lanes walk a unit stride, else by a
gather; masks become masked loads, or branches around scalars. Invariant: nothing is touched
where a mask is false.
"""

from __future__ import annotations

import math
from typing import Any

from ...core import dtype as dtypes
from ...core.dtype import DType
from ...ir.node import Node
from ...ir.types import Memory
from .emit_shape import ShapeEmitter, lanes_of, split_shape, unravel
from .rules import (
    convert,
    literal,
    mangle,
    memory_type,
    row_for,
    scalar_type,
    splat_constant,
    vector,
)


class MemoryEmitter(ShapeEmitter):
    """Ops that touch memory."""

    # ---- memory ---------------------------------------------------------------------------

    def offset(self, memory: Node, index: list[str]) -> str:
        """The element offset of an index."""
        type_ = memory.type
        assert isinstance(type_, Memory)
        total = "0"
        for position, stride in zip(index, type_.element_strides()):
            if position == "0" or stride == 0:
                continue
            term = position
            if stride != 1:
                term = self.w.value(f"mul nsw i64 {position}, {self.size(stride)}")
            total = term if total == "0" else self.w.value(f"add nsw i64 {total}, {term}")
        return total

    def pointer(self, memory: Node, offset: str) -> str:
        """The address of an element."""
        base = self.values[memory][0]
        if offset == "0":
            return base
        return self.w.value(f"getelementptr {memory_type(memory.dtype)}, ptr {base}, i64 {offset}")

    def rows(
        self, memory: Node, shape: tuple[int, ...], axes: tuple[int, ...], offset: str
    ) -> tuple[list[str], str]:
        """Element offsets of each vector of a tile, and the stride along its lanes."""
        strides = [memory.type.element_strides()[a] for a in axes]  # type: ignore[union-attr]
        if not shape:
            return [offset], "1"
        offsets = []
        split = split_shape(shape)
        strides = [*strides[:-1], strides[-1] * split[-1], strides[-1]]
        for number in range(math.prod(split[:-1])):
            total = offset
            for position, stride in zip(unravel(number, split[:-1]), strides):
                if position:
                    step = self.size(stride * position)
                    total = self.w.value(f"add nsw i64 {total}, {step}")
            offsets.append(total)
        return offsets, self.size(strides[-1])

    def from_memory(self, x: str, dtype: DType, lanes: int) -> str:
        """A loaded vector as it is held in registers."""
        if memory_type(dtype) == scalar_type(dtype):
            return x
        if dtype.kind != "bool":  # int4
            return self.w.value(f"trunc {vector('i8', lanes)} {x} to {vector('i4', lanes)}")
        zero = splat_constant(0, dtypes.int8, lanes)
        return self.w.value(f"icmp ne {vector('i8', lanes)} {x}, {zero}")

    def to_memory(self, x: str, dtype: DType, lanes: int) -> str:
        """A vector as it is stored."""
        own = scalar_type(dtype)
        if memory_type(dtype) == own:
            return x
        wider = "zext" if dtype.kind == "bool" else "sext"
        return self.w.value(f"{wider} {vector(own, lanes)} {x} to {vector('i8', lanes)}")

    def masks(self, node: Node, mask: Node | None, count: int, lanes: int) -> list[str | None]:
        """One mask operand per vector."""
        if mask is None:
            return [None] * count
        found = self.values[mask]
        if not mask.shape:
            found = [self.splat(found[0], "i1", lanes)]
        return list(found) if len(found) == count else [found[0]] * count

    def emit_load(self, node: Node) -> None:
        memory, dtype = node.inputs[0], node.dtype
        rank = len(memory.shape)
        index = [self.values[i][0] for i in node.inputs[1 : 1 + rank]]
        mask = node.inputs[1 + rank] if node.attrs["masked"] else None
        shape: tuple[int, ...] = node.attrs["shape"]
        lanes = lanes_of(node.type)
        offsets, stride = self.rows(memory, shape, node.attrs["axes"], self.offset(memory, index))
        masks = self.masks(node, mask, len(offsets), lanes)
        self.values[node] = [
            self.load_vector(memory, o, stride, lanes, m, dtype) for o, m in zip(offsets, masks)
        ]

    def load_vector(
        self, memory: Node, offset: str, stride: str, lanes: int, mask: str | None, dtype: DType
    ) -> str:
        """One vector from memory: contiguous, or strided by a gather."""
        element = memory_type(dtype)
        v = vector(element, lanes)
        align = dtype.size
        if lanes == 1 and mask is None:
            x = self.w.value(f"load {v}, ptr {self.pointer(memory, offset)}, align {align}")
        elif lanes == 1:
            x = self.guarded_load(memory, offset, mask or "true", v, align)
        elif stride == "1" and mask is None:
            x = self.w.value(f"load {v}, ptr {self.pointer(memory, offset)}, align {align}")
        elif stride == "1":
            name = f"llvm.masked.load.{mangle(element, lanes)}.p0"
            self.w.declared[name] = f"declare {v} @{name}(ptr, <{lanes} x i1>, {v})"
            where = self.pointer(memory, offset)
            x = self.w.value(
                f"call {v} @{name}(ptr align {align} {where}, <{lanes} x i1> {mask}, "
                f"{v} zeroinitializer)"
            )
        else:
            offsets = self.lane_offsets(offset, stride, lanes)
            x = self.gather_vector(memory, offsets, lanes, mask, dtype)
        return self.from_memory(x, dtype, lanes)

    def guarded_load(self, memory: Node, offset: str, mask: str, element: str, align: int) -> str:
        """A scalar load that happens only where the mask holds: else it reads element 0's copy."""
        w = self.w
        read, join = w.fresh_label("read"), w.fresh_label("join")
        before = w.label
        w.line(f"br i1 {mask}, label %{read}, label %{join}")
        w.start(read)
        x = w.value(f"load {element}, ptr {self.pointer(memory, offset)}, align {align}")
        w.line(f"br label %{join}")
        w.start(join)
        zero = "0.0" if element in ("float", "double", "half", "bfloat") else "0"
        if element == "bfloat":
            zero = "0xR0000"
        return w.value(f"phi {element} [ {zero}, %{before} ], [ {x}, %{read} ]")

    def lane_offsets(self, offset: str, stride: str, lanes: int) -> str:
        """offset + lane * stride, as a vector."""
        v = f"<{lanes} x i64>"
        lane = "<" + ", ".join(f"i64 {i}" for i in range(lanes)) + ">"
        steps = self.w.value(f"mul {v} {lane}, {self.splat(stride, 'i64', lanes)}")
        return self.w.value(f"add {v} {steps}, {self.splat(offset, 'i64', lanes)}")

    def pointers(self, memory: Node, offsets: str, lanes: int) -> str:
        """Addresses of elements at a vector of offsets."""
        element, base = memory_type(memory.dtype), self.values[memory][0]
        return self.w.value(f"getelementptr {element}, ptr {base}, <{lanes} x i64> {offsets}")

    def gather_vector(
        self, memory: Node, offsets: str, lanes: int, mask: str | None, dtype: DType
    ) -> str:
        """Elements at a vector of offsets."""
        element = memory_type(dtype)
        v = vector(element, lanes)
        if lanes == 1:
            if mask is None:
                where = self.pointer(memory, offsets)
                return self.w.value(f"load {v}, ptr {where}, align {dtype.size}")
            return self.guarded_load(memory, offsets, mask, v, dtype.size)
        name = f"llvm.masked.gather.{mangle(element, lanes)}.v{lanes}p0"
        self.w.declared[name] = f"declare {v} @{name}(<{lanes} x ptr>, <{lanes} x i1>, {v})"
        mask = mask or "splat (i1 true)"
        where = self.pointers(memory, offsets, lanes)
        return self.w.value(
            f"call {v} @{name}(<{lanes} x ptr> align {dtype.size} {where}, "
            f"<{lanes} x i1> {mask}, {v} zeroinitializer)"
        )

    def emit_gather(self, node: Node) -> None:
        memory, offset = node.inputs[0], node.inputs[1]
        mask = node.inputs[2] if len(node.inputs) > 2 else None
        lanes, found = lanes_of(node.type), self.values[offset]
        masks = self.masks(node, mask, len(found), lanes)
        self.values[node] = [
            self.from_memory(self.gather_vector(memory, o, lanes, m, node.dtype), node.dtype, lanes)
            for o, m in zip(found, masks)
        ]

    def emit_store(self, node: Node) -> None:
        memory, value = node.inputs[0], node.inputs[1]
        rank = len(memory.shape)
        index = [self.values[i][0] for i in node.inputs[2 : 2 + rank]]
        mask = node.inputs[2 + rank] if node.attrs["masked"] else None
        shape, lanes = value.shape, lanes_of(value.type)
        offsets, stride = self.rows(memory, shape, node.attrs["axes"], self.offset(memory, index))
        masks = self.masks(node, mask, len(offsets), lanes)
        for x, o, m in zip(self.values[value], offsets, masks):
            self.store_vector(memory, self.to_memory(x, value.dtype, lanes), o, stride, lanes, m)

    def store_vector(
        self, memory: Node, x: str, offset: str, stride: str, lanes: int, mask: str | None
    ) -> None:
        """One vector to memory."""
        dtype = memory.dtype
        element = memory_type(dtype)
        v = vector(element, lanes)
        if lanes == 1:
            align = dtype.size
            self.guarded(
                mask,
                lambda: self.w.line(
                    f"store {v} {x}, ptr {self.pointer(memory, offset)}, align {align}"
                ),
            )
        elif stride == "1" and mask is None:
            self.w.line(f"store {v} {x}, ptr {self.pointer(memory, offset)}, align {dtype.size}")
        elif stride == "1":
            name = f"llvm.masked.store.{mangle(element, lanes)}.p0"
            self.w.declared[name] = f"declare void @{name}({v}, ptr, <{lanes} x i1>)"
            where = self.pointer(memory, offset)
            self.w.line(
                f"call void @{name}({v} {x}, ptr align {dtype.size} {where}, <{lanes} x i1> {mask})"
            )
        else:
            self.scatter_vector(memory, x, self.lane_offsets(offset, stride, lanes), lanes, mask)

    def scatter_vector(
        self, memory: Node, x: str, offsets: str, lanes: int, mask: str | None
    ) -> None:
        """Write elements at a vector of offsets, in lane order."""
        element, dtype = memory_type(memory.dtype), memory.dtype
        v = vector(element, lanes)
        name = f"llvm.masked.scatter.{mangle(element, lanes)}.v{lanes}p0"
        self.w.declared[name] = f"declare void @{name}({v}, <{lanes} x ptr>, <{lanes} x i1>)"
        self.w.line(
            f"call void @{name}({v} {x}, <{lanes} x ptr> align {dtype.size} "
            f"{self.pointers(memory, offsets, lanes)}, <{lanes} x i1> {mask or 'splat (i1 true)'})"
        )

    def guarded(self, mask: str | None, action: Any) -> None:
        """Do something only where a scalar mask holds."""
        if mask is None:
            action()
            return
        w = self.w
        yes, join = w.fresh_label("write"), w.fresh_label("join")
        w.line(f"br i1 {mask}, label %{yes}, label %{join}")
        w.start(yes)
        action()
        w.line(f"br label %{join}")
        w.start(join)

    def emit_scatter(self, node: Node) -> None:
        memory, value, offset = node.inputs[:3]
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        mode, lanes = node.attrs["mode"], lanes_of(value.type)
        found = self.values[value]
        masks = self.masks(node, mask, len(found), lanes)
        for x, o, m in zip(found, self.values[offset], masks):
            if mode == "set" and lanes > 1:
                self.scatter_vector(memory, self.to_memory(x, value.dtype, lanes), o, lanes, m)
                continue
            for lane in range(lanes):
                self.combine(
                    memory,
                    value.dtype,
                    mode,
                    *(
                        self.lane(part, kind, lanes, lane)
                        for part, kind in ((x, scalar_type(value.dtype)), (o, "i64"), (m, "i1"))
                    ),
                )

    def combine(
        self, memory: Node, dtype: DType, mode: str, x: str, offset: str, mask: str | None
    ) -> None:
        """memory[offset] = op(memory[offset], x)."""

        def act() -> None:
            where = self.pointer(memory, offset)
            element = memory_type(dtype)
            new = x
            if mode != "set":
                old = self.w.value(f"load {element}, ptr {where}, align {dtype.size}")
                old = self.from_memory(old, dtype, 1)
                name = {"max": "maximum", "min": "minimum"}.get(mode, mode)
                if dtype.is_float and dtype.bits < 32:
                    wide = [convert(self.w, dtype, dtypes.float32, 1, v) for v in (old, x)]
                    result = row_for(name)(self.w, dtypes.float32, 1, wide)
                    new = convert(self.w, dtypes.float32, dtype, 1, result)
                else:
                    new = row_for(name)(self.w, dtype, 1, [old, x])
            new = self.to_memory(new, dtype, 1)
            self.w.line(f"store {element} {new}, ptr {where}, align {dtype.size}")

        self.guarded(mask, act)

    def emit_atomic_add(self, node: Node) -> None:
        memory, value, offset = node.inputs[:3]
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        lanes, dtype = lanes_of(value.type), node.dtype
        found, element = self.values[value], scalar_type(node.dtype)
        masks = self.masks(node, mask, len(found), lanes)
        result = []
        for x, o, m in zip(found, self.values[offset], masks):
            before = [
                self.atomic(
                    memory,
                    dtype,
                    *(
                        self.lane(part, kind, lanes, lane)
                        for part, kind in ((x, element), (o, "i64"), (m, "i1"))
                    ),
                )
                for lane in range(lanes)
            ]
            result.append(self.pack(before, element) if lanes > 1 else before[0])
        self.values[node] = result

    def atomic(self, memory: Node, dtype: DType, x: str, offset: str, mask: str | None) -> str:
        """Add to one element as one step; the value before, 0 where the mask is false."""
        w, element = self.w, scalar_type(dtype)
        name = "fadd" if dtype.is_float else "add"
        yes, join = w.fresh_label("add"), w.fresh_label("join")
        before = w.label
        w.line(f"br i1 {mask or 'true'}, label %{yes}, label %{join}")
        w.start(yes)
        where = self.pointer(memory, offset)
        old = w.value(f"atomicrmw {name} ptr {where}, {element} {x} monotonic")
        w.line(f"br label %{join}")
        w.start(join)
        zero = literal(0, dtype)
        return w.value(f"phi {element} [ {zero}, %{before} ], [ {old}, %{yes} ]")

    def emit_prefetch(self, node: Node) -> None:
        memory = node.inputs[0]
        index = [self.values[i][0] for i in node.inputs[1:]]
        where = self.pointer(memory, self.offset(memory, index))
        locality = "3" if node.attrs["to"] == "l1" else "2"
        self.w.intrinsic(
            "llvm.prefetch.p0",
            "void",
            ("ptr", where),
            ("i32", "0"),
            ("i32", locality),
            ("i32", "1"),
        )

    def emit_sort(self, node: Node) -> None:
        from .sort import sort_function

        name, text = sort_function(node.inputs[0].dtype, node.attrs["descending"])
        self.w.declared["llvm.smin.i64"] = "declare i64 @llvm.smin.i64(i64, i64)"
        self.w.declared[name] = text  # a helper in the same module
        pointers = ", ".join(f"ptr {self.values[i][0]}" for i in node.inputs[:4])
        self.w.line(f"call void @{name}({pointers}, i64 {self.values[node.inputs[4]][0]})")

    def emit_allocate(self, node: Node) -> None:
        type_ = node.type
        assert isinstance(type_, Memory)
        size = type_.dtype.size * math.prod(type_.shape)
        self.values[node] = [self.w.value(f"getelementptr i8, ptr %scratch, i64 {self.scratch}")]
        self.scratch += (size + 63) // 64 * 64

    # ---- matrix unit (AMX) ----------------------------------------------------------------

    def emit_matrix_zero(self, node: Node) -> None:
        """Loaded from memory, through an address that nobody can compare: LLVM would make one zero
        of several, and tiles cannot be copied but through the stack."""
        rows, columns = node.shape
        pitch = columns * node.dtype.size
        zeros = "private unnamed_addr constant [1024 x i8] zeroinitializer, align 64"
        self.w.declared["tile_zeros"] = f"@tile_zeros = {zeros}"
        where = self.w.value('call ptr asm sideeffect "", "=r,0"(ptr @tile_zeros)')
        self.values[node] = [
            self.w.intrinsic(
                "llvm.x86.tileloadd64.internal",
                "x86_amx",
                ("i16", str(rows)),
                ("i16", str(pitch)),
                ("ptr", where),
                ("i64", str(pitch)),
            )
        ]

    def matrix_address(self, memory: Node, index: list[Node]) -> tuple[str, str]:
        """Address and row pitch in bytes of a 2-D tile (the last two axes of the Memory)."""
        type_ = memory.type
        assert isinstance(type_, Memory)
        where = self.pointer(memory, self.offset(memory, [self.values[i][0] for i in index]))
        pitch = self.size(type_.element_strides()[-2] * type_.dtype.size)
        return where, pitch

    def emit_matrix_load(self, node: Node) -> None:
        rows, columns = node.shape
        where, pitch = self.matrix_address(node.inputs[0], list(node.inputs[1:]))
        self.values[node] = [
            self.w.intrinsic(
                "llvm.x86.tileloadd64.internal",
                "x86_amx",
                ("i16", str(rows)),
                ("i16", str(columns * node.dtype.size)),
                ("ptr", where),
                ("i64", pitch),
            )
        ]

    def emit_matrix_dot(self, node: Node) -> None:
        acc, a, b = node.inputs
        rows, columns = acc.shape
        self.values[node] = [
            self.w.intrinsic(
                f"llvm.x86.{node.attrs['unit']}.internal",
                "x86_amx",
                ("i16", str(rows)),
                ("i16", str(columns * acc.dtype.size)),
                ("i16", str(a.shape[1] * a.dtype.size)),
                ("x86_amx", self.values[acc][0]),
                ("x86_amx", self.values[a][0]),
                ("x86_amx", self.values[b][0]),
            )
        ]

    def emit_matrix_store(self, node: Node) -> None:
        memory, value = node.inputs[:2]
        rows, columns = value.shape
        where, pitch = self.matrix_address(memory, list(node.inputs[2:]))
        self.w.intrinsic(
            "llvm.x86.tilestored64.internal",
            "void",
            ("i16", str(rows)),
            ("i16", str(columns * value.dtype.size)),
            ("ptr", where),
            ("i64", pitch),
            ("x86_amx", self.values[value][0]),
        )
