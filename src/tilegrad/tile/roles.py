"""The placed level of the tile language: roles, rings of stages, copies, accumulators as places.

Each function is one op of `placed`, under the name the op has there, and is public as
`tilegrad.tile.<name>`. A place is subscripted as an array is: `ring[stage]` is what lies at a
leading index, `ring[stage][0:64, :]` some of its rows, `ring[stage].T` is multiplied transposed.
`barrier[stage]` is where bytes land. `role` is a `with` block; `pipeline` is the pair of barriers
of a ring of stages, with the phases counted for you:

    ring = tile.pipeline("ab", stages=3, consumers=2)
    with tile.role("producer", warps=4, registers=40):
        for i in tile.range(steps):
            stage = ring.acquire(i)                        # it is empty
            ring.expect(i, place[stage].bytes)
            tile.copy_async(place[stage], a[0:64, i * 64 : i * 64 + 64], ring.full[stage])
    with tile.role("consumer", warps=8):
        for i in tile.range(steps):
            stage = ring.wait(i)                           # it is full
            ...
            ring.release(i)

Invariant: using any of these makes the kernel's Body a placed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core import dtype as dtypes
from ..core.dtype import dtype_of
from ..core.errors import DTypeError, ShapeError, TraceError
from ..ir.node import Node, Op
from ..ir.symbol import Size
from . import placed
from .language import do, static_shape
from .trace import tracer
from .value import MemoryValue, TileValue, Window, cast, index_of, size_of, tile_of


def _memory(value: Any) -> MemoryValue:
    if not isinstance(value, MemoryValue):
        raise DTypeError("not an array or a place", got=repr(value))
    return value


def _part(value: Any) -> Window:
    """What `place`, `place[i]` and `place[i][a:b, :]` name: some rows of what lies there."""
    part = value[...] if isinstance(value, MemoryValue) else value
    if not isinstance(part, Window):
        raise DTypeError("not a place", got=repr(value))
    at = len(part.lead)
    if any(part.index[at + 1 :]) or part.memory.type.shape[at + 1 :] != part.shape[1:]:
        raise ShapeError(
            "rows of a place are taken whole",
            expected=f"place[..., first:last, :] of {part.memory!r}",
            got=f"{part.shape} at {part.index}",
        )
    return part


def _box(value: Any) -> Window:
    """The part of an array that a copy reads or writes."""
    if not isinstance(value, Window):
        raise DTypeError("not a part of an array", expected="x[i, a:b, c:d]", got=repr(value))
    return value


def _ends(place: Any, array: Any) -> tuple[Window, Window]:
    """What a copy is between: a place, or some rows of it, and a part of an array."""
    part, box = _part(place), _box(array)
    if part.shape != box.shape:
        raise ShapeError("a copy between different shapes", expected=part.shape, got=box.shape)
    return part, box


def _first_row(part: Window) -> Size:
    """The first row of a place that a part of it has."""
    return part.index[len(part.lead)] if part.shape else 0


def _static_row(part: Window) -> int:
    first = _first_row(part)
    if isinstance(first, int):
        return first
    raise ShapeError("the first row is not static", got=first)


@contextmanager
def role(name: str, warps: int, registers: int = 0) -> Iterator[None]:
    """Warps that run what stands inside, beside the roles next to it."""
    t = tracer()
    if t.nested:
        raise TraceError("a role stands inside a loop, a branch or a role")
    b = t.builder
    with b.builder.block(name) as block:
        yield
    b.add(placed.role(blocks=(block,), name=name, warps=warps, registers=registers))


class BarrierStage(NamedTuple):
    """A barrier of an array of them."""

    node: Node
    stage: Size


@dataclass(eq=False, repr=False)
class BarrierValue:
    """An array of barriers, one per stage; `barrier[stage]` is where the bytes of a copy land."""

    name: str
    node: Node
    stages: int

    def __repr__(self) -> str:
        return f"<barrier {self.name} x {self.stages}>"

    def __getitem__(self, stage: Any) -> BarrierStage:
        return BarrierStage(self.node, size_of(stage, "stage"))

    def arrive(self, stage: Any = 0, to: Any = None) -> None:
        """One arrival in the phase under way: here, or at the program of the cluster whose rank
        is `to`."""
        if to is None:
            do(placed.arrive, *self[stage])
        else:
            do(placed.arrive_remote, *self[stage], size_of(to, "rank"))

    def expect(self, stage: Any, bytes_: int) -> None:
        """One arrival that also announces bytes to land."""
        do(placed.expect, *self[stage], bytes=bytes_)

    def wait(self, stage: Any, parity: Any) -> None:
        """Until the phase of this parity is over."""
        do(placed.wait, *self[stage], size_of(parity, "parity"))


def barrier(name: str, count: int, stages: int = 1) -> BarrierValue:
    """An array of barriers; a phase of one completes at `count` arrivals and all its bytes."""
    node = do(placed.barrier, name=name, count=count, stages=stages)
    return BarrierValue(name, node, stages)


@dataclass(eq=False)
class Pipeline:
    """A ring of stages: `full` is completed by the producer's copies, `empty` by consumers."""

    full: BarrierValue
    empty: BarrierValue

    def _turn(self, i: Any) -> tuple[Any, Any]:
        at, stages = index_of(size_of(i, "index")), self.full.stages
        return at % stages, at // stages

    def stage(self, i: Any) -> Any:
        """The stage of step i."""
        return self._turn(i)[0]

    def acquire(self, i: Any) -> Any:
        """The producer waits until the stage of step i is empty; gives the stage."""
        stage, turn = self._turn(i)
        self.empty.wait(stage, (turn + 1) % 2)
        return stage

    def expect(self, i: Any, bytes_: int) -> None:
        """The producer announces the bytes of step i."""
        self.full.expect(self.stage(i), bytes_)

    def wait(self, i: Any) -> Any:
        """A consumer waits until step i has landed; gives the stage."""
        stage, turn = self._turn(i)
        self.full.wait(stage, turn % 2)
        return stage

    def release(self, i: Any, to: Sequence[Any] = (None,)) -> None:
        """A consumer is done with step i: it tells its program's producer, or those of programs
        of the cluster."""
        for rank in to:
            self.empty.arrive(self.stage(i), rank)


