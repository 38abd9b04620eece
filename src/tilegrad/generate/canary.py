"""The canary: a mark beside each page that says whose tokens are in it, and whether that is so.

A step adds a hash of (request, position, token) to the mark of the page that it finds in the
device's own table: the page that keys and values are written to. The host does the same sum with
its own pages and tokens. If both differ, or the device's table is not the host's, something wrote
where it should not. Engines have one where they are asked to (`canary=True`), which costs a step
the reading of all marks and of the table.
Invariant: a page's mark is the sum over the tokens in it, on both sides, as long as all is well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import nn
from ..core.errors import InternalError
from ..graph import build
from ..tensor.creation import arange, tensor
from ..tensor.elementwise import maximum, where
from ..tensor.tensor import Tensor, node_of, wrap
from .batcher import Batch
from .ledger import write
from .ongoing import Ongoing

FACTORS = (73244475, 1540483477, 668265263)  # of request, position and token
Array = np.ndarray[Any, Any]


class Marks:
    """The device's side: a mark for each page, and the number of each slot's request."""

    def __init__(self, slots: int, pages: int, device: str) -> None:
        self.pages = tensor(np.zeros(pages, np.int32), device=device)
        self.owners = tensor(np.zeros(slots, np.int32), device=device)

    def tensors(self) -> dict[str, Tensor]:
        """Its state by name, for `jit`."""
        return {"marks": self.pages, "owners": self.owners}

    def put(
        self,
        page: int,
        table: Tensor,
        starts: Tensor,
        slots: Tensor,
        owner: Tensor | None,
        positions: Tensor,
        tokens: Tensor,
    ) -> None:
        """Within a step: add its tokens (T,) to the marks of pages in the rows' table (R, P)."""
        if owner is None:
            row = arange(slots.shape[0], dtype=slots.dtype)
            real = starts[1:] > starts[:-1]
        else:
            row, real = maximum(owner, 0), owner >= 0
        at = maximum(positions, 0)
        pages = table[row, at // page]
        numbers = self.owners[slots[row]]
        found = where(real, mixed(numbers, at, maximum(tokens, 0)), 0)
        index = node_of(where(real, pages, 0))
        marks = build.update(node_of(self.pages), node_of(found), [index], [0], "add")
        self.pages.assign(wrap(marks))


def mixed(number: Any, position: Any, token: Any) -> Any:
    """A hash of three int32, of Tensors or of arrays: sums of such hashes tell sets apart."""
    x = number * FACTORS[0] + position * FACTORS[1] + token * FACTORS[2]
    x = (x ^ (x >> 15)) * FACTORS[1]
    return x ^ (x >> 13)


class Canary:
    """The host's side: what the marks of pages must be."""

    def __init__(self, marks: Marks, cache: nn.PagedCache, pages: int) -> None:
        self.marks, self.cache = marks, cache
        self.expected = np.zeros(pages, np.int32)
        self._pages: dict[int, int] = {}  # of slots: how many pages were seen

    def seated(self, work: Ongoing) -> None:
        """A request begins: its fresh pages are empty, those of a known prefix are not."""
        write(self.marks.owners, work.slot, np.array([work.number]))
        self._pages[work.slot] = work.fed // self.cache.page
        self.grown([work])

    def grown(self, ongoing: Sequence[Ongoing]) -> None:
        """Pages that requests took since they were seen last are empty."""
        for work in ongoing:
            for page in work.pages[self._pages[work.slot] :]:
                self.expected[page] = 0
                write(self.marks.pages, page, np.zeros(1))
            self._pages[work.slot] = len(work.pages)

    def damaged(self, batch: Batch, running: Sequence[Ongoing]) -> dict[Any, InternalError]:
        """After a step: requests whose pages or rows of the table are wrong, with what is wrong."""
        for work, count in zip(batch.ongoing, batch.counts):
            if work.slot >= 0:
                self._feed(work, work.fed - count, count)
        table, wrong = self.cache.table.numpy(), set(self._wrong())
        found: dict[Any, InternalError] = {}
        for work in running:
            used = -(-work.fed // self.cache.page)
            for index, page in enumerate(work.pages[:used]):
                there = int(table[work.slot, index])
                if there != page:
                    what = f"entry {index} of its table is page {there}, not page {page}"
                elif page in wrong:
                    what = f"page {page} (its entry {index}) has other tokens than it must"
                else:
                    continue
                error = InternalError("canary", f"request {work.request.id!r}: {what}")
                found.setdefault(work.request.id, error)
        return found

    def accept(self) -> list[int]:
        """Pages with a wrong mark, which is what is expected of them from now on."""
        wrong = self._wrong()
        self.expected[:] = self.marks.pages.numpy()
        return wrong

    def _feed(self, work: Ongoing, first: int, count: int) -> None:
        """Do the sum that the device did."""
        positions = np.arange(first, first + count, dtype=np.int32)
        tokens = np.array(work.known[first : first + count], np.int32)
        with np.errstate(over="ignore"):
            found = mixed(np.int32(work.number), positions, tokens)
            pages = np.array(work.pages)[positions // self.cache.page]
            np.add.at(self.expected, pages, found)

    def _wrong(self) -> list[int]:
        """Pages whose mark is not as it must be, whoever has them."""
        found: list[int] = np.flatnonzero(self.marks.pages.numpy() != self.expected).tolist()
        return found


__all__ = ["Canary", "Marks", "mixed"]
