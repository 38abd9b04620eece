"""Runs of neighbouring elements between registers and memory: vectors, packing, guards.

Elements narrower than 32 bits travel packed in words. Invariant: a run touches exactly the bytes
of its elements, and under a guard that does not hold none: what a load then gives is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.dtype import DType, int4, int8
from ...ir.node import Node
from ...ir.types import Memory
from ...tile.bounds import divisor_of
from .element import wrap
from .emit_values import Values
from .spread import Spread

Run = tuple[int, int]  # first register, count


class Moves(Values):
    """Loads and stores of runs."""

    # ---- where ----------------------------------------------------------------------------

    def thread_offset(self, spread: Spread, steps: Sequence[int]) -> str | None:
        """The thread's part of an offset: coordinates times steps (bytes), 32 bits."""
        key = ("offset", self.thread, spread.fields, tuple(steps))
        found = self.known(key)
        if found is not None:
            return found if found else None
        total: str | None = None
        for shift, width, axis, stride in spread.fields:
            if steps[axis] == 0:
                continue
            part = self.w.value(
                "b32", "mul.lo.s32", self.bits(shift, width), str(stride * steps[axis])
            )
            total = part if total is None else self.w.value("b32", "add.s32", total, part)
        self.keep(key, total or "")
        return total

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
        """A number of elements that divides the offset of an index, 16 at most."""
        align = 16
        for node, stride in zip(index, memory.element_strides()):
            align = math.gcd(align, self.bounds.divisor(node) * divisor_of(stride))
        return align

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
        return found

    # ---- moving ---------------------------------------------------------------------------

    def move(self, to: Sequence[str], registers: Sequence[str], kind: str) -> None:
        """Copy registers."""
        for a, b in zip(to, registers):
            self.w.put("mov.pred" if kind == "pred" else f"mov.{kind}", a, b)

    def read_run(
        self, where: str, form: str, dtype: DType, count: int, guard: str = ""
    ) -> list[str]:
        """Load `count` neighbouring elements."""
        w, size = self.w, dtype.size
        if size == 8:
            return self._fetch(form, "b64", count, where, guard)
        bytes_ = size * count
        if bytes_ < 4:
            one = w.new("b16")
            if guard:
                w.put("mov.b16", one, "0")
            w.put(f"{form}.{'b8' if bytes_ == 1 else 'b16'}", one, where, guard=guard)
            if size == bytes_:
                return [self._from_bits(one, dtype)]
            return self._split(w.value("b32", "cvt.u32.u16", one), dtype, count)
        words = self._fetch(form, "b32", bytes_ // 4, where, guard)
        if size == 4:
            return words
        return [r for word in words for r in self._split(word, dtype, 4 // size)]

    def _fetch(self, form: str, kind: str, count: int, where: str, guard: str) -> list[str]:
        """Words from memory."""
        registers = [self.w.new(kind) for _ in range(count)]
        if guard:
            for register in registers:
                self.w.put(f"mov.{kind}", register, "0")
        self._vector(form, kind, registers, where, load=True, guard=guard)
        return registers

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
            words = [
                self._join(registers[i : i + step], dtype) for i in range(0, len(registers), step)
            ]
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
        return wrap(self.w, dtype, register) if dtype in (int4, int8) else register

    def _to_bits(self, register: str, dtype: DType) -> str:
        if dtype.kind == "bool":
            return self.w.value("b16", "selp.b16", "1", "0", register)
        return register

    def _split(self, word: str, dtype: DType, count: int) -> list[str]:
        """The elements packed in a 32-bit word."""
        w = self.w
        if dtype.size == 2:
            low, high = w.new("b16"), w.new("b16")
            w.put("mov.b32", f"{{{low}, {high}}}", word)
            return [low, high][:count]
        found = []
        for i in range(count):
            part = w.value("b32", "bfe.u32", word, str(8 * i), "8")
            found.append(self._from_bits(w.value("b16", "cvt.u16.u32", part), dtype))
            if dtype.is_float:
                w.note_byte(found[-1], word, i)
        return found

    def _join(self, registers: list[str], dtype: DType) -> str:
        """Elements packed into a 32-bit word."""
        w = self.w
        if dtype.size == 2:
            parts = [w.halves.get(r, ("", -1)) for r in registers]
            if [n for _, n in parts] == [0, 1] and parts[0][0] == parts[1][0]:
                return parts[0][0]  # it was one word
            return w.value("b32", "mov.b32", "{" + ", ".join(registers) + "}")
        word = ""
        for i, register in enumerate(registers):
            part = w.value("b32", "cvt.u32.u16", self._to_bits(register, dtype))
            word = part if not i else w.value("b32", "bfi.b32", part, word, str(8 * i), "8")
        return word
