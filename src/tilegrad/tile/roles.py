"""The placed level of the tile language: roles, pipelines, barriers, and accumulators as places.

Each function is one op of `placed`, under the name the op has there, and is public as
`tilegrad.tile.<name>`. `role` is a `with` block; `pipeline` is the pair of barriers of a ring of
stages, with the phases counted for you:

    ring = tile.pipeline("ab", stages=3, consumers=2)
    with tile.role("producer", warps=4, registers=40):
        for i in tile.range(steps):
            ring.acquire(i)                                # the stage is empty
            ring.expect(i, bytes)
            tile.copy_async(place, (i % 3,), a, (0, i * 64), (0, 1), ring.full, i % 3)
    with tile.role("consumer", warps=8):
        for i in tile.range(steps):
            ring.wait(i)                                   # the stage is full
            ...
            ring.release(i)

Invariant: using any of these makes the kernel's Body a placed one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..core import dtype as dtypes
from ..core.dtype import dtype_of
from ..core.errors import DTypeError, TraceError, UserError
from ..ir.node import Node
from ..ir.symbol import Size
from . import placed
from .language import static_shape
from .placed import PlacedBuilder
from .trace import Tracer
from .value import MemoryValue, TileValue, cast, index_of, size_of, tile_of, tracer


def _placed(op: str) -> Tracer:
    found = tracer(op)
    found.placed = True
    return found


def _builder(op: str) -> PlacedBuilder:
    return _placed(op).builder


def _sizes(values: Any) -> tuple[Size, ...]:
    given = values if isinstance(values, (tuple, list)) else (values,)
    return tuple(size_of(v, "index") for v in given)


def _memory(value: Any, op: str) -> Node:
    if not isinstance(value, MemoryValue):
        raise DTypeError("not an array or a place", op=f"tile.{op}", got=repr(value))
    return value.node


@contextmanager
def role(name: str, warps: int, registers: int = 0) -> Iterator[None]:
    """Warps that run what stands inside, beside the roles next to it."""
    t = _placed("role")
    if t.depth:
        raise TraceError("a role stands inside a loop, a branch or a role", op="tile.role")
    b = t.builder
    t.depth += 1
    try:
        with b.builder.block(name) as block:
            yield
    finally:
        t.depth -= 1
    b.add(placed.role(blocks=(block,), name=name, warps=warps, registers=registers))


class BarrierValue:
    """An array of barriers, one per stage."""

    __slots__ = ("name", "node", "stages")

    def __init__(self, name: str, node: Node, stages: int) -> None:
        self.name, self.node, self.stages = name, node, stages

    def __repr__(self) -> str:
        return f"<barrier {self.name} x {self.stages}>"

    def arrive(self, stage: Any = 0) -> None:
        """One arrival in the phase under way."""
        _builder("arrive").arrive(self.node, size_of(stage, "stage"))

    def expect(self, stage: Any, bytes_: int) -> None:
        """One arrival that also announces bytes to land."""
        _builder("expect").expect(self.node, size_of(stage, "stage"), bytes_)

    def wait(self, stage: Any, parity: Any) -> None:
        """Until the phase of this parity is over."""
        _builder("wait").wait(self.node, size_of(stage, "stage"), size_of(parity, "parity"))


def barrier(name: str, count: int, stages: int = 1) -> BarrierValue:
    """An array of barriers; a phase of one completes at `count` arrivals and all its bytes."""
    return BarrierValue(name, _builder("barrier").barrier(name, count, stages), stages)


class Pipeline:
    """A ring of stages: `full` is completed by the producer's copies, `empty` by consumers."""

    __slots__ = ("empty", "full", "stages")

    def __init__(self, full: BarrierValue, empty: BarrierValue, stages: int) -> None:
        self.full, self.empty, self.stages = full, empty, stages

    def _turn(self, i: Any) -> tuple[Any, Any]:
        at = index_of(size_of(i, "index"))
        return at % self.stages, at // self.stages

    def stage(self, i: Any) -> Any:
        """The stage of step i."""
        return self._turn(i)[0]

    def acquire(self, i: Any) -> None:
        """The producer waits until the stage of step i is empty."""
        stage, turn = self._turn(i)
        self.empty.wait(stage, (turn + 1) % 2)

    def expect(self, i: Any, bytes_: int) -> None:
        """The producer announces the bytes of step i."""
        self.full.expect(self._turn(i)[0], bytes_)

    def wait(self, i: Any) -> None:
        """A consumer waits until step i has landed."""
        stage, turn = self._turn(i)
        self.full.wait(stage, turn % 2)

    def release(self, i: Any) -> None:
        """A consumer is done with step i."""
        self.empty.arrive(self._turn(i)[0])


def pipeline(name: str, stages: int, consumers: int = 1, producers: int = 1) -> Pipeline:
    """The barriers of a ring of `stages` stages."""
    if stages < 1 or consumers < 1 or producers < 1:
        raise UserError(
            "a pipeline needs stages, producers and consumers",
            op="tile.pipeline",
            got=(stages, producers, consumers),
        )
    full = barrier(f"{name}_full", producers, stages)
    return Pipeline(full, barrier(f"{name}_empty", consumers, stages), stages)


