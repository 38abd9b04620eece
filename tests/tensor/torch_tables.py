"""Run tables of cases on tilegrad and on torch, and compare.

A case is (name, function of (library, *tensors)). All cases of a table are realized together,
so that they compile as few Graphs. Invariant: integers and bools must be equal, float32 and
float64 close; low precision is judged against float64: at most twice torch's own error or 1 ulp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import tilegrad as tg

torch = pytest.importorskip("torch")
torch.set_num_threads(2)

Case = tuple[str, Callable[..., Any]]
FLOATS = ("float32", "float64", "bfloat16", "float16")
INTEGERS = ("int32", "int64", "uint8")
LOW = ("bfloat16", "float16")
TOLERANCE = {"float32": (1e-5, 1e-6), "float64": (1e-11, 1e-12)}


def data(
    dtype: str, shape: Sequence[int], seed: int = 0, low: float = -3.0, high: float = 3.0
) -> Any:
    """A torch tensor of fixed random values."""
    random = np.random.default_rng([seed, *shape])
    if dtype == "bool":
        return torch.from_numpy(np.asarray(random.random(tuple(shape)) < 0.5))
    values = np.asarray(random.uniform(low, high, tuple(shape)))
    if dtype == "uint8":
        return torch.from_numpy(np.asarray(np.abs(values * 3))).to(torch.uint8)
    if dtype.startswith("int"):
        return torch.from_numpy(np.asarray(np.round(values * 3))).to(getattr(torch, dtype))
    return torch.from_numpy(values).to(getattr(torch, dtype))


def ours(value: Any) -> Any:
    """Torch tensors inside lists and tuples as Tensors."""
    if isinstance(value, torch.Tensor):
        return tg.from_torch(value)
    if isinstance(value, (list, tuple)):
        return type(value)(ours(v) for v in value)
    return value


def flat(value: Any) -> list[Any]:
    """The results of a case in a line."""
    return [f for v in value for f in flat(v)] if isinstance(value, (list, tuple)) else [value]


def compare(cases: Sequence[Case], *inputs: Any, skip: Sequence[str] = ()) -> None:
    """Run every case on both sides and fail with all differences at once."""
    mine = [ours(i) for i in inputs]
    chosen = [c for c in cases if c[0] not in skip and _known_to_torch(c[1], inputs)]
    results = [flat(function(tg, *mine)) for _, function in chosen]
    tg.realize([t for row in results for t in row if isinstance(t, tg.Tensor)])
    wrong = []
    for (name, function), got in zip(chosen, results):
        expected = flat(function(torch, *inputs))
        exact = _reference(function, inputs)
        if len(got) != len(expected):
            wrong.append(f"{name}: {len(got)} results, torch has {len(expected)}")
            continue
        for i, (a, b) in enumerate(zip(got, expected)):
            fault = difference(a, b, exact[i] if exact else None)
            if fault:
                wrong.append(f"{name}[{i}]: {fault}")
    assert not wrong, "\n".join(wrong)


def _known_to_torch(function: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    try:
        function(torch, *inputs)
    except NotImplementedError:  # torch lacks the function for this dtype
        return False
    return True


def _reference(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Any] | None:
    """Torch's results in float64, where an input is of low precision."""
    low = [str(i.dtype)[6:] in LOW for i in inputs if isinstance(i, torch.Tensor)]
    if not any(low):
        return None
    wide = [
        i.double() if isinstance(i, torch.Tensor) and i.is_floating_point() else i for i in inputs
    ]
    return flat(function(torch, *wide))


def difference(got: Any, expected: Any, exact: Any = None) -> str:
    """What is wrong with a result, or nothing."""
    if not isinstance(expected, torch.Tensor):
        return "" if got == expected else f"{got!r}, torch says {expected!r}"
    name = str(expected.dtype)[6:]
    if got.dtype.name != name:
        return f"dtype {got.dtype}, torch says {name}"
    if tuple(got.shape) != tuple(expected.shape):
        return f"shape {got.shape}, torch says {tuple(expected.shape)}"
    a, b = numbers(got.numpy()), numbers(tg.from_torch(expected.detach()).numpy())
    if name in LOW and exact is not None and exact.is_floating_point():
        return _low_difference(a, b, exact.double().numpy(), name)
    rtol, atol = TOLERANCE.get(name, (0.0, 0.0))
    if name in LOW:
        rtol, atol = 2.0**-7, 1e-3
    good = np.isclose(a, b, rtol, atol, equal_nan=True)
    if good.all():
        return ""
    at = tuple(int(i) for i in np.argwhere(~good)[0])
    return f"at {at}: {a[at]!r}, torch says {b[at]!r}"


def numbers(array: Any) -> Any:
    """An array as float64, or as it is."""
    return array if array.dtype.kind in "biu" else array.astype(np.float64)


def _low_difference(a: Any, b: Any, exact: Any, name: str) -> str:
    bits = 8 if name == "bfloat16" else 11
    small = 2.0**-133 if name == "bfloat16" else 2.0**-24
    with np.errstate(all="ignore"):
        ulp = np.maximum(2.0 ** (np.floor(np.log2(np.abs(exact))) - bits + 1), small)
        allowed = np.maximum(2 * np.abs(b - exact), ulp)
        same = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.isnan(a) & np.isnan(exact))
        good = same | (np.abs(a - exact) <= allowed)
    if good.all():
        return ""
    at = tuple(int(i) for i in np.argwhere(~good)[0])
    return f"at {at}: {a[at]!r}, torch says {b[at]!r}, exactly {exact[at]!r}"
