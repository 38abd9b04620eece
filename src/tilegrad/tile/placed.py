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
  `matrix_fence`; shared places written by plain stores need a `fence('async')` and a barrier.
* `copy_pages` is a copy_async for each of several pages whose numbers are data; `send` is one from
  registers to all programs of a cluster.
* `copy_threads` is made by all threads of a role, in groups: what it copied is there after a
  `wait_threads` that covers its group and then a `named_sync` of the role. `matrix_sync` is done
  when the next op begins; its operands are registers that `load_operand` fills.

Invariant: an op here says when it happens only through barriers, groups and fences; `check` and
the interpreter hold a Body to that. It is long because the level's ops stand on one page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from typing import Any

from ..core.dtype import DType, bool_
from ..core.errors import InternalError
from ..ir.block import Block, argument
from ..ir.node import Node, Op
from ..ir.symbol import Size
from ..ir.types import NOTHING, Barrier, Memory, Tile, Type
from . import ops
from .build import Body, BodyBuilder
from .ops import tile


def _fail(op: str, message: str) -> InternalError:
    return InternalError(f"tile.{op}", message)


def _place(op: str, node: Node) -> Memory:
    if not isinstance(node.type, Memory):
        raise _fail(op, f"{node!r} is not a place")
    return node.type


def _barrier_of(op: str, node: Node) -> Barrier:
    if not isinstance(node.type, Barrier):
        raise _fail(op, f"{node!r} is not a barrier")
    return node.type


# ---- roles ----------------------------------------------------------------------------------


def _role(*, name: str, warps: int, registers: int, blocks: tuple[Block, ...]) -> Type:
    if len(blocks) != 1 or blocks[0].arguments or blocks[0].results:
        raise _fail("role", f"{name} must have one Block without arguments and results")
    return NOTHING


role = Op(
    tile,
    "role",
    _role,
    attrs=("name", "warps", "registers"),
    effect=True,
    group="role",
    meaning="warps that run this Block beside the roles next to it; registers is the most "
    "a thread may hold, 0 for what the target gives",
)

# ---- barriers -------------------------------------------------------------------------------

barrier = Op(
    tile,
    "barrier",
    lambda *, name, count, stages: Barrier(count),
    attrs=("name", "count", "stages"),
    effect=True,
    group="barrier",
    meaning="an array of barriers, one per stage of a pipeline",
)


def _on_barrier(op: str, inputs: int) -> Callable[..., Type]:
    def infer(barrier_: Node, *rest: Node, **_: object) -> Type:
        _barrier_of(op, barrier_)
        if len(rest) != inputs or any(r.type != ops.INDEX for r in rest):
            raise _fail(op, f"{[r.type for r in rest]} is not {inputs} scalars")
        return NOTHING

    return infer


arrive = Op(
    tile,
    "arrive",
    _on_barrier("arrive", 1),
    effect=True,
    group="barrier",
    meaning="inputs barrier, stage: one arrival in the phase under way",
)
expect = Op(
    tile,
    "expect",
    _on_barrier("expect", 1),
    attrs=("bytes",),
    effect=True,
    group="barrier",
    meaning="one arrival that also announces bytes to land",
)
wait = Op(
    tile,
    "wait",
    _on_barrier("wait", 2),
    effect=True,
    group="barrier",
    meaning="inputs barrier, stage, parity: until the phase of this parity is over",
)
named_sync = Op(
    tile,
    "named_sync",
    lambda *, number, threads: NOTHING,
    attrs=("number", "threads"),
    effect=True,
    group="barrier",
    meaning="arrive with this role's threads at a numbered barrier and wait until `threads` have",
)
named_arrive = Op(
    tile,
    "named_arrive",
    lambda *, number, threads: NOTHING,
    attrs=("number", "threads"),
    effect=True,
    group="barrier",
    meaning="arrive at a numbered barrier, do not wait",
)
FENCES = ("async", "global")
fence = Op(
    tile,
    "fence",
    lambda *, kind: NOTHING,
    attrs=("kind",),
    effect=True,
    group="barrier",
    meaning="'async': this role's plain stores are seen by copies and matrix ops; "
    "'global': by other programs",
)

