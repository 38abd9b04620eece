"""Whole steps of an 8B decoder for machines that are not here: traced, scheduled, assembled.

Weights are shapes alone: Parameters are lazy, and what is traced and never run allocates nothing.
Most models here have 6 of the 32 layers: from four on, another one has no program of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from assembled import assemble_all

import tilegrad as tg
from tilegrad import nn
from tilegrad.compiler.compile import schedule_for
from tilegrad.core.target import A100, AVX512, H200, NEON, Target
from tilegrad.generate.sampling import SamplingState, Variant
from tilegrad.generate.step import Rows, step
from tilegrad.ir.symbol import symbol
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.runtime.limits import limits_of
from tilegrad.schedule.schedule import Launch
from tilegrad.targets.llvm.emit import emit as emit_llvm
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit as emit_ptx
from tilegrad.tensor.tensor import values

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
CONTEXT = 2048
DRAWS = Variant(draws=True, penalties=True, bias=True, logprobs=3)


@functools.cache
def model(**more: Any) -> Decoder:
    return Decoder(DecoderConfig.from_huggingface({**LLAMA, **more}), tg.bfloat16)


def numbers(count: int) -> tg.Tensor:
    return tg.tensor(np.zeros(count, np.int32))


def traced(
    batch: int,
    target: Target,
    tokens: int = 0,
    variant: Variant = Variant(),
    now: int = 0,
    **more: Any,
) -> Any:
    """The decode step of a batch, or the ragged step of up to so many tokens; with `now` the one
    that the Target has for so many; of a model that has `more`."""
    config, page = model(**more).config, limits_of(target).page
    cache = nn.PagedCache(
        config.layers,
        4,
        page,
        config.key_heads,
        config.head_width,
        requests=batch + 1,
        most_pages=CONTEXT // page,
        dtype=tg.bfloat16,
    )
    rows = Rows(batch + 1, cache.device)
    state = None if variant == Variant() else SamplingState(batch + 1, config.vocabulary)
    given = (model(**more), cache, rows, state, variant)
    with tg.no_grad():
        if not tokens:
            run = tg.jit(step, static="variant")
            last = {"tails": numbers(batch), "columns": numbers(batch)}
            return run.lower(*given, numbers(batch), numbers(batch + 1), **last)
        some, requests = symbol("tokens", 1, tokens), symbol("requests", 1, batch)
        axes = {"slots": requests, "starts": requests + 1, "into": requests}
        axes |= {"owner": some, "given": some}
        run = tg.jit(step, static="variant", dynamic={n: {0: s} for n, s in axes.items()})
        if now:
            return run._lower_for(target, (*given, *map(numbers, (1, 2, 1, now, now))), {})
        return run.lower(*given, *map(numbers, (1, 2, 1, 5, 5)))


def launched(lowered: Any, target: Target) -> list[Any]:
    """The Bodies that a step launches, in order."""
    schedule = schedule_for(lowered.inputs, lowered.outputs, target, lowered.donate)
    return [s.body for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]


def distinct(bodies: list[Any]) -> list[Any]:
    """Bodies that are the same object once."""
    return list({id(b): b for b in bodies}.values())


def assembles(bodies: list[Any], target: Target) -> None:
    """Every Program fits its registers and shared memory, without a word from ptxas."""
    emitted = [(b.name, *emit_ptx(b, "entry", target)) for b in distinct(bodies)]
    for name, _, entry in emitted:
        assert entry.shared_bytes <= target.memories["shared"].bytes, name
    texts = {text: text for _, text, _ in emitted}
    if find_ptxas() is None:
        pytest.skip("no ptxas")
    for made in assemble_all(texts, target.cpu).values():
        assert made.warnings == []
        for report in made.reports.values():
            assert report.spill_stores == report.spill_loads == report.stack_bytes == 0


@pytest.mark.parametrize(
    "batch, layers, each", [(1, 6, 5), (8, 32, 5), (32, 6, 6), (128, 6, 6)], ids=str
)
def test_decode_on_an_h200(batch: int, layers: int, each: int) -> None:
    bodies = launched(traced(batch, H200, num_hidden_layers=layers), H200)
    assert len(bodies) <= each * (layers + 1) + 1
    assert not [b.name for b in bodies if b.name.startswith("paged_append")] or batch > 8
    assembles(bodies, H200)


def test_norms_of_heads_cost_no_launch() -> None:
    """Appending does them."""
    plain, normed = (
        launched(traced(64, H200, model_type=kind, num_hidden_layers=2, head_dim=128), H200)
        for kind in ("llama", "qwen3")
    )
    assert len(normed) == len(plain)
    (append,) = distinct([b for b in normed if b.name.startswith("paged_append")])
    assert [p.attrs["name"] for p in append.parameters].count("q_norm") == 1
    assembles([append], H200)


def test_only_tokens_with_an_id_go_on_from_the_last_attention() -> None:
    """The last layer's rest has as many rows as requests, where those are fewer."""
    for batch, fewer in ((8, True), (64, False)):
        lowered = traced(batch, H200, 2048, now=16, num_hidden_layers=2)
        first, last = [b for b in launched(lowered, H200) if b.name.startswith("gated")]
        assert (first is not last) == fewer


