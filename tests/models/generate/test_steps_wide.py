"""Ragged steps of many tokens are a function of their own where weights are unpacked first."""

from __future__ import annotations

import pytest
from decoder_families import loaded
from test_engine import finish, greedy, ids, prompt

from tilegrad.models.generate import steps
from tilegrad.models.generate.engine import Engine
from tilegrad.models.generate.request import Request
from tilegrad.models.generate.steps import Steps


@pytest.mark.parametrize("many", [0, 8])
def test_both_give_the_same_tokens(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "_unpacked_from", lambda self: many)
    engine = Engine(loaded("llama"), requests=2, context=64)
    for number, length in enumerate((5, 37)):
        engine.add(Request(number, prompt(length), max_tokens=8))
    found = finish(engine)
    for number, length in enumerate((5, 37)):
        assert ids(found[number]) == greedy("llama", prompt(length))
    engine.add(Request(2, prompt(3), max_tokens=8))
    assert ids(finish(engine)[2]) == greedy("llama", prompt(3))
    wide = [key[2] for key in engine.steps._compiled if key[0] == "ragged"]
    assert wide == [False] if not many else set(wide) == {False, True}


@pytest.mark.parametrize("chunk, many", [(7, 0), (8, 0), (9, 8)])
def test_chunks_that_are_never_wide_have_one(
    chunk: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "unpacked_from", lambda dtype, device: 8)
    monkeypatch.setattr(steps, "stored_in", list)  # as if its weights were those of a file
    engine = Engine(loaded("llama"), requests=1, context=64, chunk=chunk)
    assert engine.steps.many == many
    engine.add(Request(0, prompt(37), max_tokens=8))
    assert ids(finish(engine)[0]) == greedy("llama", prompt(37))


def test_models_of_whole_weights_have_one() -> None:
    found = Engine(loaded("llama"), requests=1, context=64).steps
    assert found.many == 0 and found._wide is found._ragged
