"""What `paged_append` and `paged_attention` mean, in NumPy and float64: the judge of the kernels.

Invariant: attention is what `attention` means; tokens of no request get 0 in what is returned.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from . import ops
from .paged_types import APPEND, ATTEND, named

Ndarray = np.ndarray[Any, Any]


def attention(
    x: Any,
    q: Ndarray,
    keys: Ndarray,
    values: Ndarray,
    table: Ndarray,
    lengths: Ndarray,
    query_starts: Ndarray,
    scales: Any = (1.0, 1.0),
    sinks: Any = None,
) -> Ndarray:
    """(tokens, heads, value_width): of each request an attention over its keys, which lie in order;
    the last query sees the last key.

    x has the scale, the window (a token sees so many keys, itself included; 0 for all) and the
    softcap: the attrs of `paged_attention`, or a record of a kernel's.
    """
    from .interpret import REFERENCE

    key_heads, page = keys.shape[1:3]
    out = np.zeros((*q.shape[:2], values.shape[3]))
    how = {"scale": x.scale, "softcap": x.softcap, "dropout": 0.0, "orders": ("bthd",) * 4}
    how["extras"], more = ((), []) if sinks is None else (("sinks",), [sinks])
    for request, length in enumerate(lengths.tolist()):
        first, last = int(query_starts[request]), int(query_starts[request + 1])
        chosen = table[request, : -(-length // page)]
        k, v = (
            m[chosen].swapaxes(1, 2).reshape(-1, key_heads, m.shape[3])[:length] * s
            for m, s in zip((keys, values), _by_head(scales))
        )
        end = length - (last - first)
        how["band"] = (end - x.window + 1 if x.window else None, end)
        given = [m.astype(np.float64)[None] for m in (q[first:last], k, v)]
        (out[first:last],), *_ = REFERENCE[ops.attention]([*given, *more], how)
    return out


def append(
    rotation: Any,
    q: Ndarray,
    k: Ndarray,
    v: Ndarray,
    frequencies: Ndarray,
    table: Ndarray,
    lengths: Ndarray,
    query_starts: Ndarray,
    keys: Ndarray,
    values: Ndarray,
    scales: Any = (1.0, 1.0),
) -> Ndarray:
    """Turned queries; keys and values (float64 arrays) get the new tokens' rows, and the rest of a
    page that is new zeros for values.

    The rotation has the width (so many elements of a head are turned), whether they are
    interleaved (neighbours, not halves) and the factor of cosines and sines: the attrs of
    `paged_append`, or a record of a kernel's.
    """
    rotated, page, by_head = np.zeros(q.shape), keys.shape[2], _by_head(scales)
    for request, length in enumerate(lengths.tolist()):
        first, last = int(query_starts[request]), int(query_starts[request + 1])
        for token in range(first, last):
            place = length - (last - token)
            at, within = table[request, place // page], place % page
            rotated[token] = _rotated(q[token], rotation, place, frequencies)
            keys[at, :, within] = _rotated(k[token], rotation, place, frequencies) / by_head[0]
            values[at, :, within] = v[token].astype(np.float64) / by_head[1]
        if last > first and (length - 1) // page * page >= length - (last - first):
            values[table[request, (length - 1) // page], :, (length - 1) % page + 1 :] = 0
    return rotated


def _by_head(scales: Any) -> Ndarray:
    """(2, key heads or 1, 1) of scales (2,) or (2, key heads)."""
    return np.asarray(scales, np.float64).reshape(2, -1, 1)


def kept(array: Ndarray, dtype: Any) -> Ndarray:
    """An array as a cache holds it: rounded, one of 8 bits at its ends where it lies beyond."""
    if np.dtype(dtype).itemsize > 1:
        return array.astype(dtype)
    if np.issubdtype(dtype, np.integer):
        array = np.nan_to_num(np.rint(array), nan=0.0)
    limits = ml_dtypes.iinfo(dtype) if np.issubdtype(dtype, np.integer) else ml_dtypes.finfo(dtype)
    return np.clip(array, float(limits.min), float(limits.max)).astype(dtype)


def _rotated(heads: Ndarray, rotation: Any, place: int, frequencies: Ndarray) -> Ndarray:
    """Some heads of one token."""
    found, half = heads.astype(np.float64), rotation.width // 2
    angle = place * frequencies[:half].astype(np.float64)
    cosine, sine = np.cos(angle) * rotation.factor, np.sin(angle) * rotation.factor
    first, second = slice(0, half), slice(half, rotation.width)
    if rotation.interleaved:
        first, second = slice(0, rotation.width, 2), slice(1, rotation.width, 2)
    a, b = found[:, first].copy(), found[:, second].copy()
    found[:, first], found[:, second] = a * cosine - b * sine, b * cosine + a * sine
    return found


# ---- rows of the interpreter's table ------------------------------------------------------------


def paged_attention(inputs: list[Any], attrs: dict[str, Any]) -> Ndarray:
    """`attention`, rounded once."""
    found = attention(SimpleNamespace(**attrs), **named(ATTEND, inputs))
    return found.astype(inputs[0].dtype)


def paged_append(inputs: list[Any], attrs: dict[str, Any]) -> tuple[Ndarray, ...]:
    """`append`, rounded once, on copies of keys and values."""
    given = named(APPEND, inputs)
    before = {name: given[name] for name in ("keys", "values")}
    wide = {name: array.astype(np.float64) for name, array in before.items()}
    rotated = append(SimpleNamespace(**attrs), **{**given, **wide})
    return rotated.astype(given["q"].dtype), *(kept(wide[n], a.dtype) for n, a in before.items())
