"""Families of ops that kernels in tiles compute: rows in groups, picked weights, draws.

Rows may read their own weights one by one, or be multiplied with all weights at once, which is more
work on units made for it (`graph/picked.py`); rows that are sorted by their weights are a product
of groups, by kernels of products (`problem.py`). Vectors have little to gain from more work: rows
read their own, unless there is one weight. Units for matrices are fed by many rows: up to as many
as there are weights read their own. Asynchronous units take blocks of few rows too, by a list that
the products of a layer share, and gather rows themselves where all groups together have few. The
sort of rows, and the outer products of each group, run on every Target.

Of a row of tokens to draw from, a block of threads takes many and shares them out; a thread with
vectors takes a few, and looks whether a block has any token before it counts places.

Invariant: at the level `invariant` rows with ids always read their own, and groups are always
products; sizes of blocks follow from sizes and Target alone, and no sum is cut by them but along a
group's rows; which token is drawn does not depend on the Target, but for how sums are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.config import invariant
from ..core.format import format_of
from ..core.target import Target
from ..graph import ops
from ..graph.picked import by_all, by_rows, ids_of
from ..ir.node import Node
from ..ir.symbol import Size, high, power_of_two
from ..kernels import draw as draws
from ..kernels import grouped as kernels
from ..kernels import route as routes
from ..kernels.matmul.wide_grouped import MOST_GATHERED
from ..tile.define import Definition
from ..tile.plan import Plan
from .access import base_of
from .chosen import Chosen, Listed, Surroundings
from .family import Offer, Offers

WARPS = 4  # that make a list
REPEATED = [ops.reshape, ops.expand, ops.reshape]  # each row several times


def is_quantised(node: Node) -> bool:
    """Whether the weights are stored quantised: only what is picked of them is read."""
    return node.op is ops.grouped_dot and node.inputs[1].op is ops.unpack


def in_blocks(node: Node) -> bool:
    """Whether they are stored in blocks, which kernels of their own read."""
    return is_quantised(node) and not format_of(node.inputs[1].attrs["format"]).apart


def has_blocks(node: Node, target: Target) -> bool:
    """Whether kernels take blocks of few rows of a group."""
    if is_quantised(node):
        return target.has_threads
    units = bool(target.asynchronous_units)
    return node.op is ops.grouped_dot and units and node.inputs[0].dtype.bits == 16


def alone(node: Node, target: Target) -> bool:
    """Whether rows read their own weights."""
    rows, count = high(node.shape[0]), high(node.inputs[1].shape[0])
    if node.op is ops.grouped_dot:
        own = has_blocks(node, target) or is_quantised(node)
        return not invariant() and rows <= count and not own
    most = count if target.has_threads else 0 if count == 1 else rows
    return invariant() or rows <= most


class OwnWeights(Chosen):
    """Rows read their own weights."""

    def offers_for(self, node: Node, near: Surroundings, target: Target) -> Offers:
        """See `alone`."""
        return [Offer(0.0)] if alone(node, target) else "one product is faster"

    def replacements(
        self, node: Node, inputs: Sequence[Node], offer: Offer, near: Surroundings, target: Target
    ) -> list[Node]:
        """Sums in other ops."""
        x, weights, ids = inputs[:3]
        if node.op is ops.grouped_dot:
            ids = ids_of(ids, x.shape[0])
        near.fired("rows_alone")
        return [by_rows(ops.picked_dot(x, weights, ids, axis=node.attrs["axis"]))]


class OneProduct(Chosen):
    """Rows are multiplied with all weights, or, sorted by them, as a product of groups: with a
    list of blocks where its kernel reads one."""

    def offers_for(self, node: Node, near: Surroundings, target: Target) -> Offers:
        """Where rows do not read their own."""
        return "rows read their own weights" if alone(node, target) else [Offer(0.0)]

    def replacements(
        self, node: Node, inputs: Sequence[Node], offer: Offer, near: Surroundings, target: Target
    ) -> list[Node]:
        """A product in other ops, or the product of groups itself: of what was gathered, where all
        groups together have few rows."""
        if node.op is ops.picked_dot:
            near.fired("all_weights")
            return [by_all(node.with_inputs(tuple(inputs)))]
        if not has_blocks(node, target) or node.attrs["block"]:
            return [node.with_inputs(tuple(inputs))]
        x, weights, offsets = inputs
        known = near.listed.get(offsets)
        if known is None:
            known = near.listed[offsets] = self.listed(x, offsets, near, target)
        few = high(x.shape[0]) <= MOST_GATHERED and not in_blocks(node)
        x, *rows = (source_of(x, known) if few else []) or [x]
        attrs = {**node.attrs, "block": known.block}
        return [ops.grouped_dot(x, weights, offsets, known.blocks, *rows, **attrs)]

    def listed(self, x: Node, offsets: Node, near: Surroundings, target: Target) -> Listed:
        """The list of blocks of rows, by a launch of its own."""
        plan = Plan(warps=WARPS)
        sizes = kernels.list_sizes(x.shape[0], high(offsets.shape[0]) - 1)
        (found,) = near.launch(kernels.block_list, [offsets], plan, target, **sizes)
        return Listed(found, sizes["block"])


def source_of(x: Node, known: Listed) -> list[Any]:
    """What rows in the order of their groups were gathered from, each of a few times as many, and
    which row of that each is; nothing where they were not."""
    if x.op is not ops.gather or x.attrs["axes"] != (0,):
        return []
    every, index = x.inputs[0], base_of(x.inputs[1], passing=(ops.cast,))
    chain = [every]
    while len(chain) < 4 and chain[-1].inputs:
        chain.append(chain[-1].inputs[0])
    if index is not known.order or [n.op for n in chain[:3]] != REPEATED:
        return []
    _, wide, column, source = chain
    if len(source.shape) != 2:
        return []
    count, width = source.shape
    fits = wide.shape == (count, known.each, width) and column.shape == (count, 1, width)
    return [source, known.rows] if fits else []


# ---- rows in groups ------------------------------------------------------------------------------

FEWEST_IDS, MOST_IDS = 64, 1024  # that a program takes at a time
EACH = 128  # of them for a warp
SIDE, STEP = 64, 32  # of a tile of outer products, and rows of a group at a time
# tokens: of one launch, that spread over programs of 8, and else
ALONE_TOKENS, FEW_TOKENS, MANY_TOKENS = 16, 512, 64
MOST_EXPERTS, HELD, THREAD = 512, 1 << 13, 2  # scores: of a token, a program and a thread


class Groups(Chosen):
    """Programs of any Target."""

    def why_not(self, node: Node, target: Target) -> str:
        """Scores of a program are in registers."""
        if node.op is not ops.route or kernels.lanes_of(node.inputs[0].shape[1]) <= MOST_EXPERTS:
            return ""
        return "too many experts"

    def replacements(
        self, node: Node, inputs: Sequence[Node], offer: Offer, near: Surroundings, target: Target
    ) -> list[Node]:
        """One launch, or two where many tokens are routed."""

        def call(definition: Definition, given: Sequence[Node], plan: Plan, **static: Any) -> Any:
            return near.launch(definition, given, plan, target, **static)

        if node.op is ops.grouped_outer:
            return call(kernels.grouped_outer, inputs, Plan(m=SIDE, n=SIDE, k=STEP))
        if node.op is ops.group_rows:
            wanted = power_of_two(high(node.inputs[0].shape[0]))
            block = min(MOST_IDS, max(FEWEST_IDS, wanted))
            block = block if target.has_threads else FEWEST_IDS
            plan = Plan(warps=max(1, block // EACH))
            return call(kernels.group_rows, inputs, plan, block=block, **node.attrs)
        tokens, experts = inputs[0].shape
        count, powers, shared = node.attrs.values()
        most, lanes = high(tokens), kernels.lanes_of(experts)
        each = 8 if most <= FEW_TOKENS else min(MANY_TOKENS, HELD // lanes)
        each = power_of_two(most) if most <= ALONE_TOKENS else each
        plan = Plan(warps=min(32, max(1, each * lanes // (32 * THREAD))))
        how = {"count": count, "powers": powers, "shared": shared, "tokens": each}
        listed = bool(target.asynchronous_units)  # kernels read a list of blocks
        sizes = kernels.list_sizes(tokens * count, high(experts))
        sizes = sizes if listed else {"block": 0, "most": 0}
        if most <= ALONE_TOKENS:
            shares, *found = call(routes.route, inputs, plan, **how, **sizes)
        else:
            shares, *given = call(routes.count_routes, inputs, plan, **how)
            found = call(routes.place_routes, given, plan, tokens=each, **sizes)
        order, inverse, rows, offsets, *blocks = found
        if listed:
            near.listed[offsets] = Listed(blocks[0], sizes["block"], order, rows, count)
        return [shares, order, inverse, offsets]


# ---- draws ---------------------------------------------------------------------------------------

PARTS, PART = 16, 4096  # programs that share a row at most, tokens that each takes at least
SOME = 4  # programs that share a row where there may be few rows or many
# Tokens of a row that a program takes at a time, where it is one thread: one vector, which stays in
# a register between ops; of more, each op is a loop through memory (slower, and three times as long
# to compile).
OF_VECTORS = 16
FEWEST_TOKENS, MOST_TOKENS = 256, 4096  # the same, of a block of threads
TOKENS_EACH = 256  # that a warp takes
RACING = 2  # a draw takes so many times fewer of both: lists are short


class Draws(Chosen):
    """Rows of many tokens: the largest, what a list adds to, and one drawn."""

    def replacements(
        self, node: Node, inputs: Sequence[Node], offer: Offer, near: Surroundings, target: Target
    ) -> list[Node]:
        """One launch, or two for a draw."""
        columns = high(node.inputs[0].shape[1])

        def call(definition: Definition, given: Sequence[Node], **static: Any) -> list[Node]:
            plan, block = Plan(), OF_VECTORS
            if target.has_threads:
                fewer = RACING if definition is draws.draw else 1
                found = min(MOST_TOKENS, max(FEWEST_TOKENS, power_of_two(columns)))
                plan, block = Plan(warps=found // TOKENS_EACH), found // fewer
            return near.launch(definition, given, plan, target, block=block, **static)

        if node.op is ops.top_k:
            return call(draws.largest, inputs, **node.attrs)
        if node.op is ops.add_listed:
            return call(draws.biased, inputs)
        parts = self.parts(node.inputs[0].shape[0], columns, target)
        found = call(draws.pick, inputs, parts=parts, skip=not target.has_threads, **node.attrs)
        p, floats, _, seeds, slots, positions = inputs
        return call(draws.draw, [p, *found, floats, seeds, slots, positions], **node.attrs)

    def parts(self, rows: Size, columns: int, target: Target) -> int:
        """Programs that share a row: a power of two, more where rows are few."""
        most = target.cores // max(1, high(rows))
        if not isinstance(rows, int):
            most = max(most, min(SOME, target.cores))
        most = min(most, PARTS, columns // PART)
        return 1 << max(0, most.bit_length() - 1)
