"""Guesses: what is guessed, that answers stay the same, their distribution, a draft model."""

import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from sampling_reference import distribution
from test_engine import model_of as engine_model
from test_engine import prompt
from test_invariant import model_of as invariant_model
from test_invariant import prompts, stream
from tiny_model import END, weights, write_file

import tilegrad as tg
from tilegrad.core.errors import UserError
from tilegrad.exchange.gguf import read_gguf
from tilegrad.exchange.gguf_write import write_gguf
from tilegrad.generate.draft import DraftModel
from tilegrad.generate.engine import Engine
from tilegrad.generate.llm import LLM
from tilegrad.generate.request import Produced, Request
from tilegrad.generate.sampling import Sampling
from tilegrad.generate.sampling_limits import SERVED
from tilegrad.generate.speculative import Lookup, Proposer, Runs, Trust
from tilegrad.runtime.executable import Executable
from tilegrad.tensor.bound import Bound

PROMPT = tuple(b"the cat and the cat and the dog and the ca")
GUESSES = 3


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_file(tmp_path_factory.mktemp("model") / "tiny.gguf", context=256), requests=4)


# ---- what is guessed ------------------------------------------------------------------------


def slow_lookup(known: Sequence[int], count: int) -> list[int]:
    """The same by search: what followed the last place with the same 4, 3 or 2 tokens."""
    for size in (4, 3, 2):
        tail = list(known[-size:])
        places = [e for e in range(size, len(known)) if list(known[e - size : e]) == tail]
        if len(known) >= size and places:
            found = list(known)
            for i in range(count):
                found.append(found[places[-1] + i])
            return found[len(known) :]
    return []


@settings(max_examples=150, deadline=None)
@given(some.lists(some.integers(0, 2), max_size=40), some.integers(1, 6), some.integers(1, 9))
def test_lookups_are_those_of_a_search(tokens: list[int], count: int, more: int) -> None:
    """As an answer grows by a few tokens at a time."""
    places = Runs(range(4, 1, -1))
    for end in range(0, len(tokens) + 1, more):
        assert places.after(tokens[:end], count) == slow_lookup(tokens[:end], count)


def test_trust_follows_what_comes_true() -> None:
    trust = Trust(8)
    trust.learn(8, 2)
    assert trust.now == 3
    trust.learn(3, 3)
    assert trust.now == 6
    trust.learn(6, 0)
    trust.learn(0, 0)
    assert trust.now == 1
    for _ in range(5):
        trust.learn(1, 1)
    assert trust.now == 8


# ---- answers stay the same ------------------------------------------------------------------


class Reader:
    """What a Proposer does that reads tokens alone."""

    def forget(self, work: Any) -> None:
        pass

    def prepare(self, tell: Any, variants: Any) -> None:
        pass

    def attach(self, model: Any, cache: Any, tokens: int) -> None:
        pass

    def saw(self, seen: Any) -> None:
        raise AssertionError("no features were asked for")


class Oracle(Reader):
    """Guesses from answers that are known, of which each `wrong`-th token is another."""

    def __init__(self, answers: dict[Any, list[int]], wrong: int = 0) -> None:
        self.answers, self.wrong, self.over = answers, wrong, 0

    def guess(self, works: Sequence[Any], most: Sequence[int]) -> list[list[int]]:
        found = []
        for work, count in zip(works, most):
            made = len(work.known) - len(work.request.tokens)
            guessed = self.answers.get(work.request.id, [])[made : made + count]
            found.append(
                [
                    token ^ 1 if self.wrong and (made + i) % self.wrong == 0 else token
                    for i, token in enumerate(guessed)
                ]
            )
        return found

    def forget(self, work: Any) -> None:
        self.over += 1


def engine_of(llm: LLM, proposer: Proposer | None = None, **how: Any) -> Engine:
    sizes = {"requests": 4, "context": 256, "page": 16, "grammars": llm.grammars, **how}
    return Engine(llm.model, proposer=proposer, guesses=GUESSES, **sizes)


def run(engine: Engine, requests: Sequence[Request]) -> tuple[dict[Any, list[Produced]], int]:
    """What each request got, and the steps it took."""
    for request in requests:
        engine.add(request)
    found: dict[Any, list[Produced]] = {}
    steps = 0
    while engine.busy:
        steps += 1
        for produced in engine.step():
            assert produced.error is None, produced.error
            found.setdefault(produced.id, []).append(produced)
        engine.batcher.check()
    return found, steps