def register(shape: Any, dtype: Any = dtypes.float32, fill: float | None = None) -> MemoryValue:
    """A place in the registers of a role: an accumulator."""
    node = _builder("register").register_tile(static_shape(shape), dtype_of(dtype), fill)
    return MemoryValue("register", node, True)


def read(place: Any, *index: Any, rows: tuple[int, ...] = ()) -> TileValue:
    """The tile of a place at a leading index, or `rows` (first, count) of it."""
    return TileValue(_builder("read").read(_memory(place, "read"), *_sizes(index), rows=rows))


def write(place: Any, value: Any, *index: Any) -> None:
    """Replace the tile of a place at a leading index."""
    node = _memory(place, "write")
    tile = cast(tile_of(value, node.dtype, "write"), node.dtype)
    _builder("write").write(node, tile.node, *_sizes(index))


def copy_async(
    place: Any,
    at: Any,
    memory: Any,
    index: Any,
    axes: Sequence[int],
    barrier_: BarrierValue,
    stage: Any = 0,
    rows: tuple[int, int] | None = None,
) -> int:
    """Copy a box of an array into a place, or into `rows` (first, count) of it; its bytes land on
    the barrier. Gives the bytes."""
    return _builder("copy_async").copy_async(
        _memory(place, "copy_async"),
        _sizes(at),
        _memory(memory, "copy_async"),
        _sizes(index),
        tuple(axes),
        barrier_.node,
        size_of(stage, "stage"),
        rows,
    )


def copy_store(memory: Any, index: Any, axes: Sequence[int], place: Any, at: Any = ()) -> None:
    """Write a box of a place back, in the group being collected."""
    _builder("copy_store").copy_store(
        _memory(memory, "copy_store"),
        _sizes(index),
        tuple(axes),
        _memory(place, "copy_store"),
        _sizes(at),
    )
    _touch_box(memory, index, axes, place, at)


def _touch_box(memory: Any, index: Any, axes: Sequence[int], place: Any, at: Any) -> None:
    """Note that a box of a result is written from a place."""
    box = place.type.shape[len(_sizes(at)) :]
    tracer("store").touch("store", memory, _sizes(index), box, tuple(axes))


