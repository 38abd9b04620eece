"""Matrix instructions of the simulator: ldmatrix, stmatrix, mma.sync and wgmma (.sp too).

Fragments are arrays indexed by (register, lane); products are exact in float64 and rounded once
to the accumulator. wgmma is one operation of four warps: it is issued when the last of them
comes, reads shared memory and the accumulators at some later time, and writes the registers of
all four. Invariant: what a wgmma reads counts as read from its issue until a wait covers it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import (
    MatrixFenceError,
    PendingError,
    TextError,
    UninitialisedError,
    WarpgroupError,
)
from .machine import Engine, Waiting
from .memory import Space, load, store
from .sparse import dense
from .text import Instruction, Module
from .values import LANES, TYPES, Array, Decoder, Mask, Run
from .warp import whole

if TYPE_CHECKING:
    from .machine import Cluster, Cta, Warp

SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
SPANS = {0: 0, 1: 128, 2: 64, 3: 32}  # bytes of a swizzle by its code in a descriptor


def watched(module: Module) -> frozenset[int]:
    """The registers that wgmma uses: accumulators, fragments of A, and what is kept of it."""
    found: set[int] = set()
    for i in module.code:
        if i.name.startswith("wgmma.mma_async"):
            words = i.operands[3:4] if "sp" in i.words else []
            for operand in (*(o for o in i.operands[:2] if o.kind == "vector"), *words):
                found.update(operand.registers())
    return frozenset(found)


# ---- shared memory to registers and back ----------------------------------------------------


def decode_ldmatrix(d: Decoder, i: Instruction) -> Run:
    """ldmatrix: 8 x 8 matrices of 16-bit elements, rows given by lanes."""
    count, kind, trans = _matrices(i)
    where = d.address(i.operands[1])
    outs = i.operands[0].parts if i.operands[0].kind == "vector" else i.operands[:1]
    puts = [d.put(o, "b32") for o in outs]
    if len(puts) != count:
        raise TextError(f"{count} registers expected")

    def run(warp: Warp, mask: Mask) -> None:
        whole(warp, mask, "ldmatrix")
        rows = load(warp, kind, where(warp)[: 8 * count], 16).view(np.uint16)
        for number, put in enumerate(puts):
            matrix = rows[8 * number : 8 * number + 8]
            matrix = np.ascontiguousarray(matrix.T if trans else matrix)
            put(warp, mask, matrix.reshape(-1).view(np.uint32))

    return run


def decode_stmatrix(d: Decoder, i: Instruction) -> Run:
    """stmatrix, the other way."""
    count, kind, trans = _matrices(i)
    where = d.address(i.operands[0])
    sources = i.operands[1].parts if i.operands[1].kind == "vector" else i.operands[1:2]
    reads = [d.read(o, "b32") for o in sources]
    if len(reads) != count:
        raise TextError(f"{count} registers expected")

    def run(warp: Warp, mask: Mask) -> None:
        whole(warp, mask, "stmatrix")
        rows = []
        for read in reads:
            matrix = np.ascontiguousarray(read(warp)).view(np.uint16).reshape(8, 8)
            rows.append(np.ascontiguousarray(matrix.T if trans else matrix))
        store(warp, kind, where(warp)[: 8 * count], np.concatenate(rows).view(np.uint8))

    return run


def decode_movmatrix(d: Decoder, i: Instruction) -> Run:
    """movmatrix: an 8 x 8 matrix transposed across the warp."""
    put, read = d.put(i.operands[0], "b32"), d.read(i.operands[1], "b32")

    def run(warp: Warp, mask: Mask) -> None:
        whole(warp, mask, "movmatrix")
        matrix = np.ascontiguousarray(read(warp)).view(np.uint16).reshape(8, 8)
        put(warp, mask, np.ascontiguousarray(matrix.T).reshape(-1).view(np.uint32))

    return run


def _matrices(i: Instruction) -> tuple[int, str, bool]:
    count = next(int(w[1:]) for w in i.words if w in ("x1", "x2", "x4"))
    if "m8n8" not in i.words or i.words[-1] != "b16":
        raise TextError("only 8 x 8 matrices of 16-bit elements are simulated")
    kind = next((w for w in i.words if w in ("shared", "shared::cta")), "")
    return count, kind, "trans" in i.words


# ---- fragments ------------------------------------------------------------------------------


def elements(type_: str) -> tuple[np.dtype[Any], int]:
    """(dtype, elements in a 32-bit register) of an operand type."""
    dtype = TYPES["f32" if type_ == "tf32" else type_]
    return dtype, 4 // dtype.itemsize


def exact(values: Array, type_: str) -> Array:
    """Operand values as float64 or int64, tf32 cut to its bits."""
    if type_ == "tf32":
        bits = np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)
        return bits.view(np.float32).astype(np.float64)
    return values.astype(np.int64 if type_ in ("s8", "u8") else np.float64)


def left_fragment(registers: list[Array], type_: str) -> Array:
    """Registers (register, lane) of A as a matrix of 16 rows: (16, k)."""
    dtype, each = elements(type_)
    count = len(registers)
    stack = np.ascontiguousarray(np.stack(registers)).view(dtype)
    parts = stack.reshape(-1, min(count, 2), 8, 4, each)  # (k block, row half, row, thread, each)
    return parts.transpose(1, 2, 0, 3, 4).reshape(16, -1)


def right_fragment(registers: list[Array], type_: str) -> Array:
    """Registers of B as a matrix of 8 columns, transposed: (8, k)."""
    dtype, each = elements(type_)
    stack = np.ascontiguousarray(np.stack(registers)).view(dtype)
    parts = stack.reshape(-1, 8, 4, each)  # (k block, column, thread, each)
    return parts.transpose(1, 0, 2, 3).reshape(8, -1)


def from_accumulators(registers: list[Array], type_: str) -> Array:
    """Registers of an accumulator of one warp as a matrix: (16, n)."""
    if type_ == "f16":  # two columns a register
        stack = np.ascontiguousarray(np.stack(registers)).view(np.float16)
        parts = stack.reshape(-1, 2, 8, 4, 2)  # (column block, row half, row, thread, column)
        return parts.transpose(1, 2, 0, 3, 4).reshape(16, -1)
    stack = np.stack(registers).view(TYPES[type_])
    parts = stack.reshape(-1, 2, 2, 8, 4)  # (column block, row half, column, row, thread)
    return parts.transpose(1, 3, 0, 4, 2).reshape(16, -1)


def to_accumulators(matrix: Array, type_: str) -> Array:
    """A matrix (16, n) as registers (register, lane)."""
    columns = matrix.shape[1]
    if type_ == "f16":
        parts = matrix.reshape(2, 8, columns // 8, 4, 2).transpose(2, 0, 1, 3, 4)
        return np.ascontiguousarray(parts).view(np.uint32).reshape(-1, LANES)
    parts = matrix.reshape(2, 8, columns // 8, 4, 2).transpose(2, 0, 4, 1, 3)
    return np.ascontiguousarray(parts).view(np.uint32).reshape(-1, LANES)


def accumulate(product: Array, before: Array | None, type_: str, saturate: bool) -> Array:
    """The rounded sum of an exact product and what was there."""
    if before is not None:
        product = product + before.astype(product.dtype)
    if type_ == "s32":
        if saturate:
            product = np.clip(product, -(1 << 31), (1 << 31) - 1)
        return product.astype(np.int32)
    return product.astype(TYPES[type_])


def decode_mma(d: Decoder, i: Instruction) -> Run:
    """mma.sync."""
    shape = next((w for w in i.words if SHAPE.fullmatch(w)), "")
    types = [w for w in i.words[i.words.index("col") + 1 :] if w != "satfinite"]
    into, left, right, added = types
    if into == "f64":
        return _mma_double(d, i)
    if not shape.startswith("m16n8") or into != added:
        raise TextError(f"mma of shape {shape} is not simulated")
    reads = [[d.read(o, "b32") for o in operand.parts] for operand in i.operands[1:]]
    puts = [d.put(o, "b32") for o in i.operands[0].parts]

    def run(warp: Warp, mask: Mask) -> None:
        whole(warp, mask, "mma.sync")
        a, b, c = ([read(warp) for read in group] for group in reads)
        x = exact(left_fragment(a, left), left)
        y = exact(right_fragment(b, right), right)
        total = accumulate(x @ y.T, from_accumulators(c, into), into, "satfinite" in i.words)
        for put, value in zip(puts, to_accumulators(total, into)):
            put(warp, mask, value)

    return run


def _mma_double(d: Decoder, i: Instruction) -> Run:
    """mma.sync.m8n8k4 of f64."""
    reads = [[d.read(o, "f64") for o in operand.parts] for operand in i.operands[1:]]
    puts = [d.put(o, "f64") for o in i.operands[0].parts]

    def run(warp: Warp, mask: Mask) -> None:
        whole(warp, mask, "mma.sync")
        a, b, c = ([read(warp) for read in group] for group in reads)
        total = a[0].reshape(8, 4) @ b[0].reshape(8, 4).T
        total = total + np.stack(c, -1).reshape(8, 8)
        for number, put in enumerate(puts):
            put(warp, mask, np.ascontiguousarray(total.reshape(LANES, 2)[:, number]))

    return run


# ---- wgmma ----------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def offsets(
    rows: int, depth: int, size: int, span: int, leading: int, stride: int, transposed: bool
) -> Array:
    """Byte offsets (rows, depth) of an operand from its start, before the swizzle.

    `rows` run along M or N, `depth` along K; `transposed` if M or N is the contiguous axis.
    """
    row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if not transposed:
        at = k * size
        if span:
            return row % 8 * span + row // 8 * stride + at
        return row % 8 * 16 + row // 8 * stride + at // 16 * leading + at % 16
    if span:
        wide = span // size
        return row % wide * size + row // wide * leading + k % 8 * span + k // 8 * stride
    return row % 8 * size + row // 8 * stride + k % 8 * 16 + k // 8 * leading


def addresses(descriptor: int, rows: int, depth: int, size: int, transposed: bool) -> Array:
    """Shared addresses (rows, depth) of the elements that a descriptor describes."""
    start, leading = (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4
    stride, base = (descriptor >> 32 & 0x3FFF) << 4, descriptor >> 49 & 7
    span = SPANS[descriptor >> 62]
    if base:
        raise TextError("a wgmma descriptor with a base offset is not simulated")
    if descriptor & ((3 << 14) | (3 << 30) | (7 << 46) | (1023 << 52)):
        raise TextError(f"descriptor {descriptor:#018x} has bits set that mean nothing")
    at: Array = start + offsets(rows, depth, size, span, leading, stride, transposed)
    if span:
        at = at ^ ((at >> 7 & span // 16 - 1) << 4)
    return at


@dataclass
class Issue:
    """What one warp gives to a wgmma."""

    warp: Warp
    where: int
    left: int | list[Array]  # a descriptor or registers
    right: int
    scale: bool
    clock: Array
    words: Array | None  # of each lane: what is kept of A


class Product:
    """One decoded wgmma.mma_async, dense or (.sp) with two of every four elements of A."""

    def __init__(self, d: Decoder, i: Instruction) -> None:
        self.i = i
        words = [w for w in i.words if w not in ("satfinite", "sp")]
        match = SHAPE.fullmatch(words[4])
        if match is None:
            raise TextError(f"shape {words[4]}")
        self.columns, self.depth = int(match.group(2)), int(match.group(3))
        self.into, self.left, self.right = words[5:8]
        self.slots = i.operands[0].registers()
        self.fragment = i.operands[1].kind == "vector"
        self.fragment_slots = i.operands[1].registers() if self.fragment else []
        wanted = self.columns // (4 if self.into == "f16" else 2)
        if len(self.slots) != wanted or (self.fragment and len(self.fragment_slots) != 4):
            raise TextError(f"{wanted} accumulators and 4 registers of A expected")
        self.a: Any = (
            [d.read(o, "b32") for o in i.operands[1].parts]
            if self.fragment
            else d.read(i.operands[1], "b64")
        )
        self.sparse = "sp" in i.words
        self.words = d.read(i.operands[3], "b32") if self.sparse else None
        self.word_slots = i.operands[3].registers() if self.sparse else []
        self.selector = int(i.operands[4].text) if self.sparse else 0
        rest = i.operands[5 if self.sparse else 3 :]
        self.b, self.scale = d.read(i.operands[2], "b64"), d.read(rest[0], "pred")
        numbers = [int(o.text) for o in rest[1:]]
        self.signs = numbers[:2] or [1, 1]
        turned = numbers[2:]
        self.trans_left = bool(turned.pop(0)) if turned and not self.fragment else False
        self.trans_right = bool(turned.pop(0)) if turned else False
        if any(s not in (1, -1) for s in self.signs) or turned:
            raise TextError("scales are 1 or -1, and there are two of them")

    def run(self, warp: Warp, mask: Mask) -> None:
        """One warp comes; the last of the four issues the product."""
        whole(warp, mask, "wgmma")
        cta, first = warp.cta, warp.number // 4 * 4
        if len(cta.warps) < first + 4 or not all(
            w.lanes.all() for w in cta.warps[first : first + 4]
        ):
            raise WarpgroupError(f"warps {first}..{first + 3} are not a whole warpgroup")
        if warp.cluster.check:
            self.check_registers(warp)
        engine = warp.engine("wgmma")
        engine.issued += 1
        engine.open += 1
        for slot in self.slots:
            warp.accumulators[slot] = engine.issued
        for slot in (*self.fragment_slots, *self.word_slots):
            warp.fragments[slot] = engine.issued
        left = [r(warp) for r in self.a] if self.fragment else uniform(self.a(warp), "descriptor")
        scale = bool(uniform(self.scale(warp), "scale-d"))
        issue = Issue(
            warp,
            self.i.number,
            left,
            uniform(self.b(warp), "descriptor"),
            scale,
            warp.known(mask).copy(),
            None if self.words is None else self.words(warp).copy(),
        )
        came = cta.products.setdefault((first, engine.issued), [])
        came.append(issue)
        if issue.where != came[0].where:
            raise WarpgroupError("the warps of a warpgroup issue different wgmma")
        if len(came) == 4:
            del cta.products[first, engine.issued]
            self.issue(cta, first, engine.issued, sorted(came, key=lambda x: x.warp.number))

    def check_registers(self, warp: Warp) -> None:
        """Registers must have been fenced since they were touched."""
        if not warp.fenced:
            raise MatrixFenceError("the first wgmma comes without a wgmma.fence before")
        waited = warp.engine("wgmma").waited
        if any(warp.accumulators.get(s, 0) > waited for s in self.fragment_slots) or any(
            warp.fragments.get(s, 0) > waited for s in self.slots
        ):
            raise PendingError(
                "a wgmma uses registers of another that is under way, one as A and "
                "the other as accumulator"
            )
        touched = warp.touched & {*self.slots, *self.fragment_slots, *self.word_slots}
        if touched:
            raise MatrixFenceError(
                f"{len(touched)} registers of this wgmma were touched since the last wgmma.fence"
            )

    def issue(self, cta: Cta, first: int, number: int, issues: list[Issue]) -> None:
        """All four are here: note what will be read, and queue the work."""
        same = {(x.right, x.scale, x.left if isinstance(x.left, int) else 0) for x in issues}
        if len(same) != 1:
            raise WarpgroupError("the warps of a warpgroup give different descriptors or scales")
        clock = np.minimum.reduce([x.clock for x in issues])
        size = TYPES["f32" if self.right == "tf32" else self.right].itemsize
        right = addresses(issues[0].right, self.columns, self.depth, size, self.trans_right)
        space, agent = cta.shared, cta.warps[first].engine("wgmma").agent
        self.note(cta, space, right, size, clock, agent, number)
        left = None
        if isinstance(issues[0].left, int):
            depth = self.depth // 2 if self.sparse else self.depth
            left = addresses(issues[0].left, 64, depth, size, self.trans_left)
            self.note(cta, space, left, size, clock, agent, number)
        warps = [x.warp for x in issues]

        def work() -> None:
            self.work(space, warps, issues, left, right, number)

        who = f"wgmma of {cta.name} warps {first}..{first + 3}"
        cta.cluster.later(("wgmma", cta.rank, first), work, who, self.i)

    @staticmethod
    def note(
        cta: Cta, space: Space, at: Array, size: int, clock: Array, agent: int, number: int
    ) -> None:
        """Shared memory that the product reads."""
        space.bounds(int(at.min()), int(at.max()) + size)
        if space.check:
            flags = np.zeros(space.data.size // 16 + 1, np.bool_)
            flags[at >> 4] = True
            chunks = np.flatnonzero(flags)
            index = (chunks[:, None] * 16 + np.arange(16)).reshape(-1)
            exact_ = chunks.size * 16 == at.size * size
            if not exact_:
                index = (at.reshape(-1, 1) + np.arange(size)).reshape(-1)
            space.note_read(cta.cluster, index, clock, agent, number, proxy=True)

    def work(
        self,
        space: Space,
        warps: list[Warp],
        issues: list[Issue],
        left: Array | None,
        right: Array,
        number: int,
    ) -> None:
        """Multiply, and write the accumulators of the four warps."""
        b = exact(gather(space, right, self.right), self.right) * self.signs[1]
        if left is not None:
            a = gather(space, left, self.left)
        else:
            a = np.concatenate([left_fragment(x.left, self.left) for x in issues])  # type: ignore[arg-type]
        a = exact(a, self.left)
        if self.sparse:
            given = np.stack([x.words for x in issues])  # type: ignore[misc]
            a = dense(a, given, self.selector, elements(self.left)[0].itemsize)
        product = (a * self.signs[0]) @ b.T
        for order, warp in enumerate(warps):
            before = None
            if issues[0].scale:
                if any(warp.registers[s] is None for s in self.slots):
                    raise UninitialisedError("an accumulator is added to but was never written")
                before = from_accumulators([warp.registers[s] for s in self.slots], self.into)
            total = accumulate(
                product[16 * order : 16 * order + 16],
                before,
                self.into,
                "satfinite" in self.i.words,
            )
            for slot, value in zip(self.slots, to_accumulators(total, self.into)):
                warp.registers[slot] = value
            warp.engine("wgmma").done = number


def unfinished(cluster: Cluster) -> None:
    """Nobody can go on: fail if a wgmma waits for warps that do not come."""
    for cta in cluster.ctas:
        for (first, _), came in cta.products.items():
            here = sorted(x.warp.number for x in came)
            instruction = cluster.grid.code[came[0].where].instruction
            raise WarpgroupError(
                f"only warps {here} of {first}..{first + 3} issue this wgmma; the program stands "
                f"still: {cluster.stuck()}",
                instruction,
                cta.name,
            )


def gather(space: Space, at: Array, type_: str) -> Array:
    """Elements of shared memory at addresses."""
    dtype = TYPES["f32" if type_ == "tf32" else type_]
    whole_ = space.data[: space.data.size // 8 * 8].view(dtype)
    return whole_[at // dtype.itemsize]


def uniform(value: Array, what: str) -> int:
    """The one value that all lanes hold."""
    if not (value == value[0]).all():
        raise WarpgroupError(f"the lanes give different {what}s")
    return int(value[0])


def wait_engine(
    warp: Warp, engine: Engine, pending: int, what: str, finish: Callable[[int], None]
) -> Waiting | None:
    """Wait until all but the newest `pending` groups of an engine are done."""
    target = max(engine.covered(pending), engine.waited)

    def end() -> None:
        engine.waited = max(engine.waited, target)
        while engine.groups and engine.groups[0] <= engine.waited and len(engine.groups) > pending:
            engine.groups.popleft()
        finish(target)

    if engine.done >= target:
        end()
        return None

    def words() -> str:
        return f"{what} {target} of {engine.issued} ({engine.done} done)"

    return Waiting(lambda: engine.done >= target, words, end)


def decode_wgmma(d: Decoder, i: Instruction) -> Run:
    """wgmma.fence, .mma_async, .commit_group and .wait_group."""
    kind = i.words[1]
    if kind == "mma_async":
        return Product(d, i).run

    def fence(warp: Warp, mask: Mask) -> None:
        whole(warp, mask, "wgmma.fence")
        warp.fenced = True
        warp.touched.clear()

    def commit(warp: Warp, mask: Mask) -> None:
        whole(warp, mask, "wgmma.commit_group")
        warp.engine("wgmma").commit()

    def wait(warp: Warp, mask: Mask) -> Waiting | None:
        whole(warp, mask, "wgmma.wait_group")
        engine = warp.engine("wgmma")
        lead = warp.cta.warps[warp.number // 4 * 4].engine("wgmma").agent

        def finish(target: int) -> None:
            warp.clock[lead] = max(int(warp.clock[lead]), target)

        return wait_engine(warp, engine, int(i.operands[0].text), "wgmma", finish)

    return {"fence": fence, "commit_group": commit, "wait_group": wait}[kind]


def decode(d: Decoder, i: Instruction) -> Run | None:
    """Decode a matrix instruction; None if it is not one."""
    table = {
        "ldmatrix": decode_ldmatrix,
        "stmatrix": decode_stmatrix,
        "mma": decode_mma,
        "movmatrix": decode_movmatrix,
        "wgmma": decode_wgmma,
    }
    return table[i.words[0]](d, i) if i.words[0] in table else None