def several() -> list[Request]:
    """Requests that sample in every way, and two that have no guesses."""
    from tilegrad.generate.constraint import Constraint

    warm = Sampling(temperature=0.9, top_p=0.9, seed=7)
    return [
        Request("greedy", PROMPT, max_tokens=60),
        Request("drawn", PROMPT[4:], Sampling(temperature=0.8, seed=3), max_tokens=50),
        Request("scored", PROMPT[2:], Sampling(logprobs=3), max_tokens=40),
        Request("warm", PROMPT[1:], warm, frozenset({END}), 45, min_tokens=20),
        Request("biased", PROMPT[3:], Sampling(logit_bias={65: 4.0, 66: 3.5}), max_tokens=30),
        Request("punished", PROMPT[5:], Sampling(presence_penalty=1.5), max_tokens=30),
        Request(
            "constrained",
            PROMPT[6:],
            None,
            frozenset({END}),
            60,
            constraint=Constraint("regex", "[a-c]{30}"),
        ),
    ]


def ids(found: dict[Any, list[Produced]]) -> dict[Any, list[int]]:
    return {id: [p.token for p in made] for id, made in found.items()}


@functools.cache
def plain(llm: LLM) -> tuple[dict[Any, list[Produced]], int]:
    return run(engine_of(llm), several())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("wrong", [None, 0, 1, 3])
def test_answers_are_those_without_guesses(llm: LLM, wrong: int | None, page: int) -> None:
    """Guesses looked up, all true, all false, or two of three true; over pages of any size."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    wanted, slow = plain(llm)
    proposer: Any = Lookup() if wrong is None else Oracle(ids(wanted), wrong)
    engine = engine_of(llm, proposer, page=page)
    found, steps = run(engine, several())
    assert ids(found) == ids(wanted)
    assert [p.finished for made in found.values() for p in made] == [
        p.finished for made in wanted.values() for p in made
    ]
    for ours, theirs in zip(found["scored"], wanted["scored"]):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
    speculation = engine.speculation
    assert speculation is not None and not speculation._trust
    if wrong == 0:
        assert speculation.true == speculation.guessed > 60 and steps < slow
    if wrong == 1:
        assert speculation.true == 0 < speculation.guessed
    if isinstance(proposer, Oracle):
        assert proposer.over == len(several())
    assert len(engine.batcher.slots) == 4 and engine.pool.available == engine.pool.pages


def test_true_guesses_save_steps(llm: LLM) -> None:
    request = Request("a", PROMPT, max_tokens=61)
    wanted, slow = run(engine_of(llm), [request])
    _, fast = run(engine_of(llm, Oracle(ids(wanted))), [request])
    assert slow == 61 and fast == 1 + 60 // (GUESSES + 1)


def test_stop_tokens_among_true_guesses_end_the_answer(llm: LLM) -> None:
    wanted, _ = run(engine_of(llm), [Request("a", PROMPT, max_tokens=40)])
    answer = ids(wanted)["a"]
    stop = next(t for i, t in enumerate(answer) if i > 6 and t not in answer[:i])
    request = Request("a", PROMPT, stop_tokens=frozenset({stop}), max_tokens=40)
    found, _ = run(engine_of(llm, Oracle({"a": answer})), [request])
    assert ids(found)["a"] == answer[: answer.index(stop) + 1]
    assert found["a"][-1].finished == "stop"


def test_few_pages_and_requests_sent_back(llm: LLM) -> None:
    """Guesses take no page that somebody needs, and answers stay."""
    requests = [Request(i, PROMPT[i:], max_tokens=60) for i in range(4)]
    wanted, _ = run(engine_of(llm), requests)
    engine = engine_of(llm, Oracle(ids(wanted)), page=4, pages=40)
    found, _ = run(engine, requests)
    assert ids(found) == ids(wanted) and engine.batcher.preemptions > 0


def test_requests_that_come_and_go(llm: LLM) -> None:
    """Slots between those that are seated keep the pages that guesses were put into."""
    requests = [Request(i, PROMPT[i:], max_tokens=10 + 17 * (i % 3)) for i in range(9)]
    wanted, _ = run(engine_of(llm), requests)
    for page in (4, 8):
        found, _ = run(engine_of(llm, Oracle(ids(wanted), 5), page=page), requests)
        assert ids(found) == ids(wanted)


def test_pages_of_a_shared_prefix(llm: LLM) -> None:
    """What guesses left in pages is never shared: a second request finds the first one's tokens."""
    first = Request("first", PROMPT, max_tokens=40)
    wanted = ids(run(engine_of(llm), [first])[0])["first"]
    longer = Request("longer", (*PROMPT, *wanted[:30]), max_tokens=20)
    plainly = ids(run(engine_of(llm), [longer])[0])["longer"]
    engine = engine_of(llm, Oracle({"first": wanted, "longer": plainly}, 3), page=4)
    assert ids(run(engine, [first])[0])["first"] == wanted
    found, _ = run(engine, [longer])
    assert ids(found)["longer"] == plainly
    assert found["longer"][0].cached >= len(PROMPT) + 24


