"""Losses against torch: values and gradients, over their options and over dtypes of operands."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from torch_peer import compare, random_array, torch

import tilegrad as tg
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


def test_operands_by_their_names() -> None:
    a, b = Tensor(LOGITS), Tensor(LOGITS[::-1].copy())
    assert loss.cosine_similarity(x1=a, x2=b).shape == (6,)
    assert loss.margin_ranking_loss(input1=a, input2=b, target=a).shape == ()
    assert loss.triplet_margin_loss(anchor=a, positive=b, negative=b).shape == ()


UNIT = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
A, B, C = (np.random.default_rng(i).uniform(0.1, 0.9, (4, 3)) for i in range(3))
SIGNS = np.array([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0], [1.0, 1.0, -1.0], [-1.0, 1.0, 1.0]])
PICKED = np.array([0, 2, 1, 2])
# Operands, how many of them torch differentiates, and options.
OPERANDS: dict[str, tuple[tuple[np.ndarray, ...], int, dict[str, Any]]] = {
    "mse_loss": ((A, B), 2, {}),
    "l1_loss": ((A, B), 2, {}),
    "smooth_l1_loss": ((A, B), 2, {"beta": 0.3}),
    "smooth_l1_loss of beta 0": ((A, B), 2, {"beta": 0.0}),
    "mse_loss of no axes": ((A, B[0, 0]), 2, {}),
    "mse_loss of a whole target": ((A, SIGNS), 2, {}),
    "l1_loss of a whole input": ((SIGNS, B), 2, {}),
    "smooth_l1_loss of a whole target": ((A, SIGNS), 2, {}),
    "huber_loss": ((A, B), 2, {"delta": 0.3}),
    "huber_loss of a whole target": ((A, SIGNS), 1, {}),
    "kl_div": ((A, B), 2, {}),
    "kl_div of logarithms": ((A, B), 2, {"log_target": True}),
    "kl_div of a batch": ((A, B), 2, {"reduction": "batchmean"}),
    "kl_div of no axes": ((A, B[0, 0]), 2, {}),
    "poisson_nll_loss": ((A, B), 2, {}),
    "poisson_nll_loss of counts": ((A, B + 1.2), 2, {"full": True, "log_input": False}),
    "poisson_nll_loss of whole numbers": ((SIGNS, SIGNS + 2), 2, {"full": True}),
    "poisson_nll_loss of no axes": ((A, B[0, 0]), 2, {}),
    "gaussian_nll_loss": ((A, B, C), 3, {}),
    "gaussian_nll_loss of a number": ((A, B), 2, {"var": 0.3}),
    "gaussian_nll_loss of rows": ((A, B, C[:, 0]), 3, {}),
    "binary_cross_entropy": ((A, B), 2, {}),
    "binary_cross_entropy weighted": ((A, B, C), 2, {}),
    "binary_cross_entropy_with_logits": ((A, B), 2, {}),
    "binary_cross_entropy_with_logits weighted": ((A, B, C), 2, {}),
    "cosine_similarity": ((A, B), 2, {}),
    "cosine_similarity of whole numbers": ((SIGNS, B), 2, {}),
    "cosine_similarity of no axes": ((A, B[0, 0]), 2, {}),
    "pairwise_distance": ((A, B), 2, {}),
    "pairwise_distance of whole numbers": ((SIGNS, SIGNS + 1), 2, {}),
    "pairwise_distance of no axes": ((A, B[0, 0]), 2, {}),
    "cosine_embedding_loss": ((A, B, SIGNS[:, 0]), 2, {"margin": 0.1}),
    "cosine_embedding_loss of whole numbers": ((SIGNS, SIGNS + 1, SIGNS[:, 0]), 2, {}),
    "hinge_embedding_loss": ((A, SIGNS), 1, {}),
    "margin_ranking_loss": ((A, B, SIGNS), 3, {"margin": 0.1}),
    "soft_margin_loss": ((A, SIGNS), 1, {}),
    "triplet_margin_loss of whole numbers": ((SIGNS, SIGNS + 1, SIGNS * 2), 3, {}),
    "triplet_margin_loss": ((A, B, C), 3, {}),
    "triplet_margin_loss swapped": ((A, B, C), 3, {"swap": True, "p": 1.0}),
    "multilabel_soft_margin_loss": ((A, (SIGNS > 0) * 1.0), 1, {}),
    "multilabel_soft_margin_loss weighted": ((A, (SIGNS > 0) * 1.0, C), 1, {}),
    "cross_entropy": ((A, PICKED), 1, {}),
    "cross_entropy weighted": ((A, PICKED, C[0]), 1, {"label_smoothing": 0.1}),
    "cross_entropy of probabilities": ((A, B), 2, {}),
    "cross_entropy of probabilities weighted": ((A, B, C[0]), 2, {"label_smoothing": 0.1}),
    "nll_loss": ((A, PICKED), 1, {}),
    "nll_loss weighted": ((A, PICKED, C[0]), 1, {}),
    "multi_margin_loss": ((A, PICKED), 1, {}),
    "multi_margin_loss of squares": ((A, PICKED), 1, {"p": 2}),
}


def dtypes_of(arrays: tuple[np.ndarray, ...]) -> Any:
    """Dtypes that operands are given: every float, and integers for what has no fractions."""
    kinds = [[*UNIT, "int64"] if np.all(x % 1 == 0) else list(UNIT) for x in arrays]
    return product(*(["int64"] if x.dtype.kind == "i" else k for x, k in zip(arrays, kinds)))


def in_torch(run: Any, operands: Any, count: int) -> list[Any]:
    """Torch's value, then its gradients where it has them; nothing where it refuses."""
    for x in operands[:count]:
        x.requires_grad = x.is_floating_point()
    try:
        value = run(functional, *operands)
    except (RuntimeError, ValueError):
        return []
    try:
        value.sum().backward()
    except RuntimeError:
        return [value]
    return [value, *(x.grad for x in operands[:count] if x.requires_grad)]


