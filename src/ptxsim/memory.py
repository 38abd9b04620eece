"""Memory of the simulator: bytes, who touched each of them last, loads, stores and atomics.

A Space is one run of bytes: a CTA's shared memory, one global memory, the parameters. It knows
for every byte the last write and (shared) the last read of every agent, by the epochs of vector
clocks, and whether a plain store has been fenced for the asynchronous proxy. Global memory is
checked within a cluster only. Invariant: no byte is read or written but through `note_read` and
`note_write`, so that every access is checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import (
    BarrierError,
    DependencyError,
    ExitedPeerError,
    MisalignedError,
    OutOfBoundsError,
    ProxyFenceError,
    RaceError,
    TextError,
    UninitialisedError,
)
from .text import Instruction
from .values import (
    GLOBAL,
    GLOBAL_STEP,
    LANES,
    PARAMETER_START,
    PARAMETERS,
    RANK_STEP,
    SHARED_WINDOW,
    TYPES,
    Array,
    Decoder,
    Mask,
    Run,
)

if TYPE_CHECKING:
    from .machine import Clock, Cluster, Warp

UNFENCED = 2**31 - 1
LANE = np.arange(LANES)
NOTED = 1 << 20  # bytes of a global memory of which reads before the first write are noted
SPACES = ("global", "shared", "shared::cta", "shared::cluster", "param", "const", "local")


class History:
    """Who wrote and read each byte of a Space last."""

    def __init__(self, size: int, shared: bool) -> None:
        self.shared = shared
        self.writer = np.full(size, -1, np.int16)
        self.written = np.zeros(size, np.int32)
        self.fenced = np.zeros(size, np.int32)
        self.atomic = np.zeros(size, np.bool_)
        self.readers: dict[int, Array] = {}
        self.owner = None if shared else np.full(size, -1, np.int32)
        self.before: Array | None = None  # owners of the bytes just written, before that
        self.reader = None if shared else np.full(size, -1, np.int16)
        self.read = None if shared else np.zeros(size, np.int32)
        self.reader_owner = None if shared else np.full(size, -1, np.int32)

    def unordered_write(self, clock: Clock, index: Any, cluster: int, atomic: bool) -> int | None:
        """An agent whose write of these bytes the clock does not know."""
        writer, written = self.writer[index], self.written[index]
        bad = written > clock[writer]
        if self.owner is not None:
            bad &= self.owner[index] == cluster  # numbers of agents are those of a cluster
        if atomic:
            bad &= ~self.atomic[index]
        return int(writer[bad][0]) if bad.any() else None

    def unordered_read(self, clock: Clock, index: Any, cluster: int) -> int | None:
        """An agent whose read of these bytes the clock does not know."""
        if self.reader is not None:
            assert self.read is not None and self.reader_owner is not None
            reader = self.reader[index]
            bad = (self.read[index] > clock[reader]) & (self.reader_owner[index] == cluster)
            return int(reader[bad][0]) if bad.any() else None
        for agent, epochs in self.readers.items():
            if (epochs[index] > clock[agent]).any():
                return agent
        return None

    def record_read(self, index: Any, agent: int, epoch: int, cluster: int) -> None:
        """An agent has read."""
        if self.reader is not None:
            assert self.read is not None and self.reader_owner is not None
            self.reader[index], self.read[index] = agent, epoch
            self.reader_owner[index] = cluster
            return
        if agent not in self.readers:
            self.readers[agent] = np.zeros(self.writer.size, np.int32)
        self.readers[agent][index] = epoch


class Space:
    """One run of bytes that addresses point into; offsets from `start` on are valid."""

    def __init__(
        self,
        name: str,
        data: Array,
        *,
        start: int = 0,
        shared: bool = False,
        check: bool = True,
        writeable: bool = True,
    ) -> None:
        self.name, self.data, self.start, self.shared = name, data, start, shared
        self.check, self.writeable = check, writeable
        self.defined = np.zeros(data.size, np.bool_) if shared and check else None
        self.constant = True  # may be read before griddepcontrol.wait
        self.barriers: Array | None = None  # bytes that are mbarriers
        self._history: History | None = None
        self.sync: dict[tuple[int, int], Clock] = {}  # what atomics at an offset hand on

    @property
    def history(self) -> History:
        """The history, made when first needed."""
        if self._history is None:
            self._history = History(self.data.size, self.shared)
        return self._history

    def bounds(self, low: int, high: int) -> None:
        """Fail unless offsets low up to high (exclusive) are inside."""
        if low < self.start or high > self.data.size:
            raise OutOfBoundsError(
                f"offsets {low}..{high - 1} are outside of {self.name}, which holds "
                f"{self.start}..{self.data.size - 1}"
            )

    def note_read(
        self,
        cluster: Cluster,
        index: Any,
        clock: Clock,
        agent: int,
        epoch: int,
        *,
        proxy: bool = False,
        atomic: bool = False,
    ) -> None:
        """An agent with this clock reads bytes; `proxy` if through the asynchronous proxy."""
        if not self.check:
            return
        if self.defined is not None and not self.defined[index].all():
            raise UninitialisedError(f"{self.name} is read where nothing was written")
        if self._history is None and not self.shared:
            if not self.writeable or self.data.size > NOTED:
                return
        history = self.history
        if history.owner is not None and not cluster.grid.ordered:
            foreign = history.owner[index]
            if ((foreign >= 0) & (foreign != cluster.number)).any():
                raise RaceError(
                    f"{cluster.agents[agent]} reads {self.name}, which another CTA "
                    "wrote in the same launch"
                )
        other = history.unordered_write(clock, index, cluster.number, atomic)
        if other is not None:
            raise RaceError(
                f"{cluster.agents[agent]} reads {self.name}, which {cluster.agents[other]} wrote, "
                "and no barrier or wait orders the two"
            )
        if proxy:
            fenced = history.fenced[index]
            bad = fenced > clock[history.writer[index]]
            if history.owner is not None:
                bad &= (history.owner[index] == cluster.number) | (fenced == UNFENCED)
            if bad.any():
                raise ProxyFenceError(
                    f"{cluster.agents[agent]} reads {self.name} through the asynchronous proxy, "
                    "but its writer did not run fence.proxy.async before the barrier"
                )
        if not atomic:
            history.record_read(index, agent, epoch, cluster.number)

    def note_write(
        self,
        cluster: Cluster,
        index: Any,
        clock: Clock,
        agent: int,
        epoch: int,
        *,
        proxy: bool = False,
        atomic: bool = False,
    ) -> None:
        """An agent with this clock writes bytes."""
        if not self.writeable:
            raise OutOfBoundsError(f"{self.name} is written, but may only be read")
        if not self.check:
            return
        if self.barriers is not None and self.barriers[index].any():
            raise BarrierError(f"{self.name} is written where an mbarrier lies")
        history = self.history
        other = history.unordered_write(clock, index, cluster.number, atomic)
        verb = "wrote"
        if other is None:
            other, verb = history.unordered_read(clock, index, cluster.number), "read"
        if history.reader_owner is not None and not cluster.grid.ordered:
            foreign = history.reader_owner[index]
            if ((foreign >= 0) & (foreign != cluster.number)).any():
                raise RaceError(
                    f"{cluster.agents[agent]} writes {self.name}, which another CTA "
                    "read in the same launch"
                )
        if other is not None and other != agent:
            raise RaceError(
                f"{cluster.agents[agent]} writes {self.name}, which {cluster.agents[other]} "
                f"{verb}, and no barrier or wait orders the two"
            )
        if history.owner is not None:
            history.before = history.owner[index]
        history.writer[index], history.written[index] = agent, epoch
        history.fenced[index] = 0 if proxy else UNFENCED
        history.atomic[index] = atomic
        if history.owner is not None:
            history.owner[index] = cluster.number
        if self.defined is not None:
            self.defined[index] = True

    def fence(self, index: Any, agent: int, epoch: int) -> None:
        """Plain stores of an agent are made visible to the asynchronous proxy."""
        history = self.history
        mine = (history.writer[index] == agent) & (history.fenced[index] == UNFENCED)
        history.fenced[index] = np.where(mine, epoch, history.fenced[index])


# ---- addresses ------------------------------------------------------------------------------


def shared_of(warp: Warp, address: int) -> tuple[Space, int]:
    """The shared Space and offset of a shared::cluster address, with checks of the peer."""
    rank, offset = address >> RANK_STEP, address & ((1 << RANK_STEP) - 1)
    cta = warp.cta
    if rank:
        if rank > len(warp.cluster.ctas):
            raise OutOfBoundsError(
                f"no CTA of rank {rank - 1} in a cluster of {len(warp.cluster.ctas)}"
            )
        cta = warp.cluster.ctas[rank - 1]
    touch_peer(warp, cta)
    return cta.shared, offset


def touch_peer(warp: Warp, cta: Any) -> None:
    """A warp touches shared memory of a CTA, maybe not its own."""
    if cta is not warp.cta and warp.cluster.check:
        if cta.exited:
            raise ExitedPeerError(f"the shared memory of {cta.name} is touched after its exit")
        cta.remote[warp.agent] = int(warp.clock[warp.agent])


def resolve(warp: Warp, kind: str, address: Array) -> list[tuple[Space, Array, Any]]:
    """(Space, offsets, which of the addresses) of addresses in a space of a kind."""
    if kind in ("shared", "shared::cta", "shared::cluster"):
        ranks = address >> RANK_STEP
        if kind != "shared::cluster" and (ranks * (ranks - warp.cta.rank - 1)).any():
            raise OutOfBoundsError(f"address {int(address.max()):#x} is not in shared::cta")
        if not ranks.any():
            return [(warp.cta.shared, address, slice(None))]
        found = []
        for rank in np.unique(ranks):
            chosen = ranks == rank
            space, _ = shared_of(warp, int(rank) << RANK_STEP)
            found.append((space, address[chosen] & ((1 << RANK_STEP) - 1), chosen))
        return found
    if kind in ("param", "const"):
        return [(warp.cluster.grid.parameters, address - PARAMETER_START, slice(None))]
    if kind == "local":
        raise TextError("local memory is not simulated")
    if kind == "":
        return _generic(warp, address)
    numbers = (address - GLOBAL) >> GLOBAL_STEP
    memories = warp.cluster.grid.memories
    found = []
    for number in np.unique(numbers):
        chosen = numbers == number
        if not 0 <= number < len(memories):
            raise OutOfBoundsError(f"address {int(address[chosen][0]):#x} is in no memory")
        offset = (address[chosen] - GLOBAL) & ((1 << GLOBAL_STEP) - 1)
        if (offset >= 1 << (GLOBAL_STEP - 1)).any():  # below the base of the next
            raise OutOfBoundsError(f"address {int(address[chosen][0]):#x} is in no memory")
        found.append((memories[int(number)], offset, chosen))
    return found


def _generic(warp: Warp, address: Array) -> list[tuple[Space, Array, Any]]:
    found = []
    windows = (("param", PARAMETERS), ("shared::cluster", SHARED_WINDOW), ("global", 0))
    kinds = np.where(address >= GLOBAL, 2, np.where(address >= SHARED_WINDOW, 1, 0))
    for kind in np.unique(kinds):
        chosen = kinds == kind
        name, base = windows[int(kind)]
        for space, offset, part in resolve(warp, name, address[chosen] - base):
            whole = np.zeros(address.size, np.bool_)
            whole[np.flatnonzero(chosen)[part]] = True
            found.append((space, offset, whole))
    return found


def covering(space: Space, offset: Array, bytes_: int) -> Array:
    """Indices (lanes, bytes) of accesses of so many bytes, checked against the bounds."""
    low, high = int(offset.min()), int(offset.max()) + bytes_
    if low < space.start or high > space.data.size:
        space.bounds(low, high)
    index: Array = offset[:, None] + np.arange(bytes_)
    return index


def aligned(address: Array, bytes_: int) -> None:
    """Fail unless addresses are multiples of so many bytes."""
    if bytes_ > 1 and (address % bytes_).any():
        bad = int(address[(address % bytes_) != 0][0])
        raise MisalignedError(f"address {bad:#x} is not a multiple of {bytes_}")


def one_for_all(warp: Warp, mask: Mask, what: str) -> None:
    """Some lanes act for their warp: what others did in shared memory must be ordered before."""
    if mask is not None and warp.cluster.check and (warp.accessed & ~mask).any():
        raise RaceError(
            f"{what} by some lanes of a warp after others were at shared memory, and "
            "no bar.warp.sync orders them"
        )


def depends(warp: Warp, space: Space) -> None:
    """A read of memory that is not constant comes after griddepcontrol.wait."""
    if not (space.constant or warp.depended) and warp.cluster.check:
        if warp.cluster.grid.launch.dependent:
            raise DependencyError(f"{space.name} is read before griddepcontrol.wait")


def load(
    warp: Warp, kind: str, address: Array, bytes_: int, atomic: bool = False, mask: Mask = None
) -> Array:
    """Bytes (lanes, bytes) at addresses, read by lanes of the warp."""
    clock = warp.known(mask)
    aligned(address, bytes_)
    parts = resolve(warp, kind, address)
    epoch = int(warp.clock[warp.agent])
    for space, _, _ in parts:
        depends(warp, space)
    if len(parts) == 1:
        space, offset, _ = parts[0]
        index = covering(space, offset, bytes_)
        space.note_read(warp.cluster, index, clock, warp.agent, epoch, atomic=atomic)
        return space.data[index]
    result = np.zeros((address.size, bytes_), np.uint8)
    for space, offset, chosen in parts:
        index = covering(space, offset, bytes_)
        space.note_read(warp.cluster, index, clock, warp.agent, epoch, atomic=atomic)
        result[chosen] = space.data[index]
    return result


def store(
    warp: Warp,
    kind: str,
    address: Array,
    value: Array,
    atomic: bool = False,
    lanes: Array | None = None,
) -> None:
    """Write bytes (lanes, bytes) at addresses; `lanes` are those that give the rows, if known."""
    bytes_ = value.shape[1]
    aligned(address, bytes_)
    if warp.cluster.check:
        _same_instruction(address, value)
    for space, offset, chosen in resolve(warp, kind, address):
        index = covering(space, offset, bytes_)
        note_store(warp, space, index, atomic, None if lanes is None else lanes[chosen])
        if warp.cluster.check and not space.shared:
            _other_values(warp, space, index, value[chosen])
        space.data[index] = value[chosen]


def _other_values(warp: Warp, space: Space, index: Array, value: Array) -> None:
    """CTAs that nothing can order must not store different values at one place."""
    owner = space.history.before
    if owner is None or warp.cluster.grid.ordered:
        return
    foreign = (owner >= 0) & (owner != warp.cluster.number)
    if (foreign & (space.data[index] != value)).any():
        raise RaceError(f"{space.name} is stored to by another CTA too, with another value")


def note_store(
    warp: Warp, space: Space, index: Any, atomic: bool = False, lanes: Array | None = None
) -> None:
    """Note a plain store of the warp."""
    grid = warp.cluster.grid
    if warp.cluster.check and grid.launch.dependent and not space.shared and not warp.depended:
        raise DependencyError(f"{space.name} is written before griddepcontrol.wait")
    space.note_write(
        warp.cluster, index, warp.clock, warp.agent, int(warp.clock[warp.agent]), atomic=atomic
    )
    if grid.fences and warp.cluster.check:
        warp.unfenced.append((space, index, lanes))


def _same_instruction(address: Array, value: Array) -> None:
    """Lanes that write other values to one place in one instruction."""
    order = np.argsort(address, kind="stable")
    sorted_ = address[order]
    same = np.flatnonzero(sorted_[1:] == sorted_[:-1])
    for place in same:
        if (value[order[place]] != value[order[place + 1]]).any():
            raise RaceError(
                f"lanes of one warp store different values at {int(sorted_[place]):#x} in one "
                "instruction"
            )


# ---- instructions ---------------------------------------------------------------------------


def space_of(words: list[str]) -> str:
    """The space that a form names, '' for generic addresses."""
    return next((w for w in words if w in SPACES), "")


def width_of(words: list[str]) -> int:
    """How many registers a form moves."""
    return next((int(w[1:]) for w in words if w in ("v2", "v4", "v8")), 1)


def decode_ld(d: Decoder, i: Instruction) -> Run:
    """ld."""
    kind, count, type_ = space_of(i.words), width_of(i.words), i.words[-1]
    size, dtype = TYPES[type_].itemsize, TYPES[type_]
    where = d.address(i.operands[1])
    outs = i.operands[0].parts if count > 1 else i.operands[:1]
    if len(outs) != count:
        raise TextError(f"{count} registers expected")
    puts = [d.put(o, type_) for o in outs]
    atomic = bool({"volatile", "relaxed", "acquire"} & set(i.words))
    acquire, constant, near = "acquire" in i.words, "nc" in i.words, kind.startswith("shared")

    def run(warp: Warp, mask: Mask) -> None:
        address = where(warp)
        if mask is not None:
            address = address[mask]
        if constant and warp.cluster.check:
            _never_written(warp, address, size * count)
        value = load(warp, kind, address, size * count, atomic, mask).view(dtype)
        if near:
            warp.accessed |= True if mask is None else mask
        if atomic:
            synchronise(warp, kind, address, acquire=acquire, release=False)
        if mask is not None:
            whole = np.zeros((LANES, count), dtype)
            whole[mask] = value
            value = whole
        for number, put in enumerate(puts):
            put(warp, mask, np.ascontiguousarray(value[:, number]))

    return run


def _never_written(warp: Warp, address: Array, bytes_: int) -> None:
    """ld.global.nc reads what nothing writes during the launch."""
    for space, offset, _ in resolve(warp, "global", address):
        if space._history is not None:
            if (space.history.writer[covering(space, offset, bytes_)] >= 0).any():
                raise RaceError(f"{space.name} is read by ld.global.nc but written in this launch")


def decode_st(d: Decoder, i: Instruction) -> Run:
    """st."""
    kind, count, type_ = space_of(i.words), width_of(i.words), i.words[-1]
    where = d.address(i.operands[0])
    sources = i.operands[1].parts if count > 1 else i.operands[1:2]
    if len(sources) != count:
        raise TextError(f"{count} registers expected")
    reads = [d.read(o, type_) for o in sources]
    atomic = bool({"volatile", "relaxed", "release"} & set(i.words))
    release, near = "release" in i.words, kind.startswith("shared")

    def run(warp: Warp, mask: Mask) -> None:
        address = where(warp)
        value = np.stack([r(warp) for r in reads], 1)
        if mask is not None:
            address, value = address[mask], value[mask]
        if atomic:
            synchronise(warp, kind, address, acquire=False, release=release)
        lanes = LANE if mask is None else np.flatnonzero(mask)
        if near:
            warp.accessed |= True if mask is None else mask
        store(warp, kind, address, np.ascontiguousarray(value).view(np.uint8), atomic, lanes)

    return run


def synchronise(warp: Warp, kind: str, address: Array, acquire: bool, release: bool) -> None:
    """What ordered accesses hand on and take over: at once, or with the fences around them."""
    if not warp.cluster.check:
        return
    for space, offset, _ in resolve(warp, kind, address):
        for place in np.unique(offset):
            key = (warp.cluster.number, int(place))
            known = space.sync.get(key)
            if known is not None:
                if acquire:
                    np.maximum(warp.clock, known, out=warp.clock)
                else:
                    stash = warp.pair.get("acquired")
                    warp.pair["acquired"] = known if stash is None else np.maximum(stash, known)
            handed = warp.release() if release else warp.pair.get("fenced")
            if handed is not None:
                space.sync[key] = handed if known is None else np.maximum(known, handed)


def fence_threads(warp: Warp) -> None:
    """fence.acq_rel, fence.sc and membar: what ordered accesses on both sides of it mean."""
    stash = warp.pair.pop("acquired", None)
    if stash is not None:
        np.maximum(warp.clock, stash, out=warp.clock)
    warp.pair["fenced"] = warp.release()


def decode(d: Decoder, i: Instruction) -> Run | None:
    """Decode an instruction of memory; None if it is not one."""
    name = i.words[0]
    if name == "ld":
        return decode_ld(d, i)
    if name == "st" and "async" not in i.words:
        return decode_st(d, i)
    if name == "prefetch" or i.name.startswith("cp.async.bulk.prefetch"):
        return lambda warp, mask: None
    if name == "createpolicy":
        put = d.put(i.operands[0], "b64")
        return lambda warp, mask: put(warp, mask, np.full(LANES, 0x14F0 << 48, np.uint64))
    return None
