"""Target: equality and text, derived facts, and the static Targets."""

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from tilegrad.core.dtype import bfloat16, float32, float64, int4, int8, uint8
from tilegrad.core.errors import UserError
from tilegrad.core.target import (
    A100,
    AVX2,
    AVX512,
    AVX512_AMX,
    H200,
    NEON,
    SSE2,
    STATIC,
    MemorySpace,
    Target,
    from_text,
    target_named,
)


@pytest.mark.parametrize("target", STATIC.values(), ids=lambda t: t.name)
def test_text_and_pickle_round_trip(target):
    for other in (from_text(target.to_text()), pickle.loads(pickle.dumps(target))):
        assert other == target and hash(other) == hash(target) and other.key == target.key
        assert other.matrix == target.matrix and dict(other.memories) == dict(target.memories)


def test_keys_differ_with_any_fact_and_are_stable():
    assert len({target.key for target in STATIC.values()}) == len(STATIC)
    assert AVX512.with_cores(9).key != AVX512.key and AVX512.with_cores(9).cores == 9
    wider = {**AVX512.memories, "l2": replace(AVX512.memories["l2"], bytes=3)}
    assert replace(AVX512, memories=wider) != AVX512
    code = "from tilegrad.core.target import AVX512_AMX; print(AVX512_AMX.key)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == AVX512_AMX.key


def test_a_target_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        SSE2.cores = 4
    with pytest.raises(TypeError):
        SSE2.memories["l1"] = MemorySpace(1)


def test_lanes_follow_bits():
    assert [t.lanes(float32) for t in (SSE2, AVX2, AVX512, NEON)] == [4, 8, 16, 4]
    assert AVX512.lanes(float64) == 8 and AVX512.lanes(int8) == 64 and AVX512.lanes(int4) == 128


def test_matrix_units():
    assert not AVX512.matrix and "amx" not in AVX512.memories
    (unit,) = AVX512_AMX.matrix_units(bfloat16, bfloat16)
    assert (unit.m, unit.n, unit.k, unit.accumulator, unit.scope) == (16, 16, 32, float32, "amx")
    assert [u.name for u in AVX512_AMX.matrix_units(uint8, int8)] == ["tdpbusd"]
    assert AVX512_AMX.matrix_units(float32, float32) == ()
    assert AVX512_AMX.memories["amx"].bytes == 8 * 1024
    assert AVX512_AMX.limits["tiles"] == 8


def test_features_and_estimates():
    assert AVX512.has("avx512bw") and not AVX512.has("prefer-256-bit") and not AVX2.has("avx512f")
    assert AVX512.peak_flops(float32) == 2 * AVX2.peak_flops(float32)
    assert AVX512.peak_flops(float32, 4) == 4 * AVX512.peak_flops(float32, 1)
    assert AVX512_AMX.peak_flops(bfloat16) > 5 * AVX512.peak_flops(float32)
    two = AVX512.with_cores(2)
    assert two.peak_bytes("l1") == 2 * AVX512.peak_bytes("l1")
    assert two.peak_bytes() == AVX512.peak_bytes() > 0


def test_bad_text_and_bad_names():
    for text in ("", "[]", "{}", '{"memories": {}, "matrix": [], "x": 1}'):
        with pytest.raises(UserError):
            from_text(text)
    assert target_named("avx2") is AVX2
    with pytest.raises(UserError, match="unknown Target"):
        target_named("abacus")
    assert isinstance(Target("mine", "mine"), Target)


def test_facts_of_threads_and_matrix_units():
    assert all(not t.has_threads and t.threads == 1 for t in (AVX2, AVX512, AVX512_AMX))
    assert all(t.has_threads and t.threads == 32 for t in (H200, A100))
    assert {u.operands for u in H200.asynchronous_units} == {("shared", "shared")}
    assert {u.threads for u in H200.asynchronous_units} == {128}
    assert not A100.asynchronous_units and {u.threads for u in A100.matrix} == {32}
    assert {(u.operands, u.threads) for u in AVX512_AMX.matrix} == {(("amx", "amx"), 1)}
    assert from_text(H200.to_text()).matrix == H200.matrix
