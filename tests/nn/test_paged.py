"""A paged cache on Tensors against plain attention over contiguous keys, on both devices.

A `Run` keeps every request's keys and values in rows of NumPy and what the cache must hold; its
pages are in random order, and pages that no request has hold nan. A step is compiled once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_cuda import cuda  # noqa: F401  (a fixture)

import tilegrad as tg
from tilegrad.compiler import compile as compiler
from tilegrad.compiler.compile import schedule_for
from tilegrad.core.errors import DTypeError, ShapeError, StateError, UserError
from tilegrad.core.target import H200
from tilegrad.ir.symbol import symbol
from tilegrad.nn import PagedCache
from tilegrad.schedule.schedule import Launch
from tilegrad.targets.ptx import driver

TOKENS, REQUESTS = symbol("tokens", 1, 48), symbol("requests", 1, 6)
DYNAMIC = {
    **{n: {0: TOKENS} for n in "qkv"},
    "table": {0: REQUESTS},
    "lengths": {0: REQUESTS},
    "starts": {0: REQUESTS + 1},
}
STEPS = [  # (request, new tokens) of each step: chunks of prompts, decode, both at once
    [(0, 20), (1, 7)],
    [(0, 20), (1, 1), (2, 3)],
    [(2, 1), (1, 1), (0, 1), (3, 33)],
    [(3, 1), (0, 1)],
    [(1, 5), (3, 1), (2, 2), (0, 1)],
]
FREQUENCIES = (10000.0 ** (-np.arange(8) / 8)).astype(np.float32)


@pytest.fixture
def small_gpu(cuda, monkeypatch) -> Iterator[Any]:  # noqa: F811
    """The fake device with few cores: a program each is interpreted or simulated."""
    monkeypatch.setattr(driver.Device, "target", replace(H200, cores=4))
    yield cuda


def write(tensor: Any, data: Any) -> None:
    """Into the very Buffer of a Tensor."""
    buffer = tensor.buffer()
    if buffer.device == "cpu":
        buffer.array(data.shape, data.dtype)[...] = data
    else:
        driver.open_device(0).write(buffer, data)


class Run:
    """Steps on a cache, and what they must give."""

    def __init__(
        self,
        device: str,
        dtype: Any,
        page: int = 16,
        layers: int = 1,
        heads: int = 4,
        key_heads: int = 2,
        width: int = 32,
        **options: Any,
    ) -> None:
        self.draw = np.random.default_rng(3)
        self.device, self.dtype, self.page = device, dtype, page
        self.sizes, self.layers, self.options = (heads, key_heads, width), layers, options
        pages = 4 * 64 // page
        self.most = -(-64 // page)
        self.cache = PagedCache(
            layers,
            pages,
            page,
            key_heads,
            width,
            requests=6,
            most_pages=self.most,
            dtype=dtype,
            device=device,
        )
        for t in (*self.cache.keys, *self.cache.values):
            write(t, np.full(t.shape, np.nan, np.float32).astype(dtype.numpy))
        self.free = list(self.draw.permutation(pages))
        self.tables: dict[int, list[int]] = {}
        self.rows: dict[int, list[list[Any]]] = {}  # request -> layer -> (keys, values)
        self.step = tg.jit(self.body, dynamic=DYNAMIC)

    def body(self, cache, q, k, v, table, lengths, starts, frequencies):
        found = []
        for layer in range(self.layers):
            turned = cache.append(
                layer, q[layer], k[layer], v[layer], table, lengths, starts, frequencies=frequencies
            )
            found.append(cache.attend(layer, turned, table, lengths, starts, **self.options))
        return found

    def numbers(self, *shape: int) -> Any:
        return self.draw.standard_normal(shape).astype(np.float32).astype(self.dtype.numpy)

    def sent(self, data: Any) -> Any:
        return tg.tensor(data, device=self.device)

    def take(self, batch: list[tuple[int, int]], extra: int = 0) -> tuple[list[Any], list[Any]]:
        """Run a step; (found, wanted) for each layer."""
        heads, key_heads, width = self.sizes
        counts = [n for _, n in batch]
        total = sum(counts) + extra
        q, k, v = (
            [self.numbers(total, h, width) for _ in range(self.layers)]
            for h in (heads, key_heads, key_heads)
        )
        wanted, lengths, starts = [np.zeros(x.shape) for x in q], [], [0]
        for request, count in batch:
            first = starts[-1]
            rows = self.rows.setdefault(request, [[[], []] for _ in range(self.layers)])
            for t in range(first, first + count):
                for layer in range(self.layers):
                    wanted[layer][t] = self.token(rows[layer], *(x[layer][t] for x in (q, k, v)))
            lengths.append(len(rows[0][0]))
            starts.append(first + count)
            pages = self.tables.setdefault(request, [])
            while len(pages) * self.page < lengths[-1]:
                pages.append(self.free.pop())
        table = np.full((len(batch), self.most), 10**6, np.int32)
        for i, (request, _) in enumerate(batch):
            table[i, : len(self.tables[request])] = self.tables[request]
        found = self.step(
            self.cache,
            *([self.sent(x) for x in several] for several in (q, k, v)),
            self.sent(table),
            self.sent(np.array(lengths, np.int32)),
            self.sent(np.array(starts, np.int32)),
            self.sent(FREQUENCIES),
        )
        return [f.numpy().astype(np.float64) for f in found], wanted

    def token(self, rows: list[list[Any]], q: Any, k: Any, v: Any) -> Any:
        """Plain attention of one more token, in float64 over what the cache keeps."""
        place = len(rows[0])
        rows[0].append(self.turned(k, place).astype(self.dtype.numpy).astype(np.float64))
        rows[1].append(v.astype(np.float64))
        q = self.turned(q, place).astype(self.dtype.numpy).astype(np.float64)
        window = self.options.get("window", 0)
        keys, values = (np.array(r[-window:] if window else r) for r in rows)
        group = q.shape[0] // keys.shape[1]
        s = np.einsum("hd,jhd->hj", q, keys.repeat(group, 1)) / np.sqrt(q.shape[1])
        cap = self.options.get("softcap", 0.0)
        s = cap * np.tanh(s / cap) if cap else s
        p = np.exp(s - s.max(1, keepdims=True))
        return np.einsum("hj,jhd->hd", p / p.sum(1, keepdims=True), values.repeat(group, 1))

    def turned(self, x: Any, place: int) -> Any:
        """Heads of a token turned by its place, their first elements in pairs of halves."""
        x, half = x.astype(np.float32), len(FREQUENCIES)
        cosine, sine = np.cos(place * FREQUENCIES), np.sin(place * FREQUENCIES)
        a, b = x[:, :half], x[:, half : 2 * half]
        return np.concatenate([a * cosine - b * sine, b * cosine + a * sine, x[:, 2 * half :]], 1)

    def agree(self, batch: list[tuple[int, int]], extra: int = 0) -> None:
        count, most = sum(n for _, n in batch), 1e-4 if self.dtype is tg.float32 else 2e-2
        for found, wanted in zip(*self.take(batch, extra)):
            np.testing.assert_allclose(found[:count], wanted[:count], atol=most, rtol=most)

    def pointers(self) -> list[int]:
        return [t.buffer().pointer for t in (*self.cache.keys, *self.cache.values)]


CASES = [
    {"page": 16},
    {"page": 64, "window": 9},
    {"page": 16, "softcap": 2.0, "heads": 6, "key_heads": 1},
    {"page": 32, "heads": 3, "key_heads": 3, "width": 40, "window": 30},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("dtype", [tg.float32, tg.bfloat16], ids=str)
def test_prefill_and_decode_on_a_cpu(options: dict[str, Any], dtype: Any) -> None:
    run = Run("cpu", dtype, layers=2, **options)
    run.agree(STEPS[0])
    before, compiled = run.pointers(), dict(compiler.counters)
    for batch in STEPS[1:]:
        run.agree(batch, extra=len(batch) % 2)
    assert run.pointers() == before and run.step.traces == 1
    assert compiler.counters == compiled


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", CASES[:2], ids=str)
def test_prefill_and_decode_on_a_gpu(small_gpu, request, options: dict[str, Any]) -> None:
    """One compilation, and for L layers 2 L + 2 launches a step: append and attend in each, the
    work list, and the zeros to count in."""
    simulated = "Simulated" in request.node.name
    layers, steps = (1, [[(0, 3), (1, 20)], [(1, 1), (0, 1)]]) if simulated else (2, STEPS)
    run = Run("cuda", tg.bfloat16, layers=layers, **{"width": 64, **options})
    run.agree(steps[0])
    before, compiled = run.pointers(), dict(compiler.counters)
    modules, launches = (small_gpu.count(n) for n in ("cuModuleLoadDataEx", "cuLaunchKernelEx"))
    for batch in steps[1:]:
        run.agree(batch, extra=1)  # the last token belongs to nobody
    assert run.pointers() == before and run.step.traces == 1 and compiler.counters == compiled
    assert small_gpu.count("cuModuleLoadDataEx") == modules
    launched = small_gpu.count("cuLaunchKernelEx") - launches
    assert launched == (2 * layers + 2) * (len(steps) - 1)


@pytest.mark.sampled(2, also=("Interpreted-2",))
@pytest.mark.parametrize("new", (1, 2))
def test_decode_on_a_gpu_with_many_cores(small_gpu, monkeypatch, request, new: int) -> None:
    """Every request's keys are cut. With one new token a request the program with the last part
    combines them; with more another launch of each layer does, and nothing counts."""
    if "Simulated" in request.node.name:
        pytest.skip("too many programs")
    monkeypatch.setattr(driver.Device, "target", replace(H200, cores=64))
    run = Run("cuda", tg.bfloat16, layers=2, width=64)
    tokens = REQUESTS if new == 1 else symbol("tokens", 1, 12)
    sizes = {
        **{n: {0: tokens} for n in ("q", "k", "v")},
        **{n: DYNAMIC[n] for n in ("table", "lengths", "starts")},
    }
    run.step = tg.jit(run.body, dynamic=sizes)
    run.agree([(0, new), (1, new)])
    launches = small_gpu.count("cuLaunchKernelEx")
    batches = [[0, 1, 2], [2, 0, 3, 1], [3]] if new == 1 else [[2, 0, 1]]
    for batch in batches:
        run.agree([(r, new) for r in batch])
    assert run.step.traces == 1
    each = 2 * run.layers + 2 if new == 1 else 3 * run.layers + 1
    assert small_gpu.count("cuLaunchKernelEx") - launches == len(batches) * each
    if new == 1:
        graphs = small_gpu.count("cuGraphLaunch")
        for _ in range(4):  # a batch that comes again is replayed
            run.agree([(3, 1), (0, 1)])
        assert small_gpu.count("cuGraphLaunch") > graphs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cores, each", ((64, 1), (8, 2)))
def test_steps_of_single_tokens_on_a_gpu(
    small_gpu, monkeypatch, request, cores: int, each: int
) -> None:
    """Few requests with a token at most each are one launch a layer; where the machine has too few
    cores for that, the two that there are, the work list and zeros."""
    simulated = "Simulated" in request.node.name
    monkeypatch.setattr(driver.Device, "target", replace(H200, cores=cores))
    run = Run("cuda", tg.bfloat16, layers=1 if simulated else 2, width=64, key_heads=1)

    def body(cache, q, k, v, table, lengths, starts, frequencies):
        return [
            cache.step(
                layer,
                q[layer],
                k[layer],
                v[layer],
                table,
                lengths,
                starts,
                frequencies=frequencies,
                single=True,
            )
            for layer in range(run.layers)
        ]

    sizes = {n: {0: REQUESTS} for n in ("q", "k", "v", "table", "lengths")}
    run.step = tg.jit(body, dynamic={**sizes, "starts": DYNAMIC["starts"]})
    run.agree([(0, 1), (1, 1)])
    before, launches = run.pointers(), small_gpu.count("cuLaunchKernelEx")
    batches = [[(1, 1)]] if simulated else [[(2, 1), (3, 0), (0, 1)], [(1, 1)]]
    for batch in batches:
        run.agree(batch, extra=sum(not n for _, n in batch))  # as many tokens as requests
    launched = small_gpu.count("cuLaunchKernelEx") - launches
    assert launched == len(batches) * (run.layers * each + 2 * (each - 1))
    for _ in range(0 if simulated else 17):  # into the next page
        run.agree([(1, 1), (0, 1)])
    assert run.pointers() == before and run.step.traces == 1


def test_steps_of_single_tokens_on_a_cpu() -> None:
    """The same function, by the two kernels."""
    run = Run("cpu", tg.float32, layers=1)

    def body(cache, q, k, v, table, lengths, starts, frequencies):
        return [
            cache.step(
                0, q[0], k[0], v[0], table, lengths, starts, frequencies=frequencies, single=True
            )
        ]

    run.step = tg.jit(body, dynamic=DYNAMIC)
    for batch in ([(0, 1), (1, 1)], [(1, 1), (0, 1), (2, 1)], [(2, 1)]):
        run.agree(batch)  # with the reference, or it raises
    assert run.step.traces == 1


def test_a_cache_of_8_bits() -> None:
    run = Run("cpu", tg.float32, layers=1)
    data = run.numbers(6, 2, 32), run.numbers(6, 2, 32)
    cache = PagedCache(
        1, 4, 16, 2, 32, requests=1, most_pages=2, dtype=tg.float8_e4m3, scales=(0.5, 0.25)
    )

    @tg.jit
    def step(cache, q, k, v, table, lengths, starts):
        turned = cache.append(0, q, k, v, table, lengths, starts)
        return turned, cache.attend(0, turned, table, lengths, starts)

    q = run.numbers(6, 4, 32)
    places = [tg.tensor(np.array(x, np.int32)) for x in ([[3, 1]], [6], [0, 6])]
    turned, out = step(cache, tg.tensor(q), *(tg.tensor(d) for d in data), *places)
    assert np.array_equal(turned.numpy(), q)  # no frequencies
    kept = [
        m.numpy()[3].swapaxes(0, 1)[:6].astype(np.float32) * s
        for m, s in ((cache.keys[0], 0.5), (cache.values[0], 0.25))
    ]
    for near, real in zip(kept, data):
        np.testing.assert_allclose(near, real, rtol=2**-4, atol=2**-8)
    wanted = tg.attention(*(tg.tensor(x) for x in (q, *kept)), causal=True, layout="thd")
    np.testing.assert_allclose(out.numpy(), wanted.numpy(), atol=1e-4)


# ---- state --------------------------------------------------------------------------------------


def started() -> Run:
    run = Run("cpu", tg.float32)
    run.agree(STEPS[0])
    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "hold",
    [
        lambda cache: cache.keys[0].numpy(),
        lambda cache: cache.values[0].detach(),
        lambda cache: cache.keys[0].buffer(),
        lambda cache: cache.keys[0].assign(np.zeros(cache.keys[0].shape, np.float32)),
    ],
)
def test_a_cache_that_something_else_holds_is_not_copied(hold: Any) -> None:
    run = started()
    held = hold(run.cache)
    with pytest.raises(StateError, match=r"the state (keys|values)\.0 would be copied"):
        run.take(STEPS[1])
    del held


def test_a_held_cache_goes_on_when_it_is_let_go() -> None:
    run = started()
    held = run.cache.keys[0].numpy()
    before = held.copy()
    rows, tables, free = run.rows, run.tables, run.free
    run.rows, run.tables, run.free = {}, {}, list(free)
    with pytest.raises(StateError, match="would be copied"):
        run.take(STEPS[0])
    assert np.array_equal(held, before, equal_nan=True)  # nothing was written
    del held
    run.rows, run.tables, run.free = rows, tables, free
    run.agree(STEPS[1])


def step_with(after: Any) -> Any:
    """A step of one request that ends in something else."""

    def step(cache, q, k, v, table, lengths, starts):
        old = cache.keys[0].detach()
        turned = cache.append(0, q, k, v, table, lengths, starts)
        return after(cache, old, cache.attend(0, turned, table, lengths, starts))

    cache = PagedCache(1, 4, 16, 2, 32, requests=1, most_pages=2, dtype=tg.float32)
    places = [tg.tensor(np.array(x, np.int32)) for x in ([[3, 1]], [6], [0, 6])]
    return tg.jit(step), [cache, *(tg.ones(6, h, 32) for h in (4, 2, 2)), *places]


def test_what_the_cache_was_cannot_be_read_afterwards() -> None:
    step, arguments = step_with(lambda cache, old, out: (out, old.sum()))
    assert float(step(*arguments)[1]) == 0.0  # it is read before it is written
    assert float(step(*arguments)[1]) == 6 * 2 * 32
    step, arguments = step_with(lambda cache, old, out: old * out.sum())
    with pytest.raises(StateError, match="a donated state is read after it is updated"):
        step(*arguments)
    step, arguments = step_with(lambda cache, old, out: (old, out))
    with pytest.raises(StateError, match=r"keys\.0 would be copied: the function gives back"):
        step(*arguments)


def test_a_cache_is_appended_to_by_jitted_functions_only() -> None:
    _, arguments = step_with(lambda cache, old, out: out)
    with pytest.raises(StateError, match="within a jitted function"):
        arguments[0].append(0, *arguments[1:])
    with pytest.raises(StateError, match="within a jitted function"):
        arguments[0].step(0, *arguments[1:])


def test_functions_leave_their_arguments() -> None:
    """Without donation the results are new arrays, lazily, as of any function."""
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((6, h, 32)).astype(np.float32) for h in (4, 2, 2))
    keys, values = (
        tg.tensor(draw.standard_normal((4, 2, 16, 32)).astype(np.float32)) for _ in range(2)
    )
    before = keys.numpy().copy(), values.numpy().copy()
    places = [tg.tensor(np.array(x, np.int32)) for x in ([[3, 1]], [18], [0, 6])]
    turned, *after = tg.paged_append(q, k, v, keys, values, *places)
    assert np.array_equal(turned.numpy(), q)
    for was, now, old, new in zip((keys, values), after, before, (k, v)):
        assert np.array_equal(was.numpy(), old)
        old[3, :, 12:], old[1, :, :2] = new[:4].swapaxes(0, 1), new[4:].swapaxes(0, 1)
        if was is values:  # the page is new, and what lay in it may not be finite
            old[1, :, 2:] = 0
        assert np.array_equal(now.numpy(), old)
    out = tg.paged_attention(turned, *after, *places, scale=0.1)
    rows = [np.concatenate([m.numpy()[3], m.numpy()[1]], 1)[:, :18] for m in after]
    wanted = tg.attention(q.swapaxes(0, 1), *rows, scale=0.1, causal="bottom_right", layout="htd")
    np.testing.assert_allclose(out.numpy().swapaxes(0, 1), wanted.numpy(), atol=1e-5)


def test_tables_and_lengths_may_be_state() -> None:
    """Requests are rows of the cache's own tables; lengths grow on the device."""

    def step(cache, rows, q, k, v, counts, starts):
        lengths = cache.lengths[rows] + counts
        cache.lengths[rows] = lengths
        table = cache.table[rows]
        turned = cache.append(0, q, k, v, table, lengths, starts)
        return cache.attend(0, turned, table, lengths, starts)

    sizes = {
        "rows": {0: REQUESTS},
        "counts": {0: REQUESTS},
        "starts": {0: REQUESTS + 1},
        **{n: {0: TOKENS} for n in "qkv"},
    }
    run = tg.jit(step, dynamic=sizes)
    cache = PagedCache(1, 12, 16, 1, 32, requests=6, most_pages=2, dtype=tg.float32)
    cache.table.assign(np.arange(12, dtype=np.int32)[::-1].reshape(6, 2))
    draw, rows = np.random.default_rng(1), {r: [[], []] for r in range(6)}
    for batch in ([(4, 9)], [(1, 3), (4, 1)], [(4, 12), (1, 1), (5, 2)]):
        counts = np.array([n for _, n in batch], np.int32)
        total = int(counts.sum())
        q, k, v = (draw.standard_normal((total, h, 32)).astype(np.float32) for h in (2, 1, 1))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        numbers = np.array([r for r, _ in batch], np.int32)
        out = run(cache, tg.tensor(numbers), *map(tg.tensor, (q, k, v, counts, starts))).numpy()
        for (request, _), first, last in zip(batch, starts, starts[1:]):
            for kept, new in zip(rows[request], (k, v)):
                kept.extend(new[first:last])
            wanted = tg.attention(
                q[first:last],
                *(np.array(m) for m in rows[request]),
                causal="bottom_right",
                layout="thd",
            )
            np.testing.assert_allclose(out[first:last], wanted.numpy(), atol=1e-5)
    assert run.traces == 1 and cache.lengths.tolist() == [0, 4, 0, 0, 22, 2]


