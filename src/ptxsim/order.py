"""Order between agents in the simulator: the cluster's barrier, fences, setmaxnreg, mapa.

Invariant: a fence changes what later handing on means and nothing else; registers of a CTA are
never more than the file holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .barrier import nothing
from .errors import BarrierError, RegisterPoolError, WarpgroupError
from .machine import Waiting
from .memory import fence_threads
from .text import Instruction
from .values import LANES, RANK_STEP, SHARED_WINDOW, Decoder, Mask, Run
from .warp import whole

if TYPE_CHECKING:
    from .machine import Cluster, Warp


class ClusterBarrier:
    """barrier.cluster: all threads of all CTAs that have not exited."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.generation = cluster, 0
        self.came: dict[Any, int] = {}
        self.coming, self.seen = nothing(), nothing()

    def passed(self, generation: int) -> bool:
        """Whether a generation is over."""
        if self.came and all(w in self.came or not w.active for w in self.cluster.warps):
            self.generation += 1
            self.seen, self.coming, self.came = self.coming, nothing(), {}
        return self.generation > generation

    def __str__(self) -> str:
        missing = [w.name for w in self.cluster.warps if w.active and w not in self.came]
        return f"the cluster barrier (not there yet: {', '.join(missing)})"


def cluster_barrier(cluster: Cluster) -> ClusterBarrier:
    """The barrier of a cluster."""
    if "barrier" not in cluster.barrier:
        cluster.barrier["barrier"] = ClusterBarrier(cluster)
    return cluster.barrier["barrier"]


def decode_cluster(d: Decoder, i: Instruction) -> Run:
    """barrier.cluster.arrive and .wait."""

    def arrive(warp: Warp, mask: Mask) -> None:
        whole(warp, mask, "barrier.cluster.arrive")
        warp.meet()
        barrier = cluster_barrier(warp.cluster)
        if "cluster" in warp.pair:
            raise BarrierError("barrier.cluster.arrive twice without a wait")
        barrier.passed(1 << 60)
        warp.pair["cluster"] = barrier.generation
        barrier.came[warp] = barrier.generation
        if "relaxed" not in i.words:
            np.maximum(barrier.coming, warp.release(), out=barrier.coming)

    def wait(warp: Warp, mask: Mask) -> Waiting:
        whole(warp, mask, "barrier.cluster.wait")
        barrier = cluster_barrier(warp.cluster)
        if "cluster" not in warp.pair:
            raise BarrierError("barrier.cluster.wait without an arrive")
        generation = warp.pair.pop("cluster")

        def finish() -> None:
            np.maximum(warp.clock, barrier.seen, out=warp.clock)

        return Waiting(lambda: barrier.passed(generation), lambda: str(barrier), finish)

    return arrive if i.words[2] == "arrive" else wait


def fence_proxy(words: list[str]) -> Callable[[Any, Mask], None]:
    """fence.proxy.async and fence.mbarrier_init."""
    spaces = [w.split("::")[0] for w in words[3:]] if words[1] == "proxy" else ["none"]

    def run(warp: Warp, mask: Mask) -> None:
        epoch = int(warp.clock[warp.agent])
        if not spaces or "shared" in spaces or spaces == ["none"]:
            for barrier in warp.pair.pop("inits", []):
                barrier.fenced = epoch
        if spaces == ["none"]:
            return
        kept = []
        for space, index, lanes in warp.unfenced:
            if spaces and ("shared" in spaces) != space.shared:
                kept.append((space, index, lanes))
            elif mask is None or not (warp.present() & ~mask).any():
                space.fence(index, warp.agent, epoch)
            elif lanes is None:  # all lanes took part in the store
                kept.append((space, index, lanes))
            else:  # a fence is for the stores of the lanes that run it
                mine = mask[lanes]
                space.fence(index[mine], warp.agent, epoch)
                kept.append((space, index[~mine], lanes[~mine]))
        warp.unfenced = [one for one in kept if one[2] is None or one[2].size]

    return run


def decode_fence(d: Decoder, i: Instruction) -> Run:
    """fence and membar."""
    if i.name.startswith(("fence.proxy.async", "fence.mbarrier_init")):
        return fence_proxy(i.words)
    if i.words[1] == "proxy":
        return lambda warp, mask: None
    return lambda warp, mask: fence_threads(warp)


def decode_setmaxnreg(d: Decoder, i: Instruction) -> Run:
    """setmaxnreg: the four warps of a warpgroup agree, and the file has 64 K registers."""
    value, more = int(i.operands[0].text), "inc" in i.words
    if value % 8 or not 24 <= value <= 256:
        raise RegisterPoolError(f"{value} is not a multiple of 8 from 24 to 256", i)

    def run(warp: Warp, mask: Mask) -> Waiting | None:
        whole(warp, mask, "setmaxnreg")
        cta = warp.cta
        mine = warp.pair.setdefault("limits", [])
        mine.append(i.number)
        first = warp.number // 4 * 4
        for other in cta.warps[first : first + 4]:
            theirs = other.pair.get("limits", [])
            if len(theirs) >= len(mine) and theirs[len(mine) - 1] != i.number:
                raise WarpgroupError("the warps of a warpgroup run different setmaxnreg")
        if more == (value < warp.limit) and value != warp.limit:
            raise RegisterPoolError(
                f"{'inc' if more else 'dec'} to {value} from {warp.limit} registers"
            )
        need = LANES * (value - warp.limit)

        def finish() -> None:
            cta.free_registers -= need
            warp.limit = value

        if need <= cta.free_registers:
            finish()
            return None
        return Waiting(
            lambda: need <= cta.free_registers,
            lambda: f"{need} more registers, of which {cta.free_registers} are free",
            finish,
        )

    return run


def decode_mapa(d: Decoder, i: Instruction) -> Run:
    """mapa and getctarank."""
    type_ = i.words[-1]
    generic = "shared::cluster" not in i.words
    if i.words[0] == "getctarank":
        put, source = d.put(i.operands[0], "u32"), d.read(i.operands[1], type_)

        def rank(warp: Warp, mask: Mask) -> None:
            value = source(warp).astype(np.int64) - (SHARED_WINDOW if generic else 0)
            at = value >> RANK_STEP
            put(warp, mask, np.where(at > 0, at - 1, warp.cta.rank).astype(np.uint32))

        return rank
    put, source = d.put(i.operands[0], type_), d.read(i.operands[1], type_)
    ranks = d.read(i.operands[2], "u32")

    def run(warp: Warp, mask: Mask) -> None:
        base = SHARED_WINDOW if generic else 0
        offset = (source(warp).astype(np.int64) - base) & ((1 << RANK_STEP) - 1)
        wanted = ranks(warp).astype(np.int64)
        value = offset + ((wanted + 1) << RANK_STEP) + base
        put(warp, mask, value.astype(np.uint64).astype(f"uint{type_[1:]}"))

    return run


def decode(d: Decoder, i: Instruction) -> Run | None:
    """Decode a fence or what else orders; None if it is not one."""
    name = i.words[0]
    if name == "barrier" and i.words[1] == "cluster":
        return decode_cluster(d, i)
    table = {
        "fence": decode_fence,
        "membar": decode_fence,
        "setmaxnreg": decode_setmaxnreg,
        "mapa": decode_mapa,
        "getctarank": decode_mapa,
    }
    if name in table:
        return table[name](d, i)
    if name == "griddepcontrol":
        if i.words[1] == "wait":
            return lambda warp, mask: setattr(warp, "depended", True)
        return lambda warp, mask: None
    return None