# ---- copies ---------------------------------------------------------------------------------


def _boxed(
    op: str,
    place: Memory,
    memory: Memory,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    scalars: int,
) -> Type:
    if len(axes) != len(shape) or place.shape[len(place.shape) - len(shape) :] != shape:
        raise _fail(op, f"a box of {shape} over axes {axes} does not fit the place {place}")
    wanted = len(memory.shape) + len(place.shape) - len(shape)
    if place.dtype is not memory.dtype or scalars != wanted:
        raise _fail(op, f"{scalars} indices, from {memory} with {place}")
    return NOTHING


def _rows(op: str, place: Memory, shape: tuple[int, ...], row: int) -> Memory:
    """A place as if it had only those rows that begin at `row`."""
    whole = place.shape[len(place.shape) - len(shape) :]
    if shape[1:] != whole[1:] or not 0 <= row <= whole[0] - shape[0]:
        raise _fail(op, f"a box of {shape} from row {row} on leaves {place}")
    return changed(place, shape=(*place.shape[: len(place.shape) - len(shape)], *shape))


def _copy_async(
    place: Node,
    memory: Node,
    barrier_: Node,
    stage: Node,
    *index: Node,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    row: int,
) -> Type:
    _barrier_of("copy_async", barrier_)
    into, source = _place("copy_async", place), _place("copy_async", memory)
    return _boxed(
        "copy_async", _rows("copy_async", into, shape, row), source, shape, axes, len(index)
    )


copy_async = Op(
    tile,
    "copy_async",
    _copy_async,
    attrs=("shape", "axes", "row"),
    effect=True,
    group="copy",
    meaning="inputs place, Memory, barrier, stage, Memory index, then the place's "
    "leading index: copies a box, tile axis i walking Memory axis axes[i], into the "
    "last axes of the place from `row` on; its bytes land on the barrier",
)


def _copy_store(
    memory: Node, place: Node, *index: Node, shape: tuple[int, ...], axes: tuple[int, ...]
) -> Type:
    source, into = _place("copy_store", place), _place("copy_store", memory)
    return _boxed("copy_store", source, into, shape, axes, len(index))


copy_store = Op(
    tile,
    "copy_store",
    _copy_store,
    attrs=("shape", "axes"),
    effect=True,
    group="copy",
    meaning="inputs Memory, place, Memory index, then the place's "
    "leading index: writes a box back, in the group being collected",
)


def _copy_multicast(
    place: Node,
    memory: Node,
    barrier_: Node,
    stage: Node,
    *index: Node,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    mask: int,
) -> Type:
    _barrier_of("copy_multicast", barrier_)
    into, source = _place("copy_multicast", place), _place("copy_multicast", memory)
    rows = into.shape[len(into.shape) - len(shape)]
    whole = (rows, *shape[1:])
    if not shape or into.shape[len(into.shape) - len(shape) :] != whole or rows % shape[0]:
        raise _fail("copy_multicast", f"a box of {shape} is no share of the rows of {into}")
    return _boxed(
        "copy_multicast",
        changed(into, shape=(*into.shape[: -len(shape)], *shape)),
        source,
        shape,
        axes,
        len(index) - 2,
    )


copy_multicast = Op(
    tile,
    "copy_multicast",
    _copy_multicast,
    attrs=("shape", "axes", "mask"),
    effect=True,
    group="copy",
    meaning="copy_async of some rows of a place, to the same place of every "
    "program of the cluster whose bit of the mask is set, its bytes landing on the "
    "same barrier there; the last inputs are the first row, and the rank that bit "
    "0 of the mask stands for",
)


