"""The next token of each row of logits, drawn on the device inside a jitted step.

`Sampling` says what a request wants, `SamplingState` holds that of every slot on the device,
`needs` says which Variant of a step serves a set of requests, and `sample` is that part of the
step. The order of things is in Sampling's docstring; `kernels/draw.py` explains how no row is
sorted.
Invariant: a row's token depends on its logits, its slot's state and nothing else; a row whose
largest logit is no finite number has NO_TOKEN.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

from ..core.dtype import float32, int32
from ..core.errors import ShapeError
from ..graph import build, ops
from ..tensor.compare import isfinite
from ..tensor.creation import arange
from ..tensor.elementwise import maximum, minimum, where
from ..tensor.maths import cast
from ..tensor.reduce import logsumexp
from ..tensor.select import gather
from ..tensor.tensor import Tensor, lift, node_of, wrap
from .sampling_limits import Sampling, Variant, needs
from .sampling_state import FLOATS, PROMPT, SamplingState

TOP_P, MIN_P = FLOATS.index("top_p"), FLOATS.index("min_p")
LARGEST = 3e38  # what penalties make of a finite logit is not beyond
NO_TOKEN = -1  # the id of a row without a token: a logit is NaN or inf, or all are -inf


class Sampled(NamedTuple):
    """What a step gives: ids (R,) int32, and logprobs in the Variants that have them."""

    ids: Tensor  # or NO_TOKEN
    logprob: Tensor | None = None  # (R,) of the ids
    top_ids: Tensor | None = None  # (R, Variant.logprobs), the likeliest first
    top_logprobs: Tensor | None = None


def greedy(logits: Any) -> Sampled:
    """The first of the largest logits (R, V) of each row."""
    return Sampled(_checked(*_first(lift(logits))))


def possible(logits: Tensor, words: int) -> Tensor:
    """Logits (R, V) where tokens from `words` on, which no tokenizer knows, are -inf."""
    columns = logits.shape[-1]
    return logits if words >= columns else where(arange(columns) < words, logits, -inf)


def _first(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first (R,) of the largest of each row and its logit (R,): NaN where one is."""
    ids = cast(logits.argmax(-1), int32)
    return ids, gather(logits, 1, ids[:, None])[:, 0]


def _checked(ids: Tensor, highest: Tensor) -> Tensor:
    """Ids (R,), or NO_TOKEN where the highest logit (R,) is no finite number."""
    return where(isfinite(highest), ids, NO_TOKEN)


def sample(
    logits: Any,
    state: SamplingState,
    slots: Any,
    positions: Any,
    variant: Variant,
) -> Sampled:
    """The next token of each row of logits (R, V), at positions[r] of the request slots[r].

    Both are (R,) int32; a position is that of the token to come, and what tells a request's draws
    apart. If the Variant has penalties the tokens are counted in the state. Rows may share a slot
    that no request has.
    """
    raw, slots, positions = cast(lift(logits), float32), lift(slots), lift(positions)
    _check(raw, state, slots, positions)
    if not variant.draws:
        first = _masked(raw, state, slots) if variant.masks else lift(logits)
        return _with_logprobs(*_first(first), raw, variant)
    x = masked = _masked(raw, state, slots) if variant.masks else raw
    if variant.bias:
        biases = (_biased(state, slots, positions), state.bias_ids, state.bias)
        x = wrap(ops.add_listed(*map(node_of, (masked, *biases, slots))), raw)
    rows = _of(state.floats, slots)  # (R, FLOATS)
    if variant.penalties:
        x = _penalised(x, _of(state.counts, slots), rows)
    highest = x.amax(-1, keepdim=True)
    p = ((x - highest) * _column(rows, "sharpness")).exp()
    given = (p, state.floats, state.top_k, state.seeds, slots, positions)
    ids = wrap(ops.draw(*map(node_of, given), top_p=TOP_P, min_p=MIN_P), p)
    if variant.penalties:
        _count(state, slots, ids)
    return _with_logprobs(ids, highest[:, 0], raw, variant)


