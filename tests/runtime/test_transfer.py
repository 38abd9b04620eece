"""One function over several Devices: values that go away and come back, inside one jit."""

from __future__ import annotations

import gc
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from test_bound_cuda import LateCuda
from test_cuda import Interpreted, forget
from toy_device import install

import tilegrad as tg
from tilegrad.compiler import compile as compiler
from tilegrad.core.config import override
from tilegrad.core.errors import UserError
from tilegrad.core.target import H200
from tilegrad.runtime.device import device
from tilegrad.runtime.language import LANGUAGES
from tilegrad.runtime.recipe import Recipe
from tilegrad.targets.ptx import context, cuda_api, driver
from tilegrad.tensor import placement

DATA = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)


@pytest.fixture
def toy():
    kinds, languages = install()
    with kinds, languages, override(cache_folder="", verify=True):
        yield device("toy:0")
    for node, buffer in list(placement.values.items()):
        if buffer.device.startswith("toy"):
            del placement.values[node]
    placement.state.active = False


def offloaded(x):
    kept = (x * 2).to("toy")
    rest = (x + 1).sum(1, keepdim=True)
    return (kept.to("cpu") * rest).sum()


def test_a_value_is_offloaded_and_comes_back(toy) -> None:
    x = tg.tensor(DATA)
    jitted = tg.jit(offloaded)
    wanted = (DATA * 2 * (DATA + 1).sum(1, keepdims=True)).sum()
    for turn in range(3):
        assert np.allclose(jitted(x).item(), wanted, rtol=1e-5)
        assert [c for c in toy.copies if c[1] == DATA.nbytes] == [
            ("put", DATA.nbytes),
            ("get", DATA.nbytes),
        ] * (turn + 1)
    assert not toy.launches  # it only holds the value
    recipe = jitted.lower(x).compiled().recipe
    assert Recipe.from_text(recipe.to_text()) == recipe and recipe.devices() == ["toy:0"]
    assert [s.kind for s in recipe.steps].count("transfer") == 2


def test_each_device_computes_its_part(toy) -> None:
    def both(x):
        there = (x * 3).to("toy")
        far = (there * there + 1).sum(0)
        return far, far.to("cpu") + x.sum(0)

    far, near = tg.jit(both)(tg.tensor(DATA))
    wanted = ((DATA * 3) ** 2 + 1).sum(0)
    assert far.device == "toy:0" and near.device == "cpu" and toy.launches
    assert np.allclose(far.numpy(), wanted, rtol=1e-5)
    assert np.allclose(near.numpy(), wanted + DATA.sum(0), rtol=1e-5)


def test_arguments_on_two_devices(toy) -> None:
    """Weights that stay on the host, a function that runs elsewhere."""

    def layer(x, weight, scale):
        return (x @ weight.to("toy")) * scale

    weight = np.arange(18, dtype=np.float32).reshape(6, 3)
    x = tg.tensor(DATA, device="toy")
    jitted = tg.jit(layer)
    found = jitted(x, tg.tensor(weight), 2.0)
    assert found.device == "toy:0" and np.allclose(found.numpy(), DATA @ weight * 2, rtol=1e-5)
    assert np.allclose(jitted(x, tg.tensor(weight), 3.0).numpy(), DATA @ weight * 3, rtol=1e-5)
    with pytest.raises(UserError, match="different devices") as caught:
        tg.jit(lambda a, b: a @ b)(x, tg.tensor(weight))
    assert Path(__file__).name in str(caught.value)


def test_derivatives_and_batches_go_along(toy) -> None:
    def loss(x):
        return (x.exp().to("toy") * 3).to("cpu").sum()

    def plain(x):
        return (x.exp() * 3).sum()

    x = tg.tensor(DATA)
    assert np.allclose(tg.jit(tg.grad(loss))(x).numpy(), 3 * np.exp(DATA), rtol=1e-5)
    rows = tg.jit(tg.vmap(loss))(x).numpy()
    assert np.allclose(rows, tg.vmap(plain)(x).numpy(), rtol=1e-5)
    assert np.allclose(
        tg.jit(lambda a: tg.jvp(loss, (a,), (a,))[1])(x).item(),
        (3 * np.exp(DATA) * DATA).sum(),
        1e-4,
    )


def test_loops_and_random_numbers(toy) -> None:
    def looped(x):
        total = tg.scan(lambda c, row: (c + row, c), tg.zeros(6), x)[0]
        noise = tg.rand(6).to("toy") * 0
        return (total.to("toy") + noise).to("cpu") * 2

    many = np.ones((40, 6), np.float32)
    assert np.allclose(tg.jit(looped)(tg.tensor(many)).numpy(), 80.0)

    def inside(x):
        return tg.while_loop(lambda c: c.sum() < 9, lambda c: (c + 1).to("toy").to("cpu"), x)

    with pytest.raises(UserError, match="inside a loop"):
        tg.jit(inside)(tg.tensor(DATA))


def test_constants_are_made_where_they_are_needed(toy) -> None:
    def mixed(x):
        return (x.to("toy") + tg.ones(6).to("toy")).to("cpu")

    assert np.allclose(tg.jit(mixed)(tg.tensor(DATA)).numpy(), DATA + 1)
    assert len([c for c in toy.copies if c[0] == "put"]) == 1


