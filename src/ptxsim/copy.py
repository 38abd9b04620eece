"""cp.async of sm_80 in the simulator: copies of lanes, their groups, and arrival by copies.

Bytes under way belong to an agent of their own, so nobody may touch them; a wait of the warp
makes them as if it had stored them itself, an arrival those of the mbarrier. Invariant: bytes
move only in closures that the cluster's queues run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .barrier import lanes_of, phases_of
from .errors import OutOfBoundsError, TextError
from .machine import Waiting
from .matrix import uniform, wait_engine
from .memory import aligned, covering, depends, resolve
from .text import Instruction
from .values import RANK_STEP, Array, Decoder, Mask, Run

if TYPE_CHECKING:
    from .machine import Warp


def decode_cp_async(d: Decoder, i: Instruction) -> Run:
    """cp.async of sm_80: each lane copies 4, 8 or 16 bytes."""
    into, source = d.address(i.operands[0]), d.address(i.operands[1])
    bytes_ = int(i.operands[2].text, 0)
    hinted = "L2::cache_hint" in i.words
    given = len(i.operands) - hinted > 3
    size = d.read(i.operands[3], "u32") if given else None
    if bytes_ not in (4, 8, 16) or ("cg" in i.words and bytes_ != 16):
        raise TextError(f"cp.async of {bytes_} bytes")

    def run(warp: Warp, mask: Mask) -> None:
        lanes = lanes_of(mask)
        target = into(warp)[lanes] & ((1 << RANK_STEP) - 1)
        counts = (
            size(warp)[lanes].astype(np.int64) if size is not None else np.full(lanes.size, bytes_)
        )
        if (counts > bytes_).any():
            raise OutOfBoundsError(f"cp.async reads {int(counts.max())} of {bytes_} bytes")
        aligned(target, bytes_)
        engine = warp.engine("cp.async")
        engine.issued += 1
        engine.open += 1
        number, space = engine.issued, warp.cta.shared
        index = covering(space, target, bytes_)
        space.note_write(warp.cluster, index, warp.clock, engine.agent, number)
        warp.pair.setdefault("copies", []).append((number, index))
        data = _fetch(warp, source(warp)[lanes], counts, bytes_)

        def work() -> None:
            space.data[index] = data()
            engine.done = number

        warp.cluster.later(("cp.async", warp.agent), work, f"cp.async of {warp.name}", i)

    return run


def _fetch(warp: Warp, address: Array, counts: Array, bytes_: int) -> Any:
    """A function that gives the bytes of lanes, zeros after `counts`."""
    taken = counts > 0
    parts = []
    if taken.any():
        aligned(address[taken], bytes_)
        for space, offset, chosen in resolve(warp, "global", address[taken]):
            lanes = np.flatnonzero(taken)[chosen]
            depends(warp, space)
            most = counts[lanes]
            space.bounds(int(offset.min()), int((offset + most).max()))
            index = np.minimum(offset[:, None] + np.arange(bytes_), space.data.size - 1)
            space.note_read(
                warp.cluster, index, warp.clock, warp.agent, int(warp.clock[warp.agent])
            )
            parts.append((space, index, lanes))

    def data() -> Array:
        result = np.zeros((address.size, bytes_), np.uint8)
        for space, index, lanes in parts:
            result[lanes] = space.data[index]
        return np.where(np.arange(bytes_) < counts[:, None], result, 0)

    return data


def adopt(warp: Warp, last: int, agent: int, epoch: int, plain: bool) -> None:
    """Bytes copied by cp.async up to an op are from now on as written by an agent."""
    space, engine, kept = warp.cta.shared, warp.engine("cp.async"), []
    for number, index in warp.pair.get("copies", []):
        if number > last:
            kept.append((number, index))
            continue
        if space.check:
            history = space.history
            mine = history.writer[index] == engine.agent
            history.writer[index] = np.where(mine, agent, history.writer[index])
            history.written[index] = np.where(mine, epoch, history.written[index])
            if plain:
                warp.unfenced.append((space, index, None))
    warp.pair["copies"] = kept


def decode_cp_async_group(d: Decoder, i: Instruction) -> Run:
    """cp.async.commit_group, .wait_group and .wait_all."""

    def commit(warp: Warp, mask: Mask) -> None:
        warp.engine("cp.async").commit()

    def wait(warp: Warp, mask: Mask) -> Waiting | None:
        engine = warp.engine("cp.async")
        if "wait_all" in i.words:
            engine.commit()
        pending = 0 if "wait_all" in i.words else int(i.operands[0].text)

        def finish(target: int) -> None:
            adopt(warp, target, warp.agent, int(warp.clock[warp.agent]), plain=True)

        return wait_engine(warp, engine, pending, "cp.async", finish)

    return commit if "commit_group" in i.words else wait


def decode_cp_async_arrive(d: Decoder, i: Instruction) -> Run:
    """cp.async.mbarrier.arrive[.noinc]: arrive when the copies so far have landed."""
    where = d.address(i.operands[0])

    def run(warp: Warp, mask: Mask) -> None:
        lanes = lanes_of(mask)
        barrier = phases_of(warp, uniform(where(warp)[lanes], "mbarrier"))
        if "noinc" not in i.words:
            barrier.pending += lanes.size
        last, clock = warp.engine("cp.async").issued, warp.release()

        def work() -> None:
            adopt(warp, last, barrier.agent, barrier.phase + 1, plain=False)
            barrier.update(clock, lanes.size, 0)

        warp.cluster.later(("cp.async", warp.agent), work, f"cp.async of {warp.name}", i)

    return run


def decode(d: Decoder, i: Instruction) -> Run | None:
    """Decode a cp.async; None if it is not one."""
    if i.words[:2] != ["cp", "async"] or "bulk" in i.words:
        return None
    if "mbarrier" in i.words:
        return decode_cp_async_arrive(d, i)
    return decode_cp_async_group(d, i) if len(i.words) == 3 else decode_cp_async(d, i)
