"""Probes of instruction sets, run as a script in a child process.

`python probe.py <folder of llvmlite> <name>...` compiles and runs one small function per named
probe and prints `name 1` or `name 0` a line. A probe that kills the process is the answer no:
the parent sees the missing line and starts another child with the names that are left.

Invariant: this file imports nothing of tilegrad (a child starts in about 0.1 s) and a probe
passes only if the machine computed the right numbers with the instructions in question.
"""

from __future__ import annotations

import ctypes
import sys

VERSION = "2"

_FMA = """
  %x = load volatile <{n} x {t}>, ptr %p, align 1
  %y = call <{n} x {t}> @llvm.fma.v{n}{s}(<{n} x {t}> %x, <{n} x {t}> %x, <{n} x {t}> %x)
  %r = call fast {t} @llvm.vector.reduce.fadd.v{n}{s}({t} 0.0, <{n} x {t}> %y)
  %i = fptosi {t} %r to i32
"""
_FMA_DECLARE = """
declare <{n} x {t}> @llvm.fma.v{n}{s}(<{n} x {t}>, <{n} x {t}>, <{n} x {t}>)
declare {t} @llvm.vector.reduce.fadd.v{n}{s}({t}, <{n} x {t}>)
"""


def _fma(n: int, t: str, s: str) -> tuple[str, str]:
    return _FMA_DECLARE.format(n=n, t=t, s=s), _FMA.format(n=n, t=t, s=s)


_DOT = """
  %z = load volatile <16 x {acc}>, ptr %p, align 1
  %a = load volatile <{n} x {t}>, ptr %q, align 1
  %d = call <16 x {acc}> @{name}(<16 x {acc}> %z, <{n} x {t}> %a, <{n} x {t}> %a)
"""

# The three tiles of a product must be different registers, and LLVM does not see to that: hence
# two loads. (One value used for both sources compiles, and dies with SIGILL.)
_TILES = """
  %l = call x86_amx @llvm.x86.tileloadd64.internal(i16 16, i16 64, ptr %q, i64 64)
  %q2 = getelementptr i8, ptr %q, i64 1024
  %o = call x86_amx @llvm.x86.tileloadd64.internal(i16 16, i16 64, ptr %q2, i64 64)
  %z = call x86_amx @llvm.x86.tilezero.internal(i16 16, i16 64)
  %d = call x86_amx @llvm.x86.{name}.internal(i16 16, i16 64, i16 64, x86_amx %z, x86_amx %l,
                                              x86_amx %o)
  call void @llvm.x86.tilestored64.internal(i16 16, i16 64, ptr %p, i64 64, x86_amx %d)
"""
_TILES_DECLARE = """
declare x86_amx @llvm.x86.tileloadd64.internal(i16, i16, ptr, i64)
declare x86_amx @llvm.x86.tilezero.internal(i16, i16)
declare x86_amx @llvm.x86.{name}.internal(i16, i16, i16, x86_amx, x86_amx, x86_amx)
declare void @llvm.x86.tilestored64.internal(i16, i16, ptr, i64, x86_amx)
"""
_FIRST_INT = "  %i = load i32, ptr %p\n"
_FIRST_FLOAT = "  %f = load float, ptr %p\n  %i = fptosi float %f to i32\n"
_SUM_FLOAT = "  %f = extractelement <16 x float> %d, i32 3\n  %i = fptosi float %f to i32\n"

# name: (features, declarations, body, fill of p, fill of q, expected %i)
# Memory p and q are filled with one 16-bit word repeated: 0x3c00 is 1.0 as float16, 0x3f80 is
# 1.0 as bfloat16, and 0x3f80 twice reads as float32 1.00391.
PROBES: dict[str, tuple[str, str, str, int, int, int]] = {
    "avx2": ("+avx2,+fma,+f16c", *_fma(8, "float", "f32"), 0x3F80, 0, 16),
    "avx512": (
        "+avx512f,+avx512bw,+avx512vl,+avx512dq",
        _fma(16, "float", "f32")[0],
        _fma(16, "float", "f32")[1].replace("%i =", "%j =")
        + """
  %b = load volatile <64 x i8>, ptr %p, align 1
  %c = add <64 x i8> %b, %b
  store volatile <64 x i8> %c, ptr %q, align 1
  %l = load volatile <8 x i64>, ptr %q, align 1
  %m = mul <8 x i64> %l, %l
  store volatile <8 x i64> %m, ptr %q, align 1
  %k = icmp ne <8 x i64> %m, zeroinitializer
  %v = load volatile <8 x i32>, ptr %p, align 1
  %u = select <8 x i1> %k, <8 x i32> %v, <8 x i32> zeroinitializer
  store volatile <8 x i32> %u, ptr %q, align 1
  %i = add i32 %j, 0
""",
        0x3F80,
        0,
        32,
    ),
    "avx512bf16": (
        "+avx512f,+avx512bw,+avx512vl,+avx512bf16",
        "declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512"
        "(<16 x float>, <32 x bfloat>, <32 x bfloat>)",
        _DOT.format(acc="float", n=32, t="bfloat", name="llvm.x86.avx512bf16.dpbf16ps.512")
        + _SUM_FLOAT,
        0,
        0x3F80,
        2,
    ),
    "avx512vnni": (
        "+avx512f,+avx512bw,+avx512vl,+avx512vnni",
        "declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)",
        _DOT.format(acc="i32", n=64, t="i8", name="llvm.x86.avx512.vpdpbusd.512")
        + "  %i = extractelement <16 x i32> %d, i32 5\n",
        0,
        0x0303,
        36,
    ),
    "avx512fp16": (
        "+avx512f,+avx512bw,+avx512vl,+avx512fp16",
        *_fma(32, "half", "f16"),
        0x3C00,
        0,
        64,
    ),
    "amx-bf16": (
        "+amx-tile,+amx-bf16",
        _TILES_DECLARE.format(name="tdpbf16ps"),
        _TILES.format(name="tdpbf16ps") + _FIRST_FLOAT,
        0,
        0x3F80,
        32,
    ),
    "amx-int8": (
        "+amx-tile,+amx-int8",
        _TILES_DECLARE.format(name="tdpbssd"),
        _TILES.format(name="tdpbssd") + _FIRST_INT,
        0,
        0x0303,
        576,
    ),
}


def run_probe(name: str) -> bool:
    """Compile and run one probe in this process (which it may kill)."""
    from llvmlite import binding

    features, declare, body, fill_p, fill_q, expected = PROBES[name]
    text = f"{declare}\ndefine i32 @probe(ptr %p, ptr %q) {{{body}  ret i32 %i\n}}\n"
    module = binding.parse_assembly(text)
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu="x86-64", features=features, opt=1, jit=True
    )
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    if name.startswith("amx") and ctypes.CDLL(None).syscall(158, 0x1023, 18) != 0:
        return False
    p, q = ((ctypes.c_uint16 * 1024)(*[fill] * 1024) for fill in (fill_p, fill_q))
    function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
    result = function(engine.get_function_address("probe"))
    return int(result(ctypes.addressof(p), ctypes.addressof(q))) == expected


def main(names: list[str]) -> None:
    """Run the named probes in order, a line of answer each."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    for name in names:
        print(name, int(run_probe(name)), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    main(sys.argv[2:])
