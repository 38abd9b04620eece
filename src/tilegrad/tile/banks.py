"""Bank conflicts of plain accesses to shared places: into how many turns a warp's access falls.

Shared memory has 32 banks of 4 bytes. A warp's access is served in parts of 128 bytes: all lanes
at once up to 4 bytes each, half of them at 8, a quarter at 16; lanes of a part that want
different words of one bank take turns. Who touches what follows the emitter's habits: a tile that
comes from an accumulator lies as the matrix unit leaves it (and goes out by stmatrix, 16 bytes a
row, where the place is swizzled over 128 bytes and the values have 2), any other tile as rows of
vectors of up to 16 bytes held by neighbouring threads. Invariant: addresses here are those of the
swizzled places in `ir.layout` and of hopper's tensor maps: column blocks of one span.
"""

from __future__ import annotations

from math import prod

import numpy as np

from ..core.target import Target
from ..ir.distribution import wgmma_accumulator
from ..ir.layout import byte_swizzle
from ..ir.node import Node, walk
from ..ir.types import Memory, Tile
from .budget import SPANS
from .build import Body
from .finding import Finding, finding, place_name
from .row import is_place

BANKS, WORD, LANES = 32, 4, 32
SCATTERED = ("reshape", "transpose", "reduce", "load", "gather", "broadcast", "read_place")
ACCESSES = ("read_place", "write_place", "load", "store")


def check_banks(body: Body, target: Target) -> list[Finding]:
    """Plain accesses to shared places that take several turns."""
    if not target.has_threads:
        return []
    accumulators = {n.inputs[0] for n in body.block.all_nodes() if n.op.name == "matrix_async"}
    found = []
    for node in body.block.all_nodes():
        if node.op.name not in ACCESSES or not is_place(node.inputs[0]):
            continue
        place = node.inputs[0]
        if place.type.scope != "shared":  # type: ignore[union-attr]
            continue
        turns = turns_of(node, place, accumulators)
        if turns > 1:
            text = f"{node.op.name} of {place_name(place)} takes {turns} turns where one would do"
            found.append(finding("bank_conflict", text, node, place, severity="warning"))
    return found


def turns_of(node: Node, place: Node, accumulators: set[Node]) -> int:
    """The worst number of turns of a warp's access."""
    writes = node.op.name in ("write_place", "store")
    value = node.inputs[1] if writes else node
    type_, tile = place.type, value.type
    assert isinstance(type_, Memory) and isinstance(tile, Tile)
    rank = len(type_.shape)
    axes = node.attrs.get("axes", tuple(range(rank - len(tile.shape), rank)))
    size = type_.dtype.size
    if not tile.shape or prod(tile.shape) < 2 or type_.layout == "held":  # threads side by side
        return 1
    if writes and from_accumulator(value, accumulators) and fits_accumulator(tile.shape):
        if type_.layout == "swizzle128" and size == 2:
            lanes = [(lane % 8, 0) for lane in range(8)]  # stmatrix: rows of 16 bytes
            return turns(address(type_, tile.shape, axes, np.array(lanes)), 16)
        held = wgmma_accumulator(min(tile.shape[1], 256)).elements()[0]  # (lane, register)
        where = np.stack(np.divmod(held[:, 0], min(tile.shape[1], 256)), axis=1)
        return turns(address(type_, tile.shape, axes, where), 2 * size)
    straight = axes[-1] == rank - 1
    vector = max(1, min(16 // size, tile.shape[-1])) if straight else 1
    first = np.arange(LANES) * vector % prod(tile.shape)
    where = np.stack(np.unravel_index(first, tile.shape), axis=1)
    return turns(address(type_, tile.shape, axes, where), vector * size)


def from_accumulator(node: Node, accumulators: set[Node]) -> bool:
    """Whether a tile is computed elementwise from what a matrix unit left."""

    def step(tile: Node) -> list[Node]:
        inputs = () if tile.op.name in SCATTERED else tile.inputs
        return [i for i in inputs if isinstance(i.type, Tile) and i.type.shape]

    read = (tile.inputs[0] for tile in walk([node], step) if tile.op.name == "read_place")
    return any(place in accumulators for place in read)


def fits_accumulator(shape: tuple[int, ...]) -> bool:
    """Whether a matrix unit's accumulator has this shape."""
    return len(shape) == 2 and shape[0] % 64 == 0 and shape[1] % 8 == 0


def address(
    type_: Memory, shape: tuple[int, ...], axes: tuple[int, ...], where: np.ndarray
) -> np.ndarray:
    """Byte offsets of elements of a tile (an array (lane, axis)) in a place."""
    sizes = [int(s) for s in type_.shape]
    size, span = type_.dtype.size, SPANS.get(type_.layout, 0)
    index = np.zeros((len(where), len(sizes)), np.int64)
    for tile_axis, axis in enumerate(axes):
        index[:, axis] += where[:, tile_axis]
    if not span or len(sizes) < 2 or sizes[-1] * size < span:
        steps = [prod(sizes[a + 1 :]) for a in range(len(sizes))]
        return (index @ np.array(steps, np.int64)) * size
    row, column = index[:, -2], index[:, -1] * size
    plain = (column // span) * sizes[-2] * span + row * span + column % span
    return np.asarray(byte_swizzle(span)(plain))


def turns(offsets: np.ndarray, width: int) -> int:
    """The most different words that lanes of one part want of one bank."""
    part = LANES if width <= WORD else max(1, BANKS * WORD // width)
    worst = 1
    for start in range(0, len(offsets), part):
        words: set[int] = set()
        for offset in offsets[start : start + part]:
            words.update(range(int(offset) // WORD, (int(offset) + width - 1) // WORD + 1))
        counts = np.bincount([w % BANKS for w in words], minlength=BANKS)
        worst = max(worst, int(counts.max()))
    return worst
