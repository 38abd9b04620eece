"""Attention over a paged cache whose copies and products the threads make themselves (sm_80).

The items, rows and sums of `attention`, with one role: its threads ask for the blocks of keys and
values to come, 16 bytes each, while they multiply the ones that are there. Numbers of pages are
asked for a step before their copies. Products are m16n8k16 of a warp: keys and then values are the
long side, 16 rows of queries the short one. Costs are those of `attention`: memory bounds it,
with `stages - 1` blocks under way. Invariant: as in `attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import tile
from ...core.dtype import int64
from ...ir.symbol import high
from ..attention.threads import DEPTH, multiply, shared_place
from .attention import CONSUMER_FIELDS, Item, Items
from .steps import BARRIER, within


class ThreadItems(Items):
    """Builds one Body of `attend` for threads."""

    def allocate_shared(self) -> None:
        """Rings, and operands of the products."""
        x, plan = self.x, self.plan
        self.rings = [shared_place(x.dtype, plan.stages, plan.block, w) for w in self.widths]
        self.queries = shared_place(x.dtype, plan.rows, self.widths[0])
        self.weights = shared_place(x.dtype, plan.rows, plan.block)

    def make_tiles(self) -> None:
        """Sums, and operands in registers."""
        super().make_tiles()
        self.keys, self.values, self.few = (
            tile.register((size, DEPTH), self.x.dtype)
            for size in (self.plan.block, self.widths[1], self.plan.rows)
        )

    def roles(self, multiply: Callable[[], None], bring: Callable[[int], None]) -> None:
        """One, that copies and multiplies."""
        with tile.role("multiply", self.plan.warps):
            self.make_tiles()
            self.for_items(("request", *CONSUMER_FIELDS), self.item)

    def meet(self) -> None:
        """What the threads stored is there for all of them."""
        tile.named_sync(BARRIER, self.threads)

    # ---- copies -----------------------------------------------------------------------------

    @tile.function
    def item(self, of: Item, before: Any) -> None:
        """One item: the ring begins anew, once all threads are done with the one before."""
        best, sums = self.begin(of)
        stages = self.plan.stages
        for ahead in range(stages - 1):
            self.load(of, ahead, self.pages(of, ahead))
        pages = self.pages(of, stages - 1)
        for step in tile.range(of["blocks"]):
            tile.wait_threads(stages - 2)
            self.meet()
            self.load(of, step + stages - 1, pages)
            pages = self.pages(of, step + stages)
            best, sums = self.step(step, of["first"] + step, of["sees"], of["tokens"], best, sums)
        tile.wait_threads(0)
        self.finish(of, best, sums)

    def pages(self, of: Item, step: Any) -> list[Any]:
        """Numbers of the pages of a step; past the last key the last page again."""
        x, plan = self.x, self.plan
        keys = tile.minimum(
            tile.maximum(of["sees"] + of["tokens"] - 1, 1), high(x.most_pages) * x.page
        )
        first, last = (of["first"] + step) * plan.block // x.page, (keys - 1) // x.page
        entries = [tile.minimum(first + i, last) for i in range(max(1, plan.block // x.page))]
        return [tile.cast(tile.load(self.table, (of["request"], p), ()), int64) for p in entries]

    def load(self, of: Item, step: Any, pages: list[Any]) -> None:
        """A block of keys and one of values, page by page, in a group of their own."""
        x, plan, most = self.x, self.plan, high(self.x.pages) - 1
        rows = min(x.page, plan.block)
        row = (of["first"] + step) * plan.block % x.page if x.page > plan.block else 0
        for number, page in enumerate(pages):
            at = tile.hold(within(page, 0, most), "page", (0, most))
            for ring, cache, width in zip(self.rings, self.cache, self.widths):
                place = ring[step % plan.stages][number * rows : (number + 1) * rows, :]
                tile.copy_threads(place, cache[at, self.head, row : row + rows, 0:width])
        tile.commit_threads()

    # ---- products ---------------------------------------------------------------------------

    def arrived(self, which: int, turn: Any) -> Any:
        """A block that is there."""
        return self.rings[which][turn % self.plan.stages]

    def products(self, turn: Any, sees: Any, tokens: Any, key: Any) -> Any:
        """Keys of a block times queries."""
        tile.write(self.scores, tile.zeros(self.scores.shape))
        keys, operands = self.arrived(0, turn), (self.keys, self.few)
        multiply(self.scores, operands, keys, self.queries, self.widths[0], self.plan.warps)
        return tile.read(self.scores)

    def add_values(self, turn: Any) -> None:
        """The values of a block, weighed."""
        values, operands = self.arrived(1, turn).T, (self.values, self.few)
        multiply(self.total, operands, values, self.weights, self.plan.block, self.plan.warps)

    def values_added(self, turn: Any) -> None:
        """Nothing is under way."""
