"""The canary finds pages that are not as they must be, and nothing where all is well."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from test_engine import finish, greedy, ids, is_idle, model_of, prompt

from tilegrad.core.errors import InternalError
from tilegrad.generate.engine import Engine
from tilegrad.generate.ledger import write
from tilegrad.generate.request import Produced, Request


@functools.cache
def watched() -> Engine:
    return Engine(
        model_of("llama"), requests=3, context=64, page=4, pages=30, chunk=16, canary=True
    )


def test_all_is_well() -> None:
    """Chunks, shared prefixes, growth and preemption: no false alarm, and the same tokens."""
    engine = watched()
    assert not engine.overlaps
    lengths = (20, 20, 37, 5, 3, 12)
    for number, length in enumerate(lengths):
        engine.add(Request(number, prompt(length), max_tokens=20))
    found = finish(engine)
    for number, length in enumerate(lengths):
        assert ids(found[number]) == greedy("llama", prompt(length), 20)
    engine.add(Request("again", prompt(12), max_tokens=20))
    made = finish(engine)["again"]
    assert ids(made) == greedy("llama", prompt(12), 20) and made[0].cached == 8
    assert engine.batcher.preemptions and is_idle(engine)


def begun(*others: str) -> Engine:
    engine = watched()
    for number, id in enumerate(("a", *others)):
        engine.add(Request(id, prompt(9 + number), max_tokens=20))
    for _ in range(3):
        assert not any(p.error for p in engine.step())
    return engine


def table_of(engine: Engine) -> Any:
    return np.array(engine.cache.table.numpy())


def errors_of(found: dict[Any, list[Produced]]) -> dict[Any, Exception]:
    return {id: made[-1].error for id, made in found.items() if made[-1].error is not None}


def test_a_corrupted_table_is_caught() -> None:
    """Entry 1 of a's row becomes a page of nobody: it is named, and b goes on."""
    engine = begun("b")
    work = engine.running["a"]
    page, stray = work.pages[1], engine.pool.free[0]
    row = table_of(engine)[work.slot]
    row[1] = stray
    write(engine.cache.table, work.slot, row[None])
    found = finish(engine)
    errors = errors_of(found)
    assert set(errors) == {"a"} and isinstance(errors["a"], InternalError)
    for word in ("'a'", f"page {stray}", f"not page {page}"):
        assert word in str(errors["a"])
    assert len(found["a"]) == 1  # at once
    assert ids(found["b"])[-1] == greedy("llama", prompt(10), 20)[-1] and is_idle(engine)


def test_a_page_that_another_writes_to_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """a is told a page of b for its next token: both are damaged, c is not."""
    engine = begun("b", "c")
    a, b = engine.running["a"], engine.running["b"]
    page, own = b.pages[0], a.pages[-1]
    decode = engine.steps.decode

    def mixed(slots: Any, tails: Any, *rest: Any) -> Any:
        wrong = [page if slot == a.slot else tail for slot, tail in zip(slots, tails)]
        return decode(list(slots), wrong, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(engine.steps, "decode", mixed)
        errors = {p.id: str(p.error) for p in engine.step() if p.error is not None}
    assert set(errors) == {"a", "b"}
    assert "request 'a'" in errors["a"] and f"is page {page}, not page {own}" in errors["a"]
    assert f"'b': page {page} (its entry 0)" in errors["b"]
    assert ids(finish(engine)["c"])[-1] == greedy("llama", prompt(11), 20)[-1] and is_idle(engine)


def test_a_mark_that_changes_is_caught() -> None:
    engine = begun("b")
    page = engine.running["b"].pages[0]
    assert engine._canary is not None
    write(engine._canary.marks.pages, page, np.array([12345]))
    errors = errors_of(finish(engine))
    assert set(errors) == {"b"} and f"page {page} " in str(errors["b"]) and is_idle(engine)
    engine.add(Request("again", prompt(10), max_tokens=4))
    made = finish(engine)["again"]
    assert ids(made) == greedy("llama", prompt(10), 4) and made[0].cached == 0
