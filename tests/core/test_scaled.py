"""core/scaled.py: formats by name against a formula written here, packing, and errors."""

import pickle

import ml_dtypes
import numpy as np
import pytest

from tilegrad.core.errors import DTypeError, ShapeError, UserError
from tilegrad.core.format import Grain, format_of
from tilegrad.core.scaled import NORMAL, pack_array

NAMES = [
    *("INT2_G32_F16", "INT3_G32_F16_ZERO", "INT4_G128_F16", "INT4_G32_BF16_ZERO"),
    *("INT5_G64_F32", "INT6_ROW_F32", "INT7_G32_F16", "INT8_ROW_F32"),
    *("INT8_ROW_F32_ZERO", "INT8_TENSOR_F32", "INT8_G64_F16", "E4M3_ROW_F32"),
    *("E4M3_TENSOR_F32", "E5M2_G128_F32", "E4M3_2X128_F32", "E4M3_G32_E8M0"),
    *("E2M1_G32_E8M0", "E2M1_G16_E4M3_TOTAL", "NF4_G64_F32", "BF16_SPARSE"),
    *("F16_SPARSE", "E4M3_ROW_F32_SPARSE", "INT4_G64_F16_SPARSE"),
]
SMALL = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SCALES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
SCALES |= {"E4M3": ml_dtypes.float8_e4m3fn, "E8M0": np.uint8}


