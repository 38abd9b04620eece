"""Schedules as text: Slots, Kernels with their Regions and steps, then every Body.

    tilegrad-schedule 1
    tilegrad-ir 1 schedule
    main() {
      %0 = slot() {shape=(7,), dtype=float32, kind="input", ...} : float32[7]
      plan(%0) {arena=0}
      kernel() {name="loops_add_1", ...} {
        region(%in0: float32[7]) { ... }
        steps() {
          launch(%0, %1) {body="loops_add_1"}
          ...
    body "loops_add_1"
    tilegrad-body 1 ...

The ops are a dialect of their own, in the text of every IR. Invariant: printing what was parsed
gives the same text, and it lowers to the same Recipe; the notes of Kernels are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.errors import UserError
from ..graph import ops as graph_ops  # noqa: F401  (Regions are Graphs)
from ..ir.block import Block, argument, pure_block
from ..ir.literal import quote
from ..ir.node import Dialect, Node, Op
from ..ir.rewrite import replace
from ..ir.text import parse_block, print_block
from ..ir.types import NOTHING, Array, Tuple
from ..tile.build import Body
from ..tile.text import body_text, parse_body
from .schedule import Control, Copy, Kernel, Label, Launch, Schedule, Slot, Transfer

HEAD = "tilegrad-schedule 1"
BODY = "\nbody "

schedule = Dialect("schedule")


def _nothing(*_: Node, **__: Any) -> Any:
    return NOTHING


def _step(name: str, attrs: tuple[str, ...], meaning: str, group: str = "step") -> Op:
    return Op(schedule, name, _nothing, attrs=attrs, effect=True, group=group, meaning=meaning)


slot = Op(
    schedule,
    "slot",
    lambda *alias, shape, dtype, **_: Array(shape, dtype),
    attrs=("shape", "dtype", "kind", "name", "offset", "first", "last", "device"),
    effect=True,
    group="slot",
    meaning="planned storage, perhaps that of another Slot",
)
plan = _step("plan", ("arena", "arenas"), "inputs: the Slots of the arguments, in order", "slot")
kernel = _step(
    "kernel",
    ("name", "kind", "key", "flops", "bytes", "depth", "times", "device"),
    "Blocks: the Region (reads) -> stored values, and the steps",
    "kernel",
)
launch = _step("launch", ("body",), "a Body over the Slots of its parameters")
copy = _step("copy", ("bytes",), "inputs: source, target")
transfer = _step("transfer", ("bytes",), "the same between two Devices")
control = _step("control", ("kind", "numbers", "label"), "see schedule.Control")
label = _step("label", ("number",), "a place that jumps go to")


# ---- printing -------------------------------------------------------------------------------


def print_schedule(given: Schedule) -> str:
    """The text of a Schedule."""
    names = _body_names(given)
    slots = _slot_nodes(given)
    arenas: dict[str, Any] = {"arena": given.arena_bytes, "arenas": tuple(given.arenas.items())}
    nodes = [*slots, plan(*(slots[i] for i in given.inputs), **arenas)]
    nodes += [_kernel_node(k, slots, names) for k in given.kernels]
    main = Block("main", (), nodes, tuple(slots[i] for i in given.outputs))
    text = f"{HEAD}\n{print_block(main, 'schedule')}"
    bodies = {id(s.body): s.body for k in given.kernels for s in k.steps if isinstance(s, Launch)}
    for key, body in bodies.items():
        kept = {k: v for k, v in body.notes.items() if k not in ("program", "scratch")}
        shown = body_text(Body(body.name, body.block, body.grid, kept))
        text += f"{BODY}{quote(names[key])}\n{shown}"
    return text


def _body_names(given: Schedule) -> dict[int, str]:
    """A name for each Body, unique in the Schedule."""
    names: dict[int, str] = {}
    taken: dict[str, int] = {}
    for k in given.kernels:
        for s in k.steps:
            if isinstance(s, Launch) and id(s.body) not in names:
                count = taken[s.body.name] = taken.get(s.body.name, 0) + 1
                names[id(s.body)] = s.body.name if count == 1 else f"{s.body.name}.{count}"
    return names


def _slot_nodes(given: Schedule) -> list[Node]:
    found: list[Node] = []
    for s in given.slots:
        alias = () if s.alias is None else (found[s.alias],)
        found.append(
            slot(
                *alias,
                shape=s.type.shape,
                dtype=s.type.dtype,
                kind=s.kind,
                name=s.name,
                offset=s.offset,
                first=s.first,
                last=s.last,
                device=s.device,
            )
        )
    return found


def _kernel_node(k: Kernel, slots: Sequence[Node], names: dict[int, str]) -> Node:
    steps = Block("steps", (), [_step_node(s, slots, names) for s in k.steps])
    return kernel(
        blocks=(region_block(k), steps),
        name=k.name,
        kind=k.kind,
        key=k.key,
        flops=k.flops,
        bytes=k.bytes,
        depth=k.depth,
        times=k.times,
        device=k.device,
    )


def region_block(k: Kernel) -> Block:
    """The Region of a Kernel as a closed Block of the Graph."""
    reads, stored = (list(dict.fromkeys(nodes)) for nodes in k.region)
    arguments = [argument(f"in{i}", r.type) for i, r in enumerate(reads)]
    stored = [v for v in stored if not isinstance(v.type, Tuple)]
    results = replace(stored, dict(zip(reads, arguments)))
    return pure_block("region", tuple(arguments), tuple(results))


def _step_node(s: Any, slots: Sequence[Node], names: dict[int, str]) -> Node:
    if isinstance(s, Launch):
        return launch(*(slots[i] for i in s.slots), body=names[id(s.body)])
    if isinstance(s, Transfer):
        return transfer(slots[s.source], slots[s.target], bytes=s.bytes)
    if isinstance(s, Copy):
        return copy(slots[s.source], slots[s.target], bytes=s.bytes)
    if isinstance(s, Label):
        return label(number=s.number)
    return control(
        *(slots[i] for i in s.slots), kind=s.kind, numbers=tuple(s.numbers), label=s.label
    )


# ---- parsing --------------------------------------------------------------------------------


def parse_schedule(text: str) -> Schedule:
    """The Schedule that a text describes; a mistake in it is a UserError."""
    head, _, rest = text.lstrip().partition("\n")
    if head.strip() != HEAD:
        raise UserError("cannot read a Schedule", expected=HEAD, got=head)
    parts = rest.split(BODY)
    bodies = {}
    for part in parts[1:]:
        name, _, shown = part.partition("\n")
        bodies[name.strip().strip('"')] = parse_body(shown)
    return _Reader(parse_block(parts[0]), bodies).schedule()


class _Reader:
    """Turns the Block of a Schedule back into records."""

    def __init__(self, block: Block, bodies: dict[str, Body]) -> None:
        self.block, self.bodies = block, bodies
        nodes = [n for n in block.nodes if n.op is slot]
        self.number = {n: i for i, n in enumerate(nodes)}
        self.steps: dict[Op, Callable[[Node], Any]] = {
            launch: self.launch,
            copy: lambda n: self.copied(Copy, n),
            transfer: lambda n: self.copied(Transfer, n),
            label: lambda n: Label(n.attrs["number"]),
            control: lambda n: Control(
                n.attrs["kind"], self.numbers(n), n.attrs["numbers"], n.attrs["label"]
            ),
        }

    def numbers(self, node: Node) -> tuple[int, ...]:
        """The Slots a step names."""
        return tuple(self.number[i] for i in node.inputs)

    def schedule(self) -> Schedule:
        """All of it."""
        found = Schedule(
            [self.slot(n) for n in self.number],
            [],
            [],
            [self.number[r] for r in self.block.results],
        )
        for node in self.block.nodes:
            if node.op is plan:
                found.inputs, found.arena_bytes = list(self.numbers(node)), node.attrs["arena"]
                found.arenas = dict(node.attrs["arenas"])
            elif node.op is kernel:
                found.kernels.append(self.kernel(node))
        return found

    def slot(self, node: Node) -> Slot:
        """A Slot."""
        a = node.attrs
        alias = self.number[node.inputs[0]] if node.inputs else None
        assert isinstance(node.type, Array)
        return Slot(
            self.number[node],
            node.type,
            a["kind"],
            a["name"],
            alias,
            a["offset"],
            a["first"],
            a["last"],
            a["device"],
        )

    def kernel(self, node: Node) -> Kernel:
        """A Kernel."""
        a, (region, steps) = node.attrs, node.blocks
        return Kernel(
            a["name"],
            a["kind"],
            (region.arguments, region.results),
            [self.steps[n.op](n) for n in steps.nodes],
            a["key"],
            a["flops"],
            a["bytes"],
            a["depth"],
            a["times"],
            a["device"],
        )

    def copied(self, kind: type[Copy], node: Node) -> Copy:
        """A Copy or a Transfer of a Node."""
        source, target = self.numbers(node)
        return kind(source, target, node.attrs["bytes"])

    def launch(self, node: Node) -> Launch:
        """A Launch."""
        body = self.bodies.get(node.attrs["body"])
        if body is None:
            raise UserError(
                "cannot read a Schedule",
                expected=f"a body {node.attrs['body']!r}",
                got=", ".join(self.bodies),
            )
        return Launch(body, self.numbers(node))
