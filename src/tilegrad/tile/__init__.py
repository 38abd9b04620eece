"""Tile IR, how a kernel computes, and the language kernels are written in (`tile.load`, ...).

Invariant: importing the folder imports nothing else of it; names of the language are found when
they are first asked for.
"""

from importlib import import_module
from types import FunctionType
from typing import Any

# Where each name of the language stands, and what it is called there (builtins are not hidden).
RENAMED = {
    "range": "range_",
    "max": "max_",
    "min": "min_",
    "sum": "sum_",
    "abs": "abs_",
    "round": "round_",
    "maximum": "maximum_",
    "minimum": "minimum_",
}
LANGUAGE = {
    "grid", "program_id", "num_programs", "context", "result", "range_n", "ceil_divide", "full",
    "zeros", "arange", "broadcast", "reshape", "transpose", "cast", "bitcast", "where",
    "multiply_add", "exp", "exp2", "log", "log2", "expm1", "log1p", "sin", "cos", "tan", "tanh",
    "erf", "sqrt", "rsqrt", "reciprocal", "floor", "ceil", "trunc", "sign", "sigmoid", "fill",
    "prod", "cumsum", "cumprod", "cummax", "cummin", "dot", "softmax_online",
    "softmax_accumulate", "load", "store", "atomic_add", "require", "shared", "index", "hold",
    "hole", "less", "less_equal", "byte_dot", "signed_byte_dot", "byte_permute",
    "quick_divide", "quick_exp", "quick_exp2", "quick_reciprocal", "prefetch", "scratch",
    "matrix_load", "matrix_dot", "matrix_store", "matrix_zero", "most", "stack", "INF",
    "unsigned_divide", "unsigned_remainder", "repeat_bits", "words", "pair_multiply_add", *RENAMED,
}  # fmt: skip
ROLES = {
    "role", "barrier", "pipeline", "register", "read", "write", "copy_async", "copy_store",
    "commit_copies", "wait_copies", "matrix_async", "matrix_fence", "matrix_commit",
    "matrix_wait", "fence", "named_sync", "named_arrive", "grid_dependency_wait",
    "grid_launch_dependents", "cluster", "copy_multicast", "Pipeline",
    "copy_threads", "commit_threads", "wait_threads", "store_threads", "load_operand",
    "matrix_sync", "copy_pages", "store_add", "send", "clear_rows",
}  # fmt: skip
INTO = {"into", "memory", "outside"}  # between the language and a builder
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
    if name in LANGUAGE or name in ROLES:
        file = import_module(".language" if name in LANGUAGE else ".roles", __name__)
        found = getattr(file, RENAMED.get(name, name))
        if isinstance(found, FunctionType):
            found = import_module(".value", __name__).named(f"tile.{name}", found)
        return globals().setdefault(name, found)
    if name in DTYPES:
        return getattr(import_module("tilegrad.core.dtype"), DTYPES[name])
    if name in INTO:
        return getattr(import_module(".trace", __name__), name)
    if name in ("KTile", "function"):
        return getattr(import_module(".define", __name__), name)
    raise AttributeError(f"module 'tilegrad.tile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*LANGUAGE, *ROLES, *DTYPES, "KTile", "function", *INTO])
