"""The pass that chooses kernels: which, for which Target, and that the meaning stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.compiler.choose import CHOSEN, choose_kernels
from tilegrad.compiler.compile import schedule_for
from tilegrad.compiler.explain import explain_graph
from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.core.dtype import BY_NUMPY
from tilegrad.core.errors import UserError
from tilegrad.core.target import AVX2, H200, Target
from tilegrad.graph import build, ops
from tilegrad.graph.interpret import interpret
from tilegrad.ir.block import pure_block
from tilegrad.ir.node import Node, topological
from tilegrad.ir.rewrite import Log
from tilegrad.ir.text import parse_block, print_block
from tilegrad.schedule.paged import VectorAttention
from tilegrad.schedule.quantised import families_of

CPU = AVX2.with_cores(2)
PLACES = {"table": (np.int32, (2, 4)), "lengths": (np.int32, (2,)), "starts": (np.int32, (3,))}


def paged(
    tokens: int = 5,
    dtype: Any = tg.bfloat16,
    width: int = 64,
    page: int = 16,
    sinks: bool = False,
    **how: Any,
) -> tuple[list[Node], list[Node]]:
    """Inputs and results (out, keys, values) of a step of two requests."""
    shapes = [(tokens, 4, width), (tokens, 2, width), (tokens, 2, width)]
    shapes += [(8, 2, page, width)] * 2
    inputs = [build.input_(s, dtype) for s in shapes]
    inputs += [build.input_(s, tg.int32) for _, s in PLACES.values()]
    inputs.append(build.input_((width // 2,), tg.float32))
    q, k, v, keys, values, *places, speeds = inputs
    appended = ops.paged_append(
        q, k, v, speeds, *places, keys, values, width=width, interleaved=False, factor=1.0
    )
    turned, *after = build.items(appended)
    attrs = {"scale": 0.1, "window": 0, "softcap": 0.0, "queries": 0, "single": False}
    more = [build.cast(build.input_((4,), dtype), tg.float32)] if sinks else []
    out = ops.paged_attention(turned, *after, *places, *more, **{**attrs, "most_keys": 0, **how})
    return [*inputs, *(n.inputs[0] for n in more)], [out, *after]


LISTED = ["paged_append", "paged_attention", "paged_work"]
PREFILLED = ["paged_append", "paged_attention", "paged_tiles", "paged_work"]


def names(results: list[Node], target: Target | None) -> list[str]:
    """The kernels that are called, in order."""
    found = topological(choose_kernels([], results, Log(), target))
    assert target is None or not any(n.op in CHOSEN for n in found)
    return [n.attrs["callee"].name for n in found if n.op is ops.call]


def test_a_target_chooses() -> None:
    _, results = paged()
    assert names(results, None) == [] and choose_kernels([], results, Log(), None) == results
    assert sorted(names(results, H200)) == LISTED
    assert sorted(names(results, CPU)) == ["paged_append", "paged_attention"]
    _, results = paged(tokens=256)
    assert sorted(names(results, H200)) == PREFILLED
    assert sorted(names(results, CPU)) == ["paged_append", "paged_prefill"]
    _, results = paged(queries=200)
    assert sorted(names(results, H200)) == PREFILLED
    bodies = [
        body.name
        for node in topological(choose_kernels([], results, Log(), H200))
        if node.op is ops.call
        for body, _ in node.attrs["callee"].launches
    ]
    assert "paged_prefill" in bodies  # beside the list, in the same call


def test_single_tokens_are_one_launch() -> None:
    single = ["paged_attention_short"]
    listed = ["paged_append", "paged_attention", "paged_work"]
    _, results = paged(tokens=2, single=True)
    assert names(results, H200) == single
    assert sorted(names(results, CPU)) == listed[:2]
    assert sorted(names(results, replace(H200, cores=4))) == listed
    appended = next(n for n in topological(results) if n.op is ops.paged_append)
    turned = build.items(appended)[0]
    for more in (turned, ops.negative(turned)):  # queries that something else reads
        assert sorted(names([*results, more], H200)) == listed
    stale = results[0].with_inputs((turned, *appended.inputs[-2:], *results[0].inputs[3:]))
    assert sorted(names([stale, *results[1:]], H200)) == listed  # over the cache as it was


@pytest.mark.parametrize("tokens, called", [(2, 1), (5, 3), (256, 4)])
def test_sinks_go_by_the_kernels_of_matrix_units(tokens: int, called: int) -> None:
    """Steps of single tokens, by a list, and prefill: the values are those of the ops."""
    inputs, results = paged(tokens=tokens, sinks=True, single=tokens == 2, window=9)
    found = names(results, H200)
    assert len(found) == called and "paged_attention_portable" not in found
    if tokens > 5:
        return
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal(n.shape).astype(n.dtype.numpy) for n in inputs]
    arrays[5] = np.array([[3, 1, 6, 7], [0, 5, 2, 4]], np.int32)
    arrays[6] = np.array([18, 33], np.int32)
    arrays[7] = np.array([0, tokens - 1, tokens], np.int32)
    wanted = interpret(results, dict(zip(inputs, arrays)))
    chosen, _ = run_pipeline(inputs, results, H200)
    for a, b in zip(interpret(chosen, dict(zip(inputs, arrays))), wanted):
        np.testing.assert_allclose(a.astype(float), b.astype(float), atol=2e-2, rtol=2e-2)


def test_few_keys_are_what_the_table_holds_or_what_is_promised() -> None:
    def step(**how: Any) -> list[str]:
        inputs, results = paged(tokens=2, single=True, **how)
        long = build.input_((2, 4096), tg.int32)
        again = {inputs[5]: long}
        done = dict(again)
        for node in topological(results):
            done.setdefault(node, node.with_inputs(tuple(done[i] for i in node.inputs)))
        return names([done[r] for r in results], H200)

    assert len(step()) == 3
    assert step(most_keys=4096) == ["paged_attention_short"]
    assert len(step(most_keys=1 << 15)) == 3


def test_no_kernel_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VectorAttention, "kernels", lambda *given: "a reason of its own")
    with pytest.raises(UserError, match=r"no kernel takes this.*a reason of its own"):
        schedule_for(*paged(), CPU)


def test_pages_of_any_size_on_a_cpu() -> None:
    assert schedule_for(*paged(page=12), CPU).kernels


def test_pages_of_any_size_on_a_gpu() -> None:
    """What the kernels of matrix units refuse, the portable one takes."""
    steps = [s for k in schedule_for(*paged(page=12), H200).kernels for s in k.steps]
    assert "paged_attention_portable" in {s.body.name for s in steps if hasattr(s, "body")}


def test_inside_of_blocks() -> None:
    """A loop over layers has its choices made, and shares what comes from outside."""
    inputs, _ = paged(tokens=2)
    q, k, v, keys, values, *places, speeds = inputs
    attrs = {"scale": 0.1, "window": 0, "softcap": 0.0, "queries": 0, "single": True}

    def body(carries: list[Node], slices: list[Node]) -> tuple[list[Node], list[Node]]:
        appended = ops.paged_append(
            carries[0], k, v, speeds, *places, keys, values, width=64, interleaved=False, factor=1.0
        )
        turned, *after = build.items(appended)
        return [ops.paged_attention(turned, *after, *places, **attrs, most_keys=0)], []

    carried, _ = build.scan(body, [q], [], 3)
    for target, wanted in ((H200, 1), (CPU, 2)):
        found = choose_kernels([], [carried[0]], Log(), target)
        loop = next(n for n in topological(found) if n.op is ops.scan)
        calls = [n for n in loop.blocks[0].nodes if n.op is ops.call]
        assert len(calls) == wanted
        assert not any(n.op in CHOSEN for n in loop.blocks[0].nodes)


@pytest.mark.parametrize("dtype", [tg.float32, tg.bfloat16], ids=str)
def test_the_pass_keeps_values(dtype: Any) -> None:
    """The reference of the ops, and the Tile interpreter of the kernels chosen."""
    inputs, results = paged(dtype=dtype, width=32, window=9, softcap=2.0)
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal(n.shape).astype(n.dtype.numpy) for n in inputs]
    arrays[5] = np.array([[3, 1, 9, 9], [0, 5, 2, 9]], np.int32)
    arrays[6], arrays[7] = np.array([18, 33], np.int32), np.array([0, 4, 5], np.int32)
    wanted = interpret(results, dict(zip(inputs, arrays)))
    chosen, _ = run_pipeline(inputs, results, CPU)
    assert any(n.op is ops.call for n in topological(chosen))
    found = interpret(chosen, dict(zip(inputs, arrays)))
    within = 1e-5 if dtype is tg.float32 else 2e-2
    for a, b in zip(found, wanted):
        np.testing.assert_allclose(a.astype(float), b.astype(float), atol=within, rtol=within)
    assert not np.array_equal(wanted[1], arrays[3])
    np.testing.assert_array_equal(arrays[3][7], wanted[1][7])  # inputs are never written


def test_text_and_derivatives() -> None:
    inputs, results = paged(dtype=tg.float32)
    block = pure_block("step", tuple(inputs), tuple(results))
    text = print_block(block, "graph")
    assert "paged_append" in text and print_block(parse_block(text), "graph") == text

    def loss(q, keys):
        places = [tg.tensor(np.array(x, np.int32)) for x in ([[3, 1]], [6], [0, 6])]
        return tg.paged_attention(q, keys, keys, *places).sum()

    q, keys = tg.ones(6, 4, 32), tg.ones(4, 2, 16, 32)
    with pytest.raises(UserError, match="paged_attention has no reverse derivative"):
        tg.grad(loss)(q, keys)
    with pytest.raises(UserError, match="paged_attention has no forward derivative"):
        tg.jvp(loss, (q, keys), (q, keys))
    several = tg.vmap(loss, (0, None))(tg.ones(3, 6, 4, 32), keys)
    np.testing.assert_allclose(several.numpy(), [6 * 4 * 32] * 3, rtol=1e-5)


# ---- drawing tokens ---------------------------------------------------------------------------


def drawing(rows: int, columns: int, slots: int) -> tuple[list[Node], list[Node], list[Any]]:
    """Inputs, results (a draw, the five largest, biased rows), and arrays."""
    draw = np.random.default_rng(rows)
    p = np.exp(3 * draw.standard_normal((rows, columns))).astype(np.float32)
    p[0] = np.round(p[0], 1)  # equals at the cuts
    settings = [[0.9, 0.0], [1.0, 0.01], [0.5, 0.001], [1.0, 0.0]]
    arrays = [
        p / p.max(-1, keepdims=True),
        np.array([[7.0, *settings[i % 4]] for i in range(slots)], np.float32),
        np.array([(0, 5, 40)[i % 3] for i in range(slots)], np.int32),
        draw.integers(0, 1 << 32, (slots, 2), np.uint32),
        draw.integers(0, slots, rows).astype(np.int32),
        draw.integers(0, 4096, rows).astype(np.int32),
        draw.integers(0, 4, slots).astype(np.int32),
        np.stack([draw.permutation(columns)[:4] for _ in range(slots)]).astype(np.int32),
        draw.standard_normal((slots, 4)).astype(np.float32),
    ]
    inputs = [build.input_(a.shape, BY_NUMPY[a.dtype]) for a in arrays]
    p_, floats, limits, seeds, slot, positions, *biases = inputs
    results = [
        ops.draw(p_, floats, limits, seeds, slot, positions, top_p=1, min_p=2),
        ops.top_k(p_, count=5),
        ops.add_listed(p_, *biases, slot),
    ]
    return inputs, results, arrays


@pytest.mark.parametrize("target", [CPU, H200], ids=lambda t: t.name)
def test_draws_keep_their_values(target: Target) -> None:
    inputs, results, arrays = drawing(16, 300, 12)
    given = dict(zip(inputs, arrays))
    wanted = interpret(results, given)
    assert len(set(wanted[0].tolist())) > 4 and (wanted[2] != arrays[0]).any()
    chosen = choose_kernels([], results, Log(), target)
    calls = {n.attrs["callee"].name for n in topological(chosen) if n.op is ops.call}
    assert calls == {"pick", "draw", "largest", "biased"}
    for a, b in zip(interpret(chosen, given), wanted):
        np.testing.assert_array_equal(a, b)


def test_what_is_not_a_number_is_never_among_the_largest() -> None:
    x = np.array([[1.0, np.nan, 3.0], [np.nan] * 3, [-np.inf, 2.0, 2.0]], np.float32)
    node = build.input_(x.shape, tg.float32)
    result = ops.top_k(node, count=3)
    wanted = [[2, 0, 2], [2, 2, 2], [1, 2, 0]]
    assert interpret([result], {node: x})[0].tolist() == wanted
    chosen = choose_kernels([], [result], Log(), CPU)
    assert interpret(chosen, {node: x})[0].tolist() == wanted


def test_explain_names_the_families_of_what_was_chosen() -> None:
    for target, wanted in (
        (H200, ["paged attention by a list", "paged prefill on units refuses: for 64 new tokens"]),
        (CPU, ["paged attention on vectors, the only offer", "paged prefill on vectors refuses: "]),
    ):
        inputs, results = paged()
        text = str(explain_graph(inputs, results, target=target, level="schedule"))
        assert all(line in text for line in wanted), text
    raw, x = build.input_((64, 36), tg.uint8), build.input_((3, 64), tg.float32)
    weights = ops.unpack(raw, format="Q4_0", dtype=tg.float32)
    product = build.dot(x, weights, batch=((), ()), contract=((1,), (1,)))
    text = str(explain_graph([raw, x], [product], target=CPU, level="schedule"))
    assert "quantised weights offers" in text and "weights unpacked first refuses" in text


def test_the_layout_of_weights_is_their_familys() -> None:
    for target, kind in ((H200, "threads"), (CPU, "vectors")):
        unpacked, reading = families_of(target)
        made = reading.layout([64], "Q4_0", 64, target)
        assert unpacked.layout([64], "Q4_0", 64, target) == made
        assert (made.kind, made.form, made.rows, made.columns) == (kind, "Q4_0", (64,), 64)
