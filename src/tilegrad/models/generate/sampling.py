"""The next token of each row of logits, drawn on the device inside a jitted step.

`Sampling` says what a request wants, `SamplingState` holds that of every slot on the device,
`needs` says which Variant of a step serves a set of requests, and `sample` is that part of the
step. The order of things is in Sampling's docstring; `draw` explains how no row is sorted.
Invariant: a row's token depends on its logits, its slot's state and nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.config import config
from ...core.dtype import float32, int32
from ...core.errors import ShapeError
from ...core.target import Target
from ...graph import build
from ...tensor.creation import full
from ...tensor.elementwise import maximum, where
from ...tensor.kernel import target_of
from ...tensor.maths import cast
from ...tensor.reduce import logsumexp
from ...tensor.select import gather, scatter_add
from ...tensor.tensor import Tensor, lift, node_of, wrap
from .draw import draw, largest
from .sampling_limits import Sampling, Variant, needs
from .sampling_state import FLOATS, PROMPT, SamplingState

LOWEST = -3e38  # the largest of a row that is all -inf is taken for this


class Sampled(NamedTuple):
    """What a step gives: ids (R,) int32, and logprobs in the Variants that have them."""

    ids: Tensor
    logprob: Tensor | None = None  # (R,) of the ids
    top_ids: Tensor | None = None  # (R, Variant.logprobs), the likeliest first
    top_logprobs: Tensor | None = None


def greedy(logits: Any) -> Sampled:
    """The first of the largest logits (R, V) of each row."""
    return Sampled(cast(lift(logits).argmax(-1), int32))


def sample(
    logits: Any, state: SamplingState, slots: Any, variant: Variant, target: Target | None = None
) -> Sampled:
    """The next token of each row of logits (R, V), whose request has slot slots[r] (R,) int32.

    What was drawn is counted in the state, if the Variant draws. Rows may share a slot that no
    request has. `target` is where the step will run, if not where the logits are.
    """
    raw, slots = cast(lift(logits), float32), lift(slots)
    _check(raw, state, slots)
    target = target_of(raw.device, config().threads) if target is None else target
    if not variant.draws:
        return _with_logprobs(greedy(logits).ids, raw, variant, target)
    x = _biased(raw, state, slots) if variant.bias else raw
    rows = state.floats[slots]  # (R, FLOATS)
    if variant.penalties:
        x = _penalised(x, state.counts[slots], rows)
    highest = maximum(x.amax(-1, keepdim=True), LOWEST)
    p = ((x - highest) * _column(rows, "sharpness")).exp()
    ids = _kernel(draw, target)(p, state.floats, state.top_k, state.seeds, state.drawn, slots,
                                skip=target.kind == "cpu", block=_block(target))  # fmt: skip
    one = full(slots.shape, 1, dtype=int32)
    state.drawn.assign(state.drawn.index_add(0, slots, one))
    if variant.penalties:
        seen = build.update(node_of(state.counts), node_of(one), [node_of(slots), node_of(ids)],
                            [0, 1], "add")  # fmt: skip
        state.counts.assign(wrap(seen))
    return _with_logprobs(ids, raw, variant, target)


def _check(logits: Tensor, state: SamplingState, slots: Tensor) -> None:
    if logits.ndim != 2 or logits.shape[1] != state.vocabulary:
        raise ShapeError("the logits do not fit the state", op="sample",
                         expected=f"(R, {state.vocabulary})",
                         got=build.show(logits.shape))  # fmt: skip
    if slots.shape != logits.shape[:1] or slots.dtype is not int32:
        raise ShapeError("the slots do not fit the logits", op="sample",
                         expected=f"int32[{logits.shape[0]}]", got=slots.node.type)  # fmt: skip


def _column(rows: Tensor, name: str) -> Tensor:
    """One setting (R, 1) of each row."""
    at = FLOATS.index(name)
    return rows[:, at : at + 1]


def _biased(x: Tensor, state: SamplingState, slots: Tensor) -> Tensor:
    return scatter_add(x, 1, state.bias_ids[slots], state.bias[slots])


def _penalised(x: Tensor, counts: Tensor, rows: Tensor) -> Tensor:
    """Logits (R, V) with what tokens that were there before cost."""
    often = counts & (PROMPT - 1)
    factor = _column(rows, "repetition")
    x = where(counts > 0, where(x > 0, x / factor, x * factor), x)
    x = x - _column(rows, "frequency") * cast(often, float32)
    return x - where(often > 0, _column(rows, "presence"), 0.0)


def _with_logprobs(ids: Tensor, raw: Tensor, variant: Variant, target: Target) -> Sampled:
    if not variant.logprobs:
        return Sampled(ids)
    count = min(variant.logprobs, raw.shape[1])
    total = logsumexp(raw, -1, keepdim=True)
    places = _kernel(largest, target)(raw, count=count, block=_block(target))
    chosen = gather(raw, 1, ids[:, None]) - total
    return Sampled(ids, chosen[:, 0], places, gather(raw, 1, places) - total)


def _block(target: Target) -> int:
    """Tokens of a row that a program takes at a time."""
    return 64 if target.kind == "cpu" else 4096


def _kernel(kernel: Any, target: Target) -> Any:
    return kernel if target.kind == "cpu" else kernel.warps(16)


__all__ = ["Sampled", "Sampling", "SamplingState", "Variant", "greedy", "needs", "sample"]