def pipeline(name: str, stages: int, consumers: int = 1, producers: int = 1) -> Pipeline:
    """The barriers of a ring of `stages` stages."""
    full = barrier(f"{name}_full", producers, stages)
    return Pipeline(full, barrier(f"{name}_empty", consumers, stages))


def register(shape: Any, dtype: Any = dtypes.float32, fill: float | None = None) -> MemoryValue:
    """A place in the registers of a role: an accumulator."""
    sizes, chosen = static_shape(shape), dtype_of(dtype)
    node = do(placed.register_tile, shape=sizes, dtype=chosen)
    if fill is not None:
        do(placed.write_place, node, tracer().builder.constant(fill, chosen, sizes))
    return MemoryValue("register", node, True)


def read(place: Any) -> TileValue:
    """The tile of a place: `read(total)`, `read(ring[stage])`, `read(ring[stage][0:64, :])`."""
    part = _part(place)
    rows = () if isinstance(place, MemoryValue) else (_static_row(part), part.shape[0])
    return TileValue(do(placed.read_place, part.memory.node, *part.lead, rows=rows))


def write(place: Any, value: Any) -> None:
    """Replace the tile of a place."""
    part = _part(place)
    tile = cast(value, part.memory.dtype).node
    do(placed.write_place, part.memory.node, tile, *part.lead)


def _copy(
    op: Op, part: Window, box: Window, *more: Node | Size, last: Sequence[Size] = (), **attrs: Any
) -> int:
    """Add a copy of a part of an array into a place, or into some rows of it; gives the bytes."""
    inputs = (part.memory.node, box.memory.node, *more, *box.index, *part.lead, *last)
    do(op, *inputs, shape=box.shape, axes=box.axes, **attrs)
    return part.bytes


def copy_async(place: Any, source: Any, stage: BarrierStage) -> int:
    """Copy a part of an array into a place; its bytes land on the barrier. Gives the bytes."""
    part, box = _ends(place, source)
    return _copy(placed.copy_async, part, box, *stage, row=_static_row(part))


def copy_store(target: Any, place: Any) -> None:
    """Write a place to a part of an array, in the group being collected."""
    _store(placed.copy_store, target, place)


def _store(op: Op, target: Any, place: Any) -> None:
    part, box = _ends(place, target)
    inputs = (box.memory.node, part.memory.node, *box.index, *part.lead)
    do(op, *inputs, shape=box.shape, axes=box.axes)
    tracer().touch("store", box.memory, box)


def matrix_async(
    accumulator: Any, a: Any, b: Any, accumulate: Any = True, kept: Any = None
) -> None:
    """accumulator = a @ b (+ accumulator), at some time before a matrix_wait covers it; an `a` of
    which two of every four are kept has the place of the words that say which."""
    words = [] if kept is None else [_memory(kept)]
    total, left, right = (_memory(x) for x in (accumulator, a, b))
    operands, test = [x.node for x in (total, left, right)], tile_of(accumulate).node
    at = [i for x in (total, left, right, *words) for i in x.lead]
    turned = {"transpose_a": left.turned, "transpose_b": right.turned}
    do(placed.matrix_async, *operands, test, *(w.node for w in words), *at, **turned)


