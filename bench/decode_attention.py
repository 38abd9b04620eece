"""Decode attention over a paged cache: ours beside cuDNN over contiguous keys (torch's SDPA).

    python bench/decode_attention.py                 the table, the mixed batch, list and append
    python bench/decode_attention.py --cases 1x2048,16x8192 --pages 16
    python bench/decode_attention.py --sweep         16 Plans at most for each case, best first
    python bench/decode_attention.py --in-order      pages one after the other
    python bench/decode_attention.py --only eight    caches of fp8 and int8 beside bf16
    python bench/decode_attention.py --sweep --kept float8_e4m3 --cases 128x1024 --pages 32

bf16, 32 query and 8 key heads of 128, one new token a request. Pages lie in random order. Both
sides are replayed graphs, interleaved, over sets of inputs that pass the L2 cache several times;
ours is one launch (or two: attend, combine); the work list is made once, as in a step of many
layers, and timed alone. Peers: SDPA on cuDNN with `enable_gqa`, and with the heads of a group as
queries; the faster one counts. Results are checked against float64 first.
Long because all that is compared stands on one page.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import geometric_mean
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_attention
from verdict import end, verdict, wrong

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

import work_lists

from gpu import Bench, sets
from tilegrad.core.dtype import DType, bfloat16, dtype_of, float8_e4m3, int8
from tilegrad.kernels.paged.append import Rotary, append
from tilegrad.kernels.paged.attention import attend
from tilegrad.kernels.paged.shape import FIELDS, KNOWN, PagedPlan, PagedShape, choose, why_not
from tilegrad.kernels.paged.work import combine_parts, work_list

HEADS, KEY_HEADS, WIDTH = 32, 8, 128
GROUP = HEADS // KEY_HEADS
CASES = ((1, 2048), (1, 32768), (16, 2048), (16, 8192), (64, 2048), (128, 4096))
BYTES = 2 * KEY_HEADS * WIDTH * 2  # of a token in the cache
Work = list[Callable[[], Any]]


def mixed_lengths(requests: int = 64, least: int = 128, most: int = 32768) -> list[int]:
    """Log-uniform, the same in every run."""
    draw = np.random.default_rng(0)
    return [int(n) for n in np.exp(draw.uniform(math.log(least), math.log(most), requests))]


class Case:
    """A batch of requests: queries, paged caches, tables in several sets; one work list."""

    def __init__(
        self,
        bench: Bench,
        lengths: Sequence[int],
        page: int,
        plan: PagedPlan | None = None,
        kept: DType = bfloat16,
        count: int = 0,
        in_order: bool = False,
    ) -> None:
        self.bench, self.lengths, self.page = bench, list(lengths), page
        self.in_order = in_order
        each = [-(-n // page) for n in lengths]
        self.x = PagedShape(
            HEADS,
            KEY_HEADS,
            WIDTH,
            WIDTH,
            page,
            len(lengths),
            len(lengths),
            sum(each),
            max(each),
            WIDTH**-0.5,
        )
        self.x = replace(self.x, cache=kept)
        self.plan = plan or choose(self.x, bench.target)
        eight = kept is not bfloat16
        count = count or sets(BYTES * sum(lengths) // (1 + eight))
        self.count = count
        lead = (sum(each), KEY_HEADS, page, WIDTH)
        self.q = [normal(len(lengths), HEADS, WIDTH) for _ in range(count)]
        self.cache = [tuple(stored(normal(*lead), kept) for _ in "kv") for _ in range(count)]
        self.tables = [self.table(each) for _ in range(count)]
        self.out = [torch.empty_like(q) for q in self.q]
        self.lengths_ = torch.tensor(self.lengths, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda")
        each_head = torch.linspace(1.0, 1.5, KEY_HEADS, device="cuda")
        both = torch.tensor([[0.5], [2.0]], device="cuda") / (32 if kept is int8 else 1)
        self.scales = [both * each_head] if eight else []
        self.prepare()

    def table(self, each: Sequence[int]) -> torch.Tensor:
        """Pages in random order, if not asked otherwise."""
        order = torch.arange(sum(each)) if self.in_order else torch.randperm(sum(each))
        order = order.to(torch.int32)
        made = torch.zeros(len(each), max(each), dtype=torch.int32)
        at = 0
        for number, pages in enumerate(each):
            made[number, :pages] = order[at : at + pages]
            at += pages
        return made.cuda()

    def prepare(self, listed: bool = True) -> None:
        """Kernels, scratch, the work list: by its kernel, or as the reference has it."""
        x, plan, bench = self.x, self.plan, self.bench
        items = work_lists.work_list(
            x,
            plan,
            np.array(self.lengths, np.int32),
            np.arange(len(self.lengths) + 1, dtype=np.int32),
        )
        self.items = torch.full(items.shape, -7, dtype=torch.int32, device="cuda")
        lead = (len(items), x.key_heads, plan.rows)
        self.partial = torch.empty(*lead, WIDTH, device="cuda")
        self.sums = torch.empty(*lead, device="cuda")
        self.counters = [
            torch.zeros(lead[:2], dtype=torch.int32, device="cuda") for _ in range(plan.joined)
        ]
        self.main = bench.kernel(attend(x, plan), "paged_attention")
        self.combine = None
        if not plan.joined:
            self.combine = bench.kernel(combine_parts(x, plan), "paged_combine")
        if not listed:
            self.items = torch.from_numpy(items).cuda()
            return
        self.list_kernel = bench.kernel(work_list(x, plan), "paged_work")
        self.run(self.make_list)
        there = items[:, FIELDS.index("blocks")] > 0
        columns = [FIELDS.index(name) for name in (*KNOWN, "partial")]  # others not in every row
        found, wanted = (x[there][:, columns] for x in (self.items.cpu().numpy(), items))
        if (found != wanted).any():
            print(f"  THE WORK LIST IS{wrong(False)}", flush=True)

    def run(self, work: Callable[[], Any]) -> None:
        """Run once, to the end."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.bench.stream):
            work()
        self.bench.stream.synchronize()

    def make_list(self) -> None:
        """Launch the list kernel."""
        self.list_kernel.point([t.data_ptr() for t in (self.lengths_, self.starts, self.items)])
        self.list_kernel.start()

    def launch(self, i: int) -> None:
        """Attend, and combine where that is another launch."""
        given = (
            self.q[i],
            *self.cache[i],
            *self.scales,
            self.tables[i],
            self.items,
            self.out[i],
            self.partial,
            self.sums,
            *self.counters,
        )
        self.main.point([t.data_ptr() for t in given])
        self.main.start(dependent=not self.plan.threads)
        if self.combine is not None:
            self.combine.point(
                [t.data_ptr() for t in (self.items, self.partial, self.sums, self.out[i])]
            )
            self.combine.start(dependent=not self.plan.threads)

    def ours(self) -> Work:
        """Launches over all sets."""
        return [lambda i=i: self.launch(i) for i in range(self.count)]

    @property
    def bytes(self) -> int:
        """What must be read and written."""
        cache = sum(self.lengths) * BYTES // (1 + bool(self.scales))
        return cache + 4 * len(self.lengths) * HEADS * WIDTH

    # ---- contiguous -------------------------------------------------------------------------

    def contiguous(self, i: int, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(key heads, keys, width) of a request, in float32."""
        length = self.lengths[request]
        pages = self.tables[i][request, : -(-length // self.page)].long()
        scales = self.scales[0][:, :, None, None] if self.scales else (1.0, 1.0)
        k, v = (
            m[pages].transpose(0, 1).reshape(KEY_HEADS, -1, WIDTH)[:, :length].float() * s
            for m, s in zip(self.cache[i], scales)
        )
        return k, v

    def wanted(self, i: int, request: int) -> torch.Tensor:
        """The result of a request in float64."""
        k, v = (m.double() for m in self.contiguous(i, request))
        q = self.q[i][request].double().reshape(KEY_HEADS, GROUP, WIDTH)
        weights = torch.softmax(q @ k.transpose(1, 2) * self.x.scale, -1)
        return (weights @ v).reshape(HEADS, WIDTH)

    def error(self, out: torch.Tensor, i: int = 0) -> float:
        """The worst relative error of some requests, every element written."""
        chosen = sorted(
            {
                0,
                len(self.lengths) - 1,
                len(self.lengths) // 2,
                self.lengths.index(min(self.lengths)),
                self.lengths.index(max(self.lengths)),
            }
        )
        worst = 0.0
        for request in chosen:
            wanted = self.wanted(i, request)
            found = out[request].double().reshape(HEADS, WIDTH)
            worst = max(worst, float((found - wanted).norm() / wanted.norm()))
        if not bool(torch.isfinite(out.float()).all()):
            return math.inf
        return worst

    def check(self) -> float:
        """The error of the first set's result."""
        self.out[0].fill_(float("nan"))
        for _ in range(2):  # counters are as they were
            self.run(lambda: self.launch(0))
        return self.error(self.out[0])


def stored(values: torch.Tensor, kept: DType) -> torch.Tensor:
    """Numbers as a cache of a dtype may hold them."""
    if kept is int8:
        return (values.float() * 32).round().clamp(-128, 127).to(torch.int8)
    return values.to(torch.float8_e4m3fn) if kept is float8_e4m3 else values


def normal(*shape: int) -> torch.Tensor:
    """Random bf16."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


# ---- cuDNN --------------------------------------------------------------------------------------


class Peer:
    """cuDNN over contiguous keys and values of equal lengths."""

    def __init__(self, case: Case) -> None:
        self.case = case
        batch, length = len(case.lengths), case.lengths[0]
        shape = (batch, KEY_HEADS, length, WIDTH)
        self.keys = [
            torch.empty(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2 * case.count)
        ]
        for i in range(case.count):
            for request in range(batch):
                k, v = case.contiguous(i, request)
                self.keys[2 * i][request], self.keys[2 * i + 1][request] = k, v

    def ways(self) -> dict[str, Work]:
        """Launches in each way to say it that works here."""
        batch = len(self.case.lengths)

        def gqa(i: int) -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch_attention(
                    self.case.q[i].view(batch, HEADS, 1, WIDTH),
                    *self.keys[2 * i : 2 * i + 2],
                    enable_gqa=True,
                )

        def grouped(i: int) -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch_attention(
                    self.case.q[i].view(batch, KEY_HEADS, GROUP, WIDTH),
                    *self.keys[2 * i : 2 * i + 2],
                )

        found: dict[str, Work] = {}
        for name, way in (("gqa", gqa), ("grouped", grouped)):
            try:
                out = way(0).reshape(batch, HEADS, WIDTH)
                error = self.case.error(out)
                if error > 2e-2:
                    print(f"  cuDNN {name} is off by {error:.1e}")
                    continue
            except RuntimeError as failure:
                print(f"  cuDNN {name}: {str(failure).splitlines()[0][:120]}")
                continue
            found[name] = [lambda i=i, way=way: way(i) for i in range(self.case.count)]
        return found


# ---- tables -------------------------------------------------------------------------------------


def table(
    bench: Bench, cases: Sequence[tuple[int, int]], pages: Sequence[int], in_order: bool
) -> list[dict[str, Any]]:
    """Every case with every page size."""
    found = []
    for batch, length in cases:
        for page in pages:
            case = Case(bench, [length] * batch, page, in_order=in_order)
            found.append(measure(case, f"B={batch} S={length}"))
            del case
            torch.cuda.empty_cache()
    return found


def measure(case: Case, label: str) -> dict[str, Any]:
    """One case: checked, then interleaved with cuDNN."""
    error = case.check()
    peer = Peer(case)
    best: dict[str, Any] = {}
    for name, theirs in peer.ways().items():
        found = case.bench.interleave(case.ours(), theirs)
        if not best or found["peer_us"] < best["peer_us"]:
            best = {**found, "peer": name}
    seconds = best["ours_us"] * 1e-6
    row = {
        "case": label,
        "page": case.page,
        "error": error,
        **best,
        "plan": str(case.plan),
        "bytes": case.bytes,
        "tb_per_s": case.bytes / seconds / 1e12,
    }
    print(
        f"{label:16} page {case.page:<4} {row['ratio']:.3f}x [{row['ratio_low']:.3f},"
        f" {row['ratio_high']:.3f}] ours {row['ours_us']:7.1f} us {row['tb_per_s']:.2f} TB/s"
        f" cuDNN ({row['peer']}) {row['peer_us']:7.1f} us error {error:.1e}"
        f"{wrong(error < 1e-2)}",
        flush=True,
    )
    return row


def mixed(bench: Bench, page: int) -> dict[str, Any]:
    """A batch of many lengths beside one of equal lengths with the same keys."""
    lengths = mixed_lengths()
    even = [sum(lengths) // len(lengths)] * len(lengths)
    rates, errors, times = [], [], []
    for chosen in (lengths, even):
        case = Case(bench, chosen, page)
        errors.append(case.check())
        seconds = bench.alone(case.ours())
        times.append(1e6 * seconds)
        rates.append(case.bytes / seconds / 1e12)
        del case
        torch.cuda.empty_cache()
    row = {
        "case": "mixed",
        "page": page,
        "mixed_us": times[0],
        "uniform_us": times[1],
        "mixed_tb_per_s": rates[0],
        "uniform_tb_per_s": rates[1],
        "share": rates[0] / rates[1],
        "error": max(errors),
    }
    print(
        f"mixed lengths    page {page:<4} {rates[0]:.2f} TB/s ({times[0]:.1f} us), uniform"
        f" {rates[1]:.2f} TB/s ({times[1]:.1f} us): {row['share']:.3f} (bar 0.9) error"
        f" {max(errors):.1e}{wrong(max(errors) < 1e-2)}",
        flush=True,
    )
    return row


def eight_bits(bench: Bench, cases: Sequence[tuple[int, int]], page: int) -> list[dict[str, Any]]:
    """Caches of 8 bits beside one of bf16: what share of its bandwidth they reach."""
    found = []
    for batch, length in cases:
        rates: dict[DType, float] = {}
        for kept in (bfloat16, float8_e4m3, int8):
            case = Case(bench, [length] * batch, page, kept=kept)
            error, seconds = case.check(), bench.alone(case.ours())
            rate = rates[kept] = case.bytes / seconds / 1e12
            share = rate / rates[bfloat16]
            print(
                f"{kept!s:12} B={batch} S={length} page {page}: {1e6 * seconds:.1f} us"
                f" {rate:.2f} TB/s, {share:.3f} of bf16's (bar 0.95) error {error:.1e}"
                f"{wrong(error < 1e-2)}",
                flush=True,
            )
            found.append(
                {
                    "case": f"{kept} B={batch} S={length}",
                    "page": page,
                    "error": error,
                    "ours_us": 1e6 * seconds,
                    "tb_per_s": rate,
                    "share": share,
                }
            )
            del case
            torch.cuda.empty_cache()
    return found


def beside(bench: Bench, batch: int, length: int) -> dict[str, Any]:
    """The work list, and rotary with append, alone."""
    case = Case(bench, [length] * batch, 16, count=2)
    listed = 1e6 * bench.alone([case.make_list] * 8)
    x = case.x
    kernel = bench.kernel(append(x, Rotary(WIDTH)), "paged_append")
    k, v = normal(batch, KEY_HEADS, WIDTH), normal(batch, KEY_HEADS, WIDTH)
    frequencies = 500000.0 ** (-torch.arange(WIDTH // 2, device="cuda") / (WIDTH // 2))
    turned = torch.full_like(case.q[0], float("nan"))
    given = (
        case.q[0],
        k,
        v,
        frequencies.float(),
        case.tables[0],
        case.lengths_,
        case.starts,
        *case.cache[0],
        turned,
    )

    def one() -> None:
        kernel.point([t.data_ptr() for t in given])
        kernel.start(dependent=True)

    case.run(one)
    error = append_error(case, k, v, frequencies.float(), turned)
    appended = 1e6 * bench.alone([one] * 8)
    print(
        f"B={batch} S={length}: work list {listed:.1f} us, rotary and append {appended:.1f} us"
        f" error {error:.1e}{wrong(error < 1e-2)}",
        flush=True,
    )
    return {
        "case": f"beside B={batch} S={length}",
        "list_us": listed,
        "append_us": appended,
        "error": error,
    }


def append_error(
    case: Case, k: torch.Tensor, v: torch.Tensor, frequencies: torch.Tensor, turned: torch.Tensor
) -> float:
    """Of turned queries and of what lies in the cache afterwards."""
    worst = 0.0
    for request, length in enumerate(case.lengths):
        place = length - 1
        page = int(case.tables[0][request, place // case.page])
        angle = (place * frequencies).double()
        cosine, sine = angle.cos(), angle.sin()
        kept, held = (m[page, :, place % case.page] for m in case.cache[0])
        for given, found in ((case.q[0][request], turned[request]), (k[request], kept)):
            a, b = given.double().chunk(2, -1)
            wanted = torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)
            worst = max(worst, float((found.double() - wanted).norm() / wanted.norm()))
        if not torch.equal(held, v[request]):
            return math.inf
    return worst


def plans(case: Case) -> Iterator[PagedPlan]:
    """At most 16: one launch or two, blocks, stages, and programs: one or two that a core holds at
    once, or more than fit, which cores take as they get free."""
    base = case.plan
    keys = sum(case.lengths)
    many = keys * KEY_HEADS // 64  # blocks of 64
    room = (227 * 1024 - 12 * 1024) // (64 * 2 * WIDTH * case.x.cache.size)
    more = tuple(n for n in (512, 1024, 2048) if n * 8 <= many)
    # block, warps, stages, programs
    wide = [(128, 8, room // 2, (128,)), (128, 4, room // 2, (128,))]
    deep = [(64, 4, room // 2, (256, *more)), (64, 4, room, (128,))]
    found = [base]
    for block, warps, stages, counts in wide + deep:
        found += [
            replace(base, block=block, warps=warps, stages=stages, programs=n) for n in counts
        ]
    if not more:  # a program has few blocks: a shallow ring leaves room for the next launch
        found += [replace(base, block=64, warps=4, stages=2, programs=n) for n in (128, 256)]
    both = [replace(p, joined=not base.joined) for p in found if p.programs <= 256]
    kept = [p for p in dict.fromkeys(found + both) if not why_not(case.x, p)]
    yield from kept[:16]


def text_of(plan: PagedPlan) -> str:
    """A Plan in a line."""
    return (
        f"block {plan.block} warps {plan.warps} stages {plan.stages}"
        f" programs {plan.programs} joined {plan.joined:d}"
    )


def sweep(
    bench: Bench,
    cases: Sequence[tuple[int, int]],
    pages: Sequence[int],
    in_order: bool,
    kept: DType = bfloat16,
) -> None:
    """Every Plan for every case, best first."""
    for batch, length in cases:
        for page in pages:
            case = Case(bench, [length] * batch, page, in_order=in_order, kept=kept)
            chosen = case.plan
            found = []
            for plan in list(plans(case)):
                label = text_of(plan) + " (chosen)" * (plan == chosen)
                try:
                    case.plan = plan
                    case.prepare(listed=False)
                    error = case.check()
                    found.append((bench.alone(case.ours(), rounds=3), label, error))
                except Exception as failure:  # one Plan that fails must not end the sweep
                    print(f"  {label}: {type(failure).__name__} {str(failure)[:300]}")
            print(f"B={batch} S={length} page {page}")
            for seconds, label, error in sorted(found):
                rate = case.bytes / seconds / 1e12
                print(
                    f"  {1e6 * seconds:8.1f} us {rate:.2f} TB/s  {label} error {error:.1e}"
                    f"{wrong(error < 1e-2)}",
                    flush=True,
                )
            del case
            torch.cuda.empty_cache()


def report(rows: Sequence[dict[str, Any]]) -> None:
    """The bars."""
    timed = [r for r in rows if "ratio" in r]
    if not timed:
        return
    mean = geometric_mean([r["ratio"] for r in timed])
    print(f"geometric mean {mean:.3f} (bar 1.0) of {len(timed)}: {verdict(mean >= 1)}")
    small = [r["ours_us"] for r in timed if r["case"] == "B=1 S=2048"]
    if small:
        print(f"B=1 S=2048: {max(small):.1f} us (bar 8): {verdict(max(small) <= 8)}")
    large = [r["tb_per_s"] for r in timed if r["bytes"] > 400e6]
    if large:
        print(f"large cases: least {min(large):.2f} TB/s (bar 4.3): {verdict(min(large) >= 4.3)}")


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(f"{b}x{s}" for b, s in CASES))
    parser.add_argument("--pages", default="16,64")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument(
        "--in-order",
        action="store_true",
        help="pages one after the other: what their random order costs",
    )
    parser.add_argument("--kept", default="bfloat16", help="the cache's dtype in a sweep")
    parser.add_argument("--only", default="", help="table, mixed, eight or beside")
    parser.add_argument("--out", default="", help="where the JSON goes")
    given = parser.parse_args()
    cases = [tuple(map(int, c.split("x"))) for c in given.cases.split(",")]
    pages = [int(p) for p in given.pages.split(",")]
    bench = Bench()
    if given.sweep:
        sweep(bench, cases, pages, given.in_order, dtype_of(given.kept))
        return
    ceilings = bench.ceilings()
    print(bench.device, {k: f"{v:.3e}" for k, v in ceilings.items()}, flush=True)
    rows: list[dict[str, Any]] = []
    if given.only in ("", "table"):
        rows += table(bench, cases, pages, given.in_order)
    if given.only in ("", "mixed"):
        rows += [mixed(bench, page) for page in pages]
    if given.only in ("", "eight"):
        rows += eight_bits(bench, [(1, 2048), (16, 8192), (128, 1024), (128, 4096)], pages[-1])
    if given.only in ("", "beside"):
        rows += [beside(bench, *c) for c in ((1, 2048), (128, 4096))]
    report(rows)
    if given.out:
        Path(given.out).write_text(
            json.dumps({**bench.about(), "ceilings": ceilings, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
    end()
