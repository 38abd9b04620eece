"""Flattening of nested containers."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest

from tilegrad.core.errors import ShapeError
from tilegrad.tensor.container import broadcast_prefix, flatten, map_leaves

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Point:
    x: Any
    y: Any


class Holder:
    def tensors(self) -> dict[str, Any]:
        return {}


HOLDER = Holder()
CASES = [
    (1, [1]),
    ((1, 2), [1, 2]),
    ([1, (2, 3)], [1, 2, 3]),
    ({"b": 2, "a": 1}, [1, 2]),
    (Pair(1, [2]), [1, 2]),
    (Point(1, {"k": 2}), [1, 2]),
    (None, []),
    ((None, 1, None), [1]),
    ((), []),
    (HOLDER, [HOLDER]),
    (OrderedDict([("z", 1), ("a", (2,))]), [1, 2]),
    ({1: "a", "x": "b"}, ["a", "b"]),
]


@pytest.mark.parametrize("value,expected", CASES)
def test_round_trip(value, expected):
    leaves, structure = flatten(value)
    assert leaves == expected
    assert structure.unflatten(leaves) == value
    assert type(structure.unflatten(leaves)) is type(value)
    assert structure.leaves(value) == expected
    assert structure.count == len(expected)


def test_structures_are_interned():
    assert flatten({"a": 1, "b": (2, 3)})[1] is flatten({"b": (4, 5), "a": 6})[1]
    assert flatten((1, 2))[1] is not flatten([1, 2])[1]
    assert flatten((1, None))[1] is not flatten((1, 2))[1]


@pytest.mark.parametrize(
    "other", [(1, 2, 3), [1, 2], (1, (2,)), (1, None), ({"a": 1}, 2), (1, Pair(1, 2)), 5, None]
)
def test_fast_path_refuses_other_structures(other):
    structure = flatten((1, 2))[1]
    assert structure.leaves(other) is None


def test_dict_order_does_not_matter():
    structure = flatten({"a": 1, "b": 2})[1]
    assert structure.leaves({"b": 20, "a": 10}) == [10, 20]
    assert structure.leaves({"a": 1, "c": 2}) is None
    assert structure.leaves({"a": 1}) is None


def test_paths():
    structure = flatten(({"w": [1, 2]}, Point(1, 2)))[1]
    assert structure.paths("p") == ["p[0]['w'][0]", "p[0]['w'][1]", "p[1].x", "p[1].y"]


def test_self_containing_container_is_an_error():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ShapeError, match="contains itself"):
        flatten(loop)


def test_map_leaves():
    assert map_leaves(lambda a, b: a + b, {"x": 1, "y": (2,)}, {"x": 10, "y": (20,)}) == {
        "x": 11, "y": (22,),
    }  # fmt: skip
    with pytest.raises(ShapeError, match="arranged differently"):
        map_leaves(lambda a, b: a, (1, 2), (1,))


def test_broadcast_prefix():
    assert broadcast_prefix((0, None), ({"a": 1, "b": 2}, 3), "vmap") == [0, 0, None]
    assert broadcast_prefix(({"a": 0, "b": 1}, 2), ({"a": 1, "b": 2}, 3), "vmap") == [0, 1, 2]
    with pytest.raises(ShapeError, match="arranged differently"):
        broadcast_prefix((0,), (1, 2), "vmap")
