"""Ragged steps of many tokens are compiled apart where the kernels for them are others."""

from __future__ import annotations

import pytest
from decoder_families import loaded
from test_engine import finish, greedy, ids, prompt

from tilegrad.compiler import breaks
from tilegrad.generate.engine import Engine
from tilegrad.generate.request import Request
from tilegrad.ir.node import Node
from tilegrad.ir.symbol import Expr


def many_from(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if kernels differed from so many tokens on; 0 for never."""

    def found(node: Node, target: object) -> list[tuple[Expr, int]]:
        tokens = node.inputs[0].shape[0]
        return [(tokens, count)] if count and isinstance(tokens, Expr) else []

    monkeypatch.setattr(breaks, "_breaks", found)


@pytest.mark.parametrize("many", [0, 8])
def test_both_give_the_same_tokens(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    many_from(many, monkeypatch)
    engine = Engine(loaded("llama"), requests=2, context=64)
    for number, length in enumerate((5, 37)):
        engine.add(Request(number, prompt(length), max_tokens=8))
    found = finish(engine)
    for number, length in enumerate((5, 37)):
        assert ids(found[number]) == greedy("llama", prompt(length))
    engine.add(Request(2, prompt(3), max_tokens=8))
    assert ids(finish(engine)[2]) == greedy("llama", prompt(3))
    ranges = {key[2] for key in engine.steps._compiled if key[0] == "ragged"}
    chunk = engine.chunk
    assert ranges == ({(1, 7), (8, chunk)} if many else {(1, chunk)})


@pytest.mark.parametrize(
    "chunk, many", [pytest.param(7, 0, marks=pytest.mark.slow), (8, 0), (9, 8)]
)
def test_chunks_that_are_never_wide_have_one(
    chunk: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_from(8, monkeypatch)
    engine = Engine(loaded("llama"), requests=1, context=64, chunk=chunk)
    engine.add(Request(0, prompt(37), max_tokens=8))
    assert ids(finish(engine)[0]) == greedy("llama", prompt(37))
    ranges = {key[2] for key in engine.steps._compiled if key[0] == "ragged"}
    assert ranges == ({(1, 7), (8, 9)} if many else {(1, chunk)})