def _copy_pages(
    place: Node,
    memory: Node,
    barrier_: Node,
    stage: Node,
    pages: Node,
    *index: Node,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    hint: str,
) -> Type:
    _barrier_of("copy_pages", barrier_)
    into, source = _place("copy_pages", place), _place("copy_pages", memory)
    count = _place_rows(into, shape)
    if pages.type != Tile((count,), ops.INDEX.dtype) or not 1 <= count <= 32 or count & (count - 1):
        raise _fail("copy_pages", f"{pages.type} are not the pages of {count} boxes of {shape}")
    if hint not in HINTS:
        raise _fail("copy_pages", f"no hint is called {hint!r}")
    return _boxed(
        "copy_pages",
        changed(into, shape=(*into.shape[: -len(shape)], *shape)),
        source,
        shape,
        axes,
        len(index),
    )


def _place_rows(into: Memory, shape: tuple[int, ...]) -> int:
    """How many boxes, one below the other, fill a place."""
    rows = into.shape[len(into.shape) - len(shape)]
    if len(shape) != 2 or into.shape[-1] != shape[1] or rows % shape[0]:
        raise _fail("copy_pages", f"boxes of {shape} do not fill the rows of {into}")
    return rows // shape[0]


HINTS = ("", "first")  # how long what is read stays in caches: as usual, leaves first
copy_pages = Op(
    tile,
    "copy_pages",
    _copy_pages,
    attrs=("shape", "axes", "hint"),
    effect=True,
    group="copy",
    meaning="inputs place, Memory, barrier, stage, a tile of page numbers, Memory "
    "index, then the place's leading index: one copy_async for each page, its number "
    "added to the Memory's first index, into the rows of the place one after "
    "another; each thread of the first warp issues one",
)
commit_copies = Op(
    tile,
    "commit_copies",
    lambda: NOTHING,
    effect=True,
    group="copy",
    meaning="close this role's group of copy_store",
)
wait_copies = Op(
    tile,
    "wait_copies",
    lambda *, pending: NOTHING,
    attrs=("pending",),
    effect=True,
    group="copy",
    meaning="until at most `pending` groups are under way",
)


def _copy_threads(
    place: Node, memory: Node, *index: Node, shape: tuple[int, ...], axes: tuple[int, ...], row: int
) -> Type:
    into, source = _place("copy_threads", place), _place("copy_threads", memory)
    if len(shape) != 2:
        raise _fail("copy_threads", f"a box of {shape} has no rows")
    return _boxed(
        "copy_threads", _rows("copy_threads", into, shape, row), source, shape, axes, len(index)
    )


copy_threads = Op(
    tile,
    "copy_threads",
    _copy_threads,
    attrs=("shape", "axes", "row"),
    effect=True,
    group="copy",
    meaning="inputs place, Memory, Memory index, then the place's leading index: the "
    "role's threads copy a box into the place's rows from `row` on, in the group "
    "being collected; what lies outside of the Memory is 0",
)
commit_threads = Op(
    tile,
    "commit_threads",
    lambda: NOTHING,
    effect=True,
    group="copy",
    meaning="close this role's group of copy_threads",
)
wait_threads = Op(
    tile,
    "wait_threads",
    lambda *, pending: NOTHING,
    attrs=("pending",),
    effect=True,
    group="copy",
    meaning="until each thread's own copies are there, but for those of the last `pending` groups",
)


def _store_threads(
    memory: Node, place: Node, *index: Node, shape: tuple[int, ...], axes: tuple[int, ...]
) -> Type:
    source, into = _place("store_threads", place), _place("store_threads", memory)
    return _boxed("store_threads", source, into, shape, axes, len(index))


store_threads = Op(
    tile,
    "store_threads",
    _store_threads,
    attrs=("shape", "axes"),
    effect=True,
    group="copy",
    meaning="inputs Memory, place, Memory index, then the place's "
    "leading index: the role's threads write a box of the place, of which what "
    "lies outside of the Memory is dropped",
)

# ---- matrix products ------------------------------------------------------------------------


