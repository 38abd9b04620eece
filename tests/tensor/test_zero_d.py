"""Inputs without axes: every function that torch takes them in gives the same here, and one that
refuses them does it in words."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch_tables import difference, flat, ours, torch

import tilegrad as tg
import tilegrad.nn.functional as F

HOMES = {
    "": (tg, torch),
    "F": (F, torch.nn.functional),
    "linalg": (tg.linalg, torch.linalg),
    "fft": (tg.fft, torch.fft),
    "Tensor": (tg.Tensor, torch.Tensor),
}
RANDOM = (
    "bernoulli",
    "multinomial",
    "dropout",
    "gumbel_softmax",
    "normal",
    "rand",
    "poisson",
    "empty",
    "new_empty",
    "seed",
    "manual_seed",
)
NOT_OF_TENSORS = (
    "save",
    "load",
    "vmap",
    "compile",
    "device",
    "backward",
    "register_hook",
    "to",
    "data_ptr",
    "numpy",
    "cuda",
    "set_default_dtype",
    "promote_types",
    "get_rng_state",
)
AXES = ("dim", "dims", "dim0", "dim1", "dim2", "dimension", "axes", "destination", "start_dim")
VALUES = {
    "float32": (torch.tensor(0.6), torch.tensor(0.3)),
    "int64": (torch.tensor(3), torch.tensor(2)),
}


def names(mine: Any, theirs: Any) -> Iterator[str]:
    for name in dir(mine):
        public = not name.startswith(("_", "is_", "rand")) and not name.endswith("_")
        known = callable(getattr(mine, name)) and callable(getattr(theirs, name, None))
        plain = name not in RANDOM + NOT_OF_TENSORS and not isinstance(getattr(mine, name), type)
        if public and known and plain and not name.endswith("_like"):
            yield name


def calls(function: Callable[..., Any], dtype: str) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Arguments for what a function needs, with 0-d Tensors for all that holds data."""
    x, y = VALUES[dtype]
    parameters = list(inspect.signature(function).parameters.values())
    optional = [p.name for p in parameters if p.default is not p.empty]
    for dim in (0, -1, 5):
        special = {
            "mask": y > 0,
            "condition": y > 0,
            "index": torch.tensor(0),
            "reduce": "sum",
            "shape": (1,),
            "size": (1,),
            "sizes": (1,),
            "q": 0.5,
            "shifts": 1,
            "k": 1,
            "n": 3,
            **dict.fromkeys(AXES, dim),
        }
        given: list[Any] = []
        for i, p in enumerate(p for p in parameters if p.name not in optional):
            if p.name == "tensors":
                given += [x, y] if p.kind is p.VAR_POSITIONAL else [[x, y]]
            elif p.kind is not p.VAR_KEYWORD:
                given.append(special.get(p.name, y if i else x))
        yield given, {}
        yield given, {n: dim for n in ("dim", "dims") if n in optional}
        yield given, {n: v for n, v in (("dim", dim), ("keepdim", True)) if n in optional}
        if any(p.name in ("shape", "size", "sizes") for p in parameters):
            yield [() if a == (1,) else a for a in given], {}


def fault(
    mine: Callable[..., Any], theirs: Callable[..., Any], given: list[Any], named: dict[str, Any]
) -> str:
    """What is wrong with a call, or nothing."""
    try:
        expected = flat(theirs(*given, **named))
    except Exception:
        expected = None
    if any(isinstance(e, torch.Tensor) and e.is_complex() for e in expected or ()):
        return ""
    try:
        found = flat(mine(*[ours(g) for g in given], **named))
        tg.realize([f for f in found if isinstance(f, tg.Tensor)])
    except tg.UserError as error:
        return "" if expected is None else f"refused: {error}"
    except Exception as error:
        return (
            f"{type(error).__name__}: {error}"
            if expected is not None or not isinstance(error, TypeError)
            else ""
        )
    if expected is None:
        return "axis 5 is not refused" if 5 in given or 5 in named.values() else ""
    if len(found) != len(expected):
        return f"{len(found)} results, torch has {len(expected)}"
    for a, b in zip(found, expected):
        if isinstance(b, torch.Tensor):
            wrong = difference(a, b)
        else:
            wrong = "" if a == b or not isinstance(b, (bool, int, float)) else f"{a}, not {b}"
        if wrong:
            return wrong
    return ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("home", HOMES)
def test_inputs_without_axes(home: str, dtype: str) -> None:
    mine, theirs = HOMES[home]
    wrong, count = [], 0
    for name in names(mine, theirs):
        seen = []
        for given, named in calls(getattr(mine, name), dtype):
            if (text := repr((given, named))) not in seen:
                seen.append(text)
                count += 1
                found = fault(getattr(mine, name), getattr(theirs, name), given, named)
                wrong += [f"{home}.{name}{text}: {found}"] if found else []
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)
