"""compiler/weights*.py and prepared.py: what is chosen for weights that are stored quantised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilegrad as tg
from tilegrad import nn
from tilegrad.compiler.compile import cut, schedule_for
from tilegrad.compiler.flatten import recipe_of
from tilegrad.compiler.pipeline import run_pipeline
from tilegrad.core import format as formats
from tilegrad.core.dtype import DType, bfloat16, float32
from tilegrad.core.format import Format
from tilegrad.core.target import AVX512, H200, Target
from tilegrad.exchange.mapped import Stored
from tilegrad.graph.interpret import interpret
from tilegrad.ir.node import topological
from tilegrad.ir.symbol import symbol
from tilegrad.kernels.quantised import gpu
from tilegrad.models.decoder.model import Norm
from tilegrad.nn.functional import silu
from tilegrad.runtime.recipe import Recipe
from tilegrad.tensor.stored import stored

VNNI = AVX512.with_cores(2)
TARGETS = [H200, VNNI]
WIDTH, INNER = 64, 192

MANY = gpu.many(formats.Q4_1, 64, bfloat16, H200)  # tokens


class Part(nn.Module):
    """The layers of a decoder's block, their weights stored quantised, and the same in NumPy."""

    def __init__(self, dtype: DType = float32, value: Format = formats.Q4_1, **options: Any):
        super().__init__()
        offset, bias = options.get("offset", 0.0), options.get("bias", False)
        self.norm = Norm(WIDTH, 1e-5, offset, dtype)
        sizes = {"q": WIDTH, "k": 64, "v": 64, "gate": INNER, "up": INNER}
        for name, rows in sizes.items():
            setattr(self, name, nn.Linear(WIDTH, rows, bias, dtype))
        self.down = nn.Linear(INNER, WIDTH, bias, dtype)
        self.embed = nn.Embedding(48, WIDTH, dtype=dtype)
        draw = np.random.default_rng(3)
        for name, parameter in self.requires_grad_(False).named_parameters():
            values = draw.standard_normal(tuple(parameter.shape)).astype(np.float32) * 0.3
            if parameter.ndim == 1:
                parameter.assign(tg.tensor(values).to(dtype))
                continue
            form = value if name.startswith("v.") else formats.Q4_1
            file = Stored(name, values.shape, form, form.pack(values))
            parameter.node = stored(file, dtype).node


class Chosen:
    """A function after all passes for a Target: its calls, and its values by the interpreters."""

    def __init__(
        self, function: Callable[..., Any], part: Part, x: Any, target: Target, **options: Any
    ) -> None:
        lowered = tg.jit(function, **options).lower(part, x)
        inputs, outputs = cut(lowered.inputs, lowered.outputs)
        results, stages = run_pipeline(inputs, outputs, target)
        self.notes = [note for stage in stages for note in stage.notes]
        self.calls = Counter(
            n.attrs["callee"].name for n in topological(results) if n.op.name == "call"
        )
        self.prepared = self.calls.pop("prepare_Q4_1", 0) + self.calls.pop("prepare_Q8_0", 0)
        if any(not isinstance(s, int) for n in inputs for s in n.shape):
            return
        buffers = lowered._buffers([part, x], {0: part.tensors()})
        given = {n: b.array(n.shape, n.dtype) for n, b in zip(inputs, buffers)}
        with np.errstate(all="ignore"):
            self.values = [np.asarray(v, np.float64) for v in interpret(results, given)]
            self.plain = [np.asarray(v, np.float64) for v in interpret(outputs, given)]

    def check(self, error: float) -> None:
        """What was chosen computes what was written."""
        for got, want in zip(self.values, self.plain):
            assert got.shape == want.shape
            assert np.abs(got - want).max() <= error * np.abs(want).max()


def tokens(*shape: int, dtype: DType = float32) -> Any:
    draw = np.random.default_rng(7).standard_normal((*shape, WIDTH)).astype(np.float32)
    return tg.tensor(draw).to(dtype)


def attention(part: Part, x: Any) -> Any:
    y = part.norm(x)
    return part.q(y), part.k(y), part.v(y)


def feed(part: Part, x: Any) -> Any:
    y = part.norm(x)
    return x + part.down(silu(part.gate(y)) * part.up(y))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("options", [{}, {"offset": 1.0}, {"bias": True}], ids=str)
def test_few_tokens(target: Target, dtype: DType, options: dict[str, Any]) -> None:
    part, x = Part(dtype, **options), tokens(1, 2, dtype=dtype)
    error = 1e-3 if dtype is float32 else 3e-2
    found = Chosen(attention, part, x, target)
    assert found.calls == {"quantised_around": 1} and found.prepared == 1
    found.check(error)
    found = Chosen(feed, part, x, target)
    assert found.calls == {"quantised_around": 2} and found.prepared == 2
    found.check(error)