def _matrix_async(
    accumulator: Node,
    a: Node,
    b: Node,
    accumulate: Node,
    *index: Node,
    transpose_a: bool,
    transpose_b: bool,
) -> Type:
    places = [_place("matrix_async", x) for x in (accumulator, a, b)]
    if len(index) != sum(len(p.shape) - 2 for p in places):
        raise _fail("matrix_async", f"{len(index)} leading indices for {places}")
    (m, n), left, right = (p.shape[-2:] for p in places)
    left = left[::-1] if transpose_a else left
    right = right[::-1] if transpose_b else right
    if left[0] != m or right[1] < n or left[1] != right[0]:
        raise _fail("matrix_async", f"{left} @ {right} does not add to {(m, n)}")
    if accumulate.type != Tile((), bool_):
        raise _fail("matrix_async", f"accumulate is {accumulate.type}, not a bool")
    return NOTHING


matrix_async = Op(
    tile,
    "matrix_async",
    _matrix_async,
    attrs=("transpose_a", "transpose_b"),
    effect=True,
    group="matrix_async",
    meaning="inputs accumulator, a, b, accumulate, then the leading indices of the "
    "three places: accumulator = a @ b (+ accumulator where accumulate holds), of "
    "as many columns of b as the accumulator has; a transposed operand is stored "
    "(k, m) or (n, k)",
)
matrix_fence = Op(
    tile,
    "matrix_fence",
    lambda: NOTHING,
    effect=True,
    group="matrix_async",
    meaning="registers written so far may be used by matrix_async",
)
matrix_commit = Op(
    tile,
    "matrix_commit",
    lambda: NOTHING,
    effect=True,
    group="matrix_async",
    meaning="close this role's group of matrix_async",
)
matrix_wait = Op(
    tile,
    "matrix_wait",
    lambda *, pending: NOTHING,
    attrs=("pending",),
    effect=True,
    group="matrix_async",
    meaning="until at most `pending` groups are under way",
)


def _load_operand(operand: Node, place: Node, *index: Node, start: int, transpose: bool) -> Type:
    into, source = _place("load_operand", operand), _place("load_operand", place)
    rows, columns = source.shape[-2:][:: -1 if transpose else 1]
    fits = len(into.shape) == 2 and into.shape[0] == rows and into.dtype is source.dtype
    if not fits or len(index) != len(source.shape) - 2 or into.scope != "register":
        raise _fail("load_operand", f"{into} from {source} at {len(index)} indices")
    if not 0 <= start <= columns - into.shape[1]:
        raise _fail("load_operand", f"{into} from {start} on leaves {source}")
    return NOTHING


load_operand = Op(
    tile,
    "load_operand",
    _load_operand,
    attrs=("start", "transpose"),
    effect=True,
    group="matrix_sync",
    meaning="inputs register place (m, k) or (n, k), place, then the place's leading "
    "index: some of the place's columns (its rows, if transposed), from `start` "
    "on",
)


def _matrix_sync(accumulator: Node, a: Node, b: Node, *, warps: tuple[int, int]) -> Type:
    places = [_place("matrix_sync", x) for x in (accumulator, a, b)]
    shapes = [p.shape for p in places]
    if any(p.scope != "register" or len(p.shape) != 2 for p in places):
        raise _fail("matrix_sync", f"{places} are not all matrices in registers")
    if shapes[0] != (shapes[1][0], shapes[2][0]) or shapes[1][1] != shapes[2][1]:
        raise _fail("matrix_sync", f"{shapes[1]} and {shapes[2]} do not add to {shapes[0]}")
    return NOTHING


matrix_sync = Op(
    tile,
    "matrix_sync",
    _matrix_sync,
    attrs=("warps",),
    effect=True,
    group="matrix_sync",
    meaning="accumulator (m, n) += a (m, k) @ b (n, k) transposed, all in registers, "
    "by warps that stand in a grid (down, across)",
)

# ---- places ---------------------------------------------------------------------------------

