"""Tile IR, how a kernel computes, and the language kernels are written in (`tile.load`, ...).

Invariant: importing the folder imports nothing else of it; names of the language are found when
they are first asked for.
"""

from importlib import import_module
from types import FunctionType
from typing import Any

ELEMENTWISE = {  # words that are elementwise ops
    "maximum": "The larger of two, element by element; of sizes, a size.",
    "minimum": "The smaller of two, element by element; of sizes, a size.",
    "multiply_add": "a * b + c, rounded once.",
    "byte_dot": "c + the sum of the products of four bytes of int32: those of a without sign, "
    "of b with.",
    "signed_byte_dot": "c + the sum of the products of four bytes of int32, all with sign.",
    "byte_permute": "Bytes of two words as a hexadecimal digit of the selector names each: 0 .. 3 "
    "of a, then b.",
    "quick_divide": "a / b to a few ulp.",
    "unsigned_divide": "a // b where neither is negative.",
    "unsigned_remainder": "a % b where neither is negative.",
    "exp": "e**x.",
    "exp2": "2**x.",
    "log": "The natural logarithm.",
    "log2": "The logarithm to base 2.",
    "expm1": "e**x - 1.",
    "log1p": "log(1 + x).",
    "sin": "The sine.",
    "cos": "The cosine.",
    "tan": "The tangent.",
    "tanh": "The hyperbolic tangent.",
    "erf": "The error function.",
    "reciprocal": "1 / x.",
    "abs": "The absolute value.",
    "floor": "Rounded down.",
    "ceil": "Rounded up.",
    "round": "Rounded to the nearest, halves to even.",
    "trunc": "Rounded towards 0.",
    "quick_exp": "e**x to a few ulp.",
    "quick_exp2": "2**x to a few ulp.",
    "quick_reciprocal": "1 / x to a few ulp.",
    "sign": "-1, 0 or 1.",
}
HIDDEN = {"range", "max", "min", "sum"}  # builtins: what they stand for has a '_' at its end
LANGUAGE = {
    "grid", "program_id", "num_programs", "context", "result", "range_n", "ceil_divide", "full",
    "zeros", "arange", "broadcast", "reshape", "transpose", "cast", "bitcast", "where", "sqrt",
    "rsqrt", "sigmoid", "fill", "prod", "cumsum", "cumprod", "cummax", "cummin", "dot",
    "softmax_online", "softmax_accumulate", "index", "hold", "hole", "most",
    "stack", "INF", "repeat_bits", "words", "pair_multiply_add", *HIDDEN,
}  # fmt: skip
MEMORY = {
    "load", "store", "atomic_add", "require", "shared", "prefetch", "scratch", "matrix_load",
    "matrix_dot", "matrix_store", "matrix_zero",
}  # fmt: skip
ROLES = {
    "role", "barrier", "pipeline", "register", "read", "write", "copy_async", "copy_store",
    "commit_copies", "wait_copies", "matrix_async", "matrix_fence", "matrix_commit",
    "matrix_wait", "fence", "named_sync", "named_arrive", "grid_dependency_wait",
    "grid_launch_dependents", "cluster", "copy_multicast", "Pipeline",
    "copy_threads", "commit_threads", "wait_threads", "store_threads", "load_operand",
    "matrix_sync", "copy_pages", "store_add", "send", "clear_rows",
}  # fmt: skip
FILES = {
    "language": LANGUAGE,
    "language_memory": MEMORY,
    "roles": ROLES,
    "define": {"KTile", "function"},
    "trace": {"into", "memories", "memory", "outside"},  # between the language and a builder
}
DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u32": "uint32",
}


def __getattr__(name: str) -> Any:
    if name in DTYPES:
        return getattr(import_module("tilegrad.core.dtype"), DTYPES[name])
    if name in ELEMENTWISE:
        found = import_module(".language", __name__).word(name, ELEMENTWISE[name])
    else:
        file = next((file for file, names in FILES.items() if name in names), None)
        if file is None:
            raise AttributeError(f"module 'tilegrad.tile' has no attribute {name!r}")
        own = f"{name}_" if name in HIDDEN else name
        found = getattr(import_module(f".{file}", __name__), own)
        if file in ("define", "trace"):  # no words of a kernel
            return found
    if isinstance(found, FunctionType):
        found = import_module(".value", __name__).named(f"tile.{name}", found)
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return sorted({*ELEMENTWISE, *DTYPES}.union(*FILES.values()))
