"""Formats: sizes, and unpacking and packing against the `gguf` package, bit for bit."""

import pickle

import ml_dtypes
import numpy as np
import pytest

from tilegrad.core import format as f
from tilegrad.core.dtype import float16, float32
from tilegrad.core.errors import DTypeError, ShapeError, UserError
from tilegrad.ir.types import Memory
from tilegrad.tile import ops
from tilegrad.tile.build import BodyBuilder
from tilegrad.tile.interpret import run as interpret

MISSING = "the gguf package is not installed: pip install 'tilegrad[peers]'"
CHECKED = (f.F32, f.F16, f.BF16, *(form for form in f.QUANTISED if form is not f.Q4_Z))
SPECIAL = np.array(
    [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E01, 0xFE00, 0x0001, 0x03FF, 0x7BFF, 0x3C00], np.uint16
)


def random_blocks(form, rows, blocks, seed=0, special=False):
    """Random bytes; with `special`, scales of zero, infinity, NaN, subnormal and largest."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows, blocks * form.block_bytes), np.uint8)
    if special:
        cut = raw.reshape(rows, blocks, form.block_bytes)
        for part in form.fields:
            if part.dtype is float16:
                chosen = random.choice(SPECIAL, (rows, blocks)).astype("<u2")
                cut[..., part.offset : part.offset + 2] = chosen[..., None].view(np.uint8)
    return raw


def same_bits(found, wanted):
    """Equal bit for bit; a NaN equals a NaN, whose payload is the processor's business."""
    assert found.dtype == wanted.dtype == np.float32 and found.shape == wanted.shape
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])


def theirs(form):
    gguf = pytest.importorskip("gguf", reason=MISSING)
    return gguf, gguf.GGMLQuantizationType[form.name]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", CHECKED, ids=repr)
def test_unpacking_equals_gguf(form, special):
    gguf, number = theirs(form)
    assert gguf.GGML_QUANT_SIZES[number] == (form.block, form.block_bytes)
    raw = random_blocks(form, 37, 11, seed=special, special=special)
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(raw, number)
    same_bits(form.to_float32(raw), wanted)


def test_every_power_and_nibble_of_mxfp4_equals_gguf():
    gguf, number = theirs(f.MXFP4)
    raw = np.zeros((256, 17), np.uint8)
    raw[:, 0] = np.arange(256)
    raw[:, 1:] = np.arange(16) * 17  # both nibbles take every value
    with np.errstate(over="ignore"):
        wanted = gguf.dequantize(raw, number)
    same_bits(f.MXFP4.to_float32(raw), wanted)


GIVEN = [f.Q4_0, f.Q4_1, f.Q5_0, f.Q5_1, f.Q8_0, f.MXFP4, f.F16, f.BF16]


@pytest.mark.parametrize("form", GIVEN, ids=repr)
def test_packing_equals_gguf(form):
    gguf, number = theirs(form)
    random = np.random.default_rng(3)
    values = random.standard_normal((50, 128), np.float32) * np.float32(10) ** random.integers(
        -3, 4, (50, 1)
    ).astype(np.float32)
    values[0], values[1, :32], values[2] = 0, 5, -1
    values[3] = random.integers(-64, 64, 128) / 2  # halves: ties
    with np.errstate(all="ignore"):
        wanted = gguf.quantize(values, number).view(np.uint8).reshape(50, -1)
    np.testing.assert_array_equal(form.pack(values), wanted)


