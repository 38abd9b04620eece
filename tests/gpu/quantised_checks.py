"""Quantised products on a machine with a GPU: run by hand or by run_all.py, not by pytest.

    PYTHONPATH=src python tests/gpu/quantised_checks.py [--only Q4_1]

Every Format, as Tensors over a file's bytes: products of 1, 3, 8 and 70 tokens, products with what
is around them, rows by number; 2:4 weights, and fp8 in blocks of 128 x 128, with up to 2,048
tokens; int8 by rows; experts of 8 bits; a small model that is rounded as it is loaded, against the
same on the CPU. Prints one row per Format and ends with a status other than 0 if any failed.
Judged against float64 products with the Format's own values.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import tilegrad as tg
from tilegrad.core.dtype import bfloat16, float32
from tilegrad.core.format import QUANTISED, Format, format_of
from tilegrad.generate import LLM
from tilegrad.nn.functional import silu
from tilegrad.tensor.matmul import grouped_dot
from tilegrad.tensor.norm import rms_norm
from tilegrad.tensor.stored import stored

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "generate"))

import tiny_model
from quantised_rows import random_rows

ROWS, COLUMNS = 192, 1536
INPUTS = {  # what inputs are rounded to, of Formats whose codes matrix units multiply
    "BF16_SPARSE": "",
    "E4M3_ROW_F32": "E4M3_ROW_F32",
    "E4M3_ROW_F32_SPARSE": "E4M3_ROW_F32",
    "E4M3_128X128_F32": "E4M3_G128_F32",
    "INT8_ROW_F32": "INT8_ROW_F32",
}
MODELS = ("fp8", "int8")  # how models are rounded as they are loaded
EXPERTS = ("E4M3_ROW_F32", "E4M3_TENSOR_F32", "INT8_ROW_F32", "E4M3_128X128_F32")
COUNT, WHOLE = 8, 256  # groups, and rows of their weights in whole blocks
ALLOWED = 1.2e-2  # of the largest result: weights and results are rounded to bfloat16


class Stored:
    """Rows of a Format in memory."""

    def __init__(self, form: Format, raw: np.ndarray) -> None:
        self.format, self.shape, self.raw = form, (*raw.shape[:-1], COLUMNS), raw

    def drop(self) -> None:
        """Nothing to hand back."""


def on_gpu(values: np.ndarray) -> tg.Tensor:
    """bfloat16 on the GPU."""
    return tg.tensor(values.astype(ml_dtypes.bfloat16), device="cuda")


def off(found: tg.Tensor, want: np.ndarray) -> float:
    """How far off, of the largest result."""
    got = found.numpy().astype(np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())


def check(form: Format) -> dict[str, float]:
    """Errors by what was computed."""
    rng = np.random.default_rng(0)
    raw = random_rows(form, ROWS, COLUMNS)
    weights = stored(Stored(form, raw), bfloat16)
    w = form.to_float32(raw).astype(np.float64)
    errors: dict[str, float] = {}

    def drawn(*shape: int) -> tuple[tg.Tensor, np.ndarray]:
        made = on_gpu(rng.standard_normal(shape))
        return made, made.numpy().astype(np.float64)

    for tokens in (1, 3, 8, 70):
        x, exact = drawn(tokens, COLUMNS)
        errors[f"{tokens} tokens"] = off(x @ weights.T, exact @ w.T)
    x, exact = drawn(1, COLUMNS)
    weight, factor = drawn(COLUMNS)
    residual, more = drawn(1, ROWS)
    normed = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * factor
    whole = normed @ w.T
    gate, up = whole[:, : ROWS // 2], whole[:, ROWS // 2 :]
    halves = [stored(Stored(form, part), bfloat16) for part in (raw[: ROWS // 2], raw[ROWS // 2 :])]

    @tg.jit
    def around(x: Any, weight: Any, residual: Any) -> Any:
        y = rms_norm(x, (COLUMNS,), weight, 1e-5)
        return silu(y @ halves[0].T) * (y @ halves[1].T), residual + x @ weights.T

    found, added = around(x, weight, residual)
    errors["gated"] = off(found, gate / (1 + np.exp(-gate)) * up)
    errors["added"] = off(added, exact @ w.T + more)
    cut = [stored(Stored(form, part), bfloat16) for part in (raw[:64], raw[64:])]
    split = tg.jit(lambda x, weight: [rms_norm(x, (COLUMNS,), weight, 1e-5) @ c.T for c in cut])
    for i, part in enumerate(split(x, weight)):
        errors[f"split {i}"] = off(part, whole[:, :64] if i == 0 else whole[:, 64:])
    ids = np.array([5, 0, ROWS - 1], np.int32)
    wide = stored(Stored(form, raw), float32)
    rows = wide[tg.tensor(ids, device="cuda")].numpy()
    errors["rows"] = 0.0 if (rows == form.to_float32(raw)[ids]).all() else 1.0
    return errors


def check_codes(form: Format) -> dict[str, float]:
    """Errors of products of codes, with 2:4 weights or those of blocks: alone, with several
    weights of one input, gated."""
    rng = np.random.default_rng(0)
    raw = form.pack(rng.standard_normal((256, COLUMNS)) * COLUMNS**-0.5)[:ROWS]
    weights, errors = stored(Stored(form, raw), bfloat16), {}
    w = form.to_float32(raw).astype(np.float64)

    given = INPUTS[form.name]

    def rounded(x: tg.Tensor) -> tg.Tensor:
        return tg.quant.rounded(x, given) if given else x

    cuts = (slice(0, 128), slice(128, ROWS))  # whole blocks
    some = [stored(Stored(form, raw[cut]), bfloat16) for cut in (*cuts, slice(0, 64))]

    @tg.jit
    def products(x: tg.Tensor) -> list[tg.Tensor]:
        y = rounded(x)
        return [y @ weights.T, *(y @ part.T for part in some[:2])]

    @tg.jit
    def gated(x: tg.Tensor) -> tg.Tensor:
        y = rounded(x)
        return silu(y @ some[2].T) * (y @ some[1].T)

    for tokens in (1, 20, 70, 128, 300, 2048):
        x = held(rng, tokens, given) if given else on_gpu(rng.standard_normal((tokens, COLUMNS)))
        exact = x.numpy().astype(np.float64) @ w.T
        found = tg.jit(lambda x: rounded(x) @ weights.T)(x)
        errors[f"{tokens} tokens"] = off(found, exact)
        for number, (part, cut) in enumerate(zip(products(x), (slice(None), *cuts))):
            errors[f"{tokens} tokens, product {number}"] = off(part, exact[:, cut])
        one, two = exact[:, :64], exact[:, cuts[1]]
        errors[f"{tokens} tokens, gated"] = off(gated(x), one / (1 + np.exp(-one)) * two)
    return errors


def held(rng: np.random.Generator, rows: int, form: str = "E4M3_ROW_F32") -> tg.Tensor:
    """Rows that fp8 holds with a scale of 1 / 128, or int8 with 1 / 32: nothing is rounded."""
    if form.startswith("INT8"):
        whole = rng.integers(-127, 128, (rows, COLUMNS))
        whole[:, 0] = 127
        return on_gpu(whole / 32)
    values = rng.standard_normal((rows, COLUMNS)).clip(-3.5, 3.5).astype(ml_dtypes.float8_e4m3fn)
    values[:, ::128] = 3.5
    return on_gpu(values)


def check_experts(form: Format) -> dict[str, float]:
    """Errors of products of groups of rows with weights of their own, one product and two that are
    gated; some groups have no rows."""
    rng = np.random.default_rng(0)
    own = WHOLE if form.grain.columns else ROWS
    raw = form.pack(rng.standard_normal((COUNT * own, COLUMNS)) * COLUMNS**-0.5)
    w = form.to_float32(raw).astype(np.float64).reshape(COUNT, own, COLUMNS)
    raw, errors = raw.reshape(COUNT, own, -1), {}
    gate, up = (stored(Stored(form, part), bfloat16) for part in (raw, raw[::-1].copy()))
    given = INPUTS.get(form.name, "E4M3_ROW_F32")

    @tg.jit
    def products(x: Any, offsets: Any) -> Any:
        y = tg.quant.rounded(x, given)
        first = grouped_dot(y, gate, offsets)
        return first, silu(grouped_dot(y, gate, offsets)) * grouped_dot(y, up, offsets)

    for rows in (1, 8, 70, 2048):
        x = held(rng, rows, given)
        ends = np.sort(rng.integers(0, rows + 1, COUNT - 1))
        ends[2] = ends[1]
        offsets = np.array([0, *ends, rows], np.int32)
        parts = np.split(x.numpy().astype(np.float64), offsets[1:-1])
        a, b = (np.concatenate([p @ v.T for p, v in zip(parts, some)]) for some in (w, w[::-1]))
        one, two = products(x, tg.tensor(offsets, device="cuda"))
        errors[f"{rows} rows"] = off(one, a)
        errors[f"{rows} rows, gated"] = off(two, a / (1 + np.exp(-a)) * b)
    return errors


def check_model(quantization: str) -> dict[str, float]:
    """How much farther rounding takes the scores of a small model than it does on the CPU, where
    that is over a third: a last bit turns codes, so no device has the scores of another."""
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model.write_folder(Path(folder) / "model", {})
        text, far = "the sea was calm and the wind was low " * 3, []
        for device in ("cpu", "cuda"):
            found = []
            for rounded in ("", quantization):
                more = {"quantization": rounded} if rounded else {}
                llm = LLM(path, context=128, requests=2, device=device, **more)
                found.append(np.asarray(llm.score(llm.tokenizer.encode(text)), np.float64))
                assert len(llm.generate(text[:20], max_tokens=8).tokens) > 0
            far.append(float(np.abs(found[0] - found[1]).mean()))
    print(f"rounded to {quantization}, scores are off by {far[0]:.3f} (CPU), {far[1]:.3f} (GPU)")
    return {"scores": max(0.0, far[1] / far[0] - 4 / 3)}


def main() -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    failed = 0
    checks: list[tuple[str, Callable[[], dict[str, float]]]] = []
    kinds = ((check, [f.name for f in QUANTISED]), (check_codes, INPUTS), (check_experts, EXPERTS))
    for one, names in kinds:
        more = " experts" if one is check_experts else ""
        checks += [(name + more, functools.partial(one, format_of(name))) for name in names]
    checks += [(f"a model in {m}", functools.partial(check_model, m)) for m in MODELS]
    for name, run in checks:
        if given.only and name != given.only:
            continue
        try:
            errors = run()
            good = all(e < ALLOWED for e in errors.values())
            text = ", ".join(f"{what} {e:.1e}" for what, e in errors.items())
        except Exception:  # one Format that fails must not hide the others
            good, text = False, traceback.format_exc(limit=3)
        failed += not good
        print(f"{'ok' if good else 'FAIL'} {name}: {text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
