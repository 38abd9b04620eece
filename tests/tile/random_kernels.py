"""Kernels of random indices, loops, branches and masks, and what each of their programs touches.

`written(random)` is one. `Truth(text, x)` runs that very text once for each program, with plain
integers and NumPy in the place of the language, and says what is wrong with the kernel (an index
out of bounds, a race, an element not written, or read before it is) and what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from random import Random
from typing import Any

import numpy as np


@dataclass
class Text:
    """A kernel `k(x)`: its source, its grid and the sizes of its argument."""

    source: str
    grid: tuple[int, ...]
    size: tuple[int, ...]


# ---- writing one --------------------------------------------------------------------------------


def written(random: Random) -> Text:
    """A random kernel."""
    return _Writer(random).text()


class _Writer:
    def __init__(self, random: Random) -> None:
        self.random, self.lines, pick = random, ["def k(x):"], random.choice
        self.grid = tuple(random.randint(1, 6) for _ in range(pick([1, 1, 2])))
        self.shape = tuple(random.randint(1, 14) for _ in range(pick([1, 1, 2])))
        self.size = tuple(pick([14, 40]) for _ in range(pick([1, 2])))
        self.names = ["i", "j"][: len(self.grid)]

    def text(self) -> Text:
        fill = self.random.choice(["", ", fill=0", ", fill=2"])
        self.put(1, f"{', '.join(self.names)} = tile.grid({', '.join(map(str, self.grid))})")
        self.put(1, f"out = tile.result({self.shape}, x.dtype{fill})")
        for _ in range(self.random.randint(1, 3)):
            self.statement(self.names, 1, 0)
        return Text("\n".join(self.lines) + "\n", self.grid, self.size)

    def put(self, depth: int, line: str) -> None:
        self.lines.append("    " * depth + line)

    def statement(self, names: list[str], depth: int, blocks: int) -> None:
        kinds = [self.assign] * 5 + [self.scatter, self.add, self.add_offsets]
        if blocks < 2:
            kinds += [self.loop, self.loop, self.branch]
        self.random.choice(kinds)(names, depth, blocks)

    def index(self, names: list[str], size: int) -> str:
        """An index along an axis."""
        r, name = self.random, self.random.choice(names)
        return r.choice(
            [
                str(r.randint(0, size - 1)),
                str(r.randint(-1, size)),
                *[name] * 4,
                f"({name} * {r.randint(1, 4)} + {r.randint(0, 1)})",
                f"({name} // {r.randint(1, 4)})",
                f"({name} % {r.randint(1, 6)})",
                f"({names[0]} * {r.randint(1, 5)} + {names[-1]})",
                f"({r.randint(0, size)} - {name})",
            ]
        )

    def part(self, names: list[str]) -> tuple[str, list[int]]:
        """A part of the result, and its shape."""
        keys, shape = [], []
        for size in self.shape:
            index, block = self.index(names, size), self.random.randint(1, 6)
            if self.random.random() < 0.5:
                keys.append(index)
                continue
            start = self.random.choice([f"({self.random.choice(names)} * {block})", index])
            keys.append(f"{start} : {start} + {block}")
            shape.append(block)
        return f"out[{', '.join(keys)}]", shape

    def assign(self, names: list[str], depth: int, _: int) -> None:
        into, shape = self.part(names)
        other, same = self.part(names)
        element = f"x[{', '.join(self.index(names, size) for size in self.size)}]"
        values = [f"{element} + 1", f"{element} * 0 + {names[-1]}", f"{into} * 2"]
        values.append(f"{other} + 1" if same == shape else "3.0")
        self.put(depth, f"{into} = {self.random.choice(values)}")

    def loop(self, names: list[str], depth: int, blocks: int) -> None:
        r = self.random
        ends = [
            f"{r.randint(0, 6)}",
            f"{r.randint(0, 3)}, {r.randint(0, 9)}",
            f"0, {r.choice(self.shape)}, {r.randint(1, 4)}",
            f"{names[0]}, {r.choice(self.shape)}, {self.grid[0]}",
        ]
        self.put(depth, f"for l{blocks} in tile.range({r.choice(ends)}):")
        for _ in range(r.randint(1, 2)):
            self.statement([*names, f"l{blocks}"], depth + 1, blocks + 1)

    def branch(self, names: list[str], depth: int, blocks: int) -> None:
        how = self.random.choice(["<", "<=", "==", "!=", ">"])
        self.put(depth, f"if {self.index(names, 8)} {how} {self.random.randint(0, 5)}:")
        self.statement(names, depth + 1, blocks + 1)
        if self.random.random() < 0.3:
            self.put(depth, "else:")
            self.statement(names, depth + 1, blocks + 1)

    def offsets(self, names: list[str]) -> str:
        r, count = self.random, self.random.randint(1, 8)
        apart = r.choice([1, 1, 1, 2, 3])
        start = r.choice([f"{r.choice(names)} * {count * apart}", self.index(names, 9)])
        return f"(tile.arange({count}) * {apart} + {start})"

    def scatter(self, names: list[str], depth: int, _: int) -> None:
        at, count = self.offsets(names), prod(self.shape)
        limits = [f"{at} < {count}", f"{at} < {self.random.randint(0, count)}"]
        mask = self.random.choice(["", *[f", mask={limit}" for limit in limits]])
        read = f"tile.load(x, {at}, mask=({at} >= 0) & ({at} < {prod(self.size)}))"
        self.put(depth, f"tile.store(out, {at}, {read} + 1{mask})")

    def add(self, names: list[str], depth: int, _: int) -> None:
        keys = "".join(f"{self.index(names, size)}, " for size in self.shape)
        self.put(depth, f"tile.atomic_add(out, ({keys}), 1.0)")

    def add_offsets(self, names: list[str], depth: int, _: int) -> None:
        self.put(depth, f"tile.atomic_add(out, {self.offsets(names)}, 1.0)")


# ---- what it does -------------------------------------------------------------------------------


class _Outside(Exception):
    """An index is out of bounds: this program ends."""


class Truth:
    """What all programs of a kernel do, one after another; stands for `tile` in its text."""

    def __init__(self, text: Text, x: np.ndarray) -> None:
        self.x, self.out, self.filled = x, np.zeros(0, np.float32), False
        self.touched: dict[int, list[tuple[int, str]]] = {}  # element -> (program, how)
        self.outside = self.unset = False
        names = {"tile": self, "x": _Array(self, x)}
        exec(text.source, names)
        for self.number, self.program in enumerate(np.ndindex(text.grid)):
            try:
                names["k"](names["x"])  # type: ignore[operator]
            except _Outside:
                self.outside = True

    @property
    def faults(self) -> set[str]:
        """What is wrong with the kernel."""
        found = {"outside"} if self.outside else set()
        found |= {"unset"} if self.unset else set()
        for events in self.touched.values():
            hows = {how: {p for p, h in events if h == how} for how in ("store", "add", "load")}
            everyone = set().union(*hows.values())
            if len(everyone) > 1 and (hows["store"] or (hows["add"] and hows["load"])):
                found.add("race")
            if hows["add"] and not self.filled:
                found.add("unset")
        if (
            not self.filled
            and len([e for e in self.touched.values() if _changes(e)]) < self.out.size
        ):
            found.add("hole")
        return found

    # ---- the language ----

    def grid(self, *sizes: int) -> Any:
        return self.program if len(sizes) > 1 else self.program[0]

    def range(self, *ends: int) -> range:
        return range(*ends)

    def arange(self, size: int) -> np.ndarray:
        return np.arange(size)

    def result(self, shape: tuple[int, ...], dtype: Any, fill: float | None = None) -> _Array:
        if not self.number:
            self.out, self.filled = np.full(shape, fill or 0, np.float32), fill is not None
        return _Array(self, self.out)

    def load(self, array: _Array, at: np.ndarray, mask: Any = True) -> Any:
        places, live = self.at(array.data, at, mask)
        found = np.zeros(live.shape, np.float32)
        found[live] = array.data.reshape(-1)[places]
        return found  # 0 where the mask does not hold

    def store(self, array: _Array, at: np.ndarray, value: Any, mask: Any = True) -> None:
        places, live = self.at(array.data, at, mask)
        array.data.reshape(-1)[places] = value[live]
        self.touch("store", places)

    def atomic_add(self, array: _Array, at: Any, value: float) -> None:
        places = array.places(at)[0] if isinstance(at, tuple) else self.at(array.data, at, True)[0]
        np.add.at(array.data.reshape(-1), places, value)
        self.touch("add", places)

    def at(self, data: np.ndarray, at: np.ndarray, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        live = np.broadcast_to(mask, at.shape)
        if ((at < 0) | (at >= data.size))[live].any():
            raise _Outside
        return at[live], live

    def touch(self, how: str, places: np.ndarray) -> None:
        for place in places.reshape(-1).tolist():
            events = self.touched.setdefault(place, [])
            if (
                how == "load"
                and not self.filled
                and not any(p == self.number and h != "load" for p, h in events)
            ):
                self.unset = True
            events.append((self.number, how))


def _changes(events: list[tuple[int, str]]) -> bool:
    return any(how != "load" for _, how in events)


class _Array:
    def __init__(self, truth: Truth, data: np.ndarray) -> None:
        self.truth, self.data, self.shape, self.dtype = truth, data, data.shape, data.dtype

    def places(self, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        """The elements of a part, and which of its places have one."""
        keys = keys if isinstance(keys, tuple) else (keys,)
        lines = [
            np.arange(k.start, k.stop) if isinstance(k, slice) else np.array([k]) for k in keys
        ]
        inside = [(line >= 0) & (line < size) for line, size in zip(lines, self.shape)]
        cut = [isinstance(k, slice) for k in keys]
        live = np.ones((), np.bool_)
        place = np.zeros((), np.int64)
        for line, ok, size in zip(lines, inside, self.shape):
            live, place = live[..., None] & ok, place[..., None] * size + line
        empty = any(c and not ok.any() for c, ok in zip(cut, inside))
        if not empty and not all(c or ok.all() for c, ok in zip(cut, inside)):
            raise _Outside
        kept = tuple(slice(None) if c else 0 for c in cut)
        return place[live], live[kept]

    def __getitem__(self, keys: Any) -> Any:
        places, live = self.places(keys)
        found = np.zeros(live.shape, np.float32)
        found[live] = self.data.reshape(-1)[places]
        if self.data is self.truth.out:
            self.truth.touch("load", places)
        return np.ma.masked_array(found, ~live)

    def __setitem__(self, keys: Any, value: Any) -> None:
        places, live = self.places(keys)
        given = np.broadcast_to(np.ma.getdata(value), live.shape)[live]
        kept = ~np.broadcast_to(np.ma.getmaskarray(value), live.shape)[live]
        self.data.reshape(-1)[places[kept]] = given[kept]
        self.truth.touch("store", places[kept])


def sample(seed: int, count: int) -> Iterator[tuple[int, Text, np.ndarray]]:
    """(seed, kernel, argument) of so many kernels."""
    for number in range(seed, seed + count):
        text = written(Random(number))
        yield number, text, np.arange(1, prod(text.size) + 1, dtype=np.float32).reshape(text.size)