def test_memory_of_both_is_planned(toy) -> None:
    """What is offloaded does not hold memory of the device it left."""

    def chain(x, away):
        kept = []
        for _ in range(4):
            x = (x @ x).tanh()
            kept.append(x.to("toy") if away else x)
        for one in reversed(kept):
            x = x @ (one.to("cpu") if away else one)
        return x

    x = tg.tensor(np.eye(64, dtype=np.float32))
    arenas = [tg.jit(chain, static=1).lower(x, away).compiled().recipe for away in (False, True)]
    assert arenas[1].arena_bytes < arenas[0].arena_bytes
    assert arenas[1].arenas["toy:0"] == 4 * x.numpy().nbytes
    assert np.allclose(*[tg.jit(chain, static=1)(x, a).numpy() for a in (False, True)])


def test_bound_functions(toy) -> None:
    x = tg.tensor(DATA).clone().realize()
    bound = tg.jit(offloaded).bind(x)
    for data in (DATA, DATA * 2):
        bound.write(0, data)
        wanted = (data * 2 * (data + 1).sum(1, keepdims=True)).sum()
        assert np.allclose(bound.run().item(), wanted, rtol=1e-5)
    shown = bound.profile(2)
    assert any(r.name == "transfer" for r in shown.records)


def test_op_by_op(toy) -> None:
    with override(eager_debug=True):
        far = tg.jit(lambda x: (x * 2).to("toy"))(tg.tensor(DATA))
        assert far.device == "toy:0" and np.allclose(far.numpy(), DATA * 2)


def test_explain_names_the_devices(toy) -> None:
    shown = str(tg.explain(offloaded, tg.tensor(DATA)))
    assert "transfer (transfer) on toy:0" in shown


def test_state_is_written_in_place(toy) -> None:
    class Total:
        def __init__(self) -> None:
            self.sum = tg.tensor(np.zeros(6, np.float32)).clone().realize()

        def tensors(self):
            return {"sum": self.sum}

    def step(total, x):
        total.sum[2] = x.to("toy").sum().to("cpu")
        return total.sum.to("toy") * 2

    total = Total()
    jitted = tg.jit(step)
    jitted(total, tg.tensor(DATA))
    place = total.sum.buffer().pointer
    for turn in range(1, 4):
        far = jitted(total, tg.tensor(DATA * turn))
        assert np.allclose(far.numpy()[2], 2 * DATA.sum() * turn, rtol=1e-4)
        assert far.device == "toy:0" and total.sum.buffer().pointer == place


# ---- a GPU and its host ---------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch, quick_collect):
    """A fake driver whose stream runs when somebody waits for it."""
    fake = LateCuda()
    forget()
    monkeypatch.setattr(driver, "_devices", {})
    monkeypatch.setattr(context, "_thread", type(context._thread)())
    monkeypatch.setattr(driver.Device, "target", H200)
    monkeypatch.setattr(compiler, "_memory", {})
    monkeypatch.setattr(compiler, "_bodies", {})
    language = LANGUAGES.replaced("ptx", Interpreted(fake).language())
    with patch.object(cuda_api, "_api", fake), override(cache_folder="", verify=True), language:
        yield fake
        gc.collect()
        forget()
    placement.state.active = False


def test_an_accelerator_and_its_host(cuda) -> None:
    def layers(x, weights):
        kept = x.tanh().to("cpu")  # offloaded
        for weight in weights:
            x = (x @ weight.to("cuda")).tanh()  # a weight that stays on the host
        small = kept.sum(0) * 2  # computed there
        return x + small.to("cuda") + kept.to("cuda"), small

    random = np.random.default_rng(0)
    weights = [random.standard_normal((6, 6)).astype(np.float32) for _ in range(3)]
    wanted = DATA
    for weight in weights:
        wanted = np.tanh(wanted @ weight)
    small = np.tanh(DATA).sum(0) * 2
    x, jitted = tg.tensor(DATA, device="cuda"), tg.jit(layers)
    host = [tg.tensor(w) for w in weights]
    for _ in range(3):
        found, near = jitted(x, host)
        assert found.device == "cuda:0" and near.device == "cpu"
        assert np.allclose(near.numpy(), small, rtol=1e-5)
        assert np.allclose(found.numpy(), wanted + small + np.tanh(DATA), rtol=1e-4, atol=1e-5)
    kinds = {(s.kind, s.device) for s in jitted.lower(x, host).compiled().recipe.steps}
    assert kinds == {("kernel", ""), ("kernel", "cpu"), ("transfer", ""), ("transfer", "cpu")}
    shown = tg.explain(layers, x, host)
    assert "on cpu" in shown.section("schedule")


def test_offloading_in_a_bound_function(cuda) -> None:
    def offload(x):
        return (x * 2).to("cpu").to("cuda") + x

    x = tg.tensor(DATA, device="cuda").clone().realize()
    bound = tg.jit(offload).bind(x)
    before = cuda.count("cuGraphInstantiate")
    for data in (DATA, DATA + 1, DATA * 3):
        bound.write(0, data)
        assert np.allclose(bound.run().numpy(), data * 3, rtol=1e-5)
    assert cuda.count("cuGraphInstantiate") <= before + 2  # patched for the Buffer of its own
