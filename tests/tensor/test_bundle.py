"""Bundles of functions: made here, run in processes that have no compiler; what is refused."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from without_compiler import WITHOUT_COMPILER

import tilegrad as tg
from tilegrad import nn
from tilegrad.compiler import breaks as compiler_breaks
from tilegrad.compiler.compile import host
from tilegrad.core.errors import UserError
from tilegrad.core.target import H200, Target
from tilegrad.runtime import bundle as runtime_bundle
from tilegrad.runtime.bundle import Bundle
from tilegrad.targets.ptx.assemble import find_ptxas
from tilegrad.tensor import jit as jit_module
from tilegrad.tensor.bundle import Recorder
from tilegrad.tensor.bundled import rows_of

START = WITHOUT_COMPILER + "import numpy as np\nimport tilegrad as tg\n"


def run(code: str, **environment: str) -> str:
    """What a process without the compiler prints."""
    done = subprocess.run(
        [sys.executable, "-c", START + code],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TILEGRAD_CACHE": "", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def function(w: tg.Tensor, x: tg.Tensor, scale: float) -> dict[str, object]:
    return {"y": (w @ x).relu() * scale, "more": (tg.softmax(w, -1).sum(), x[0])}


def numbers(*shape: int) -> tg.Tensor:
    return tg.tensor(np.sin(np.arange(np.prod(shape)) * 0.7).reshape(shape).astype(np.float32))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    path = tmp_path_factory.mktemp("bundles") / "function"
    with tg.record() as recorder:
        found = tg.jit(function)(numbers(8, 8), numbers(8, 4), 2.0)
    tg.save_bundle(path, recorder)
    return path, float(found["y"].sum().item())


def test_a_function_without_the_compiler(made: tuple[Path, float]) -> None:
    path, expected = made
    printed = run(f"""
def numbers(*shape):
    return tg.tensor(np.sin(np.arange(np.prod(shape)) * 0.7).reshape(shape).astype(np.float32))

