"""Runs of neighbouring elements between registers and memory: vectors, packing, guards.

Elements narrower than 32 bits travel packed in words. Invariant: a run touches exactly the bytes
of its elements, and under a guard that does not hold none: what a load then gives is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.dtype import DType, int4, int8
from .element import kind_of, wrap
from .spread import Spread
from .write import Registers, Writer, braced, halves_of, several, vector

Run = tuple[int, int]  # first register, count


def runs_of(spread: Spread, steps: Sequence[int], align: int, size: int) -> list[Run]:
    """Registers grouped to vectors: neighbours in memory, aligned, 16 bytes at most."""
    offsets = offsets_of(spread, steps)
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


def offsets_of(spread: Spread, steps: Sequence[int]) -> list[int]:
    """What each register adds to the thread's offset."""
    return [sum(c * s for c, s in zip(at, steps)) for at in spread.registers]


# ---- elements and words -----------------------------------------------------------------------


def read_run(
    w: Writer, where: str, form: str, dtype: DType, count: int = 1, guard: str = ""
) -> Registers:
    """Load `count` neighbouring elements."""
    bytes_ = dtype.size * count
    if bytes_ < 4:
        one = w.new("b16")
        if guard:
            w.put("mov.b16", one, "0")
        w.put(f"{form}.b{8 * bytes_}", one, where, guard=guard)
        if count == 1:
            return [_from_bits(w, one, dtype)]
        return split(w, w.value("cvt.u32.u16", one), dtype, count)
    kind = "b64" if dtype.size == 8 else "b32"
    words = several(w, kind, bytes_ // (8 if dtype.size == 8 else 4))
    if guard:
        w.move(words, ["0"] * len(words), kind)
    form, value = vector(form, kind, words)
    w.put(form, value, where, guard=guard)
    return unpacked(w, words, dtype)


def write_run(
    w: Writer, where: str, form: str, dtype: DType, registers: Sequence[str], guard: str = ""
) -> None:
    """Store neighbouring elements."""
    bytes_ = dtype.size * len(registers)
    if bytes_ >= 4:
        form, value = vector(form, "b64" if dtype.size == 8 else "b32", packed(w, registers, dtype))
    else:
        form = f"{form}.b{8 * bytes_}"
        if len(registers) == 1:
            value = _to_bits(w, registers[0], dtype)
        else:
            value = w.value("cvt.u16.u32", join(w, registers, dtype))
    w.put(form, where, value, guard=guard)


def load_matrices(
    w: Writer, where: str, turned: bool = False, count: int = 4, into: Sequence[str] = ()
) -> Registers:
    """Words of 8 x 8 matrices in shared memory, whose rows the lanes point at."""
    words = list(into) or several(w, "b32", count)
    form = f"ldmatrix.sync.aligned.m8n8.x{len(words)}" + (".trans" if turned else "")
    w.put(f"{form}.shared.b16", braced(words), where)
    return words


def packed(w: Writer, registers: Sequence[str], dtype: DType) -> Registers:
    """Elements in words of at least 32 bits."""
    if dtype.size >= 4:
        return list(registers)
    step = 4 // dtype.size
    return [join(w, registers[i : i + step], dtype) for i in range(0, len(registers), step)]


def unpacked(w: Writer, words: Sequence[str], dtype: DType) -> Registers:
    """The elements of words of at least 32 bits."""
    if dtype.size >= 4:
        return list(words)
    return [r for word in words for r in split(w, word, dtype, 4 // dtype.size)]


def split(w: Writer, word: str, dtype: DType, count: int) -> Registers:
    """The elements packed in a 32-bit word."""
    if dtype.size == 2:
        return halves_of(w, word)[:count]
    found = []
    for i in range(count):
        part = w.value("bfe.u32", word, 8 * i, 8)
        found.append(_from_bits(w, w.value("cvt.u16.u32", part), dtype))
        if dtype.is_float or dtype is int8:
            w.note_part(found[-1], word, i)
    return found


def join(w: Writer, registers: Sequence[str], dtype: DType) -> str:
    """Elements packed into a 32-bit word."""
    parts = [w.parts.get(r, ("", -1)) for r in registers]
    if [n for _, n in parts] == [*range(4 // dtype.size)] and len({p for p, _ in parts}) == 1:
        return parts[0][0]  # it was one word
    if dtype.size == 2:
        return w.value("mov.b32", braced(registers))
    word = ""
    for i, register in enumerate(registers):
        part = w.value("cvt.u32.u16", _to_bits(w, register, dtype))
        word = part if not i else w.value("bfi.b32", part, word, 8 * i, 8)
    return word


def _from_bits(w: Writer, register: str, dtype: DType) -> str:
    """A 16-bit register that was loaded, as the dtype is held."""
    if dtype.kind == "bool":
        return w.test("ne.s16", register, 0)
    return wrap(w, dtype, register) if dtype in (int4, int8) else register


def _to_bits(w: Writer, register: str, dtype: DType) -> str:
    return w.value("selp.b16", "1", "0", register) if dtype.kind == "bool" else register


def shuffle(w: Writer, register: str, distance: int, dtype: DType) -> str:
    """The register of the lane whose number differs in some bits."""

    def other(word: str) -> str:
        return w.value("shfl.sync.bfly.b32", word, distance, 31, -1)

    kind = kind_of(dtype)
    if kind == "pred":
        return w.test("ne.s32", other(w.value("selp.b32", 1, 0, register)), 0)
    if kind == "b16":
        return w.value("cvt.u16.u32", other(w.value("cvt.u32.u16", register)))
    if kind == "b32":
        return other(register)
    low, high = several(w, "b32", 2)
    w.put("mov.b64", braced((low, high)), register)
    return w.value("mov.b64", braced((other(low), other(high))))
