"""Decode steps over quantised weights for machines that are not here: launches, and ptxas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from assembled import assemble_all

import tilegrad as tg
from tilegrad import nn
from tilegrad.compiler.compile import schedule_for
from tilegrad.core.dtype import DType
from tilegrad.core.format import Q4_1, Q8_0, Format, format_of
from tilegrad.core.target import AVX512, H200, Target
from tilegrad.exchange.mapped import Stored
from tilegrad.generate.sampling import Variant
from tilegrad.generate.step import Rows, step
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.quant.calibrate import put
from tilegrad.quant.layers import PackedLinear
from tilegrad.schedule.schedule import Launch, Schedule
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.targets.ptx.emit import emit
from tilegrad.tensor.stored import stored

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SMOLLM2 = {
    **LLAMA_8B,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def scheduled(
    fields: dict[str, Any],
    form: Format,
    embed: Format | None,
    target: Target,
    dtype: DType,
    requests: int = 1,
) -> Schedule:
    """The decode step of some requests; weights are shapes alone."""
    model = Decoder(DecoderConfig.from_huggingface(fields), dtype).requires_grad_(False)
    for name, parameter in model.named_parameters():
        kind = embed if name.startswith("embed") else form
        if parameter.ndim == 2 and kind is not None:
            shape = tuple(parameter.shape)
            raw = np.broadcast_to(np.zeros(1, np.uint8), kind.storage_shape(shape))
            parameter.node = stored(Stored(name, shape, kind, raw), dtype).node
    return scheduled_step(model, target, dtype, requests)


def scheduled_step(model: Decoder, target: Target, dtype: DType, requests: int = 1) -> Schedule:
    """The decode step of some requests."""
    config = model.config
    cache = nn.PagedCache(
        config.layers,
        4 * requests,
        64 if target.has_threads else 16,
        config.key_heads,
        config.head_width,
        requests=requests + 1,
        most_pages=4,
        dtype=dtype,
    )
    given = (model, cache, Rows(requests + 1, cache.device), None, Variant())
    with tg.no_grad():
        run = tg.jit(step, static="variant")
        numbers = (tg.tensor(np.zeros(n, np.int32)) for n in (requests, requests + 1))
        lowered = run.lower(*given, *numbers)
    return schedule_for(lowered.inputs, lowered.outputs, target, lowered.donate)


def launched(schedule: Schedule) -> list[Any]:
    return [s.body for k in schedule.kernels for s in k.steps if isinstance(s, Launch)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("requests, each", [(1, 5), (8, 7), (32, 8), (64, 8)])
@pytest.mark.parametrize("form", [Q4_1, Q8_0], ids=str)
def test_an_8b_decoder_on_an_h200(form: Format, requests: int, each: int) -> None:
    """Four products a layer beside attention, in a launch or two; a norm is a launch where there
    are several tokens. From four layers on, another one has no program of its own."""
    layers = 6
    fields = {**LLAMA_8B, "num_hidden_layers": layers}
    schedule = scheduled(fields, form, None, H200, tg.bfloat16, requests)
    bodies = launched(schedule)
    assert len(bodies) <= each * layers + 7
    assert sum(b.name.startswith("quantised") for b in bodies) == layers * 4 + 1
    assert len(schedule.preparing) == layers * 4 + 1
    distinct = {id(b): b for b in bodies if b.name.startswith("quantised")}
    if find_ptxas() is None:
        pytest.skip("no ptxas")
    texts = {text: text for text in (emit(b, "entry", H200)[0] for b in distinct.values())}
    for made in assemble_all(texts, H200.cpu).values():
        made.check_library("entry")


FP8 = "E4M3_ROW_F32"  # by channel, and inputs by token


def in_fp8(requests: int, layers: int) -> Schedule:
    """The decode step of an 8B decoder in fp8 with a head of bf16, as files of vLLM's have it."""
    fields = {**LLAMA_8B, "num_hidden_layers": layers}
    model = Decoder(DecoderConfig.from_huggingface(fields), tg.bfloat16).requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "head":
            form, shape = format_of(FP8), tuple(layer.weight.shape)
            raw = np.broadcast_to(np.zeros(1, np.uint8), form.storage_shape(shape))
            layer.weight.node = stored(Stored(name, shape, form, raw), tg.bfloat16).node
            put(model, name, PackedLinear(layer, None, FP8))
    return scheduled_step(model, H200, tg.bfloat16, requests)


@pytest.mark.parametrize("requests", [1, 32])
def test_an_8b_decoder_in_fp8_on_an_h200(requests: int) -> None:
    """Four products and four launches that round their inputs a layer, beside attention; products
    of one token round it themselves."""
    one, bodies = (launched(in_fp8(requests, layers)) for layers in (1, 2))
    each = len(bodies) - len(one)
    eight = [b for b in bodies if any(p.dtype is tg.float8_e4m3 for p in b.parameters)]
    products = [b for b in eight if "plan" in b.notes]
    rounding = 0 if requests == 1 else 4
    assert len(products) == 2 * 4 and len(eight) == 2 * (4 + rounding)
    assert each <= 4 + rounding + 3, [b.name for b in bodies]  # append, attention, its parts
    if find_ptxas() is None:
        pytest.skip("no ptxas")
    texts = {text: text for text in (emit(b, "entry", H200)[0] for b in eight)}
    for made in assemble_all(texts, H200.cpu).values():
        made.check_library("entry")


def test_smollm2_on_a_cpu() -> None:
    schedule = scheduled(SMOLLM2, Q4_1, Q8_0, AVX512.with_cores(2), tg.float32)
    assert len(launched(schedule)) <= 189
    assert len(schedule.preparing) == 30 * 4 + 1  # the head is the embedding
