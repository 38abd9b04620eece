"""Objects placed without LLVM give what LLVM's linker gives; what is unknown is left to it."""

import ctypes
import math
import struct
import subprocess
import sys

import pytest

from tilegrad.targets.llvm.driver import compile_text, load
from tilegrad.targets.llvm.object import address_of, place
from tilegrad.targets.llvm.target import host_target

PLAIN = """
@table = private unnamed_addr constant [4 x double] [double 1.5, double 2.5, double 4.5, double 8.5]
declare double @cos(double)
declare ptr @memcpy(ptr, ptr, i64)
define double @read(i64 %i) {
  %place = getelementptr [4 x double], ptr @table, i64 0, i64 %i
  %value = load double, ptr %place
  %more = call double @scaled(double %value)
  ret double %more
}
define double @scaled(double %x) noinline {
  %y = fmul double %x, 3.25
  ret double %y
}
define double @outside(double %x) {
  %y = call double @cos(double %x)
  ret double %y
}
define void @copy(ptr %to, ptr %from, i64 %size) {
  %r = call ptr @memcpy(ptr %to, ptr %from, i64 %size)
  ret void
}
"""
WRITTEN = """
@count = global i64 7
define i64 @next() {
  %old = load i64, ptr @count
  %new = add i64 %old, 1
  store i64 %new, ptr @count
  ret i64 %new
}
"""
linux = pytest.mark.skipif(
    not sys.platform.startswith("linux") or host_target().triple.split("-")[0] != "x86_64",
    reason="objects are placed on x86-64 Linux only",
)


def call(address: int, result: type, *kinds: type) -> ctypes._CFuncPtr:
    return ctypes.CFUNCTYPE(result, *kinds)(address)


@linux
def test_functions_constants_and_names_of_libraries() -> None:
    placed = place(compile_text(PLAIN, host_target()))
    assert placed is not None and set(placed.functions) == {"read", "scaled", "outside", "copy"}
    read = call(placed.functions["read"], ctypes.c_double, ctypes.c_int64)
    assert [read(i) for i in range(4)] == [3.25 * v for v in (1.5, 2.5, 4.5, 8.5)]
    outside = call(placed.functions["outside"], ctypes.c_double, ctypes.c_double)
    assert outside(0.5) == math.cos(0.5)
    source, target = ctypes.create_string_buffer(b"tiles" * 100), ctypes.create_string_buffer(501)
    copy = call(placed.functions["copy"], None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    copy(target, source, 501)
    assert target.raw == source.raw


@linux
def test_many_objects_stay_apart() -> None:
    texts = [f"define i64 @number() {{ ret i64 {i} }}" for i in range(20)]
    placed = [place(compile_text(text, host_target())) for text in texts]
    assert [call(p.functions["number"], ctypes.c_int64)() for p in placed if p] == list(range(20))


def test_what_is_unknown_is_left_to_llvm() -> None:
    plain, written = (compile_text(text, host_target()) for text in (PLAIN, WRITTEN))
    assert place(written) is None
    loaded = load(written)
    following = call(loaded.address("next"), ctypes.c_int64)
    assert [following(), following()] == [8, 9]
    nobody = (
        "declare i64 @nobody_has_this()\ndefine i64 @ask() {\n  %r = call i64 "
        "@nobody_has_this()\n  ret i64 %r\n}\n"
    )
    assert place(compile_text(nobody, host_target())) is None
    assert address_of("nobody_has_this") is None
    other = bytearray(plain)
    struct.pack_into("<H", other, 18, 21)  # of a machine that is none of ours
    assert place(bytes(other)) is None
    assert place(b"") is None and place(b"\x7fELF\x02\x01") is None


@linux
def test_a_warm_process_runs_without_llvm() -> None:
    code = (
        "import sys, numpy, tilegrad as tg; "
        "x = (tg.tensor(numpy.arange(8.0)) * 2 + 1).numpy(); assert x[7] == 15.0; "
        "print('llvmlite.binding' in sys.modules)"
    )
    found = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        for _ in range(2)
    ]
    assert found[1].stdout.strip() == "False", found[1].stderr
