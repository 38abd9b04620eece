"""GGUF files: round trips, the `gguf` package as judge, and files that lie."""

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tilegrad.core import format as f
from tilegrad.core.errors import DTypeError, UserError
from tilegrad.exchange.gguf import FORMATS, NUMBERS, SCALARS, read_gguf
from tilegrad.exchange.gguf_write import kind_of, stored, write_gguf
from tilegrad.exchange.mapped import MappedFile, Stored

MISSING = "the gguf package is not installed: pip install 'tilegrad[peers]'"
METADATA = {
    "general.architecture": "llama",
    "general.name": "tiny ünïcode",
    "empty": "",
    "bytes": np.uint8(255),
    "signed": np.int8(-128),
    "short": np.uint16(65535),
    "short.signed": np.int16(-5),
    "count": 30,
    "negative": -7,
    "long": 1 << 40,
    "long.signed": -(1 << 40),
    "huge": np.uint64((1 << 64) - 1),
    "eps": 0.25,
    "double": np.float64(1e-300),
    "yes": True,
    "no": False,
    "tokens": ["<s>", "", "Ġt", "日本"],
    "types": np.array([1, 2, 3], np.int32),
    "scores": np.array([0.5, -1.5], np.float32),
    "flags": np.array([True, False]),
    "wide": np.arange(3, dtype=np.int64),
    "none": [],
    "nested": [[1, 2], [3]],
    "deep": [[["a"], []], [["b", "c"]]],
}


def tensors(seed=0):
    random = np.random.default_rng(seed)
    found = {
        "plain": random.standard_normal((3, 5), np.float32),
        "scalar": np.float32(3.5),
        "one": np.arange(7, dtype=np.int32),
        "four": random.standard_normal((2, 3, 2, 4)).astype(np.float16),
    }
    for form in (f.BF16, *(form for form in f.QUANTISED if form.name in NUMBERS)):
        raw = random.integers(0, 256, (2, 3, form.storage_bytes((form.block * 2,))), np.uint8)
        found[f"w.{form}"] = Stored(f"w.{form}", (2, 3, form.block * 2), form, raw)
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, METADATA, tensors())
    return path


