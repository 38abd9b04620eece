"""Tile IR, placed level: places that ops update, roles, barriers, asynchronous copies and products.

The same dialect as `ops`, plus what a schedule says about time and place. A *place* is a Memory
allocated in a Scope (any name in target.memories): shared by the roles if allocated before them,
private if allocated inside of one; a register tile is a place in the scope 'register'. Roles
that follow one another in a Block run at the same time and are joined after the last of them.

* `barrier` is an array of `stages` barriers. A phase of one completes when `count` arrivals came
  and all expected bytes landed; `wait(parity)` goes on once the phase of that parity is over, so
  on a fresh barrier parity 1 passes and parity 0 waits.
* `copy_async` lands at some time after it is issued and counts its bytes on a barrier. What lies
  outside of the Memory is 0. `copy_store` writes back in groups; what lies outside is dropped.
* `matrix_async` reads its operands and updates its accumulator at some time after it is issued
  and before a `matrix_wait` that covers its group. Registers written before it need a
  `matrix_fence`; shared places written by plain stores need a `fence('async')` and a barrier, and
  so do places that plain loads read, before a copy lands there: loads may be issued alone.
* `copy_pages` is a copy_async for each of several pages whose numbers are data; `send` is one from
  registers to all programs of a cluster.
* `copy_threads` is made by all threads of a role, in groups: what it copied is there after a
  `wait_threads` that covers its group and then a `named_sync` of the role. `matrix_sync` is done
  when the next op begins; its operands are registers that `load_operand` fills.

Invariant: an op here says when it happens only through barriers, groups and fences; `check` and
the interpreter hold a Body to that. It is long because the level's ops stand on one page.
"""

from __future__ import annotations

from dataclasses import replace as changed
from functools import partial
from typing import Any

import numpy as np

from ..core import kept
from ..core.dtype import DType, bool_, float16, int32
from ..ir.block import Block
from ..ir.node import Node
from ..ir.types import NOTHING, Barrier, Memory, Shape, Tile, Type
from . import numeric, ops
from .row import (
    Arrive,
    Close,
    Depend,
    Drain,
    Fence,
    Land,
    Make,
    Meet,
    Misfit,
    Touch,
    Wait,
    Work,
    box,
    constant_of,
    lead,
    made,
    memory_of,
    read_and_write,
    row,
)

Array = np.ndarray[Any, Any]
placed_row = partial(row, placed=True)


# ---- roles ----------------------------------------------------------------------------------


@placed_row("role", effect=True)
def role(*, name: str, warps: int, registers: int, blocks: tuple[Block, ...]) -> Type:
    """warps that run this Block beside the roles next to it; registers is the most a thread may
    hold, 0 for what the target gives"""
    if len(blocks) != 1 or blocks[0].arguments or blocks[0].results:
        raise Misfit(f"{name} must have one Block without arguments and results")
    return NOTHING


# ---- barriers -------------------------------------------------------------------------------


def _on_barrier(barrier_: Node, *scalars: Node) -> Type:
    if not isinstance(barrier_.type, Barrier):
        raise Misfit(f"{barrier_!r} is not a barrier")
    if any(s.type != ops.INDEX for s in scalars):
        raise Misfit(f"{[s.type for s in scalars]} are not scalars")
    return NOTHING


@placed_row("barrier", effects=Make())
def barrier(*, name: str, count: int, stages: int) -> Type:
    """an array of barriers, one per stage of a pipeline"""
    if count < 1 or stages < 1:
        raise Misfit(f"{stages} barriers of {count} arrivals")
    return Barrier(count)


def _arrival(node: Node) -> tuple[Arrive]:
    barrier_, stage, *rank = node.inputs
    return (Arrive(barrier_, stage, node.attrs.get("bytes", 0), 1 if rank else None, *rank),)


@placed_row("barrier", effects=_arrival)
def arrive(barrier_: Node, stage: Node) -> Type:
    """one arrival in the phase under way"""
    return _on_barrier(barrier_, stage)


@placed_row("barrier", effects=_arrival)
def expect(barrier_: Node, stage: Node, *, bytes: int) -> Type:
    """one arrival that also announces bytes to land"""
    return _on_barrier(barrier_, stage)


@placed_row("barrier", effects=made(Wait))
def wait(barrier_: Node, stage: Node, parity: Node) -> Type:
    """until the phase of this parity is over"""
    return _on_barrier(barrier_, stage, parity)


