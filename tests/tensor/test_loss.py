"""Losses against torch: values and gradients over their options."""

import numpy as np
import pytest
from torch_peer import compare, random_array, torch

from tilegrad.core.errors import DTypeError, ShapeError, UserError
from tilegrad.tensor import loss
from tilegrad.tensor.tensor import Tensor

functional = torch.nn.functional
LOGITS, CLASSES = random_array((6, 5)), np.array([0, 4, 2, -100, 1, 2])
WEIGHT = np.abs(random_array((5,), 1)) + 0.1
REDUCTIONS = ("mean", "sum", "none")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_of_classes(reduction: str, smoothing: float, weighted: bool) -> None:
    options = {"reduction": reduction, "label_smoothing": smoothing}
    compare(
        lambda x, y: loss.cross_entropy(x, y, Tensor(WEIGHT) if weighted else None, **options),
        lambda x, y: functional.cross_entropy(
            x, y, torch.tensor(WEIGHT) if weighted else None, **options
        ),
        LOGITS,
        CLASSES,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_of_probabilities(reduction: str, smoothing: float) -> None:
    share = np.abs(random_array((6, 5), 3))
    share /= share.sum(1, keepdims=True)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    compare(
        lambda x, y: loss.cross_entropy(x, y, Tensor(WEIGHT), **options),
        lambda x, y: functional.cross_entropy(x, y, torch.tensor(WEIGHT), **options),
        LOGITS,
        share,
    )


@pytest.mark.parametrize("shapes", [((5,), ()), ((2, 5, 3), (2, 3)), ((2, 5, 2, 2), (2, 2, 2))])
def test_cross_entropy_shapes(shapes: tuple) -> None:
    classes = np.random.default_rng(0).integers(0, 5, shapes[1])
    compare(loss.cross_entropy, functional.cross_entropy, random_array(shapes[0]), classes)
    compare(loss.nll_loss, functional.nll_loss, random_array(shapes[0]), classes)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll_loss(reduction: str) -> None:
    compare(
        lambda x, y: loss.nll_loss(x, y, Tensor(WEIGHT), reduction=reduction),
        lambda x, y: functional.nll_loss(x, y, torch.tensor(WEIGHT), reduction=reduction),
        LOGITS,
        CLASSES,
    )


def test_cross_entropy_is_stable() -> None:
    large = np.array([[1000.0, -1000.0, 0.0]], np.float32)
    compare(loss.cross_entropy, functional.cross_entropy, large, np.array([1]))


PAIRS = [
    ("mse_loss", {}),
    ("l1_loss", {}),
    ("smooth_l1_loss", {"beta": 0.7}),
    ("huber_loss", {"delta": 0.6}),
    ("poisson_nll_loss", {"full": True}),
    ("binary_cross_entropy_with_logits", {}),
]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name,options", PAIRS, ids=[p[0] for p in PAIRS])
def test_pairs(name: str, options: dict, reduction: str) -> None:
    ours, theirs = getattr(loss, name), getattr(functional, name)
    compare(
        lambda x, y: ours(x, y, reduction=reduction, **options),
        lambda x, y: theirs(x, y, reduction=reduction, **options),
        random_array((4, 3)),
        np.abs(random_array((4, 3), 1)),
    )


def test_binary_cross_entropy() -> None:
    x = np.array([0.0, 1.0, 0.3, 0.9, 0.0, 1.0], np.float32)
    y = np.array([0.0, 1.0, 1.0, 0.2, 1.0, 0.0], np.float32)
    compare(loss.binary_cross_entropy, functional.binary_cross_entropy, x, y, gradients=False)
    compare(
        lambda x: loss.binary_cross_entropy(x, Tensor(y[2:4])),
        lambda x: functional.binary_cross_entropy(x, torch.tensor(y[2:4])),
        x[2:4],
    )
    compare(
        lambda x, y: loss.binary_cross_entropy_with_logits(x, y, pos_weight=Tensor(WEIGHT)),
        lambda x, y: functional.binary_cross_entropy_with_logits(
            x, y, pos_weight=torch.tensor(WEIGHT)
        ),
        LOGITS * 30,
        (random_array((6, 5), 2) > 0).astype(np.float32),
    )


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", (*REDUCTIONS, "batchmean"))
def test_kl_div(reduction: str, log_target: bool) -> None:
    y = np.abs(random_array((4, 3), 1))
    y[0, 0] = 0.5 if log_target else 0.0
    compare(
        lambda x: loss.kl_div(x, Tensor(y), reduction, log_target),
        lambda x: functional.kl_div(x, torch.tensor(y), reduction=reduction, log_target=log_target),
        random_array((4, 3)),
    )


def test_similarity_and_margins() -> None:
    a, b, c = (random_array((4, 3), i) for i in range(3))
    sign = np.array([1, -1, -1, 1])
    signs = np.where(c > 0, 1, -1).astype(np.float32)
    compare(loss.cosine_similarity, functional.cosine_similarity, a, b)
    for name in ("cosine_embedding_loss",):
        compare(getattr(loss, name), getattr(functional, name), a, b, sign)
    compare(
        lambda x, y: loss.margin_ranking_loss(x, y, Tensor(signs)),
        lambda x, y: functional.margin_ranking_loss(x, y, torch.tensor(signs)),
        a,
        b,
    )
    compare(
        lambda x: loss.hinge_embedding_loss(x, Tensor(signs)),
        lambda x: functional.hinge_embedding_loss(x, torch.tensor(signs)),
        a,
    )
    compare(
        lambda x: loss.soft_margin_loss(x, Tensor(signs)),
        lambda x: functional.soft_margin_loss(x, torch.tensor(signs)),
        a,
    )
    compare(loss.triplet_margin_loss, functional.triplet_margin_loss, a, b, c)
    target = np.array([2, 0, 1, 1])
    compare(loss.multi_margin_loss, functional.multi_margin_loss, a, target)
    compare(
        lambda x: loss.multilabel_soft_margin_loss(x, Tensor((c > 0).astype(np.float32))),
        lambda x: functional.multilabel_soft_margin_loss(x, torch.tensor(c > 0).float()),
        a,
    )
    compare(
        lambda x, y, v: loss.gaussian_nll_loss(x, y, v, full=True),
        lambda x, y, v: functional.gaussian_nll_loss(x, y, v, full=True),
        a,
        b,
        np.abs(c),
    )


def test_bfloat16_is_rounded_once() -> None:
    x = Tensor(LOGITS).to("bfloat16")
    found = loss.cross_entropy(x, Tensor(CLASSES))
    exact = loss.cross_entropy(x.float(), Tensor(CLASSES))
    assert found.dtype.name == "bfloat16"
    assert float(found) == float(exact.to("bfloat16"))


def test_errors() -> None:
    with pytest.raises(ShapeError, match=r"expected: target \(6,\)"):
        loss.cross_entropy(Tensor(LOGITS), Tensor(CLASSES[:5]))
    with pytest.raises(UserError, match="unknown reduction"):
        loss.mse_loss(Tensor(LOGITS), Tensor(LOGITS), reduction="average")
    with pytest.raises(DTypeError, match="classes are not integers"):
        loss.nll_loss(Tensor(LOGITS), Tensor(LOGITS[:, 0]))
