"""The golden Bodies: their text, their checks, their numbers, and what happens when one breaks.

`python tests/tile/test_golden.py` writes the stored texts anew.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from sampled import sampled

FOLDER = Path(__file__).parent.parent / "golden"
sys.path.insert(0, str(FOLDER))

import bodies  # noqa: E402

from tilegrad.core.dtype import int64  # noqa: E402
from tilegrad.core.errors import InternalError  # noqa: E402
from tilegrad.ir.node import Node  # noqa: E402
from tilegrad.tile import interpret  # noqa: E402
from tilegrad.tile.build import (  # noqa: E402
    Body,
    BodyBuilder,
    rebuild,
)
from tilegrad.tile.check import verify_body, walk  # noqa: E402
from tilegrad.tile.text import body_text, parse_body  # noqa: E402

BF16 = ml_dtypes.bfloat16
SEEDS = (None, *range(12))


def stored(name: str) -> Body:
    """The Body that the stored text describes."""
    return parse_body((FOLDER / f"{name}.tile").read_text())


def random(shape: tuple[int, ...], seed: int, dtype: object = BF16) -> np.ndarray:
    """Normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def wide(x: np.ndarray) -> np.ndarray:
    """In float64."""
    return x.astype(np.float64)


@pytest.mark.parametrize("name", bodies.GOLDEN)
def test_text(name: str) -> None:
    """The builder gives the stored text; the stored text parses, verifies and prints again."""
    builder, level, target = bodies.GOLDEN[name]
    text = (FOLDER / f"{name}.tile").read_text()
    assert body_text(builder()) == text
    parsed = parse_body(text)
    verify_body(parsed, level, target)
    assert body_text(parsed) == text
    if level == "placed":
        with pytest.raises(InternalError, match="belongs to the placed level"):
            verify_body(parsed, "portable", target)


# ---- portable ones: also through LLVM -----------------------------------------------------------


def native(body: Body, memories: list[np.ndarray]) -> None:
    """Compile and run on this machine."""
    sys.path.insert(0, str(FOLDER.parent / "targets"))
    from test_llvm_emit import run_native

    run_native(body, memories)


def has_amx() -> bool:
    """Whether this machine multiplies bfloat16 tiles."""
    from tilegrad.targets.llvm.target import host_target

    return any(unit.name == "tdpbf16ps" for unit in host_target().matrix)


RUNNERS = {"interpret": interpret.run, "llvm": native}


