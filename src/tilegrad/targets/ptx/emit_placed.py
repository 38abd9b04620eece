"""The placed level: barriers, asynchronous copies, matrix products, swizzled places.

A swizzled place lies as column blocks of one swizzle span: block, row, column within the block,
its 16-byte chunks exchanged by the row; one with the layout 'held' as 16 bytes of each thread side
by side, then the next 16, so that only who holds a Tile alike can read it. One thread of a role
issues copies (a role of copies alone is one warp); each warp arrives for itself, so a barrier's
count is multiplied by the warps of the roles that arrive. Invariant: the order of what is emitted
is the order of the Body: nothing is waited for that it does not wait for. It is long because the
level's ops stand on one page.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.dtype import bfloat16, float16, float32, int32
from ...core.errors import InternalError
from ...ir.node import Node
from ...ir.types import Memory
from ...tile.placed import expect as expect_op
from . import rules
from .descriptor import Operand
from .emit_memory import SWIZZLES, all_nodes
from .emit_shape import ShapeEmitter
from .plan_cluster import waits_for_sends
from .program import TensorMap
from .spread import Spread, accumulator

WGMMA_TYPES = {bfloat16: ("bf16", 16), float16: ("f16", 16), float32: ("tf32", 8)}

WRITES, READS = ("write_place", "store", "clear_rows"), ("read_place", "load", "load_operand")
HELD = {"read_place", "write_place", "send"}  # what a place held by threads allows


class PlacedEmitter(ShapeEmitter):
    """Emits the ops of tile/placed.py."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.barriers: dict[Node, int] = {}  # offset of each array of barriers
        self.maps: dict[TensorMap, int] = {}
        self.map_addresses: dict[TensorMap, str] = {}
        self.places: dict[Node, list[str]] = {}  # registers of register places
        self.paired: set[Node] = set()  # those of 16 bits whose registers hold two elements
        self.spreads_held: dict[Node, Spread] = {}  # of places that lie as threads hold them
        self.acquiring = waits_for_sends(self.body)
        self.telling = telling_arrivals([n for n in self.body.block.nodes if n.op.name == "role"])
        self.single = False  # this role is one warp, one of whose threads acts
        self.role_number = 0
        self.base = ""  # shared address where the program's own memory begins

    def role_sync(self) -> None:
        """The threads of a role meet."""
        self.w.put("bar.sync", str(15 - self.role_number), str(self.threads))

    def group(self) -> str:
        """The number of this warpgroup within its role, the same in all of its threads."""
        key = ("group", self.thread)
        found = self.known(key)
        if found is None:
            number = self.w.value("b32", "shr.u32", self.thread, "7")
            found = self.keep(
                key, self.w.value("b32", "shfl.sync.idx.b32", number, "0", "31", "-1")
            )
        return found

    def first_thread(self) -> str:
        """Holds for one thread of the role."""
        key = ("first", self.thread)
        return self.known(key) or self.keep(
            key, self.w.value("pred", "setp.eq.s32", self.thread, "0")
        )

    # ---- places ---------------------------------------------------------------------------

    def emit_allocate(self, node: Node) -> None:
        type_ = node.type
        assert isinstance(type_, Memory)
        if type_.scope == "register":
            self.emit_register_tile(node)
            return
        size = type_.dtype.size
        for s in type_.shape:
            size *= s
        swizzle = SWIZZLES[type_.layout]
        users = (n.op.name for n in all_nodes(self.body.block) if node in n.inputs)
        if type_.layout == "held" and not {*users} <= HELD:
            raise InternalError("ptx.emit", f"{node!r} lies as threads hold it: read or write it")
        at = self.reserve(size, 8 * swizzle if swizzle else 128)
        self.pointers[node] = self.w.value("b32", "add.s32", self.base, str(at))

    def emit_register_tile(self, node: Node) -> None:
        spread = self.plan.spread(node)
        kind = rules.kind_of(node.dtype)
        count = len(spread.registers)
        if kind == "b16" and in_pairs(spread):  # two elements in one register
            self.paired.add(node)
            kind, count = "b32", count // 2
        self.places[node] = [self.w.new(kind) for _ in range(count)]

    def emit_read_place(self, node: Node) -> None:
        place = node.inputs[0]
        if place in self.paired:
            words = [self.w.value("b32", "mov.b32", r) for r in self.places[place]]
            self.held[node] = [r for word in words for r in self._split(word, place.dtype, 2)]
            return
        if place in self.places:
            kind = rules.kind_of(place.dtype)
            form = "mov.pred" if kind == "pred" else f"mov.{kind}"
            self.held[node] = [self.w.value(kind, form, r) for r in self.places[place]]
            return
        spread = self.plan.spread(node)
        begin = self.row_address(place, node.attrs["rows"][0]) if node.attrs["rows"] else ""
        if self.by_matrix(place, spread):
            self.held[node] = self.load_matrix(place, node.inputs[1:], spread, begin)
            return
        found = []
        for where, start, count in self.place_runs(place, node.inputs[1:], spread, begin):
            found.append((start, self.read_run(where, "ld.shared", place.dtype, count)))
        self.held[node] = [r for _, part in sorted(found) for r in part]

    def emit_write_place(self, node: Node) -> None:
        place, value = node.inputs[:2]
        if place in self.places:
            registers = self.get(value, self.plan.spread(place))
            if place in self.paired:
                words = [
                    self._join(registers[i : i + 2], place.dtype)
                    for i in range(0, len(registers), 2)
                ]
                self.move(self.places[place], words, "b32")
                return
            self.move(self.places[place], registers, rules.kind_of(place.dtype))
            return
        spread = self.spread_of(value)
        registers = self.get(value, spread)
        if self.by_matrix(place, spread):
            self.store_matrix(place, node.inputs[2:], spread, registers)
            return
        owner = self.owner(spread)
        for where, start, count in self.place_runs(place, node.inputs[2:], spread):
            self.write_run(where, "st.shared", place.dtype, registers[start : start + count], owner)

    def lead_address(
        self, place: Node, index: tuple[Node, ...] | list[Node], start: str = ""
    ) -> str:
        """The shared address of a place (beginning at `start`) at its leading index."""
        type_ = place.type
        assert isinstance(type_, Memory)
        address = start or self.pointers[place]
        for node, stride in zip(index, type_.element_strides()):
            low, high = self.bounds.range(node)
            if low == high == 0:
                continue
            bytes_ = stride * type_.dtype.size
            part = self.w.value("b32", "mul.lo.s32", self.index32(node), str(bytes_))
            address = self.w.value("b32", "add.s32", address, part)
        return address

    def row_offsets(self, type_: Memory, row: int) -> tuple[int, int]:
        """Bytes of a place before a row, and from a span of its columns to the next."""
        if len(type_.shape) < 2:
            return row * type_.dtype.size, 0
        step = int(type_.element_strides()[-2]) * type_.dtype.size
        span = SWIZZLES[type_.layout] or step
        return row * span, int(type_.shape[-2]) * span

    def row_address(self, place: Node, row: int) -> str:
        """Where a place begins, as if its first rows were not there."""
        type_ = place.type
        assert isinstance(type_, Memory)
        if type_.layout == "held":
            raise InternalError("ptx.emit", f"no rows from {row} on are read of {place!r}")
        return self.w.value(
            "b32", "add.s32", self.pointers[place], str(self.row_offsets(type_, row)[0])
        )

    def place_runs(
        self, place: Node, index: tuple[Node, ...], spread: Spread, start: str = ""
    ) -> list[tuple[str, int, int]]:
        """(address, first register, count) of the runs of a Tile in a shared place."""
        type_ = place.type
        assert isinstance(type_, Memory)
        base = self.lead_address(place, index, start)
        swizzle, size = SWIZZLES[type_.layout], type_.dtype.size
        if type_.layout == "held":
            return self.held_runs(place, base, spread)
        if not swizzle:
            steps = list(type_.element_strides()[len(index) :])
            own = self.thread_offset(spread, [s * size for s in steps])
            if own is not None:
                base = self.w.value("b32", "add.s32", base, own)
            offsets = [sum(c * s for c, s in zip(at, steps)) for at in spread.registers]
            runs = self.runs(spread, steps, 16, size)  # type: ignore[arg-type]
            return [(f"[{base}+{offsets[s] * size}]", s, n) for s, n in runs]
        return self.swizzled_runs(type_, base, spread, swizzle)

    def held_runs(self, place: Node, base: str, spread: Spread) -> list[tuple[str, int, int]]:
        """Runs of 16 bytes of each thread, side by side: no bank is wanted twice."""
        count, size = len(spread.registers), place.dtype.size
        known = self.spreads_held.setdefault(place, spread)
        if known != spread or spread.copies(self.threads) or count * size % 16:
            raise InternalError("ptx.emit", f"{place!r} is held as {known}, and as {spread}")
        own = self.w.value("b32", "mad.lo.s32", self.thread, "16", base)
        return [
            (f"[{own}+{start * size * self.threads}]", start, 16 // size)
            for start in range(0, count, 16 // size)
        ]

    def swizzled_runs(
        self, type_: Memory, base: str, spread: Spread, swizzle: int
    ) -> list[tuple[str, int, int]]:
        """Runs in a swizzled place: the column's chunk is exchanged by the row."""
        w, size = self.w, type_.dtype.size
        rows = int(type_.shape[-2])
        span = swizzle // size
        row = self.thread_part(spread.fields, 0) or self.constant32(0)
        column = self.thread_part(spread.fields, 1) or self.constant32(0)
        found = []
        for start, count in self.runs(spread, [rows * span, 1], 16, size):
            r, c = spread.registers[start]
            at_row = w.value("b32", "add.s32", row, str(r))
            at = w.value("b32", "add.s32", column, str(c))
            block = w.value("b32", "shr.u32", at, str(span.bit_length() - 1))
            inner = w.value("b32", "and.b32", at, str(span - 1))
            bytes_ = w.value("b32", "mul.lo.s32", inner, str(size))
            turn = w.value(
                "b32",
                "and.b32",
                w.value("b32", "shr.u32", w.value("b32", "mul.lo.s32", at_row, str(swizzle)), "7"),
                str(swizzle // 16 - 1),
            )
            turned = w.value("b32", "xor.b32", bytes_, w.value("b32", "shl.b32", turn, "4"))
            place = w.value("b32", "mad.lo.s32", at_row, str(swizzle), turned)
            place = w.value("b32", "mad.lo.s32", block, str(rows * swizzle), place)
            found.append((f"[{w.value('b32', 'add.s32', base, place)}+0]", start, count))
        return found

    def by_matrix(self, place: Node, spread: Spread) -> bool:
        """Whether a Tile can be stored by stmatrix, and read by ldmatrix."""
        type_ = place.type
        assert isinstance(type_, Memory)
        return (
            SWIZZLES[type_.layout] in (64, 128)
            and type_.dtype.size == 2
            and len(spread.shape) == 2
            and spread.shape[1] % 16 == 0
            and spread.shape[0] % (self.threads // 2) == 0
            and self.threads % 128 == 0
            and spread == accumulator(spread.shape, self.threads // 32)
        )

    def matrix_rows(
        self, place: Node, index: tuple[Node, ...], spread: Spread, begin: str = ""
    ) -> list[tuple[str, int]]:
        """(address of this lane's row, first register) of an accumulator's blocks of 16 x 16."""
        w = self.w
        rows, columns = int(place.shape[-2]), spread.shape[1]
        base = self.lead_address(place, index, begin)
        warp, lane = w.value("b32", "shr.u32", self.thread, "5"), self.bits(0, 5)
        low = w.value("b32", "and.b32", lane, "15")
        row = w.value("b32", "mad.lo.s32", warp, "16", low)
        span = SWIZZLES[place.type.layout]  # type: ignore[union-attr]
        turn = w.value("b32", "and.b32", lane, "7")
        if span == 64:
            turn = w.value("b32", "bfe.u32", lane, "1", "2")
        half = w.value("b32", "shr.u32", lane, "4")
        start = w.value("b32", "mad.lo.s32", row, str(span), base)
        chunks = []
        for j in range(span // 32):
            chunk = w.value("b32", "add.s32", half, str(2 * j))
            chunk = w.value("b32", "xor.b32", chunk, turn)
            chunks.append(w.value("b32", "mad.lo.s32", chunk, "16", start))
        per_block = columns // 2
        found = []
        for block in range(len(spread.registers) // per_block):
            for j in range(columns // 16):
                offset = (j // len(chunks)) * rows * span + block * (self.threads // 2) * span
                where = f"[{chunks[j % len(chunks)]}+{offset}]"
                found.append((where, block * per_block + 8 * j))
        return found

    def store_matrix(
        self, place: Node, index: tuple[Node, ...], spread: Spread, registers: list[str]
    ) -> None:
        """An accumulator's Tile of 16-bit values, 16 x 16 at a time."""
        for where, first in self.matrix_rows(place, index, spread):
            words = [
                self._join(registers[first + 2 * i : first + 2 * i + 2], place.dtype)
                for i in range(4)
            ]
            self.w.put(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16", where, "{" + ", ".join(words) + "}"
            )

    def load_matrix(
        self, place: Node, index: tuple[Node, ...], spread: Spread, begin: str = ""
    ) -> list[str]:
        """A Tile of 16-bit values as an accumulator holds it, 16 x 16 at a time."""
        found = []
        for where, _ in self.matrix_rows(place, index, spread, begin):
            words = [self.w.new("b32") for _ in range(4)]
            self.w.put(
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16", "{" + ", ".join(words) + "}", where
            )
            found += [r for word in words for r in self._split(word, place.dtype, 2)]
        return found

    # ---- barriers -------------------------------------------------------------------------

    def emit_barrier(self, node: Node) -> None:
        self.barriers[node] = self.reserve(8 * node.attrs["stages"], 8)

    def barrier_address(self, barrier: Node, stage: Node) -> str:
        """The shared address of one barrier of an array."""
        low, high = self.bounds.range(stage)
        at = self.barriers[barrier]
        if low == high:
            return self.w.value("b32", "add.s32", self.base, str(at + 8 * low))
        part = self.w.value("b32", "shl.b32", self.index32(stage), "3")
        part = self.w.value("b32", "add.s32", part, self.base)
        return self.w.value("b32", "add.s32", part, str(at))

    def one_lane(self) -> str:
        """The warp's lanes meet; then holds for one of them."""
        self.w.put("bar.warp.sync", "-1")
        key = ("lane 0", self.thread)
        return self.known(key) or self.keep(
            key, self.w.value("pred", "setp.eq.s32", self.bits(0, 5), "0")
        )

    def emit_arrive(self, node: Node) -> None:
        """One lane for its warp, or each thread for itself: racecheck, which does not follow what
        lanes tell one another, then sees the order of their loads and stores."""
        address = self.barrier_address(*node.inputs)
        guard = "" if node in self.telling and not self.single else self.one_lane()
        self.w.put("mbarrier.arrive.shared::cta.b64", "_", f"[{address}]", guard=guard)

    def emit_arrive_remote(self, node: Node) -> None:
        address = self.barrier_address(*node.inputs[:2])
        remote = self.w.value(
            "b32", "mapa.shared::cluster.u32", address, self.index32(node.inputs[2])
        )
        self.w.put("mbarrier.arrive.shared::cluster.b64", "_", f"[{remote}]", guard=self.one_lane())

    def emit_cluster_rank(self, node: Node) -> None:
        self.held[node] = [
            self.resize(self.w.value("b32", "mov.u32", "%cluster_ctarank"), int32, self.dtype(node))
        ]

    def emit_expect(self, node: Node) -> None:
        address = self.barrier_address(*node.inputs)
        self.w.put(
            "mbarrier.arrive.expect_tx.shared::cta.b64",
            "_",
            f"[{address}]",
            str(node.attrs["bytes"]),
            guard=self.first_thread(),
        )

    def emit_wait(self, node: Node) -> None:
        w = self.w
        address = self.barrier_address(*node.inputs[:2])
        parity = self.index32(node.inputs[2])
        again, done = w.label("wait"), w.new("pred")
        w.place(again)
        order = ".acquire.cluster" if node in self.acquiring else ""
        w.put(f"mbarrier.try_wait.parity{order}.shared::cta.b64", done, f"[{address}]", parity)
        w.put("bra", again, guard=f"!{done}")

    def emit_named_sync(self, node: Node) -> None:
        self.w.put("bar.sync", str(node.attrs["number"] + 1), str(node.attrs["threads"]))

    def emit_named_arrive(self, node: Node) -> None:
        self.w.put("bar.arrive", str(node.attrs["number"] + 1), str(node.attrs["threads"]))

    def emit_fence(self, node: Node) -> None:
        kind = node.attrs["kind"]
        self.w.put("fence.proxy.async.shared::cta" if kind == "async" else "fence.acq_rel.gpu")

    @property
    def overlaps(self) -> bool:
        """Whether launches may overlap on the machine; where not, nothing waits."""
        return (self.target.cpu or "sm_90a").startswith("sm_9")

    def emit_grid_dependency_wait(self, node: Node) -> None:
        if self.overlaps:
            self.w.put("griddepcontrol.wait")

    def emit_grid_launch_dependents(self, node: Node) -> None:
        if self.overlaps:
            self.w.put("griddepcontrol.launch_dependents")

    # ---- copies ---------------------------------------------------------------------------

    def boxes(self, place: Memory, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
        """(box of one copy, number of copies along the columns, bytes between them)."""
        swizzle, size = SWIZZLES[place.layout], place.dtype.size
        if not swizzle:
            return shape, 1, 0
        span = swizzle // size
        rows = shape[-2] if len(shape) > 1 else 1
        if shape[-1] % span:
            raise InternalError("ptx.emit", f"rows of {shape} do not fill {place.layout}")
        if shape[-1] == span:
            return shape, 1, 0
        return (*shape[:-1], span), shape[-1] // span, rows * swizzle

    def map_of(
        self, memory: Node, place: Memory, box: tuple[int, ...], axes: tuple[int, ...]
    ) -> TensorMap:
        """The tensor map that copies boxes between a Memory parameter and a place."""
        type_ = memory.type
        assert isinstance(type_, Memory)
        full = [1] * len(type_.shape)
        for axis, size in zip(axes, box):
            full[axis] = size
        if list(axes) != sorted(axes) or type_.element_strides()[-1] != 1:
            raise InternalError("ptx.emit", f"no tensor map walks {type_} along {axes}")
        number = self.body.parameters.index(memory)
        found = TensorMap(
            number,
            type_.dtype,
            type_.shape,
            type_.element_strides(),
            tuple(full),
            SWIZZLES[place.layout],
        )
        self.maps.setdefault(found, len(self.maps))
        return found

    def emit_copy_async(self, node: Node) -> None:
        place, memory, barrier, stage = node.inputs[:4]
        rank = len(memory.shape)
        index, lead = node.inputs[4 : 4 + rank], node.inputs[4 + rank :]
        type_ = place.type
        assert isinstance(type_, Memory)
        box, count, _ = self.boxes(type_, node.attrs["shape"])
        map_ = self.map_of(memory, type_, box, node.attrs["axes"])
        address = self.lead_address(place, lead)
        first, step = self.row_offsets(type_, node.attrs["row"])
        landing = self.barrier_address(barrier, stage)
        form = (
            f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        )
        for i in range(count):
            where = self.coordinates(index, i * box[-1])
            self.w.put(
                form,
                f"[{address}+{first + i * step}]",
                f"[{self.map_addresses[map_]}, {where}]",
                f"[{landing}]",
                guard=self.first_thread(),
            )

    def emit_copy_multicast(self, node: Node) -> None:
        place, memory, barrier, stage = node.inputs[:4]
        rank = len(memory.shape)
        index, lead = node.inputs[4 : 4 + rank], node.inputs[4 + rank : -2]
        row, first = node.inputs[-2:]
        type_ = place.type
        assert isinstance(type_, Memory)
        box, count, _ = self.boxes(type_, node.attrs["shape"])
        map_ = self.map_of(memory, type_, box, node.attrs["axes"])
        span, step = self.row_offsets(type_, 1)
        address = self.w.value(
            "b32", "mad.lo.s32", self.index32(row), str(span), self.lead_address(place, lead)
        )
        landing = self.barrier_address(barrier, stage)
        form = (
            f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile"
            ".mbarrier::complete_tx::bytes.multicast::cluster"
        )
        mask = self.w.value("b32", "mov.b32", str(node.attrs["mask"]))
        mask = self.w.value("b32", "shl.b32", mask, self.index32(first))
        mask = self.w.value("b16", "cvt.u16.u32", mask)
        for i in range(count):
            where = self.coordinates(index, i * box[-1])
            self.w.put(
                form,
                f"[{address}+{i * step}]",
                f"[{self.map_addresses[map_]}, {where}]",
                f"[{landing}]",
                mask,
                guard=self.first_thread(),
            )

    def coordinates(self, index: tuple[Node, ...], more: int) -> str:
        """Coordinates of a box, innermost first."""
        found = [self.index32(i) for i in index]
        if more:
            found[-1] = self.w.value("b32", "add.s32", found[-1], str(more))
        return "{" + ", ".join(reversed(found)) + "}"

    def emit_copy_store(self, node: Node) -> None:
        memory, place = node.inputs[:2]
        rank = len(memory.shape)
        index, lead = node.inputs[2 : 2 + rank], node.inputs[2 + rank :]
        type_ = place.type
        assert isinstance(type_, Memory)
        box, count, step = self.boxes(type_, node.attrs["shape"])
        map_ = self.map_of(memory, type_, box, node.attrs["axes"])
        address = self.lead_address(place, lead)
        form = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
        for i in range(count):
            where = self.coordinates(index, i * box[-1])
            self.w.put(
                form,
                f"[{self.map_addresses[map_]}, {where}]",
                f"[{address}+{i * step}]",
                guard=self.first_thread(),
            )

    def emit_commit_copies(self, node: Node) -> None:
        self.w.put("cp.async.bulk.commit_group", guard=self.first_thread())

    def emit_wait_copies(self, node: Node) -> None:
        self.w.put(
            "cp.async.bulk.wait_group.read", str(node.attrs["pending"]), guard=self.first_thread()
        )
        if not self.single:
            self.role_sync()

    # ---- matrix products ------------------------------------------------------------------

    def emit_matrix_fence(self, node: Node) -> None:
        self.w.put("wgmma.fence.sync.aligned")

    def emit_matrix_commit(self, node: Node) -> None:
        self.w.put("wgmma.commit_group.sync.aligned")

    def emit_matrix_wait(self, node: Node) -> None:
        self.w.put("wgmma.wait_group.sync.aligned", str(node.attrs["pending"]))

    def emit_matrix_async(self, node: Node) -> None:
        total, a, b, accumulate = node.inputs[:4]
        ranks = [len(x.shape) - 2 for x in (total, a, b)]
        index = list(node.inputs[4:])
        if ranks[0]:
            raise InternalError("ptx.emit", "an accumulator has no leading index")
        lead_a, lead_b = index[: ranks[1]], index[ranks[1] :]
        name, depth = WGMMA_TYPES[b.dtype]
        m, n = total.shape
        k = b.shape[-1 if node.attrs["transpose_b"] else -2]
        trans_a, trans_b = node.attrs["transpose_a"], not node.attrs["transpose_b"]
        flags = [str(int(trans_a)), str(int(trans_b))]
        right = Operand(self, b, lead_b, not trans_b, depth)
        left = None if a in self.places else Operand(self, a, lead_a, not trans_a, depth)
        groups = self.threads // 128
        first = self.scalar(accumulate)
        width = min(n, 256)
        for block in range(m // (64 * groups)):
            for column in range(0, n, width):
                count = min(width, n - column)
                form = f"wgmma.mma_async.sync.aligned.m64n{count}k{depth}.f32.{name}.{name}"
                start = block * n // 2 + column // 2
                held = self.places[total][start : start + count // 2]
                for step in range(k // depth):
                    scale = first if step == 0 else self.always()
                    if left is None:
                        given = self.fragment(a, block, step, depth, k)
                        used = flags[1:]
                    else:
                        given = left.at(block * 64 * groups, step, groups)
                        used = flags
                    if depth != 16:
                        used = []
                    self.w.put(
                        form,
                        "{" + ", ".join(held) + "}",
                        given,
                        right.at(column, step),
                        scale,
                        "1",
                        "1",
                        *used,
                    )

    def always(self) -> str:
        """A predicate that holds."""
        key = ("always", True)
        return self.known(key) or self.keep(
            key, self.w.value("pred", "setp.eq.s32", self.constant32(0), "0")
        )

    def fragment(self, a: Node, block: int, step: int, depth: int, k: int) -> str:
        """Registers of a, packed, for one step of k."""
        per_block = k // 2
        first = block * per_block + step * depth // 2
        if a in self.paired:
            words = self.places[a][first // 2 : first // 2 + depth // 4]
        else:
            words = self.places[a][first : first + depth // 2]
        return "{" + ", ".join(words) + "}"


def in_pairs(spread: Spread) -> bool:
    """Whether registers come two by two, neighbours along the last axis."""
    found = spread.registers
    return (
        len(found) % 2 == 0
        and bool(spread.shape)
        and all(b == (*a[:-1], a[-1] + 1) for a, b in zip(found[::2], found[1::2]))
    )


def arrivals(warps: int, single: bool, telling: bool, node: Node) -> int:
    """How often an arrival of a role happens on the machine."""
    if single or node.op is expect_op:
        return 1
    return 32 * warps if telling else warps


def telling_arrivals(roles: Sequence[Node]) -> set[Node]:
    """Arrivals at barriers where roles that hand plain values to one another through a shared place
    arrive; all who arrive at such a barrier do it alike."""
    written, read = ([_places(role, names) for role in roles] for names in (WRITES, READS))
    arriving = [[n for n in all_nodes(role.blocks[0]) if n.op.name == "arrive"] for role in roles]
    barriers: set[Node] = set()
    for i in range(len(roles)):
        others = [j for j in range(len(roles)) if j != i]
        if any(written[i] & read[j] or read[i] & written[j] for j in others):
            barriers |= {n.inputs[0] for n in arriving[i]}
    nodes = (n for role in roles for n in all_nodes(role.blocks[0]))
    barriers -= {n.inputs[0] for n in nodes if n.op.name == "arrive_remote"}
    return {n for found in arriving for n in found if n.inputs[0] in barriers}


def _places(role: Node, names: Sequence[str]) -> set[Node]:
    """The shared places that ops of these names touch."""
    touched = {n.inputs[0] for n in all_nodes(role.blocks[0]) if n.op.name in names}
    return {m for m in touched if isinstance(m.type, Memory) and m.type.scope == "shared"}