def ours(run: Any, operands: Any, count: int) -> list[Any]:
    """The same here."""
    for x in operands[:count]:
        x.requires_grad = x.dtype.is_float
    value = run(loss, *operands)
    if value.requires_grad:
        value.sum().backward()
    return [value, *(x.grad for x in operands[:count] if x.requires_grad)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OPERANDS)
def test_dtypes_of_operands(name: str) -> None:
    arrays, count, options = OPERANDS[name]
    function = name.split(" ")[0]
    none = {"reduction": "none"} if "loss" in name or "entropy" in name else {}
    wrong, computed = [], []
    for dtypes in dtypes_of(arrays):
        peers = [torch.tensor(x).to(getattr(torch, d)) for x, d in zip(arrays, dtypes)]
        exact = [x if y.dtype.kind == "i" else x.double() for x, y in zip(peers, arrays)]
        for more in ({}, none):

            def run(home: Any, *given: Any, more: dict = more) -> Any:
                return getattr(home, function)(*given, **options, **more)

            theirs = in_torch(run, [x.clone() for x in peers], count)
            if not theirs:  # torch refuses these dtypes
                continue
            mine = ours(run, [tg.from_torch(x) for x in peers], count)
            mine = mine[: len(theirs)]
            kinds = [(str(x.dtype)[6:], tuple(x.shape)) for x in theirs]
            found = [(str(x.dtype), tuple(x.shape)) for x in mine]
            wrong += [f"{dtypes} {more}: {found}, torch {kinds}"] if found != kinds else []
        if theirs and len(set(dtypes)) < 3:
            computed.append((dtypes, mine, theirs, in_torch(run, exact, count)))
    assert not wrong, "\n".join(wrong)
    assert len(computed) >= 2
    computed = computed[:: 1 + len(computed) // 6]
    tg.realize([x for _, mine, _, _ in computed for x in mine])
    for dtypes, mine, theirs, best in computed:
        for a, b, c in zip(mine, theirs, best):
            got, want, right = a.double().numpy(), b.detach().double().numpy(), c.detach().numpy()
            unit = max(UNIT[str(x.dtype)] for x in (a, mine[0]))
            allowed = 2 * np.abs(want - right) + 8 * unit * max(1.0, np.abs(right).max())
            if np.any(np.abs(got - right) > allowed):
                wrong.append(f"{dtypes}: {got}, torch {want}, exactly {right}")
    assert not wrong, "\n".join(wrong)


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
    with pytest.raises(DTypeError, match=r"mse_loss: needs floats[^$]*int64, int64"):
        loss.mse_loss(Tensor(CLASSES), Tensor(CLASSES))
    with pytest.raises(DTypeError, match="classes are not integers"):
        loss.nll_loss(Tensor(LOGITS), Tensor(LOGITS[:, 0]))
