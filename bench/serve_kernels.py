"""The kernels around the products of a served step, each alone: append, pick and draw, prefill.

    python bench/serve_kernels.py                   all of them, on the GPU
    python bench/serve_kernels.py --only draw       cases whose name has this word
    python bench/serve_kernels.py --build           no GPU: emit, assemble, say registers

Each case is checked against a reference first (NumPy's or float64), then timed as a replayed graph
of launches. Told are microseconds, the bytes (or operations) that must be moved, and what the
ceilings that this run measured make of them. Prompts are taken over caches of bf16, e4m3 and int8,
one beside the other. Heads and vocabularies are those of Llama-3-8B (32/8,
128,256) and Qwen3-14B (40/8, 151,936). A step has 256 rows as the engine's largest has, of which
most only pad. Probabilities are what the launch before has just written, so they lie in the L2
cache where they fit; caches and queries come in sets that pass it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import commit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

import work_lists

from gpu import Bench, sets
from tilegrad.core.dtype import DType, bfloat16, float8_e4m3, float32, int8, int32, uint32
from tilegrad.core.target import H200
from tilegrad.generate.sampling import MIN_P, TOP_P
from tilegrad.generate.sampling_state import FLOATS, GREEDY
from tilegrad.graph import draw_reference
from tilegrad.ir.symbol import symbol
from tilegrad.ir.types import Array
from tilegrad.kernels import draw as kernels
from tilegrad.kernels.paged import prefill
from tilegrad.kernels.paged.append import Rotary, append, heads_each
from tilegrad.kernels.paged.shape import PagedShape
from tilegrad.schedule.grouped import Draws
from tilegrad.targets.ptx.assemble import assemble
from tilegrad.targets.ptx.emit import emit
from tilegrad.tile.build import Body

HEADS = {"8b": (32, 8), "14b": (40, 8)}
VOCABULARIES = {"8b": 128256, "14b": 151936}
WIDTH, PAGE, ROWS, CONTEXT = 128, 16, 256, 2048
COLUMNS = {"top_p": TOP_P, "min_p": MIN_P}
NEAR = 1e-2  # relative errors of bf16 results


class Kernels:
    """Where kernels come from and tensors lie: a GPU, or nowhere."""

    def __init__(self, build: bool) -> None:
        self.bench = None if build else Bench()
        self.device = "cpu" if build else "cuda"
        self.target = H200 if self.bench is None else self.bench.target
        self.limits = {"copy_bytes_per_second": 4.2e12, "bf16_flops": 7e14}
        if self.bench is not None:
            self.limits = self.bench.ceilings()
        self.rows: list[dict[str, Any]] = []

    def kernel(self, body: Body, symbols: dict[str, int] | None = None) -> Any:
        """A Body made ready; without a GPU, what its assembly uses."""
        if self.bench is not None:
            return self.bench.kernel(body, body.name, symbols)
        made = assemble(emit(body, body.name, self.target)[0])
        made.check_library(body.name)
        print(f"  {body.name}: {[r.registers for r in made.reports.values()]} registers")
        return None

    def launch(self, kernel: Any, given: Sequence[torch.Tensor]) -> Callable[[], None]:
        """A launch with these memories."""

        def one() -> None:
            kernel.point([t.data_ptr() for t in given])
            kernel.start(dependent=True)

        return one

    def run(self, *work: Callable[[], None]) -> None:
        """Run once, to the end."""
        assert self.bench is not None
        torch.cuda.synchronize()
        with torch.cuda.stream(self.bench.stream):
            for one in work:
                one()
        self.bench.stream.synchronize()

    def tell(
        self,
        label: str,
        work: Sequence[Callable[[], None]],
        error: float,
        bytes_: int = 0,
        flops: float = 0.0,
    ) -> None:
        """Time launches and print the row."""
        if self.bench is None:
            return
        seconds = self.bench.alone(work)
        floor = bytes_ / self.limits["copy_bytes_per_second"] + flops / self.limits["bf16_flops"]
        row = {
            "case": label,
            "us": 1e6 * seconds,
            "floor_us": 1e6 * floor,
            "bytes": bytes_,
            "flops": flops,
            "error": error,
        }
        self.rows.append(row)
        print(
            f"{label:58} {row['us']:8.1f} us  floor {row['floor_us']:7.1f}"
            f" ({row['floor_us'] / row['us']:4.0%})  {bytes_ / 1e6:8.1f} MB"
            f"  error {error:.1e}{'' if error < NEAR else ' WRONG'}",
            flush=True,
        )

    def normal(self, *shape: int) -> torch.Tensor:
        """Random bf16."""
        return torch.randn(*shape, device=self.device).to(torch.bfloat16)

    def kept(self, cache: DType, *shape: int) -> torch.Tensor:
        """Random numbers as a cache holds them: of 8 bits 16 times as large."""
        if cache is bfloat16:
            return self.normal(*shape)
        wide = self.normal(*shape) * 16
        return wide.to(torch.float8_e4m3fn) if cache is float8_e4m3 else wide.round().to(torch.int8)

    def whole(self, values: Any) -> torch.Tensor:
        """int32."""
        return torch.as_tensor(np.asarray(values, np.int32), device=self.device)


# ---- a step over a paged cache ------------------------------------------------------------------


class Step:
    """Requests with new tokens: sizes, table, lengths, starts, the cache in several sets."""

    def __init__(
        self,
        k: Kernels,
        model: str,
        lengths: Sequence[int],
        queries: Sequence[int],
        count: int = 0,
        cache: DType = bfloat16,
    ) -> None:
        self.k, self.lengths, self.queries = k, list(lengths), list(queries)
        heads, key_heads = HEADS[model]
        tokens, most = sum(queries), CONTEXT // PAGE
        pages = sum(-(-n // PAGE) for n in lengths) + 1
        self.x = PagedShape(
            heads,
            key_heads,
            WIDTH,
            WIDTH,
            PAGE,
            tokens,
            ROWS,
            pages,
            most,
            WIDTH**-0.5,
            cache=cache,
        )
        self.symbols = {"tokens": tokens, "pages": pages}
        named = {name: symbol(name, 1, high) for name, high in (("tokens", 8192), ("pages", 32768))}
        self.any = replace(self.x, **named)  # one program for all cases
        table, at = np.zeros((ROWS, most), np.int32), 1
        order = 1 + np.random.default_rng(1).permutation(pages - 1)
        for request, length in enumerate(lengths):
            own = -(-length // PAGE)
            table[request, :own] = order[at - 1 : at - 1 + own]
            at += own
        sizes, starts = np.zeros(ROWS, np.int32), np.full(ROWS + 1, tokens, np.int32)
        sizes[: len(lengths)] = lengths
        starts[: len(queries) + 1] = np.cumsum([0, *queries])
        self.table, self.sizes, self.starts = map(k.whole, (table, sizes, starts))
        self.host = (table, sizes, starts)
        row = 2 * WIDTH * (2 * heads + 4 * key_heads)
        self.count = count or (sets(tokens * row) if k.bench else 1)
        self.q = [k.normal(tokens, heads, WIDTH) for _ in range(self.count)]
        lead = (pages, key_heads, PAGE, WIDTH)
        self.cache = [[k.kept(cache, *lead) for _ in "kv"] for _ in range(self.count)]
        each = (1 + torch.arange(key_heads, device=k.device) / key_heads) / 24
        self.scales = torch.stack([each, each.flip(0)]) if self.x.scaled else None


def appends(k: Kernels) -> None:
    """Rotated queries and keys, keys and values into pages."""
    cases = {8: [1] * 8, 256: [1] * 256, 2048: [1024] * 2, 8192: [1024] * 8}
    for model, (heads, key_heads) in HEADS.items():
        for tokens, queries in cases.items():
            lengths = [700] * len(queries) if tokens <= 256 else queries
            step = Step(k, model, lengths, queries)
            fresh = [[k.normal(tokens, key_heads, WIDTH) for _ in "kv"] for _ in range(step.count)]
            half = torch.arange(WIDTH // 2, device=k.device) / (WIDTH // 2)
            frequencies = (500000.0**-half).float()
            turned = [torch.zeros_like(q) for q in step.q]
            chosen = heads_each(step.x, k.target)
            for each in (1, 2, key_heads):
                body = append(step.any, Rotary(WIDTH), each=each)
                kernel = k.kernel(body, step.symbols)
                if kernel is None:
                    continue
                work = []
                for i in range(step.count):
                    place = (step.table, step.sizes, step.starts, *step.cache[i], turned[i])
                    work.append(k.launch(kernel, (step.q[i], *fresh[i], frequencies, *place)))
                k.run(work[0])
                error = append_error(step, fresh[0], frequencies, turned[0])
                moved = 2 * tokens * 2 * WIDTH * (heads + 2 * key_heads)
                mark = " (chosen)" * (each == chosen)
                label = f"append {model} {tokens} tokens, {each} key heads a program{mark}"
                k.tell(label, work, error, moved)


def append_error(
    step: Step, fresh: Sequence[torch.Tensor], frequencies: torch.Tensor, turned: torch.Tensor
) -> float:
    """Of turned queries and of what lies in the cache afterwards."""
    table, sizes, starts = (torch.as_tensor(a, device=turned.device).long() for a in step.host)
    tokens = torch.arange(len(turned), device=turned.device)
    request = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
    place = sizes[request] - starts[request + 1] + tokens
    page, at = table[request, place // PAGE], place % PAGE
    angle = (place[:, None].float() * frequencies).double()[:, None]
    cosine, sine = angle.cos(), angle.sin()
    keys, values = (m[page, :, at] for m in step.cache[0])
    worst = 0.0
    for given, found in ((step.q[0], turned), (fresh[0], keys)):
        a, b = given.double().chunk(2, -1)
        wanted = torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)
        apart = (found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        worst = max(worst, float(apart.max()))
    return worst if torch.equal(values, fresh[1]) else float("inf")


CACHES = (bfloat16, float8_e4m3, int8)
PREFILLS = {
    "8 x 1,024": ([1024] * 8, [1024] * 8),
    "1 x 2,000": ([2000], [2000]),
    "mixed chunk": (
        [1900, 640, 512, 1024, 300, *[900] * 120],
        [1500, 640, 512, 1024, 300, *[1] * 120],
    ),
}


def prefills(k: Kernels) -> None:
    """The list of tiles, and attention over them."""
    for model, (heads, _) in HEADS.items():
        for (name, (lengths, queries)), cache in product(PREFILLS.items(), CACHES):
            step = Step(k, model, lengths, queries, 2, cache)
            x, plan = step.x, prefill.choose(step.any, k.target)
            assert plan is not None
            listing = k.kernel(
                prefill.tile_list(step.any, plan, prefill.FEW_NEW_TOKENS), step.symbols
            )
            kernel = k.kernel(prefill.prefill(step.any, plan), step.symbols)
            if kernel is None:
                continue
            wanted = work_lists.tile_list(x, plan.tile, *step.host[1:], prefill.FEW_NEW_TOKENS)
            tiles = k.whole(np.full_like(wanted, -7))
            listed = k.launch(listing, (step.sizes, step.starts, tiles))
            k.run(listed)
            count = int(wanted[-1, 0])
            found = tiles.cpu().numpy()
            same = found[-1, 0] == count and (found[:count, :5] == wanted[:count, :5]).all()
            label = f"tiles {model} {name}, {cache.name} cache"
            k.tell(label, [listed] * 8, 0.0 if same else float("inf"))
            out = [torch.full_like(q, torch.nan) for q in step.q]
            lse = torch.zeros(1, heads, x.tokens, device="cuda")
            scales = [] if step.scales is None else [step.scales]
            places = (*scales, step.table, tiles)
            work = [
                k.launch(kernel, (step.q[i], *step.cache[i], *places, out[i], lse))
                for i in range(step.count)
            ]
            k.run(listed, work[0])
            seen = [n * (n + 1) / 2 + n * (s - n) for s, n in zip(lengths, queries) if n > 1]
            label = f"prefill {model} {name}, {cache.name} cache"
            k.tell(label, work, prefill_error(step, out[0]), flops=4 * WIDTH * heads * sum(seen))


def prefill_error(step: Step, out: torch.Tensor) -> float:
    """Of every request's last 64 queries, in float64."""
    x, worst, (table, _, starts) = step.x, 0.0, step.host
    for request, (length, queries) in enumerate(zip(step.lengths, step.queries)):
        if queries < prefill.FEW_NEW_TOKENS:
            continue
        pages = torch.as_tensor(table[request, : -(-length // PAGE)], device="cuda").long()
        keys, values = (
            m.float()[pages].transpose(0, 1).reshape(x.key_heads, -1, WIDTH)[:, :length].double()
            for m in step.cache[0]
        )
        if step.scales is not None:
            keys, values = (m * s[:, None, None] for m, s in zip((keys, values), step.scales))
        few = min(64, queries)
        stop = int(starts[request]) + queries
        q = step.q[0][stop - few : stop].double().reshape(few, x.key_heads, x.group, WIDTH)
        scores = torch.einsum("qhgd,hkd->hgqk", q, keys) * x.scale
        last = torch.arange(length - few, length, device="cuda")[:, None]
        scores = scores.masked_fill(torch.arange(length, device="cuda") > last, -torch.inf)
        wanted = torch.einsum("hgqk,hkd->qhgd", scores.softmax(-1), values)
        wanted = wanted.reshape(few, x.heads, WIDTH)
        found = out[stop - few : stop].double()
        worst = max(worst, float((found - wanted).norm() / wanted.norm()))
    return worst


# ---- draws --------------------------------------------------------------------------------------

SETTINGS = {  # sharpness is in the probabilities already; top_k, top_p
    "no limits": (0, 1.0),
    "greedy": (1, 1.0),
    "top-k 50, top-p 0.9": (50, 0.9),
}


def draws(k: Kernels) -> None:
    """What a step does with its probabilities: `pick`, then `draw`."""
    for model, columns in VOCABULARIES.items():
        for rows in (1, 8, 64, 256):
            logits = torch.randn(rows, columns, device=k.device) * 2.5
            p = (logits - logits.amax(-1, keepdim=True)).exp()
            several = parts_of(k, rows, columns)[: None if model == "14b" else 1]
            ready = [Draw(k, rows, columns, parts) for parts in several]
            if len(several) > 1:  # with as many threads again
                ready.append(Draw(k, rows, columns, several[0], 2))
            if k.bench is None:
                continue
            for padding in (0, rows // 2) if rows > 1 else (0,):
                for name, (top_k, top_p) in SETTINGS.items():
                    for number, one in enumerate(ready[: None if top_k == 0 else 1]):
                        label = f"draw {model} {rows} rows, {padding} padding, {name}"
                        label += f", {one.parts} parts" + " (chosen)" * (not number)
                        label += " of 32 warps" * (one.more > 1)
                        one.measure(label, p, padding, top_k, top_p)


def parts_of(k: Kernels, rows: int, columns: int) -> list[int]:
    """The parts that are chosen, and others beside them."""
    chosen = Draws().parts(rows, columns, k.target)
    return list(dict.fromkeys([chosen, 1, *([4] if rows >= 64 else [])]))


class Draw:
    """Both kernels for one size."""

    def __init__(self, k: Kernels, rows: int, columns: int, parts: int, more: int = 1) -> None:
        self.k, self.rows, self.columns, self.parts, self.more = k, rows, columns, parts, more
        slots = rows + 1
        self.types = [
            Array((rows, columns), float32),
            Array((slots, len(FLOATS)), float32),
            Array((slots,), int32),
            Array((slots, 2), uint32),
            *[Array((rows,), int32)] * 2,
        ]
        family = Draws()

        def made(definition: Any, types: Sequence[Array], **static: Any) -> Body:
            plan = family.plan(definition, columns)
            if definition is kernels.pick:
                plan = plan.with_(warps=plan.warps * more)
            static |= {"block": family.block(definition, columns), **COLUMNS}
            bound = definition.bind(types, static, plan)
            return definition.callee(bound, plan, k.target).launches[0][0]

        pick = made(kernels.pick, self.types, parts=parts, skip=False)
        p, floats, _, seeds, *at = self.types
        self.results = [q.type for q in pick.parameters[len(self.types) :]]
        given = [Array(r.shape, r.dtype) for r in self.results]
        draw = made(kernels.draw, [p, *given, floats, seeds, *at])
        self.kernels = [k.kernel(pick), k.kernel(draw)]

    def measure(self, label: str, p: torch.Tensor, padding: int, top_k: int, top_p: float) -> None:
        """Rows with the same limits; the last ones belong to nobody."""
        k, rows = self.k, self.rows
        floats = np.tile(np.float32([GREEDY, 1.0, 0.0, 1.0, 0.0, 0.0]), (rows + 1, 1))
        floats[:rows, TOP_P] = top_p
        limits = np.full(rows + 1, top_k, np.int32)
        limits[rows] = -1
        seeds = np.random.default_rng(3).integers(0, 1 << 32, (rows + 1, 2), np.uint32)
        slots, positions = np.arange(rows, dtype=np.int32), np.arange(rows, dtype=np.int32) + 9
        slots[rows - padding :] = rows
        host = (floats, limits, seeds.view(np.int32), slots, positions)
        f, limit, seed, slot, position = (torch.as_tensor(a, device=k.device) for a in host)
        kinds = {float32: torch.float32, int32: torch.int32}
        between = [
            torch.full([int(s) for s in r.shape], -7, device=k.device, dtype=kinds[r.dtype])
            for r in self.results
        ]
        out = k.whole(np.full(rows, -7))
        pick = k.launch(self.kernels[0], (p, f, limit, seed, slot, position, *between))
        draw = k.launch(self.kernels[1], (p, *between, f, seed, slot, position, out))
        k.run(pick, draw)
        real = rows - padding
        some = sorted({0, real // 2, real - 1})
        wanted = draw_reference.draw(
            [p[some].cpu().numpy(), floats, limits, seeds, slots[some], positions[some]], COLUMNS
        )
        right = (out.cpu().numpy()[some] == wanted).all() and not out[real:].any()
        moved = 4 * real * self.columns * (2 if top_k > 1 or top_p < 1 else 1)
        error = 0.0 if right else float("inf")
        for name, work in (("pick", [pick]), ("both", [pick, draw])):
            if name == "both":

                def two() -> None:
                    pick()
                    draw()

                work = [two]
            k.tell(f"{label}: {name}", work * 8, error, moved)


# ---- all ----------------------------------------------------------------------------------------

PARTS = {"append": appends, "prefill": prefills, "draw": draws}


def chosen(only: str) -> Iterator[Callable[[Kernels], None]]:
    """What is asked for."""
    return (run for name, run in PARTS.items() if not only or only in name)


def main() -> None:
    """Run, print, write the rows where asked; ends with 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help=" or ".join(PARTS))
    parser.add_argument("--build", action="store_true", help="no GPU: emit and assemble")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    torch.manual_seed(0)
    k = Kernels(options.build)
    print({name: f"{value:.3g}" for name, value in k.limits.items()}, flush=True)
    for run in chosen(options.only):
        run(k)
    wrong = [row["case"] for row in k.rows if not row["error"] < NEAR]
    print(f"{len(k.rows)} cases, {len(wrong)} wrong {wrong}")
    if options.out is not None:
        about = {} if k.bench is None else k.bench.about()
        found = {**about, "commit": commit(), "limits": k.limits, "cases": k.rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