@placed_row("barrier", effects=made(partial(Meet, waits=True)))
def named_sync(*, number: int, threads: int) -> Type:
    """arrive with this role's threads at a numbered barrier and wait until `threads` have"""
    return NOTHING


@placed_row("barrier", effects=made(partial(Meet, waits=False)))
def named_arrive(*, number: int, threads: int) -> Type:
    """arrive at a numbered barrier, do not wait"""
    return NOTHING


FENCES = ("async", "global")


@placed_row("barrier", effects=made(Fence))
def fence(*, kind: str) -> Type:
    """'async': this role's plain stores are seen by copies and matrix ops, and its plain loads are
    done before those; 'global': stores are seen by other programs"""
    if kind not in FENCES:
        raise Misfit(f"no fence is called {kind!r}, only {FENCES}")
    return NOTHING


# ---- copies ---------------------------------------------------------------------------------


def _copied(
    place: Node, memory: Node, shape: Shape, axes: Shape, index: tuple[Node, ...], row: int = 0
) -> int:
    """How many rows the last axes of a place have: a box of a Memory is some of them, from `row`
    on, and lies along Memory axis axes[i]."""
    into = memory_of(place)
    lead = len(into.shape) - len(shape)
    rows, *rest = into.shape[lead:]
    if len(axes) != len(shape) or shape[1:] != tuple(rest):
        raise Misfit(f"a box of {shape} over axes {axes} does not fit the place {into}")
    if not 0 <= row <= rows - shape[0]:
        raise Misfit(f"a box of {shape} from row {row} on leaves {into}")
    if into.dtype is not memory.dtype or len(index) != len(memory_of(memory).shape) + lead:
        raise Misfit(f"{len(index)} indices, from {memory.type} with {into}")
    return int(rows)


def _stored(memory: Node, place: Node, *index: Node, shape: Shape, axes: Shape) -> Type:
    if _copied(place, memory, shape, axes, index) != shape[0]:
        raise Misfit(f"a box of {shape} is not all of {place.type}")
    return NOTHING


def _ends(node: Node, first: int, stores: bool) -> tuple[Touch, Touch]:
    """What a copy reads, and what it writes: the Memory's index and then the place's leading one
    begin at an input; one that stores has the Memory as its first input."""
    place, memory = node.inputs[1::-1] if stores else node.inputs[:2]
    at, shape, rows = first + len(memory.shape), node.attrs["shape"], None
    far = box(memory, stores, node.inputs[first:at], shape, node.attrs["axes"], clips=True)
    index = node.inputs[at:]
    if "row" in node.attrs:
        rows = (node.attrs["row"], shape[0])
    elif "mask" in node.attrs:  # the first row follows, and a rank
        index, rows = index[:-2], (index[-2], shape[0])
    near = lead(place, not stores, index, rows)
    return (near, far) if stores else (far, near)


def _landing(node: Node) -> tuple[Land]:
    source, into = _ends(node, 4, False)
    mask = node.attrs.get("mask")
    first = 0 if mask is None else node.inputs[-1]
    return (Land(into, source, node.inputs[2], node.inputs[3], mask, first),)


@placed_row("copy", effects=_landing)
def copy_async(
    place: Node,
    memory: Node,
    barrier_: Node,
    stage: Node,
    *index: Node,
    shape: Shape,
    axes: Shape,
    row: int,
) -> Type:
    """index: the Memory's, then the place's leading one. Copies a box, tile axis i along Memory
    axis axes[i], into the last axes of the place from `row` on; its bytes land on the barrier"""
    _on_barrier(barrier_)
    _copied(place, memory, shape, axes, index, row)
    return NOTHING


@placed_row("copy", effects=lambda n: (Work("copy_store", _ends(n, 2, True)),))
def copy_store(memory: Node, place: Node, *index: Node, shape: Shape, axes: Shape) -> Type:
    """index: the Memory's, then the place's leading one. Writes a box back, in the group being
    collected"""
    return _stored(memory, place, *index, shape=shape, axes=axes)


@placed_row("copy", effects=_landing)
def copy_multicast(
    place: Node,
    memory: Node,
    barrier_: Node,
    stage: Node,
    *index: Node,
    shape: Shape,
    axes: Shape,
    mask: int,
) -> Type:
    """copy_async of some rows of a place, to the same place of every program of the cluster whose
    bit of the mask is set, its bytes landing on the same barrier there; the last inputs are the
    first row, and the rank that bit 0 of the mask stands for"""
    _on_barrier(barrier_)
    if _copied(place, memory, shape, axes, index[:-2]) % shape[0]:
        raise Misfit(f"a box of {shape} is no share of the rows of {place.type}")
    return NOTHING