bundle = tg.load_bundle({str(path)!r})
found = bundle["function"](numbers(8, 8), numbers(8, 4), 2.0)
print(float(found["y"].numpy().sum()), found["more"][0].numpy(), found["more"][1].shape)
print(list(bundle), "tilegrad.compiler.compile" in sys.modules)
""")
    lines = printed.splitlines()
    value, total, *_ = lines[0].split()
    assert float(value) == pytest.approx(expected, rel=1e-6) and float(total) == pytest.approx(8)
    assert lines[1] == "['function'] False"


def test_other_arguments_are_refused(made: tuple[Path, float]) -> None:
    bundle = tg.load_bundle(made[0])
    try:
        with pytest.raises(UserError, match="fit no signature") as caught:
            bundle["function"](numbers(8, 8), numbers(8, 5), 2.0)
        assert "float32[8,4]" in str(caught.value) and "float32[8,5]" in str(caught.value)
        with pytest.raises(UserError, match="no such function"):
            bundle["other"]
    finally:
        bundle.close()


def test_the_function_itself_is_not_traced(made: tuple[Path, float]) -> None:
    bundle = tg.load_bundle(made[0])
    try:
        calls = []

        def watched(w: tg.Tensor, x: tg.Tensor, scale: float) -> dict[str, object]:
            calls.append(1)
            return function(w, x, scale)

        again = tg.jit(function)
        found = again(numbers(8, 8), numbers(8, 4), 2.0)
        assert float(found["y"].sum().item()) == pytest.approx(made[1], rel=1e-6)
        assert again.traces == 0
        other = tg.jit(watched, name="function")  # of another code: traced
        other(numbers(8, 8), numbers(8, 4), 2.0)
        assert calls
    finally:
        bundle.close()


def test_state_symbols_and_randomness(tmp_path: Path) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(numbers(4, 3))
            self.register_buffer("count", tg.zeros(2))

        def forward(self, x: tg.Tensor) -> tg.Tensor:
            self.count[0] = self.count[0] + 1
            return x @ self.weight.T

    def step(model: Counter, x: tg.Tensor) -> tuple[tg.Tensor, tg.Tensor]:
        return model(x), tg.rand(3)

    model = Counter().requires_grad_(False)
    jitted = tg.jit(step, dynamic={"x": {0: ("n", 1, 16)}})
    with tg.no_grad(), tg.record() as recorder:
        jitted(model, numbers(5, 3))
    tg.save_bundle(tmp_path / "b", recorder)
    bundle = tg.load_bundle(tmp_path / "b")
    try:
        for rows in (1, 7, 16):
            x = numbers(rows, 3)
            found, drawn = bundle["test_state_symbols_and_randomness.<locals>.step"](model, x)
            assert np.allclose(found.numpy(), x.numpy() @ model.weight.numpy().T, atol=1e-6)
            assert drawn.shape == (3,) and 0 <= drawn.numpy().min() < drawn.numpy().max() < 1
        assert model.count.tolist() == [4.0, 0.0]
        with pytest.raises(UserError, match="fit no signature"):
            bundle["test_state_symbols_and_randomness.<locals>.step"](model, numbers(17, 3))
    finally:
        bundle.close()


def test_what_cannot_be_bundled(tmp_path: Path) -> None:
    outside = numbers(3)
    with tg.record() as recorder:
        tg.jit(lambda x: x + outside, name="captures")(numbers(3))
    with pytest.raises(UserError, match="not among its arguments"):
        tg.save_bundle(tmp_path / "a", recorder)
    with tg.record() as recorder:
        tg.jit(lambda x: x * 2, name="tracked")(numbers(3).requires_grad_())
    with pytest.raises(UserError, match="derivatives"):
        tg.save_bundle(tmp_path / "b", recorder)
    with tg.record() as recorder:
        pass
    with pytest.raises(UserError, match="nothing was recorded"):
        tg.save_bundle(tmp_path / "c", recorder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="other files"):
        tg.save_bundle(tmp_path / "full", recorder)


def changed(made: tuple[Path, float], folder: Path, **fields: object) -> Path:
    """A copy of a Bundle with other fields in its manifest."""
    import shutil

    shutil.copytree(made[0], folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.update(fields)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_stale_and_foreign_bundles_are_refused(made: tuple[Path, float], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another tilegrad"):
        Bundle(changed(made, tmp_path / "a", source="0123"))
    with pytest.raises(UserError, match="another format"):
        Bundle(changed(made, tmp_path / "b", format=99))
    with pytest.raises(UserError, match="no manifest"):
        Bundle(tmp_path / "nothing")
    other = {"x86_64": "aarch64", "aarch64": "x86-64-v3"}[platform.machine()]
    with tg.record() as recorder:
        tg.jit(function)(numbers(8, 8), numbers(8, 4), 2.0)
    tg.save_bundle(tmp_path / "c", recorder, target=other)
    with pytest.raises(UserError, match="another machine"):
        Bundle(tmp_path / "c")


def test_damaged_bundles_are_refused(made: tuple[Path, float], tmp_path: Path) -> None:
    for name in ("objects.bin", "recipes.json"):
        folder = changed(made, tmp_path / name)
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(bytes(data))
        with pytest.raises(UserError, match="damaged"):
            Bundle(folder)
        (folder / name).unlink()
        with pytest.raises(UserError, match="missing"):
            Bundle(folder)


def test_a_plain_machine_of_this_kind(tmp_path: Path) -> None:
    """Code for the least machine of this kind runs here, and gives the same."""
    plain = {"x86_64": "x86-64-v2", "aarch64": "aarch64"}[platform.machine()]
    with tg.record() as recorder:
        expected = tg.jit(function)(numbers(8, 8), numbers(8, 4), 2.0)["y"].numpy()
    tg.save_bundle(tmp_path / "b", recorder, target=plain)
    bundle = tg.load_bundle(tmp_path / "b")
    try:
        found = bundle["function"](numbers(8, 8), numbers(8, 4), 2.0)["y"].numpy()
        assert np.allclose(found, expected, rtol=1e-6)
    finally:
        bundle.close()


@pytest.mark.skipif(find_ptxas() is None, reason="no ptxas here")
@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_for_a_gpu_that_is_not_here(tmp_path: Path, target: str) -> None:
    with tg.record() as recorder:
        tg.jit(function)(numbers(8, 8), numbers(8, 4), 2.0)
    tg.save_bundle(tmp_path / "b", recorder, target=target)
    bundle = Bundle(tmp_path / "b")
    assert bundle.device == "cuda" and bundle.target.cpu == target and len(bundle.recipes) >= 1
    (record,) = bundle.functions["function"]
    recipe = json.loads(bundle.recipes[record["recipe"]])
    for _, key in recipe["programs"]:
        assert bundle.code(key)[:4] == b"\x7fELF"


def test_ranges_of_symbols_are_those_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(outputs: object, where: object) -> dict[str, tuple[int, ...]]:
        return {"n": (4,)} if isinstance(where, Target) and where.name == H200.name else {}

    def traced(target: str | None) -> Recorder:
        doubled = tg.jit(lambda x: x * 2, name="doubled", dynamic={"x": {0: ("n", 1, 16)}})
        with tg.record(target) as recorder:
            for rows in (2, 3, 9):
                assert doubled(numbers(rows, 3)).shape == (rows, 3)
        return recorder

    monkeypatch.setattr(compiler_breaks, "breaks_of", breaks)
    assert [t[2].ranges for t in traced("h200").traces] == [{}, {"n": (1, 3)}, {"n": (4, 16)}]
    here = traced(None)
    assert [t[2].ranges for t in here.traces] == [{}]
    with pytest.raises(UserError, match="ranges of Symbols") as caught:
        tg.save_bundle(tmp_path / "a", here, target="h200")
    assert "tg.record(target)" in str(caught.value)


XEON = """flags : fpu mmx sse sse2 pni ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt avx f16c lahf_lm
abm bmi1 avx2 bmi2 avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni"""


def test_features_have_the_names_of_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """What LLVM asks for on a Xeon is there by the names that Linux has."""
    monkeypatch.setattr(runtime_bundle, "cpu_flags", lambda: set(XEON.split()))
    asked = "+avx2,+bmi,+bmi2,+lzcnt,+popcnt,+fma,+f16c,+avx512f,+avx512vl,+avx512vnni,+avx"
    assert runtime_bundle.missing_features(asked) == set()
    assert runtime_bundle.missing_features(asked + ",+amx-int8") == {"amx-int8"}


def test_this_machine_has_what_it_says() -> None:
    assert runtime_bundle.missing_features(host().features) == set()


def test_a_call_beside_a_bundle_looks_at_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call is looked up by in opened Bundles is what its trace depends on."""
    asked = []
    monkeypatch.setattr(jit_module, "opened_bundles", lambda: [None])
    monkeypatch.setattr(jit_module, "find", lambda jitted, *call: asked.append(call) and None)
    x = tg.tensor([1.0, 2.0]) + 1
    assert tg.jit(lambda x, scale: x * scale)(x, 2.0).tolist() == [4.0, 6.0]
    monkeypatch.setattr(tg.Tensor, "numpy", lambda self: pytest.fail("values were read"))
    rows = rows_of(tg.jit(lambda x, scale: x * scale), *asked[0])
    assert [text for path, text in rows][-2:] == ["float32[2] False", "float"]