# ---- what is refused ----------------------------------------------------------------------------


def test_errors_say_what_does_not_fit() -> None:
    q, k = np.zeros((6, 4, 32), np.float32), np.zeros((6, 2, 32), np.float32)
    keys = np.zeros((4, 2, 16, 32), np.float32)
    table, lengths, starts = (np.array(x, np.int32) for x in ([[3, 1]], [6], [0, 6]))
    rest = (table, lengths, starts)
    for call, error, match in [
        (lambda: tg.paged_attention(q[0], keys, keys, *rest), ShapeError, "q does not fit"),
        (lambda: tg.paged_attention(q[:, :3], keys, keys, *rest), ShapeError, "do not divide"),
        (lambda: tg.paged_attention(q[..., :16], keys, keys, *rest), ShapeError, "keys does not"),
        (
            lambda: tg.paged_attention(q, keys, keys, table, lengths, starts[:1]),
            ShapeError,
            "query_starts does not fit",
        ),
        (
            lambda: tg.paged_attention(q, keys, keys, table, lengths.astype(np.int64), starts),
            DTypeError,
            "lengths has another dtype",
        ),
        (
            lambda: tg.paged_attention(q, keys, keys, *rest, scales=[1.0, 1.0]),
            UserError,
            "scales belong to a cache of 8 bits",
        ),
        (lambda: tg.paged_attention(q[0, 0, 0], keys, keys, *rest), ShapeError, "q does not fit"),
        (
            lambda: tg.paged_attention(q, keys[:, :0], keys[:, :0], *rest),
            ShapeError,
            "do not divide",
        ),
        (
            lambda: tg.paged_attention(q.astype(np.int32), keys, keys, *rest),
            DTypeError,
            "q has another dtype",
        ),
        (
            lambda: tg.paged_attention(q, keys, keys, table, lengths, starts / 1.0),
            DTypeError,
            "query_starts has another dtype",
        ),
        (lambda: tg.paged_attention(q, keys, keys, *rest, window=-1), UserError, "window is below"),
        (
            lambda: tg.paged_attention(q, keys, keys, *rest, softcap=np.nan),
            UserError,
            "softcap is below",
        ),
        (
            lambda: tg.paged_attention(q, keys, keys, *rest, sinks=np.ones(3)),
            ShapeError,
            "sinks does not fit",
        ),
        (lambda: tg.paged_append(q, k[:5], k, keys, keys, *rest), ShapeError, "k does not fit"),
        (
            lambda: tg.paged_append(q, k, k, keys, keys, *rest, frequencies=1.0),
            ShapeError,
            "frequencies have one axis",
        ),
        (
            lambda: tg.paged_append(q, k, k, keys, keys, *rest, frequencies=np.ones(17)),
            ShapeError,
            "more frequencies than pairs",
        ),
    ]:
        with pytest.raises(error, match=match):
            call()


