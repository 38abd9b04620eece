"""Attention found in dots and a softmax: softmax(scores(q . k)) . v as one `attention` Node.

A match starts at the last dot. Its axes are Atoms (`axes`), so layouts, broadcasts, merged and
repeated heads are all read alike: `recognize_softmax` and `recognize_scores` read the formula,
`recognize_mask` and `recognize_extras` what hides and adds, `recognize_parts` builds the Node.
The scores and probabilities must have no other use: then they would be computed anyway, and the
Graph stays as it was written. Masks and biases of attention Nodes that were there before are
read by a Rule of `recognize`.
Invariant: types stay; values differ by rounding. Where -inf hides all keys from a query it gives
nan as it is written; what is `derived` afterwards has its derivatives as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.dtype import bfloat16, float16
from ..ir.block import Block, pure_block
from ..ir.node import Node, is_shallow, located, topological, users, walk
from ..ir.rewrite import Log, rebuild
from . import ops
from .axes import READ, below
from .recognize_parts import Match
from .recognize_scores import NoMatch

FAR = 128  # Nodes looked at below a dot before it is called something else


def recognize_attention(
    roots: Sequence[Node],
    log: Log | None = None,
    derived: bool = False,
    outside: frozenset[Node] = frozenset(),
) -> list[Node]:
    """The roots with every attention found, but what lies outside; the log says what was found,
    and why not."""
    log = Log() if log is None else log
    order = topological(roots, stop=outside.__contains__)
    own = [n for n in order if n not in outside]
    found: dict[Node, Node] = {}
    reads: dict[Node, list[Node]] = {}
    for node in [n for n in own if n.op is ops.dot]:
        near = _near_sums(node)
        if not near:
            continue
        reads = reads or users(order)
        try:
            with located(node.location):
                found[node] = _matched(node, near, reads, frozenset(roots), derived)
        except NoMatch as reason:
            if not reason.quiet:
                log.notes.append(f"{node.location}: not attention: {reason}")
    if not found and not any(n.blocks for n in own):
        return list(roots)
    done: dict[Node, Node] = {n: n for n in outside}
    for node in own:
        done[node] = new = rebuild(node, done)
        if node in found:
            for made in topological([found[node]], stop=done.__contains__):
                if made not in done:
                    done[made] = rebuild(made, done)
            done[node] = done[found[node]]
            log.count("attention")
        elif node.blocks:
            blocks = tuple([_in_block(b, log, derived) for b in new.blocks])
            if blocks != new.blocks:
                done[node] = new.with_inputs(new.inputs, blocks)
    return [done.get(r, r) for r in roots]


def _in_block(block: Block, log: Log, derived: bool) -> Block:
    outside = frozenset(block.captures())
    results = tuple(recognize_attention(block.results, log, derived, outside))
    if results == block.results:
        return block
    return pure_block(block.name, block.arguments, results, outside.__contains__)


# ---- one match ------------------------------------------------------------------------------


def _near_sums(dot: Node) -> list[int]:
    """The sides of a dot with a sum of exp near, under elementwise ops and movement."""
    near = [[n.inputs[0] for n in below(x, FAR) if n.op is ops.sum_] for x in dot.inputs]
    return [side for side, summed in enumerate(near) if any(map(_is_exp, summed))]


def _is_exp(node: Node) -> bool:
    while node.op is ops.cast or (node.op.category == "movement" and len(node.inputs) == 1):
        node = node.inputs[0]
    return node.op is ops.exp


def _matched(
    root: Node,
    near: Sequence[int],
    reads: dict[Node, list[Node]],
    ends: frozenset[Node],
    derived: bool,
) -> Node:
    """The attention that a dot is the last of; NoMatch where it is of none."""
    if not is_shallow([root.inputs[side] for side in near], READ):
        raise NoMatch("the scores are computed by very many ops in a row", quiet=True)
    match = Match(root, near, _top(root, reads, ends), derived)
    made, dot = match.built(), match.scores.dot.place.node
    # A Node is younger than its inputs: nothing younger than the last dot is on the way to it, and
    # nothing older than the scores is computed from them.
    for node in walk([dot], lambda n: () if n.serial >= root.serial else reads[n]):
        if node is not root and (node in ends or node.serial > root.serial):
            raise NoMatch(f"the scores are used elsewhere too, by way of {node.op.name}")
    if dot in topological([made], stop=lambda n: n.serial <= dot.serial):
        raise NoMatch("something else of it is computed from the scores")
    return made


def _top(root: Node, reads: dict[Node, list[Node]], ends: frozenset[Node]) -> Node:
    """The last movement or narrowing that follows the dot at once, each the only use."""
    top = root
    while top not in ends and len(reads.get(top, ())) == 1:
        (node,) = reads[top]
        narrows = node.op is ops.cast and node.dtype in (float16, bfloat16)
        if not narrows and node.op not in (ops.permute, ops.reshape):
            break
        top = node
    return top
