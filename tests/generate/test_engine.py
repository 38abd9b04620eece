"""The engine against plain forward passes: chunks, arrivals, padding, pages, cancelling."""

import functools
from typing import Any

import numpy as np
import pytest
from decoder_families import loaded, tokens

import tilegrad as tg
from tilegrad.compiler import breaks
from tilegrad.core.config import config, override
from tilegrad.core.errors import UserError
from tilegrad.generate.batcher import Batch
from tilegrad.generate.engine import Engine
from tilegrad.generate.request import Produced, Request
from tilegrad.generate.sampling import Sampling, Variant
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import Expr
from tilegrad.models.decoder.model import Decoder

COUNT = 8
LENGTHS = (5, 37, 12, 3, 20)


def whole(model: Decoder, given: Any) -> Any:
    """Logits of all tokens."""
    return model(given)


model_of = functools.cache(loaded)
forward = tg.jit(whole)


@functools.cache
def prompt(length: int) -> tuple[int, ...]:
    return tuple(int(t) for t in tokens(length, seed=length))


@functools.cache
def logits(name: str, given: tuple[int, ...]) -> Any:
    """Logits of tokens, in a window of one size for all."""
    window = np.zeros((1, 64), np.int64)
    window[0, : len(given)] = given
    return forward(model_of(name), tg.tensor(window)).numpy()[0, : len(given)].copy()


@functools.cache
def greedy(name: str, given: tuple[int, ...], count: int = COUNT) -> list[int]:
    """The tokens after a prompt, each the likeliest, by plain forward passes."""
    known = given
    for _ in range(count):
        known = (*known, int(logits(name, known)[-1].argmax()))
    return list(known[len(given) :])


def finish(engine: Engine, found: dict[Any, list[Produced]] | None = None) -> dict[Any, Any]:
    """Run all requests to their ends: what each produced."""
    found = {} if found is None else found
    while engine.busy:
        for produced in engine.step():
            found.setdefault(produced.id, []).append(produced)
    return found


def ids(produced: list[Produced]) -> list[int]:
    return [p.token for p in produced]


def is_idle(engine: Engine) -> bool:
    """Whether all slots and pages are free, or idle."""
    engine.batcher.check()
    free = sorted(engine.batcher.slots) == list(range(engine.requests)) and not engine.busy
    return free and engine.pool.available == engine.pool.pages


@functools.cache
def shared(name: str) -> Engine:
    """One engine a model, so that each step is compiled once: 3 slots, chunks of 16 tokens."""
    return Engine(model_of(name), requests=3, context=64, page=16, pages=9, chunk=16)


@pytest.mark.sampled(2, also=("gemma3",))
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "gpt2"])
def test_tokens_are_those_of_plain_forward_passes(name: str) -> None:
    """Five requests on three slots: prompts in chunks beside those that decode, then buckets."""
    engine = shared(name)
    for i, length in enumerate(LENGTHS):
        engine.add(Request(i, prompt(length), max_tokens=COUNT))
    found = finish(engine)
    for i, length in enumerate(LENGTHS):
        assert ids(found[i]) == greedy(name, prompt(length))
        assert [p.finished for p in found[i]] == [None] * (COUNT - 1) + ["length"]
    assert is_idle(engine)


def test_arrivals_and_cancelling_do_not_change_what_others_get() -> None:
    engine = shared("llama")
    engine.add(Request("a", prompt(20), max_tokens=12))
    found: dict[Any, list[Produced]] = {}
    for number in range(40):
        if number == 3:
            engine.add(Request("b", prompt(37), max_tokens=COUNT))
            engine.add(Request("c", prompt(3), max_tokens=20))
        if number == 5:
            engine.add(Request("d", prompt(5), max_tokens=COUNT))  # waits: no slot is free
            engine.add(Request("e", prompt(12), max_tokens=COUNT))
        if number == 6:
            assert list(engine.waiting) == ["d", "e"]
            assert engine.cancel("c") and engine.cancel("d") and not engine.cancel("c")
        for produced in engine.step():
            found.setdefault(produced.id, []).append(produced)
    assert ids(found["a"]) == greedy("llama", prompt(20), 12)
    assert ids(found["b"]) == greedy("llama", prompt(37))
    assert ids(found["e"]) == greedy("llama", prompt(12))
    assert "d" not in found and len(found["c"]) < 20
    assert ids(found["c"]) == greedy("llama", prompt(3), 20)[: len(found["c"])]
    assert is_idle(engine) and engine.step() == []