def test_invariant_answers_are_the_same_to_the_bit() -> None:
    """Greedy and drawn, guesses true and false, with logprobs; alone and beside others."""
    model = invariant_model("llama", None, tg.float32)
    how: dict[str, Any] = {"context": 256, "page": 16, "determinism": "invariant"}
    requests = [
        Request(i, p, Sampling(logprobs=3, **more), max_tokens=24)
        for i, (p, more) in enumerate(
            zip(prompts(model.config.vocabulary), [{}, {"temperature": 0.8, "seed": 5}, {}])
        )
    ]
    solo = Engine(model, requests=1, **how)
    alone = {r.id: run(solo, [r])[0][r.id] for r in requests}
    for wrong in (0, 4):
        engine = Engine(
            model, requests=4, proposer=Oracle(ids(alone), wrong), guesses=GUESSES, **how
        )
        found, _ = run(engine, requests)
        assert {i: stream(made) for i, made in found.items()} == {
            i: stream(made) for i, made in alone.items()
        }
        assert engine.speculation is not None and engine.speculation.true > 20


def test_guesses_make_nothing_after_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is bound or compiled while requests run, whatever number of guesses comes."""
    model = engine_model("llama")
    how: dict[str, Any] = {"requests": 2, "context": 64, "page": 8, "chunk": 4}
    engine = Engine(model, proposer=DraftModel(Engine(model, **how)), guesses=GUESSES, **how)
    engine.prepare(variants=SERVED[:1])

    def refused(*_: Any) -> None:
        raise AssertionError("something is made anew")

    for kind in (Bound, Executable):
        monkeypatch.setattr(kind, "__init__", refused)
    ways = [None, Sampling(temperature=0.9, seed=3)]
    requests = [
        Request(i, prompt(3 + 5 * i), ways[i % 2], max_tokens=6 + 9 * (i % 3)) for i in range(7)
    ]
    found, _ = run(engine, requests)
    assert [len(found[r.id]) for r in requests] == [r.max_tokens for r in requests]
    assert engine.speculation is not None and engine.speculation.true > 30


# ---- their distribution ---------------------------------------------------------------------


class Likeliest(Reader):
    """Guesses the likeliest tokens, by a plain forward pass."""

    def __init__(self, logits: Any) -> None:
        self.logits = logits

    def guess(self, works: Sequence[Any], most: Sequence[int]) -> list[list[int]]:
        found = []
        for work, count in zip(works, most):
            known = list(work.known)
            for _ in range(count):
                known.append(int(self.logits(tuple(known))[-1].argmax()))
            found.append(known[len(work.known) :])
        return found


OUTCOMES, TOKENS, WAVE, DRAWS = 2, 4, 16, 960
CRITICAL = 37.7  # of chi-square with 2 ** 4 - 1 degrees of freedom: one in a thousand is above


@functools.cache
def reader(llm: LLM) -> Any:
    """The logits after each of some tokens, by the plain forward pass."""

    @tg.jit
    def forward(model: Any, tokens: Any) -> Any:
        return model(tokens)

    @functools.cache
    def logits(known: tuple[int, ...]) -> Any:
        window = np.zeros((1, 64), np.int64)
        window[0, : len(known)] = known
        with tg.no_grad():
            return forward(llm.model, tg.tensor(window)).numpy()[0, : len(known)].copy()

    return logits


def statistic(llm: LLM) -> tuple[float, Engine]:
    """Chi-square of answers to fixed seeds against the products of the model's own distributions.

    Requests come in waves, so that all of one decode together and have guesses.
    """
    how: dict[str, Any] = {"temperature": 1.5, "top_k": OUTCOMES}
    logits = reader(llm)
    engine = engine_of(llm, Likeliest(logits), requests=WAVE, context=64)
    drawn: Counter[tuple[int, ...]] = Counter()
    for first in range(0, DRAWS, WAVE):
        wave = [
            Request(seed, PROMPT, Sampling(seed=seed, **how), max_tokens=TOKENS)
            for seed in range(first, first + WAVE)
        ]
        drawn.update(tuple(made) for made in ids(run(engine, wave)[0]).values())
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for made, share in expected.items():
            p = distribution(logits((*PROMPT, *made))[-1], **how)
            longer |= {(*made, int(t)): share * p[t] for t in np.flatnonzero(p)}
        expected = longer
    assert len(expected) == OUTCOMES**TOKENS and drawn.total() == DRAWS
    assert min(expected.values()) * DRAWS > 4  # enough of each for the test to hold
    never = sum(count for made, count in drawn.items() if made not in expected)
    found = sum((drawn[k] - DRAWS * p) ** 2 / (DRAWS * p) for k, p in expected.items())
    return found + never, engine


def test_the_distribution_is_that_of_the_model(llm: LLM) -> None:
    found, engine = statistic(llm)
    assert found < CRITICAL
    speculation = engine.speculation
    assert speculation is not None and speculation.guessed > 800
    assert 0.3 < speculation.true / speculation.guessed < 0.9


def test_guesses_that_are_always_taken_would_be_seen(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above fails where every guess counts as true."""
    from tilegrad.generate import speculative

    monkeypatch.setattr(speculative, "came_true", lambda guesses, drawn: len(guesses))
    assert statistic(llm)[0] > 2 * CRITICAL


