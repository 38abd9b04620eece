"""Nested containers of Tensors as flat lists of leaves, and back.

Tuples, lists, dicts, named tuples, dataclasses and None are structure; everything else is a
leaf, and so is an object with a method `tensors()` (a Module, an optimizer), which is known by
its identity. A `Structure` is made once for each arrangement and then takes values apart with
functions made for just that arrangement. Invariant: Structures are interned, and two values are
arranged alike exactly if their Structures have the same `alike`. The leaves of a dict come by
sorted key; a dict that is put together has its keys in the order of the one that was taken apart.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..core.errors import InternalError, ShapeError
from ..ir.whole import is_one

Extract = Callable[[Any, list[Any]], bool]
Rebuild = Callable[[Any], Any]  # takes an iterator over leaves


class Structure:
    """How a value is arranged: its kind, class, keys and the Structures of its parts.

    `order` has the keys as they were given; `alike` is the one Structure of all orders.
    """

    __slots__ = (
        "__weakref__",
        "_extract",
        "_rebuild",
        "alike",
        "cls",
        "count",
        "keys",
        "kind",
        "order",
        "parts",
    )

    def __init__(
        self,
        kind: str,
        cls: type,
        keys: tuple[Any, ...],
        parts: tuple[Structure, ...],
        order: tuple[Any, ...],
    ) -> None:
        self.kind, self.cls, self.keys, self.parts, self.order = kind, cls, keys, parts, order
        plain = tuple([p.alike for p in parts])
        as_it_is = order == keys and plain == parts
        self.alike: Structure = self if as_it_is else _intern(kind, cls, keys, plain, keys)
        self.count: int = 1 if kind == "leaf" else sum(p.count for p in parts)
        self._extract = EXTRACT[kind](self)
        self._rebuild = REBUILD[kind](self)

    def __repr__(self) -> str:
        if self.kind in ("leaf", "none"):
            return "*" if self.kind == "leaf" else "None"
        inside = ", ".join(f"{k!r}: {p!r}" for k, p in zip(self.keys, self.parts))
        return f"{self.cls.__name__}({inside})"

    def leaves(self, value: Any) -> list[Any] | None:
        """The leaves of a value, or None if it is arranged otherwise; fast."""
        found: list[Any] = []
        return found if self._extract(value, found) else None

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """A value of this Structure with the leaves in their places."""
        return self._rebuild(iter(leaves))

    def paths(self, root: str = "") -> list[str]:
        """Where each leaf sits, as one would write it: `batch['x'][0]`."""
        if self.kind == "leaf":
            return [root]
        write = "{}.{}" if self.kind in ("named", "dataclass") else "{}[{!r}]"
        found: list[str] = []
        for key, part in zip(self.keys, self.parts):
            found += part.paths(write.format(root, key))
        return found


# ---- taking apart: one maker of functions per kind -------------------------------------------

leaf_classes: set[type] = set()  # classes seen as leaves: all else takes the slow, exact path


def _leaf_extract(structure: Structure) -> Extract:
    def extract(value: Any, out: list[Any]) -> bool:
        if value.__class__ not in leaf_classes:
            return False
        out.append(value)
        return True

    return extract


def _none_extract(structure: Structure) -> Extract:
    return lambda value, out: value is None


def _of_parts(structure: Structure, items: Callable[[Any], Sequence[Any] | None]) -> Extract:
    """Check the class, get the items, and hand them to the parts."""
    cls, parts = structure.cls, structure.parts
    count = len(parts)
    if all(p.kind == "leaf" for p in parts):

        def flat(value: Any, out: list[Any]) -> bool:
            if value.__class__ is not cls:
                return False
            found = items(value)
            if found is None or len(found) != count:
                return False
            if not leaf_classes.issuperset(map(type, found)):
                return False
            out.extend(found)
            return True

        return flat
    extracts = [p._extract for p in parts]

    def nested(value: Any, out: list[Any]) -> bool:
        if value.__class__ is not cls:
            return False
        found = items(value)
        if found is None or len(found) != count:
            return False
        return all([extract(item, out) for extract, item in zip(extracts, found)])

    return nested


def _sequence_extract(structure: Structure) -> Extract:
    return _of_parts(structure, lambda value: value)


def _dict_extract(structure: Structure) -> Extract:
    keys = structure.keys

    def items(value: Any) -> list[Any] | None:
        if len(value) != len(keys):
            return None
        try:
            return [value[k] for k in keys]
        except KeyError:
            return None

    return _of_parts(structure, items)


def _dataclass_extract(structure: Structure) -> Extract:
    names = structure.keys
    return _of_parts(structure, lambda value: [getattr(value, n) for n in names])


EXTRACT: dict[str, Callable[[Structure], Extract]] = {
    "leaf": _leaf_extract,
    "none": _none_extract,
    "sequence": _sequence_extract,
    "named": _sequence_extract,
    "dict": _dict_extract,
    "dataclass": _dataclass_extract,
}

# ---- putting together ------------------------------------------------------------------------


def _sequence_rebuild(structure: Structure) -> Rebuild:
    cls, builds = structure.cls, [p._rebuild for p in structure.parts]
    if cls is list:
        return lambda leaves: [b(leaves) for b in builds]
    if cls is tuple:
        return lambda leaves: tuple([b(leaves) for b in builds])
    return lambda leaves: cls([b(leaves) for b in builds])


def _named_rebuild(structure: Structure) -> Rebuild:
    cls, builds = structure.cls, [p._rebuild for p in structure.parts]
    return lambda leaves: cls(*[b(leaves) for b in builds])


def _dict_rebuild(structure: Structure) -> Rebuild:
    cls = structure.cls
    pairs = [(k, p._rebuild) for k, p in zip(structure.keys, structure.parts)]

    order = None if structure.order == structure.keys else structure.order

    def rebuild(leaves: Any) -> Any:
        made = {k: b(leaves) for k, b in pairs}
        if order is not None:
            made = {k: made[k] for k in order}
        if cls is dict:
            return made
        result = cls()
        result.update(made)
        return result

    return rebuild


def _dataclass_rebuild(structure: Structure) -> Rebuild:
    cls = structure.cls
    pairs = [(k, p._rebuild) for k, p in zip(structure.keys, structure.parts)]

    def rebuild(leaves: Any) -> Any:
        made: Any = object.__new__(cls)  # fields as they are: __init__ may want others
        for name, build in pairs:
            object.__setattr__(made, name, build(leaves))
        return made

    return rebuild


REBUILD: dict[str, Callable[[Structure], Rebuild]] = {
    "leaf": lambda structure: next,
    "none": lambda structure: lambda leaves: None,
    "sequence": _sequence_rebuild,
    "named": _named_rebuild,
    "dict": _dict_rebuild,
    "dataclass": _dataclass_rebuild,
}

# ---- the exact path --------------------------------------------------------------------------

# As long as somebody uses them: arrangements that are seen once do not stay.
_interned: weakref.WeakValueDictionary[Any, Structure] = weakref.WeakValueDictionary()


def _intern(
    kind: str,
    cls: type,
    keys: tuple[Any, ...],
    parts: tuple[Structure, ...],
    order: tuple[Any, ...],
) -> Structure:
    key = (kind, cls, keys, parts, order)
    found = _interned.get(key)
    if found is None:
        found = _interned.setdefault(key, Structure(*key))
    return found


LEAF = _intern("leaf", object, (), (), ())
NONE = _intern("none", type(None), (), (), ())


def is_stateful(value: Any) -> bool:
    """Whether a value holds Tensors as state: it has a method `tensors()`."""
    return callable(getattr(value.__class__, "tensors", None))


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of a nested value and how it is arranged."""
    leaves: list[Any] = []
    return leaves, _walk(value, leaves, set())


