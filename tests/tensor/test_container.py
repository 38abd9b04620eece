"""Flattening of nested containers."""

from __future__ import annotations

import gc
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilegrad as tg
from tilegrad.core.errors import ShapeError
from tilegrad.tensor import container
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
    one, other = flatten({"a": 1, "b": (2, 3)})[1], flatten({"b": (4, 5), "a": 6})[1]
    assert one.alike is other.alike is one
    assert flatten([{"b": 1, "a": {"d": 1}}])[1] is flatten([{"b": 0, "a": {"d": 0}}])[1]
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
        "x": 11,
        "y": (22,),
    }
    with pytest.raises(ShapeError, match="arranged differently"):
        map_leaves(lambda a, b: a, (1, 2), (1,))


def test_broadcast_prefix():
    assert broadcast_prefix((0, None), ({"a": 1, "b": 2}, 3), "vmap") == [0, 0, None]
    assert broadcast_prefix(({"a": 0, "b": 1}, 2), ({"a": 1, "b": 2}, 3), "vmap") == [0, 1, 2]
    with pytest.raises(ShapeError, match="arranged differently"):
        broadcast_prefix((0,), (1, 2), "vmap")


# ---- the order of dict keys ------------------------------------------------------------------

NAMES = st.sampled_from(["w", "b", "a", "scale"])
NESTS = st.recursive(
    st.just(0.0),
    lambda inner: (
        st.dictionaries(NAMES, inner, min_size=1, max_size=4)
        | st.lists(inner, min_size=1, max_size=2)
    ),
    max_leaves=6,
).filter(lambda nest: isinstance(nest, dict))


def shown(value: Any) -> Any:
    """A nest with its dicts as lists of pairs: equal only if the orders are."""
    if isinstance(value, dict):
        return [(k, shown(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [shown(v) for v in value]
    return "*"


def turned(value: Any) -> Any:
    """The same nest with the keys of its dicts the other way round."""
    if isinstance(value, dict):
        return {k: turned(v) for k, v in reversed(value.items())}
    return [turned(v) for v in value] if isinstance(value, list) else value


def total(nest: Any) -> Any:
    return sum((leaf * leaf).sum() for leaf in flatten(nest)[0])


@given(NESTS)
@settings(max_examples=25, deadline=None)
def test_dicts_keep_the_order_of_their_keys(nest):
    value, expected = map_leaves(lambda _: tg.ones(3, 2), nest), shown(nest)
    assert shown(value) == shown(flatten(nest)[1].unflatten(flatten(nest)[0])) == expected
    seen = []

    def same(given):
        seen.append(shown(given))
        return turned(given)

    jitted = tg.jit(same)
    assert shown(jitted(value)) == shown(turned(nest))
    jitted(turned(value))  # alike: nothing is traced anew
    assert jitted.traces == 1 and seen == [expected]
    assert shown(tg.grad(total)(value)) == expected
    assert shown(tg.vmap(same)(value)) == shown(turned(nest))
    assert shown(tg.vjp(same, value)[1](value)[0]) == expected
    assert shown(tg.jvp(same, (value,), (turned(value),))[1]) == shown(turned(nest))
    last, stacked = tg.scan(lambda carry, x: (turned(carry), same(x)), value, value)
    assert shown(last) == expected  # a carry keeps the order it began with
    assert shown(stacked) == shown(turned(nest))
    assert all(s == expected for s in seen)


def test_a_second_signature_is_traced_in_the_order_of_its_call():
    seen = []

    @tg.jit
    def function(given):
        seen.append(list(given))
        return given

    assert list(function({"b": tg.ones(2), "a": tg.ones(2)})) == ["b", "a"]
    assert list(function({"a": tg.ones(3), "b": tg.ones(3)})) == ["a", "b"]
    assert seen == [["b", "a"], ["a", "b"]] and function.traces == 2


def test_gradients_of_a_module_have_the_order_of_its_parameters():
    model = tg.nn.Linear(2, 2)
    found = tg.grad(lambda model: model(tg.ones(1, 2)).sum())(model)
    assert list(found) == [name for name, _ in model.named_parameters()] == ["weight", "bias"]


@pytest.mark.usefixtures("quick_collect")
def test_arrangements_that_nobody_uses_go() -> None:
    gc.collect()
    before = len(container._interned)
    for number in range(50):
        container.flatten({f"key{number}": [1, (2, 3)]})
    gc.collect()
    assert len(container._interned) <= before + 2