def _check(logits: Tensor, state: SamplingState, slots: Tensor, positions: Tensor) -> None:
    if logits.ndim != 2 or logits.shape[1] != state.vocabulary:
        raise ShapeError(
            "the logits do not fit the state",
            op="sample",
            expected=f"(R, {state.vocabulary})",
            got=build.show(logits.shape),
        )
    for name, tensor in (("slots", slots), ("positions", positions)):
        if tensor.shape != logits.shape[:1] or tensor.dtype is not int32:
            raise ShapeError(
                f"the {name} do not fit the logits",
                op="sample",
                expected=f"int32[{logits.shape[0]}]",
                got=tensor.node.type,
            )


def _masked(x: Tensor, state: SamplingState, slots: Tensor) -> Tensor:
    """Logits (R, V) where tokens that a slot may not get are -inf."""
    words = _of(state.allowed, slots)  # (R, W)
    bits = (words[:, :, None] >> arange(32, dtype=int32)) & 1  # (R, W, 32)
    bits = bits.reshape(-1, 32 * state.allowed.shape[1])[:, : state.vocabulary]
    return where(bits != 0, x, -inf)


def _of(rows: Tensor, slots: Tensor) -> Tensor:
    """The rows of slots."""
    return wrap(build.gather(node_of(rows), [node_of(slots)], [0]))


def _biased(state: SamplingState, slots: Tensor, positions: Tensor) -> Tensor:
    """How many listed tokens each slot (S,) biases: more while its stop tokens are held back."""
    held = where(positions < _of(state.until, slots), _of(state.held, slots), 0)
    counts, at = node_of(_of(state.biases, slots) + held), [node_of(slots)]
    return wrap(build.update(node_of(state.biases), counts, at, [0], "set"))


def _count(state: SamplingState, slots: Tensor, ids: Tensor) -> None:
    """Take note of what was drawn. Rows that share a slot and a token write one number."""
    at, counts = [node_of(slots), node_of(ids)], node_of(state.counts)
    often = node_of(wrap(build.gather(counts, at, [0, 1])) + 1)
    state.counts.assign(wrap(build.update(counts, often, at, [0, 1], "set")))


def _column(rows: Tensor, name: str) -> Tensor:
    """One setting (R, 1) of each row."""
    at = FLOATS.index(name)
    return rows[:, at : at + 1]


def _penalised(x: Tensor, counts: Tensor, rows: Tensor) -> Tensor:
    """Logits (R, V) with what tokens that were there before cost; finite ones stay finite."""
    often = counts & (PROMPT - 1)
    factor = _column(rows, "repetition")
    y = where(counts > 0, where(x > 0, x / factor, x * factor), x)
    y = y - _column(rows, "frequency") * cast(often, float32)
    y = y - where(often > 0, _column(rows, "presence"), 0.0)
    return where(isfinite(x), maximum(minimum(y, LARGEST), -LARGEST), x)


def _with_logprobs(ids: Tensor, highest: Tensor, raw: Tensor, variant: Variant) -> Sampled:
    checked = _checked(ids, highest)
    if not variant.logprobs:
        return Sampled(checked)
    total = logsumexp(raw, -1, keepdim=True)
    chosen = gather(raw, 1, ids[:, None]) - total
    return Sampled(checked, chosen[:, 0], *likeliest(raw, variant.logprobs, total))


def likeliest(raw: Tensor, count: int, total: Tensor) -> tuple[Tensor, Tensor]:
    """The ids of the highest logits (R, V) and their logprobs; `total` (R, 1): logsumexp."""
    likeliest = wrap(ops.top_k(node_of(raw), count=min(count, raw.shape[1])), raw)
    return likeliest, gather(raw, 1, likeliest) - total


__all__ = [
    "NO_TOKEN",
    "Sampled",
    "Sampling",
    "SamplingState",
    "Variant",
    "greedy",
    "likeliest",
    "needs",
    "possible",
    "sample",
]
