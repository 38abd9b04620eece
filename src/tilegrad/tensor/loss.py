"""Losses, with PyTorch's names, arguments and reductions.

Invariant: a loss over classes reads its logits once (log-sum-exp with the maximum taken out,
minus the logit picked by a gather along the class axis); everything below float32 is computed
in float32 and rounded once at the end. The result has the dtype that the operands promote to, or
the input's where PyTorch writes into an array like the input. Long because all losses stand on one
page, and share how operands are promoted and results reduced.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from ..core import dtype as dtypes
from ..core.dtype import DType, promote
from ..core.errors import DTypeError, ShapeError, UserError
from ..graph import build
from ..ir.types import product
from .activation import logsigmoid
from .elementwise import clamp, minimum
from .maths import abs_, cast, exp, floating, log, pick
from .operands import common
from .reduce import amax, mean, norm, sum_
from .tensor import Tensor, lift, node_of, wrap

LOG = logging.getLogger("tilegrad.loss")
REDUCTIONS = ("mean", "sum", "none")
Function = TypeVar("Function", bound=Callable[..., Tensor])


def checked_reduction(op: str, reduction: str, more: tuple[str, ...] = ()) -> str:
    """The reduction, refused if unknown."""
    if reduction not in REDUCTIONS + more:
        raise UserError(
            "unknown reduction", op=op, expected=" or ".join(REDUCTIONS + more), got=repr(reduction)
        )
    return reduction


def reduced(x: Tensor, reduction: str, op: str, dtype: DType | None = None) -> Tensor:
    """The mean, the sum, or all of it, rounded to a dtype."""
    checked_reduction(op, reduction)
    if reduction != "none":
        x = mean(x) if reduction == "mean" else sum_(x)
    return x if dtype is None else cast(x, dtype)


def _given(value: Any) -> Any:
    """A Tensor, or a Python number, which has no dtype of its own."""
    return value if isinstance(value, (bool, int, float)) else lift(value)


def _floats(op: str, *values: Any, integers: bool = False) -> tuple[list[Tensor], DType]:
    """Operands in the dtype that they promote to, but at least float32, and that dtype; integers
    alone are refused, or taken as float32."""
    given = [_given(v) for v in values]
    if not integers and not any(isinstance(v, Tensor) and v.dtype.is_float for v in given):
        got = ", ".join(str(lift(v).dtype) for v in given)
        raise DTypeError("needs floats", op=op, expected="a float dtype", got=got)
    wide, dtype = common(op, *given)
    return [cast(lift(v, wide[0].dtype), wide[0].dtype) for v in given], dtype


def _input(op: str, input: Any) -> Tensor:
    """What a loss gives back the dtype of."""
    tensor = lift(input)
    if not tensor.dtype.is_float:
        raise DTypeError("needs floats", op=op, expected="a float dtype", got=tensor.dtype)
    return tensor


def _as_input(function: Function) -> Function:
    """Give the dtype of the input, whatever was computed in."""

    @wraps(function)
    def run(input: Any, *args: Any, **options: Any) -> Tensor:
        tensor = _input(function.__name__, input)
        return cast(function(tensor, *args, **options), tensor.dtype)

    return run  # type: ignore[return-value]


def _pair(op: str, input: Any, target: Any) -> tuple[list[Tensor], DType]:
    """Input and target as floats of one shape, and the dtype that they promote to once they have
    it: a target without axes counts as much as the input."""
    given = [_given(v) for v in (input, target)]
    shapes = [v.shape for v in given if isinstance(v, Tensor)]
    if shapes[1:] and shapes[0] != shapes[1]:
        shape = build.broadcast_shapes(op, *shapes)
        LOG.warning("%s: shapes %s and %s differ and are broadcast", op, *shapes)
        given = [v.expand(shape) if isinstance(v, Tensor) else v for v in given]
    return _floats(op, *given)


# ---- classes --------------------------------------------------------------------------------


def _class_rows(op: str, x: Tensor) -> Tensor:
    """Logits as (rows, classes): the class axis is 1, or 0 without a batch."""
    if not x.ndim:
        raise ShapeError(
            "needs an axis of classes",
            op=op,
            expected="(classes,), (batch, classes) or (batch, classes, ...)",
            got="()",
        )
    if x.ndim > 2:
        x = x.movedim(1, -1)
    return x.reshape(product(x.shape[:-1]), x.shape[-1])


def _check_target(op: str, x: Tensor, target: Tensor) -> None:
    if not target.dtype.is_integer:
        raise DTypeError(
            "classes are not integers", op=op, expected="an integer target", got=target.dtype
        )
    wanted = x.shape[:1] + x.shape[2:] if x.ndim > 1 else ()
    if target.shape != wanted:
        raise ShapeError(
            "input and target do not fit",
            op=op,
            expected=f"target {build.show(wanted)}, one class for each row of "
            f"input {build.show(x.shape)}",
            got=build.show(target.shape),
        )


def picked(op: str, rows: Tensor, index: Tensor) -> Tensor:
    """rows[i, index[i]] for each row: a gather along the last axis."""
    place = build.iota(rows.shape[0])
    classes = build.in_range(index.node, rows.shape[-1], op)
    return wrap(build.gather(node_of(rows), [place, classes], (0, 1)), rows)


def _class_weights(op: str, weight: Any, classes: Any, like: Tensor) -> Tensor | None:
    if weight is None:
        return None
    found = cast(lift(weight), like.dtype)
    if found.shape != (classes,):
        raise ShapeError(
            "one weight for each class is needed",
            op=op,
            expected=f"({classes},)",
            got=build.show(found.shape),
        )
    return found


def _over_classes(
    losses: Tensor, target: Tensor, weight: Tensor | None, ignored: int, reduction: str
) -> Tensor:
    """Losses of rows, without the ignored ones; the mean is over the weights of what counts."""
    valid = target != ignored
    losses = pick(valid, losses, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return sum_(losses)
    share = cast(valid, losses.dtype)
    if weight is not None:
        share = pick(valid, _weight_of(weight, target, valid), 0.0)
    return sum_(losses) / sum_(share)


def _weight_of(weight: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    index = pick(valid, target, 0)
    return wrap(build.gather(node_of(weight), [index.node], (0,)), weight)


def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log softmax(input)[target]; the target is class indices, or probabilities shaped as input.

    The class axis is 1 (0 without a batch). Rows whose target is `ignore_index` do not count.
    """
    op = "cross_entropy"
    checked_reduction(op, reduction)
    if not 0.0 <= label_smoothing <= 1.0:
        raise UserError("bad label_smoothing", op=op, expected="0..1", got=label_smoothing)
    x, aim = _input(op, input), lift(target)
    dtype = x.dtype
    if aim.dtype.is_float:
        dtype = promote(dtype, aim.dtype)
        dtype = dtype if weight is None else promote(dtype, lift(weight).dtype)
    x = cast(x, promote(dtype, dtypes.float32))
    rows = _class_rows(op, x)
    weights = _class_weights(op, weight, rows.shape[-1], rows)
    if aim.dtype.is_float:
        losses = _soft_cross_entropy(x, rows, aim, weights, label_smoothing)
        return reduced(losses, reduction, op, dtype)
    _check_target(op, x, aim)
    losses = _class_cross_entropy(rows, aim, weights, ignore_index, reduction, label_smoothing)
    return cast(losses, dtype)