def numbers(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Whole numbers of so many bits out of bytes, one at a time from one large integer."""
    whole = int.from_bytes(data.tobytes(), "little")
    return np.array([whole >> (bits * i) & ((1 << bits) - 1) for i in range(count)])


def by_formula(name: str, row: np.ndarray, columns: int) -> np.ndarray:
    """The values of one row of bytes in float64, as the table in core/scaled.py says."""
    words = name.split("_")
    element, sparse = words[0], "SPARSE" in words
    bits = {"E2M1": 4, "NF4": 4, "E4M3": 8, "E5M2": 8, "BF16": 16, "F16": 16}.get(element)
    bits = int(element[3:]) if bits is None else bits
    kept = columns // 2 if sparse else columns
    data, rest = row[: kept * bits // 8], row[kept * bits // 8 :]
    if element == "E4M3":
        codes = data.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    elif element == "E5M2":
        codes = data.view(ml_dtypes.float8_e5m2).astype(np.float64)
    elif element == "BF16":
        codes = data.view(ml_dtypes.bfloat16).astype(np.float64)
    elif element == "F16":
        codes = data.view(np.float16).astype(np.float64)
    else:
        codes = numbers(data, bits, kept)
        if element == "NF4":
            codes = np.array(NORMAL, np.float32).astype(np.float64)[codes]
        elif element == "E2M1":
            codes = np.where(codes < 8, 1, -1) * SMALL[codes % 8]
        elif "ZERO" not in words and element != "INT8":
            codes = codes - (1 << (bits - 1))
        elif "ZERO" not in words:
            codes = data.view(np.int8)
    if element in ("BF16", "F16"):
        scale, zero, total = np.ones(1), 0, 1
    else:
        kind = np.dtype(SCALES[words[2]])
        group = words[1].split("X")[-1].removeprefix("G")
        count = columns // int(group) if group.isdigit() else 1
        end = len(rest) if group.isdigit() else 0
        tail = rest[len(rest) - 16 :]
        if not group.isdigit():
            scale, rest_places = tail[: kind.itemsize].view(kind), rest[: len(rest) - 16]
            after = tail[kind.itemsize :]
            zero = after[:1].astype(np.float64) if "ZERO" in words else 0
        else:
            scale = rest[: count * kind.itemsize].view(kind)
            rest_places = rest[count * kind.itemsize : end]
            after = tail
            zero = rest_places[:count].astype(np.float64) if "ZERO" in words else 0
            zero = np.repeat(zero, columns // count) if "ZERO" in words else 0
        scale = 2.0 ** (scale.astype(np.float64) - 127) if words[2] == "E8M0" else scale
        total = after[:4].view(np.float32).astype(np.float64) if "TOTAL" in words else 1
        rest = rest_places
    scale = np.repeat(scale.astype(np.float64), columns // len(scale))
    if sparse:
        places = numbers(rest[: columns // 8], 2, columns // 2)
        wide = np.zeros(columns)
        wide[np.arange(columns // 2) // 2 * 4 + places] = codes
        codes = wide
    return (codes - zero) * (scale * total)


def values(rows: int = 4, columns: int = 256, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_formula(name: str) -> None:
    form, given = format_of(name), values()
    raw = form.pack(given)
    assert raw.shape == form.storage_shape(given.shape) and raw.dtype == np.uint8
    assert form.elements(raw.shape[1]) == 256 and form.row_bytes(256) == raw.shape[1]
    found = form.to_float32(raw)
    wanted = np.stack([by_formula(name, row, 256) for row in raw])
    few = 3e-7 if "TOTAL" in name else 0.0  # two factors are rounded
    np.testing.assert_allclose(found, wanted.astype(np.float32), rtol=few)
    if not form.sparse:  # each value is the nearest there is, or nearly so
        step = np.abs(given).max() / {2: 0.9, 3: 3, 4: 3.9}.get(form.element.bits, 7)
        assert np.abs(found - given).max() < step


GIVEN = [n for n in NAMES if not {"SPARSE", "ZERO", "E8M0", "TOTAL", "NF4"} & set(n.split("_"))]


@pytest.mark.parametrize("name", GIVEN)  # those whose scales can be given as numbers
def test_packing_with_the_same_scales_gives_the_same_codes(name: str) -> None:
    form = format_of(name)
    raw = form.pack(values())
    scale = form.split(raw)["scale"][..., 0].astype(np.float32)
    np.testing.assert_array_equal(pack_array(form, form.to_float32(raw), scale), raw)


def test_half_of_each_four_is_kept() -> None:
    form = format_of("BF16_SPARSE")
    given = np.array([[1, -2, 0, 3, 0, 0, 0, 0], [4, 3, 2, 1, 5, 5, 5, 5]], np.float32)
    wanted = [[0, -2, 0, 3, 0, 0, 0, 0], [4, 3, 0, 0, 5, 5, 0, 0]]
    raw = form.pack(given)
    np.testing.assert_array_equal(form.to_float32(raw), wanted)
    assert raw[0, -1] & 15 == 0b1101 and raw[0, -1] >> 4 == 0b0100  # places 1 and 3, 0 and 1


def test_what_a_record_says() -> None:
    form = format_of("int4_128x128_f16_zero")
    assert form is format_of(form) is pickle.loads(pickle.dumps(form))
    assert repr(form) == "INT4_128X128_F16_ZERO" and form.quantised and not form.symmetric
    assert form.grain == Grain(128, 128) and form.bits == 4 + 3 * 8 / 128 and form.apart
    assert str(format_of("E4M3_ROW_F32").grain) == "ROW"
    assert format_of("Q8_0").symmetric and not format_of("Q4_K").symmetric


@pytest.mark.parametrize(
    "name",
    ["INT9_ROW_F32", "INT4_G128", "INT3_G12_F16", "E4M3_ROW_F32_ZERO", "NF4", "INT4_G0_F16"]
    + ["INT4_G7_F16", "E2M1_ROW_F64", "INT4_ROW_E8M0_ZERO", "INT4_G128_F16_", "BF16_ROW_F32"],
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises((DTypeError, UserError), match="format"):
        format_of(name)


def test_rows_that_do_not_fit() -> None:
    form = format_of("INT4_G128_F16")
    with pytest.raises(ShapeError, match="whole number of blocks"):
        form.pack(values(2, 96))
    with pytest.raises(ShapeError, match="whole number of blocks"):
        form.to_float32(np.zeros((2, 65), np.uint8))
    with pytest.raises(ShapeError, match="rows do not divide"):
        format_of("E4M3_128X128_F32").pack(values(3, 128))
    with pytest.raises(UserError, match="finite"):
        form.pack(np.full((1, 128), np.inf, np.float32))
