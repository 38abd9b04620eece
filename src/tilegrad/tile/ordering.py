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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..ir.node import Node
from ..ir.symbol import evaluate
from . import row
from .access import Bar, Clock, Group, Place, Plain, Region, join
from .access import Touch as Touched
from .build import Body
from .check import Finding, finding, line_of, place_name, written_parameters
from .row import Scalar, Touch, effects_of, is_place

MOST_FINDINGS = 24
ENGINES = ("matrix_async", "copy_store", "copy_threads")  # what a role starts in groups
Known = Mapping[Node, Any]  # what scalars are


class Role:
    """A role (or the program around them) as an agent."""

    def __init__(
        self, name: str, number: int, warps: int, rank: int, size: int, main: bool
    ) -> None:
        self.name, self.number, self.warps, self.rank = name, number, warps, rank
        self.alone = main or warps == 1  # no warps that could be apart
        self.clock: Clock = [0] * size
        self.groups = {kind: Group(number + 1 + i) for i, kind in enumerate(ENGINES)}
        self.joined: int | None = None  # round of a named barrier it waits in
        self.fenced = False
        self.waited = False  # itself for the launches before
        self.registers: set[Node] = set()  # touched since the last matrix_fence
        self.unfenced: list[Plain] = []
        self.synced = 0  # up to here the warps of the role have met

    @property
    def epoch(self) -> int:
        """The count of its events."""
        return self.clock[self.number]


