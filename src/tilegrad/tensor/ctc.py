"""Connectionist temporal classification: the loss of all alignments of a target with a sequence.

Invariant: probabilities stay logarithms; a state of probability 0 is a large negative number, so
that no derivative is a nan. Each step of time is one step of a `scan`, over the whole batch.
"""

from __future__ import annotations

from typing import Any

from ..core import dtype as dtypes
from ..core.errors import ShapeError
from ..graph import build
from .control import scan
from .creation import arange, full
from .loss import checked_reduction
from .maths import cast, exp, log, pick
from .movement import cat
from .reduce import mean
from .tensor import Tensor, lift

NEVER = -1e30  # the logarithm of an impossible alignment


def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """log_probs is (time, batch, classes) or (time, classes); targets (batch, length), or all of
    them in one line."""
    checked_reduction("ctc_loss", reduction)
    x, labels = lift(log_probs), lift(targets)
    single = x.ndim == 2
    if single:
        x, labels = x.unsqueeze(1), labels.unsqueeze(0)
    if x.ndim != 3:
        raise ShapeError(
            "not a batch of sequences",
            op="ctc_loss",
            expected="(time, batch, classes)",
            got=build.show(x.shape),
        )
    frames = _lengths(input_lengths, x.shape[1], "input_lengths")
    sizes = _lengths(target_lengths, x.shape[1], "target_lengths")
    rows = _rows(labels, sizes) if labels.ndim == 1 else labels
    losses = _losses(x, cast(rows, dtypes.int64), frames, sizes, blank)
    if zero_infinity:
        losses = pick(losses > -NEVER / 2, 0.0, losses)
    else:
        losses = pick(losses > -NEVER / 2, float("inf"), losses)
    if reduction == "none":
        return losses.squeeze(0) if single else losses
    if reduction == "sum":
        return losses.sum()
    return mean(losses / cast(sizes.clamp(min=1), losses.dtype))


def _lengths(given: Any, batch: Any, name: str) -> Tensor:
    found = cast(lift(list(given) if isinstance(given, tuple) else given), dtypes.int64)
    found = found.reshape(-1)
    if found.shape != (batch,):
        raise ShapeError(
            "needs a length for each sequence",
            op="ctc_loss",
            expected=batch,
            got=f"{name} of shape {build.show(found.shape)}",
        )
    return found


def _rows(line: Tensor, sizes: Tensor) -> Tensor:
    """Targets that lie one after the other, a row for each sequence."""
    longest = int(sizes.max().item())
    starts = sizes.cumsum(0) - sizes
    positions = starts.unsqueeze(1) + arange(longest)
    return line[positions.clamp(max=max(int(line.shape[0]) - 1, 0))]


def _join(a: Tensor, b: Tensor) -> Tensor:
    """log(exp(a) + exp(b)), with a finite derivative everywhere."""
    top = pick(a > b, a, b).detach()
    return top + log(exp(a - top) + exp(b - top))


def _losses(x: Tensor, rows: Tensor, frames: Tensor, sizes: Tensor, blank: int) -> Tensor:
    time, batch, _ = x.shape
    length: Any = rows.shape[1]
    states = 2 * length + 1  # blanks around every label
    column = arange(states)
    odd = column % 2 == 1
    label = (
        rows[:, (column // 2).clamp(max=max(length - 1, 0))]
        if length
        else rows.new_full((batch, 1), blank)
    )
    label = pick(odd, label, blank)  # (batch, states)
    before = cat([full((batch, 2), -1, dtype=dtypes.int64), label], 1)[:, :states]
    skips = odd & (label != before)  # one may come from two states back, past a blank
    floor = x.detach().clamp(min=NEVER)
    x = pick(x > NEVER, x, floor)
    heard = x.gather(2, label.unsqueeze(0).expand(time, batch, states))
    none = full((batch, 1), NEVER, dtype=x.dtype)
    first = pick(column < 2, heard[0], NEVER)

    def step(carry: tuple[Tensor, Tensor], row: Tensor) -> tuple[tuple[Tensor, Tensor], None]:
        alpha, now = carry
        one = cat([none, alpha], 1)[:, :states]
        two = pick(skips, cat([none, none, alpha], 1)[:, :states], NEVER)
        moved = _join(_join(alpha, one), two) + row
        moved = pick(moved > NEVER, moved, NEVER)
        return (pick((now < frames).unsqueeze(1), moved, alpha), now + 1), None

    (alpha, _), _ = scan(step, (first, lift(1)), heard[1:])
    last = (2 * sizes).unsqueeze(1)
    end = alpha.gather(1, last).squeeze(1)
    other = alpha.gather(1, (last - 1).clamp(min=0)).squeeze(1)
    total = _join(end, pick(sizes > 0, other, NEVER))
    return -pick(frames > 0, total, pick(sizes > 0, NEVER, 0.0))


__all__ = ["ctc_loss"]
