"""The checks before launch: everything that can be said of a Body without running it.

`check_body` gathers the Findings below (races, deadlock, fences, uninitialised places, work handed
over, the dependency wait) and those of `budget`; `require` turns errors into one exception that
lists all of them. A Finding of a trace that left out the middle of a loop counts only if the whole
loop shows it too, where that is short enough to be run.

`check_protocol` runs the events of all roles (`skeleton`) once, each as far as it can go, and an
Order (`ordering`) finds races, missing fences, uninitialised boxes, phases that are not certain,
deadlock and accesses before the dependency wait, whatever the order in which roles run. What is
found does not hang on whose turn it was.

A parameter that a placed Body both stores to and reads is *handed over* if the Body counts with
`atomic_add`: who counts last reads what other programs stored. Before an atomic_add the role's
stores have a fence('global') after them, and then its warps meet (one thread counts for all); after
it, a fence('global') comes before any read. Nodes are judged in the order they stand in, of a loop
twice.

A Body that waits for its dependency does so on all paths. The wait is followed through barriers in
the programs that are run; and the shape of the code is judged, for all programs: a
`grid_dependency_wait` under a condition or in a loop that hangs on the program's number, a Symbol
or data may be left out by a program that was not run, and an access under such a condition may come
before it in one.

A Body of the portable level is one role: of it only the places are judged that are read before
anything wrote them.

Invariant: a Body is read and never changed, and no data is computed, so a kernel of real size is
judged in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..core.errors import InternalError, UserError
from ..core.target import Target
from ..ir.block import Block
from ..ir.node import Node
from ..ir.node import walk as nodes_from
from ..ir.symbol import high, low
from .budget import check_budget
from .build import Body
from .check import PLACED_OPS, Finding, Findings, finding, walk
from .concurrent import DeadlockError, Frame, Machine, Steps, cluster_of
from .happening import come
from .ordering import Order
from .row import Touch, effects_of, is_place, touches_of
from .scalars import deciding
from .skeleton import OF_RUN, Scenario, Skeleton, TooLong, computable

ENOUGH = 4_000  # events, after which only the first and last programs are run


def check_body(body: Body, target: Target | None = None) -> Findings:
    """Findings of all checks, errors first; those of a machine only if there is one."""
    found: Findings = []
    if body.block.find(*PLACED_OPS, "allocate"):
        skeleton = Skeleton(body)
        found += [*check_dependent(skeleton), *_protocol(skeleton), *check_handover(body)]
    if target is not None:
        found += check_budget(body, target)
    return sorted(dict.fromkeys(found), key=lambda f: f.severity != "error")


def _protocol(skeleton: Skeleton) -> Findings:
    found: Findings = []
    for scenario in skeleton.scenarios():
        if scenario.extra and skeleton.events > ENOUGH:
            break
        try:
            here = check_protocol(skeleton, scenario)
        except TooLong:
            text = f"{skeleton.body.name} is too long to be followed for program {scenario.program}"
            hint = "stages and parities computed from loop indices by // and % let it be cut"
            here = [finding("unproved", text, hint=hint, severity="warning")]
        if any(f.severity == "error" for f in here):
            with suppress(TooLong):
                here = check_protocol(skeleton, scenario, whole=True)
        found += here
        if any(f.severity == "error" for f in here):
            break  # the same again in other programs
    return found


def require(
    body: Body, target: Target | None = None, maker: str = "", also: Sequence[Finding] = ()
) -> Findings:
    """Raise one error that lists all Findings of level 'error'; gives the warnings.

    `maker` names the pass that made the Body: then the fault is ours, else the kernel's author's.
    `also` are Findings of who made it.
    """
    found = [*check_body(body, target), *also]
    errors = [f for f in found if f.severity == "error"]
    if errors:
        text = f"{body.name} fails {len(errors)} checks:\n" + "\n".join(map(str, errors))
        if maker:
            raise InternalError(maker, text)
        raise UserError(text, location=errors[0].location)
    return found


# ---- races and deadlock -------------------------------------------------------------------------


class _Traced:
    """A program of which only the events are run."""

    def __init__(self, order: Order, rank: int, trace: list[Any]) -> None:
        self.order, self.rank = order, rank
        self.frame, self.events = Frame(order.roles[rank, None], {}), {order.body.block: trace}

    def block(self, frame: Frame, block: Block) -> Steps:
        """The events of the program, or of a role."""
        for node, values in self.events[block]:
            if node != "roles":
                yield from come(self.order, frame.role, node, values)
                continue
            self.events.update((role.blocks[0], own) for role, own in values)
            yield [role for role, _ in values]


def check_protocol(skeleton: Skeleton, scenario: Scenario, whole: bool = False) -> Findings:
    """Races, deadlock, fences, uninitialised places and the dependency wait of one scenario."""
    ranks = prod(skeleton.body.notes.get("cluster", (1,)))
    order, programs = Order(skeleton.body, scenario.symbols, ranks), []
    for rank, own in enumerate(cluster_of(scenario.program, ranks)):
        trace = skeleton.trace(replace(scenario, program=own, rank=rank), whole)
        programs.append(_Traced(order, rank, trace))
    try:
        Machine(None, order).run(programs)
    except DeadlockError as error:
        node, other = [*(wait.node for wait in error.waits), None][:2]
        assert node is not None
        order.report("deadlock", "; ".join(map(str, error.waits)), node, other)
    return list(order.findings.values())


# ---- work that is handed over -------------------------------------------------------------------


def check_handover(body: Body) -> Findings:
    """Counts without a fence or a meeting before them, and reads without a fence after one."""
    nodes, counts = list(body.block.all_nodes()), body.block.find("atomic_add")
    stored, read = ({m for n in nodes for m in _plain(n, writes)} for writes in (True, False))
    exchanged = (stored & read) - {n.inputs[0] for n in counts}
    roles = body.block.find("role") if counts else ()
    return [f for r in roles for f in _Handover(r.attrs["warps"], exchanged).walk(r.blocks[0])]


def _plain(node: Node, writes: bool) -> set[Node]:
    """Parameters that a Node itself stores to, or reads."""
    plain = [e for e in effects_of(node) if isinstance(e, Touch) and not is_place(e.memory)]
    return {touch.memory for touch in plain if touch.writes is writes}


@dataclass
class _Handover:
    """What one role has done since its last count."""

    warps: int
    exchanged: set[Node]
    stored: Node | None = None
    fenced: bool = False
    met: bool = False
    counted: Node | None = None

    def walk(self, block: Block) -> Iterator[Finding]:
        """Judge the Nodes of a Block."""
        for node in block.nodes:
            yield from self.visit(node)
            for inner in node.blocks:
                for _ in range(2 if node.op.name == "loop" else 1):
                    yield from self.walk(inner)

    def visit(self, node: Node) -> Iterator[Finding]:
        """Judge a Node."""
        name = node.op.name
        if name == "fence" and node.attrs["kind"] == "global":
            self.fenced, self.counted = True, None
        elif name == "named_sync" and node.attrs["threads"] >= 32 * self.warps:
            self.met = self.fenced
        elif name == "atomic_add":
            if self.stored is not None and not (self.fenced and (self.met or self.warps == 1)):
                what = self.stored.inputs[0].attrs["name"]
                text = "is stored and counted without a fence('global') and a meeting of the warps"
                hint = "fence('global') after the stores, then named_sync of the role, then count"
                yield finding("fence", f"{what} {text} between", node, self.stored, hint)
            self.stored, self.counted = None, node
        elif _plain(node, True) & self.exchanged:
            self.stored, self.fenced, self.met = node, False, False
        elif _plain(node, False) & self.exchanged and self.counted is not None:
            text = "is read after a count without a fence('global') between"
            hint = "fence('global') after the atomic_add, before what other programs stored is read"
            what = node.inputs[0].attrs["name"]
            yield finding("fence", f"{what} {text}", node, self.counted, hint)


# ---- the dependency wait ------------------------------------------------------------------------


TELL = {"grid_dependency_wait", "wait", "named_sync"}  # what a role may know of the dependency by


def check_dependent(skeleton: Skeleton) -> Iterator[Finding]:
    """Waits that stand on some paths only."""
    body = skeleton.body
    waits = [(n, around) for n, around in walk(body.block) if n.op.name == "grid_dependency_wait"]
    for node, around in waits:
        parts = [n for n in around if n.op.name == "role"]
        block = parts[0].blocks[0] if parts else body.block
        unsure = [n for n in around if varies(skeleton, n)]
        if unsure and not surely_waits(block):
            who = f"the role {parts[0].attrs['name']}" if parts else "the program"
            text = f"{who} comes to grid_dependency_wait on some paths only"
            yield finding("dependent", text, node, unsure[-1])
    if waits:
        yield from early(skeleton)


def early(skeleton: Skeleton) -> Iterator[Finding]:
    """Accesses that only some programs come to, before the wait and before anything that another
    role could tell of it with."""
    body = skeleton.body
    parts = [("the program", body.block)]
    parts += [(str(r.attrs["name"]), r.blocks[0]) for r in body.block.find("role")]
    for who, block in parts:
        for node, around in walk(block):
            name = node.op.name
            if name in TELL and block is body.block:
                return  # all roles know
            if name in TELL or name == "role":
                break
            for touch in touches_of(node):
                memory, verb = touch.memory, "writes" if touch.writes else "reads"
                if memory not in body.parameters or not any(varies(skeleton, n) for n in around):
                    continue
                if touch.writes or memory.type.use != "constant":  # type: ignore[union-attr]
                    what = f"{verb} {memory.attrs['name']} in some programs"
                    text = f"{who} {what} before it knows of grid_dependency_wait"
                    yield finding("dependent", text, node)


def surely_waits(block: Block) -> bool:
    """Whether all paths through a Block come to the wait."""
    for node in block.nodes:
        inside = [surely_waits(inner) for inner in node.blocks]
        if node.op.name == "grid_dependency_wait" or (inside and all(inside) and runs(node)):
            return True
    return False


def runs(node: Node) -> bool:
    """Whether what stands inside of a Node is surely run, once it is come to."""
    if node.op.name != "loop":
        return True
    lower, upper = (i.attrs.get("value") for i in node.inputs[:2])
    return lower is not None and upper is not None and low(upper) > high(lower)


def varies(skeleton: Skeleton, node: Node) -> bool:
    """Whether a condition or bound differs between programs, Symbols or data."""

    def own(scalar: Node) -> bool:
        name = scalar.op.name
        known = name in ("constant", "get") or scalar in skeleton.owner
        return name in OF_RUN or not (known or computable(scalar))

    return any(map(own, nodes_from(deciding(node), skeleton.parts)))