def by_hand(form, raw):
    """One block by loops over plain numbers, from the layouts as written down."""
    half = lambda at: float(raw[at : at + 2].view(np.float16)[0])  # noqa: E731
    values = []
    if form is f.Q4_1:
        for i in range(32):
            q = raw[4 + i] & 15 if i < 16 else raw[4 + i - 16] >> 4
            values.append(half(0) * int(q) + half(2))
    elif form is f.Q5_0:
        bits = int(raw[2:6].view("<u4")[0])
        for i in range(32):
            q = (int(raw[6 + i]) & 15) if i < 16 else int(raw[6 + i - 16]) >> 4
            values.append(half(0) * ((q | (bits >> i & 1) << 4) - 16))
    elif form is f.Q8_0:
        values = [half(0) * int(q) for q in raw[2:].view(np.int8)]
    else:  # Q6_K
        for n in range(2):
            ql, qh = raw[64 * n : 64 * n + 64].tolist(), raw[128 + 32 * n : 160 + 32 * n].tolist()
            scales = raw[192 + 8 * n : 200 + 8 * n].view(np.int8).tolist()
            for part in range(4):
                for i in range(32):
                    low = ql[i + 32 * (part % 2)] >> 4 * (part // 2) & 15
                    q = (low | (qh[i] >> 2 * part & 3) << 4) - 32
                    values.append(half(208) * scales[i // 16 + 2 * part] * q)
    return np.array(values)


@pytest.mark.parametrize("form", [f.Q4_1, f.Q5_0, f.Q8_0, f.Q6_K], ids=repr)
def test_unpacking_equals_loops_by_hand(form):
    raw = random_blocks(form, 6, 1)
    for part in form.fields:
        if part.dtype is float16:
            raw[:, part.offset : part.offset + 2] = np.full((6, 1), 0.37, np.float16).view(np.uint8)
    wanted = np.stack([by_hand(form, row) for row in raw])
    np.testing.assert_allclose(form.to_float32(raw), wanted, rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("form", [f.Q4_0, f.Q4_1, f.Q8_0], ids=repr)
def test_packing_is_near_and_stable(form):
    values = np.random.default_rng(1).uniform(-1, 1, (4, 3, 96)).astype(np.float32)
    raw = form.pack(values)
    assert raw.shape == form.storage_shape(values.shape)
    assert raw.size == form.storage_bytes(values.shape)
    found = form.to_float32(raw)
    assert found.shape == values.shape
    assert abs(found - values).max() < {8.5: 0.005, 5.0: 0.07, 4.5: 0.14}[form.bits]
    with pytest.raises(UserError, match="finite"):
        form.pack(np.full(32, np.nan, np.float32))
    with pytest.raises(UserError, match="too large"):
        form.pack(np.linspace(-1e38, 1e38, 32, dtype=np.float32))


def test_codes_and_scales_give_the_values():
    for form in f.QUANTISED:
        fields = form.split(random_blocks(form, 3, 2))
        codes = form.codes(f.NUMPY, fields)
        assert codes.dtype == np.int8 and codes.shape == (3, 2, form.block)
        with np.errstate(all="ignore"):
            scale, offset = form.scales(f.NUMPY, fields)
        assert scale.dtype == np.float32 and scale.shape == (3, 2, form.block // form.group)
        assert offset is None or offset.shape == scale.shape


def test_fields_are_views_and_cover_the_block():
    for form in f.ALL:
        assert form.fields[0].offset == 0
        for part, later in zip(form.fields, form.fields[1:]):
            assert part.offset + part.count * part.dtype.size == later.offset
        last = form.fields[-1]
        assert last.offset + last.count * last.dtype.size == form.block_bytes
        raw = random_blocks(form, 2, 3)
        for part in form.split(raw).values():
            assert np.shares_memory(part, raw) and not part.flags.writeable
        assert form.to_float32(raw[:, :0]).shape == (2, 0)


def test_rows_may_be_strided_or_backwards():
    raw = random_blocks(f.Q4_K, 8, 2)
    np.testing.assert_array_equal(f.Q4_K.to_float32(raw[::2]), f.Q4_K.to_float32(raw)[::2])
    odd = np.empty((4, 2 * raw.shape[1]), np.uint8)[:, ::2]
    odd[:] = raw[:4]
    np.testing.assert_array_equal(f.Q4_K.to_float32(odd), f.Q4_K.to_float32(raw[:4]))


def test_plain_elements():
    values = np.array([[1.5, -2, 3], [0, np.inf, 1e-3]], np.float32)
    for form in (f.F32, f.F16, f.BF16):
        raw = form.pack(values)
        assert raw.shape == (2, 3 * form.block_bytes)
        wanted = values.astype(form.dtype.numpy).astype(np.float32)
        np.testing.assert_array_equal(form.to_float32(raw), wanted)
    assert f.BF16.dtype.numpy == ml_dtypes.bfloat16
    assert f.F32.storage_shape(()) == (4,) and f.F32.storage_bytes(()) == 4


def test_names_and_errors():
    for form in f.ALL:
        assert f.format_of(form.name) is form and f.format_of(form.name.lower()) is form
        assert pickle.loads(pickle.dumps(form)) is form
    assert f.format_of(float32) is f.F32 and f.format_of(f.Q4_0) is f.Q4_0
    with pytest.raises(DTypeError, match="unknown format"):
        f.format_of("Q9_9")
    with pytest.raises(ShapeError, match="multiple of 256"):
        f.Q4_K.row_bytes(576)
    with pytest.raises(ShapeError, match="whole number of blocks"):
        f.Q4_0.to_float32(np.zeros(19, np.uint8))


class TileOperations:
    """The tile builder as the Operations of unpacking."""

    def __init__(self, body):
        self.constant, self.cast, self.apply = body.constant, body.cast, body.apply
        self.iota = lambda size, dtype: body.add(ops.iota(size=size, dtype=dtype))
        self.bitcast = lambda x, dtype: body.add(ops.bitcast(x, dtype=dtype))
        self.reshape = lambda x, shape: body.add(ops.reshape(x, shape=shape))
        self.shape = lambda x: x.shape


@pytest.mark.parametrize("form", f.QUANTISED, ids=repr)
def test_the_tile_builder_unpacks_alike(form):
    raw = random_blocks(form, 4, 1)
    fields = {name: np.ascontiguousarray(part[:, 0]) for name, part in form.split(raw).items()}
    types = [(part.name, Memory((4, part.count), part.dtype)) for part in form.fields]
    body = BodyBuilder("unpack", [*types, ("out", Memory((4, form.block), float32))])
    loaded = {
        part.name: body.load(memory, (0, 0), (4, part.count), (0, 1))
        for part, memory in zip(form.fields, body.parameters)
    }
    values = form.unpack(TileOperations(body), loaded)
    body.store(body.parameters[-1], values, (0, 0), (0, 1))
    out = np.zeros((4, form.block), np.float32)
    with np.errstate(all="ignore"):
        interpret(body.finish((1,)), [*(fields[p.name] for p in form.fields), out])
    same_bits(out, form.to_float32(raw))


# Root mean square error of normal numbers, as a share of what plain Q4_0 has: 1.
NEAR = {"Q2_K": 3.3, "Q3_K": 1.75, "Q4_K": 0.86, "Q5_K": 0.44, "Q6_K": 0.21, "MXFP4": 1.5}


@pytest.mark.parametrize("name", NEAR)
def test_packing_of_blocks_by_search(name):
    form = f.format_of(name)
    random = np.random.default_rng(5)
    values = random.standard_normal((64, 512), np.float32) * 0.02
    values[0], values[1] = 0, 0.5
    values[2, :256] = np.abs(values[2, :256]) + 1  # all of one sign
    raw = form.pack(values)
    gguf, number = theirs(form)
    found = form.to_float32(raw)
    same_bits(found, gguf.dequantize(raw, number))
    assert not found[0].any()
    np.testing.assert_allclose(found[1], 0.5, rtol=0.05)

    def error(one):
        return np.sqrt(((one[3:] - values[3:]) ** 2).mean())

    plain = error(f.Q4_0.to_float32(f.Q4_0.pack(values)))
    assert error(found) < NEAR[name] * plain
