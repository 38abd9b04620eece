"""The consumers of attention's backward: 64 tokens each, their sums over all blocks, the way out.

Scores of a block and dout v^T are multiplied first; p comes from the first while the second runs,
then ds, and their products, which the next block waits for: they are issued without waiting in
between, so the matrix units always have work of both consumers. Invariant: registers of a product
that is under way are neither read nor written.
"""

from __future__ import annotations

from typing import Any

from ... import tile
from ...core.dtype import float32, int32
from ...ir.symbol import modulo
from ...tile.value import index_of, size_of
from .backward_plan import OWN
from .holes import Holes
from .softmax import and_masks, line


class BackwardConsumer:
    """Writes one consumer; `body` is the BackwardBody."""

    def __init__(self, body: Any, own: int) -> None:
        self.w, self.own, self.x, self.plan = body, own, body.x, body.plan
        columns, dtype = body.columns, self.x.dtype
        self.row = tile.hold(body.first + OWN * own, "row")
        self.scores = tile.register((OWN, columns))
        self.sums: list[Any] = []
        if body.with_changes:
            self.back = tile.register((OWN, columns))  # dout v^T
            wide = (OWN, body.wide[0])
            self.sums = [tile.register(wide, float32, 0.0) for _ in range(body.pieces[0])]
            self.changes = tile.register((OWN, columns), dtype)
        self.with_values = "dv" in body.gives
        if self.with_values:
            self.weights = tile.register((OWN, columns), dtype)
            self.values = tile.register((OWN, body.wide[1]), float32, 0.0)
        if body.fast:
            self.turned = tile.register((64, body.wide[0]))
        self.early = self.with_values and not self.plan.late
        self.rows = [] if body.of_keys else [f[:, None] for f in body.facts(0, self.row, OWN)]

    def run(self) -> None:
        """Every block, then the results."""
        self.w.ready.wait(0, 0)
        self.w.for_blocks(self.block)
        tile.matrix_wait(0)
        if self.w.fast:  # the other's products read these keys too
            tile.named_sync(2, 256)
        self.write()

    # ---- one block --------------------------------------------------------------------------

    def block(self, member: Any, block: Any) -> None:
        """Scores and dout v^T, p and ds, and their products, which the next block waits for."""
        w, holes = self.w, self.w.holes(member)
        count = w.count(member, block)
        stage = self.against(0, self.scores, count)
        tile.matrix_wait(1)  # the block before is done with its operands
        self.release_before(count)
        if w.with_changes:
            self.against(1, self.back, count)
        else:
            w.come[1].wait(count)
        if w.of_keys:
            w.told.wait(count)
        tile.matrix_wait(1 if w.with_changes else 0)
        token = tile.hold(w.place_of(block) * w.columns, "token")
        at = (token, self.row) if w.of_keys else (self.row, token)  # query, key
        self.hide(holes, at)
        far, delta = self.rows or [tile.read(w.known[stage, n]) for n in range(2)]
        p, slope = self.weigh(holes, at, far)
        keep = tile.where(holes.kept(p.shape, *at), holes.grown, 0.0) if self.x.dropout else None
        given = p if keep is None else p * keep
        if self.early:
            tile.write(self.weights, tile.cast(given, self.x.dtype))
            tile.matrix_fence()
            self.add_values(stage)
            tile.matrix_commit()
        if not w.with_changes:
            return
        if not self.early:  # long over: it keeps p from being computed behind the wait for dout v^T
            w.ready.wait(0, 0)
        tile.matrix_wait(1 if self.early else 0)
        back = tile.read(self.back)
        back = back if keep is None else back * keep
        change = p * (back - delta)
        change = change if slope is None else change * slope
        self.add_changes(holes, block, count, given, tile.cast(change, self.x.dtype))

    def against(self, number: int, total: Any, count: Any) -> Any:
        """What is kept times a block of the ring, transposed; gives its stage."""
        w = self.w
        stage = w.come[number].wait(count)
        tile.matrix_fence()
        for piece in range(w.pieces[number]):
            left, right = w.kept[number][self.own, piece], w.ring[number][stage, piece]
            tile.matrix_async(total, left, right.T, piece > 0)
        tile.matrix_commit()
        return stage

    def add_values(self, stage: Any) -> None:
        """dv += p^T dout."""
        tile.matrix_async(self.values, self.weights, self.w.ring[1][stage, 0], True)

    def add_changes(self, holes: Holes, block: Any, count: Any, p: Any, change: Any) -> None:
        """dk += ds^T q, or dq += ds k; where they are added up here, dq of these queries."""
        w, stage, turn = self.w, self.w.come[0].stage(count), count % 2
        late = self.with_values and not self.early
        if late:
            tile.write(self.weights, tile.cast(p, self.x.dtype))
        tile.write(self.changes, change)
        if w.fast:
            self.pass_on(turn, change)
        tile.matrix_fence()
        if w.fast:
            half, piece = (0, self.own) if w.pieces[0] > 1 else (self.own, 0)
            for keys in range(2):
                passed, kept = w.passed[turn, keys, half], w.kept[0][keys, piece]
                tile.matrix_async(self.turned, passed.T, kept, keys > 0)
            tile.matrix_commit()
        if late:
            self.add_values(stage)
            tile.matrix_commit()
        for piece, total in enumerate(self.sums):
            tile.matrix_async(total, self.changes, w.ring[0][stage, piece], True)
        tile.matrix_commit()
        if w.fast:
            tile.matrix_wait(1 if self.early else 2)
            self.add_dq(holes, w.place_of(block))
            tile.matrix_wait(1)  # p has been read

    def pass_on(self, turn: Any, change: Any) -> None:
        """Let both consumers see ds of all keys."""
        for half in range(self.w.columns // 64):
            place = self.w.passed[turn, self.own, half]
            tile.write(place, change[:, 64 * half : 64 * half + 64])
        tile.fence("async")
        tile.named_sync(2, 256)

    @tile.function
    def release_before(self, count: Any) -> None:
        """Give back the stage of the block before: its products are done."""
        stages = self.w.stages
        before = index_of(modulo(size_of(count - 1 + stages, "count"), stages))
        if tile.less(0, count):
            self.w.come[0].empty.arrive(before)

    # ---- p ----------------------------------------------------------------------------------

    def weigh(self, holes: Holes, at: tuple[Any, Any], far: Any) -> tuple[Any, Any | None]:
        """p, and the slope of the soft limit of scores if there is one."""
        raw = tile.read(self.scores)
        slope = holes.slope(raw)
        s = tile.multiply_add(holes.score(raw, *at), holes.factor, far)
        if "mask" in self.x.extras:
            s = tile.where(holes.extra_block("mask", s.shape, *at), s, -tile.INF)
        if self.x.softcap:  # what hides lies under the soft limit
            seen = self.seen(holes, at)
            s = s if seen is None else tile.where(seen, s, -tile.INF)
        return tile.quick_exp2(s), slope

    @tile.function
    def hide(self, holes: Holes, at: tuple[Any, Any]) -> None:
        """-inf where a query does not see a key, in blocks in which that can be."""
        crossed = self.crossed(holes, at)
        if crossed is not None and not self.x.softcap:
            if crossed:
                seen = self.seen(holes, at)
                tile.write(self.scores, tile.where(seen, tile.read(self.scores), -tile.INF))

    @property
    def ends(self) -> bool:
        """Whether blocks may hold keys beyond the last, which would add something."""
        x, w = self.x, self.w
        step = OWN if w.of_keys else w.columns
        uneven = not isinstance(x.keys, int) or x.keys % step != 0
        return w.data_says or (uneven and (w.fast or not w.of_keys))

    def crossed(self, holes: Holes, at: tuple[Any, Any]) -> Any | None:
        """Whether something of a block is not seen; None where all is."""
        w, (least, most) = self.w, holes.sides(*at)
        cuts = []
        if least is not None:
            cuts.append(tile.less(0, least + OWN - 1))
        if most is not None:
            cuts.append(tile.less(most, w.columns - 1))
        if self.ends:
            cuts.append(tile.less(w.limit, at[1] + (OWN if w.of_keys else w.columns)))
        found = cuts[0] if cuts else None
        for cut in cuts[1:]:
            found = found | cut
        return found

    def seen(self, holes: Holes, at: tuple[Any, Any]) -> Any | None:
        """Which elements of a block are seen; None where all are."""
        end = self.w.limit - at[1] if self.ends else None
        return holes.inside((OWN, self.w.columns), *at, end)

    # ---- results ----------------------------------------------------------------------------

    def add_dq(self, holes: Holes, block: Any) -> None:
        """Add dq of a block of queries to what other programs add, as threads hold it."""
        groups = self.w.wide[0] // 8
        lines = tile.reshape(tile.read(self.turned), (4, 2, 8, groups, 4, 2))
        held = tile.transpose(lines, (3, 0, 2, 4, 1, 5))
        lane = self.w.batch * self.x.heads + holes.head
        tile.store_add(self.w.memory["sums"][lane, block, self.own, ...], held)

    def results(self) -> list[tuple[str, Any, int, Any]]:
        """(whose gradient, the place of what was kept, first column, value)."""
        x, w, found = self.x, self.w, []
        scale = tile.full((), x.scale)
        for piece, total in enumerate(self.sums):
            value = tile.cast(tile.read(total) * scale, x.dtype)
            place = w.kept[0][self.own, piece]
            found.append(("dk" if w.of_keys else "dq", place, piece * w.wide[0], value))
        if self.with_values:
            place = w.kept[1 if w.with_changes else 0][self.own, 0]
            found.append(("dv", place, 0, tile.cast(tile.read(self.values), x.dtype)))
        return found

    def write(self) -> None:
        """Results go out through the places of what was kept; of a sequence in a row of others,
        by threads, which stop at its end."""
        w, found = self.w, self.results()
        if w.packed or (not w.with_changes and w.wide[0] != w.wide[1]):
            for name, _, column, value in found:
                self.write_rows(name, column, value)
            return
        for _, place, _, value in found:
            tile.write(place, value)
        tile.fence("async")
        tile.named_sync(self.own, 128)
        for name, place, column, _ in found:
            tile.copy_store(w.tokens(name, w.head, self.row, place.shape, column), place)
        tile.commit_copies()
        tile.wait_copies(0)

    def write_rows(self, name: str, column: int, value: Any) -> None:
        """Rows of a result that are tokens of the sequence."""
        w, columns = self.w, value.shape[1]
        left = tile.cast((w.limit if w.of_keys else w.queries) - self.row, int32)
        inside = (line(OWN) < left)[:, None]
        width = (self.x.value_width if name == "dv" else self.x.width) - column
        if width < columns:
            inside = and_masks(inside, line(columns) < width)
        target = w.tokens(name, w.head, self.row, value.shape, column)
        tile.store(target, value, mask=inside)
