"""Copies of the simulator that run on their own: bulk copies and tensor copies.

A copy is checked against what its issuer knew when it was issued; it lands when the scheduler
says so. What lands on an mbarrier counts as written by that barrier's agent in the phase under
way, so only those who saw the phase complete may read it; what a store reads counts as read
until a wait of the issuing thread covers its group. Invariant: bytes move only in `land` and
`work` closures that the cluster's queues run, never at the issue.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .barrier import known_barrier, lanes_of, plain_address
from .errors import (
    DependencyError,
    ExitedPeerError,
    MisalignedError,
    OutOfBoundsError,
    SimulationError,
    TextError,
    UninitialisedError,
)
from .launch import TensorMap
from .machine import Cta, Waiting
from .matrix import wait_engine
from .memory import (
    Space,
    aligned,
    covering,
    depends,
    one_for_all,
    resolve,
    touch_peer,
)
from .text import Instruction, Operand
from .values import (
    PARAMETER_START,
    PARAMETERS,
    RANK_STEP,
    TYPES,
    Array,
    Decoder,
    Mask,
    Run,
)

if TYPE_CHECKING:
    from .barrier import Phases
    from .machine import Warp


class Map:
    """A tensor map bound to its memory: sizes, strides and box with the outermost axis first."""

    def __init__(self, given: TensorMap, grid: Any) -> None:
        self.given = given
        self.space: Space = grid.memories[given.memory]
        self.sizes = list(given.sizes)
        self.strides = list(given.strides)
        self.box, self.swizzle = list(given.box), given.swizzle
        self.dtype = given.dtype
        self.size = self.dtype.itemsize
        self.bytes = math.prod(self.box) * self.size
        row = self.box[-1] * self.size
        if not 1 <= len(self.sizes) == len(self.strides) == len(self.box) <= 5:
            raise SimulationError(f"tensor map of rank {len(self.sizes)}: {given}")
        if any(not 1 <= b <= 256 for b in self.box) or row % 16 or self.strides[-1] != 1:
            raise SimulationError(f"tensor map: a box of {self.box} with rows of {row} bytes")
        if any(s * self.size % 16 for s in self.strides[:-1]):
            raise SimulationError(f"tensor map: strides {self.strides} are not multiples of 16 B")
        if self.swizzle not in (0, 32, 64, 128) or (self.swizzle and row > self.swizzle):
            raise SimulationError(f"tensor map: rows of {row} bytes, swizzle {self.swizzle}")
        if self.swizzle and row < self.swizzle and math.prod(self.box[:-1]) > 1:
            raise SimulationError(
                f"tensor map: rows of {row} bytes fill a swizzle of {self.swizzle} only in part"
            )

    def elements(self, coordinates: list[int]) -> tuple[Array, Array]:
        """(element offsets, which are inside) of a box at coordinates, innermost first."""
        offset, inside = np.zeros(1, np.int64), np.ones(1, np.bool_)
        start = coordinates[::-1]
        for at, box, size, stride in zip(start, self.box, self.sizes, self.strides):
            place = at + np.arange(box)
            offset = (offset[:, None] + place * stride).reshape(-1)
            inside = (inside[:, None] & ((place >= 0) & (place < size))).reshape(-1)
        return offset, inside

    def index(self, coordinates: list[int]) -> tuple[Array, Array]:
        """(byte indices (elements inside, size) in the memory, which elements are inside)."""
        offset, inside = self.elements(coordinates)
        at = offset[inside] * self.size
        if at.size:
            self.space.bounds(int(at.min()), int(at.max()) + self.size)
        return at[:, None] + np.arange(self.size), inside

    def load(self, coordinates: list[int]) -> Array:
        """The bytes of a box, zeros where it is outside."""
        index, inside = self.index(coordinates)
        data = np.zeros((inside.size, self.size), np.uint8)
        data[inside] = self.space.data[index]
        return data.reshape(-1)


def swizzled(start: int, bytes_: int, swizzle: int) -> Array:
    """The 16-byte chunks of shared memory that a box goes to, in the box's order."""
    chunk = (start >> 4) + np.arange(bytes_ // 16)
    return chunk ^ (chunk >> 3 & swizzle // 16 - 1) if swizzle else chunk


def chunks(space: Space) -> Array:
    """Shared memory as chunks of 16 bytes."""
    return space.data.reshape(-1, 16)


def bytes_of(chunk: Array) -> Array | slice:
    """Byte indices of chunks, a slice where they fill a run of bytes."""
    low, high = int(chunk.min()), int(chunk.max())
    if high - low + 1 == chunk.size:
        return slice(low * 16, high * 16 + 16)
    return (chunk[:, None] * 16 + np.arange(16)).reshape(-1)


# ---- onto an mbarrier -----------------------------------------------------------------------


def shared_place(warp: Warp, address: int) -> tuple[Cta, int]:
    """The CTA and the offset of a shared address."""
    address = plain_address(address)
    rank, offset = address >> RANK_STEP, address & ((1 << RANK_STEP) - 1)
    if rank > len(warp.cluster.ctas):
        raise OutOfBoundsError(f"no CTA of rank {rank - 1} in the cluster")
    return (warp.cluster.ctas[rank - 1] if rank else warp.cta), offset


def landing(
    warp: Warp,
    i: Instruction,
    cta: Cta,
    barrier: Phases,
    chunk: Array,
    source: Any,
    operation: str = "",
) -> None:
    """Queue bytes that land in a CTA's shared memory and on its mbarrier, or are added there."""
    space, clock = cta.shared, warp.clock.copy()
    space.bounds(int(chunk.min()) * 16, int(chunk.max()) * 16 + 16)
    touch_peer(warp, cta)
    where = bytes_of(chunk)

    def land() -> None:
        if cta.exited:
            raise ExitedPeerError(f"a copy lands in {cta.name} after its exit")
        data = source().reshape(-1, 16)
        epoch = barrier.phase + 1
        if operation and space.defined is not None and not space.defined[where].all():
            raise UninitialisedError(f"{space.name} is added to where nothing was written")
        space.note_write(
            warp.cluster, where, clock, barrier.agent, epoch, proxy=True, atomic=bool(operation)
        )
        if operation:
            data = _combine(chunks(space)[chunk], data, operation, TYPES[i.words[-1]])
        chunks(space)[chunk] = data
        if space.check:
            cta.remote[barrier.agent] = epoch
        barrier.update(None, 0, -data.size)

    key = ("copy", cta.rank, next(COUNTER))
    warp.cluster.later(key, land, f"copy of {warp.name} to {cta.name}", i)


COUNTER = iter(range(1 << 62))
OPERATIONS = ("add", "min", "max", "and", "or", "xor", "inc", "dec")


def destinations(warp: Warp, into: int, mbarrier: int, mask: int | None) -> list[Any]:
    """(CTA, offset, mbarrier) that a copy goes to."""
    cta, offset = shared_place(warp, into)
    owner, place = shared_place(warp, mbarrier)
    if mask is None:
        if owner is not cta:
            raise SimulationError("the mbarrier of a copy lies in another CTA than its bytes")
        return [(cta, offset, known_barrier(warp, cta, place, True))]
    found = []
    if mask >> len(warp.cluster.ctas):
        raise OutOfBoundsError(f"multicast to {mask:#x} in a cluster of {len(warp.cluster.ctas)}")
    for rank, peer in enumerate(warp.cluster.ctas):
        if mask >> rank & 1:
            touch_peer(warp, peer)
            found.append((peer, offset, known_barrier(warp, peer, place, True)))
    return found


def map_of(warp: Warp, address: int) -> Map:
    """The tensor map at an address of the parameters."""
    maps = warp.cluster.grid.maps
    at = address - PARAMETERS - PARAMETER_START
    if at not in maps:
        raise SimulationError(f"no tensor map at the generic address {address:#x}")
    return maps[at]


def _coordinates(d: Decoder, operand: Operand, rank: int) -> Any:
    parts = operand.parts[1].parts if len(operand.parts) > 1 else ()
    if len(parts) != rank:
        raise TextError(f"{rank} coordinates expected")
    reads = [d.read(part, "s32") for part in parts]
    return lambda warp, lane: [int(read(warp)[lane]) for read in reads]


def decode_tensor_load(d: Decoder, i: Instruction) -> Run:
    """cp.async.bulk.tensor from global to shared memory."""
    rank = next(int(w[0]) for w in i.words if w in ("1d", "2d", "3d", "4d", "5d"))
    into, source, mbarrier = (d.address(o) for o in i.operands[:3])
    place = _coordinates(d, i.operands[1], rank)
    mask_of = d.read(i.operands[3], "u16") if "multicast::cluster" in i.words else None

    def run(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            map_ = map_of(warp, int(source(warp)[lane]))
            at = place(warp, lane)
            if len(map_.box) != rank:
                raise SimulationError(f"a {rank}d copy with a map of rank {len(map_.box)}")
            many = int(mask_of(warp)[lane]) if mask_of is not None else None
            index, _ = map_.index(at)
            depends(warp, map_.space)
            for cta, offset, barrier in destinations(
                warp, int(into(warp)[lane]), int(mbarrier(warp)[lane]), many
            ):
                if offset % 128:
                    raise MisalignedError(f"{offset:#x} is not a multiple of 128")
                if map_.space.check and map_.space._history is not None:
                    map_.space.note_read(
                        warp.cluster,
                        index,
                        warp.clock,
                        barrier.agent,
                        barrier.phase + 1,
                        proxy=True,
                    )
                chunk = swizzled(offset, map_.bytes, map_.swizzle)
                landing(warp, i, cta, barrier, chunk, lambda m=map_, a=at: m.load(a))

    return run


def decode_bulk_load(d: Decoder, i: Instruction) -> Run:
    """cp[.reduce].async.bulk to shared memory, from global or this CTA's shared memory."""
    inside = "shared::cta" in i.words
    operation = next((w for w in i.words if w in OPERATIONS), "")
    into, source, mbarrier = (
        d.address(i.operands[0]),
        d.address(i.operands[1]),
        d.address(i.operands[3]),
    )
    size = d.read(i.operands[2], "u32")
    mask_of = d.read(i.operands[4], "u16") if "multicast::cluster" in i.words else None

    def run(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            bytes_, at = int(size(warp)[lane]), source(warp)[lane : lane + 1]
            many = int(mask_of(warp)[lane]) if mask_of is not None else None
            _sixteen(bytes_, int(at[0]), int(into(warp)[lane]))
            ((space, offset, _),) = resolve(warp, "shared" if inside else "global", at)
            index = slice(int(offset[0]), int(offset[0]) + bytes_)
            space.bounds(index.start, index.stop)
            depends(warp, space)
            for cta, place, barrier in destinations(
                warp, int(into(warp)[lane]), int(mbarrier(warp)[lane]), many
            ):
                if space.shared or space._history is not None:
                    space.note_read(
                        warp.cluster,
                        index,
                        warp.clock,
                        barrier.agent,
                        barrier.phase + 1,
                        proxy=True,
                    )
                chunk = swizzled(place, bytes_, 0)
                landing(
                    warp,
                    i,
                    cta,
                    barrier,
                    chunk,
                    lambda s=space, x=index: s.data[x].copy(),
                    operation,
                )

    return run


def _sixteen(*values: int) -> None:
    for value in values:
        if value % 16:
            raise MisalignedError(f"{value:#x} of a bulk copy is not a multiple of 16")


def decode_st_async(d: Decoder, i: Instruction) -> Run:
    """st.async: a store that lands on an mbarrier."""
    type_ = i.words[-1]
    vector = i.operands[1].kind == "vector"
    into, mbarrier = d.address(i.operands[0]), d.address(i.operands[2])
    reads = [d.read(o, type_) for o in (i.operands[1].parts if vector else i.operands[1:2])]

    def run(warp: Warp, mask: Mask) -> None:
        values = np.ascontiguousarray(np.stack([r(warp) for r in reads], 1)).view(np.uint8)
        clock = warp.clock.copy()
        for lane in lanes_of(mask):
            ((cta, offset, barrier),) = destinations(
                warp, int(into(warp)[lane]), int(mbarrier(warp)[lane]), None
            )
            data = values[lane]
            aligned(np.array([offset]), data.size)
            cta.shared.bounds(offset, offset + data.size)
            if cta.exited:  # who waits for the bytes knows that they are there, and nothing else
                raise ExitedPeerError(f"{cta.name} is stored to after its exit")

            def land(
                cta: Cta = cta, offset: int = offset, barrier: Any = barrier, data: Array = data
            ) -> None:
                if cta.exited:
                    raise ExitedPeerError(f"a store lands in {cta.name} after its exit")
                where, epoch = slice(offset, offset + data.size), barrier.phase + 1
                cta.shared.note_write(warp.cluster, where, clock, barrier.agent, epoch)
                cta.shared.data[where] = data
                cta.remote[barrier.agent] = epoch
                barrier.stored = True
                barrier.update(None, 0, -data.size)

            warp.cluster.later(("store", next(COUNTER)), land, f"st.async of {warp.name}", i)

    return run


# ---- in bulk groups -------------------------------------------------------------------------


def _combine(old: Array, new: Array, operation: str, dtype: np.dtype[Any]) -> Array:
    """What a reducing store leaves: (elements, size) bytes."""
    x, y = (np.ascontiguousarray(v).view(dtype) for v in (old, new))
    if operation == "add" and dtype.kind not in "iu" and dtype.itemsize < 8:
        total = (x.astype(np.float64) + y.astype(np.float64)).astype(dtype)
    else:
        functions: dict[str, Any] = {
            "add": np.add,
            "min": np.minimum,
            "max": np.maximum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
            "inc": lambda old, most: np.where(old >= most, 0, old + 1),
            "dec": lambda old, most: np.where((old == 0) | (old > most), most, old - 1),
        }
        total = functions[operation](x, y).astype(dtype)
    return np.ascontiguousarray(total).view(np.uint8).reshape(old.shape)


def bulk_store(
    warp: Warp,
    i: Instruction,
    lane: int,
    chunk: Array,
    space: Space,
    index: Array,
    inside: Array,
    size: int,
    operation: str,
    dtype: Any,
) -> None:
    """Queue a copy from this CTA's shared memory to bytes `index` of a global memory."""
    shared, clock = warp.cta.shared, warp.clock.copy()
    shared.bounds(int(chunk.min()) * 16, int(chunk.max()) * 16 + 16)
    engine, writes = warp.engine("bulk", lane), warp.engine("bulk write", lane).agent
    if warp.cluster.check and warp.cluster.grid.launch.dependent and not warp.depended:
        raise DependencyError(f"{space.name} is written before griddepcontrol.wait")
    engine.issued += 1
    number = engine.issued
    shared.note_read(warp.cluster, bytes_of(chunk), clock, engine.agent, number, proxy=True)

    def work() -> None:
        data = chunks(shared)[chunk].reshape(-1, size)[inside]
        space.note_write(
            warp.cluster, index, clock, writes, number, proxy=True, atomic=bool(operation)
        )
        space.data[index] = (
            _combine(space.data[index], data, operation, dtype) if operation else data
        )
        engine.done = number

    who = f"bulk store of {warp.name}"
    warp.cluster.later(("bulk", warp.agent, lane), work, who, i)


def decode_tensor_store(d: Decoder, i: Instruction) -> Run:
    """cp.async.bulk.tensor and cp.reduce.async.bulk.tensor from shared to global memory."""
    rank = next(int(w[0]) for w in i.words if w in ("1d", "2d", "3d", "4d", "5d"))
    target, source = d.address(i.operands[0]), d.address(i.operands[1])
    place = _coordinates(d, i.operands[0], rank)
    operation = next((w for w in i.words if w in OPERATIONS), "")

    def run(warp: Warp, mask: Mask) -> None:
        one_for_all(warp, mask, "a bulk store")
        for lane in lanes_of(mask):
            map_ = map_of(warp, int(target(warp)[lane]))
            if len(map_.box) != rank:
                raise SimulationError(f"a {rank}d copy with a map of rank {len(map_.box)}")
            cta, offset = shared_place(warp, int(source(warp)[lane]))
            if cta is not warp.cta or offset % 128:
                raise MisalignedError(f"{offset:#x} is not a multiple of 128 in this CTA")
            index, inside = map_.index(place(warp, lane))
            chunk = swizzled(offset, map_.bytes, map_.swizzle)
            bulk_store(
                warp,
                i,
                int(lane),
                chunk,
                map_.space,
                index,
                inside,
                map_.size,
                operation,
                map_.dtype,
            )

    return run


def decode_bulk_store(d: Decoder, i: Instruction) -> Run:
    """cp.async.bulk and cp.reduce.async.bulk from shared to global memory."""
    target, source, size = (
        d.address(i.operands[0]),
        d.address(i.operands[1]),
        d.read(i.operands[2], "u32"),
    )
    operation = next((w for w in i.words if w in OPERATIONS), "")
    dtype = TYPES[i.words[-1]] if operation else np.dtype(np.uint8)

    def run(warp: Warp, mask: Mask) -> None:
        one_for_all(warp, mask, "a bulk store")
        for lane in lanes_of(mask):
            bytes_, at = int(size(warp)[lane]), target(warp)[lane : lane + 1]
            _, offset = shared_place(warp, int(source(warp)[lane]))
            _sixteen(bytes_, offset, int(at[0]))
            ((space, start, _),) = resolve(warp, "global", at)
            index = covering(space, start, bytes_).reshape(-1, dtype.itemsize)
            inside = np.ones(index.shape[0], np.bool_)
            bulk_store(
                warp,
                i,
                int(lane),
                swizzled(offset, bytes_, 0),
                space,
                index,
                inside,
                dtype.itemsize,
                operation,
                dtype,
            )

    return run


def decode_bulk_group(d: Decoder, i: Instruction) -> Run:
    """cp.async.bulk.commit_group and .wait_group[.read]."""

    def commit(warp: Warp, mask: Mask) -> None:
        for lane in lanes_of(mask):
            if ("bulk", int(lane)) in warp.engines:
                warp.engine("bulk", int(lane)).commit()

    def wait(warp: Warp, mask: Mask) -> Waiting | None:
        pending = int(i.operands[0].text)
        waits = []
        for lane in lanes_of(mask):
            if ("bulk", int(lane)) not in warp.engines:
                continue
            engine, writes = warp.engine("bulk", int(lane)), warp.engine("bulk write", int(lane))

            def finish(target: int, engine: Any = engine, writes: Any = writes) -> None:
                warp.clock[engine.agent] = max(int(warp.clock[engine.agent]), target)
                if "read" not in i.words:
                    warp.clock[writes.agent] = max(int(warp.clock[writes.agent]), target)

            waits.append(wait_engine(warp, engine, pending, "bulk store", finish))
        return together([w for w in waits if w is not None])

    return commit if "commit_group" in i.words else wait


def together(waits: list[Waiting]) -> Waiting | None:
    """One wait for all."""
    if len(waits) < 2:
        return waits[0] if waits else None

    def finish() -> None:
        for one in waits:
            one.finish()

    return Waiting(lambda: all(w.ready() for w in waits), waits[0].what, finish)


def decode(d: Decoder, i: Instruction) -> Run | None:
    """Decode a copy; None if it is not one."""
    words = i.words
    if words[:2] == ["st", "async"]:
        return decode_st_async(d, i)
    if words[0] != "cp":
        return None
    if "bulk" not in words:
        return None
    if "commit_group" in words or "wait_group" in words:
        return decode_bulk_group(d, i)
    if "bulk_group" in words:
        return decode_tensor_store(d, i) if "tensor" in words else decode_bulk_store(d, i)
    return decode_tensor_load(d, i) if "tensor" in words else decode_bulk_load(d, i)