@pytest.mark.parametrize("target", [H200, A100], ids=lambda t: t.name)
def test_a_step_with_prompts(target: Target) -> None:
    bodies = launched(traced(8, target, limits_of(target).chunk), target)
    attend = {b.name for b in bodies if b.name.startswith("paged") and "append" not in b.name}
    if target is H200:
        assert attend == {"paged_work", "paged_attention", "paged_tiles", "paged_prefill"}
        assert [b.name for b in bodies].count("paged_tiles") == 1  # for all layers
    else:
        assert attend == {"paged_work", "paged_attention"}
    assembles(bodies, target)


@pytest.mark.parametrize(
    "now, first, last, rows",
    [(16, 1, 64, 64), (100, 65, 128, 128), (160, 129, 192, 192), (200, 193, 256, 128)],
)
def test_few_tokens_of_prompts_are_one_tile(now: int, first: int, last: int, rows: int) -> None:
    """Up to 192: the products that read most have all tokens in one tile, and each weight once."""
    lowered = traced(8, H200, 2048, now=now)
    assert lowered.ranges == {"tokens": (first, last)}
    bodies = distinct(launched(lowered, H200))
    gated, _ = [b for b in bodies if b.name.startswith("gated")]  # and of the last layer's rows
    assert gated.notes["plan"].tile[0] == rows
    assembles([gated], H200)


@pytest.mark.parametrize("batch", [1, 128])
def test_decode_on_an_a100(batch: int) -> None:
    bodies = launched(traced(batch, A100), A100)
    assert len(bodies) <= 11 * 6 + 7  # one of them the list of work
    assembles(bodies, A100)


@pytest.mark.parametrize("target", [H200, A100], ids=lambda t: t.name)
def test_drawing_tokens(target: Target) -> None:
    bodies = launched(traced(8, target, variant=DRAWS), target)
    assert {"pick", "draw", "largest", "biased"} <= {b.name for b in bodies}
    assembles(bodies, target)


@pytest.mark.parametrize("target", [AVX512, NEON], ids=lambda t: t.name)
@pytest.mark.parametrize("tokens", [0, 512])
def test_a_foreign_cpu(target: Target, tokens: int) -> None:
    target = target.with_cores(8)
    bodies = launched(traced(1 if not tokens else 4, target, tokens), target)
    assert sum(b.name.startswith("paged_append") for b in bodies) == 6
    for body in distinct(bodies):
        text, _ = emit_llvm(body, "entry", target)
        assert "define" in text


def test_nothing_was_allocated() -> None:
    weights = [t for name, t in model().state_dict().items() if name.endswith("weight")]
    assert len(weights) > 40
    assert not any(t.node in values for t in weights if t.ndim == 2)