@pytest.fixture(params=list(RUNNERS))
def runner(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Run a Body in the interpreter, or as machine code."""
    return RUNNERS[request.param]


def test_amx(runner: Callable[..., None]) -> None:
    """Pack, then multiply."""
    if runner is native and not has_amx():
        pytest.skip("no AMX here")
    a, weight = random((32, 64), 0), random((64, 64), 1)
    packed, c = np.zeros((4, 32, 32), BF16), np.zeros((32, 64), np.float32)
    runner(stored("amx_pack"), [weight, packed])
    np.testing.assert_array_equal(wide(packed)[1, 3, 4:6], wide(weight)[6:8, 16 + 2])
    runner(stored("amx_matmul"), [a, packed, c])
    np.testing.assert_allclose(c, wide(a) @ wide(weight), rtol=1e-5, atol=1e-5)


def test_split_k(runner: Callable[..., None]) -> None:
    """Partial sums, then their sum in order."""
    a, b = random((16, 64), 0, np.float32), random((64, 32), 1, np.float32)
    partial, c = np.zeros((4, 16, 32), np.float32), np.zeros((16, 32), np.float32)
    runner(stored("split_k_partial"), [a, b, partial])
    runner(stored("split_k_reduce"), [partial, c])
    np.testing.assert_allclose(c, wide(a) @ wide(b), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(c, ((partial[0] + partial[1]) + partial[2]) + partial[3])


def test_paged_decode(runner: Callable[..., None]) -> None:
    """Requests of several lengths, an empty one too, against attention over their own tokens."""
    q, k, v = (random(s, i) for i, s in enumerate([(3, 2, 8), (12, 2, 16, 8), (12, 2, 16, 8)]))
    table = np.random.default_rng(5).permutation(12)[:15]
    table = np.resize(table, (3, 5)).astype(np.int32)
    lengths = np.array([80, 0, 21], np.int32)
    table[0] = [7, 3, 11, 0, 5]
    table[2, :2], table[2, 2:] = [4, 9], 10**6  # never read: beyond the length
    partial, lse = np.zeros((3, 2, 2, 8), np.float32), np.zeros((3, 2, 2), np.float32)
    o = np.ones((3, 2, 8), BF16)
    runner(stored("paged_decode"), [q, k, v, table, lengths, partial, lse])
    runner(stored("paged_combine"), [partial, lse, o])
    for request, length in enumerate(lengths):
        for head in range(2):
            used = table[request, : -(-int(length) // 16)]
            keys = wide(k)[used, head].reshape(-1, 8)[:length]
            values = wide(v)[used, head].reshape(-1, 8)[:length]
            s = keys @ wide(q)[request, head] / math.sqrt(8)
            p = np.exp(s - s.max(initial=-np.inf)) if length else s
            expected = p / max(p.sum(), 1e-30) @ values
            np.testing.assert_allclose(wide(o)[request, head], expected, atol=2e-2)


def test_systolic() -> None:
    """Weights stay, rows stream."""
    a, b, c = random((32, 48), 0), random((48, 32), 1), np.zeros((32, 32), np.float32)
    interpret.run(stored("systolic_matmul"), [a, b, c])
    np.testing.assert_allclose(c, wide(a) @ wide(b), rtol=1e-5, atol=1e-5)


# ---- placed ones: any interleaving --------------------------------------------------------------


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def run_matmul(body: Body, seed: int | None) -> None:
    """The filled ping-pong matmul against NumPy."""
    a, b, bias = random((64, 64), 0), random((32, 64), 1), random((32,), 2, np.float32)
    c = np.zeros((64, 32), BF16)
    interpret.run(body, [a, b, c, bias], seed=seed)
    expected = gelu(wide(a) @ wide(b).T + bias)
    np.testing.assert_allclose(wide(c), expected, rtol=1e-2, atol=1e-2)


def run_attention(body: Body, seed: int | None) -> None:
    """flash_attention against NumPy."""
    q, k, v = (random((2, 64, 16), i) for i in range(3))
    o, lse = np.zeros((2, 64, 16), BF16), np.zeros((2, 64), np.float32)
    interpret.run(body, [q, k, v, o, lse], seed=seed)
    s = wide(q) @ wide(k).transpose(0, 2, 1) / math.sqrt(16)
    if body.notes["causal"]:
        s = np.where(np.tril(np.ones((64, 64), bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    np.testing.assert_allclose(wide(o), p / p.sum(-1, keepdims=True) @ wide(v), atol=3e-2)
    np.testing.assert_allclose(lse, np.log(np.exp(s).sum(-1)), atol=1e-2)


KERNELS = {
    "ping_pong_matmul_gelu": run_matmul,
    "flash_attention": run_attention,
    "flash_attention_full": run_attention,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", KERNELS)
def test_interleavings(name: str, seed: int | None) -> None:
    """The numbers do not depend on who goes first or when copies land."""
    KERNELS[name](stored(name), seed)


def test_hole_must_be_filled() -> None:
    """An open hole does not run."""
    memories = [random((64, 64), 0), random((32, 64), 1), np.zeros((64, 32), BF16)]
    with pytest.raises(InternalError, match="the hole 'epilogue' is not filled"):
        interpret.run(stored("ping_pong_matmul"), memories)


# ---- mutations ----------------------------------------------------------------------------------


def nodes_of(body: Body, op: str) -> list[Node]:
    """The Nodes of an op in order."""
    return [node for node, _ in walk(body.block) if node.op.name == op]


def drop(body: Body, victim: Node) -> Body:
    """The Body without one Node of type nothing."""

    def replace(b: BodyBuilder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        return b.constant(0, int64) if node is victim else None

    return rebuild(body, replace)


def flip(body: Body, victim: Node) -> Body:
    """The Body in which one wait has the other parity."""

    def replace(b: BodyBuilder, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node is not victim:
            return None
        other = b.apply("subtract", b.constant(1, int64), inputs[2])
        return b.add(node.op.make((*inputs[:2], other), {}))

    return rebuild(body, replace)


def reported(run: Callable[[Body, int | None], None], body: Body) -> bool:
    """Whether a race, a deadlock, an overrun barrier or a wrong number shows."""
    for seed in SEEDS:
        try:
            run(body, seed)
        except (InternalError, AssertionError):
            return True
    return False


# What may go without harm: the release of the last values, for which nobody waits any more; and
# waits of the second consumer that its turn after the first one implies.
DROPS = (
    "wait",
    "arrive",
    "expect",
    "matrix_wait",
    "matrix_fence",
    "fence",
    "copy_async",
    "named_sync",
    "named_arrive",
    "matrix_commit",
    "wait_copies",
    "commit_copies",
)
HARMLESS = {
    ("flash_attention", "arrive"): {3, 7},
    ("flash_attention", "wait"): {9, 10},
}


@functools.cache
def golden(name: str) -> Body:
    """A stored Body, parsed once."""
    return stored(name)


CASES = [
    (name, op, index)
    for name in ("ping_pong_matmul_gelu", "flash_attention")
    for op in DROPS
    for index in range(len(nodes_of(golden(name), op)))
]


def often(case: tuple[str, str, int]) -> bool:
    """The first, every third, and those that are harmless."""
    name, op, index = case
    return index % 3 == 0 or index in HARMLESS.get((name, op), ())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name,op,index", sampled(CASES, often))
def test_dropping_one_is_reported(name: str, op: str, index: int) -> None:
    """Without one wait, arrive, fence or commit, something shows."""
    body = golden(name)
    broken = drop(body, nodes_of(body, op)[index])
    harmless = index in HARMLESS.get((name, op), ())
    assert reported(KERNELS[name], broken) != harmless


FLIPS = [
    (name, index)
    for name in ("ping_pong_matmul_gelu", "flash_attention")
    for index in range(len(nodes_of(golden(name), "wait")))
]


@pytest.mark.parametrize("name,index", FLIPS)
def test_flipping_a_parity_is_reported(name: str, index: int) -> None:
    """A wait for the other phase is a deadlock or a race."""
    body = golden(name)
    assert reported(KERNELS[name], flip(body, nodes_of(body, "wait")[index]))


if __name__ == "__main__":
    for name_, (builder_, _, _) in bodies.GOLDEN.items():
        (FOLDER / f"{name_}.tile").write_text(body_text(builder_()))