def test_what_is_around_one_product() -> None:
    part = Part(bias=True)
    cases: dict[str, Callable[[Part, Any], Any]] = {
        "norm": lambda part, x: part.q(part.norm(x)),
        "bias": lambda part, x: part.q(x),
        "residual": lambda part, x: x + part.q(x),
        "all": lambda part, x: part.q(part.norm(x)) + x,
    }
    for name, function in cases.items():
        found = Chosen(function, part, tokens(2), H200)
        assert found.calls == {"quantised_around": 1}, name
        found.check(1e-3)
        assert len(schedule_launches(function, part, tokens(2))) == 1, name


def schedule_launches(function: Callable[..., Any], part: Part, x: Any) -> list[Any]:
    lowered = tg.jit(function).lower(part, x)
    schedule = schedule_for(lowered.inputs, lowered.outputs, H200)
    return [step for kernel in schedule.kernels for step in kernel.steps]


def test_many_tokens() -> None:
    part, many = Part(bfloat16), MANY
    found = Chosen(attention, part, tokens(many, dtype=bfloat16), H200)
    assert found.calls == {"quantised_unpack": 1} and found.prepared == 1
    found.check(3e-2)
    found = Chosen(feed, part, tokens(2, -(-many // 2), dtype=bfloat16), H200)
    assert found.calls == {"quantised_unpack": 2} and found.prepared == 2
    found.check(3e-2)
    found = Chosen(feed, Part(), tokens(many), H200)
    assert found.calls == {"quantised_matmul": 2}
    found.check(1e-3)
    found = Chosen(attention, Part(), tokens(40), VNNI)
    assert found.calls == {"quantised_matmul": 1} and found.prepared == 1
    found.check(1e-3)


@pytest.mark.parametrize(
    ("least", "dtype", "first"),
    [
        (MANY, bfloat16, True),
        (MANY - 1, bfloat16, False),
        (1, bfloat16, False),
        (MANY, float32, False),
    ],
)
def test_which_products_unpack_first(least: int, dtype: DType, first: bool) -> None:
    count = symbol("tokens", least, 8192)
    x = tokens(least, dtype=dtype)
    found = Chosen(lambda part, x: part.q(x), Part(dtype), x, H200, dynamic={"x": {0: count}})
    assert found.calls == {"quantised_unpack" if first else "quantised_matmul": 1}


def test_the_same_weights_are_prepared_whatever_the_tokens() -> None:
    part = Part(bfloat16)

    def both(part: Part, x: Any) -> Any:
        return (*attention(part, x), feed(part, x), part.embed(tg.tensor([1, 2])))

    layouts = set()
    for count in (1, 4, 16, MANY):
        lowered = tg.jit(both).lower(part, tokens(count, dtype=bfloat16))
        recipe, _ = recipe_of(schedule_for(lowered.inputs, lowered.outputs, H200), H200)
        names = [s.name for s in lowered.sources]
        layouts.add(
            tuple(sorted((p.layout, *(names[i] for i in p.sources)) for p in recipe.preparing))
        )
        assert Recipe.from_text(recipe.to_text()) == recipe
        raw = {i for p in recipe.preparing for i in p.sources}
        assert len(raw) == 7 and all(recipe.inputs[i] == -1 for i in raw)
        assert all(s >= 0 for i, s in enumerate(recipe.inputs) if i not in raw)
    assert len(layouts) == 1 and len(layouts.pop()) == 4


def test_formats_that_differ_are_apart() -> None:
    part = Part(value=formats.Q8_0)
    found = Chosen(attention, part, tokens(2), H200)
    assert found.calls == {"quantised_around": 2} and found.prepared == 2
    found.check(1e-3)


def test_what_looks_alike_but_is_not() -> None:
    """Each of these is computed as it is written."""

    def read_twice(part: Part, x: Any) -> Any:
        found = part.q(x)
        return found + x, found

    def other_root(part: Part, x: Any) -> Any:
        return part.q(x / ((x * x).sum(-1, keepdim=True) + 1e-5).sqrt() * part.norm.weight)

    def other_norm(part: Part, x: Any) -> Any:
        y = x.abs()
        return part.q(x / ((y * y).mean(-1, keepdim=True) + 1e-5).sqrt() * part.norm.weight)

    def gates_read(part: Part, x: Any) -> Any:
        gate, up = part.gate(x), part.up(x)
        return silu(gate) * up, up

    def own_gate(part: Part, x: Any) -> Any:
        up = part.up(x)
        return silu(up) * up

    def turned(part: Part, x: Any) -> Any:
        return x @ part.q.weight

    def whole(part: Part, x: Any) -> Any:
        return x + part.q.weight.sum(0)

    for function in (read_twice, other_root, other_norm, gates_read, own_gate, turned, whole):
        for target in TARGETS:
            Chosen(function, Part(), tokens(2), target).check(1e-3)
    found = Chosen(turned, Part(), tokens(2), H200)
    assert "something but a product reads them" in found.notes[0]


def test_inside_of_loops() -> None:
    def loop(part: Part, x: Any) -> Any:
        return tg.scan(lambda carry, row: (carry + part.q(row), carry), x[0], x)[0]

    Chosen(loop, Part(), tokens(40), VNNI).check(1e-3)
