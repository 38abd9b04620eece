"""After `prepare` nothing is traced, compiled or bound, whatever comes; few writes a step."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from test_engine import finish, greedy, ids, is_idle, model_of, prompt

from tilegrad.generate import ledger
from tilegrad.generate.engine import Engine
from tilegrad.generate.request import Request
from tilegrad.generate.sampling import Sampling
from tilegrad.generate.sampling_limits import SERVED
from tilegrad.runtime.executable import Binding, Executable
from tilegrad.tensor.bound import Bound
from tilegrad.tensor.jit import Jitted

KINDS: list[Sampling | None] = [
    None,
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=0.7, top_k=5, top_p=0.9, seed=1, repetition_penalty=1.2),
    Sampling(logprobs=2),
    Sampling(logit_bias={5: 2.0}),
]


@pytest.fixture(scope="module")
def prepared() -> Engine:
    """Three slots, chunks of up to 16 tokens, all sizes made."""
    told: list[tuple[float, float]] = []
    engine = Engine(model_of("llama"), requests=3, context=64, page=8, chunk=16)
    engine.prepare(lambda what, done, total: told.append((done, total)))
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] == len(told) - 1
    return engine


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What is made from now on: traces, Executables, Bindings and Bounds, and plain calls."""
    counts: Counter[str] = Counter()
    makers = [(kind, "__init__") for kind in (Bound, Binding, Executable)]
    for kind, name in [*makers, (Jitted, "_trace"), (Jitted, "_general")]:

        def counted(*given: Any, _kind: Any = kind, _made: Any = getattr(kind, name)) -> Any:
            counts[_kind.__name__] += 1
            return _made(*given)

        monkeypatch.setattr(kind, name, counted)
    return counts


def test_requests_of_any_length_make_nothing_anew(prepared: Engine, events: Counter[str]) -> None:
    """Thirty requests of random lengths and kinds come and go; some are cancelled."""
    chance, engine = random.Random(2), prepared
    lengths = {i: chance.randrange(1, 50) for i in range(30)}
    found: dict[Any, Any] = {}
    waiting = list(lengths)
    steps = 0
    while waiting or engine.busy:
        while waiting and chance.random() < 0.4:
            number = waiting.pop(0)
            sampling = KINDS[number % len(KINDS)]
            engine.add(Request(number, prompt(lengths[number]), sampling, max_tokens=8))
        if chance.random() < 0.05 and engine.running:
            engine.cancel(next(iter(engine.running)))
        for produced in engine.step():
            found.setdefault(produced.id, []).append(produced)
        steps += 1
    assert not events and steps > 40 and is_idle(engine)
    for number in (i for i in lengths if KINDS[i % len(KINDS)] is None):
        made = ids(found.get(number, []))
        assert made == greedy("llama", prompt(lengths[number]))[: len(made)]


def test_two_variants_serve_all(prepared: Engine) -> None:
    assert {key[1] for key in prepared.steps._decoding} == set(SERVED)
    assert {key[2] for key in prepared.steps._chunks} == set(SERVED)
    for sampling in KINDS:
        served = prepared.steps._serving(Request(0, (1,), sampling).variant)
        assert served in SERVED
    plain = Request(0, (1,), KINDS[1]).variant
    assert prepared.steps._serving(plain) == SERVED[0]


def test_writes_of_a_step(prepared: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that begins a request: what it takes, the table, and sampling if it has some; one
    that goes on as before: nothing; one in which an answer grows by a page: what it takes."""
    engine, writes = prepared, [0]
    for number in range(engine.requests):  # no slot remembers how it sampled before
        engine.add(Request(number, prompt(2), max_tokens=2))
    finish(engine)
    put = ledger.put

    def counted(*given: Any) -> None:
        writes[0] += 1
        put(*given)

    monkeypatch.setattr(ledger, "put", counted)

    def step() -> int:
        writes[0] = 0
        engine.step()
        return writes[0]

    engine.add(Request("a", prompt(6), max_tokens=20))
    engine.add(Request("b", prompt(3), Sampling(temperature=1.0, seed=2), max_tokens=20))
    assert step() == 3  # of two requests at once
    assert step() == 1  # the first that only decodes
    assert step() == 0 and engine.running["a"].fed == 8
    assert step() == 1  # a's ninth token is on a new page
    counts = [step() for _ in range(8)]
    assert sum(counts) == 2 and max(counts) == 1  # b's ninth token, a's seventeenth
    engine.add(Request("c", prompt(9), max_tokens=4))
    assert step() == 2 and step() <= 1  # greedy: no sampling
    engine.add(Request("d", prompt(4), KINDS[2], max_tokens=2))
    while "d" not in engine.running:
        writes[0] = 0
        engine.step()
    assert writes[0] == 4  # and the counts of its tokens
    finish(engine)


def test_sizes_are_made_when_first_met(events: Counter[str]) -> None:
    """Without `prepare`: powers of two to decode, and nothing twice."""
    engine = Engine(model_of("llama"), requests=4, context=64, page=16, chunk=16)
    for number in range(3):
        engine.add(Request(number, prompt(5), max_tokens=4))
    finish(engine)
    assert {size for size, _ in engine.steps._decoding} == {4}
    made = events["Bound"]
    for number in range(3):
        engine.add(Request(number, prompt(5), max_tokens=4))
    finish(engine)
    assert events["Bound"] <= made + 2  # the prompt is known, so its steps are smaller
    again = events["Bound"]
    engine.add(Request("one", prompt(5), max_tokens=4))
    finish(engine)
    assert {size for size, _ in engine.steps._decoding} == {4, 1} and events["Bound"] > again
