"""What the kernels of a paged cache agree on: sizes, options, Plans, and the records of work.

A cache holds keys (pages, key_heads, page, width) and values (pages, key_heads, page,
value_width): what a program reads of a page, one head's, lies in one piece. The keys of a request
lie in the pages that its row of `table` names, in order.
Tokens of all requests lie one after the other, `query_starts` says where each request's begin;
`lengths` counts the keys each request has, those of its new tokens included.

The tokens of a request are taken in *row blocks* of `per` tokens: their query heads that share a
key head are the rows of one product. A row block takes its keys in blocks of `plan.block`, and an
*item* is a range of these blocks that one program takes for each key head: neighbouring programs
take the same items, each for a head of its own, and read the same pages at about the same time.

Invariant: a record's columns are those named here, in the work list, the kernels and the
reference alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.dtype import DType, bfloat16, float32, int8, int32
from ...core.target import Target
from ...ir.symbol import Size, ceil_divide, floor_divide, high, minimum, round_up
from ...ir.types import Memory
from ..attention.shape import AttentionShape, Parameters, first_wrong

SHORT = 512  # keys of a program from which larger blocks are better
# keys of a request, of a program, up to which latencies bound a step
FEW_REQUEST_KEYS, FEW_PROGRAM_KEYS = 4096, 1024
SHARED = 227 << 10  # bytes that a program may have
UNDER_WAY = 128 << 10  # bytes that a program asks for ahead: with more, memory gives them slower
RECORD = 16  # int32 of an item
KNOWN = ("request", "token", "tokens", "sees", "first", "blocks")  # of a row block
FIELDS = (*KNOWN, "partial", "start", "stop", "from", "parts")
# sees: how many keys the item's first token sees; partial: where a part of a row block goes, -1 for
# the whole of one; start, stop: numbers of the program's first and last item, in its first record;
# from, parts: the first partial of the item's row block, and how many parts that has
STEP = ("q", "keys", "values", "scales", "table", "lengths", "query_starts", "sinks")
USES = {"keys": "state", "values": "state", "counters": "state", "out": "result"}  # as a rule


@dataclass(frozen=True)
class PagedShape:
    """Attention of a step's tokens over a paged cache."""

    heads: int
    key_heads: int
    width: int
    value_width: int
    page: int
    tokens: Size
    requests: Size
    pages: Size
    most_pages: Size  # of one request
    scale: float = 1.0
    dtype: DType = bfloat16  # of queries and results
    cache: DType = bfloat16  # of keys and values; one of 8 bits has scales for each key head
    window: int = 0  # keys that a token sees, itself included; 0 for all
    softcap: float = 0.0
    sinks: bool = False  # each head has one more score, of a key without a value

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.key_heads

    @property
    def single(self) -> bool:
        """Whether there are as many tokens as requests."""
        return self.tokens == self.requests

    @property
    def scaled(self) -> bool:
        """Whether keys and values are kept divided by a scale."""
        return self.cache.bits == 8


@dataclass(frozen=True)
class PagedPlan:
    """Choices: rows of a product, keys of a block, the ring, warps, programs."""

    rows: int = 8  # queries, the short side of a product: a multiple of 8
    block: int = 128
    stages: int = 3  # blocks of keys, and as many of values, under way
    warps: int = 8  # that multiply: 4 or 8
    programs: int = 128
    joined: bool = True  # who finishes the last part of one combines them, else another launch does
    threads: bool = False  # copies and products are the threads' own: `threads_attention`
    below: int = 0  # takes requests with fewer new tokens alone; 0: all
    cluster: int = 0  # of `short`: programs that share the keys of a request and a key head
    alone: bool = False  # and whether a core has one at most, so that all cores have some

    def per(self, x: PagedShape) -> int:
        """Tokens of a row block."""
        return self.rows // x.group

    def row_blocks(self, x: PagedShape) -> Size:
        """The most row blocks that a step has: no more than tokens, nor than whole ones and a rest,
        nor than those of the requests that the Plan takes; tokens of no request are one more."""
        requests = x.requests + 1
        whole = floor_divide(x.tokens, self.per(x)) + requests
        if self.below:
            whole = minimum(whole, requests * ceil_divide(self.below - 1, self.per(x)))
        return minimum(x.tokens, whole)

    def ranges(self, x: PagedShape) -> int:
        """How many ranges the list's blocks are cut into: one for a program of each key head."""
        return self.programs // x.key_heads

    def item_rows(self, x: PagedShape) -> Size:
        """Rows of the list of items; no part of a row block has a higher number."""
        return self.row_blocks(x) + self.ranges(x)

    def most_blocks(self, x: PagedShape) -> int:
        """The most blocks that a request has."""
        return max(1, high(ceil_divide(x.most_pages * x.page, self.block)))

    def bounds(self, x: PagedShape) -> dict[str, tuple[int, int]]:
        """The least and the most that fields of an item can be."""
        tokens, rows, blocks = high(x.tokens), high(self.item_rows(x)), self.most_blocks(x)
        return {
            "request": (0, high(x.requests) - 1),
            "token": (0, tokens - 1),
            "tokens": (0, self.per(x)),
            "sees": (-tokens, blocks * self.block),
            "first": (0, blocks - 1),
            "blocks": (0, blocks),
            "partial": (-1, rows - 1),
            "start": (0, rows),
            "stop": (-1, rows),
            "from": (0, rows - 1),
            "parts": (1, self.ranges(x)),
        }


