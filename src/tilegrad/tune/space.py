"""Plans of the wide matmul to try: what the model likes best, and the neighbours of a Plan.

Neighbours differ in one choice (stages, the order of tiles, pieces on their way out, programs,
sharing, a split k, depth, when the next launch may begin) and fill the shared memory they have.
Invariant: the order depends on the problem and the Target alone, no Plan comes twice, and every
one fits the machine and is one that the kernel does not refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..core.target import Target
from ..ir.symbol import high
from ..kernels.matmul.plan import CLUSTERS, most_stages, ranked, tiles_of
from ..kernels.matmul.shape import Operands, WidePlan
from ..kernels.matmul.table import fits

Candidate = tuple[WidePlan, bool]  # and whether operands are turned


def first_candidates(x: Operands, target: Target, count: int) -> list[Candidate]:
    """The Plans that the model ranks first; its choice is the first of them."""
    return [(c.plan, c.turned) for c in ranked(x, target)[:count]]


def neighbours(x: Operands, candidate: Candidate, target: Target) -> list[Candidate]:
    """Plans that differ from one in a single choice."""
    plan, turned = candidate
    found = dict.fromkeys((near, turned) for near in _variations(x, plan, turned, target))
    found.pop(candidate, None)
    return [c for c in found if fits(x, *c, target, high(x.m))]


def _variations(x: Operands, plan: WidePlan, turned: bool, target: Target) -> Iterator[WidePlan]:
    tm, tn, tk = plan.tile
    for stages in (plan.stages - 1, plan.stages + 1, plan.stages - 2):
        yield replace(plan, stages=max(2, stages))
    one = replace(x, m=1, batch=1) if turned else replace(x, n=1, batch=1)
    rows = tiles_of(one, plan, turned)
    if tiles_of(x, plan, turned) > rows * high(x.batch):  # else all orders are one
        groups = [g for g in (1, 2, 4, 8, 16, 32) if g < rows or g == plan.group]
        yield from (replace(plan, group=g) for g in groups)
    wide = tn // plan.split
    for staged in (64, 32, 16):
        if wide % staged == 0:
            yield filled(x, replace(plan, staged=staged, together=1), target)
    pieces = wide // plan.staged
    yield replace(plan, together=2 if plan.together == 1 and pieces > 1 else 1)
    yield replace(plan, early=not plan.early)
    for depth in (tk // 2, tk * 2):
        if depth * x.dtype.size % 128 == 0 and depth * x.dtype.size <= 512:
            yield filled(x, replace(plan, tile=(tm, tn, depth)), target)
    yield from _shared(x, plan, turned, target)


def _shared(x: Operands, plan: WidePlan, turned: bool, target: Target) -> Iterator[WidePlan]:
    """Other numbers of programs, other ways to share tiles and k."""
    together = plan.cluster * plan.split
    if plan.split == 1:
        for programs in (target.cores, target.cores // 8 * 8, target.cores - 16):
            yield replace(
                plan,
                programs=min(programs, tiles_of(x, plan, turned) * plan.cluster)
                // together
                * together,
            )
    for cluster, across in ((1, False), (2, False), (2, True)):
        made = replace(plan, cluster=cluster, across=across)
        yield populated(x, made, turned, target)
    for split in (1, 2, 3, 4):
        if plan.tile[1] % (8 * split) == 0 and plan.cluster * split in CLUSTERS:
            made = replace(plan, split=split, staged=_staged(plan.tile[1] // split), together=1)
            yield populated(x, filled(x, made, target), turned, target)


def _staged(wide: int) -> int:
    """Columns of a piece of the result."""
    return next((s for s in (64, 32, 16) if wide % s == 0 and wide > s), wide)


def filled(x: Operands, plan: WidePlan, target: Target) -> WidePlan:
    """A Plan with as many stages as its shared memory has room for, up to 24."""
    return replace(plan, stages=max(1, most_stages(x, replace(plan, stages=24), target)))


def populated(x: Operands, plan: WidePlan, turned: bool, target: Target) -> WidePlan:
    """A Plan with programs for its tiles: one each where k is split, else even waves of them."""
    together = plan.cluster * plan.split
    tiles = tiles_of(x, plan, turned)
    limit = max(1, target.cores // together)
    clusters = tiles if plan.split > 1 else min(limit, -(-tiles // -(-tiles // limit)))
    return replace(plan, programs=clusters * together)
