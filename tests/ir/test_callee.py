"""Callees: equal by key, and readable back inside a Graph's text."""

import hashlib

import numpy as np
import pytest
from toy_dialect import VECTOR, fact

from tilegrad.ir.block import pure_block
from tilegrad.ir.callee import Callee
from tilegrad.ir.text import ATTRIBUTE_PARSERS, parse_block, print_block


class Scale(Callee):
    """Multiplies by a number."""

    text_name = "scale"

    def __init__(self, factor):
        self.factor = factor

    @property
    def key(self):
        return hashlib.sha256(self.to_text().encode()).hexdigest()

    @property
    def name(self):
        return "scale"

    def result_types(self, argument_types):
        return argument_types

    def to_text(self):
        return str(self.factor)

    def interpret(self, *arrays):
        return tuple(a * self.factor for a in arrays)


def test_identity_goes_by_key():
    assert Scale(2) == Scale(2) and hash(Scale(2)) == hash(Scale(2))
    assert Scale(2) != Scale(3)
    assert fact(fact=Scale(2)) is fact(fact=Scale(2))
    assert repr(Scale(2)).startswith("<callee scale ")
    with pytest.raises(TypeError):
        Callee()


def test_text_and_meaning(monkeypatch):
    monkeypatch.setitem(ATTRIBUTE_PARSERS, "scale", lambda text: Scale(int(text)))
    text = print_block(pure_block("main", (), (fact(fact=Scale(3)),)), "toy")
    assert '{fact=scale"3"}' in text
    callee = parse_block(text).nodes[0].attrs["fact"]
    assert callee == Scale(3)
    assert callee.result_types((VECTOR,)) == (VECTOR,)
    assert callee.interpret(np.ones(2))[0].tolist() == [3.0, 3.0]
