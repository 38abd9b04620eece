"""Rows without a token (NaN, inf, nothing possible) and ids past the tokenizer's: in every Variant,
on the CPU and as PTX, and through an engine whose other requests go on."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from decoder_families import loaded
from simulated import assembled, run_graph  # noqa: F401
from test_engine import finish, ids, is_idle, prompt
from test_engine import greedy as greedy_ids

import tilegrad as tg
from tilegrad.core.errors import UserError
from tilegrad.generate.engine import Engine
from tilegrad.generate.request import Request
from tilegrad.generate.sampling import (
    NO_TOKEN,
    Sampling,
    SamplingState,
    Variant,
    greedy,
    possible,
    sample,
)

VARIANTS = [
    Variant(),
    Variant(logprobs=20),
    Variant(draws=True),
    Variant(True, True, True),
    Variant(True, True, True, 20),
]
KINDS: list[Sampling] = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, top_k=3, seed=2),
    Sampling(temperature=1.0, top_p=0.5, min_p=0.1, seed=3),
]


def rows_of(vocabulary: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Logits with what is no number at many places, and which rows have a token."""
    random = np.random.default_rng(vocabulary)
    rows = random.standard_normal((40, vocabulary)).astype(np.float32)
    good = np.ones(len(rows), bool)
    for row in range(1, len(rows), 2):
        outcomes = random.choice(vocabulary, random.integers(1, vocabulary), replace=False)
        kind = row // 2 % 5
        rows[row, outcomes] = (np.nan, np.inf, -np.inf, -np.inf, np.nan)[kind]
        if kind == 3:
            rows[row] = -np.inf
        if kind == 4:
            rows[row] = -np.inf
            rows[row, outcomes[0]] = np.nan
        good[row] = kind == 2 and len(outcomes) < vocabulary
    rows[3, :] = np.nan
    return rows, good


def picked(
    variant: Variant,
    sampling: Sampling,
    logits: Any,
    words: int,
    state: Any = None,
    slots: Any = None,
) -> Any:
    """What a step gives for logits."""
    logits = possible(logits, words)
    if variant == Variant():
        return greedy(logits)
    return sample(logits, state, slots, slots * 0, variant)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("vocabulary, words", [(70, 70), (301, 301), (301, 290), (70, 2)])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_rows_have_a_token_or_none(variant: Variant, vocabulary: int, words: int) -> None:
    rows, good = rows_of(words)
    whole = np.full((len(rows), vocabulary), np.nan, np.float32)  # what is masked is not looked at
    whole[::3, words:] = 1e9
    whole[:, :words] = rows
    for sampling in KINDS if variant.draws else KINDS[:1]:
        state = SamplingState(2, vocabulary)
        state.set_row(0, sampling)
        run = tg.jit(functools.partial(picked, variant, sampling), static="words")
        slots = tg.tensor(np.zeros(len(rows), np.int32))
        found = run(tg.tensor(whole), words, state, slots)
        tokens = found.ids.numpy()
        assert (tokens[~good] == NO_TOKEN).all()
        assert ((tokens[good] >= 0) & (tokens[good] < words)).all()
        assert np.isfinite(rows[good, tokens[good]]).all()
        if sampling.greedy:
            assert tokens[good].tolist() == rows[good].argmax(-1).tolist()
        if variant.logprobs:
            shown = found.top_ids.numpy()[good][:, : min(20, words)]
            assert ((shown >= 0) & (shown < words)).all()


@pytest.mark.usefixtures("assembled")
@pytest.mark.parametrize(
    "variant, vocabulary",
    [(Variant(), 280), (Variant(), 1 << 14), (Variant(draws=True), 280)],
    ids=str,
)
def test_ptx_finds_the_same_rows(variant: Variant, vocabulary: int) -> None:
    """2**14 tokens are looked at in parts."""
    rows, good = rows_of(vocabulary)
    rows, good = rows[:10], good[:10]
    words = vocabulary - 3
    rows[:, words:] = np.nan
    rows[7, :words], good[7] = np.nan, False
    state = SamplingState(2, vocabulary)
    state.set_row(0, KINDS[1])
    slots = tg.tensor(np.zeros(len(rows), np.int32))

    def run(logits: Any, state: Any, slots: Any) -> Any:
        return picked(variant, KINDS[1], logits, words, state, slots).ids

    made = tg.jit(run).lower(tg.tensor(rows), state, slots)
    own = {n: t.numpy().copy() for n, t in state.tensors().items()}
    values = [
        own[s.name] if s.kind == "state" else rows if s.index == 0 else slots.numpy()
        for s in made.sources
    ]
    found = run_graph(made.inputs, made.outputs, values)[made.outcomes[0].number]
    if not variant.draws:
        assert found[good].tolist() == rows[good, :words].argmax(-1).tolist()
    assert ((found[good] >= 0) & (found[good] < words)).all()
    assert ((found == NO_TOKEN) == ~good).all()


