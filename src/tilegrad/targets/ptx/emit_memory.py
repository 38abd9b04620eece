"""Loads and stores of Tiles: addresses, vectors of up to 16 bytes, masks.

An address is a base every thread shares, the thread's own part, and a fixed part for each run
of registers. Runs of neighbouring elements whose place is known to be aligned move as one.
Invariant: a masked-off element is never touched, and of several threads that hold a copy of an
element one writes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.dtype import DType, int32, int64
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.symbol import high
from ...ir.types import Memory, product
from . import rules
from .emit_values import Values
from .spread import SCALAR, Spread

SWIZZLES = {"": 0, "swizzle32": 32, "swizzle64": 64, "swizzle128": 128, "xor": 128}
Run = tuple[int, int]  # first register, count


class MemoryEmitter(Values):
    """Emits load, store, gather, scatter and atomic_add."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.pointers: dict[Node, str] = {}  # global address (b64) or shared offset (b32)
        self.written, self.read = False, False  # shared memory since the last barrier
        self.shared_bytes = 0
        self.scratch_bytes = [0, 0]  # of the two places of exchanges
        self.scratch_turn = 0
        self.in_role = False

    # ---- barriers of portable Bodies --------------------------------------------------------

    def sync(self) -> None:
        """All threads of the program (or of the role) meet."""
        if self.in_role:
            self.role_sync()
        else:
            self.w.put("bar.sync", "0")
        self.written = self.read = False

    def role_sync(self) -> None:
        """The threads of a role meet."""
        raise InternalError("ptx.emit", "no roles here")

    def before_shared(self, writes: bool) -> None:
        """A barrier where plain order would be broken between threads."""
        if self.in_role:
            return  # a placed Body says itself when things happen
        if (self.read or self.written) if writes else self.written:
            self.sync()
        if writes:
            self.written = True
        else:
            self.read = True

    # ---- addresses ------------------------------------------------------------------------

    def thread_offset(self, spread: Spread, steps: Sequence[int]) -> str | None:
        """The thread's part of an offset: coordinates times steps (bytes), 32 bits."""
        key = ("offset", self.thread, spread.fields, tuple(steps))
        found = self.known(key)
        if found is not None:
            return found if found else None  # type: ignore[no-any-return]
        total: str | None = None
        for shift, width, axis, stride in spread.fields:
            if steps[axis] == 0:
                continue
            part = self.w.value("b32", "mul.lo.s32", self.bits(shift, width),
                                str(stride * steps[axis]))  # fmt: skip
            total = part if total is None else self.w.value("b32", "add.s32", total, part)
        self.keep(key, total or "")
        return total

    def uniform_offset(self, memory: Memory, index: Sequence[Node]) -> tuple[str, DType]:
        """Bytes from the start of a Memory to the index, in a register."""
        w, size = self.w, memory.dtype.size
        small = high(product(memory.shape)) * size < 1 << 31 and all(
            isinstance(s, int) for s in memory.element_strides())  # fmt: skip
        dtype, kind, suffix = (int32, "b32", "s32") if small else (int64, "b64", "s64")
        total = ""
        for node, stride in zip(index, memory.element_strides()):
            register = self.resize(self.scalar(node), self.dtype(node), dtype)
            if isinstance(stride, int):
                if stride * size != 1:
                    register = w.value(kind, f"mul.lo.{suffix}", register, str(stride * size))
            else:
                bytes_ = w.value("b64", "mul.lo.s64", self.size64(stride), str(size))
                register = w.value("b64", "mul.lo.s64", register, bytes_)
            total = w.value(kind, f"add.{suffix}", total, register) if total else register
        return total or w.value(kind, f"mov.{kind}", "0"), dtype

    def global_address(
        self, memory: Node, index: Sequence[Node], spread: Spread, axes: Sequence[int]
    ) -> tuple[str, list[int]]:
        """(64-bit address of the thread, bytes to add for each register)."""
        w, type_ = self.w, memory.type
        assert isinstance(type_, Memory)
        size, strides = type_.dtype.size, type_.element_strides()
        steps = [strides[a] for a in axes]
        total, dtype = self.uniform_offset(type_, index)
        address = self.pointers[memory]
        fixed = [s * size if isinstance(s, int) else 0 for s in steps]
        own = self.thread_offset(spread, fixed)
        if dtype is int32:
            if own is not None:
                total = w.value("b32", "add.s32", total, own)
            address = w.value("b64", "add.s64", address, w.value("b64", "cvt.s64.s32", total))
        else:
            address = w.value("b64", "add.s64", address, total)
            if own is not None:
                address = w.value("b64", "add.s64", address, w.value("b64", "cvt.s64.s32", own))
        address = self.symbolic_part(address, spread, steps, size)
        return address, [sum(c * f for c, f in zip(at, fixed)) for at in spread.registers]

    def symbolic_part(
        self, address: str, spread: Spread, steps: Sequence[object], size: int
    ) -> str:
        """Add the thread's part along axes whose stride is a Symbol."""
        w = self.w
        for axis, step in enumerate(steps):
            if isinstance(step, int):
                continue
            if any(at[axis] for at in spread.registers):
                raise InternalError("ptx.emit", "registers along an axis of symbolic stride")
            part = self.thread_part(spread.fields, axis)
            if part is not None:
                wide = w.value("b64", "cvt.s64.s32", part)
                bytes_ = w.value("b64", "mul.lo.s64", self.size64(step), str(size))  # type: ignore[arg-type]
                address = w.value("b64", "add.s64", address,
                                  w.value("b64", "mul.lo.s64", wide, bytes_))  # fmt: skip
        return address

    def runs(self, spread: Spread, steps: Sequence[int], align: int, size: int) -> list[Run]:
        """Registers grouped to vectors: neighbours in memory, aligned, 16 bytes at most."""
        offsets = [sum(c * s for c, s in zip(at, steps)) for at in spread.registers]
        for _, _, axis, stride in spread.fields:
            align = math.gcd(align, stride * steps[axis])
        found: list[Run] = []
        start = 0
        while start < len(offsets):
            count = 1
            while 2 * count * size <= 16 and start + 2 * count <= len(offsets):
                wide = 2 * count
                near = all(offsets[start + i] == offsets[start] + i for i in range(wide))
                if not near or align % wide or offsets[start] % wide:
                    break
                count = wide
            found.append((start, count))
            start += count
        return found

    def alignment(self, memory: Memory, index: Sequence[Node]) -> int:
        """A number of elements that divides the offset of an index."""
        align = 16
        for node, stride in zip(index, memory.element_strides()):
            step = stride if isinstance(stride, int) else 1
            align = math.gcd(align, self.bounds.divisor(node) * step)
        return align

    # ---- moving ---------------------------------------------------------------------------

    def read_run(self, where: str, form: str, dtype: DType, count: int) -> list[str]:
        """Load `count` neighbouring elements."""
        w, size = self.w, dtype.size
        if size == 8:
            registers = [w.new("b64") for _ in range(count)]
            self._vector(f"{form}", "b64", registers, where, load=True)
            return registers
        bytes_ = size * count
        if bytes_ < 4:
            narrow = "b8" if bytes_ == 1 else "b16"
            if size == bytes_:
                one = w.value("b16", f"{form}.{narrow}", where)
                return [self._from_bits(one, dtype)]
            pair = w.value("b16", f"{form}.b16", where)
            word = w.value("b32", "cvt.u32.u16", pair)
            return self._split(word, dtype, count)
        words = [w.new("b32") for _ in range(bytes_ // 4)]
        self._vector(form, "b32", words, where, load=True)
        if size == 4:
            return words
        return [r for word in words for r in self._split(word, dtype, 4 // size)]

    def write_run(
        self, where: str, form: str, dtype: DType, registers: list[str], guard: str
    ) -> None:
        """Store neighbouring elements."""
        w, size = self.w, dtype.size
        if size == 8:
            self._vector(form, "b64", registers, where, load=False, guard=guard)
            return
        bytes_ = size * len(registers)
        if size == 4:
            words = registers
        elif bytes_ >= 4:
            step = 4 // size
            words = [self._join(registers[i : i + step], dtype)
                     for i in range(0, len(registers), step)]  # fmt: skip
        elif size == bytes_:
            narrow = "b8" if bytes_ == 1 else "b16"
            w.put(f"{form}.{narrow}", where, self._to_bits(registers[0], dtype), guard=guard)
            return
        else:
            word = self._join(registers, dtype)
            w.put(f"{form}.b16", where, w.value("b16", "cvt.u16.u32", word), guard=guard)
            return
        self._vector(form, "b32", words, where, load=False, guard=guard)

    def _vector(
        self, form: str, kind: str, registers: list[str], where: str, load: bool, guard: str = ""
    ) -> None:
        if len(registers) > 1:
            form, value = f"{form}.v{len(registers)}.{kind}", "{" + ", ".join(registers) + "}"
        else:
            form, value = f"{form}.{kind}", registers[0]
        operands = (value, where) if load else (where, value)
        self.w.put(form, *operands, guard=guard)

    def _from_bits(self, register: str, dtype: DType) -> str:
        """A 16-bit register that was loaded, as the dtype is held."""
        if dtype.kind == "bool":
            return self.w.value("pred", "setp.ne.s16", register, "0")
        if dtype.size == 1 and dtype.kind == "int":
            return self.w.value("b16", "cvt.s16.s8", register)
        return register

    def _to_bits(self, register: str, dtype: DType) -> str:
        if dtype.kind == "bool":
            return self.w.value("b16", "selp.b16", "1", "0", register)
        return register

    def _split(self, word: str, dtype: DType, count: int) -> list[str]:
        """The elements packed in a 32-bit word."""
        w = self.w
        if dtype.size == 2:
            low, high_ = w.new("b16"), w.new("b16")
            w.put("mov.b32", f"{{{low}, {high_}}}", word)
            return [low, high_][:count]
        found = []
        for i in range(count):
            part = w.value("b32", "bfe.u32", word, str(8 * i), "8")
            found.append(self._from_bits(w.value("b16", "cvt.u16.u32", part), dtype))
        return found

    def _join(self, registers: list[str], dtype: DType) -> str:
        """Elements packed into a 32-bit word."""
        w = self.w
        if dtype.size == 2:
            return w.value("b32", "mov.b32", "{" + ", ".join(registers) + "}")
        word = ""
        for i, register in enumerate(registers):
            part = w.value("b32", "cvt.u32.u16", self._to_bits(register, dtype))
            word = part if not word else w.value("b32", "bfi.b32", part, word, str(8 * i), "8")
        return word

    # ---- ops ------------------------------------------------------------------------------

    def load_runs(
        self, address: str, offsets: list[int], runs: list[Run], form: str, dtype: DType,
        mask: list[str] | None,
    ) -> list[str]:  # fmt: skip
        """Load all registers of a Spread."""
        found: list[str] = []
        for start, count in runs:
            where = f"[{address}+{offsets[start]}]"
            if mask is None:
                found += self.read_run(where, form, dtype, count)
            else:
                found += self.guarded_run(address, offsets, form, dtype, start, count, mask)
        return found

    def guarded_run(
        self, address: str, offsets: list[int], form: str, dtype: DType, start: int, count: int,
        mask: list[str],
    ) -> list[str]:  # fmt: skip
        """A run under a mask: whole if all of it holds, else element by element; 0 elsewhere."""
        w = self.w
        kind = rules.kind_of(dtype)
        result = [w.new(kind) for _ in range(count)]
        for register in result:
            if kind == "pred":
                w.put("setp.ne.s32", register, self.constant32(0), "0")
            else:
                w.put(f"mov.{kind}", register, "0")
        whole, done = mask[start], w.label("run")
        for i in range(1, count):
            if mask[start + i] != mask[start]:
                whole = w.value("pred", "and.pred", whole, mask[start + i])
        if count > 1:
            apart = w.label("apart")
            w.put("bra", apart, guard=f"!{whole}")
            self.move(result, self.read_run(f"[{address}+{offsets[start]}]", form, dtype, count),
                      kind)  # fmt: skip
            w.put("bra", done)
            w.place(apart)
        for i in range(count) if len(set(mask[start : start + count])) > 1 or count == 1 else ():
            skip = w.label("skip")
            w.put("bra", skip, guard=f"!{mask[start + i]}")
            one = self.read_run(f"[{address}+{offsets[start + i]}]", form, dtype, 1)
            self.move([result[i]], one, kind)
            w.place(skip)
        if count > 1:
            w.place(done)
        return result

    def move(self, to: Sequence[str], registers: Sequence[str], kind: str) -> None:
        """Copy registers."""
        for a, b in zip(to, registers):
            self.w.put("mov.pred" if kind == "pred" else f"mov.{kind}", a, b)

    def store_runs(
        self, address: str, offsets: list[int], runs: list[Run], form: str, dtype: DType,
        registers: list[str], mask: list[str] | None, owner: str,
    ) -> None:  # fmt: skip
        """Store all registers of a Spread."""
        w = self.w
        for start, count in runs:
            part = registers[start : start + count]
            where = f"[{address}+{offsets[start]}]"
            if mask is None:
                self.write_run(where, form, dtype, part, owner)
                continue
            own = mask[start : start + count]
            whole = own[0]
            for other in dict.fromkeys(own[1:]):
                if other != own[0]:
                    whole = w.value("pred", "and.pred", whole, other)
            guard = whole if not owner else w.value("pred", "and.pred", whole, owner)
            self.write_run(where, form, dtype, part, guard)
            if len(set(own)) > 1:
                for i, register in enumerate(part):
                    alone = w.value("pred", "not.pred", whole)
                    alone = w.value("pred", "and.pred", alone, own[i])
                    if owner:
                        alone = w.value("pred", "and.pred", alone, owner)
                    self.write_run(f"[{address}+{offsets[start + i]}]", form, dtype, [register],
                                   alone)  # fmt: skip

    def owner(self, spread: Spread) -> str:
        """A predicate that holds for one of the threads with copies; '' where all are alone."""
        copies = spread.copies(self.threads)
        if not copies:
            return ""
        key = ("owner", self.thread, copies)
        found = self.known(key)
        if found is None:
            part = self.w.value("b32", "and.b32", self.thread, str(copies))
            found = self.keep(key, self.w.value("pred", "setp.eq.s32", part, "0"))
        return found  # type: ignore[no-any-return]

    def emit_load(self, node: Node) -> None:
        memory, index = node.inputs[0], list(node.inputs[1:])
        mask_node = index.pop() if node.attrs["masked"] else None
        spread = self.plan.spread(node)
        mask = None if mask_node is None else self.get(mask_node, spread)
        registers = self.read_tile(memory, index, spread, node.attrs["axes"], mask)
        if node.dtype is int64 and self.dtype(node) is int32:
            registers = [self.resize(r, int64, int32) for r in registers]
        self.held[node] = registers

    def read_tile(
        self, memory: Node, index: list[Node], spread: Spread, axes: Sequence[int],
        mask: list[str] | None,
    ) -> list[str]:  # fmt: skip
        """A Tile at an index, in a Spread."""
        type_ = memory.type
        assert isinstance(type_, Memory)
        if type_.scope != "global":
            return self.read_shared(memory, index, spread, axes, mask)
        address, offsets = self.global_address(memory, index, spread, axes)
        steps = [s if isinstance(s, int) else 0 for s in (type_.element_strides()[a] for a in axes)]
        runs = self.runs(spread, steps, self.alignment(type_, index), type_.dtype.size)
        form = "ld.global.nc" if type_.use == "constant" else "ld.global"
        return self.load_runs(address, offsets, runs, form, type_.dtype, mask)

    def emit_store(self, node: Node) -> None:
        memory, value, index = node.inputs[0], node.inputs[1], list(node.inputs[2:])
        mask_node = index.pop() if node.attrs["masked"] else None
        spread = self.spread_of(value)
        mask = None if mask_node is None else self.get(mask_node, spread)
        registers = self.widened((value,) * len(spread.registers), tuple(self.get(value, spread)))
        self.write_tile(memory, registers, index, spread, node.attrs["axes"], mask)

    def spread_of(self, value: Node) -> Spread:
        """The planned Spread; a default for values that are free."""
        if value.shape == ():
            return SCALAR
        return self.default(value) if self.plan.free(value) else self.plan.spread(value)

    def default(self, value: Node) -> Spread:
        """The Spread of a free value that is stored."""
        from .spread import blocked

        return blocked(value.shape, self.threads, max(1, 16 // max(1, value.dtype.size)))

    def write_tile(
        self, memory: Node, registers: list[str], index: list[Node], spread: Spread,
        axes: Sequence[int], mask: list[str] | None,
    ) -> None:  # fmt: skip
        """Write a Tile at an index."""
        type_ = memory.type
        assert isinstance(type_, Memory)
        if type_.scope != "global":
            self.write_shared(memory, registers, index, spread, axes, mask)
            return
        address, offsets = self.global_address(memory, index, spread, axes)
        steps = [s if isinstance(s, int) else 0 for s in (type_.element_strides()[a] for a in axes)]
        runs = self.runs(spread, steps, self.alignment(type_, index), type_.dtype.size)
        self.store_runs(address, offsets, runs, "st.global", type_.dtype, registers, mask,
                        self.owner(spread))  # fmt: skip

    # ---- elements at offsets ----------------------------------------------------------------

    def element_address(self, memory: Node, offset: str, dtype: DType) -> str:
        """The address of an element by its number."""
        w, size = self.w, max(1, memory.dtype.size)
        if memory.type.scope != "global":  # type: ignore[union-attr]
            low = self.resize(offset, dtype, int32)
            bytes_ = low if size == 1 else w.value("b32", "mul.lo.s32", low, str(size))
            return w.value("b32", "add.s32", self.pointers[memory], bytes_)
        if dtype is int32:
            bytes_ = w.value("b64", "mul.wide.s32", offset, str(size))
        else:
            bytes_ = w.value("b64", "mul.lo.s64", offset, str(size))
        return w.value("b64", "add.s64", self.pointers[memory], bytes_)

    def emit_gather(self, node: Node) -> None:
        memory, offset = node.inputs[0], node.inputs[1]
        spread = self.spread_of(node)
        offsets = self.get(offset, spread)
        masks = self.get(node.inputs[2], spread) if len(node.inputs) > 2 else None
        shared = memory.type.scope != "global"  # type: ignore[union-attr]
        if shared:
            self.before_shared(writes=False)
        constant = memory.type.use == "constant"  # type: ignore[union-attr]
        form = "ld.shared" if shared else "ld.global.nc" if constant else "ld.global"
        seen: dict[tuple[str, str], str] = {}
        found = []
        for i, register in enumerate(offsets):
            key = (register, masks[i] if masks else "")
            if key not in seen:
                address = self.element_address(memory, register, self.dtype(offset))
                seen[key] = self.load_runs(address, [0], [(0, 1)], form, memory.dtype,
                                           [masks[i]] if masks else None)[0]  # fmt: skip
            found.append(seen[key])
        if node.dtype is int64 and self.dtype(node) is int32:
            found = [self.resize(r, int64, int32) for r in found]
        self.held[node] = found

    def emit_scatter(self, node: Node) -> None:
        memory, value, offset = node.inputs[:3]
        if node.attrs["mode"] != "set":
            raise InternalError("ptx.emit", f"scatter {node.attrs['mode']} is not lowered")
        spread = self.spread_of(offset if self.plan.free(value) else value)
        registers = self.widened((value,) * len(spread.registers), tuple(self.get(value, spread)))
        offsets = self.get(offset, spread)
        masks = self.get(node.inputs[3], spread) if len(node.inputs) > 3 else None
        shared = memory.type.scope != "global"  # type: ignore[union-attr]
        if shared:
            self.before_shared(writes=True)
        owner = self.owner(spread)
        for i, register in enumerate(registers):
            address = self.element_address(memory, offsets[i], self.dtype(offset))
            self.store_runs(address, [0], [(0, 1)], "st.shared" if shared else "st.global",
                            memory.dtype, [register], [masks[i]] if masks else None,
                            owner)  # fmt: skip

    # ---- shared places ----------------------------------------------------------------------

    def reserve(self, bytes_: int, align: int) -> int:
        """Bytes of the program's shared memory; gives their offset."""
        at = -(-self.shared_bytes // align) * align
        self.shared_bytes = at + bytes_
        return at

    def shared_address(
        self, memory: Node, index: Sequence[Node], spread: Spread, axes: Sequence[int]
    ) -> tuple[str, list[int]]:
        """(32-bit shared address of the thread, bytes to add for each register)."""
        type_ = memory.type
        assert isinstance(type_, Memory)
        size = max(1, type_.dtype.size)
        strides = [s * size for s in type_.element_strides()]  # type: ignore[operator]
        w, total = self.w, self.pointers[memory]
        for node, stride in zip(index, strides):
            part = w.value("b32", "mul.lo.s32", self.index32(node), str(stride))
            total = w.value("b32", "add.s32", total, part)
        steps = [strides[a] for a in axes]
        own = self.thread_offset(spread, steps)
        if own is not None:
            total = w.value("b32", "add.s32", total, own)
        return total, [sum(c * s for c, s in zip(at, steps)) for at in spread.registers]

    def read_shared(
        self, memory: Node, index: list[Node], spread: Spread, axes: Sequence[int],
        mask: list[str] | None,
    ) -> list[str]:  # fmt: skip
        """A Tile of a shared place."""
        self.before_shared(writes=False)
        address, offsets, runs = self._shared(memory, index, spread, axes)
        return self.load_runs(address, offsets, runs, "ld.shared", memory.dtype, mask)

    def write_shared(
        self, memory: Node, registers: list[str], index: list[Node], spread: Spread,
        axes: Sequence[int], mask: list[str] | None,
    ) -> None:  # fmt: skip
        """A Tile into a shared place."""
        self.before_shared(writes=True)
        address, offsets, runs = self._shared(memory, index, spread, axes)
        self.store_runs(address, offsets, runs, "st.shared", memory.dtype, registers, mask,
                        self.owner(spread))  # fmt: skip

    def _shared(
        self, memory: Node, index: list[Node], spread: Spread, axes: Sequence[int]
    ) -> tuple[str, list[int], list[Run]]:
        type_ = memory.type
        assert isinstance(type_, Memory)
        if SWIZZLES[type_.layout]:
            raise InternalError("ptx.emit", "a swizzled place is read and written whole")
        address, offsets = self.shared_address(memory, index, spread, axes)
        steps = [type_.element_strides()[a] for a in axes]
        align = self.alignment(type_, index)
        runs = self.runs(spread, steps, align, max(1, type_.dtype.size))  # type: ignore[arg-type]
        return address, offsets, runs

    def scratch(self, bytes_: int) -> str:
        """The address of shared bytes for one exchange: two places take turns, so that one
        barrier is enough."""
        self.scratch_turn += 1
        number = self.scratch_turn % 2
        self.scratch_bytes[number] = max(self.scratch_bytes[number], bytes_)
        return self.w.value("b32", "mov.u32", f"exchange_{number}")

    def exchange(
        self, registers: list[str], own: Spread, to: Spread, dtype: DType
    ) -> list[str]:
        """Move a Tile between Spreads through shared memory, row-major."""
        size = max(1, dtype.size)
        steps, step = [], size
        for s in reversed(own.shape):
            steps.insert(0, step)
            step *= s
        base = self.scratch(step)
        for spread, load in ((own, False), (to, True)):
            part = self.thread_offset(spread, steps)
            address = base if part is None else self.w.value("b32", "add.s32", base, part)
            offsets = [sum(c * s for c, s in zip(at, steps)) for at in spread.registers]
            runs = self.runs(spread, [s // size for s in steps], 16, size)
            if load:
                self.sync()
                return self.load_runs(address, offsets, runs, "ld.shared", dtype, None)
            self.store_runs(address, offsets, runs, "st.shared", dtype, registers, None,
                            self.owner(spread))  # fmt: skip
        raise InternalError("ptx.emit", "unreachable")
