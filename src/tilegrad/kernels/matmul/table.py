"""The wide matmul in PlanTables: the key of a problem, its Plan as a record, and what fits.

A key names the machine, dtypes, layouts (along which axis each operand is dense), the class of
the epilogue, and the sizes: n, k and batch as they are, m as it was measured. A problem whose own
m is in no table takes the Plan of the next power of two where that fits: as many tiles as there,
so that it runs as it did when it was measured. A class of epilogue that is in no table takes the
Plan of the plain product.
Invariant: a Plan that `tuned` gives can be built for the problem asked for, on its machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

from ...core.dtype import DType
from ...core.errors import UserError
from ...core.target import Target
from ...ir.symbol import high, power_of_two
from ..plan_table import PlanTable, Record, plans
from .plan import in_spans, ranked, shared_bytes, tiles_of, transposed
from .shape import Choice, Operands, WidePlan, why_not
from .threads_matmul import ranked_threads

MACHINES = ("h100", "h200")  # machines with names of their own in keys, whatever their memory
SAME_MACHINE = {"h100": "h200"}  # whose Plans a machine takes where it has none of its own
ONE_SIZE = 128  # rows of the problem whose Plan serves all others at the level `invariant`
PLAIN = "plain"  # the class of an epilogue that only rounds


def problem_key(x: Operands, machine: str, epilogue: str = PLAIN, m: int | None = None) -> str:
    """The key of a product in a PlanTable; `x` is not turned."""
    layout = ("k" if x.a_along_k else "m") + ("k" if x.b_along_k else "n")
    several = "-w" + "+".join(map(str, x.weights)) if x.weights else ""
    gated = "-gated" if x.gated else ""
    m = high(x.m) if m is None else m
    return (
        f"matmul-{machine}-{x.dtype.name}-{x.result.name}-{layout}-{epilogue}{gated}{several}"
        f"-b{high(x.batch)}-n{high(x.n)}-k{high(x.k)}-m{m}"
    )


def machine_name(target: Target) -> str:
    """What keys call a machine: "h200" for any H200."""
    parts = target.name.split("-")
    return next((m for m in MACHINES if m in parts), target.name.replace("-", "_"))


def plain_operands(m: int, n: int, k: int, dtype: DType, layout: str = "kk") -> Operands:
    """a (m, k) times b (k, n), dense along the axes that the layout names."""
    if layout not in ("kk", "kn", "mk", "mn"):
        raise UserError("unknown layout", op="tune", expected="kk, kn, mk or mn", got=layout)
    return Operands(m, n, k, dtype, dtype, layout[0] == "k", layout[1] == "k")


def to_record(plan: WidePlan, turned: bool) -> dict[str, Any]:
    """A Plan as plain data."""
    return {**dataclasses.asdict(plan), "tile": list(plan.tile), "turned": turned}


def from_record(record: Record) -> tuple[WidePlan, bool]:
    """The Plan that `to_record` wrote, and whether operands are turned."""
    values = dict(record)
    values.pop("dependent", None)  # of older tables: every Plan is
    turned, tile = values.pop("turned"), tuple(values.pop("tile"))
    kinds = {f.name: type(f.default) for f in dataclasses.fields(WidePlan)}
    wrong = [n for n, v in values.items() if type(v) is not kinds.get(n)]
    wrong = wrong or [n for n, v in values.items() if v is not False and v < 1]
    if wrong or len(tile) != 3 or not all(type(s) is int and s > 0 for s in tile):
        raise UserError("not the Plan of a matmul", op="plans", got=dict(record))
    return WidePlan(cast("tuple[int, int, int]", tile), **values), bool(turned)


def tuned(
    x: Operands, target: Target, epilogue: str = PLAIN, table: PlanTable | None = None
) -> Choice[WidePlan] | None:
    """The Plan that a table knows for a problem; None where it knows none that fits."""
    table = plans() if table is None else table
    for key, m in _keys(x, target, epilogue):
        found = table.get(key, from_record) if table.known or table.folder else None
        if found is not None:
            plan, turned = from_record(found.plan)
            if fits(x, plan, turned, target, m):
                return Choice(plan, turned, found.seconds or 0.0)
    return None


def for_any_rows(x: Operands, target: Target) -> Iterator[Choice[Any]]:
    """Plans that serve any number of rows alike, the most promising for ONE_SIZE of them first:
    whole k, nothing turned, no tables. None where a lies along m, whose size says what applies."""
    if not x.a_along_k:
        return
    sized = dataclasses.replace(x, m=ONE_SIZE)
    if not target.asynchronous_units:
        yield from ranked_threads(sized, target)
        return
    for choice in ranked(sized, target):
        if choice.plan.split == choice.plan.cluster == 1 and not choice.turned:
            yield choice


def _keys(x: Operands, target: Target, epilogue: str) -> Iterator[tuple[str, int]]:
    """Keys to ask for, the nearest first, with the m that they were measured at."""
    own, m = machine_name(target), high(x.m)
    for machine in dict.fromkeys((own, SAME_MACHINE.get(own, own))):
        for size in dict.fromkeys((m, power_of_two(m))):
            for kind in dict.fromkeys((epilogue, PLAIN)):
                yield problem_key(x, machine, kind, size), size


def fits(x: Operands, plan: WidePlan, turned: bool, target: Target, measured: int) -> bool:
    """Whether a Plan measured with other rows can run, and runs as it did then."""
    there = dataclasses.replace(x, m=measured)
    if tiles_of(x, plan, turned) != tiles_of(there, plan, turned):
        return False
    turned_x = transposed(x) if turned else x
    if plan.programs > target.cores or not in_shape(turned_x, plan):
        return False
    return shared_bytes(turned_x, plan) <= target.memories["shared"].bytes


def in_shape(x: Operands, plan: WidePlan) -> bool:
    """Whether the kernel can be built with a Plan, for operands as they are multiplied."""
    _, tn, tk = plan.tile
    if x.span(plan.tile)[0] not in (64, 128, 192, 256) or not 8 <= tn <= 256:
        return False
    shared_b = plan.cluster > 1 and not plan.across
    if shared_b and (tn if x.b_along_k else tk) // plan.cluster % 8:
        return False
    return in_spans(x, plan) and not why_not(x, plan)