register_tile = Op(
    tile,
    "register_tile",
    lambda *, shape, dtype: Memory(shape, dtype, "register", "state"),
    attrs=("shape", "dtype"),
    effect=True,
    group="memory",
    meaning="a place in the registers of a role, not initialised",
)


def _read_place(place: Node, *index: Node, rows: tuple[int, ...]) -> Type:
    type_ = _place("read_place", place)
    shape = type_.shape[len(index) :]
    if rows:
        first, count = rows
        if type_.scope == "register" or first % 8:
            raise _fail(
                "read_place",
                f"rows {rows} of {type_}: registers are read whole, other "
                "places from a multiple of 8 on",
            )
        shape = (count, *shape[1:])
        _rows("read_place", type_, shape, first)  # type: ignore[arg-type]
    return Tile(shape, type_.dtype)  # type: ignore[arg-type]


read_place = Op(
    tile,
    "read_place",
    _read_place,
    attrs=("rows",),
    effect=True,
    group="memory",
    meaning="the tile at the leading index of a place, or `rows` (first, count) of it",
)


def _write_place(place: Node, value: Node, *index: Node) -> Type:
    if _read_place(place, *index, rows=()) != value.type:
        raise _fail("write_place", f"{value.type} into {place.type} at {len(index)} indices")
    return NOTHING


write_place = Op(
    tile,
    "write_place",
    _write_place,
    effect=True,
    group="memory",
    meaning="replace the tile at the leading index of a place",
)


def _clear_rows(place: Node, start: Node, stop: Node, *index: Node) -> Type:
    if len(_place("clear_rows", place).shape) != len(index) + 2:
        raise _fail("clear_rows", f"{len(index)} indices of {place.type} leave no rows")
    return NOTHING


clear_rows = Op(
    tile,
    "clear_rows",
    _clear_rows,
    effect=True,
    group="memory",
    meaning="inputs place, start, stop, then the place's leading index: zeros in the "
    "rows from start to before stop, as far as there are any",
)

# ---- clusters -------------------------------------------------------------------------------
# Body.notes["cluster"] = (n,): n neighbouring programs run together, see each other's shared
# places, and end together.

cluster_rank = Op(
    tile,
    "cluster_rank",
    lambda: ops.INDEX,
    group="grid",
    meaning="number of this program within its cluster",
)
arrive_remote = Op(
    tile,
    "arrive_remote",
    _on_barrier("arrive_remote", 2),
    effect=True,
    group="barrier",
    meaning="inputs barrier, stage, rank: arrive at the barrier of the cluster's "
    "program of that rank",
)


SENDS = ("all", "shares", "one")


def _send(place: Node, value: Node, barrier_: Node, stage: Node, *index: Node, to: str) -> Type:
    _barrier_of("send", barrier_)
    into = _place("send", place)
    if to not in SENDS or (to == "one" and not index):
        raise _fail(
            "send",
            f"to {to!r} with {len(index)} indices: to one of {SENDS}, and to 'one' with its rank",
        )
    lead = index[1:] if to == "one" else index
    shape, given = into.shape[len(lead) :], value.shape
    rows = given[:1] if to == "shares" else shape[:1]
    whole = bool(shape) and given == (*rows, *shape[1:]) and rows[0] % shape[0] == 0
    if not whole or value.dtype is not into.dtype:
        raise _fail("send", f"{value.type} to {into} at {len(lead)} indices")
    return NOTHING


send = Op(
    tile,
    "send",
    _send,
    attrs=("to",),
    effect=True,
    group="copy",
    meaning="inputs place, value, barrier, stage, then the place's leading index: into "
    "places of programs of the cluster, the bytes landing on the barrier there; to 'all' "
    "(this one too) the whole value, or 'shares' of its rows in the order of ranks; to 'one' "
    "the whole value, its rank being an input after the stage",
)

# ---- between programs -----------------------------------------------------------------------