HINTS = ("", "first")  # how long what is read stays in caches: as usual, leaves first


def _pages(node: Node) -> tuple[Land]:
    source, into = _ends(node, 5, False)
    _, _, barrier_, stage, pages, *_ = node.inputs
    return (Land(into, changed(source, pages=pages), barrier_, stage),)


@placed_row("copy", effects=_pages)
def copy_pages(
    place: Node,
    memory: Node,
    barrier_: Node,
    stage: Node,
    pages: Node,
    *index: Node,
    shape: Shape,
    axes: Shape,
    hint: str,
) -> Type:
    """one copy_async for each page, its number added to the Memory's first index, into the rows of
    the place one after another; each thread of the first warp issues one"""
    _on_barrier(barrier_)
    count, more = divmod(_copied(place, memory, shape, axes, index), shape[0])
    if len(shape) != 2 or more:
        raise Misfit(f"boxes of {shape} do not fill the rows of {place.type}")
    if pages.type != Tile((count,), ops.INDEX.dtype) or not 1 <= count <= 32 or count & (count - 1):
        raise Misfit(f"{pages.type} are not the pages of {count} boxes of {shape}")
    if hint not in HINTS:
        raise Misfit(f"no hint is called {hint!r}")
    return NOTHING


@placed_row("copy", effects=Close("copy_store"))
def commit_copies() -> Type:
    """close this role's group of copy_store"""
    return NOTHING


@placed_row("copy", effects=made(partial(Drain, "copy_store")))
def wait_copies(*, pending: int) -> Type:
    """until at most `pending` groups are under way"""
    return NOTHING


@placed_row("copy", effects=lambda n: (Work("copy_threads", _ends(n, 2, False)),))
def copy_threads(
    place: Node, memory: Node, *index: Node, shape: Shape, axes: Shape, row: int
) -> Type:
    """index: the Memory's, then the place's leading one. The role's threads copy a box into the
    place's rows from `row` on, in the group being collected; what lies outside of the Memory is
    0"""
    if len(shape) != 2:
        raise Misfit(f"a box of {shape} has no rows")
    _copied(place, memory, shape, axes, index, row)
    return NOTHING


@placed_row("copy", effects=Close("copy_threads"))
def commit_threads() -> Type:
    """close this role's group of copy_threads"""
    return NOTHING


@placed_row("copy", effects=made(partial(Drain, "copy_threads")))
def wait_threads(*, pending: int) -> Type:
    """until each thread's own copies are there, but for those of the last `pending` groups"""
    return NOTHING


@placed_row("copy", effects=lambda n: _ends(n, 2, True))
def store_threads(memory: Node, place: Node, *index: Node, shape: Shape, axes: Shape) -> Type:
    """index: the Memory's, then the place's leading one. The role's threads write a box of the
    place, of which what lies outside of the Memory is dropped"""
    return _stored(memory, place, *index, shape=shape, axes=axes)


# ---- matrix products ------------------------------------------------------------------------


def _product(node: Node) -> tuple[Work]:
    total, a, b, accumulate, *rest = node.inputs
    words = kept_words(node)
    found, rest = [], rest[len(words) :]
    for place in (total, a, b, *words):
        count = len(place.shape) - 2
        found.append(lead(place, False, tuple(rest[:count])))
        rest = rest[count:]
    old, new = read_and_write(found[0])
    touches = (*found[1:], changed(old, when=accumulate), new)
    return (Work("matrix_async", touches, alone=bool(words)),)


def _multiplied(node: Node, a: Any, b: Any, *rest: Any) -> Any:
    """What matrix_async leaves; the last, `old`, is None where it does not accumulate."""
    *words, old = rest
    if node.inputs[1].dtype is int32:
        a = np.ascontiguousarray(a).view(node.inputs[2].dtype.numpy)
    if words:
        positions = kept.positions_of(
            np.ascontiguousarray(words[0]), a.dtype.itemsize, 2 * a.shape[1]
        )
        a = kept.spread_out(a, positions)
    a = a.T if node.attrs["transpose_a"] else a
    m, n = node.inputs[0].shape[-2:]
    b = (b.T if node.attrs["transpose_b"] else b)[:, :n]
    dtype = node.inputs[0].dtype
    return numeric.dot(a, b, np.zeros((m, n), dtype.numpy) if old is None else old, dtype)


