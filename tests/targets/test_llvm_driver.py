"""The LLVM driver and the host Target: compile, cross compile, cache, load, run, probe."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tilegrad.core.config import override
from tilegrad.core.errors import InternalError
from tilegrad.core.target import AVX2, AVX512, AVX512_AMX, NEON, SSE2, STATIC, Target, from_text
from tilegrad.runtime.store import default_store
from tilegrad.targets.llvm import driver, probe, target

SQUARE = """
declare float @expf(float)
define void @{name}(ptr %x, i64 %n) {{
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  %at = getelementptr <16 x float>, ptr %x, i64 %i
  %v = load <16 x float>, ptr %at, align 4
  %w = fmul <16 x float> %v, %v
  store <16 x float> %w, ptr %at, align 4
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %end
end:
  ret void
}}
define float @exp_{name}(float %x) {{
  %y = call float @expf(float %x)
  ret float %y
}}
define internal void @hidden() {{
  ret void
}}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("cache"))
    with override(cache_folder=folder):
        yield folder


@pytest.fixture(scope="module")
def host() -> Target:
    return target.host_target()


def call(address, array):
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(address)
    function(array.ctypes.data, array.size // 16)


def test_compile_load_and_run(host):
    module = driver.load(driver.compile_text(SQUARE.format(name="square"), host))
    assert sorted(module.functions) == ["exp_square", "square"]
    x = np.arange(64, dtype=np.float32)
    call(module.address("square"), x)
    assert (x == np.arange(64, dtype=np.float32) ** 2).all()
    exp = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_float)(module.address("exp_square"))
    assert abs(exp(1.0) - 2.7182817) < 1e-5
    with pytest.raises(InternalError, match="no function 'cube'"):
        module.address("cube")


CPUS = [target for target in STATIC.values() if target.language == "llvm"]


@pytest.mark.parametrize("chosen", CPUS, ids=lambda t: t.name)
def test_cross_compile(chosen):
    data = driver.compile_text(SQUARE.format(name="f"), chosen)
    machine = int.from_bytes(data[18:20], "little")
    assert machine == (183 if chosen is NEON else 62)  # EM_AARCH64, EM_X86_64
    assert sorted(driver.function_names(data)) == ["exp_f", "f"]


def test_assembly_uses_the_registers_of_the_target():
    text = SQUARE.format(name="f")
    assert "%xmm" in driver.assembly(text, SSE2) and "%ymm" not in driver.assembly(text, SSE2)
    assert "%ymm" in driver.assembly(text, AVX2) and "%zmm" not in driver.assembly(text, AVX2)
    assert "%zmm" in driver.assembly(text, AVX512)
    assert "%zmm" in driver.assembly(text, AVX512_AMX)
    assert "fmul" in driver.assembly(text, NEON)


def test_optimized_text_is_neither_unrolled_nor_vectorised():
    text = driver.optimized(SQUARE.format(name="f"), AVX512)
    assert text.count("fmul <16 x float>") == 1
    assert "hidden" not in text and AVX512.triple in text


def test_objects_are_cached(cache, monkeypatch):
    text = SQUARE.format(name="f")
    first = driver.compile_text(text, AVX512)
    size = default_store().size()
    assert size > len(first)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "_optimize", lambda *_: pytest.fail("compiled again"))
        assert driver.compile_text(text, AVX512) == first
    driver.compile_text(text, AVX512.with_cores(7))  # cores do not matter to LLVM
    assert default_store().size() == size
    driver.compile_text(text, AVX2)
    assert default_store().size() > size


def test_a_corrupted_cache_entry_is_compiled_anew(cache, host):
    text = SQUARE.format(name="f")
    first = driver.compile_text(text, host)
    for folder, _, names in os.walk(cache):
        for name in names:
            with open(os.path.join(folder, name), "r+b") as file:
                file.seek(200)
                file.write(b"\xcc" * 50)
    assert driver.compile_text(text, host) == first
    assert driver.load(first).address("f")