def test_layers_that_differ_in_their_scores_share_a_work_list(small_gpu, request) -> None:
    """What the list depends on is a window, not scale and softcap."""
    if "Simulated" in request.node.name:
        pytest.skip("nothing runs")
    q = tg.zeros(6, 4, 64, dtype=tg.bfloat16, device="cuda")
    keys = tg.zeros(4, 2, 16, 64, dtype=tg.bfloat16, device="cuda")
    places = [tg.tensor(np.array(x, np.int32), device="cuda") for x in ([[3, 1]], [6], [0, 6])]

    @tg.jit
    def layers(q, *places):
        options = ({}, {"softcap": 3.0}, {"scale": 0.5}, {"window": 4})
        return [tg.paged_attention(q, keys, keys, *places, **how) for how in options]

    lowered = layers.lower(q, *places)
    schedule = schedule_for(lowered.inputs, lowered.outputs, driver.Device.target)
    names = [s.body.name for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    assert sum(name.startswith("paged_work") for name in names) == 2
    assert sum(name.startswith("paged_attention") for name in names) == 4
    wide = layers.lower(q.float(), *places)  # which the portable kernel takes
    schedule = schedule_for(wide.inputs, wide.outputs, driver.Device.target)
    names = [s.body.name for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]
    assert sum(name.startswith("paged_attention_portable") for name in names) == 4