def _walk(value: Any, leaves: list[Any], above: set[int]) -> Structure:
    if value is None:
        return NONE
    kind, keys, items = _inside(value)
    if kind == "leaf":
        leaf_classes.add(value.__class__)
        leaves.append(value)
        return LEAF
    if id(value) in above:
        raise ShapeError("a container contains itself", op="flatten", got=type(value).__name__)
    above.add(id(value))
    parts = tuple([_walk(item, leaves, above) for item in items])
    above.discard(id(value))
    order = tuple(value) if kind == "dict" else keys
    return _intern(kind, value.__class__, keys, parts, order)


def _inside(value: Any) -> tuple[str, tuple[Any, ...], Sequence[Any]]:
    """The kind of a value, the keys of its parts and the parts."""
    cls = value.__class__
    if cls in leaf_classes or is_stateful(value):
        return "leaf", (), ()
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return "named", cls._fields, value
    if isinstance(value, (tuple, list)):
        return "sequence", tuple(range(len(value))), value
    if isinstance(value, dict):
        keys = tuple(value) if isinstance(value, OrderedDict) else sorted_keys(value)
        return "dict", keys, [value[k] for k in keys]
    if dataclasses.is_dataclass(cls):
        names = tuple(f.name for f in dataclasses.fields(cls))
        return "dataclass", names, [getattr(value, n) for n in names]
    return "leaf", (), ()


def sorted_keys(value: dict[Any, Any]) -> tuple[Any, ...]:
    """The keys of a dict in an order that does not depend on insertion, where they have one."""
    try:
        return tuple(sorted(value))
    except TypeError:
        return tuple(sorted(value, key=lambda k: (type(k).__name__, repr(k))))


def map_leaves(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """The value with the function applied to its leaves (and those of others beside them)."""
    leaves, structure = flatten(value)
    columns = [leaves]
    for other in others:
        found = structure.leaves(other)
        if found is None:
            _, got = flatten(other)
            if got.alike is not structure.alike:
                raise ShapeError(
                    "containers are arranged differently",
                    op="map_leaves",
                    expected=structure,
                    got=got,
                )
            found = structure.leaves(other)
        if found is None:
            raise InternalError("container", f"{structure} does not take itself apart")
        columns.append(found)
    return structure.unflatten([function(*row) for row in zip(*columns)])


def broadcast_prefix(prefix: Any, value: Any, op: str) -> list[Any]:
    """One item per leaf of value from a shorter nest: an item stands for all below it."""
    if prefix is None or isinstance(prefix, str) or is_one(prefix):
        return [prefix] * flatten(value)[1].count
    kind, keys, items = _inside(value)
    mine, my_keys, my_items = _inside(prefix)
    if kind == "leaf" or mine != kind or keys != my_keys:
        raise ShapeError(
            "the axes are arranged differently from the arguments",
            op=op,
            expected=repr(flatten(value)[1]),
            got=repr(prefix),
        )
    found: list[Any] = []
    for part, item in zip(my_items, items):
        found += broadcast_prefix(part, item, op)
    return found


class Default:
    """A number nobody passed: the default of a parameter, which stays what it is in a trace."""

    __slots__ = ("number",)

    def __init__(self, number: float) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Default) and self.number == other.number

    def __hash__(self) -> int:
        return hash((Default, self.number))


def differences(before: list[tuple[str, str]], now: list[tuple[str, str]]) -> list[str]:
    """How two descriptions of arguments differ, in words."""
    known = dict(before)
    found = []
    for what, text in now:
        if known.get(what) != text:
            found.append(f"{what} changed from {known.get(what, 'nothing')} to {text}")
    return found
