"""What a Body takes of a GPU: shared bytes, registers, barriers, the shapes engines accept, banks.

Facts come from `target.memories` and `target.limits`, which every GPU has. Of registers the places
alone are counted, spread over the threads of the role: what more a role holds, and whether it
spills, the assembler says.

Shared memory has 32 banks of 4 bytes. A warp's access is served in parts of 128 bytes: all lanes at
once up to 4 bytes each, half of them at 8, a quarter at 16; lanes of a part that want different
words of one bank take turns. Who touches what follows the emitter's habits: a tile that comes from
an accumulator lies as the matrix unit leaves it (and goes out by stmatrix, 16 bytes a row, where
the place is swizzled over 128 bytes and the values have 2), any other tile as rows of vectors of up
to 16 bytes held by neighbouring threads. Addresses here are those of the swizzled places in
`ir.layout` and of hopper's tensor maps: column blocks of one span. Invariant: Targets that are no
GPU have no Findings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import numpy as np

from ..core.target import Target
from ..ir.block import Block
from ..ir.distribution import wgmma_accumulator
from ..ir.layout import byte_swizzle
from ..ir.node import Node
from ..ir.node import walk as nodes_from
from ..ir.symbol import round_up
from ..ir.types import Memory, Shape, Tile
from .build import Body
from .check import Finding, Findings, finding, place_bytes, place_name
from .row import memory_of, touch_of

BOX = 256  # the longest side of a box that one copy moves
SPANS = {"swizzle32": 32, "swizzle64": 64, "swizzle128": 128, "xor": 128}
SLACK = 1024  # to bring the start of shared memory to a swizzle's boundary
WHOLE_BLOCK = 1  # the numbered barrier that all threads of a program use


def check_budget(body: Body, target: Target) -> Findings:
    """Everything that does not fit, and accesses that take several turns."""
    if not target.has_threads:
        return []
    roles = body.block.find("role")
    return [
        *shared_bytes(body, target),
        *boxes(body),
        *engines(body, target),
        *role_shapes(body, roles, target.limits),
        *registers(roles, target.limits),
        *check_banks(body),
    ]


# ---- shared memory ------------------------------------------------------------------------------


def shared_bytes(body: Body, target: Target) -> Findings:
    """Places and barriers against the Scope, with the alignment that swizzles need."""
    at, slack, shared = 0, 0, list[Node]()
    for node in body.block.find("allocate", "barrier"):
        if node.op.name == "barrier":
            at = round_up(at, 8) + 8 * node.attrs["stages"]
        elif memory_of(node).scope == "shared":
            span = SPANS.get(memory_of(node).layout, 0)
            at = round_up(at, 8 * span or 128) + place_bytes(node)
            slack = SLACK if span else slack
            shared.append(node)
    have, at = target.memories["shared"].bytes, at + slack
    if at <= have:
        return []
    text = f"places and barriers of {body.name} take {at} bytes of shared memory, which has {have}"
    return [finding("shared_bytes", text, max(shared, key=place_bytes, default=None))]


# ---- shapes that copies and matrix ops accept ---------------------------------------------------


def boxes(body: Body) -> Iterator[Finding]:
    """Boxes of copies against what the engine takes, and swizzle spans against rows."""
    for node in body.block.find("copy_async", "copy_store", "copy_pages"):
        place = node.inputs[1 if node.op.name == "copy_store" else 0]
        shape, type_ = node.attrs["shape"], memory_of(place)
        span, row = SPANS.get(type_.layout, 0), type_.dtype.storage_bytes(shape[-1])
        sides = [*shape[:-1], span * shape[-1] // row if span and row > span else shape[-1]]
        if max(sides) > BOX:
            text = f"a box of {shape} has a side above {BOX}"
            yield finding("box", text, node, place, "copy it in parts")
        rows = f"rows of {row} bytes of {place_name(place)}"
        if row % 16:
            yield finding("box", f"{rows} are no multiple of 16 bytes", node, place)
        elif span and row > span and row % span:
            text = f"{rows} are not made of spans of {type_.layout}"
            yield finding("box", text, node, place)


def engines(body: Body, target: Target) -> Iterator[Finding]:
    """Copies that the machine has, and programs that its clusters hold."""
    for node in body.block.find("copy_async", "copy_store"):
        if node.op.name not in target.memories["shared"].copies:
            yield finding("copies", f"{target.name} has no {node.op.name}", node)
    cluster, most = prod(body.notes.get("cluster", (1,))), target.limits["cluster"]
    if cluster > most:
        text = f"a cluster of {cluster} programs, {target.name} has at most {most}"
        yield finding("cluster", text)


def role_shapes(body: Body, roles: list[Node], limits: Mapping[str, int]) -> Iterator[Finding]:
    """Warps, numbered barriers and their threads."""
    threads, most = 32 * sum(r.attrs["warps"] for r in roles), limits["threads_per_block"]
    if threads > most:
        text = f"the roles have {threads} threads, a program at most {most}"
        yield finding("threads", text, roles[0])
    free = limits["named_barriers"] - WHOLE_BLOCK - len(roles)  # each role has one of its own
    for node in body.block.find("named_sync", "named_arrive"):
        number, count = node.attrs["number"], node.attrs["threads"]
        if not 0 <= number < free:
            text = f"named barrier {number}: numbers 0 to {free - 1} are free"
            yield finding("named_barrier", text, node)
        if count % 32 or not 32 <= count <= most:
            text = f"{count} threads are no whole number of warps"
            yield finding("named_barrier", text, node)
    for role in roles:
        for node in role.blocks[0].find("matrix_async") if role.attrs["warps"] % 4 else ():
            who = f"{role.attrs['name']} has {role.attrs['warps']} warps"
            text = f"{who} and multiplies: matrix_async takes groups of 4"
            yield finding("warps", text, node, role)


# ---- registers ----------------------------------------------------------------------------------


def registers(roles: list[Node], limits: Mapping[str, int]) -> Iterator[Finding]:
    """What each role holds against what it may, and all roles against the register file."""
    file = limits["registers_per_block"]
    total = 32 * sum(r.attrs["warps"] for r in roles)
    given = min(limits["registers_per_thread"], file // max(1, total) // 8 * 8)
    taken = 0
    for role in roles:
        name, threads = role.attrs["name"], 32 * role.attrs["warps"]
        asked = role.attrs["registers"]
        if asked and (asked % 8 or not 24 <= asked <= 256):
            text = f"{name} asks for {asked} registers: a multiple of 8 in 24..256"
            yield finding("registers", text, role)
        most = min(asked or given, limits["registers_per_thread"])
        taken += (asked or given) * threads
        least = held(role.blocks[0], threads)
        if least > most:
            text = f"register places of {name} take {least} registers a thread, it may hold {most}"
            hint = "smaller tiles, or more warps for the role"
            yield finding("registers", text, role, hint=hint)
    if roles and taken > file:
        text = f"the roles take {taken} registers, there are {file}"
        yield finding("registers", text, roles[0], hint="ask for fewer")


def held(block: Block, threads: int) -> int:
    """Registers a thread of the places of a role, but for those that products only read: these may
    take over the registers of the tiles they are written from."""
    products = block.find("matrix_async", "matrix_sync")
    read = {place for node in products for place in node.inputs[1:3]}
    read -= {node.inputs[0] for node in products}
    made = block.find("allocate", "register_tile")
    taken = [n for n in made if memory_of(n).scope == "register"]
    return sum(-(-place_bytes(n) // (4 * threads)) for n in taken if n not in read)


# ---- banks --------------------------------------------------------------------------------------


BANKS, WORD, LANES = 32, 4, 32
SCATTERED = ("reshape", "transpose", "reduce", "load", "gather", "broadcast", "read_place")
ACCESSES = ("read_place", "write_place", "load", "store")


def check_banks(body: Body) -> Iterator[Finding]:
    """Plain accesses to shared places that take several turns."""
    accumulators = {n.inputs[0] for n in body.block.find("matrix_async")}
    for node in body.block.find(*ACCESSES):
        place = node.inputs[0]
        turns = turns_of(node, accumulators) if memory_of(place).scope == "shared" else 1
        if turns > 1:
            text = f"{node.op.name} of {place_name(place)} takes {turns} turns where one would do"
            yield finding("bank_conflict", text, node, place, severity="warning")


def turns_of(node: Node, accumulators: set[Node]) -> int:
    """The worst number of turns of a warp's access."""
    touch = touch_of(node)
    type_, shape, axes = memory_of(touch.memory), touch.shape, touch.axes
    size = type_.dtype.size
    if prod(shape) < 2 or type_.layout == "held":  # threads side by side
        return 1
    if touch.writes and fits_accumulator(shape) and from_accumulator(node.inputs[1], accumulators):
        columns, width = min(shape[1], 256), 2 * size
        held = wgmma_accumulator(columns).elements()[0]  # (lane, register)
        where = np.divmod(held[:, 0], columns)
        if type_.layout == "swizzle128" and size == 2:  # stmatrix: rows of 16 bytes
            where, width = (np.arange(8), np.zeros(8, np.int64)), 16
    else:
        last = len(type_.shape) - 1
        vector = max(1, min(16 // size, shape[-1])) if axes[-1] == last else 1
        first = np.arange(LANES) * vector % prod(shape)
        where, width = np.unravel_index(first, shape), vector * size
    return turns(address(type_, axes, np.stack(where, axis=1)), width)


def from_accumulator(node: Node, accumulators: set[Node]) -> bool:
    """Whether a tile is computed elementwise from what a matrix unit left."""

    def step(tile: Node) -> list[Node]:
        inputs = () if tile.op.name in SCATTERED else tile.inputs
        return [i for i in inputs if isinstance(i.type, Tile) and i.type.shape]

    reads = (tile for tile in nodes_from([node], step) if tile.op.name == "read_place")
    return any(read.inputs[0] in accumulators for read in reads)


def fits_accumulator(shape: Shape) -> bool:
    """Whether a matrix unit's accumulator has this shape."""
    return len(shape) == 2 and shape[0] % 64 == 0 and shape[1] % 8 == 0


def address(type_: Memory, axes: Shape, where: np.ndarray) -> np.ndarray:
    """Byte offsets of elements of a tile (an array (lane, axis)) in a place."""
    sizes = [int(s) for s in type_.shape]
    size, span = type_.dtype.size, SPANS.get(type_.layout, 0)
    index = np.zeros((len(where), len(sizes)), np.int64)
    index[:, axes] = where
    if not span or len(sizes) < 2 or sizes[-1] * size < span:
        return (index @ np.array(type_.element_strides(), np.int64)) * size
    row, column = index[:, -2], index[:, -1] * size
    plain = (column // span) * sizes[-2] * span + row * span + column % span
    return np.asarray(byte_swizzle(span)(plain))


def turns(offsets: np.ndarray, width: int) -> int:
    """The most different words that lanes of one part want of one bank."""
    part = LANES if width <= WORD else max(1, BANKS * WORD // width)
    worst = 1
    for start in range(0, len(offsets), part):
        touched = offsets[start : start + part, None] + np.arange(width)
        words = np.unique(touched // WORD)
        worst = max(worst, int(np.bincount(words % BANKS).max()))
    return worst
