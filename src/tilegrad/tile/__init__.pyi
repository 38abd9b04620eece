"""The names of `tilegrad.tile`.

`python tests/test_stubs.py` writes this file; do not edit it by hand.
"""

# ruff: noqa: I001, RUF022
from typing import Any

from ..core.dtype import bfloat16 as bf16
from ..core.dtype import float16 as f16
from ..core.dtype import float32 as f32
from ..core.dtype import float64 as f64
from ..core.dtype import int32 as i32
from ..core.dtype import int64 as i64
from ..core.dtype import int8 as i8
from ..core.dtype import uint32 as u32
from ..core.dtype import uint8 as u8
from .define import KTile
from .define import function
from .language import arange
from .language import bitcast
from .language import broadcast
from .language import cast
from .language import ceil_divide
from .language import context
from .language import cummax
from .language import cummin
from .language import cumprod
from .language import cumsum
from .language import dot
from .language import fill
from .language import full
from .language import grid
from .language import hold
from .language import hole
from .language import index
from .language import max_ as max
from .language import min_ as min
from .language import most
from .language import num_programs
from .language import pair_multiply_add
from .language import prod
from .language import program_id
from .language import range_ as range
from .language import range_n
from .language import repeat_bits
from .language import reshape
from .language import result
from .language import rsqrt
from .language import sigmoid
from .language import softmax_accumulate
from .language import softmax_online
from .language import sqrt
from .language import stack
from .language import sum_ as sum
from .language import transpose
from .language import where
from .language import words
from .language import zeros
from .language_memory import atomic_add
from .language_memory import load
from .language_memory import matrix_dot
from .language_memory import matrix_load
from .language_memory import matrix_store
from .language_memory import matrix_zero
from .language_memory import prefetch
from .language_memory import require
from .language_memory import scratch
from .language_memory import shared
from .language_memory import store
from .roles import Pipeline
from .roles import barrier
from .roles import clear_rows
from .roles import cluster
from .roles import commit_copies
from .roles import commit_threads
from .roles import copy_async
from .roles import copy_multicast
from .roles import copy_pages
from .roles import copy_store
from .roles import copy_threads
from .roles import fence
from .roles import grid_dependency_wait
from .roles import grid_launch_dependents
from .roles import load_operand
from .roles import matrix_async
from .roles import matrix_commit
from .roles import matrix_fence
from .roles import matrix_sync
from .roles import matrix_wait
from .roles import named_arrive
from .roles import named_sync
from .roles import pipeline
from .roles import read
from .roles import register
from .roles import role
from .roles import send
from .roles import store_add
from .roles import store_threads
from .roles import wait_copies
from .roles import wait_threads
from .roles import write
from .trace import into
from .trace import memories
from .trace import memory
from .trace import outside

INF: float

def abs(*values: Any) -> Any:
    """The absolute value."""

def byte_dot(*values: Any) -> Any:
    """c + the sum of the products of four bytes of int32: those of a without sign, of b with."""

def byte_permute(*values: Any) -> Any:
    """Bytes of two words as a hexadecimal digit of the selector names each: 0 .. 3 of a, then b."""

def ceil(*values: Any) -> Any:
    """Rounded up."""

def cos(*values: Any) -> Any:
    """The cosine."""

def erf(*values: Any) -> Any:
    """The error function."""

def exp(*values: Any) -> Any:
    """e**x."""

def exp2(*values: Any) -> Any:
    """2**x."""

def expm1(*values: Any) -> Any:
    """e**x - 1."""

def floor(*values: Any) -> Any:
    """Rounded down."""

def log(*values: Any) -> Any:
    """The natural logarithm."""

def log1p(*values: Any) -> Any:
    """log(1 + x)."""

def log2(*values: Any) -> Any:
    """The logarithm to base 2."""

def maximum(*values: Any) -> Any:
    """The larger of two, element by element; of sizes, a size."""

def minimum(*values: Any) -> Any:
    """The smaller of two, element by element; of sizes, a size."""

def multiply_add(*values: Any) -> Any:
    """a * b + c, rounded once."""

def quick_divide(*values: Any) -> Any:
    """a / b to a few ulp."""

def quick_exp(*values: Any) -> Any:
    """e**x to a few ulp."""

def quick_exp2(*values: Any) -> Any:
    """2**x to a few ulp."""

def quick_reciprocal(*values: Any) -> Any:
    """1 / x to a few ulp."""

def reciprocal(*values: Any) -> Any:
    """1 / x."""

def round(*values: Any) -> Any:
    """Rounded to the nearest, halves to even."""

def sign(*values: Any) -> Any:
    """-1, 0 or 1."""

def signed_byte_dot(*values: Any) -> Any:
    """c + the sum of the products of four bytes of int32, all with sign."""

def sin(*values: Any) -> Any:
    """The sine."""

def tan(*values: Any) -> Any:
    """The tangent."""

def tanh(*values: Any) -> Any:
    """The hyperbolic tangent."""

def trunc(*values: Any) -> Any:
    """Rounded towards 0."""

def unsigned_divide(*values: Any) -> Any:
    """a // b where neither is negative."""

def unsigned_remainder(*values: Any) -> Any:
    """a % b where neither is negative."""

__all__ = [
    "INF",
    "KTile",
    "Pipeline",
    "abs",
    "arange",
    "atomic_add",
    "barrier",
    "bf16",
    "bitcast",
    "broadcast",
    "byte_dot",
    "byte_permute",
    "cast",
    "ceil",
    "ceil_divide",
    "clear_rows",
    "cluster",
    "commit_copies",
    "commit_threads",
    "context",
    "copy_async",
    "copy_multicast",
    "copy_pages",
    "copy_store",
    "copy_threads",
    "cos",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "dot",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "f16",
    "f32",
    "f64",
    "fence",
    "fill",
    "floor",
    "full",
    "function",
    "grid",
    "grid_dependency_wait",
    "grid_launch_dependents",
    "hold",
    "hole",
    "i32",
    "i64",
    "i8",
    "index",
    "into",
    "load",
    "load_operand",
    "log",
    "log1p",
    "log2",
    "matrix_async",
    "matrix_commit",
    "matrix_dot",
    "matrix_fence",
    "matrix_load",
    "matrix_store",
    "matrix_sync",
    "matrix_wait",
    "matrix_zero",
    "max",
    "maximum",
    "memories",
    "memory",
    "min",
    "minimum",
    "most",
    "multiply_add",
    "named_arrive",
    "named_sync",
    "num_programs",
    "outside",
    "pair_multiply_add",
    "pipeline",
    "prefetch",
    "prod",
    "program_id",
    "quick_divide",
    "quick_exp",
    "quick_exp2",
    "quick_reciprocal",
    "range",
    "range_n",
    "read",
    "reciprocal",
    "register",
    "repeat_bits",
    "require",
    "reshape",
    "result",
    "role",
    "round",
    "rsqrt",
    "scratch",
    "send",
    "shared",
    "sigmoid",
    "sign",
    "signed_byte_dot",
    "sin",
    "softmax_accumulate",
    "softmax_online",
    "sqrt",
    "stack",
    "store",
    "store_add",
    "store_threads",
    "sum",
    "tan",
    "tanh",
    "transpose",
    "trunc",
    "u32",
    "u8",
    "unsigned_divide",
    "unsigned_remainder",
    "wait_copies",
    "wait_threads",
    "where",
    "words",
    "write",
    "zeros",
]