def matrix_async(
    accumulator: Any,
    a: Any,
    b: Any,
    accumulate: Any,
    at: Any = (),
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> None:
    """accumulator = a @ b (+ accumulator), at some time before a matrix_wait covers it."""
    total, left, right = (_memory(x, "matrix_async") for x in (accumulator, a, b))
    test = accumulate if isinstance(accumulate, bool) else tile_of(accumulate).node
    _builder("matrix_async").matrix_async(
        total, left, right, test, _sizes(at), transpose_a, transpose_b
    )


def copy_threads(
    place: Any,
    at: Any,
    memory: Any,
    index: Any,
    axes: Sequence[int],
    rows: tuple[int, int] | None = None,
) -> None:
    """Copy a box of an array into `rows` (first, count; all) of a place by the role's threads."""
    node, lead = _memory(place, "copy_threads"), _sizes(at)
    whole = (0, int(node.shape[len(lead)]))
    _builder("copy_threads").copy_threads(
        node, lead, _memory(memory, "copy_threads"), _sizes(index), tuple(axes), rows or whole
    )


def commit_threads() -> None:
    """Close this role's group of copy_threads."""
    _builder("commit_threads").do(placed.commit_threads)


def wait_threads(pending: int = 0) -> None:
    """Until a thread's own copies are there, but for the last groups; then named_sync."""
    _builder("wait_threads").do(placed.wait_threads, pending=pending)


def store_threads(memory: Any, index: Any, axes: Sequence[int], place: Any, at: Any = ()) -> None:
    """Write a box of a place by the role's threads."""
    _builder("store_threads").store_threads(
        _memory(memory, "store_threads"),
        _sizes(index),
        tuple(axes),
        _memory(place, "store_threads"),
        _sizes(at),
    )
    _touch_box(memory, index, axes, place, at)


def load_operand(
    operand: Any, place: Any, at: Any = (), start: int = 0, *, transpose: bool = False
) -> None:
    """Registers (m, 16) or (n, 16) from columns of a place, from `start` on."""
    registers, source = _memory(operand, "load_operand"), _memory(place, "load_operand")
    _builder("load_operand").load_operand(registers, source, _sizes(at), start, transpose)


def matrix_sync(accumulator: Any, a: Any, b: Any, warps: tuple[int, int]) -> None:
    """accumulator (m, n) += a (m, k) @ b (n, k) transposed, by a grid of warps."""
    total, left, right = (_memory(x, "matrix_sync") for x in (accumulator, a, b))
    _builder("matrix_sync").matrix_sync(total, left, right, warps)


def cluster(size: int) -> Any:
    """Run `size` neighbouring programs together; gives this one's number among them."""
    t = _placed("cluster")
    t.hints["cluster"] = (size,)
    return index_of(t.builder.cluster_rank(size))


def copy_multicast(
    place: Any,
    at: Any,
    rows: tuple[Any, int],
    memory: Any,
    index: Any,
    axes: Sequence[int],
    barrier_: BarrierValue,
    stage: Any,
    mask: int,
) -> None:
    """Copy `rows` (first, count) of a place to every program of the cluster in a mask."""
    _builder("copy_multicast").copy_multicast(
        _memory(place, "copy_multicast"),
        _sizes(at),
        (size_of(rows[0], "row"), rows[1]),
        _memory(memory, "copy_multicast"),
        _sizes(index),
        tuple(axes),
        barrier_.node,
        size_of(stage, "stage"),
        mask,
    )


def copy_pages(
    place: Any,
    at: Any,
    memory: Any,
    pages: Any,
    index: Any,
    shape: tuple[int, int],
    axes: Sequence[int],
    barrier_: BarrierValue,
    stage: Any = 0,
    hint: str = "",
) -> int:
    """Copy a box of each of several pages of an array into the rows of a place, one below the
    other; a tile of numbers says which pages. Gives the bytes."""
    numbers = cast(tile_of(pages, op="copy_pages"), dtypes.int64)
    return _builder("copy_pages").copy_pages(
        _memory(place, "copy_pages"),
        _sizes(at),
        _memory(memory, "copy_pages"),
        numbers.node,
        _sizes(index),
        shape,
        tuple(axes),
        barrier_.node,
        size_of(stage, "stage"),
        hint,
    )


def store_add(memory: Any, value: Any, index: Any, axes: Sequence[int]) -> None:
    """Add a tile to elements of an array, which other programs may add to: in any order."""
    node = _memory(memory, "store_add")
    tile = cast(tile_of(value, node.dtype, "store_add"), node.dtype)
    _builder("store_add").store_add(node, tile.node, _sizes(index), tuple(axes))
    tracer("store_add").touch("add", memory, _sizes(index), tile.shape, tuple(axes))


def arrive_remote(barrier_: BarrierValue, stage: Any, rank: Any) -> None:
    """Arrive at the barrier of another program of the cluster."""
    sizes = size_of(stage, "stage"), size_of(rank, "rank")
    _builder("arrive_remote").arrive_remote(barrier_.node, *sizes)


def send(
    place: Any, value: Any, barrier_: BarrierValue, stage: Any, *index: Any, to: str = "all"
) -> None:
    """Send a tile to the place of programs of the cluster, its bytes landing on the barrier there:
    to 'all', as 'shares' of its rows, or to 'one', whose rank is the first index."""
    if to not in placed.SENDS:
        raise UserError("unknown receivers", op="tile.send", expected=placed.SENDS, got=to)
    node = _memory(place, "send")
    tile = cast(tile_of(value, node.dtype, "send"), node.dtype)
    b = _builder("send")
    b.send(node, tile.node, barrier_.node, size_of(stage, "stage"), *_sizes(index), to=to)


def clear_rows(place: Any, start: Any, stop: Any, *index: Any) -> None:
    """Zeros in the rows from start to before stop of a place."""
    node, ends = _memory(place, "clear_rows"), (size_of(start, "start"), size_of(stop, "stop"))
    _builder("clear_rows").clear_rows(node, *ends, *_sizes(index))


def commit_copies() -> None:
    """Close this role's group of copy_store."""
    _builder("commit_copies").do(placed.commit_copies)


def wait_copies(pending: int = 0) -> None:
    """Until at most `pending` groups of copies are under way."""
    _builder("wait_copies").do(placed.wait_copies, pending=pending)


def matrix_fence() -> None:
    """Registers written so far may be used by matrix_async."""
    _builder("matrix_fence").do(placed.matrix_fence)


def matrix_commit() -> None:
    """Close this role's group of matrix_async."""
    _builder("matrix_commit").do(placed.matrix_commit)


def matrix_wait(pending: int = 0) -> None:
    """Until at most `pending` groups of matrix_async are under way."""
    _builder("matrix_wait").do(placed.matrix_wait, pending=pending)


def fence(kind: str = "async") -> None:
    """'async': plain stores are seen by copies and matrix ops; 'global': by other programs."""
    if kind not in placed.FENCES:
        raise UserError("unknown fence", op="tile.fence", expected=placed.FENCES, got=kind)
    _builder("fence").do(placed.fence, kind=kind)


def named_sync(number: int, threads: int) -> None:
    """Arrive at a numbered barrier and wait until `threads` have."""
    _builder("named_sync").do(placed.named_sync, number=number, threads=threads)


def named_arrive(number: int, threads: int) -> None:
    """Arrive at a numbered barrier, do not wait."""
    _builder("named_arrive").do(placed.named_arrive, number=number, threads=threads)


def grid_dependency_wait() -> None:
    """Until the launches this one depends on are done."""
    _builder("grid_dependency_wait").do(placed.grid_dependency_wait)


def grid_launch_dependents() -> None:
    """Launches that depend on this may start."""
    _builder("grid_launch_dependents").do(placed.grid_launch_dependents)