atomic_add = Op(
    tile,
    "atomic_add",
    lambda memory, value, offset, *mask: Tile(offset.shape, memory.dtype),
    effect=True,
    group="memory",
    meaning="add to elements at linear offsets in one step each, as seen by all "
    "programs; gives the values before; masked off ones are 0",
)


def _store_add(memory: Node, value: Node, *index: Node, axes: tuple[int, ...]) -> Type:
    into = _place("store_add", memory)
    if into.scope != "global" or value.dtype is not into.dtype or len(index) != len(into.shape):
        raise _fail("store_add", f"{len(index)} indices, {value.type} to {into}")
    return NOTHING


store_add = Op(
    tile,
    "store_add",
    _store_add,
    attrs=("axes",),
    effect=True,
    group="memory",
    meaning="inputs Memory, value, index: add a tile to what lies at the index, each "
    "element in one step as seen by all programs, in no order",
)
grid_dependency_wait = Op(
    tile,
    "grid_dependency_wait",
    lambda: NOTHING,
    effect=True,
    group="grid",
    meaning="until the launches this one depends on are done: comes before "
    "any read that is not of a constant, and any global write",
)
grid_launch_dependents = Op(
    tile,
    "grid_launch_dependents",
    lambda: NOTHING,
    effect=True,
    group="grid",
    meaning="launches that depend on this may start",
)


