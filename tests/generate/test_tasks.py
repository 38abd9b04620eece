"""Threads on one LLM, with failures put in: every request ends, with what it gets alone or with an
error of its own; slots and pages are free at the end."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import write_file

import tilegrad as tg
from tilegrad import nn
from tilegrad.core.errors import InternalError, StateError, UserError
from tilegrad.generate.llm import LLM
from tilegrad.generate.sampling_state import SamplingState
from tilegrad.generate.tasks import Turns
from tilegrad.models.tokens.detokenize import Detokenizer

POISON = 7  # a byte whose embedding is NaN
LIMIT = 600.0  # seconds after which a thread hangs
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 9, "seed": 1},
    {"stop": ["\u2603", "e"]},
    {"logit_bias": {65: 4.0}},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Three requests at a time, pages for two of the longest."""
    llm = LLM(write_file(tmp_path_factory.mktemp("model") / "tiny.gguf"), requests=3)
    embedding = llm.model.embed.weight.numpy().copy()
    llm.model.head.weight = nn.Parameter(tg.tensor(embedding))  # tied no more
    embedding[POISON] = np.nan
    llm.model.embed.weight.assign(tg.tensor(embedding))
    llm.model.requires_grad_(False)
    del llm.engine.pool.free[:2]
    llm.engine.pool.pages -= 2
    del llm.engine.pool.counts[-2:]
    return llm


@pytest.fixture(autouse=True)
def nothing_stays(llm: LLM, quick_collect: None) -> Any:
    yield
    gc.collect()
    engine = llm.engine
    engine.batcher.check()
    assert engine.pool.available == engine.pool.pages and not any(engine.pool.counts)
    assert sorted(engine.batcher.slots) == [0, 1, 2] and not engine.busy and not llm._tasks
    assert llm.generate("tiles", max_tokens=4).tokens == llm.generate("tiles", max_tokens=4).tokens


def in_threads(*works: Callable[[], None]) -> None:
    """Run all at once; an error of a test, or one that hangs, is one of this thread."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(w,), daemon=True) for w in works]
    for thread in threads:
        thread.start()
    end = time.monotonic() + LIMIT
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    if errors:
        raise errors[0]


# ---- one failure at a time ------------------------------------------------------------------


def test_text_that_fails_ends_its_own_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = llm.generate("abc", max_tokens=12).tokens
    add = Detokenizer.add

    def fails(self: Any, token: int) -> str:
        if "\u2603" in self.automaton.stops and self.count == 3:
            raise UserError("no such token", op="decode")
        return add(self, token)

    monkeypatch.setattr(Detokenizer, "add", fails)
    beside, bad = llm.stream("abc", max_tokens=12), llm.stream("xyz", max_tokens=12, stop="\u2603")
    tokens = [next(beside).token]
    came = []
    with pytest.raises(UserError, match="no such token"):
        came += [piece.token for piece in bad]
    assert (*tokens, *(p.token for p in beside)) == wanted
    monkeypatch.undo()
    assert next(bad, None) is None


def test_a_bad_prompt_among_several(llm: LLM) -> None:
    stream = llm.stream("abc", max_tokens=12)
    first = next(stream).token
    with pytest.raises(UserError, match="not finite"):
        llm.generate(["good", [65, POISON], "fine"], max_tokens=12)
    assert (first, *(p.token for p in stream)) == llm.generate("abc", max_tokens=12).tokens


def test_a_request_that_cannot_begin_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = llm.generate("abc", max_tokens=6).tokens

    def fails(self: Any, *given: Any, **named: Any) -> None:
        raise InternalError("set_row", "put in")

    monkeypatch.setattr(SamplingState, "set_row", fails)
    beside = llm.stream("abc", max_tokens=6)
    tokens = [next(beside).token]
    with pytest.raises(InternalError, match="put in"):
        llm.generate("x", max_tokens=6, temperature=1.0)
    assert (*tokens, *(p.token for p in beside)) == wanted


def test_a_request_the_engine_has_no_more_ends(llm: LLM) -> None:
    streams = [llm.stream("abc", max_tokens=40) for _ in range(2)]
    for stream in streams:
        next(stream)
    for number in list(llm.engine.running):
        llm.engine.cancel(number)
    for stream in streams:
        with pytest.raises(StateError, match="no more"):
            list(stream)


def test_steps_of_others_that_fail_do_not_end_who_waits(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs them, as nobody else does, and begins after them."""
    wanted = llm.generate("late", max_tokens=5).tokens
    streams = [llm.stream("abc", max_tokens=60) for _ in range(3)]
    for stream in streams:
        next(stream)
    launch = llm.engine.steps.decode

    def fails(*given: Any) -> Any:
        monkeypatch.setattr(llm.engine.steps, "decode", launch)
        raise InternalError("launch", "put in")

    monkeypatch.setattr(llm.engine.steps, "decode", fails)
    assert llm.generate("late", max_tokens=5).tokens == wanted
    for stream in streams:
        with pytest.raises(InternalError, match="put in"):
            list(stream)