def test_a_step_may_begin_before_the_last_is_read() -> None:
    """As on a GPU: what stops or is cancelled meanwhile harms nobody, and its slot is used anew."""
    engine = shared("llama")
    engine.overlaps = True
    begun: list[int] = []
    launch = engine._launch

    def counted(batch: Batch) -> Any:
        begun.append(len(engine._under_way))
        return launch(batch)

    engine._launch = counted  # type: ignore[method-assign]
    try:
        wanted = greedy("llama", prompt(3), 20)
        stop = next(t for t in wanted[4:] if t not in wanted[:4])
        engine.add(Request("stops", prompt(3), stop_tokens=frozenset({stop}), max_tokens=20))
        engine.add(Request("a", prompt(20), max_tokens=20))
        engine.add(Request("gone", prompt(12), max_tokens=20))
        engine.add(Request("late", prompt(5), max_tokens=COUNT))
        found: dict[Any, list[Produced]] = {}
        for _ in range(6):
            for produced in engine.step():
                found.setdefault(produced.id, []).append(produced)
        engine.cancel("gone")
        finish(engine, found)
    finally:
        engine.overlaps, engine._launch = False, launch  # type: ignore[method-assign]
    assert ids(found["stops"]) == wanted[: wanted.index(stop) + 1]
    assert ids(found["a"]) == greedy("llama", prompt(20), 20)
    assert ids(found["late"]) == greedy("llama", prompt(5))
    assert ids(found["gone"]) == greedy("llama", prompt(12), 20)[: len(found["gone"])]
    assert begun.count(1) > 10 and is_idle(engine) and not engine._under_way


def test_any_number_of_requests() -> None:
    """A decode step has no more rows than there are requests, be that a power of two or not."""
    engine = Engine(model_of("llama"), requests=5, context=64)
    for length in LENGTHS:
        engine.add(Request(length, prompt(length), max_tokens=4))
    found = finish(engine)
    assert all(ids(found[length]) == greedy("llama", prompt(length), 4) for length in LENGTHS)


def test_a_stop_token_ends_a_request() -> None:
    engine, wanted = shared("llama"), greedy("llama", prompt(3))
    stop = next(t for t in wanted[1:] if t != wanted[0])
    engine.add(Request(0, prompt(3), stop_tokens=frozenset({stop}), max_tokens=COUNT))
    found = finish(engine)[0]
    assert ids(found) == wanted[: wanted.index(stop) + 1]
    assert found[-1].finished == "stop" and is_idle(engine)


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.0, seed=4)])
def test_stop_tokens_are_held_back_before_min_tokens(sampling: Sampling | None) -> None:
    """All tokens but three stop: without min_tokens the first would; each row on its own."""
    engine = shared("llama")
    stops = frozenset(range(96)) - {5, 17, 40}
    for id, least in (("held", 4), ("free", 0)):
        engine.add(Request(id, prompt(3), sampling, stops, max_tokens=8, min_tokens=least))
    engine.add(Request("other", prompt(5), max_tokens=COUNT))
    found = finish(engine)
    assert set(ids(found["held"])[:4]) <= {5, 17, 40} and len(found["held"]) > 4
    if sampling is None:  # of three tokens the likeliest, by the model's own logits
        known = prompt(3)
        for token in ids(found["held"])[:4]:
            allowed = logits("llama", known)[-1][[5, 17, 40]]
            assert token == (5, 17, 40)[int(allowed.argmax())]
            known = (*known, token)
        assert ids(found["held"])[4] == int(logits("llama", known)[-1].argmax())
        assert ids(found["free"])[:1] == greedy("llama", prompt(3))[:1]
    assert found["free"][0].finished == "stop" or ids(found["free"])[0] in {5, 17, 40}
    assert ids(found["other"]) == greedy("llama", prompt(5)) and is_idle(engine)


def test_score_is_that_of_plain_forward_passes() -> None:
    engine, given = shared("llama"), prompt(37)
    rows = logits("llama", given).astype(np.float64)
    wanted = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    found = engine.score(given)
    np.testing.assert_allclose(found, wanted[np.arange(36), given[1:]], atol=1e-4)
    assert found.dtype == np.float32 and is_idle(engine)
    np.testing.assert_array_equal(engine.score(np.array(given)), found)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="not in the vocabulary"):
        engine.score(np.array([1, 96]))  # type: ignore[arg-type]


