"""THE page: every pass from a traced Graph to Bodies, in order, one line each.

A pass says by the Target's facts whether it applies, and why it cannot be left out where that is
so; any other can be switched off by name (`tilegrad explain --without "shallow sums"`). Its
function takes and gives, by part of the page:

- GRAPH: (arguments, results, log, target) -> results, over the whole Graph.
- REGIONS: (lowering), over the Graph and again over each Block of a loop or branch.
- TILES: (body, region kind, target) -> body, over each Body that a Region was lowered to; then the
  list that the Target's Language has of its own.
- KERNELS: (lowering, schedule), over the whole Schedule.

Invariant: every pass keeps the values of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.config import config
from ..core.target import Target
from ..graph import build, ops
from ..graph.ops import graph
from ..ir.block import argument_op, pure_block
from ..ir.node import Node, topological
from ..ir.passes import BLOCKS, Pass, Stage, check_names, chosen, ops_in
from ..ir.rewrite import Log
from ..runtime.buffer import HOST
from ..runtime.language import LANGUAGES

if TYPE_CHECKING:
    from ..schedule.lowering import Steps
    from ..schedule.schedule import Schedule
    from ..tile.build import Body

Results = list[Node]


def vectors(target: Target | None) -> bool:
    """Programs are single threads with vectors."""
    return target is None or not target.has_threads


def threads(target: Target | None) -> bool:
    """Programs are blocks of threads that share memory."""
    return target is not None and target.has_threads


def asynchronous(target: Target | None) -> bool:
    """Matrix units run while their threads go on."""
    return target is not None and bool(target.asynchronous_units)


def has_array(target: Target | None) -> bool:
    """Whether an array with queues of its own is beside the CPU."""
    return target is not None and target.array is not None


_NO_TARGET = "no Target has the ops that it writes out"
_START = "every Schedule starts with it"
_ORDER = "Kernels would read what is not yet written"
_ANY_SIZE = "no Target holds tiles of any size"
_ONE_ROW = "products of one row are added in another order"
_JOINED = "products are joined where so many rows pay for it"
_ORDER_OF_SUMS = "how a sum is cut depends on the number of rows"
_ANGLES = ("asin", "acos", "atan2", "asinh", "acosh", "atanh")
_WRITTEN_OUT = ("sign", "sigmoid", "logit", *_ANGLES, "custom")
_PICKED, _GROUPS = ("picked_dot", "grouped_dot"), ("group_rows", "route", "grouped_outer")
_CHOSEN = ("paged_append", "paged_attention", "draw", "top_k", "add_listed", *_PICKED, *_GROUPS)
_ATTENTION = ("attention", "attention_backward")
_REDUCE = ("sum", "max", "min", "prod")

GRAPH = [
    # A layer of experts: scores, picks and rows sorted by expert as one op.
    Pass(
        "routing",
        "compiler.routing:find_routing",
        threads,
        on=("group_rows",),
        varies="how a row's sum is cut depends on the number of rows",
    ),
    # Kernels for ops that nothing else computes: paged caches, draws, rows with weights of their
    # own. Later passes see calls.
    Pass("choose kernels", "compiler.choose:choose_kernels", needed=_NO_TARGET, on=_CHOSEN),
    # A derivative may hold copies of what it derives.
    Pass("separate loops", "compiler.share:share_loops", on=(BLOCKS,)),
    # Derivatives are done: stop_gradient is identity now.
    Pass("strip", "compiler.rules:strip", needed=_NO_TARGET, on=("stop_gradient",)),
    # Custom functions and ops no target has.
    Pass("inline", "compiler.rules:inline", needed=_NO_TARGET, on=_WRITTEN_OUT),
    Pass("share loops", "compiler.share:share_loops", on=(BLOCKS,)),
    # A derivative repeats the scan that it derives, and reads more of it.
    Pass("share scans", "compiler.share:share_scans", on=("scan",)),
    # Short scans of known length; inner ones first.
    Pass("unroll", "compiler.unroll:unroll_scans", on=("scan",)),
    Pass("simplify", "compiler.rules:simplify"),
    # Small ops into big: dot, attention.
    Pass("recognize", "compiler.rules:recognize_big", on=("sum", "dot", *_ATTENTION)),
    # Those that a derivative had recognized before.
    Pass("share recognized loops", "compiler.share:share_loops", on=(BLOCKS,)),
    # What no kernel of the Target takes.
    Pass("expand attention", "compiler.expand:expand_attention", needed=_NO_TARGET, on=_ATTENTION),
    # Products with quantised weights, and what is around them.
    Pass("weights", "compiler.weights:choose_weights", needed=_NO_TARGET, on=("unpack", "pack")),
    Pass("simplify what was expanded", "compiler.rules:simplify"),
    # Scatters into selects, divisions into products.
    Pass(
        "strength",
        "compiler.rules:strength",
        on=("divide", "update"),
        varies="a quotient becomes a product where a value is repeated",
    ),
    # Before dots of one row are written as sums.
    Pass(
        "norms",
        "compiler.norms:norms_behind_products",
        asynchronous,
        on=("dot",),
        varies="norms are moved behind products of few rows",
    ),
    # What an array multiplies, before products of a row are written as sums.
    Pass("narrow products", "compiler.narrow:narrow_products", has_array, on=("dot",)),
    # After recognition, which would undo them.
    Pass("dots of a row", "compiler.row_dots:dots_of_a_row", vectors, on=("dot",), varies=_ONE_ROW),
    Pass(
        "dots of a short row",
        "compiler.row_dots:dots_of_a_short_row",
        threads,
        on=("dot",),
        varies=_ONE_ROW,
    ),
    # Rows that come back from experts are added where they are read.
    Pass("gathered sums", "compiler.gathered:add_gathered", threads, on=("gather",)),
    # Long sums with few results get parallel parts.
    Pass("split reductions", "compiler.split:split_reductions", on=_REDUCE, varies=_ORDER_OF_SUMS),
    # After simplification, which would undo it.
    Pass("split parts", "compiler.split:split_parts", on=("concatenate",)),
    Pass("split argmax", "compiler.split:split_argmax", threads, on=("argmax",)),
    # Last: no algebra puts the factors back.
    Pass(
        "shallow sums",
        "compiler.row_factors:shallow_sums",
        threads,
        on=("sum",),
        varies="factors of a row are moved behind its sum",
    ),
]

REGIONS = [
    Pass("choose values", "schedule.lower:start", needed=_START),
    # What is cheaper computed twice than stored, before what reads it is cut.
    Pass("recompute", "schedule.values:recompute_cheap", threads),
    Pass("keep sums", "schedule.values:keep_sums", threads, varies=_ORDER_OF_SUMS),
    Pass("hand over sums", "schedule.values:hand_over", threads, varies=_ORDER_OF_SUMS),
    Pass("lay out operands", "schedule.products:lay_out", threads),
    Pass("look ahead", "schedule.lower:look_ahead", threads),
    Pass(
        "round early",
        "schedule.values:round_early",
        threads,
        varies="a value is rounded otherwise where it is stored",
    ),
    Pass("fuse", "schedule.lower:fuse", needed=_START),
    Pass("leave long epilogues", "schedule.products:leave_long_epilogues", threads),
    Pass("join dots", "schedule.dot_joint:join_dots", asynchronous, varies=_JOINED),
    # After the Regions are what they stay.
    Pass("order updates", "schedule.state:order_updates", needed=_ORDER),
    Pass("order Regions", "schedule.lower:order_regions", needed=_ORDER),
    # Neighbours in that order.
    Pass("pair up", "schedule.threads.pair:pair_up", threads, varies=_ORDER_OF_SUMS),
    Pass("lower", "schedule.lower:lower_regions", needed=_START),
]

TILES = [
    # Bodies of users' kernels: their tiles may be larger than the Target's registers.
    Pass("legalize", "schedule.call:legalize_call", needed=_ANY_SIZE, on=("call",)),
    Pass("prune", "tile.build:prune_body"),
    Pass("check calls", "schedule.call:check_call", needed="faults would go unseen", on=("call",)),
    Pass("check Bodies", "schedule.call:check_body", checks=True),
]

KERNELS = [
    Pass("find lives", "schedule.reuse:find_lives", needed="memory is planned by them"),
    Pass("take over", "schedule.reuse:take_over"),
    # In what is left to launch.
    Pass("put side by side", "schedule.side_by_side:put_side_by_side", threads),
    Pass("plan memory", "schedule.reuse:plan_arena", needed="Slots have no bytes without it"),
    Pass("check Schedule", "schedule.check:check_lowered", checks=True),
]

PAGE = [*GRAPH, *REGIONS, *TILES, *KERNELS]


def run_pipeline(
    arguments: Sequence[Node],
    results: Sequence[Node],
    target: Target | None = None,
    without: Sequence[str] = (),
) -> tuple[Results, list[Stage]]:
    """The Graph after every pass over it, and the record of each."""
    current = list(results)
    stages = [Stage("traced", current)]
    found = ops_in(current)
    for one, skipped in chosen(GRAPH, target, without):
        if skipped or (one.on and found.isdisjoint(one.on)):
            stages.append(Stage(one.name, current, skipped=skipped))
            continue
        log = Log()
        new = one.function(arguments, current, log, target)
        stages.append(Stage(one.name, new, dict(log.fired), new != current, log.notes))
        if new != current:
            found = ops_in(new)
        current = new
        if config().verify:
            from ..ir.verify import verify

            given = tuple(a for a in arguments if a.op is argument_op)  # inputs are Nodes of it
            verify(pure_block("main", given, tuple(current)), graph, where=one.name)
    return current, stages


def schedule_graph(
    arguments: Sequence[Node],
    results: Sequence[Node],
    target: Target,
    donated: Sequence[int] = (),
    bodies: Any = None,
    without: Sequence[str] = (),
    device: str = HOST,
    homes: Sequence[str] = (),
) -> tuple[Schedule, list[Stage]]:
    """The whole page: the Schedule of a Graph, and the record of each pass. `bodies` keeps what
    was lowered for later Graphs; it must be for the same Target and the same `without`. A Graph
    over several Devices (`device` is its own, `homes` those of its arguments) goes through the page
    in parts, each for the Target of its Device."""
    from ..schedule.lowering import Steps

    own_passes = passes_of(target)
    check_names([*PAGE, *own_passes], without)
    if homes or transfers(results):
        from ..runtime.device import target_for
        from .devices import schedule_parts

        def scheduled(inputs: Any, outputs: Any, name: str, ends: Any) -> Any:
            own = name == device
            facts = target if own else target_for(name)
            kept = bodies if own else None
            return schedule_graph(inputs, outputs, facts, ends, kept, without, name)

        where = homes or [device] * len(arguments)
        return schedule_parts(arguments, results, device, where, donated, scheduled)
    current, stages = run_pipeline(arguments, results, target, without)
    tiles = [*TILES, *own_passes]
    steps = Steps(*(chosen(part, target, without) for part in (REGIONS, tiles, KERNELS)))
    schedule = lowered(arguments, current, target, steps, donated, bodies)
    return schedule, [*stages, *steps.stages]


def passes_of(target: Target) -> list[Pass]:
    """The passes over Bodies that the target folder, or the package, of a Language has of its own;
    none where nobody writes programs in it."""
    language = LANGUAGES.find(target.language)
    return [] if language is None else list(language.passes)


def transfers(results: Sequence[Node]) -> list[Node]:
    """The Nodes of a Graph that name Devices, in Blocks too; none where none was ever made."""
    if not build.Transfers.used:
        return []
    found = []
    for node in topological(results):
        if node.op is ops.transfer:
            found.append(node)
        for block in node.blocks:
            found += transfers(block.results)
    return found


def fitted(body: Body, target: Target) -> Body:
    """The Body of a kernel that is called, after the passes over Bodies."""
    for one, skipped in chosen(TILES, target, ()):
        if not skipped and (not one.on or "call" in one.on):
            body = one.function(body, "call", target)
    return body


def lowered(
    inputs: Sequence[Node],
    results: Sequence[Node],
    target: Target,
    steps: Steps,
    donate: Sequence[int] = (),
    bodies: Any = None,
) -> Schedule:
    """The Schedule of a Graph after its passes; what is prepared is an input of it."""
    from ..schedule.lowering import Lowering

    if not any(n.op is ops.call and n.attrs["callee"].once for n in topological(results)):
        return Lowering(inputs, results, target, steps, donate, bodies).run()
    from .prepared import lift_preparations

    lifted = lift_preparations(inputs, results)
    donated = lifted.donated(donate)
    lowering = Lowering(lifted.inputs, lifted.results, target, steps, donated, bodies)
    schedule = lowering.run()
    slots = schedule.inputs
    schedule.given = [-1] * len(inputs)
    for number, slot in zip(lifted.kept, slots):
        schedule.given[number] = slot
    for one in lifted.preparing:
        one.slots = [slots[i] for i in one.slots]
    schedule.preparing = lifted.preparing
    return schedule
