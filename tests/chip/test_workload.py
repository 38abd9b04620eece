"""Problems of traced Graphs: any jitted function, and the networks people know."""

from __future__ import annotations

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.chip.networks import network
from tilegrad.chip.workload import workload
from tilegrad.core.errors import UserError


def sizes(work: object) -> dict[str, int]:
    return {k: v for k, v in work.problem.sizes.items() if v > 1}  # type: ignore[attr-defined]


def test_a_product() -> None:
    found = workload(lambda x, w: tg.relu(x @ w), tg.zeros((3, 5, 7)), tg.zeros((7, 11)))
    (work,) = found.works
    assert sizes(work) == {"P": 15, "C": 7, "M": 11} and work.kind == "product"
    assert found.macs == 3 * 5 * 7 * 11
    assert work.weights == 7 * 11 * 4 and work.moved == 4 * (77 + 105 + 165)


def test_batches_are_groups_and_equal_products_are_one() -> None:
    def function(a: tg.Tensor, b: tg.Tensor) -> tg.Tensor:
        first = a @ b  # (6, 4, 8) x (6, 8, 8)
        return tg.relu(first) @ b

    found = workload(function, tg.zeros((6, 4, 8)), tg.zeros((6, 8, 8)))
    (work,) = found.works
    assert sizes(work) == {"G": 6, "P": 4, "C": 8, "M": 8} and work.count == 2


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2), ((2, 1), (1, 3))])
def test_convolutions(groups: int, stride: object, dilation: object) -> None:
    layer = tg.nn.Conv2d(4, 6, (3, 2), stride, 1, dilation, groups=groups, bias=False)
    x = tg.zeros((2, 4, 12, 13))
    found = workload(lambda given: layer(given), x)
    (work,) = found.works
    result = layer(x).shape
    expected = {"N": 2, "M": 6 // groups, "C": 4 // groups, "P": result[2], "Q": result[3]}
    expected |= {"R": 3, "S": 2} | ({"G": groups} if groups > 1 else {})
    assert sizes(work) == expected and work.kind == "convolution"
    steps, spreads = np.broadcast_to(stride, 2), np.broadcast_to(dilation, 2)  # type: ignore
    inputs = dict(term for axis in work.problem.operand("inputs").axes for term in axis)
    assert [inputs[loop] for loop in "PQRS"] == [*steps, *spreads]


def test_one_axis_of_space() -> None:
    layer = tg.nn.Conv1d(4, 6, 5, stride=3, bias=False)
    (work,) = workload(lambda x: layer(x), tg.zeros((2, 4, 32))).works
    assert sizes(work) == {"N": 2, "M": 6, "C": 4, "Q": 10, "S": 5}
    assert (("Q", 3), ("S", 1)) in work.problem.operand("inputs").axes


def test_three_axes_of_space_count_all_their_work() -> None:
    layer = tg.nn.Conv3d(2, 4, 3, padding=1, bias=False)
    found = workload(lambda x: layer(x), tg.zeros((1, 2, 5, 6, 7)))
    assert found.macs == 4 * 2 * 27 * 5 * 6 * 7


def test_the_gradient_of_a_convolution_has_its_work_three_times() -> None:
    layer = tg.nn.Conv2d(8, 16, 3, padding=1, bias=False)

    def loss(x: tg.Tensor, w: tg.Tensor) -> tg.Tensor:
        return (tg.nn.functional.conv2d(x, w, padding=1) ** 2).sum()

    both = workload(tg.grad(loss, (0, 1)), tg.zeros((2, 8, 8, 8)), layer.weight)
    macs = 2 * 16 * 8 * 8 * 8 * 9
    assert macs * 2.9 <= both.macs <= macs * 3.7  # borders of the padded gradient count too


def test_scans_count_their_turns() -> None:
    def function(x: tg.Tensor, w: tg.Tensor) -> tg.Tensor:
        def step(carry: tg.Tensor, given: tg.Tensor) -> tuple[tg.Tensor, tg.Tensor]:
            found = tg.tanh(carry @ w + given)
            return found, found

        return tg.scan(step, tg.zeros((4, 8)), x)[1]

    found = workload(function, tg.zeros((5, 4, 8)), tg.zeros((8, 8)))
    assert found.macs == 5 * 4 * 8 * 8


def test_causal_attention_does_half_of_it() -> None:
    def function(q: tg.Tensor, k: tg.Tensor, v: tg.Tensor) -> tg.Tensor:
        return tg.attention(q, k, v, causal=True)

    q, kv = tg.zeros((2, 4, 32, 16)), tg.zeros((2, 2, 32, 16))
    scores, values = workload(function, q, kv, kv).works
    assert sizes(scores) == {"G": 4, "P": 64, "M": 32, "C": 16}
    assert sizes(values) == {"G": 4, "P": 64, "M": 16, "C": 32}
    assert scores.share == values.share == (32 * 33 / 2) / 32**2


def test_a_graph_without_products() -> None:
    with pytest.raises(UserError, match="no products"):
        workload(lambda x: x + 1, tg.zeros(3))


KNOWN = {  # multiplications in 1e9, weights in 1e6, products
    "resnet-50": ({}, 4.089, 25.50, 54),
    "mobilenet-v1": ({}, 0.5687, 4.21, 28),
    "bert-base": ({"tokens": 384}, 35.33, 84.93, 96),
    "smollm2-135m": ({"batch": 1, "tokens": 16}, None, 134.5, 271),
}


@pytest.mark.parametrize("name", KNOWN)
def test_networks(name: str) -> None:
    given, macs, weights, products = KNOWN[name]
    found = network(name, **given)
    size = found.works[0].problem.operands[0].bits / 8
    assert found.weights / size / 1e6 == pytest.approx(weights, rel=2e-3)
    assert sum(work.count for work in found.works) == products
    if macs is not None:
        assert found.macs / 1e9 == pytest.approx(macs, rel=2e-3)
    narrow = found.with_bits(8)
    assert narrow.weights == pytest.approx(found.weights / size) and narrow.macs == found.macs


def test_llama_prefill_and_decode() -> None:
    prefill = network("llama-3-8b", batch=8, tokens=1024)
    decode = network("llama-3-8b", batch=8, tokens=1, context=1024)
    for found in (prefill, decode):
        assert found.weights == pytest.approx(2 * 7_504_658_432)  # all but norms and embedding
    assert prefill.held == pytest.approx(2 * 8_030_261_248, rel=1e-3)
    cache = 2 * 32 * 8 * 1024 * 8 * 128 * 2
    assert decode.held - prefill.held == pytest.approx(cache, rel=1e-3)
    assert decode.macs == pytest.approx(8 * (7_504_658_432 + 2 * 32 * 1025 * 4096), rel=1e-6)
    with pytest.raises(UserError, match="too many tokens") as raised:
        network("llama-3-8b", tokens=8000, context=1000)
    assert "at most 8192" in str(raised.value) and "context = 192 would fit" in str(raised.value)
    with pytest.raises(UserError, match="unknown model"):
        network("llama-9")