@pytest.mark.parametrize("text", ["define nonsense", "define i32 @f() { ret i64 1 }"])
def test_bad_text_is_an_internal_error(text):
    with pytest.raises(InternalError, match="bad LLVM IR"):
        driver.compile_text(text, AVX2)


def test_other_errors():
    with pytest.raises(InternalError, match="no code generator"):
        driver.compile_text("", Target("x", "llvm", triple="pdp11-unknown-none"))
    with pytest.raises(InternalError, match="ELF"):
        driver.load(b"not an object")
    missing = "declare void @no_such_function_anywhere()\ndefine void @f() {\n"
    missing += "  call void @no_such_function_anywhere()\n  ret void\n}"
    here = NEON if os.uname().machine == "aarch64" else SSE2
    with pytest.raises(InternalError, match="cannot link"):
        driver.load(driver.compile_text(missing, here))


def test_many_threads_compile_and_load(host):
    faults = []

    def work(seed):
        for i in range(6):
            name = f"f{i % 3}"  # names repeat between objects, and objects between threads
            module = driver.load(driver.compile_text(SQUARE.format(name=name), host))
            x = np.full(32, seed + 2, np.float32)
            call(module.address(name), x)
            if not (x == (seed + 2) ** 2).all():
                faults.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


@pytest.mark.usefixtures("quick_collect")
def test_many_modules_live_and_die(host):
    data = driver.compile_text(SQUARE.format(name="f"), host)
    modules = [driver.load(data) for _ in range(60)]
    assert len({module.address("f") for module in modules}) == 60
    kept = modules[17]
    del modules
    gc.collect()
    x = np.full(16, 3, np.float32)
    call(kept.address("f"), x)
    assert (x == 9).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_compile_after_fork(host):
    driver.compile_text(SQUARE.format(name="f"), host)
    child = os.fork()
    if child == 0:
        try:
            module = driver.load(driver.compile_text(SQUARE.format(name="g"), host))
            x = np.full(16, 3, np.float32)
            call(module.address("g"), x)
            os._exit(0 if (x == 9).all() else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


# --- the host Target ---


def test_host_target_is_whole(host):
    assert not host.has_threads and host.cores >= 1 and host.vector_bytes >= 16
    assert host.memories["l1"].bytes >= 8 << 10 and host.memories["global"].bytes > 1 << 28
    assert from_text(host.to_text()) == host
    assert target.host_target() is host
    if host.has("avx512f"):
        assert host.vector_bytes == 64 and "-prefer-256-bit" in host.features


def test_host_record_is_kept(cache, monkeypatch):
    found = target.find_host()
    key_count = default_store().size()
    target.host_target.cache_clear()
    first = target.host_target()
    assert default_store().size() > key_count
    target.host_target.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(target, "find_host", lambda: pytest.fail("probed again"))
        assert target.host_target() == first
    assert target.host_from(found, driver.request_amx()) == first


def test_without_leave_there_is_no_amx():
    record = {
        "cpu": "sapphirerapids",
        "triple": AVX512.triple,
        "features": {"amx-tile": True, "amx-bf16": True, "avx512f": True, "avx2": True},
    }
    assert target.host_from(record, True).matrix
    without = target.host_from(record, False)
    assert not without.matrix and "-amx-tile" in without.features
    del record["features"]["avx512f"]
    assert target.host_from(record, False).vector_bytes == 32


@pytest.mark.parametrize("told", [{"neon": True, "aes": True}, {}], ids=["told", "unknown"])
@pytest.mark.parametrize("flags", ["", "fp asimd", "fp asimd asimddp", "fp asimd asimddp i8mm"])
def test_features_of_arm(told, flags, monkeypatch):
    """A CPU that nobody knows and one that hides its flags have vectors, and no more."""
    binding = SimpleNamespace(
        get_host_cpu_features=lambda: dict(told),
        get_host_cpu_name=lambda: "generic",
        get_process_triple=lambda: NEON.triple,
    )
    monkeypatch.setattr(target, "llvm", lambda: binding)
    monkeypatch.setattr(target, "cpu_flags", lambda: set(flags.split()))
    monkeypatch.setattr(target.os, "uname", lambda: SimpleNamespace(machine="aarch64"))
    found = target.host_from(target.find_host(), False)
    assert found.multiplies_by_lane and found.vector_registers == 32
    assert found.has("dotprod") == ("asimddp" in flags) and found.has("i8mm") == ("i8mm" in flags)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 probes")
def test_a_probe_that_dies_is_a_no(monkeypatch, tmp_path):
    script = tmp_path / "probe.py"
    script.write_text(
        "import os, sys, signal\n"
        "for name in sys.argv[2:]:\n"
        "    if name in ('avx512', 'amx-bf16'): os.kill(os.getpid(), signal.SIGILL)\n"
        "    print(name, int(name != 'avx512vnni'), flush=True)\n"
    )
    monkeypatch.setattr(target, "__file__", str(tmp_path / "target.py"))
    assert target.probe(list(probe.PROBES)) == {"avx2", "avx512bf16", "avx512fp16", "amx-int8"}
    monkeypatch.setattr(target, "probe", lambda names: {"avx2", "avx512bf16", "amx-int8"})
    features = target.find_host()["features"]
    assert not any(on for name, on in features.items() if name.startswith("avx512"))
    assert not features["amx-bf16"] and features["amx-tile"]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 probes")
def test_probes_agree_with_the_kernel(host):
    with open("/proc/cpuinfo") as file:
        flags = file.read()
    for feature, flag in (("avx2", "avx2"), ("avx512f", "avx512f"), ("amx-bf16", "amx_bf16")):
        assert host.has(feature) == (f" {flag} " in flags or f" {flag}\n" in flags)


AMX = """
declare x86_amx @llvm.x86.tileloadd64.internal(i16, i16, ptr, i64)
declare x86_amx @llvm.x86.tilezero.internal(i16, i16)
declare x86_amx @llvm.x86.tdpbf16ps.internal(i16, i16, i16, x86_amx, x86_amx, x86_amx)
declare void @llvm.x86.tilestored64.internal(i16, i16, ptr, i64, x86_amx)
define void @dot(ptr %a, ptr %b, ptr %c) {
  %l = call x86_amx @llvm.x86.tileloadd64.internal(i16 16, i16 64, ptr %a, i64 64)
  %r = call x86_amx @llvm.x86.tileloadd64.internal(i16 16, i16 64, ptr %b, i64 64)
  %z = call x86_amx @llvm.x86.tilezero.internal(i16 16, i16 64)
  %d = call x86_amx @llvm.x86.tdpbf16ps.internal(i16 16, i16 64, i16 64, x86_amx %z,
                                                 x86_amx %l, x86_amx %r)
  call void @llvm.x86.tilestored64.internal(i16 16, i16 64, ptr %c, i64 64, x86_amx %d)
  ret void
}
"""


def test_amx_tile_product(host):
    if not host.has("amx-bf16"):
        pytest.skip("no AMX here")
    import ml_dtypes

    random = np.random.default_rng(0)
    a = random.normal(size=(16, 32)).astype(ml_dtypes.bfloat16)
    b = random.normal(size=(32, 16)).astype(ml_dtypes.bfloat16)
    pairs = np.ascontiguousarray(b.reshape(16, 2, 16).transpose(0, 2, 1))  # (k / 2, n, 2)
    c = np.zeros((16, 16), np.float32)
    module = driver.load(driver.compile_text(AMX, host))
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(module.address("dot"))
    function(a.ctypes.data, pairs.ctypes.data, c.ctypes.data)
    np.testing.assert_allclose(c, a.astype(np.float32) @ b.astype(np.float32), atol=1e-4)


def test_probe_script_prints_an_answer_a_line():
    spec = sys.modules["llvmlite"].__file__
    folder = os.path.dirname(os.path.dirname(spec))
    found = subprocess.run(
        [sys.executable, "-I", "-S", probe.__file__, folder, "avx2"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    died = (-signal.SIGILL, -signal.SIGSEGV)  # what it ran is no code of this machine
    assert found.stdout in ("avx2 1\n", "avx2 0\n", "") and found.returncode in (0, *died)
