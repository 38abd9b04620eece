"""Random programs beside torch: what `bench/fuzz.py` found, and its judge (CI runs a minute)."""

from __future__ import annotations

import numpy as np
import pytest

import tilegrad as tg
from tilegrad.targets.ptx.assemble import find_ptxas

pytest.importorskip("torch")

from differential import compare_with_torch, compiled_for_gpus
from random_programs import FLOATS, Leaf, Program, make

# What was wrong once: leaves (dtype, values) and lines.
ZEROS = np.array([0.0, 0.5, -0.25, 0.0, 2.0])
SPREAD = np.sin(np.arange(16) * 2.3) * 3
FINDS = {
    "derivative of xlogy at 0": ([("float32", ZEROS)], ["v0 = m.xlogy(x0, x0.abs() + 0.5)"]),
    "a maximum of bfloat16 values that its derivative computes anew": (
        [("bfloat16", SPREAD)],
        ["v0 = m.roll(m.outer(x0, x0 * 0.5), 2, 1)", "v1 = m.amax(v0, dim=(0,))"],
    ),
    "a minimum of float16 values that its derivative computes anew": (
        [("float16", SPREAD)],
        ["v0 = m.outer(x0, x0 * 0.3)", "v1 = m.amin(v0, dim=(1,))"],
    ),
    "one key: its weight is 1, so scores have no derivative": (
        [("float32", np.resize(SPREAD, (2, n, 2))) for n in (3, 1, 1)],
        [
            "v0 = F.scaled_dot_product_attention(x0, x1, x2, is_causal=True)",
            "v1 = v0[1:] - v0",
            "v2 = F.normalize(v1 + 0.1, dim=-2)",
        ],
    ),
    "one key: its value comes out as it is": (
        [("float32", np.resize(SPREAD, (2, 8, 3, 2))), ("float32", np.resize(SPREAD, (2, 8, 1, 2)))]
        + [("float32", np.resize(SPREAD * 1.1, (2, 8, 1, 5)))],
        [
            "v0 = F.scaled_dot_product_attention(x0, x1, x2, is_causal=True)",
            "v1 = m.eq(v0, x2.expand_as(v0))",
        ],
    ),
    "one value normalised, where torch in float64 is off by what it multiplies": (
        [("float64", SPREAD[:3, None] * 60), ("float64", SPREAD[3:4]), ("float64", SPREAD[4:5])],
        ["v0 = F.group_norm(x0, 1, x1, x1, 1e-3)", "v1 = F.mse_loss(v0, x2.expand_as(v0))"],
    ),
    "a quotient of integers beside floats": (
        [("int8", np.arange(4)), ("float32", SPREAD[:4])],
        ["v0 = x0 / (x0.abs() + 1)", "v1 = F.mse_loss(v0, x1, reduction='none')"],
    ),
    "equal values, of which torch has one a last bit lower": (
        [("float32", np.array([-1.0, 0.25, -1.0, 2.0]))],
        [
            "v0 = m.logaddexp2(x0, x0)",
            "v1 = m.logit(m.sigmoid(v0) * 0.9 + 0.05)",
            "v2 = m.fmax(v0, v1)",
        ],
    ),
    "one key weighs 1: its score has a derivative of two large terms, which cancel": (
        [("float32", np.sin(np.arange(576) ** 1.5).reshape(9, 64) * 3)],
        [
            "v0 = F.softmax(x0 @ x0.transpose(-1, -2) * 0.3, dim=-1) @ x0",
            "v1 = v0 + m.logsumexp(v0, -2, keepdim=True)",
        ],
    ),
    "the sign of a difference that is 0 here, and a last bit in torch": (
        [("float32", np.array([-0.75, -1.0625])), ("float32", np.array([0.25, -0.0625]))],
        ["v0 = F.l1_loss(m.logaddexp2(x0, x0), x1)"],
    ),
    "a padded row of what is rolled: every lane lies past the end of what is joined": (
        [("bfloat16", np.resize(SPREAD, (13, 14))), ("bfloat16", SPREAD[:1, None])],
        ["v0 = m.logcumsumexp(m.roll(x0, -1), -1)", "v1 = m.lerp(v0, x1, 0.25)"],
    ),
}
ON_GPUS = {
    "joined pairs of a scan, where ptxas spilled for an occupancy that nobody asked for": (
        [("float32", np.resize(SPREAD, 31))],
        ["v0 = m.logcumsumexp(m.outer(x0, x0 * 0.5), 0)"],
    ),
    "a sum of what cancels, which is rounding alone": (
        [("float32", np.resize(SPREAD, (5, 5, 8)) - np.resize(SPREAD, (5, 5, 8)).mean())],
        ["v0 = x0.sum()"],
    ),
    "several values for the only element of an array": (
        [("float32", SPREAD[:1]), ("float32", SPREAD[1:4])],
        [
            "v0 = m.index_put(x0, (m.tensor([0, 0, 0]),), m.tensor(0.5), accumulate=True)",
            "v1 = m.scatter_reduce(v0, 0, m.tensor([0, 0, 0]), x1, 'amax')",
        ],
    ),
    "a key whose score has a derivative of terms 10,000 times as large, which cancel": (
        [
            ("float32", np.array([[[0.5, -0.25]]])),
            ("float32", np.array([[[1.0, 0.5], [-0.75, 0.25], [0.3, -0.6]]])),
            ("float32", np.array([[[5.0, -3.0], [-4.0, 6.0], [0.94501, 1.05499]]])),
        ],
        ["v0 = F.scaled_dot_product_attention(x0, x1, x2)", "v1 = v0 * 3"],
    ),
    "a mask leaves one key: its score has a derivative of two terms, equal but for rounding": (
        [
            ("float32", np.sin(np.arange(150) ** 1.5).reshape(2, 3, 5, 5)),
            ("float32", np.sin(np.arange(90) ** 1.4).reshape(2, 3, 3, 5) * 3),
            ("float32", np.sin(np.arange(234) ** 1.3).reshape(2, 3, 3, 13) * 3),
            ("bool", np.arange(15).reshape(5, 3) % 3 != np.arange(5)[:, None] % 2),
        ],
        ["v0 = m.softmax((x0 @ x1.transpose(-1, -2) * 0.3).masked_fill(x3, -1e4), -1) @ x2"],
    ),
    "one row of all elements, each read in six words, spilled in a gradient": (
        [
            ("float16", np.resize(SPREAD, (8, 7, 13, 4))),
            ("float16", np.resize(SPREAD, (4, 7, 13, 8))),
            ("float16", np.resize(SPREAD * 0.9, (4, 7, 13, 8))),
        ],
        [
            "v0 = m.rot90(x0, 1, (0, 3))",
            "v1 = m.sinh(v0 * 0.5)",
            "v2 = F.instance_norm(3 - v1, eps=1e-2)",
            "v3 = m.fmax(x2, m.addcmul(v2, x1, v2, value=0.5)[-1]) + m.split(3 - v1, 3, 1)[-1]",
            "v4 = m.fmax(v1, v1) + m.var(v0, dim=None, correction=1) + v3",
        ],
    ),
    "digamma under a scatter spilled": (
        [("float32", np.resize(SPREAD, (31, 64))), ("float32", np.resize(SPREAD, (31, 2)))],
        ["v0 = m.digamma(x0.abs() + 1)", "v1 = m.index_add(v0, 1, m.tensor([29, 13]), x1)"],
    ),
    "rows gathered twice, whose gradients two warps added; a scan computed anew spilled": (
        [("float64", np.resize(SPREAD, (9, 31)))],
        [
            "v0 = m.logcumsumexp(x0, -1)",
            "v1 = v0[m.tensor([[-1, -9, -2], [4, 2, 4]], dtype=m.int64)]",
            "v2 = v1.transpose(-1, -2) @ v1 * 0.1",
        ],
    ),
    "a product of 33 rows, which spilled with room for one block and not for four": (
        [("float32", np.resize(SPREAD, (33, 3))), ("float32", np.resize(SPREAD, 33))],
        [
            "v0 = x0 @ x0.transpose(-1, -2)",
            "v1 = v0.transpose(-1, -2) @ v0 * 0.1",
            "v2 = m.cumprod(m.sin(v1) * 0.5 + 1, 0)",
            "v3 = m.tan(m.sin(x1 / (v2 * v2 + 0.5)))",
        ],
    ),
    "20 parts that are computed, one behind the other": (
        [("float32", np.resize(SPREAD, (3, 4)))],
        ["v0 = m.cat([x0 + float(i) for i in range(20)])"],
    ),
}


