"""Random Tensors: reproducible, independent, of the right distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.core.errors import DTypeError, ShapeError
from tilegrad.tensor import elementwise, reduce  # noqa: F401
from tilegrad.tensor.jit import jit
from tilegrad.tensor.random import (
    Generator,
    bernoulli,
    dropout,
    exponential,
    get_rng_state,
    manual_seed,
    multinomial,
    normal,
    rand,
    rand_like,
    randint,
    randn,
    randperm,
    set_rng_state,
    truncated_normal,
    uniform,
)
from tilegrad.tensor.tensor import Tensor

N = 40_000


def moments(x: Tensor) -> tuple[float, float]:
    values = x.numpy().astype(np.float64)
    return float(values.mean()), float(values.std())


def test_manual_seed_gives_the_same_bits():
    manual_seed(7)
    first = [rand(5).tolist(), randn(3).tolist(), randint(0, 10, (4,)).tolist()]
    manual_seed(7)
    assert first == [rand(5).tolist(), randn(3).tolist(), randint(0, 10, (4,)).tolist()]
    manual_seed(8)
    assert rand(5).tolist() != first[0]


def test_draws_differ_and_state_returns():
    manual_seed(0)
    a = rand(100).numpy()
    state = get_rng_state()
    b = rand(100).numpy()
    assert not np.any(a == b)
    set_rng_state(state)
    np.testing.assert_array_equal(rand(100).numpy(), b)


def test_lazy_draws_keep_their_numbers():
    """When a value is read does not matter, only when it was drawn."""
    manual_seed(3)
    a, b = rand(4), rand(4)
    second, first = b.tolist(), a.tolist()
    manual_seed(3)
    assert rand(4).tolist() == first and rand(4).tolist() == second


def test_generators_are_independent():
    one, two = Generator(1), Generator(1)
    np.testing.assert_array_equal(rand(4, generator=one).numpy(), rand(4, generator=two).numpy())
    other = rand(1000, generator=Generator(2)).numpy()
    assert abs(np.corrcoef(rand(1000, generator=one).numpy(), other)[0, 1]) < 0.15


def test_offsets_run_over_to_another_key():
    g = Generator(1)
    g.offset = (1 << 32) - 1
    key = g.key
    g.reserve(2)
    assert g.key != key and g.offset == 2


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_uniform_is_below_one(dtype):
    manual_seed(1)
    x = rand(N, dtype=dtype).numpy().astype(np.float64)
    assert x.min() >= 0.0 and x.max() < 1.0
    assert abs(x.mean() - 0.5) < 0.01 and abs(x.std() - 12**-0.5) < 0.01


DISTRIBUTIONS = [
    (lambda: randn(N), 0.0, 1.0),
    (lambda: randn(N, dtype="float64"), 0.0, 1.0),
    (lambda: uniform(-2.0, 4.0, (N,)), 1.0, 6 * 12**-0.5),
    (lambda: normal(3.0, 2.0, (N,)), 3.0, 2.0),
    (lambda: exponential(2.0, (N,)), 0.5, 0.5),
    (lambda: truncated_normal(size=(N,)), 0.0, 0.8796),
    (lambda: bernoulli(Tensor(np.full(N, 0.3, np.float32))), 0.3, 0.21**0.5),
    (lambda: randint(10, (N,)), 4.5, (99 / 12) ** 0.5),
    (lambda: randint(-5, 5, (N,)), -0.5, (99 / 12) ** 0.5),
    (lambda: Tensor(np.zeros(N, np.float32)).normal_(1.0, 0.5), 1.0, 0.5),
    (lambda: Tensor(np.zeros(N, np.float32)).uniform_(1.0, 2.0), 1.5, 12**-0.5),
]


@pytest.mark.parametrize("draw,mean,deviation", DISTRIBUTIONS)
def test_moments(draw, mean, deviation):
    manual_seed(11)
    got_mean, got_deviation = moments(draw())
    assert abs(got_mean - mean) < 5 * deviation / N**0.5 + 1e-3
    assert abs(got_deviation - deviation) < 0.02 * deviation + 1e-3


def test_ranges():
    manual_seed(2)
    x = randint(3, 7, (1000,))
    assert set(x.tolist()) == {3, 4, 5, 6} and x.dtype.name == "int64"
    y = truncated_normal(0.0, 1.0, -1.0, 0.5, (1000,)).numpy()
    assert y.min() >= -1.0 and y.max() <= 0.5
    assert len(set(randint(0, 1 << 40, (1000,)).tolist())) == 1000
    assert rand_like(Tensor(np.zeros((2, 3)))).dtype.name == "float64"
    with pytest.raises(ShapeError, match="the range is empty"):
        randint(5, 5, (2,))
    with pytest.raises(DTypeError, match="a seed is an int"):
        manual_seed("x")
    with pytest.raises(DTypeError, match="size is not an int"):
        rand(2.5)


def test_randperm():
    manual_seed(4)
    order = randperm(100).tolist()
    assert sorted(order) == list(range(100)) and order != list(range(100))


def test_multinomial():
    manual_seed(5)
    weights = Tensor(np.array([1.0, 0.0, 3.0], np.float32))
    drawn = multinomial(weights, 20_000, replacement=True).numpy()
    counts = np.bincount(drawn, minlength=3) / 20_000
    np.testing.assert_allclose(counts, [0.25, 0.0, 0.75], atol=0.02)
    several = Tensor(np.tile(np.array([1.0, 2.0, 4.0], np.float32), (5000, 1)))
    both = multinomial(several, 2).numpy()
    assert both.shape == (5000, 2) and np.all(both[:, 0] != both[:, 1])
    first = np.bincount(both[:, 0], minlength=3) / 5000
    np.testing.assert_allclose(first, [1 / 7, 2 / 7, 4 / 7], atol=0.03)
    with pytest.raises(ShapeError, match="without replacement"):
        multinomial(weights, 4)


def test_dropout():
    manual_seed(6)
    x = Tensor(np.ones(N, np.float32), requires_grad=True)
    y = dropout(x, 0.25)
    values = y.numpy()
    assert set(np.unique(values)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((values == 0).mean() - 0.25) < 0.02
    y.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), values)
    assert dropout(x, 0.25, training=False) is x
    assert dropout(x, 1.0).sum().item() == 0.0
    with pytest.raises(ShapeError, match="not a probability"):
        dropout(x, 1.5)


def test_jitted_dropout_differs_per_call_and_repeats_under_manual_seed():
    @jit
    def f(x):
        return dropout(x, 0.5), dropout(x, 0.5)

    x = Tensor(np.ones(64, np.float32))
    manual_seed(9)
    first = [t.tolist() for t in f(x)]
    second = [t.tolist() for t in f(x)]
    assert first[0] != first[1] and first != second and f.traces == 1
    manual_seed(9)
    assert [t.tolist() for t in f(x)] == first
    assert [t.tolist() for t in f(x)] == second
    manual_seed(9)
    assert [dropout(x, 0.5).tolist() for _ in range(2)] == first  # eager: the same bits


NAN, INF = float("nan"), float("inf")
WEIGHTS = [[0.0, 0.0], [-1.0, 2.0], [NAN, 1.0], [INF, 1.0], [-0.0, 0.0]]


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
def test_weights_that_say_nothing_are_an_error(jitted: bool, replacement: bool) -> None:
    """As in PyTorch; other rows are drawn as they are."""

    def draw(weights: Any) -> Any:
        return tg.multinomial(weights, 1, replacement=replacement)

    run = tg.jit(draw) if jitted else draw
    assert run(tg.tensor([[0.0, 3.0], [2.0, 0.0]])).tolist() == [[1], [0]]
    for row in WEIGHTS:
        with pytest.raises(tg.UserError, match="weights are not finite"):
            run(tg.tensor([[0.0, 3.0], row])).tolist()


@pytest.mark.parametrize("jitted", [False, True])
def test_weights_past_float32(jitted: bool) -> None:
    """float64 weights are judged and drawn by as float64; sums of large ones stay finite."""

    def run(weights: Any, many: int, replacement: bool = False) -> Any:
        draw = lambda w: tg.multinomial(w, many, replacement)  # noqa: E731
        return (tg.jit(draw) if jitted else draw)(weights)

    far = tg.tensor([[1e39, 1.0], [1.0, 2.0]], dtype=tg.float64)
    assert run(far, 2)[0].tolist() == [0, 1]
    assert run(far, 50, True)[0].tolist() == [0] * 50
    for weights in (tg.tensor([1e-50, 3e-50], dtype=tg.float64), tg.tensor([1e38, 3e38])):
        assert 0.7 < run(weights, 4000, True).numpy().mean() < 0.8
        first = run(weights.expand(4000, 2), 1).numpy()
        assert 0.7 < first.mean() < 0.8
    for row in ([INF, 1.0], [NAN, 1e-50], [-1e-50, 1.0], [0.0, 0.0]):
        with pytest.raises(tg.UserError, match="weights are not finite"):
            run(tg.tensor(row, dtype=tg.float64), 1).tolist()


@pytest.mark.parametrize("many", [2.0, True, "2"])
def test_how_many_are_drawn_is_an_int(many: Any) -> None:
    with pytest.raises(tg.DTypeError, match="is not an int"):
        tg.multinomial(tg.ones(3), many)
    assert tg.multinomial(tg.ones(3), np.int32(2)).shape == (2,)


@pytest.mark.parametrize("jitted", [False, True])
def test_deviations_are_not_negative(jitted: bool) -> None:
    """As in PyTorch, also where they are elements of a Tensor."""
    run = tg.jit(tg.normal) if jitted else tg.normal
    drawn = run(tg.tensor([[5.0], [6.0]]), tg.tensor([0.0, 1.0]))
    assert drawn.shape == (2, 2) and drawn[:, 0].tolist() == [5.0, 6.0]
    assert run(0.0, tg.zeros(0)).tolist() == []
    for std in (-1.0, NAN):
        with pytest.raises(tg.UserError, match="std is negative or nan"):
            run(0.0, tg.tensor([1.0, std])).tolist()


def test_probabilities_are_between_0_and_1() -> None:
    assert tg.bernoulli(tg.tensor([0.0, 1.0])).tolist() == [0.0, 1.0]
    for p in (-0.1, 1.5, NAN, INF):
        with pytest.raises(tg.UserError, match="between 0 and 1"):
            tg.bernoulli(tg.tensor([0.5, p])).tolist()
        with pytest.raises(tg.UserError, match="0 <= p <= 1"):
            tg.zeros(2).bernoulli_(p)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: tg.normal(0.0, -1.0, (2,)),
        lambda: tg.normal(0.0, NAN, (2,)),
        lambda: tg.normal(0.0, np.float32(-1), (2,)),
        lambda: tg.zeros(2).normal_(0.0, -1.0),
        lambda: tg.zeros(2).uniform_(2.0, 1.0),
        lambda: tg.zeros(2).exponential_(0.0),
        lambda: tg.zeros(2).exponential_(-1.0),
        lambda: tg.multinomial(tg.ones(3), 0),
        lambda: tg.multinomial(tg.ones(3), -1),
    ],
)
def test_numbers_that_no_distribution_has(draw: Any) -> None:
    with pytest.raises(tg.UserError, match="no distribution is such"):
        draw()