class PlacedBuilder(BodyBuilder):
    """Builds Bodies at the placed level; methods bear the names of the ops."""

    def role(self, name: str, warps: int, registers: int, body: Callable[[], object]) -> None:
        """A role; `body` builds its Block."""
        with self.builder.block(name) as block:
            body()
        self.add(role(blocks=(block,), name=name, warps=warps, registers=registers))

    def barrier(self, name: str, count: int, stages: int = 1) -> Node:
        """An array of barriers."""
        return self.add(barrier(name=name, count=count, stages=stages))

    def arrive(self, barrier_: Node, stage: Size = 0) -> None:
        """Arrive."""
        self.add(arrive(barrier_, self.index(stage)))

    def expect(self, barrier_: Node, stage: Size, bytes_: int) -> None:
        """Arrive and announce bytes."""
        self.add(expect(barrier_, self.index(stage), bytes=bytes_))

    def wait(self, barrier_: Node, stage: Size, parity: Size) -> None:
        """Wait for a phase."""
        self.add(wait(barrier_, self.index(stage), self.index(parity)))

    def copy_async(
        self,
        place: Node,
        at: Sequence[Size],
        memory: Node,
        index: Sequence[Size],
        axes: tuple[int, ...],
        barrier_: Node,
        stage: Size,
        rows: tuple[int, int] | None = None,
    ) -> int:
        """Copy a box into the place at a leading index, or into `rows` (first, count) of it; gives
        its bytes."""
        shape, row = place.shape[len(at) :], 0
        if rows is not None:
            row, shape = rows[0], (rows[1], *shape[1:])
        scalars = [self.index(i) for i in (*index, *at)]
        self.add(
            copy_async(
                place,
                memory,
                barrier_,
                self.index(stage),
                *scalars,
                shape=shape,
                axes=axes,
                row=row,
            )
        )
        return place.dtype.storage_bytes(math.prod(shape))

    def copy_multicast(
        self,
        place: Node,
        at: Sequence[Size],
        rows: tuple[Size, int],
        memory: Node,
        index: Sequence[Size],
        axes: tuple[int, ...],
        barrier_: Node,
        stage: Size,
        mask: int,
        first: Size = 0,
    ) -> None:
        """Copy `rows` (first, count) of a place to all programs of the cluster in a mask."""
        shape = (rows[1], *place.shape[len(at) + 1 :])
        scalars = [self.index(i) for i in (*index, *at, rows[0], first)]
        self.add(
            copy_multicast(
                place,
                memory,
                barrier_,
                self.index(stage),
                *scalars,
                shape=shape,
                axes=axes,
                mask=mask,
            )
        )

    def copy_pages(
        self,
        place: Node,
        at: Sequence[Size],
        memory: Node,
        pages: Node,
        index: Sequence[Size],
        shape: tuple[int, int],
        axes: tuple[int, ...],
        barrier_: Node,
        stage: Size,
        hint: str = "",
    ) -> int:
        """Copy boxes of several pages into the rows of a place; gives their bytes."""
        scalars = [self.index(i) for i in (*index, *at)]
        self.add(
            copy_pages(
                place,
                memory,
                barrier_,
                self.index(stage),
                pages,
                *scalars,
                shape=shape,
                axes=axes,
                hint=hint,
            )
        )
        count = math.prod((*pages.shape, *shape))
        return place.dtype.storage_bytes(count)

    def cluster_rank(self, size: int) -> Size:
        """This program's number within its cluster of `size`."""
        return self.atom("rank", self.add(cluster_rank()), 0, size - 1)

    def arrive_remote(self, barrier_: Node, stage: Size, rank: Size) -> None:
        """Arrive at a barrier of another program."""
        self.add(arrive_remote(barrier_, self.index(stage), self.index(rank)))

    def send(
        self, place: Node, value: Node, barrier_: Node, stage: Size, *index: Size, to: str = "all"
    ) -> None:
        """Send a value, or shares of it, to programs of the cluster; if to 'one', the first index
        is its rank."""
        scalars = [self.index(i) for i in (stage, *index)]
        self.add(send(place, value, barrier_, *scalars, to=to))

    def copy_store(
        self,
        memory: Node,
        index: Sequence[Size],
        axes: tuple[int, ...],
        place: Node,
        at: Sequence[Size] = (),
    ) -> None:
        """Write a box of the place back."""
        shape = place.shape[len(at) :]
        scalars = [self.index(i) for i in (*index, *at)]
        self.add(copy_store(memory, place, *scalars, shape=shape, axes=axes))

    def matrix_async(
        self,
        accumulator: Node,
        a: Node,
        b: Node,
        accumulate: Node | bool,
        at: Sequence[Size] = (),
        transpose_a: bool = False,
        transpose_b: bool = False,
    ) -> None:
        """Multiply and accumulate; `at` are the leading indices of accumulator, a and b."""
        if not isinstance(accumulate, Node):
            accumulate = self.constant(accumulate, bool_)
        self.add(
            matrix_async(
                accumulator,
                a,
                b,
                accumulate,
                *[self.index(i) for i in at],
                transpose_a=transpose_a,
                transpose_b=transpose_b,
            )
        )

    def copy_threads(
        self,
        place: Node,
        at: Sequence[Size],
        memory: Node,
        index: Sequence[Size],
        axes: tuple[int, ...],
        rows: tuple[int, int],
    ) -> None:
        """Copy into `rows` (first, count) of a place by all threads of the role."""
        shape = (rows[1], *place.shape[len(at) + 1 :])
        scalars = [self.index(i) for i in (*index, *at)]
        self.add(copy_threads(place, memory, *scalars, shape=shape, axes=axes, row=rows[0]))

    def store_threads(
        self,
        memory: Node,
        index: Sequence[Size],
        axes: tuple[int, ...],
        place: Node,
        at: Sequence[Size] = (),
    ) -> None:
        """Write a box of the place by all threads of the role."""
        shape = place.shape[len(at) :]
        scalars = [self.index(i) for i in (*index, *at)]
        self.add(store_threads(memory, place, *scalars, shape=shape, axes=axes))

    def store_add(
        self, memory: Node, value: Node, index: Sequence[Size], axes: tuple[int, ...]
    ) -> None:
        """Add a tile to what lies at an index."""
        self.add(store_add(memory, value, *[self.index(i) for i in index], axes=axes))

    def load_operand(
        self, operand: Node, place: Node, at: Sequence[Size], start: int, transpose: bool = False
    ) -> None:
        """Registers of an operand of matrix_sync."""
        self.add(
            load_operand(
                operand, place, *[self.index(i) for i in at], start=start, transpose=transpose
            )
        )

    def matrix_sync(self, accumulator: Node, a: Node, b: Node, warps: tuple[int, int]) -> None:
        """Multiply what is in registers and accumulate."""
        self.add(matrix_sync(accumulator, a, b, warps=warps))

    def register_tile(
        self, shape: tuple[int, ...], dtype: DType, fill: float | None = None
    ) -> Node:
        """A place in registers, filled if asked."""
        place = self.add(register_tile(shape=shape, dtype=dtype))
        if fill is not None:
            self.write(place, self.constant(fill, dtype, shape))
        return place

    def read(self, place: Node, *index: Size, rows: tuple[int, ...] = ()) -> Node:
        """The tile of a place, or `rows` (first, count) of it."""
        return self.add(read_place(place, *[self.index(i) for i in index], rows=rows))

    def write(self, place: Node, value: Node, *index: Size) -> None:
        """Replace the tile of a place."""
        self.add(write_place(place, value, *[self.index(i) for i in index]))

    def clear_rows(self, place: Node, start: Size, stop: Size, *index: Size) -> None:
        """Zeros in some rows of a place."""
        self.add(clear_rows(place, *[self.index(i) for i in (start, stop, *index)]))

    def do(self, op: Op, **attrs: Any) -> None:
        """An op without inputs: fences, commits, waits for groups, named barriers."""
        self.add(op.make((), attrs))

    def hole(self, name: str, type_: Type, *inputs: Node) -> Node:
        """A named hole."""
        return self.add(ops.hole(*inputs, name=name, type=type_))