def _class_cross_entropy(
    rows: Tensor,
    target: Tensor,
    weights: Tensor | None,
    ignored: int,
    reduction: str,
    smoothing: float,
) -> Tensor:
    """Cross-entropy with a target that gives each row its class."""
    flat = target.reshape(-1).long()
    valid = flat != ignored
    top, total = _log_total(rows)  # (rows, 1) each
    near = picked("cross_entropy", rows, pick(valid, flat, 0)).unsqueeze(-1)
    losses = (total + (top - near)).squeeze(-1)
    if weights is not None:
        losses = losses * _weight_of(weights, flat, valid)
    if smoothing:
        away = top - rows if weights is None else (top - rows) * weights
        mass = float(rows.shape[-1]) if weights is None else sum_(weights)
        even = (total.squeeze(-1) * mass + sum_(away, -1)) / float(rows.shape[-1])
        losses = losses * (1.0 - smoothing) + even * smoothing
    result = _over_classes(losses, flat, weights, ignored, reduction)
    return result.reshape(target.shape) if reduction == "none" else result


def _log_total(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row, and log(sum(exp(row - largest))): added up they would round what
    they tell of logits that are large."""
    top = amax(rows, -1, True).detach()
    return top, log(sum_(exp(rows - top), -1, True))


def _soft_cross_entropy(
    x: Tensor,
    rows: Tensor,
    target: Tensor,
    weights: Tensor | None,
    smoothing: float,
) -> Tensor:
    """Cross-entropy of each row, with a target that gives each class its probability."""
    if target.shape != x.shape:
        raise ShapeError(
            "probabilities need the shape of the input",
            op="cross_entropy",
            expected=build.show(x.shape),
            got=build.show(target.shape),
            hint="for class indices use an integer target",
        )
    share = _class_rows("cross_entropy", cast(target, x.dtype))
    if smoothing:
        share = share * (1.0 - smoothing) + smoothing / float(rows.shape[-1])
    if weights is not None:
        share = share * weights
    top, total = _log_total(rows)
    losses = sum_(share * (total + (top - rows)), -1)
    return losses.reshape(x.shape[:1] + x.shape[2:] if x.ndim > 1 else ())


@_as_input
def nll_loss(
    input: Any, target: Any, weight: Any = None, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """-input[target] for log-probabilities with the class axis 1 (0 without a batch)."""
    op = "nll_loss"
    checked_reduction(op, reduction)
    x, aim = _floats(op, input)[0][0], lift(target)
    rows = _class_rows(op, x)
    weights = _class_weights(op, weight, rows.shape[-1], rows)
    _check_target(op, x, aim)
    flat = aim.reshape(-1).long()
    valid = flat != ignore_index
    losses = -picked(op, rows, pick(valid, flat, 0))
    if weights is not None:
        losses = losses * _weight_of(weights, flat, valid)
    result = _over_classes(losses, flat, weights, ignore_index, reduction)
    return result.reshape(aim.shape) if reduction == "none" else result


# ---- distances ------------------------------------------------------------------------------


def mse_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """(input - target) ** 2."""
    (x, y), dtype = _pair("mse_loss", input, target)
    away = x - y
    return reduced(away * away, reduction, "mse_loss", dtype)


def l1_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """|input - target|."""
    (x, y), dtype = _pair("l1_loss", input, target)
    return reduced(abs_(x - y), reduction, "l1_loss", dtype)


def smooth_l1_loss(input: Any, target: Any, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """A square below beta, a line above: 0.5 * d ** 2 / beta, or |d| - 0.5 * beta."""
    if beta < 0:
        raise UserError("bad beta", op="smooth_l1_loss", expected="beta >= 0", got=beta)
    if beta == 0:
        return l1_loss(input, target, reduction)
    (x, y), dtype = _pair("smooth_l1_loss", input, target)
    away = abs_(x - y)
    losses = pick(away < beta, away * away * (0.5 / beta), away - 0.5 * beta)
    return reduced(losses, reduction, "smooth_l1_loss", dtype)


@_as_input
def huber_loss(input: Any, target: Any, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """A square below delta, a line above: 0.5 * d ** 2, or delta * (|d| - 0.5 * delta)."""
    if delta <= 0:
        raise UserError("bad delta", op="huber_loss", expected="delta > 0", got=delta)
    (x, y), _ = _pair("huber_loss", input, target)
    away = abs_(x - y)
    losses = pick(away <= delta, away * away * 0.5, (away - 0.5 * delta) * delta)
    return reduced(losses, reduction, "huber_loss")


# ---- probabilities --------------------------------------------------------------------------


def _floored_log(x: Tensor) -> Tensor:
    """log(x), but at least -100 and with derivative 0 there."""
    tiny = x <= math.exp(-100.0)
    return pick(tiny, -100.0, log(pick(tiny, 1.0, x)))


@_as_input
def binary_cross_entropy(
    input: Any, target: Any, weight: Any = None, reduction: str = "mean"
) -> Tensor:
    """-(target * log(input) + (1 - target) * log(1 - input)); logs are kept above -100."""
    (x, y), _ = _pair("binary_cross_entropy", input, target)
    losses = -(y * _floored_log(x) + (1.0 - y) * _floored_log(1.0 - x))
    if weight is not None:
        losses = losses * cast(lift(weight), losses.dtype)
    return reduced(losses, reduction, "binary_cross_entropy")


def binary_cross_entropy_with_logits(
    input: Any, target: Any, weight: Any = None, reduction: str = "mean", pos_weight: Any = None
) -> Tensor:
    """`binary_cross_entropy` of sigmoid(input), without leaving the range of floats.

    The result has the dtype of the target, as PyTorch has it; the input's beside integers.
    """
    op = "binary_cross_entropy_with_logits"
    logits = _input(op, input)
    aim = lift(target, logits.dtype)
    (x, y), _ = _pair(op, logits, aim)
    surprise = -logsigmoid(x)
    if pos_weight is not None:
        surprise = surprise * ((cast(lift(pos_weight), x.dtype) - 1.0) * y + 1.0)
    losses = (1.0 - y) * x + surprise
    if weight is not None:
        losses = losses * cast(lift(weight), losses.dtype)
    return reduced(losses, reduction, op, aim.dtype if aim.dtype.is_float else logits.dtype)


def kl_div(input: Any, target: Any, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """target * (log(target) - input) for log-probabilities; also reduction='batchmean'."""
    checked_reduction("kl_div", reduction, ("batchmean",))
    (x, y), dtype = _floats("kl_div", input, target)
    if log_target:
        losses = exp(y) * (y - x)
    else:
        zero = y == 0
        losses = y * log(pick(zero, 1.0, y)) - y * x
    if reduction == "batchmean":
        return cast(sum_(losses) / float(x.shape[0]) if x.ndim else sum_(losses), dtype)
    return reduced(losses, reduction, "kl_div", dtype)


def poisson_nll_loss(
    input: Any,
    target: Any,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Tensor:
    """Negative log-likelihood of counts; `full` adds Stirling's term for target > 1."""
    (x, y), dtype = _floats("poisson_nll_loss", floating(input), target)
    losses = exp(x) - y * x if log_input else x - y * log(x + eps)
    if full:
        large = y > 1
        safe = pick(large, y, 2.0)
        stirling = safe * log(safe) - safe + 0.5 * log(2.0 * math.pi * safe)
        losses = losses + pick(large, stirling, 0.0)
    return reduced(losses, reduction, "poisson_nll_loss", dtype)


def gaussian_nll_loss(
    input: Any,
    target: Any,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Negative log-likelihood under a normal distribution with its own variance each."""
    op = "gaussian_nll_loss"
    var = _given(var)
    if isinstance(var, Tensor) and 0 < var.ndim < lift(input).ndim:
        var = var.unsqueeze(-1)
    (x, y, spread), dtype = _floats(op, input, target, var)
    spread = spread + (clamp(spread, min=eps) - spread).detach()
    away = x - y
    losses = 0.5 * (log(spread) + away * away / spread)
    if full:
        losses = losses + 0.5 * math.log(2.0 * math.pi)
    return reduced(losses, reduction, op, dtype)


# ---- similarity and margins -----------------------------------------------------------------


def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The cosine of the angle between vectors along an axis."""
    a, b = lift(x1), lift(x2)
    shape = build.broadcast_shapes("cosine_similarity", a.shape, b.shape)
    (a, b), dtype = _floats("cosine_similarity", a.expand(*shape), b.expand(*shape))
    a = a / clamp(norm(a, 2, dim, True), min=eps)
    b = b / clamp(norm(b, 2, dim, True), min=eps)
    return cast(sum_(a * b, dim), dtype)


def cosine_embedding_loss(
    input1: Any, input2: Any, target: Any, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """1 - cos where the target is 1, cos above the margin where it is -1."""
    (x1, x2), dtype = _floats("cosine_embedding_loss", floating(input1), floating(input2))
    y = lift(target)
    axis, eps = (1 if x1.ndim > 1 else 0), 1e-12
    size = (sum_(x1 * x1, axis) + eps) * (sum_(x2 * x2, axis) + eps)
    cosine = sum_(x1 * x2, axis) / size.sqrt()
    apart = _positive(cosine - margin)
    losses = pick(y == 1, 1.0 - cosine, pick(y == -1, apart, 0.0))
    return reduced(losses, reduction, "cosine_embedding_loss", dtype)


def _positive(x: Tensor) -> Tensor:
    """x where it is positive, else 0."""
    return pick(x > 0, x, 0.0)


@_as_input
def hinge_embedding_loss(
    input: Any, target: Any, margin: float = 1.0, reduction: str = "mean"
) -> Tensor:
    """The input where the target is 1, what it lacks to the margin where it is -1."""
    (x, y), _ = _floats("hinge_embedding_loss", input, target)
    near = pick(y != 1, _positive(margin - x), 0.0)
    return reduced(near + pick(y != -1, x, 0.0), reduction, "hinge_embedding_loss")


def margin_ranking_loss(
    input1: Any, input2: Any, target: Any, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """max(0, -target * (input1 - input2) + margin)."""
    op = "margin_ranking_loss"
    (x1, x2, y), dtype = _floats(op, input1, input2, target, integers=True)
    return reduced(_positive(margin - y * (x1 - x2)), reduction, op, dtype)


@_as_input
def soft_margin_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """log(1 + exp(-target * input))."""
    (x, y), _ = _floats("soft_margin_loss", input, target)
    return reduced(-logsigmoid(y * x), reduction, "soft_margin_loss")


def pairwise_distance(
    x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    """The p-norm of x1 - x2 + eps over the last axis."""
    away, dtype = _distance("pairwise_distance", x1, x2, p, eps, keepdim)
    return cast(away, dtype)


def _distance(
    op: str, x1: Any, x2: Any, p: float, eps: float, keepdim: bool = False
) -> tuple[Tensor, DType]:
    """The distance of pairs, not rounded yet, and the dtype to give back."""
    (a, b), dtype = _floats(op, x1, x2, integers=True)
    return norm(a - b + eps, p, -1, keepdim), dtype


def triplet_margin_loss(
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """max(0, d(anchor, positive) - d(anchor, negative) + margin)."""
    op = "triplet_margin_loss"
    near, dtype = _distance(op, anchor, positive, p, eps)
    far, other_dtype = _distance(op, anchor, negative, p, eps)
    if swap:
        far = minimum(far, _distance(op, positive, negative, p, eps)[0])
    return reduced(_positive(near - far + margin), reduction, op, promote(dtype, other_dtype))


def multilabel_soft_margin_loss(
    input: Any, target: Any, weight: Any = None, reduction: str = "mean"
) -> Tensor:
    """The mean over classes of a binary cross-entropy on logits."""
    op = "multilabel_soft_margin_loss"
    (x, y, *factors), dtype = _floats(op, input, target, *(() if weight is None else (weight,)))
    losses = -(y * logsigmoid(x) + (1.0 - y) * logsigmoid(-x))
    for factor in factors:
        losses = losses * factor
    return reduced(mean(losses, -1), reduction, op, dtype)


@_as_input
def multi_margin_loss(
    input: Any,
    target: Any,
    p: int = 1,
    margin: float = 1.0,
    weight: Any = None,
    reduction: str = "mean",
) -> Tensor:
    """The mean over other classes of max(0, margin - input[target] + input) ** p."""
    x, aim = _floats("multi_margin_loss", input)[0][0], lift(target)
    rows = _class_rows("multi_margin_loss", x if x.ndim else x.reshape(1))
    weights = _class_weights("multi_margin_loss", weight, rows.shape[-1], rows)
    flat = aim.reshape(-1).long()
    short = _positive(margin - picked("multi_margin_loss", rows, flat).unsqueeze(-1) + rows)
    other = wrap(build.iota(rows.shape[-1])) != flat.unsqueeze(-1)
    losses = sum_(pick(other, short if p == 1 else short**p, 0.0), -1) / float(rows.shape[-1])
    if weights is not None:
        losses = losses * _weight_of(weights, flat, flat == flat)
    result = losses if aim.ndim else losses.reshape(())
    return reduced(result, reduction, "multi_margin_loss")


__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cross_entropy",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "pairwise_distance",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
]