def copy_threads(place: Any, source: Any) -> None:
    """Copy a part of an array into a place (or some rows) by the role's threads."""
    part, box = _ends(place, source)
    _copy(placed.copy_threads, part, box, row=_static_row(part))


def store_threads(target: Any, place: Any) -> None:
    """Write a place to a part of an array by the role's threads."""
    _store(placed.store_threads, target, place)


def load_operand(operand: Any, place: Any, start: int = 0) -> None:
    """Registers (m, 16) or (n, 16) from columns of a place (transposed: its rows), from `start`
    on."""
    into, source = _memory(operand), _memory(place)
    attrs = {"start": start, "transpose": source.turned}
    do(placed.load_operand, into.node, source.node, *source.lead, **attrs)


def matrix_sync(accumulator: Any, a: Any, b: Any, warps: tuple[int, int]) -> None:
    """accumulator (m, n) += a (m, k) @ b (n, k) transposed, by a grid of warps."""
    operands = [_memory(x).node for x in (accumulator, a, b)]
    do(placed.matrix_sync, *operands, warps=warps)


def cluster(size: int) -> Any:
    """Run `size` neighbouring programs together; gives this one's number among them."""
    t = tracer()
    t.notes["cluster"] = (size,)
    return index_of(t.builder.atom("rank", do(placed.cluster_rank), 0, size - 1))


def copy_multicast(place: Any, source: Any, stage: BarrierStage, mask: int, first: Any = 0) -> None:
    """Copy a part of an array into (rows of) a place of every program of the cluster in a mask,
    whose bit 0 stands for the rank `first`."""
    part, box = _ends(place, source)
    last = _first_row(part), size_of(first, "rank")
    _copy(placed.copy_multicast, part, box, *stage, last=last, mask=mask)


def copy_pages(place: Any, source: Any, pages: Any, stage: BarrierStage, hint: str = "") -> int:
    """Copy a part of each of several pages of an array into the rows of a place, one below the
    other; a tile of numbers says which pages, `source` what of page 0. Gives the bytes."""
    numbers = cast(pages, dtypes.int64).node
    return _copy(placed.copy_pages, _part(place), _box(source), *stage, numbers, hint=hint)


def store_add(target: Any, value: Any) -> None:
    """Add a tile to a part of an array, which other programs may add to: in any order."""
    box = _box(target)
    tile = cast(value, box.memory.dtype).node
    do(placed.store_add, box.memory.node, tile, *box.index, axes=box.axes)
    tracer().touch("add", box.memory, box)


def send(place: Any, value: Any, stage: BarrierStage, to: Any = "all") -> None:
    """Send a tile to the place of programs of the cluster, its bytes landing on the barrier there:
    to 'all', as 'shares' of its rows, or to the one whose rank is given."""
    part = _part(place)
    one = () if isinstance(to, str) else (size_of(to, "rank"),)
    kind = "one" if one else to
    tile = cast(value, part.memory.dtype).node
    do(placed.send, part.memory.node, tile, *stage, *one, *part.lead, to=kind)


def clear_rows(place: Any, start: Any, stop: Any) -> None:
    """Zeros in the rows from start to before stop of a place."""
    part, ends = _part(place), (size_of(start, "start"), size_of(stop, "stop"))
    do(placed.clear_rows, part.memory.node, *ends, *part.lead)


# ---- ops without inputs --------------------------------------------------------------------------


def _said(op: Op, **defaults: Any) -> Callable[..., None]:
    """The function that adds an op without inputs: it takes the op's attrs, in their order."""

    def say(*given: Any, **named: Any) -> None:
        do(op, **{**defaults, **dict(zip(op.attrs, given)), **named})

    say.__name__, say.__doc__ = op.name, op.meaning
    return say


commit_copies = _said(placed.commit_copies)
wait_copies = _said(placed.wait_copies, pending=0)
commit_threads = _said(placed.commit_threads)
wait_threads = _said(placed.wait_threads, pending=0)
matrix_fence = _said(placed.matrix_fence)
matrix_commit = _said(placed.matrix_commit)
matrix_wait = _said(placed.matrix_wait, pending=0)
fence = _said(placed.fence, kind="async")
named_sync = _said(placed.named_sync)
named_arrive = _said(placed.named_arrive)
grid_dependency_wait = _said(placed.grid_dependency_wait)
grid_launch_dependents = _said(placed.grid_launch_dependents)