# ---- through an engine -------------------------------------------------------------------------

POISON = 7  # a token whose embedding is NaN


def spoilt(token: int) -> Any:
    """A model that one token spoils: the prompt that has it, or the answer that comes to it."""
    model = loaded("llama")
    weight = model.embed.weight.numpy().copy()
    weight[token] = np.nan
    model.embed.weight.assign(tg.tensor(weight))
    return model


@functools.cache
def engine_of(token: int | None) -> Engine:
    """One engine a model, so that each step is compiled once."""
    model = loaded("llama") if token is None else spoilt(token)
    return Engine(model, requests=3, context=64, page=16, pages=6, chunk=16)


@pytest.mark.parametrize(
    "sampling, overlaps",
    [
        (None, False),
        (None, True),
        (Sampling(logprobs=3), False),
        (KINDS[2], True),
    ],
    ids=str,
)
def test_one_request_ends_and_its_neighbours_go_on(sampling: Any, overlaps: bool) -> None:
    """Pages that held NaN are used anew, by requests that need longer ones."""
    engine, alone = engine_of(POISON), engine_of(None)
    engine.overlaps = overlaps
    asked = {i: prompt(n) for i, n in enumerate((5, 20, 12))}
    bad = {10 + i: (*asked[0], POISON, *prompt(n)) for i, n in enumerate((1, 18))}
    order = [0, 10, 1, 11, 2]
    for one in (alone, engine):
        for i in order:
            if i in asked or one is engine:
                one.add(Request(i, (asked | bad)[i], sampling, max_tokens=8))
    wanted, found = finish(alone), finish(engine)
    for i, given in asked.items():
        assert POISON not in (*given, *ids(wanted[i]))
        assert ids(found[i]) == ids(wanted[i])
    for i in bad:
        (last,) = found[i]
        assert last.finished == "error" and last.token == NO_TOKEN
        assert isinstance(last.error, UserError)
        text = str(last.error)
        assert "not finite" in text and "llama" in text and f"position {len(bad[i])}" in text
        assert "test_no_token.py" in text
    assert is_idle(engine)


def test_an_answer_that_comes_to_nan_ends_there() -> None:
    """The tokens before it stay."""
    wanted = greedy_ids("llama", prompt(12), 12)
    place = next(i for i in range(3, 12) if wanted[i] not in (*prompt(12), *wanted[:i]))
    engine = engine_of(wanted[place])
    engine.add(Request(0, prompt(12), max_tokens=12))
    found = finish(engine)[0]
    assert ids(found)[:-1] == wanted[: place + 1] and found[-1].finished == "error"
    assert f"{place + 1} of the answer" in str(found[-1].error) and is_idle(engine)


@pytest.mark.parametrize("sampling", [None, Sampling(logit_bias={90: 1e9}, logprobs=2)], ids=str)
def test_ids_that_no_tokenizer_has_are_never_picked(sampling: Any) -> None:
    """The rows of a padded head may be anything: large here."""
    model, words = loaded("llama"), 80
    weight = model.head.weight.numpy().copy()
    weight[words:] = 50.0 * np.random.default_rng(0).standard_normal((96 - words, weight.shape[1]))
    model.head.weight.assign(tg.tensor(weight))
    engine = Engine(model, requests=2, context=64, words=words)
    plain = Engine(model, requests=2, context=64)
    for one in (engine, plain):
        for i, length in enumerate((3, 20)):
            one.add(Request(i, prompt(length), sampling, max_tokens=10))
    found, unmasked = finish(engine), finish(plain)
    made = [t for i in (0, 1) for p in found[i] for t in (p.token, *(i for i, _ in p.top))]
    assert max(made) < words
    assert max(t for i in (0, 1) for t in ids(unmasked[i])) >= words
