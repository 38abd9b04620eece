"""Roles against each other without data: turns, barriers, and who must know of whom.

The events of every role (`skeleton`) are run against each other once. Who may touch what is
decided by clocks (`access`), so one order stands for all of them, as long as every wait goes on
for the same reason in every order. That is proved on the way, for each barrier:

* an arrival, an expectation or a copy counts for phase n only if its role knows that n phases are
  over: it cannot count for an earlier one, and by induction for no later one;
* a wait that went on when n phases were over knows that n-1 are: it cannot have gone on earlier;
* the end of phase n+1 knows of the wait: it cannot have been overtaken.

Likewise for named barriers: who arrives in a round knows that the round before is over. Where one
of these fails the Body is at the mercy of time, and that is a Finding of its own ('phase').

Within a role the warps are one agent, but for one thing: what all of them stored, one thread hands
to a copy (or all to a matrix op) only after a named barrier of the role. Arriving at a barrier is
ordered after what all warps of the role did.

The programs of a cluster are run together, as several sets of roles: each rank has places and
barriers of its own, which the other ranks' copies, sends and arrivals reach; they end together.

Both who run a Body without data (`prove`) and with it (`interpret`) tell an Order of every
Node that has effects (`happening`), in an order in which it may happen. Invariant: a Finding of
level 'error' holds for some order in which the roles may run. The file is long because an Order is
one record, and each question to it needs most of what it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..ir.node import Node
from ..ir.symbol import evaluate
from . import row
from .access import Bar, Clock, Group, Place, Region, Touched, join
from .build import Body
from .check import Finding, finding, line_of, place_name, written_parameters
from .row import Scalar, Touch, is_place

MOST_FINDINGS = 24
ENGINES = ("matrix_async", "copy_store", "copy_threads")  # what a role starts in groups
Known = Mapping[Node, Any]  # what scalars are


@dataclass(eq=False)
class Role:
    """A role (or the program around them) as an agent."""

    name: str
    number: int
    warps: int
    rank: int
    alone: bool  # no warps that could be apart
    groups: dict[str, Group]
    clock: Clock = field(default_factory=list)
    fenced: bool = False
    waited: bool = False  # itself for the launches before
    registers: set[Node] = field(default_factory=set)  # touched since the last matrix_fence
    unfenced: list[Touched] = field(default_factory=list)
    synced: int = 0  # up to here the warps of the role have met

    @property
    def epoch(self) -> int:
        """The count of its events."""
        return self.clock[self.number]


class Waiting(NamedTuple):
    """A role that waits at a Node for a phase of a barrier to end."""

    role: Role
    node: Node
    bar: Bar
    over: int  # phases, when it came

    def ready(self) -> bool:
        """Whether it has."""
        return len(self.bar.over) > self.over

    def __str__(self) -> str:
        parity = "" if self.bar.node else f" with parity {self.over % 2}"
        return f"{self.role.name} waits on {self.bar}{parity} at {line_of(self.node)}"


class Order:
    """The roles, barriers and places of one program, or of the programs of a cluster."""

    def __init__(self, body: Body, symbols: Mapping[str, int], ranks: int) -> None:
        self.body, self.symbols, self.ranks = body, symbols, ranks
        self.names: list[str] = []
        self.findings: dict[Any, Finding] = {}
        self.tracked = written_parameters(body)
        self.dependent = body.block.find("grid_dependency_wait")
        self.grid = self.agent("the launches before")
        self.bars: dict[tuple[int, Node], list[Bar]] = {}
        self.made: set[tuple[int, Node]] = set()  # barriers that have been set up
        self.rounds: dict[tuple[int, int], Bar] = {}
        self.touched: dict[tuple[int, Node], Place] = {}
        self.late: list[Callable[[], None]] | None = None  # what lands later, if it does
        self.begun = False  # the first roles
        self.roles: dict[tuple[int, Node | None], Role] = {}
        for rank in range(ranks):
            self._barriers(rank)
            for node in (None, *body.block.find("role")):
                self._role(rank, node)
        for role in self.roles.values():
            role.clock = [0] * len(self.names)

    def _barriers(self, rank: int) -> None:
        """The barriers of a program, which are agents."""
        for node in self.body.block.find("barrier", "named_sync", "named_arrive"):
            a = node.attrs
            if node.op.name == "barrier":
                made = []
                for stage in range(a["stages"]):
                    name = self.on(rank, f"{a['name']}[{stage}]")
                    made.append(Bar(name, a["count"], self.agent(f"copies on {name}")))
                self.bars[rank, node] = made
            elif (rank, a["number"]) not in self.rounds:
                name = f"named barrier {a['number']}"
                made_round = Bar(name, a["threads"], self.agent(self.on(rank, name)))
                self.rounds[rank, a["number"]] = made_round

    def _role(self, rank: int, node: Node | None) -> None:
        """A role or (None) a program, and its engines."""
        facts = {"warps": 4, **self.body.notes} if node is None else node.attrs
        name = self.on(rank, facts.get("name", "the program"))
        number, warps = self.agent(name), facts["warps"]
        groups = {kind: Group(self.agent(f"{kind} of {name}")) for kind in ENGINES}
        alone = node is None or warps == 1
        self.roles[rank, node] = Role(name, number, warps, rank, alone, groups)

    def on(self, rank: int, name: str) -> str:
        """A name, with the rank where there are several."""
        return name if self.ranks == 1 else f"{name} of rank {rank}"

    def agent(self, name: str) -> int:
        """The number of a new agent."""
        self.names.append(name)
        return len(self.names) - 1

    def report(
        self,
        rule: str,
        message: str,
        node: Node,
        other: Node | None = None,
        *more: str,
    ) -> None:
        """A Finding (with a hint and a severity of its own), each pair of ops once."""
        self.note((rule, node, other), finding(rule, message, node, other, *more))

    def note(self, key: object, found: Finding) -> None:
        """Note a Finding under a key, unless it is known or there are enough."""
        if len(self.findings) < MOST_FINDINGS:
            self.findings.setdefault(key, found)

    # ---- roles ------------------------------------------------------------------------------

    def begin(self, ranks: Sequence[int]) -> None:
        """Programs come to roles; the first of a cluster begin together."""
        mains = [self.roles[rank, None].clock for rank in ranks]
        for clock in mains if not self.begun else ():
            for other in mains:
                join(clock, other)
        self.begun = True

    def fork(self, rank: int, node: Node) -> Role:
        """A role starts with what its program knows."""
        role, main = self.roles[rank, node], self.roles[rank, None]
        join(role.clock, main.clock)
        role.waited = main.waited
        return role

    def ended(self, role: Role) -> None:
        """A role is over, and has waited for its groups; its program knows of all that it did."""
        for kind, group in role.groups.items():
            if group.issued > group.known and group.last is not None:
                self.report("unfinished", f"{role.name} ends with {kind} under way", group.last)
        join(self.roles[role.rank, None].clock, role.clock)

    def end(self) -> None:
        """The program is over: copies have landed, waits were not overtaken."""
        for rank in range(self.ranks):
            main = self.roles[rank, None]
            self.ended(main)
            if self.dependent and main.clock[self.grid] < 1:
                text = "the program may end before grid_dependency_wait"
                self.report("dependent", text, self.dependent[0])
        for (rank, node), bars in self.bars.items():
            known = self.roles[rank, None].clock
            for bar in bars:
                self.left(bar, node, known)
                self.overtaken(bar)

    def left(self, bar: Bar, node: Node, known: Clock) -> None:
        """Bytes that nobody counts, and copies that nobody waits for."""
        if bar.arrived == bar.count and bar.expected != bar.landed:
            self.report("bytes", f"{bar} never ends this phase", node)
        elif bar.landed or bar.expected or known[bar.agent] < bar.copies:
            text = f"the program ends with copies on {bar.name} under way"
            self.report("unfinished", text, node)

    def overtaken(self, bar: Bar) -> None:
        """A phase that may end while a role still waits for the one before."""
        for over, agent, epoch, node in bar.waits:
            if over < len(bar.over) and bar.over[over][agent] <= epoch:
                before = "the start" if over == 0 else f"phase {over - 1}"
                who = f"{self.names[agent]} comes to wait for {before}"
                text = f"{bar.name} may end phase {over} before {who}"
                self.report(
                    "phase", f"{text}, which then waits for ever or one phase too long", node
                )

    # ---- who touches what -------------------------------------------------------------------

    def place(self, rank: int, node: Node) -> Place:
        """The boxes of a place or a parameter."""
        key = (rank if is_place(node) else 0, node)
        found = self.touched.get(key)
        if found is None:
            shape = tuple([evaluate(s, self.symbols) for s in node.shape])
            found = self.touched[key] = Place(node, shape)
        return found

    def region(
        self, role: Role, rank: int, node: Node, touch: Touch, values: Known
    ) -> Region | None:
        """The box that a role touches in the program of a rank; None where nobody minds, or it is
        not there. Parameters are touched after the dependency wait, but for reads of constants."""
        memory, own = touch.memory, is_place(touch.memory)
        if not own:
            early = self.dependent and not self.may_touch(role)
            if early and (touch.writes or memory.type.use != "constant"):  # type: ignore[union-attr]
                what = f"{'writes' if touch.writes else 'reads'} {memory.attrs['name']}"
                text = f"{role.name} {what} before it knows of grid_dependency_wait"
                self.report("dependent", text, node)
            if memory not in self.tracked:
                return None
        place = self.place(rank, memory)
        if touch.some or touch.pages is not None:
            return self.chosen(place, node, touch, values)
        index = tuple([scalar(s, values) for s in touch.index])
        if own and touch.mask is None and place.leaves(index, touch.shape, touch.axes):
            text = f"{node.op.name} at {list(index)} leaves {place_name(memory)}"
            self.report("index", text, node, memory)
            return None
        return place.boxed(index, touch.shape, touch.axes)

    def chosen(self, place: Place, node: Node, touch: Touch, values: Known) -> Region | None:
        """The box of elements that data chooses: any of a place, and any page; nobody minds which
        others of a parameter."""
        known = is_place(touch.memory) or touch.pages is not None
        return place.whole if known else None

    def touch(self, region: Region, role: Role, made: Touched, writes: bool) -> None:
        """A role or an agent of it touches a box: the role must know of all that conflicts."""
        clock, verb = role.clock, "writes" if writes else "reads"
        engine = role.number < made.agent <= role.number + len(ENGINES)
        for near in region.around():
            for other in (near.write, *(near.reads.values() if writes else ())):
                if other is None or clock[other.agent] >= other.epoch:
                    continue
                if engine and other.agent == made.agent:
                    continue
                done = "writes" if other is near.write else "reads"
                one = f"{self.names[made.agent]} {verb} {region}"
                clash = f"{one} while {self.names[other.agent]} {done} it"
                text = f"{clash}, and no barrier or wait orders the two"
                self.report("race", text, made.node, other.node)
        if writes:
            region.write = made
            region.reads.clear()
            region.written = True
        else:
            region.reads[made.agent] = made

    def require(self, region: Region, role: Role, node: Node) -> None:
        """A place is read: it must have been written."""
        place = region.place
        if place.scope != "global" and not place.initialised(region):
            text = f"{role.name} reads {region}, which nothing has written on this path"
            self.report("uninitialised", text, node, place.node)

    def plain(self, region: Region, role: Role, node: Node, touch: Touch) -> None:
        """A plain load or store of a role."""
        place = region.place
        if not touch.writes:
            if not (touch.some and place.touched()):
                self.require(region, role, node)
            hint = "named_sync with the role's own threads, unless each thread reads its own"
            for near in region.around() if not touch.some and place.scope != "global" else ():
                if near.write is not None and near.write.plain:
                    self.met(place, near.write, role, node, "reads", "stored", hint, "warning")
        plain = place.scope == "shared" or (touch.writes and place.scope == "global")
        made = Touched(role.number, role.epoch, node, plain)
        self.touch(region, role, made, touch.writes)
        if plain:
            role.unfenced.append(made)
        elif place.scope == "register":
            role.registers.add(place.node)

    def unfenced(self, place: Place, role: Role, node: Node) -> None:
        """A matrix op meets registers: a matrix_fence comes after their last plain use."""
        if place.scope == "register" and (place.node in role.registers or not role.fenced):
            what = f"{place_name(place.node)} in {node.op.name}"
            text = f"{role.name} uses {what} without matrix_fence"
            self.report("matrix_fence", text, node, place.node)

    def asynchronous(
        self, region: Region, role: Role, made: Touched, writes: bool, copies: bool = False
    ) -> None:
        """A copy or a matrix op touches a box: plain stores before it are fenced, and plain loads
        before a copy lands there, which else may still be under way."""
        if not writes:
            self.require(region, role, made.node)
        before = [
            (kind, plain)
            for near in region.around()
            for kind, found in (("stores to", (near.write,)), ("loads of", near.reads.values()))
            for plain in (found if copies or kind == "stores to" else ())
        ]
        self.touch(region, role, made, writes)
        for kind, plain in before:
            if plain is not None and plain.plain:
                self.published(f"{kind} {region}", plain, role, made.node)

    def published(self, what: str, plain: Touched, role: Role, node: Node) -> None:
        """Plain accesses that an asynchronous op meets: fenced, and the warps have met."""
        hint = ""
        if plain.fence is None:
            text = f"meets plain {what} without fence('async')"
        elif plain.agent != role.number and role.clock[plain.agent] < plain.fence:
            text = f"does not know of the fence('async') after the {what}"
        elif plain.agent == role.number and not role.alone and role.synced <= plain.fence:
            text = f"meets {what} by all {role.warps} warps, "
            text += "which have not met since their fence('async')"
            hint = "named_sync with the role's own threads after the fence"
        else:
            return
        self.report("fence", f"{node.op.name} of {role.name} {text}", node, plain.node, hint)

    def met(
        self,
        place: Place,
        before: Touched,
        role: Role,
        node: Node,
        does: str,
        did: str,
        *more: str,
    ) -> None:
        """A role's threads touch what its warps touched: all of them must be past that."""
        if before.agent == role.number and not role.alone and role.synced <= before.epoch:
            what = f"{place_name(place.node)}, which its {role.warps} warps {did}"
            text = f"{role.name} {does} {what}, and they have not met since"
            self.report("warps", text, node, before.node, *more)

    def may_touch(self, role: Role) -> bool:
        """Whether a role knows, if only by others, that the launches before are done."""
        return role.clock[self.grid] > 0

    # ---- barriers ---------------------------------------------------------------------------

    def bar(
        self, rank: int, node: Node, of: row.Arrive | row.Wait | row.Land, values: Known
    ) -> Bar | None:
        """The barrier of an array that an Effect is of."""
        bars, stage = self.bars[rank, of.barrier], scalar(of.stage, values)
        if not 0 <= stage < len(bars):
            text = f"at stage {stage} of the {len(bars)} barriers {of.barrier.attrs['name']}"
            self.report("index", f"{node.op.name} {text}", node, of.barrier)
            return None
        return bars[stage]

    def come(
        self,
        role: Role,
        bar: Bar,
        node: Node,
        arrivals: int,
        expected: int,
        landed: int,
        tells: bool = True,
    ) -> None:
        """An arrival or a copy, in a phase that the role knows to have begun; it tells who waits
        of all that the role did, or of itself alone."""
        if role.clock[bar.agent] < len(bar.over):
            what = f"{'copies' if landed else 'arrives'} on {bar.name} in phase {len(bar.over)}"
            text = f"{role.name} {what} without knowing that the phase before is over"
            self.report("phase", f"{text}: it may count for the wrong one", node, bar.node)
        clock = list(role.clock) if tells else [0] * len(role.clock)

        def count() -> None:
            before, bytes_ = len(bar.over), bar.expected + bar.landed + expected + landed
            bar.come(clock, arrivals, expected, landed)
            if len(bar.over) > before and arrivals == 1 and not bytes_:
                # one thread ended it, if it knew of all others
                others = [a <= b for a, b in zip(bar.over[-1], role.clock)]
                others[bar.agent] = True
                if all(others):
                    role.clock[bar.agent] = len(bar.over)

        if landed and self.late is not None:
            self.late.append(count)
        else:
            count()
        if bar.arrived > bar.count:
            self.report("arrivals", f"{bar}: more arrivals than it counts", node)

    def reached(
        self, role: Role, node: Node, of: row.Arrive | row.Land, values: Known
    ) -> Sequence[int]:
        """The ranks of the programs where something lands or arrives."""
        if of.mask is None:
            return [role.rank]
        every = range(self.ranks)
        if of.mask == -1:
            return every
        first = scalar(of.first, values)
        if first < 0 or of.mask << first >= 1 << self.ranks:
            where = f"rank {first}" if of.mask == 1 else f"ranks {of.mask:b} from {first} on"
            self.report("index", f"{node.op.name} to {where} of a cluster of {self.ranks}", node)
            return []
        return [rank for rank in every if of.mask << first >> rank & 1]


def scalar(given: Scalar, values: Known) -> int:
    """The value of a scalar."""
    return given if isinstance(given, int) else int(values[given])
