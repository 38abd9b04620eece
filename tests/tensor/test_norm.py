"""Normalisation and embedding against torch: values, gradients and state."""

import numpy as np
import pytest
from torch_peer import close, compare, random_array, torch

import tilegrad as tg
from tilegrad import Tensor
from tilegrad.core.errors import DTypeError, ShapeError
from tilegrad.tensor import norm

functional = torch.nn.functional
X, WEIGHT, BIAS = random_array((2, 6, 5)), random_array((6,), 1), random_array((6,), 2)


def test_layer_norm() -> None:
    weight, bias = random_array((6, 5), 1), random_array((6, 5), 2)
    compare(
        lambda x, w, b: norm.layer_norm(x, (6, 5), w, b, 1e-3),
        lambda x, w, b: functional.layer_norm(x, (6, 5), w, b, 1e-3),
        X,
        weight,
        bias,
    )
    compare(lambda x: norm.layer_norm(x, 5), lambda x: functional.layer_norm(x, (5,)), X)


def test_rms_norm() -> None:
    compare(
        lambda x, w: norm.rms_norm(x, 5, w, 1e-5),
        lambda x, w: functional.rms_norm(x, (5,), w, 1e-5),
        X,
        random_array((5,), 1),
    )
    compare(lambda x: norm.rms_norm(x, 5), lambda x: functional.rms_norm(x, (5,)), X)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm(groups: int) -> None:
    compare(
        lambda x, w, b: norm.group_norm(x, groups, w, b),
        lambda x, w, b: functional.group_norm(x, groups, w, b),
        X,
        WEIGHT,
        BIAS,
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (2, 6, 5), (2, 6, 3, 2)])
def test_batch_norm(shape: tuple, training: bool) -> None:
    middle, spread = random_array((6,), 3), np.abs(random_array((6,), 4)) + 0.5
    ours = [Tensor(middle), Tensor(spread)]
    theirs = [torch.tensor(middle), torch.tensor(spread)]
    compare(
        lambda x, w, b: norm.batch_norm(x, *ours, w, b, training, 0.2),
        lambda x, w, b: functional.batch_norm(x, *theirs, w, b, training, 0.2),
        random_array(shape),
        WEIGHT,
        BIAS,
    )
    for a, b in zip(ours, theirs):
        close(a, b)


@pytest.mark.parametrize("shape", [(0, 6), (0, 6, 3), (2, 6, 0), (1, 6, 0)])
def test_statistics_of_nothing(shape: tuple) -> None:
    """Nothing comes out, gradients are 0 and the running statistics stay."""
    for name in ("batch_norm", "instance_norm")[: len(shape) - 1 if 0 in shape[2:] else 1]:
        ours, theirs = [Tensor(WEIGHT), Tensor(BIAS)], [torch.tensor(WEIGHT), torch.tensor(BIAS)]
        compare(
            lambda x, w, b, name=name, ours=ours: getattr(norm, name)(x, *ours, w, b, True, 0.2),
            lambda x, w, b, name=name, theirs=theirs: getattr(functional, name)(
                x, *theirs, w, b, True, 0.2
            ),
            random_array(shape),
            WEIGHT,
            BIAS,
        )
        for a, b in zip(ours, theirs):
            close(a, b)
    compare(lambda x: norm.group_norm(x, 2), lambda x: functional.group_norm(x, 2), np.ones(shape))


def test_statistics_of_a_symbolic_batch() -> None:
    """0 and more than 1 are right, 1 is refused, for one compiled function."""

    def run(x: Tensor, middle: Tensor, spread: Tensor) -> tuple:
        y = norm.batch_norm(x, middle, spread, training=True, momentum=0.2)
        return y, middle, spread

    f = tg.jit(run, dynamic={"x": {0: ("N", 0, 8)}})
    for count in (4, 0, 2):
        x = random_array((count, 3))
        theirs = torch.zeros(3), torch.ones(3)
        wanted = functional.batch_norm(torch.tensor(x), *theirs, training=True, momentum=0.2)
        for a, b in zip(f(Tensor(x), tg.zeros(3), tg.ones(3)), (wanted, *theirs)):
            close(a, b)
    with pytest.raises(ShapeError, match="more than one value"):
        f(tg.ones(1, 3), tg.zeros(3), tg.ones(3))


def test_instance_norm_and_others() -> None:
    compare(
        lambda x, w, b: norm.instance_norm(x, None, None, w, b),
        lambda x, w, b: functional.instance_norm(x, None, None, w, b),
        X,
        WEIGHT,
        BIAS,
    )
    compare(
        lambda x: norm.local_response_norm(x, 3, 0.1),
        lambda x: functional.local_response_norm(x, 3, 0.1),
        X,
    )
    compare(norm.normalize, functional.normalize, X)
    compare(lambda x: norm.normalize(x, 1.0, -1), lambda x: functional.normalize(x, 1.0, -1), X)


@pytest.mark.parametrize("padding", [None, 2, -1])
def test_embedding(padding: int | None) -> None:
    index = np.array([[0, 2, 2], [4, 1, 4]])
    compare(
        lambda w: norm.embedding(Tensor(index), w, padding),
        lambda w: functional.embedding(torch.tensor(index), w, padding),
        random_array((5, 3)),
    )


def test_errors() -> None:
    with pytest.raises(ShapeError, match="layer_norm: the last axes differ"):
        norm.layer_norm(Tensor(X), 6)
    with pytest.raises(DTypeError, match="indices are not integers"):
        norm.embedding(Tensor(X), Tensor(X[0]))
    with pytest.raises(ShapeError, match="more than one value"):
        norm.batch_norm(Tensor(X[:1, :, 0]), None, None, training=True)
