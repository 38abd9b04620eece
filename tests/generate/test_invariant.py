"""The level `invariant`: every stream is that of its solo run, logprobs to the bit.

Models are tiny and random, but wider than one block of k and prompts longer than one block of
keys. The judge is an engine of one slot that takes a whole prompt in one step; the others have
neighbours, small chunks, other buckets.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.core.config import config, override
from tilegrad.core.format import MXFP4, Q4_1, Q8_0, Format
from tilegrad.exchange.mapped import Stored
from tilegrad.generate.engine import Engine
from tilegrad.generate.request import Produced, Request
from tilegrad.generate.sampling import Sampling
from tilegrad.models.decoder.config import DecoderConfig
from tilegrad.models.decoder.model import Decoder
from tilegrad.tensor.stored import stored

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "vocab_size": 301,
    "hidden_size": 96,
    "intermediate_size": 608,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 50},
    "mixtral": {
        **LLAMA,
        "model_type": "mixtral",
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        **LLAMA,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "intermediate_size": 64,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "num_hidden_layers": 2,
    },
}
CASES: list[tuple[str, Format | None, Any]] = [
    ("llama", None, tg.float32),
    ("llama", None, tg.bfloat16),
    ("llama", Q4_1, tg.float32),
    ("mistral", Q8_0, tg.float32),
    ("mixtral", None, tg.float32),
    ("mixtral", Q4_1, tg.bfloat16),
    ("gpt_oss", MXFP4, tg.float32),
]
LENGTHS = (5, 150, 66, 1, 31)
COUNT = 6


@functools.cache
def model_of(family: str, form: Format | None, dtype: Any) -> Decoder:
    """A random decoder; its matrices quantised if a Format is given."""
    model = Decoder(DecoderConfig.from_huggingface(FAMILIES[family]), dtype).requires_grad_(False)
    random = np.random.default_rng(7)
    for name, parameter in model.named_parameters():
        shape = tuple(int(s) for s in parameter.shape)
        if len(shape) == 1 and not name.endswith("sinks"):
            continue
        values = (random.standard_normal(shape) * 2.0 * shape[-1] ** -0.5).astype(np.float32)
        if form is not None and len(shape) > 1 and not name.endswith("bias"):
            parameter.node = stored(Stored(name, shape, form, form.pack(values)), dtype).node
        else:
            parameter.assign(tg.tensor(values).to(dtype))
    return model


def prompts(vocabulary: int) -> list[tuple[int, ...]]:
    random = np.random.default_rng(3)
    return [tuple(int(t) for t in random.integers(0, vocabulary, n)) for n in LENGTHS]


def stream(produced: Iterable[Produced]) -> list[tuple[Any, ...]]:
    """What a client sees of a request, floats as their bits."""

    def bits(x: float) -> str:
        return float(x).hex()

    return [
        (p.token, bits(p.logprob), tuple((i, bits(x)) for i, x in p.top))  # type: ignore[arg-type]
        for p in produced
    ]


def asked(number: int, tokens: tuple[int, ...], draws: bool = False) -> Request:
    """A request for logprobs; one that draws has a seed of its own."""
    sampling = (
        Sampling(temperature=0.8, top_p=0.9, seed=number, logprobs=3)
        if draws
        else Sampling(logprobs=3)
    )
    return Request(number, tokens, sampling, max_tokens=COUNT)


def engine_of(model: Decoder, requests: int, chunk: int, **more: Any) -> Engine:
    return Engine(
        model, requests=requests, chunk=chunk, context=256, page=16, determinism="invariant", **more
    )


def run(engine: Engine, requests: list[Request], together: int) -> dict[int, list[Produced]]:
    """All of them, so many at first and one more at each step."""
    found: dict[int, list[Produced]] = {}
    waiting = list(requests)
    while waiting or engine.busy:
        while waiting and (together > 0 or not engine.busy):
            engine.add(waiting.pop(0))
            together -= 1
        together += 1
        for produced in engine.step():
            found.setdefault(produced.id, []).append(produced)  # type: ignore[call-overload]
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "form", "dtype"), CASES, ids=[f"{f}-{q or d}" for f, q, d in CASES]
)
def test_every_stream_is_its_solo_run(family: str, form: Format | None, dtype: Any) -> None:
    model = model_of(family, form, dtype)
    draws = (family, form, dtype) == CASES[0]  # every other one, beside those that do not
    given = prompts(model.config.vocabulary)
    requests = [asked(i, p, draws and i % 2 == 1) for i, p in enumerate(given)]
    solo = engine_of(model, 1, 256)
    alone = {r.id: stream(run(solo, [r], 1)[r.id]) for r in requests}  # type: ignore[index]
    found = run(engine_of(model, 4, 24), requests, 2)
    for request in requests:
        assert stream(found[request.id]) == alone[request.id]  # type: ignore[index]


def test_scores_are_those_of_an_answer() -> None:
    """Logprobs of given tokens, 128 at a time, are the bits that a decode gave token by token."""
    model = model_of("llama", None, tg.float32)
    engine = engine_of(model, 2, 16)
    given = prompts(model.config.vocabulary)[2]
    made = run(engine, [Request(0, given, Sampling(logprobs=1), max_tokens=20)], 1)[0]
    answer = [p.token for p in made]
    scored = engine.score([*given, *answer])[-len(answer) :]
    assert [float(x) for x in scored] == [p.logprob for p in made]


def test_the_level_is_the_engine_s_own() -> None:
    """What the Config says does not matter to an engine that was given a level, and is left."""
    model = model_of("llama", None, tg.float32)
    with override(determinism="invariant"):
        assert Engine(model, requests=1, context=64).determinism == "invariant"
    assert Engine(model, requests=1, context=64).determinism == config().determinism
    engine = engine_of(model, 1, 64)
    before = config()
    list(run(engine, [asked(0, (1, 2, 3))], 1))
    assert config() is before