def listed(value):
    """A metadata value with lists for arrays, at every depth."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [listed(item) for item in value] if isinstance(value, list) else value


# ---- what is read is what was written -----------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 32, 256])
def test_round_trip(tmp_path, version, alignment):
    path = tmp_path / "x.gguf"
    write_gguf(path, METADATA, tensors(), version=version, alignment=alignment)
    found = read_gguf(path)
    assert (found.version, found.alignment) == (version, alignment)
    assert found.architecture == "llama"
    for key, value in METADATA.items():
        assert listed(found.metadata[key]) == listed(value), key
        assert found.kinds[key] == kind_of(value), key
    assert list(found.tensors) == list(tensors())
    for name, value in tensors().items():
        wanted, got = stored(name, value), found.tensors[name]
        assert (got.shape, got.format) == (wanted.shape, wanted.format)
        np.testing.assert_array_equal(got.raw, wanted.raw)
    again = tmp_path / "again.gguf"
    write_gguf(
        again,
        found.metadata,
        found.tensors,
        kinds=found.kinds,
        version=version,
        alignment=alignment,
    )
    assert again.read_bytes() == path.read_bytes()


def test_tensors_are_views_of_the_file(written):
    found = read_gguf(written)
    for tensor in found.tensors.values():
        assert np.shares_memory(tensor.raw, found.file.data) and not tensor.raw.flags.writeable
    plain = found.tensors["plain"]
    np.testing.assert_array_equal(plain.array(), tensors()["plain"])
    assert np.shares_memory(plain.array(), found.file.data)
    assert found.tensors["scalar"].array() == np.float32(3.5)
    assert found.tensors["w.BF16"].array().dtype == f.BF16.dtype.numpy
    with pytest.raises(UserError, match="no plain elements"):
        found.tensors["w.Q4_K"].array()


def test_dropped_pages_come_back(tmp_path):
    path = tmp_path / "x.gguf"
    values = np.arange(1 << 16, dtype=np.float32)
    write_gguf(path, {}, {"x": values})
    tensor = read_gguf(path).tensors["x"]
    assert tensor.file is not None
    tensor.file.expect(tensor.offset, tensor.bytes)
    np.testing.assert_array_equal(tensor.array(), values)
    tensor.drop()
    np.testing.assert_array_equal(tensor.values(), values)


def test_a_model_in_several_files(tmp_path):
    arrays = {f"w{i}": np.full(4, i, np.float32) for i in range(3)}
    paths = [tmp_path / f"m-0000{i + 1}-of-00003.gguf" for i in range(3)]
    for i, path in enumerate(paths):
        split = {"split.no": np.uint16(i), "split.count": np.uint16(3)}
        write_gguf(path, split, {f"w{i}": arrays[f"w{i}"]})
    found = read_gguf(paths[0])
    assert {name: t.values().tolist() for name, t in found.tensors.items()} == {
        name: value.tolist() for name, value in arrays.items()
    }
    with pytest.raises(UserError, match="one of several files"):
        read_gguf(paths[1])
    write_gguf(paths[2], {"split.no": 2}, {"w0": arrays["w0"]})
    with pytest.raises(UserError, match="does not belong"):
        read_gguf(paths[0])
    paths[1].unlink()
    with pytest.raises(UserError, match="cannot read"):
        read_gguf(paths[0])


def test_metadata_by_type(written):
    found = read_gguf(written)
    assert found.get("count", int) == 30 and found.get("eps", float) == 0.25
    assert found.get("count", float) == 30 and found.get("absent", int, 4) == 4
    assert list(found.get("types", list)) == [1, 2, 3]
    with pytest.raises(UserError, match="'absent' is missing"):
        found.get("absent", int)
    for key, kind in (("yes", int), ("count", str), ("tokens", str), ("eps", int)):
        with pytest.raises(UserError, match="another type"):
            found.get(key, kind)


def test_gguf_package_reads_ours(written):
    gguf = pytest.importorskip("gguf", reason=MISSING)
    theirs = gguf.GGUFReader(written)
    ours = read_gguf(written)
    assert len(theirs.tensors) == len(ours.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert tuple(reversed(tensor.shape.tolist())) == mine.shape
        assert (tensor.data_offset, tensor.n_bytes) == (mine.offset, mine.bytes)
        assert tensor.tensor_type.name == mine.format.name
    for key in ("general.name", "count", "huge", "eps", "yes", "tokens"):
        assert theirs.fields[key].contents() == METADATA[key]


def test_we_read_the_gguf_package(tmp_path):
    gguf = pytest.importorskip("gguf", reason=MISSING)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint32("a", 5)
    writer.add_array("b", ["x", "yz"])
    writer.add_array("c", [1.5, 2.5])
    values = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    writer.add_tensor("plain", values)
    packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(tmp_path / "x.gguf")
    assert found.metadata["a"] == 5 and found.metadata["b"] == ["x", "yz"]
    np.testing.assert_array_equal(found.metadata["c"], np.array([1.5, 2.5], np.float32))
    np.testing.assert_array_equal(found.tensors["plain"].values(), values)
    wanted = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(found.tensors["packed"].values(), wanted)


def test_type_numbers_are_those_of_the_gguf_package():
    gguf = pytest.importorskip("gguf", reason=MISSING)
    for number, form in FORMATS.items():
        assert gguf.GGMLQuantizationType(number).name == form.name
    for number, (name, _) in SCALARS.items():
        assert gguf.GGUFValueType(number).name.lower() == name


# ---- files that lie -----------------------------------------------------------------------------


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(tensor_count=0, metadata_count=0, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensor_count, metadata_count)


def entry(key, number, value):
    return text(key) + struct.pack("<I", number) + value


def tensor(name=b"w", sizes=(32,), number=0, offset=0):
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + shape + struct.pack("<IQ", number, offset)


def u64(value):
    return struct.pack("<Q", value)


def u32(value):
    return struct.pack("<I", value)


HUGE = (1 << 64) - 1
NESTED = b"".join(u32(9) + u64(1) for _ in range(60)) + u32(4) + u64(1) + u32(0)
LIES = [
    ("nothing", b"", "cut off"),
    ("half a magic", b"GG", "cut off"),
    ("magic", header(magic=b"GGML"), "not a GGUF file"),
    ("version 1", header(version=1), "version is not read"),
    ("big-endian", header(version=3 << 24), "big-endian"),
    ("tensor count", header(HUGE), "tensor count: too many"),
    ("metadata count", header(0, 1 << 40), "metadata count: too many"),
    ("key length", header(0, 1) + u64(HUGE) + b"x" * 20, "too long"),
    ("key beyond", header(0, 1) + u64(1000) + b"x" * 20, "cut off"),
    ("key not UTF-8", header(0, 1) + entry(b"\xff\xfe", 4, u32(1)), "not UTF-8"),
    ("key twice", header(0, 2) + entry(b"a", 4, u32(1)) * 2, "stands twice"),
    ("key empty", header(0, 1) + entry(b"", 4, u32(1)), "empty"),
    ("kind", header(0, 1) + entry(b"a", 13, u32(1)), "unknown metadata type"),
    ("bool", header(0, 1) + entry(b"a", 7, b"\2"), "not a bool"),
    ("bools", header(0, 1) + entry(b"a", 9, u32(7) + u64(2) + b"\1\2"), "not a bool"),
    ("string length", header(0, 1) + entry(b"a", 8, u64(HUGE)), "too long"),
    ("string beyond", header(0, 1) + entry(b"a", 8, u64(50) + b"abc"), "cut off"),
    ("string not UTF-8", header(0, 1) + entry(b"a", 8, text(b"\xc3\x28")), "not UTF-8"),
    ("array count", header(0, 1) + entry(b"a", 9, u32(4) + u64(1 << 61)), "too many"),
    ("array overflow", header(0, 1) + entry(b"a", 9, u32(12) + u64(1 << 63)), "too many"),
    ("strings count", header(0, 1) + entry(b"a", 9, u32(8) + u64(1 << 40)), "too many"),
    (
        "strings beyond",
        header(0, 1) + entry(b"a", 9, u32(8) + u64(2) + text(b"x") + u64(99)),
        "does not fit",
    ),
    ("strings cut", header(0, 1) + entry(b"a", 9, u32(8) + u64(2) + text(b"x" * 20)), "cut off"),
    ("depth", header(0, 1) + entry(b"a", 9, NESTED), "arrays within arrays"),
    ("array of arrays", header(0, 1) + entry(b"a", 9, u32(9) + u64(1 << 50)), "too many"),
    ("alignment 0", header(0, 1) + entry(b"general.alignment", 4, u32(0)), "not an alignment"),
    ("alignment 3", header(0, 1) + entry(b"general.alignment", 4, u32(3)), "not an alignment"),
    (
        "alignment large",
        header(0, 1) + entry(b"general.alignment", 4, u32(1 << 31)),
        "not an alignment",
    ),
    (
        "alignment text",
        header(0, 1) + entry(b"general.alignment", 8, text(b"32")),
        "not an alignment",
    ),
    ("alignment bool", header(0, 1) + entry(b"general.alignment", 7, b"\1"), "not an alignment"),
    ("parts", header(0, 1) + entry(b"split.count", 4, u32(3)), "one of several"),
    (
        "parts listed",
        header(0, 1) + entry(b"split.count", 9, u32(4) + u64(2) + u64(0)),
        "one of several",
    ),
    ("axes", header(1) + tensor(sizes=(1,) * 5), "too many axes"),
    ("many axes", header(1) + text(b"w") + u32(1 << 31) + bytes(64), "too many axes"),
    ("overflow", header(1) + tensor(sizes=(1 << 32, 1 << 32)), "overflows"),
    ("negative axis", header(1) + tensor(sizes=(HUGE,)), "overflows"),
    ("empty axis", header(1) + tensor(sizes=(0, HUGE)), "empty"),
    ("beyond", header(1) + tensor(sizes=(1 << 40,)) + bytes(256), "outside of the file"),
    ("beyond by one", header(1) + tensor(sizes=(32,)) + bytes(7 + 127), "outside of the file"),
    ("offset beyond", header(1) + tensor(sizes=(1,), offset=1 << 62) + bytes(256), "outside"),
    ("offset wraps", header(1) + tensor(sizes=(1,), offset=HUGE - 31) + bytes(256), "outside"),
    ("offset unaligned", header(1) + tensor(sizes=(1,), offset=4) + bytes(256), "not aligned"),
    ("type", header(1) + tensor(number=5) + bytes(256), "not read"),
    ("known type", header(1) + tensor(number=23) + bytes(256), "IQ4_XS"),
    ("block", header(1) + tensor(sizes=(48,), number=2) + bytes(256), "multiple of 32"),
    (
        "name twice",
        header(2) + tensor(sizes=(1,)) + tensor(sizes=(1,), offset=32) + bytes(256),
        "stands twice",
    ),
    ("name long", header(1) + tensor(b"x" * 300) + bytes(256), "too long"),
    ("overlap", header(2) + tensor(b"a") + tensor(b"b", offset=96) + bytes(512), "overlaps"),
]


@pytest.mark.parametrize("data, why", [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_lies_are_named(data, why):
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=why) as caught:
            read_gguf(MappedFile.of(data, "lie.gguf"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "lie.gguf" in str(caught.value)
    assert peak < 1 << 20


def test_no_such_file_and_a_folder(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(UserError, match="cannot read the file"):
            read_gguf(path)


def attempt(data):
    """Read bytes: a GgufFile whose every tensor can be read, or a UserError."""
    try:
        found = read_gguf(MappedFile.of(bytes(data), "fuzz.gguf"))
    except UserError:
        return None
    for stored_tensor in found.tensors.values():
        assert int(stored_tensor.raw.sum(dtype=np.int64)) >= 0
        assert stored_tensor.values().shape == stored_tensor.shape
    return found


def test_every_truncation(written):
    data = written.read_bytes()
    last = max(t.offset + t.bytes for t in read_gguf(written).tensors.values())
    assert attempt(data[:last]) is not None
    head = min(t.offset for t in read_gguf(written).tensors.values())
    for size in [*range(0, head, 3), *range(head, last, 997), last - 1]:
        assert attempt(data[:size]) is None, size


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), min_size=1, max_size=12
    )
)
def test_flipped_bytes(written, changes):
    data = bytearray(written.read_bytes())
    head = min(t.offset for t in read_gguf(written).tensors.values())
    for at, value in changes:
        data[at % head] = value
    attempt(data)


WORDS = st.sampled_from([
    0, 1, 2, 7, 8, 9, 31, 32, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 32) - 1,
    1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, HUGE - 7, HUGE,
])  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 1 << 30), WORDS | st.integers(0, HUGE)), min_size=1, max_size=4
    ),
    cut=st.integers(0, 1 << 30),
)
@example(changes=[(8, HUGE)], cut=0)
def test_crafted_lengths(written, changes, cut):
    data = bytearray(written.read_bytes())
    head = min(t.offset for t in read_gguf(written).tensors.values())
    for at, value in changes:
        data[at % head : at % head + 8] = struct.pack("<Q", value)
    attempt(data if cut % 2 else data[: cut % len(data)])


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(count=st.integers(0, 3), entries=st.integers(0, 3), rest=st.binary(max_size=400))
def test_random_bytes_behind_a_good_header(count, entries, rest):
    attempt(header(count, entries) + rest)


# ---- the writer ---------------------------------------------------------------------------------


def test_what_cannot_be_written(tmp_path):
    path = tmp_path / "x.gguf"
    with pytest.raises(DTypeError, match="metadata cannot hold"):
        write_gguf(path, {"a": object()}, {})
    with pytest.raises(DTypeError, match="metadata cannot hold"):
        write_gguf(path, {"a": 300}, {}, kinds={"a": "uint8"})
    with pytest.raises(DTypeError, match="metadata cannot hold"):
        write_gguf(path, {"a": [1, "b"]}, {})
    with pytest.raises(DTypeError, match="at most 4 axes"):
        write_gguf(path, {}, {"x": np.zeros((1,) * 5, np.float32)})
    with pytest.raises(DTypeError, match="GGUF cannot hold"):
        write_gguf(path, {}, {"x": np.zeros(3, np.uint8)})
    with pytest.raises(UserError, match="power of two"):
        write_gguf(path, {}, {}, alignment=3)
    assert list(tmp_path.iterdir()) == []


def test_packing_while_writing(tmp_path):
    values = np.random.default_rng(2).standard_normal((4, 64), np.float32)
    write_gguf(tmp_path / "x.gguf", {}, {"w": stored("w", values, f.Q4_1)})
    found = read_gguf(tmp_path / "x.gguf").tensors["w"]
    assert found.format is f.Q4_1 and abs(found.values() - values).max() < 0.3
