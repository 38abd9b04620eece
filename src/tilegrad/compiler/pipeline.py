"""THE page: every pass from a Graph to a Schedule, in order.

Each pass takes and gives (arguments, results); a pass that changes the Graph is logged with the
Rules that fired. Invariant: every pass keeps the values of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.config import config
from ..core.target import Target
from ..graph.decompose import DECOMPOSE
from ..graph.ops import graph
from ..graph.recognize import recognize
from ..graph.recognize_attention import BAND, NAME
from ..graph.simplify import SIMPLIFY, STRIP
from ..graph.strength import STRENGTH
from ..ir.block import argument_op, pure_block
from ..ir.node import Node
from ..ir.pattern import RuleSet
from ..ir.rewrite import Log, rewrite
from ..ir.verify import verify
from .expand import expand_attention
from .level import level_sums
from .norms import norms_behind_products
from .share import share_loops
from .split import split_parts, split_places, split_reductions
from .thin import thin_dots, thin_short_dots
from .unroll import unroll_scans
from .weights import choose_weights

Results = list[Node]
Pass = Callable[[Sequence[Node], Results, Log], Results]


def rules(rule_set: RuleSet) -> Pass:
    """A pass that rewrites with a RuleSet."""

    def run(arguments: Sequence[Node], results: Results, log: Log) -> Results:
        return rewrite(results, rule_set, log)

    return run


def _recognize(arguments: Sequence[Node], results: Results, log: Log) -> Results:
    """Big ops found; an attention that a derivative has found before becomes one with it."""
    found = recognize(results, log)
    return rewrite(found, SIMPLIFY) if {NAME, BAND} & set(log.fired) else found


PIPELINE: list[tuple[str, Pass]] = [
    ("separate loops", share_loops),  # a derivative may hold copies of what it derives
    ("strip", rules(STRIP)),  # derivatives are done: stop_gradient is identity now
    ("inline", rules(DECOMPOSE)),  # custom functions and ops no target has
    ("share loops", share_loops),
    ("unroll", unroll_scans),  # short scans of known length; inner ones first
    ("simplify", rules(SIMPLIFY)),
    ("recognize", _recognize),  # small ops into big: dot, attention
    ("share loops again", share_loops),  # those that a derivative had recognized before
    ("expand attention", expand_attention(None)),  # what no kernel of the Target takes
    ("weights", choose_weights(None)),  # products with quantised weights, and what is around them
    ("simplify again", rules(SIMPLIFY)),
    ("strength", rules(STRENGTH)),  # scatters into selects, divisions into products
    ("thin dots", thin_dots),  # after recognition, which would undo it
    ("split reductions", split_reductions),  # long sums with few results get parallel parts
    ("split parts", split_parts),  # after simplification, which would undo it
]


@dataclass
class Stage:
    """What a pass did: for `explain`."""

    name: str
    results: Results
    fired: dict[str, int] = field(default_factory=dict)
    changed: bool = False
    notes: list[str] = field(default_factory=list)


def passes(target: Target | None = None) -> list[tuple[str, Pass]]:
    """The passes for a Target."""
    own: dict[str, Pass] = {
        "expand attention": expand_attention(target),
        "weights": choose_weights(target),
    }
    if target is not None and target.has_threads:
        own["thin dots"] = thin_short_dots
    found = [(name, own.get(name, run)) for name, run in PIPELINE]
    if target is not None and target.asynchronous_units:
        at = [name for name, _ in found].index("thin dots")
        found.insert(at, ("norms", norms_behind_products))  # dots of one row are dots still
    if target is not None and target.has_threads:
        found.append(("split places", split_places))
        found.append(("level sums", level_sums))  # last: no algebra puts the factors back
    return found


def run_pipeline(
    arguments: Sequence[Node], results: Sequence[Node], target: Target | None = None
) -> tuple[Results, list[Stage]]:
    """The Graph after every pass, and the record of each."""
    current = list(results)
    stages = [Stage("traced", current)]
    for name, run in passes(target):
        log = Log()
        new = run(arguments, current, log)
        stages.append(Stage(name, new, dict(log.fired), new != current, log.notes))
        current = new
        if config().verify:
            given = tuple(a for a in arguments if a.op is argument_op)  # inputs are Nodes of it
            verify(pure_block("main", given, tuple(current)), graph, where=name)
    return current, stages