class Order:
    """The roles, barriers and places of one program, or of the programs of a cluster."""

    def __init__(self, body: Body, symbols: Mapping[str, int], ranks: int) -> None:
        self.body, self.symbols, self.ranks = body, symbols, ranks
        self.names: list[str] = []
        self.findings: dict[Any, Finding] = {}
        ops = list(body.block.all_nodes())
        self.tracked = written_parameters(body)
        self.dependent = body.block.find("grid_dependency_wait")
        self.grid = self.agent("the launches before")
        self.bars: dict[tuple[int, Node], list[Bar]] = {}
        self.made: set[tuple[int, Node]] = set()  # barriers that have been set up
        self.rounds: dict[tuple[int, int], Bar] = {}
        self.touched: dict[tuple[int, Node], Place] = {}
        self.late: list[Callable[[], None]] | None = None  # what lands later, if it does
        self.begun = False  # the first roles
        numbered: list[tuple[int, Node | None, int]] = []
        for rank in range(ranks):
            self._declare(rank, ops)
            for node in (None, *body.block.find("role")):
                name = "the program" if node is None else node.attrs["name"]
                numbered.append((rank, node, self.agent(self.on(rank, name))))
                for kind in ENGINES:
                    self.agent(f"{kind} of {self.on(rank, name)}")
        size, main = len(self.names), body.notes.get("warps", 4)
        self.roles = {
            (rank, node): Role(
                self.names[number],
                number,
                main if node is None else node.attrs["warps"],
                rank,
                size,
                node is None,
            )
            for rank, node, number in numbered
        }

    def _declare(self, rank: int, ops: list[Node]) -> None:
        """Agents of barriers, so that every clock has its full length from the start."""
        for node in ops:
            a = node.attrs
            if node.op.name == "barrier":
                made = []
                for stage in range(a["stages"]):
                    name = self.on(rank, f"{a['name']}[{stage}]")
                    made.append(Bar(name, a["count"], self.agent(f"copies on {name}")))
                self.bars[rank, node] = made
            elif node.op.name in ("named_sync", "named_arrive"):
                key, name = (rank, a["number"]), f"named barrier {a['number']}"
                if key not in self.rounds:
                    self.rounds[key] = Bar(name, a["threads"], self.agent(self.on(rank, name)))

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
        hint: str = "",
        severity: str = "error",
    ) -> None:
        """A Finding, each pair of ops once."""
        self.note((rule, node, other), finding(rule, message, node, other, hint, severity))

    def note(self, key: object, found: Finding) -> None:
        """Note a Finding under a key, unless it is known or there are enough."""
        if len(self.findings) < MOST_FINDINGS:
            self.findings.setdefault(key, found)

    # ---- roles ------------------------------------------------------------------------------

    def fork(self, ranks: Iterable[tuple[int, Sequence[Node]]]) -> list[Role]:
        """Roles of programs start with what these know; the first of a cluster with what all do."""
        met = list(ranks)
        mains = [self.roles[rank, None] for rank, _ in met]
        known = [list(main.clock) for main in mains]
        if not self.begun:
            for clock in known:
                for other in known:
                    join(clock, other)
        self.begun = True
        started = []
        for (rank, nodes), clock in zip(met, known):
            for node in nodes:
                role = self.roles[rank, node]
                own = role.epoch
                join(role.clock, clock)
                role.clock[role.number] = own
                role.waited = self.roles[rank, None].waited
                started.append(role)
        return started

    def joined(self, role: Role) -> None:
        """A role has ended: its program knows of all that it did."""
        join(self.roles[role.rank, None].clock, role.clock)

    def settled(self, role: Role) -> None:
        """Report groups that the role has not waited for."""
        for kind, group in role.groups.items():
            if group.issued > group.known and group.last is not None:
                self.report("unfinished", f"{role.name} ends with {kind} under way", group.last)

    def ready(self, role: Role, node: Node, values: Known) -> bool:
        """Whether what a role waits for has come."""
        (wait,) = effects_of(node)
        if isinstance(wait, row.Wait):
            bar = self.bar(role.rank, wait.barrier, node, scalar(wait.stage, values))
            return bar is None or len(bar.over) % 2 != scalar(wait.parity, values)
        assert isinstance(wait, row.Meet) and role.joined is not None
        return len(self.rounds[role.rank, wait.number].over) > role.joined

    def awaited(self, role: Role, node: Node, values: Known) -> str:
        """What a role waits for, in words."""
        (wait,) = effects_of(node)
        if isinstance(wait, row.Wait):
            bar = self.bars[role.rank, wait.barrier][scalar(wait.stage, values)]
            what = f"{bar} with parity {scalar(wait.parity, values)}"
        else:
            round_ = self.rounds[role.rank, wait.number]  # type: ignore[union-attr]
            what = f"{round_.name} ({round_.arrived} of {node.attrs['threads']} threads came)"
        return f"{role.name} waits on {what} at {line_of(node)}"

    def end(self) -> None:
        """The program is over: copies have landed, waits were not overtaken."""
        for rank in range(self.ranks):
            main = self.roles[rank, None]
            self.settled(main)
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
        elif bar.landed or bar.expected or known[bar.agent] < len(bar.over):
            if bar.landed or bar.expected or self.copied(bar):
                text = f"the program ends with copies on {bar.name} under way"
                self.report("unfinished", text, node)

    def copied(self, bar: Bar) -> bool:
        """Whether the last phase of a barrier had copies."""
        return any(
            r.write is not None and r.write.agent == bar.agent and r.write.epoch == len(bar.over)
            for p in self.touched.values()
            for r in p.regions.values()
        )

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

    def region(self, rank: int, node: Node, touch: Touch, values: Known) -> Region | None:
        """The box that a Touch means; None where nobody minds, or it is not there."""
        memory = touch.memory
        own = is_place(memory)
        if not own and memory not in self.tracked:
            return None
        place = self.place(rank, memory)
        if touch.some or touch.pages is not None:
            return self.chosen(place, touch, values)
        index = tuple([scalar(s, values) for s in touch.index])
        if own and touch.mask is None and place.leaves(index, touch.shape, touch.axes):
            text = f"{node.op.name} at {list(index)} leaves {place_name(memory)}"
            self.report("index", text, node, memory)
            return None
        return place.boxed(index, touch.shape, touch.axes)

    def chosen(self, place: Place, touch: Touch, values: Known) -> Region | None:
        """The box of elements that data chooses: any of a place, and any page; nobody minds which
        others of a parameter."""
        known = is_place(touch.memory) or touch.pages is not None
        return place.whole if known else None

    def race(
        self, region: Region, node: Node, agent: int, verb: str, other: Touched, done: str
    ) -> None:
        """Report two unordered accesses."""
        one = f"{self.names[agent]} {verb} {region}"
        clash = f"{one} while {self.names[other.agent]} {done} it"
        self.report("race", f"{clash}, and no barrier or wait orders the two", node, other.node)

    def touch(
        self, region: Region, role: Role, node: Node, writes: bool, agent: int, epoch: int
    ) -> None:
        """An agent of a role touches a box: it must know of all that conflicts."""
        clock, verb = role.clock, "writes" if writes else "reads"
        engine = role.number < agent <= role.number + len(ENGINES)
        for near in region.around():
            other = near.write
            if other is not None and clock[other.agent] < other.epoch:
                if not (engine and other.agent == agent):
                    self.race(region, node, agent, verb, other, "writes")
            if writes:
                for number, read in near.reads.items():
                    if clock[number] < read.epoch and not (engine and number == agent):
                        self.race(region, node, agent, verb, read, "reads")
        made = Touched(agent, epoch, node)
        if writes:
            region.write = made
            region.reads.clear()
            region.place.fill(region)
        else:
            region.reads[agent] = made

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
            for near in region.around() if not touch.some else ():
                self.met(place, near.plain, role, node)
        self.touch(region, role, node, touch.writes, role.number, role.epoch)
        if place.scope == "register":
            role.registers.add(place.node)
        elif touch.writes:
            region.plain = Plain(role.number, role.epoch, node)
            role.unfenced.append(region.plain)

    def unfenced(self, place: Place, role: Role, node: Node) -> None:
        """A matrix op meets registers: a matrix_fence comes after their last plain use."""
        if place.scope == "register" and (place.node in role.registers or not role.fenced):
            what = f"{place_name(place.node)} in {node.op.name}"
            text = f"{role.name} uses {what} without matrix_fence"
            self.report("matrix_fence", text, node, place.node)

    def asynchronous(
        self, region: Region, role: Role, node: Node, writes: bool, agent: int, epoch: int
    ) -> None:
        """A copy or a matrix op touches a box: plain stores before it are fenced."""
        if not writes:
            self.require(region, role, node)
        self.touch(region, role, node, writes, agent, epoch)
        for near in region.around():
            if near.plain is not None:
                self.published(region, near.plain, role, node)
        if writes:
            region.plain = None

    def published(self, region: Region, plain: Plain, role: Role, node: Node) -> None:
        """Plain stores that an asynchronous op meets: fenced, and the warps have met."""
        hint = ""
        if plain.fence is None:
            text = f"meets plain stores to {region} without fence('async')"
        elif plain.agent != role.number and role.clock[plain.agent] < plain.fence:
            text = f"does not know of the fence('async') after the stores to {region}"
        elif plain.agent == role.number and not role.alone and role.synced <= plain.fence:
            text = f"meets stores to {region} by all {role.warps} warps, "
            text += "which have not met since their fence('async')"
            hint = "named_sync with the role's own threads after the fence"
        else:
            return
        self.report("fence", f"{node.op.name} of {role.name} {text}", node, plain.node, hint)

    def met(self, place: Place, plain: Plain | None, role: Role, node: Node) -> None:
        """A role reads what its own warps stored: other threads may hold it now."""
        if plain is None or place.scope == "global" or plain.agent != role.number:
            return
        if not role.alone and role.synced <= plain.epoch:
            what = f"{place_name(place.node)}, which its {role.warps} warps stored"
            text = f"{role.name} reads {what}, and they have not met since"
            hint = "named_sync with the role's own threads, unless each thread reads its own"
            self.report("warps", text, node, plain.node, hint, "warning")

    def crossed(self, region: Region, role: Role, node: Node) -> None:
        """A role's threads write what its warps read: all of them must be past the read."""
        for near in region.around():
            read = near.reads.get(role.number)
            if read is not None and not role.alone and role.synced <= read.epoch:
                what = f"{place_name(region.place.node)}, which its {role.warps} warps read"
                text = f"{role.name} writes {what}, and they have not met since"
                hint = "named_sync with the role's own threads between the two"
                self.report("warps", text, node, read.node, hint)

    def may_touch(self, role: Role) -> bool:
        """Whether a role knows, if only by others, that the launches before are done."""
        return role.clock[self.grid] > 0

    def depends(self, role: Role, memory: Node, node: Node, writes: bool) -> None:
        """Parameters are touched after the dependency wait, but for reads of constants."""
        if self.dependent and not self.may_touch(role) and not is_place(memory):
            if writes or memory.type.use != "constant":  # type: ignore[union-attr]
                what = f"{'writes' if writes else 'reads'} {memory.attrs['name']}"
                text = f"{role.name} {what} before it knows of grid_dependency_wait"
                self.report("dependent", text, node)

    # ---- barriers ---------------------------------------------------------------------------

    def bar(self, rank: int, node: Node, op: Node, stage: Any) -> Bar | None:
        """One barrier of an array."""
        bars = self.bars[rank, node]
        if not 0 <= stage < len(bars):
            text = f"at stage {stage} of the {len(bars)} barriers {node.attrs['name']}"
            self.report("index", f"{op.op.name} {text}", op, node)
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
            self.report("phase", f"{text}: it may count for the wrong one", node)
        clock = list(role.clock) if tells else [0] * len(role.clock)

        def count() -> None:
            before, bytes_ = len(bar.over), bar.expected + bar.landed + expected + landed
            bar.come(clock, arrivals, expected, landed)
            if len(bar.over) > before and not bytes_:  # it ended it, if it knew of all others
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

    def reached(self, role: Role, node: Node, land: row.Land, values: Known) -> list[int]:
        """The ranks of the programs where something lands."""
        if land.mask is None:
            return [role.rank]
        first, all_ = scalar(land.first, values), (1 << self.ranks) - 1
        if land.mask == -1:
            chosen = all_
        elif first < 0 or (land.mask << first) & ~all_:
            where = f"rank {first}" if land.mask == 1 else f"ranks {land.mask:b} from {first} on"
            self.report("index", f"{node.op.name} to {where} of a cluster of {self.ranks}", node)
            return []
        else:
            chosen = land.mask << first
        if land.parts and land.parts != self.ranks:
            text = f"{node.op.name} of {land.parts} shares to {self.ranks} programs"
            self.report("index", text, node)
            return []
        return [rank for rank in range(self.ranks) if chosen >> rank & 1]


def scalar(given: Scalar, values: Known) -> int:
    """The value of a scalar."""
    return given if isinstance(given, int) else int(values[given])