def kept_words(node: Node) -> tuple[Node, ...]:
    """The place of the words of a matrix_async that say what of `a` is kept, where some is."""
    return node.inputs[4:5] if node.inputs[4:] and isinstance(node.inputs[4].type, Memory) else ()


@placed_row("matrix_async", effects=_product, numpy=_multiplied)
def matrix_async(
    accumulator: Node,
    a: Node,
    b: Node,
    accumulate: Node,
    *index: Node,
    transpose_a: bool,
    transpose_b: bool,
) -> Type:
    """index: the leading ones of the three places. accumulator = a @ b (+ accumulator where
    accumulate holds), of as many columns of b as the accumulator has; a transposed operand is
    stored (k, m) or (n, k); an a of int32 in registers has two elements of b's dtype in a word.
    Where a holds two of every four, the first of `index` is the place of the words (m / 16, k / 2)
    that say which, as `kept` orders them, and its leading indices come last. Threads hold such
    words in registers that a product reads to its end, so none may be under way then"""
    words = [memory_of(x) for x in index[:1] if isinstance(x.type, Memory)]
    operands = [*(memory_of(x) for x in (accumulator, a, b)), *words]
    if len(index) - len(words) != sum(len(p.shape) - 2 for p in operands):
        raise Misfit(f"{len(index)} leading indices for {operands}")
    (m, n), left, right = (p.shape[-2:] for p in operands[:3])
    if operands[1].dtype is int32 and operands[1].scope == "register":
        left = (left[0], left[1] * 2)
    left = left[::-1] if transpose_a else left
    right = right[::-1] if transpose_b else right
    if words and (transpose_a or words[0].shape[-2:] != (m // 16, left[1]) or left[1] % 32):
        raise Misfit(f"{words[0]} does not say where {operands[1]} lies")
    left = (left[0], left[1] * 2) if words else left
    if left[0] != m or right[1] < n or left[1] != right[0]:
        raise Misfit(f"{left} @ {right} does not add to {(m, n)}")
    if accumulate.type != Tile((), bool_):
        raise Misfit(f"accumulate is {accumulate.type}, not a bool")
    return NOTHING


@placed_row("matrix_async", effects=Fence("matrix"))
def matrix_fence() -> Type:
    """registers written so far may be used by matrix_async"""
    return NOTHING


@placed_row("matrix_async", effects=Close("matrix_async"))
def matrix_commit() -> Type:
    """close this role's group of matrix_async"""
    return NOTHING


@placed_row("matrix_async", effects=made(partial(Drain, "matrix_async")))
def matrix_wait(*, pending: int) -> Type:
    """until at most `pending` groups are under way"""
    return NOTHING


def mixed_order(at: Any, turned: bool) -> Any:
    """Which of a place's columns stand at columns (of a turned one: at rows) of an operand of 16
    bits that `load_operand` widens from 8 bits: in each 16, as matrices of bytes come."""
    if turned:  # neighbours stand 8 apart
        return (at & ~15) | ((at & 7) << 1) | (at >> 3 & 1)
    return (at & ~15) | ((at >> 1 & 3) << 2) | ((at >> 3 & 1) << 1) | (at & 1)


def _operand_of(node: Node, x: Array) -> Array:
    into, turned = node.inputs[0], node.attrs["transpose"]
    x = x.T if turned else x
    if into.dtype is node.inputs[1].dtype:
        return x
    order = mixed_order(np.arange(x.shape[0 if turned else 1]), turned)
    return numeric.cast(x[order] if turned else x[:, order], node.inputs[1].dtype, into.dtype)


def _operand(node: Node) -> tuple[Touch, Touch]:
    operand, place, *index = node.inputs
    m, k = operand.shape
    start, rank = node.attrs["start"], len(place.shape)
    corner, shape = ((start, 0), (k, m)) if node.attrs["transpose"] else ((0, start), (m, k))
    source = box(place, False, (*index, *corner), shape, (rank - 2, rank - 1))
    return source, lead(operand, True)


@placed_row("matrix_sync", effects=_operand, numpy=_operand_of)
def load_operand(operand: Node, place: Node, *index: Node, start: int, transpose: bool) -> Type:
    """registers (m, k) or (n, k), from some of the columns (of the rows, if transposed) of the
    place at its leading index, from `start` on; those of a place of 8 bits are widened to 16 for
    matrix_async, in another order: see `mixed_order`"""
    into, source = memory_of(operand), memory_of(place)
    rows, columns = source.shape[-2:][:: -1 if transpose else 1]
    fits = len(into.shape) == 2 and into.shape[0] == rows
    fits &= into.dtype is source.dtype or (source.dtype.bits == 8 and into.dtype is float16)
    if not fits or len(index) != len(source.shape) - 2 or into.scope != "register":
        raise Misfit(f"{into} from {source} at {len(index)} indices")
    if not 0 <= start <= columns - into.shape[1]:
        raise Misfit(f"{into} from {start} on leaves {source}")
    return NOTHING


def _synchronous(node: Node, a: Any, b: Any, old: Any) -> Any:
    """What matrix_sync leaves."""
    (total, left, right), warps = node.inputs, node.attrs["warps"]
    if left.dtype is int32:
        a = np.ascontiguousarray(a).view(right.dtype.numpy)
    parts = [np.split(x, warps[0] if apart(total, right, warps) else 1) for x in (a, b, old)]
    return np.concatenate([numeric.dot(x, y.T, z, total.dtype) for x, y, z in zip(*parts)])


@placed_row(
    "matrix_sync",
    effects=lambda n: (
        *[lead(x, False) for x in n.inputs[1:]],
        *read_and_write(lead(n.inputs[0], True)),
    ),
    numpy=_synchronous,
)
def matrix_sync(accumulator: Node, a: Node, b: Node, *, warps: tuple[int, int]) -> Type:
    """accumulator (m, n) += a (m, k) @ b (n, k) transposed, all in registers, by warps that stand
    in a grid (down, across). Where b has rows for every warp down (down n, k), each warp multiplies
    its own rows of all three; then an a of int32 has two elements of b's dtype in a word"""
    operands = [memory_of(x) for x in (accumulator, a, b)]
    shapes = [p.shape for p in operands]
    if any(p.scope != "register" or len(p.shape) != 2 for p in operands):
        raise Misfit(f"{operands} are not all matrices in registers")
    rows = shapes[2][0] // (warps[0] if apart(accumulator, b, warps) else 1)
    depth = shapes[1][1] * (2 if operands[1].dtype is int32 else 1)
    if shapes[0] != (shapes[1][0], rows) or depth != shapes[2][1]:
        raise Misfit(f"{shapes[1]} and {shapes[2]} do not add to {shapes[0]}")
    return NOTHING


def apart(accumulator: Node, b: Node, warps: tuple[int, int]) -> bool:
    """Whether each warp of a matrix_sync has operands of its own."""
    return warps[1] == 1 < warps[0] and b.shape[0] == warps[0] * accumulator.shape[1]


# ---- places ---------------------------------------------------------------------------------


@placed_row("memory", effects=Make())
def register_tile(*, shape: Shape, dtype: DType) -> Type:
    """a place in the registers of a role, not initialised"""
    return Memory(shape, dtype, "register", "state")


@placed_row(
    "memory", effects=lambda n: (lead(n.inputs[0], False, n.inputs[1:], n.attrs["rows"] or None),)
)
def read_place(place: Node, *index: Node, rows: Shape) -> Type:
    """the tile at the leading index of a place, or `rows` (first, count) of it"""
    type_ = memory_of(place)
    shape = type_.shape[len(index) :]
    if rows:
        first, count = rows
        if type_.scope == "register" or first % 8:
            raise Misfit(
                f"rows {rows} of {type_}: registers are read whole, other "
                "places from a multiple of 8 on",
            )
        if not 0 <= first <= shape[0] - count:
            raise Misfit(f"rows {rows} leave {type_}")
        shape = (count, *shape[1:])
    return Tile(shape, type_.dtype)  # type: ignore[arg-type]


@placed_row("memory", effects=lambda n: (lead(n.inputs[0], True, n.inputs[2:]),))
def write_place(place: Node, value: Node, *index: Node) -> Type:
    """replace the tile at the leading index of a place"""
    if read_place.infer(place, *index, rows=()) != value.type:
        raise Misfit(f"{value.type} into {place.type} at {len(index)} indices")
    return NOTHING


def cleared(node: Node) -> tuple[int, int] | None:
    """(first, count) of the rows that a clear_rows fills, where its text says it."""
    start, stop = (constant_of(i) for i in node.inputs[1:3])
    if start is None or stop is None or not 0 <= start < stop <= node.inputs[0].shape[-2]:
        return None
    return int(start), int(stop - start)


@placed_row("memory", effects=lambda n: (lead(n.inputs[0], True, n.inputs[3:], cleared(n)),))
def clear_rows(place: Node, start: Node, stop: Node, *index: Node) -> Type:
    """zeros in the rows from start to before stop, as far as there are any, of the tile at the
    leading index of a place"""
    if len(memory_of(place).shape) != len(index) + 2:
        raise Misfit(f"{len(index)} indices of {place.type} leave no rows")
    return NOTHING


# ---- clusters -------------------------------------------------------------------------------
# Body.notes["cluster"] = (n,): n neighbouring programs run together, see each other's shared
# places, and end together.


@placed_row("grid")
def cluster_rank() -> Type:
    """number of this program within its cluster"""
    return ops.INDEX


@placed_row("barrier", effects=_arrival)
def arrive_remote(barrier_: Node, stage: Node, rank: Node) -> Type:
    """arrive at the barrier of the cluster's program of that rank"""
    return _on_barrier(barrier_, stage, rank)


SENDS = ("all", "shares", "one")


def _sent(node: Node) -> tuple[Land]:
    place, value, barrier_, stage, *index = node.inputs
    to, mask, first = node.attrs["to"], -1, 0
    if to == "one":
        mask, first, *index = 1, *index  # type: ignore[assignment]
    into = lead(place, True, tuple(index))
    parts = value.shape[0] // into.shape[0] if to == "shares" else 0
    return (Land(into, None, barrier_, stage, mask, first, parts, tells=False),)


@placed_row("copy", effects=_sent)
def send(place: Node, value: Node, barrier_: Node, stage: Node, *index: Node, to: str) -> Type:
    """into places, at their leading index, of programs of the cluster, the bytes landing on the
    barrier there; to 'all' (this one too) the whole value, or 'shares' of its rows in the order of
    ranks; to 'one' the whole value, its rank being an input after the stage"""
    _on_barrier(barrier_)
    into = memory_of(place)
    if to not in SENDS or (to == "one" and not index):
        rule = f"to one of {SENDS}, and to 'one' with its rank"
        raise Misfit(f"to {to!r} with {len(index)} indices: {rule}")
    at = index[1:] if to == "one" else index
    shape, given = into.shape[len(at) :], value.shape
    rows = given[:1] if to == "shares" else shape[:1]
    whole = bool(shape) and given == (*rows, *shape[1:]) and rows[0] % shape[0] == 0
    if not whole or value.dtype is not into.dtype:
        raise Misfit(f"{value.type} to {into} at {len(at)} indices")
    return NOTHING


# ---- between programs -----------------------------------------------------------------------


@row("memory", effects=lambda n: read_and_write(ops.at_offsets(n, 2, True)))
def atomic_add(memory: Node, value: Node, offset: Node, *mask: Node) -> Type:
    """add to elements at linear offsets in one step each, as seen by all programs; gives the
    values before; masked off ones are 0"""
    return Tile(offset.shape, memory.dtype)


def _added(node: Node) -> tuple[Touch, Touch]:
    memory, value, *index = node.inputs
    return read_and_write(
        Touch(memory, True, tuple(index), value.shape, node.attrs["axes"], some=True)
    )


@placed_row(
    "memory",
    effects=_added,
    numpy=lambda n, old, value: numeric.elementwise("add", n.inputs[0].dtype, [old, value]),
)
def store_add(memory: Node, value: Node, *index: Node, axes: Shape) -> Type:
    """add a tile to what lies at the index, each element in one step as seen by all programs, in
    no order"""
    into = memory_of(memory)
    if into.scope != "global" or value.dtype is not into.dtype or len(index) != len(into.shape):
        raise Misfit(f"{len(index)} indices, {value.type} to {into}")
    return NOTHING


@placed_row("grid", effects=Depend())
def grid_dependency_wait() -> Type:
    """until the launches this one depends on are done: comes before any read that is not of a
    constant, and any global write"""
    return NOTHING


@placed_row("grid", effect=True)
def grid_launch_dependents() -> Type:
    """launches that depend on this may start"""
    return NOTHING
