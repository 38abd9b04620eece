"""A real tiny model with few pages: answers are those of an engine that has enough of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from test_engine import finish, greedy, ids, is_idle, model_of, prompt

from tilegrad.generate.engine import Engine
from tilegrad.generate.request import Produced, Request
from tilegrad.generate.sampling import Sampling

KINDS: dict[str, Sampling | None] = {
    "greedy": None,
    "seeded": Sampling(temperature=1.0, seed=7),
    "penalised": Sampling(
        temperature=0.8, seed=9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3
    ),
}
SIZES: dict[str, Any] = {"requests": 3, "context": 64, "page": 4, "chunk": 16}
SHARED = prompt(20)


def asked() -> list[Request]:
    """Prompts that begin alike, of all kinds."""
    return [
        Request((name, i), (*SHARED, i), sampling, max_tokens=16)
        for i in range(2)
        for name, sampling in KINDS.items()
    ]


@functools.cache
def alone() -> dict[Any, list[int]]:
    """What each gets in an engine of its own that shares nothing."""
    engine = Engine(model_of("llama"), **(SIZES | {"requests": 1}), prefix_cache=False)
    found = {}
    for request in asked():
        engine.add(request)
        found |= {id: ids(made) for id, made in finish(engine).items()}
    return found


def test_the_reference_is_plain_forward_passes() -> None:
    assert alone()["greedy", 0] == greedy("llama", (*SHARED, 0), 16)


@functools.cache
def engine_of(prefixes: bool) -> Engine:
    """Sixteen pages of four tokens: nine of them are one request's at its end."""
    return Engine(model_of("llama"), **SIZES, pages=16, prefix_cache=prefixes)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("prefixes", [False, True])
def test_answers_do_not_depend_on_preemption(prefixes: bool, overlaps: bool) -> None:
    engine = engine_of(prefixes)
    engine.overlaps = overlaps
    before = engine.batcher.preemptions
    found: dict[Any, list[Produced]] = {}
    for request in asked():
        engine.add(request)
    while engine.busy:
        for produced in engine.step():
            found.setdefault(produced.id, []).append(produced)
        engine.batcher.check()
    assert {id: ids(made) for id, made in found.items()} == alone()
    if not prefixes:
        assert engine.batcher.preemptions > before  # shared pages are fewer: there is room
    assert is_idle(engine)


def test_pages_are_taken_as_tokens_need_them() -> None:
    engine = engine_of(False)
    engine.overlaps = False
    engine.add(Request("a", prompt(6), max_tokens=20))
    engine.step()
    assert len(engine.running["a"].pages) == 2
    grown = []
    while engine.busy:
        engine.step()
        grown += [len(w.pages) for w in engine.running.values()]
    assert grown == sorted(grown) and set(grown) == {2, 3, 4, 5, 6} and is_idle(engine)


def test_a_prefix_is_told_and_its_tokens_are_not_fed_again() -> None:
    engine = Engine(model_of("llama"), **SIZES)
    fed: list[int] = []
    ragged = engine.steps.ragged

    def noted(parts: Any, variant: Any) -> Any:
        fed.append(sum(len(p.tokens or (0,)) for p in parts))
        return ragged(parts, variant)

    engine.steps.ragged = noted  # type: ignore[method-assign]
    cases = [("first", "", 0), ("again", "", 20), ("salted", "key", 0), ("salted 2", "key", 20)]
    for id, salt, cached in cases:
        fed.clear()
        engine.add(Request(id, (*SHARED, 1), max_tokens=5, salt=salt))
        found = finish(engine)[id]
        assert ids(found) == greedy("llama", (*SHARED, 1), 5)
        assert {p.cached for p in found} == {cached} and sum(fed) == 21 - cached
    answer = ids(found)
    engine.add(Request("on", (*SHARED, 1, *answer, 2), max_tokens=2))  # a conversation goes on
    assert finish(engine)["on"][0].cached == 24  # of the answer too: all full pages
    engine.add(Request("off", SHARED, max_tokens=2))
    assert finish(engine)["off"][0].cached == 16  # its last token is computed
    assert is_idle(engine)


def test_a_step_that_fails_leaves_nothing_in_the_prefix_cache() -> None:
    engine = engine_of(True)
    engine.overlaps = False
    wanted = prompt(37)
    engine.add(Request("a", wanted, max_tokens=4))
    ragged, seen = engine.steps.ragged, []

    def fails(*given: Any) -> Any:
        seen.append(given)
        if len(seen) == 2:
            raise RuntimeError("put in")
        return ragged(*given)

    engine.steps.ragged = fails  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError, match="put in"):
            finish(engine)
    finally:
        engine.steps.ragged = ragged  # type: ignore[method-assign]
    assert is_idle(engine)
    engine.add(Request("b", wanted, max_tokens=4))
    made = finish(engine)["b"]
    assert made[0].cached == 0 and ids(made) == greedy("llama", wanted, 4)
