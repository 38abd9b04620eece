"""quant/qat.py: what training computes, what derivatives are, what is packed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from toy_device import install

import tilegrad as tg
from tilegrad import nn
from tilegrad.core.config import override
from tilegrad.core.errors import UserError
from tilegrad.quant import PackedLinear, qat, recipes
from tilegrad.quant.layerwise import Rounding
from tilegrad.runtime.device import device
from tilegrad.tensor import placement
from tilegrad.tensor.stored import stored_in
from tilegrad.train.loop import train
from tilegrad.train.optimizer import SGD, AdamW


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Two(nn.Module):
    """Two layers and something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        for i, layer in enumerate((self.up, self.down)):
            layer.weight.assign(tg.tensor(values(*layer.weight.shape, seed=i) * 0.2))

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x).silu())


def mean_square(model: Any, x: Any, y: Any) -> Any:
    return ((model(x) - y) ** 2).mean()


def test_weights_are_those_of_the_grid_and_derivatives_go_through() -> None:
    made = Two()
    weight = made.up.weight.numpy()
    qat.prepare(made, "int3", group=16)
    coded = recipes.searched(weight, 3, 16, None)
    np.testing.assert_allclose(made.up.near().numpy(), coded.values(), atol=1e-6)
    x = tg.tensor(values(5, 32, seed=3))
    made.up(x).sum().backward()
    exact = np.repeat(x.numpy().sum(0)[None], 64, 0)
    np.testing.assert_allclose(made.up.weight.grad.numpy(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("to", "inputs", "form"),
    [
        ("int3", False, "INT3_G16_F16_ZERO"),
        ("int4", True, "INT4_G16_F16_ZERO"),
        ("int8", True, "INT8_ROW_F32"),
        ("fp8", True, "E4M3_ROW_F32"),
        ("fp8", False, "E4M3_ROW_F32"),
    ],
)
def test_what_is_packed_computes_the_same(to: str, inputs: bool, form: str) -> None:
    made = qat.prepare(Two(), to, group=16, inputs=inputs)
    x, y = tg.tensor(values(16, 32, seed=3)), tg.tensor(values(16, 32, seed=4))
    optimizer = AdamW(made.parameters(), lr=1e-2)
    history = train(made, optimizer, [(x, y)] * 12, mean_square)
    assert history.losses[-1] < 0.8 * history.losses[0]
    before = made.eval()(x).numpy()
    layers = qat.convert(made)
    assert [one.name for one in layers] == ["up", "down"]
    assert {one.format.name for one in layers} == {form}
    assert isinstance(made.up, PackedLinear) and len(stored_in(made.parameters())) == 2
    near = np.abs(before).max() * 1e-5
    np.testing.assert_allclose(made(x).numpy(), before, atol=near)


def test_training_with_rounding_beats_rounding_what_was_trained() -> None:
    x = values(256, 32, seed=5)
    y = np.tanh(x @ values(32, 32, seed=6) * 0.2)
    batches = [(tg.tensor(x), tg.tensor(y))] * 150

    def fitted(model: Any, kind: Any = SGD, rate: float = 0.3) -> Any:
        optimizer = kind(model.parameters(), lr=rate)

        def after(number: int, value: float, history: Any) -> None:
            optimizer.lr = rate * (1 - (number + 1) / len(batches))

        train(model, optimizer, batches, mean_square, on_step=after)
        return model

    def cost(model: Any) -> float:
        return float(mean_square(model.eval(), *batches[0]).item())

    start = fitted(Two(), AdamW, 1e-2).state_dict()
    start = {name: t.numpy().copy() for name, t in start.items()}
    longer, rounding = Two(), Two()
    longer.load_state_dict(start)
    rounding.load_state_dict(start)
    fitted(longer)
    for layer in (longer.up, longer.down):
        near = recipes.searched(layer.weight.numpy(), 3, 16, None).values()
        layer.weight.assign(tg.tensor(near))
    qat.prepare(rounding, "int3", group=16)
    qat.convert(fitted(rounding))
    assert cost(rounding) < 0.9 * cost(longer)


def test_a_start_of_gptq_is_taken_over() -> None:
    made, x = Two(), values(128, 32, seed=7)
    weight = made.up.weight.numpy().copy()
    coded = recipes.gptq(weight, x.T @ x, 3, 16)
    assert coded.before is not None
    one = Rounding("up", coded.format, coded.raw(), (64, 32), 0.0, coded.before)
    qat.prepare(made, "int3", group=16, skip=lambda n: n == "down", start={"up": one})
    np.testing.assert_array_equal(made.eval().up.near().numpy(), coded.values())
    assert type(made.down) is nn.Linear
    (again,) = qat.convert(made)
    np.testing.assert_array_equal(again.raw, one.raw)


class Tied(nn.Module):
    """A head that shares the table's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 16), nn.Linear(16, 8, bias=False)
        self.head.weight = self.table.weight
        self.inner = nn.Linear(16, 16)


def test_what_stays_and_what_is_refused() -> None:
    made = qat.prepare(Tied(), "int4", group=16)
    assert type(made.head) is nn.Linear and isinstance(made.inner, qat.QatLinear)
    with pytest.raises(UserError, match="no such numbers"):
        qat.prepare(Two(), "int9")
    with pytest.raises(UserError, match="multiple of the group"):
        qat.prepare(Two(), "int4", group=48)
    with pytest.raises(UserError, match="nothing to convert"):
        qat.convert(Two())
    form = recipes.plain(values(64, 32), 4, 16).format
    one = Rounding("up", form, np.zeros((64, form.row_bytes(32)), np.uint8), (64, 32), 0.0)
    with pytest.raises(UserError, match="another start"):
        qat.prepare(Two(), "int3", group=16, start={"up": one})
    with pytest.raises(UserError, match="no such layer"):
        qat.prepare(Two(), "int3", group=16, start={"other": one})
    with pytest.raises(UserError, match="groups of 32"):
        qat.prepare(Two(), "int4", group=32, start={"up": one})
    with pytest.raises(UserError, match="rows of fp8 have no grid"):
        qat.prepare(Two(), "fp8", start={"up": one})
    with pytest.raises(UserError, match="not replaced in itself"):
        qat.prepare(nn.Linear(32, 16), "int4", group=16)
    with pytest.raises(UserError, match="nothing to prepare"):
        qat.prepare(Two(), "int4", group=16, skip=lambda _: True)
    with pytest.raises(UserError, match="prepared already"):
        qat.prepare(made, "int3", group=16)


def test_an_error_leaves_the_model_as_it_was() -> None:
    """Columns of the first layer are a multiple of the group, those of the second are not."""
    made = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    with pytest.raises(UserError, match="multiple of the group"):
        qat.prepare(made, "int4", group=64)
    assert [type(one) for one in made] == [nn.Linear, nn.Linear]


def test_weights_that_are_not_finite_are_refused() -> None:
    made = Two()
    made.down.weight.assign(tg.tensor(np.full((32, 64), np.nan, np.float32)))
    with pytest.raises(UserError, match="finite numbers in down"):
        qat.prepare(made, "int4", group=16)
    qat.prepare(made, "fp8")
    with pytest.raises(UserError, match="finite numbers in down"):
        qat.convert(made)
    assert isinstance(made.up, qat.QatLinear)


def test_layers_may_be_prepared_in_turns() -> None:
    made = qat.prepare(Two(), "int3", group=16, skip=lambda n: n == "down")
    qat.prepare(made, "fp8", skip=lambda n: n == "up")
    assert (made.up.bits, made.down.row_format) == (3, "E4M3_ROW_F32")


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """A device that is not the default."""
    kinds, languages = install()
    with kinds, languages, override(cache_folder=""):
        yield device("toy:0").name
    for node, buffer in list(placement.values.items()):
        if buffer.device.startswith("toy"):
            del placement.values[node]
    placement.state.active = False


def test_a_model_on_another_device(elsewhere: str) -> None:
    """Grids, and weights that a start has, are made where the layers are."""
    made = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8)).to(elsewhere)
    inputs = values(64, 16)
    coded = recipes.gptq(made[0].weight.numpy(), inputs.T @ inputs, 3, 8)
    one = Rounding("0", coded.format, coded.raw(), (8, 16), 0.0, coded.before)
    qat.prepare(made, "int3", group=8, start={"0": one})
    x = tg.tensor(inputs, device=elsewhere)
    made(x).sum().backward()
    assert made[0].weight.grad.device == made[0].scale.device == elsewhere
    before = made.eval()(x).numpy()
    (again, _) = qat.convert(made)
    np.testing.assert_array_equal(again.raw, one.raw)
    np.testing.assert_allclose(made(x).numpy(), before, atol=1e-5)