def program_of(case: tuple[list[tuple[str, np.ndarray]], list[str]]) -> Program:
    """A Program from leaves and lines; its result is the last value."""
    leaves = [Leaf(f"x{i}", dtype, values) for i, (dtype, values) in enumerate(case[0])]
    for leaf in leaves:
        leaf.values = leaf.torch().double().numpy() if leaf.is_float else leaf.values
    return Program(leaves, case[1], [case[1][-1].split(" ")[0]])


LONG = {name for name in ON_GPUS if "a scan" in name or "33 rows" in name}


@pytest.mark.parametrize("way", ["lazy", "jit", "steps"])
@pytest.mark.parametrize("name", FINDS)
def test_finds(name: str, way: str) -> None:
    assert compare_with_torch(program_of(FINDS[name]), way) == ""


@pytest.mark.skipif(find_ptxas() is None, reason="no ptxas here")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in ON_GPUS]
)
def test_finds_on_gpus(name: str) -> None:
    assert compiled_for_gpus(program_of(ON_GPUS[name]), ["sm_80", "sm_90a"]) == ""


def test_a_seed_is_a_program() -> None:
    first, again, other = (make((1, n), 10) for n in (5, 5, 6))
    assert str(first) == str(again) != str(other)
    assert len(first.lines) >= 5 and first.outputs
    for a, b in zip(first.leaves, again.leaves):
        assert np.array_equal(a.values, b.values)
    kinds = {line.split("(")[0].split(" = ")[1] for n in range(40) for line in make((2, n)).lines}
    assert len(kinds) > 60
    assert {x.dtype for n in range(40) for x in make((2, n)).leaves} >= set(FLOATS)


def test_the_judge_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(([("float32", SPREAD)], ["v0 = m.sin(x0)", "v1 = v0 * 2"]))
    assert compare_with_torch(program, "lazy") == ""
    right = tg.sin
    monkeypatch.setattr(tg, "sin", lambda x: right(x) + 1e-4)
    assert compare_with_torch(program, "lazy").startswith("value: v1")
    monkeypatch.setattr(tg, "sin", lambda x: right(x) + (x - x.detach()) * 1e-3)
    assert compare_with_torch(program, "lazy").startswith("gradient: of x0")
    monkeypatch.setattr(tg, "sin", lambda x: right(x) + (x - x.detach()) * (x > 2.5) * 1e-3)
    assert compare_with_torch(program, "lazy").startswith("gradient: of x0")
    monkeypatch.setattr(tg, "sin", lambda x: right(x).to(tg.float64))
    assert "float64" in compare_with_torch(program, "jit")