# ---- a draft model --------------------------------------------------------------------------


def other_weights(path: Path, much: float) -> LLM:
    """A model with the same words, and weights that differ a little."""
    random = np.random.default_rng(1)
    metadata = read_gguf(write_file(path, context=256)).metadata
    drawn = {
        name: (array + much * random.standard_normal(array.shape)).astype(np.float32)
        for name, array in weights().items()
    }
    write_gguf(path, metadata, drawn, kinds={"tokenizer.ggml.merges": ("array", "string")})
    return LLM(path, requests=1)


@pytest.mark.parametrize("much", [0.0, 0.02])
def test_a_draft_model_changes_no_answer(llm: LLM, tmp_path: Path, much: float) -> None:
    """Greedy and drawn: with the same weights every guess is true, at any temperature."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    draft = other_weights(tmp_path / "other.gguf", much).model
    proposer = DraftModel(Engine(draft, requests=4, context=256, page=16))
    engine = engine_of(llm, proposer)
    found, _ = run(engine, several())
    assert ids(found) == ids(plain(llm)[0])
    speculation = engine.speculation
    assert speculation is not None and speculation.guessed > 100
    if much:
        assert 0.1 < speculation.true / speculation.guessed < 1
    else:
        assert speculation.true / speculation.guessed > 0.95
    assert not proposer.engine.busy


# ---- LLM ------------------------------------------------------------------------------------


def test_llm(llm: LLM, tmp_path: Path) -> None:
    text = "one two three one two three one two"
    wanted = llm.generate(text, max_tokens=40)
    fast = LLM(llm.path, requests=2, speculate="ngram", guesses=4)
    assert fast.generate(text, max_tokens=40).tokens == wanted.tokens
    pieces = list(fast.stream(text, max_tokens=40, stop=wanted.text[20:22]))
    assert "".join(p.text for p in pieces) == wanted.text[: wanted.text.index(wanted.text[20:22])]
    drawn = fast.generate([text, "abc"], max_tokens=20, temperature=1.0, seed=4)
    assert [a.tokens for a in drawn] == [
        a.tokens for a in llm.generate([text, "abc"], max_tokens=20, temperature=1.0, seed=4)
    ]
    assert len(fast.generate(text, max_tokens=9, temperature=1.0).tokens) <= 9  # without a seed
    doubled = LLM(llm.path, requests=2, speculate=llm.path)
    assert doubled.generate(text, max_tokens=20).tokens == wanted.tokens[:20]
    assert doubled.engine.speculation is not None and doubled.engine.speculation.true > 10


def test_what_cannot_guess_is_refused(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing can guess"):
        LLM(llm.path, speculate=3)
    with pytest.raises(UserError, match="guesses"):
        LLM(llm.path, speculate="ngram", guesses=0)
    path = write_file(tmp_path / "other.gguf")
    other = LLM(path, requests=1)
    other.tokenizer.texts = other.tokenizer.texts[:-1]
    with pytest.raises(UserError, match="other words"):
        LLM(llm.path, speculate=other)
    with pytest.raises(UserError, match="canary"):
        engine_of(llm, Lookup(), canary=True)