def test_what_can_never_be_served_is_refused() -> None:
    engine = shared("llama")
    refused = [
        (Request(0, prompt(37), max_tokens=28), r"at most 64 tokens"),
        (Request(0, (1, 96), max_tokens=1), "not in the vocabulary"),
        (Request(0, (1,), Sampling(logit_bias={96: 1.0})), "logit_bias has tokens"),
    ]
    for request, why in refused:
        with pytest.raises(UserError, match=why):
            engine.add(request)
    engine.add(Request(0, prompt(3)))
    with pytest.raises(UserError, match="one id"):
        engine.add(Request(0, prompt(3)))
    engine.cancel(0)
    small = Engine(model_of("llama"), requests=1, context=64, page=16, pages=2)
    with pytest.raises(UserError, match="never hold"):
        small.add(Request(0, prompt(20), max_tokens=13))
    wrong_fields: list[dict[str, Any]] = [
        {"min_tokens": 17},
        {"min_tokens": -1},
        {"priority": 0.5},
        {"salt": None},
        {"min_tokens": 1, "stop_tokens": frozenset(range(513))},
    ]
    for fields in wrong_fields:
        with pytest.raises(UserError):
            Request(0, (1,), **fields)
    for wrong in ((), prompt(3)):
        with pytest.raises(UserError):
            Request(0, wrong, max_tokens=1 if not wrong else 0)
    with pytest.raises(UserError, match="longer than the model"):
        Engine(model_of("llama"), context=129)
    with pytest.raises(UserError, match="cannot score"):
        engine.score([1])
    assert is_idle(engine)


@pytest.mark.parametrize("overlaps", (False, True))
def test_steps_of_few_keys_are_steps_of_their_own(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that grows past them goes on in the step for any number; each compiles once."""

    def few(node: Node, target: Any) -> list[tuple[Expr, int]]:
        most = node.attrs.get("most_keys")
        return [(most, 17)] if isinstance(most, Expr) else []

    monkeypatch.setattr(breaks, "_breaks", few)
    told: list[float] = []
    engine = Engine(
        model_of("llama"),
        requests=2,
        context=64,
        page=16,
        tell=lambda what, done, total: told.append(done),
    )
    engine.overlaps = overlaps
    seen: list[tuple[int, int | None]] = []
    launch = engine.steps.decode

    def noted(slots: Any, tails: Any, columns: Any, variant: Any, keys: int) -> Any:
        seen.append((keys, int(engine.cache.lengths.numpy()[slots[0]])))
        return launch(slots, tails, columns, variant, keys)

    monkeypatch.setattr(engine.steps, "decode", noted)
    for _ in range(2):
        engine.add(Request("a", prompt(10), max_tokens=20))
        assert ids(finish(engine)["a"]) == greedy("llama", prompt(10), 20)
    assert all(keys > length for keys, length in seen)  # those it has, and the new one
    bounds = engine.steps._decoding[1, Variant()]
    assert [bound.ranges for bound in bounds] == [{"keys": (1, 16)}, {"keys": (17, 64)}]
    assert len(told) == 2 * 3  # and the step with the prompt
    assert engine.steps.bound(1) is bounds[0]


def test_all_steps_have_the_settings_that_the_engine_was_made_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps are bound when their sizes are first met: a setting that changes meanwhile would round
    some requests' products otherwise than those of their neighbours."""
    with override(dots="int8", determinism="invariant"):
        engine = Engine(model_of("llama"), requests=2, context=64, page=16)
    seen = {}
    for name in ("prepare", "ragged", "score"):

        def heard(*given: Any, name: str = name) -> None:
            seen[name] = config().numerics
            raise InterruptedError

        monkeypatch.setattr(engine.steps, name, heard)
    engine.add(Request("a", prompt(5), max_tokens=3))
    for run in (engine.prepare, engine.step, engine.scoring(prompt(5), 0).step):
        with pytest.raises(InterruptedError), override(dots="tf32"):
            run()
    assert seen == dict.fromkeys(("prepare", "ragged", "score"), ("invariant", "int8"))