# ---- holes ----------------------------------------------------------------------------------

Filler = Callable[[PlacedBuilder, Sequence[Node], Sequence[Node]], Node]
Replace = Callable[[PlacedBuilder, Node, tuple[Node, ...]], "Node | None"]


def fill(
    body: Body, name: str, filler: Filler, parameters: Sequence[tuple[str, Memory]] = ()
) -> Body:
    """The Body with every hole of a name replaced by what filler(builder, inputs, added) builds.

    `parameters` are added to the Body's; the filler gets their Nodes as `added`.
    """
    found = 0

    def replace(b: PlacedBuilder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        nonlocal found
        if node.op is not ops.hole or node.attrs["name"] != name:
            return None
        found += 1
        new = filler(b, inputs, b.parameters[len(body.parameters) :])
        if new.type != node.type:
            raise _fail("fill", f"{name} wants {node.type}, the filler gives {new.type}")
        return new

    filled = rebuild(body, replace, parameters)
    if not found:
        raise _fail("fill", f"the Body {body.name} has no hole {name!r}")
    return filled


def rebuild(body: Body, replace: Replace, parameters: Sequence[tuple[str, Memory]] = ()) -> Body:
    """A copy of the Body in which replace(builder, node, inputs) stands for a Node if it gives
    another; `parameters` are added after the Body's own."""
    given = [(p.attrs["name"], p.type) for p in body.parameters]
    b = PlacedBuilder(body.name, [*given, *parameters])  # type: ignore[list-item]
    mapping: dict[Node, Node] = dict(zip(body.parameters, b.parameters))

    def copy(block: Block) -> None:
        for node in block.nodes:
            inputs = tuple(mapping[i] for i in node.inputs)
            new = replace(b, node, inputs)
            if new is None:
                blocks = tuple(copy_block(inner) for inner in node.blocks)
                new = b.add(node.op.make(inputs, node.attrs, blocks, location=node.location))
            mapping[node] = new

    def copy_block(inner: Block) -> Block:
        arguments = tuple(argument(a.attrs["name"], a.type) for a in inner.arguments)
        mapping.update(zip(inner.arguments, arguments))
        with b.builder.block(inner.name, arguments) as new:
            copy(inner)
            new.results = tuple(mapping[r] for r in inner.results)
        return new

    copy(body.block)
    b.block.results = tuple(mapping[r] for r in body.block.results)
    return b.finish(body.grid, **body.notes)