def attention_of(x: PagedShape, **more: Any) -> AttentionShape:
    """The tokens of a step over the keys that a request may have, as one attention."""
    sizes = (x.heads, x.key_heads, x.tokens, x.most_pages * x.page, x.width, x.value_width)
    lie = ("thd", "bhtd", "bhtd", "thd")
    return AttentionShape(1, *sizes, x.dtype, x.scale, softcap=x.softcap, orders=lie, **more)


def why_not(x: PagedShape, plan: PagedPlan) -> str:
    """Why no Body with a Plan can be right; '' where one can."""
    widths, many = (x.width, x.value_width), plan.cluster
    bytes_of, powers = x.cache.size, all(w & (w - 1) == 0 for w in map(padded, widths))
    return first_wrong(
        (plan.per(x) < 1, "the rows hold a token's query heads"),
        (plan.rows % 8 or not 8 <= plan.rows <= 256, "rows are a multiple of 8 up to 256"),
        (plan.warps not in (4, 8), "4 or 8 warps multiply"),
        (plan.block % (16 * plan.warps), "the warps share a block of keys"),
        (padded(x.value_width) % (16 * plan.warps), "the warps share the values' width"),
        (plan.programs < 1 or plan.programs % x.key_heads, "every key head has its programs"),
        (plan.stages < 2, "two stages of a ring or more fit shared memory"),
        (x.page % 8 or x.page & (x.page - 1), "a page is a power of two, 8 or more"),
        (plan.block & (plan.block - 1), "a block is a power of two"),
        (plan.block // x.page > 32, "a block has 32 pages at most"),
        (any(w * bytes_of % 16 for w in widths), "rows of the cache are multiples of 16 bytes"),
        (x.dtype.size != 2, "queries have 16 bits"),
        (x.cache is not x.dtype and not x.scaled, "the cache has the queries' dtype or 8 bits"),
        (plan.threads and plan.rows % 16, "threads multiply 16 rows"),
        (plan.threads and x.scaled, "a cache of 8 bits needs other matrix units"),
        (plan.threads and not powers, "threads copy rows of a power of two"),
        (many == 1 or many & (many - 1), "a cluster is of a power of two of programs"),
        (padded(x.value_width) % (8 * max(1, many)), "programs share the values' width in eights"),
    )


def padded(width: int) -> int:
    """A width as a matrix operand has it."""
    return round_up(width, 64)


def choose(x: PagedShape, target: Target, queries: int = 1, below: int = 0) -> PagedPlan:
    """A Plan for requests with so many new tokens each; for those with fewer than `below` alone."""
    wide = padded(x.width) + padded(x.value_width)
    plan = replace(_filled(x, target, queries, 128 if wide <= 256 else 64), below=below)
    if high(plan.row_blocks(x)) >= plan.ranges(x):
        return plan
    keys = high(x.most_pages) * x.page * high(plan.row_blocks(x))
    if keys <= SHORT * plan.ranges(x):
        small = _filled(x, target, queries, 64)
        most = -(-keys // (small.ranges(x) * small.block)) + 1  # blocks of a program, about
        stages = min(small.stages, max(2, most))  # the next launch has room
        plan = replace(small, below=below, stages=stages)
    # Where every row block is cut, all combine at the end: many small programs do that sooner. With
    # one token a request that is no sooner than a launch more takes.
    return replace(plan, joined=queries == 1)


def choose_short(x: PagedShape, target: Target, most: int = 0) -> PagedPlan | None:
    """A Plan for one token a request at most; None where the work is better shared out evenly.

    A step takes as long as its longest request, so that none may have many keys: no more than the
    table holds, or `most`, if that is not 0.
    """
    keys = high(x.most_pages) * x.page
    few = min(keys, most or keys) <= short_keys(x, target)
    return _short_plan(x, target) if few else None


def short_keys(x: PagedShape, target: Target) -> int:
    """The most keys of a request for which `choose_short` has a Plan; 0 for none."""
    plan = _short_plan(x, target)
    return max(FEW_REQUEST_KEYS, FEW_PROGRAM_KEYS * plan.cluster) if plan else 0


def _short_plan(x: PagedShape, target: Target) -> PagedPlan | None:
    """Programs take half of the target's cores and half of their shared memory, so that the next
    launch begins beside them; all of the cores at most."""
    if not x.single:
        return None
    cores, pairs = target.cores or 0, high(x.requests) * x.key_heads
    most = min(8, target.limits.get("cluster", 1))
    many = next((n for n in (8, 4, 2) if n <= most and pairs * n <= cores // 2), min(2, most))
    rows, alone = round_up(x.group, 8), 2 * pairs * many > cores
    plan = PagedPlan(rows, 64, 2, 4, x.key_heads, cluster=many, alone=alone)
    wide = padded(x.width) + padded(x.value_width)
    ring = plan.stages * plan.block * wide * x.cache.size
    sent = rows * (padded(x.value_width) + 2 * many) * 4
    bytes_ = 4096 + ring + rows * 2 * (padded(x.width) + plan.block) + sent  # about
    fits = many > 1 and pairs * many <= cores and bytes_ <= SHARED
    return plan if fits and not why_not(x, plan) else None


def _filled(x: PagedShape, target: Target, queries: int, block: int) -> PagedPlan:
    """A Plan with blocks of so many keys and as many stages as shared memory holds. Threads have
    less of it: they take smaller blocks, then fewer rows, until two stages fit; where none do, the
    Plan is one that `why_not` refuses."""
    wanted = x.group * queries
    widest = 32 if x.cache is int8 else 64  # int8 is widened by more registers
    rows = next(r for r in (8, 16, 32, 64) if r >= min(wanted, widest))
    if target.asynchronous_units:
        plan = _ring(x, target, max(rows, round_up(x.group, 8)), block, SHARED)
        return replace(plan, stages=max(2, plan.stages))
    least, most = round_up(x.group, 16), target.memories["shared"].bytes - 1024
    sizes = [(max(r, least), b) for r in (64, 32, 16) if r <= max(rows, 16) for b in (128, 64)]
    made = [replace(_ring(x, target, r, b, most), threads=True) for r, b in sizes if b <= block]
    return next((plan for plan in made if plan.stages >= 2), made[-1])


def _ring(x: PagedShape, target: Target, rows: int, block: int, most: int) -> PagedPlan:
    """A Plan with as many stages as so many bytes hold, of which there may be too few."""
    warps = 8 if padded(x.value_width) % 128 == 0 and block > 64 else 4
    wide = padded(x.width) + padded(x.value_width)
    # 64 bytes of a row and a warp: largest scores, which the warps tell each other
    held = 4096 + rows * (padded(x.width) + block) * 2 + 64 * rows * warps
    stages = min(UNDER_WAY, most - held) // (block * wide * x.cache.size)
    cores = target.cores or 132
    programs = max(1, cores // x.key_heads) * x.key_heads
    return PagedPlan(rows, block, int(min(stages, 12)), warps, programs)


# ---- parameters ---------------------------------------------------------------------------------


def parameters(
    x: PagedShape, names: Sequence[str], plan: PagedPlan | None = None, **uses: str
) -> Parameters:
    """Arrays of a step by name, those that the shape and the Plan have; `uses` are of this kernel.

    scales: what keys and values of each key head are multiplied with. items: the work list, items
    that a program begins with first. partial, sums: parts of row blocks, results and log2 of their
    sums of weights. counters: 0 before and after, if parts are joined."""
    cache = (x.pages, x.key_heads, x.page)
    found = {
        "q": ((x.tokens, x.heads, x.width), x.dtype),
        "k": ((x.tokens, x.key_heads, x.width), x.dtype),
        "v": ((x.tokens, x.key_heads, x.value_width), x.dtype),
        "keys": ((*cache, x.width), x.cache),
        "values": ((*cache, x.value_width), x.cache),
        "table": ((x.requests, x.most_pages), int32),
        "lengths": ((x.requests,), int32),
        "query_starts": ((x.requests + 1,), int32),
        "turned": ((x.tokens, x.heads, x.width), x.dtype),
        "out": ((x.tokens, x.heads, x.value_width), x.dtype),
    }
    if x.scaled:
        found["scales"] = ((2, x.key_heads), float32)
    if x.sinks:
        found["sinks"] = ((x.heads,), float32)
    if plan is not None:
        items = plan.item_rows(x)
        rows = (items, x.key_heads, plan.rows)
        found["items"] = ((items, RECORD), int32)
        found["partial"], found["sums"] = ((*rows, x.value_width), float32), (rows, float32)
        if plan.joined:
            found["counters"] = ((items, x.key_heads), int32)
    uses = {**USES, **uses}
    return [(n, Memory(*found[n], use=uses.get(n, "value"))) for n in names if n in found]