def test_who_streams_gets_tokens_as_they_come(llm: LLM) -> None:
    """A thread that steps all the time does not keep another's tokens from it."""
    gaps: list[int] = []
    steps = [0]
    step = llm.engine.step

    def counted() -> Any:
        steps[0] += 1
        time.sleep(0.002)  # a real step takes longer, and frees the interpreter as this does
        return step()

    def ask() -> None:
        seen = steps[0]
        for _ in llm.stream("abc", max_tokens=100, ignore_end=True):
            gaps.append(steps[0] - seen)
            seen = steps[0]

    llm.engine.step = counted  # type: ignore[method-assign]
    try:
        in_threads(ask, ask, lambda: llm.generate("x", max_tokens=100, ignore_end=True))
    finally:
        llm.engine.step = step  # type: ignore[method-assign]
    assert len(gaps) == 200 and sum(gap > 3 for gap in gaps) < 20


# ---- all at once ----------------------------------------------------------------------------


class Injected(Exception):
    """A failure that a test put in."""


def failing(llm: LLM, chance: random.Random, patch: pytest.MonkeyPatch) -> None:
    """Steps, texts and beginnings that fail now and then; threads that lose their turn anywhere."""
    engine, add, set_row = llm.engine, Detokenizer.add, SamplingState.set_row
    launch, ragged = engine.steps.decode, engine.steps.ragged

    def maybe(odds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def done(*given: Any, **named: Any) -> Any:
            if chance.random() < odds:
                raise Injected
            return work(*given, **named)

        return done

    patch.setattr(engine.steps, "decode", maybe(0.02, launch))
    patch.setattr(engine.steps, "ragged", maybe(0.02, ragged))
    patch.setattr(Detokenizer, "add", lambda self, token: maybe(0.005, add)(self, token))
    failing_row = maybe(0.05, set_row)
    patch.setattr(
        SamplingState, "set_row", lambda self, *given, **named: failing_row(self, *given, **named)
    )


def asks(llm: LLM, chance: random.Random, alone: dict[Any, Any], ended: list[str]) -> None:
    """Some requests of one thread, one after the other: each is right, or fails by itself."""
    for _ in range(12):
        (prompt, number, count), (tokens, finish) = chance.choice(list(alone.items()))
        how = {"max_tokens": count, "ignore_end": True, **KINDS[number]}
        bad = chance.random() < 0.15
        given: Any = [*prompt.encode(), POISON] if bad else prompt
        came: list[int] = []
        leaves = chance.random() < 0.25
        try:
            if chance.random() < 0.4:
                answer = llm.generate(given, **how)
                came, ending = list(answer.tokens), answer.finish
            else:
                ending = "left"
                stream = llm.stream(given, **how)
                for piece in stream:
                    came.append(piece.token)
                    ending = piece.finish or ending
                    if leaves and chance.random() < 0.3:
                        if chance.random() < 0.5:
                            stream.close()
                        else:
                            llm.engine.cancel(-1)  # which nobody has
                        break
                del stream
        except Injected:
            ending = "injected"
        except UserError as error:
            assert bad and "not finite" in str(error) and not came
            ending = "bad"
        if ending in ("left", "injected"):
            assert tuple(came) == tokens[: len(came)]
        elif ending != "bad":
            assert not bad and (tuple(came), ending) == (tokens, finish)
        ended.append(ending)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("overlaps", [False, True])
def test_threads_with_failures(llm: LLM, seed: int, overlaps: bool) -> None:
    chance = random.Random(seed)
    alone = {}
    for _ in range(10):
        prompt = "".join(chance.choices("abcdefg ", k=chance.randint(1, 40)))
        number, count = chance.randrange(len(KINDS)), chance.randint(1, 24)
        answer = llm.generate(prompt, max_tokens=count, ignore_end=True, **KINDS[number])
        alone[prompt, number, count] = (answer.tokens, answer.finish)
    ended: list[str] = []
    llm.engine.overlaps = overlaps
    try:
        with pytest.MonkeyPatch.context() as patch:
            failing(llm, chance, patch)
            in_threads(
                *(
                    lambda n=n: asks(llm, random.Random(100 * seed + n), alone, ended)
                    for n in range(6)
                )
            )  # type: ignore[misc]
    finally:
        llm.engine.overlaps = False
    assert len(ended) == 72 and {"injected", "bad", "left", "length"} <= set(ended)


def test_the_file_is_where_the_user_is(llm: LLM) -> None:
    """An error that another thread found names the line of who asked."""
    seen: list[str] = []

    def ask() -> None:
        with pytest.raises(UserError) as caught:
            llm.generate([65, POISON], max_tokens=3)
        seen.append(str(caught.value))

    in_threads(ask, lambda: llm.generate("abc", max_tokens=30))
    assert Path(__file__).name in seen[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_the_turn():
    """Threads have the turn and wait for it; a child that lacks them takes it all the same."""
    turns, stop = Turns(), threading.Event()

    def live():
        while not stop.is_set():
            with turns.step(lambda: False):
                stop.wait(0.001)
            with turns.taken():
                pass

    threads = [threading.Thread(target=live) for _ in range(3)]
    for thread in threads:
        thread.start()
    codes = []
    for _ in range(20):
        child = os.fork()
        if child == 0:
            signal.alarm(300)  # ends a child that hangs
            with turns.step(lambda: False) as mine, turns.taken():
                os._exit(0 if mine else 3)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    stop.set()
    for thread in threads:
        thread.join(LIMIT)
    assert codes == [0] * 20
