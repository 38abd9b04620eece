"""The names of `tilegrad`.

`python tests/test_stubs.py` writes this file; do not edit it by hand.
"""

# ruff: noqa: I001, RUF022
from . import chip
from . import exchange
from . import fft
from . import kernels
from . import linalg
from . import models
from . import nn
from . import optim
from . import quant
from . import serve
from . import tile
from . import train
from . import tune
from .core.config import config
from .core.config import configure
from .core.config import override
from .core.config import set_threads
from .core.dtype import DType
from .core.dtype import bfloat16
from .core.dtype import bool_
from .core.dtype import bool_ as bool
from .core.dtype import float16
from .core.dtype import float16 as half
from .core.dtype import float32
from .core.dtype import float32 as float
from .core.dtype import float64
from .core.dtype import float64 as double
from .core.dtype import float8_e4m3
from .core.dtype import float8_e5m2
from .core.dtype import int16
from .core.dtype import int16 as short
from .core.dtype import int32
from .core.dtype import int32 as int
from .core.dtype import int4
from .core.dtype import int64
from .core.dtype import int64 as long
from .core.dtype import int8
from .core.dtype import uint16
from .core.dtype import uint32
from .core.dtype import uint64
from .core.dtype import uint8
from .core.errors import AxisError
from .core.errors import DTypeError
from .core.errors import InternalError
from .core.errors import MemoryLimitError
from .core.errors import ShapeError
from .core.errors import StateError
from .core.errors import TilegradError
from .core.errors import TraceError
from .core.errors import UserError
from .generate.llm import LLM
from .tensor.activation import celu
from .tensor.activation import elu
from .tensor.activation import gelu
from .tensor.activation import glu
from .tensor.activation import hardshrink
from .tensor.activation import hardsigmoid
from .tensor.activation import hardswish
from .tensor.activation import hardtanh
from .tensor.activation import leaky_relu
from .tensor.activation import logsigmoid
from .tensor.activation import mish
from .tensor.activation import prelu
from .tensor.activation import relu
from .tensor.activation import relu6
from .tensor.activation import selu
from .tensor.activation import silu
from .tensor.activation import softplus
from .tensor.activation import softshrink
from .tensor.activation import softsign
from .tensor.activation import tanhshrink
from .tensor.activation import threshold
from .tensor.annotation import typed
from .tensor.attention import attention
from .tensor.autograd import grad_of
from .tensor.bundle import load_bundle
from .tensor.bundle import record
from .tensor.bundle import save_bundle
from .tensor.compare import allclose
from .tensor.compare import bitwise_and
from .tensor.compare import bitwise_left_shift
from .tensor.compare import bitwise_not
from .tensor.compare import bitwise_or
from .tensor.compare import bitwise_right_shift
from .tensor.compare import bitwise_xor
from .tensor.compare import eq
from .tensor.compare import equal
from .tensor.compare import ge
from .tensor.compare import ge as greater_equal
from .tensor.compare import gt
from .tensor.compare import gt as greater
from .tensor.compare import isclose
from .tensor.compare import isfinite
from .tensor.compare import isinf
from .tensor.compare import isnan
from .tensor.compare import le
from .tensor.compare import le as less_equal
from .tensor.compare import logical_and
from .tensor.compare import logical_not
from .tensor.compare import logical_or
from .tensor.compare import logical_xor
from .tensor.compare import lt
from .tensor.compare import lt as less
from .tensor.compare import ne
from .tensor.compare import ne as not_equal
from .tensor.compare import signbit
from .tensor.control import cond
from .tensor.control import scan
from .tensor.control import while_loop
from .tensor.convert import FloatInfo as finfo
from .tensor.convert import IntegerInfo as iinfo
from .tensor.convert import bitcast
from .tensor.convert import device
from .tensor.convert import enable_grad
from .tensor.convert import get_default_dtype
from .tensor.convert import inference_mode
from .tensor.convert import is_grad_enabled
from .tensor.convert import promote_types
from .tensor.convert import result_type
from .tensor.convert import set_default_dtype
from .tensor.convolution import conv1d
from .tensor.convolution import conv2d
from .tensor.convolution import conv3d
from .tensor.convolution import conv_transpose1d
from .tensor.convolution import conv_transpose2d
from .tensor.convolution import conv_transpose3d
from .tensor.creation import arange
from .tensor.creation import as_tensor
from .tensor.creation import empty
from .tensor.creation import empty_like
from .tensor.creation import eye
from .tensor.creation import fill
from .tensor.creation import from_numpy
from .tensor.creation import frombuffer
from .tensor.creation import full
from .tensor.creation import full_like
from .tensor.creation import linspace
from .tensor.creation import logspace
from .tensor.creation import meshgrid
from .tensor.creation import one_hot
from .tensor.creation import ones
from .tensor.creation import ones_like
from .tensor.creation import scalar_tensor
from .tensor.creation import tensor
from .tensor.creation import tri
from .tensor.creation import tril
from .tensor.creation import tril_indices
from .tensor.creation import triu
from .tensor.creation import triu_indices
from .tensor.creation import zeros
from .tensor.creation import zeros_like
from .tensor.cumulative import cummax
from .tensor.cumulative import cummin
from .tensor.cumulative import cumprod
from .tensor.cumulative import cumsum
from .tensor.cumulative import kthvalue
from .tensor.cumulative import logcumsumexp
from .tensor.cumulative import median
from .tensor.cumulative import quantile
from .tensor.custom import checkpoint
from .tensor.custom import custom_jvp
from .tensor.custom import custom_vjp
from .tensor.distance import cdist
from .tensor.distance import cross
from .tensor.distance import dist
from .tensor.einsum import einsum
from .tensor.elementwise import add
from .tensor.elementwise import addcdiv
from .tensor.elementwise import addcmul
from .tensor.elementwise import atan2
from .tensor.elementwise import atan2 as arctan2
from .tensor.elementwise import clamp
from .tensor.elementwise import clamp as clip
from .tensor.elementwise import clamp_max
from .tensor.elementwise import clamp_min
from .tensor.elementwise import copysign
from .tensor.elementwise import div
from .tensor.elementwise import div as divide
from .tensor.elementwise import div as true_divide
from .tensor.elementwise import float_power
from .tensor.elementwise import floor_divide
from .tensor.elementwise import fmax
from .tensor.elementwise import fmin
from .tensor.elementwise import fmod
from .tensor.elementwise import hypot
from .tensor.elementwise import lerp
from .tensor.elementwise import logaddexp
from .tensor.elementwise import maximum
from .tensor.elementwise import minimum
from .tensor.elementwise import mul
from .tensor.elementwise import mul as multiply
from .tensor.elementwise import pow
from .tensor.elementwise import remainder
from .tensor.elementwise import rsub
from .tensor.elementwise import sub
from .tensor.elementwise import sub as subtract
from .tensor.elementwise import where
from .tensor.explain import explain
from .tensor.explain import placement
from .tensor.files import load
from .tensor.files import load_metadata
from .tensor.files import save
from .tensor.interop import from_dlpack
from .tensor.interop import from_torch
from .tensor.interop import is_tensor
from .tensor.jit import jit
from .tensor.kernel import kernel
from .tensor.loss import cosine_similarity
from .tensor.loss import pairwise_distance
from .tensor.maths import abs_ as abs
from .tensor.maths import abs_ as absolute
from .tensor.maths import acos
from .tensor.maths import acos as arccos
from .tensor.maths import acosh
from .tensor.maths import acosh as arccosh
from .tensor.maths import asin
from .tensor.maths import asin as arcsin
from .tensor.maths import asinh
from .tensor.maths import asinh as arcsinh
from .tensor.maths import atan
from .tensor.maths import atan as arctan
from .tensor.maths import atanh
from .tensor.maths import atanh as arctanh
from .tensor.maths import ceil
from .tensor.maths import cos
from .tensor.maths import cosh
from .tensor.maths import deg2rad
from .tensor.maths import erf
from .tensor.maths import erfc
from .tensor.maths import erfinv
from .tensor.maths import exp
from .tensor.maths import exp2
from .tensor.maths import expm1
from .tensor.maths import floor
from .tensor.maths import frac
from .tensor.maths import log
from .tensor.maths import log10
from .tensor.maths import log1p
from .tensor.maths import log2
from .tensor.maths import logit
from .tensor.maths import nan_to_num
from .tensor.maths import neg
from .tensor.maths import neg as negative
from .tensor.maths import positive
from .tensor.maths import rad2deg
from .tensor.maths import reciprocal
from .tensor.maths import round_ as round
from .tensor.maths import rsqrt
from .tensor.maths import sigmoid
from .tensor.maths import sigmoid as expit
from .tensor.maths import sign
from .tensor.maths import sin
from .tensor.maths import sinh
from .tensor.maths import sqrt
from .tensor.maths import square
from .tensor.maths import tan
from .tensor.maths import tanh
from .tensor.maths import trunc
from .tensor.maths import trunc as fix
from .tensor.matmul import addbmm
from .tensor.matmul import addmm
from .tensor.matmul import addmv
from .tensor.matmul import addr
from .tensor.matmul import baddbmm
from .tensor.matmul import bilinear
from .tensor.matmul import bmm
from .tensor.matmul import dot
from .tensor.matmul import dot as vdot
from .tensor.matmul import inner
from .tensor.matmul import kron
from .tensor.matmul import linear
from .tensor.matmul import matmul
from .tensor.matmul import mm
from .tensor.matmul import mv
from .tensor.matmul import outer
from .tensor.matmul import outer as ger
from .tensor.matmul import tensordot
from .tensor.movement import broadcast_shapes
from .tensor.movement import broadcast_tensors
from .tensor.movement import broadcast_to
from .tensor.movement import cat
from .tensor.movement import cat as concat
from .tensor.movement import cat as concatenate
from .tensor.movement import chunk
from .tensor.movement import dstack
from .tensor.movement import flatten
from .tensor.movement import flip
from .tensor.movement import fliplr
from .tensor.movement import flipud
from .tensor.movement import hstack
from .tensor.movement import movedim
from .tensor.movement import movedim as moveaxis
from .tensor.movement import narrow
from .tensor.movement import permute
from .tensor.movement import permute as permute_dims
from .tensor.movement import ravel
from .tensor.movement import repeat_interleave
from .tensor.movement import reshape
from .tensor.movement import roll
from .tensor.movement import rot90
from .tensor.movement import select
from .tensor.movement import split
from .tensor.movement import squeeze
from .tensor.movement import stack
from .tensor.movement import t
from .tensor.movement import tensor_split
from .tensor.movement import transpose
from .tensor.movement import transpose as swapaxes
from .tensor.movement import transpose as swapdims
from .tensor.movement import unbind
from .tensor.movement import unflatten
from .tensor.movement import unsqueeze
from .tensor.movement import vstack
from .tensor.norm import batch_norm
from .tensor.norm import embedding
from .tensor.norm import group_norm
from .tensor.norm import instance_norm
from .tensor.norm import layer_norm
from .tensor.norm import rms_norm
from .tensor.padding import block_diag
from .tensor.padding import diag
from .tensor.padding import diag_embed
from .tensor.padding import diagflat
from .tensor.padding import diagonal
from .tensor.padding import pad
from .tensor.padding import trace
from .tensor.padding import unfold
from .tensor.paged import paged_append
from .tensor.paged import paged_attention
from .tensor.paged import paged_step
from .tensor.pieces import as_strided
from .tensor.pieces import atleast_1d
from .tensor.pieces import atleast_2d
from .tensor.pieces import atleast_3d
from .tensor.pieces import column_stack
from .tensor.pieces import diagonal_scatter
from .tensor.pieces import diff
from .tensor.pieces import dsplit
from .tensor.pieces import hsplit
from .tensor.pieces import select_scatter
from .tensor.pieces import slice_scatter
from .tensor.pieces import vsplit
from .tensor.placement import get_default_device
from .tensor.placement import set_default_device
from .tensor.placement import synchronize
from .tensor.random import Generator
from .tensor.random import bernoulli
from .tensor.random import dropout
from .tensor.random import get_rng_state
from .tensor.random import manual_seed
from .tensor.random import multinomial
from .tensor.random import normal
from .tensor.random import rand
from .tensor.random import rand_like
from .tensor.random import randint
from .tensor.random import randint_like
from .tensor.random import randn
from .tensor.random import randn_like
from .tensor.random import randperm
from .tensor.random import set_rng_state
from .tensor.reduce import all_ as all
from .tensor.reduce import amax
from .tensor.reduce import amin
from .tensor.reduce import aminmax
from .tensor.reduce import any_ as any
from .tensor.reduce import argmax
from .tensor.reduce import argmin
from .tensor.reduce import count_nonzero
from .tensor.reduce import log_softmax
from .tensor.reduce import logsumexp
from .tensor.reduce import max_ as max
from .tensor.reduce import mean
from .tensor.reduce import min_ as min
from .tensor.reduce import nanmean
from .tensor.reduce import nansum
from .tensor.reduce import norm
from .tensor.reduce import prod
from .tensor.reduce import softmax
from .tensor.reduce import softmin
from .tensor.reduce import std
from .tensor.reduce import std_mean
from .tensor.reduce import sum_ as sum
from .tensor.reduce import var
from .tensor.reduce import var_mean
from .tensor.resize import pixel_shuffle
from .tensor.resize import pixel_unshuffle
from .tensor.select import gather
from .tensor.select import index_add
from .tensor.select import index_copy
from .tensor.select import index_fill
from .tensor.select import index_put
from .tensor.select import index_reduce
from .tensor.select import index_select
from .tensor.select import masked_fill
from .tensor.select import masked_scatter
from .tensor.select import masked_select
from .tensor.select import nonzero
from .tensor.select import nonzero as argwhere
from .tensor.select import put
from .tensor.select import scatter
from .tensor.select import scatter_add
from .tensor.select import scatter_reduce
from .tensor.select import take
from .tensor.select import take_along_dim
from .tensor.sort import argsort
from .tensor.sort import bincount
from .tensor.sort import bucketize
from .tensor.sort import histc
from .tensor.sort import isin
from .tensor.sort import msort
from .tensor.sort import searchsorted
from .tensor.sort import sort
from .tensor.sort import topk
from .tensor.sort import unique
from .tensor.sort import unique_consecutive
from .tensor.special import digamma
from .tensor.special import heaviside
from .tensor.special import isneginf
from .tensor.special import isposinf
from .tensor.special import lgamma
from .tensor.special import logaddexp2
from .tensor.special import sinc
from .tensor.special import xlogy
from .tensor.tensor import Tensor
from .tensor.tensor import grad_mode
from .tensor.tensor import no_grad
from .tensor.tensor import realize
from .tensor.transforms import grad
from .tensor.transforms import hessian
from .tensor.transforms import jacfwd
from .tensor.transforms import jacrev
from .tensor.transforms import jvp
from .tensor.transforms import value_and_grad
from .tensor.transforms import vjp
from .tensor.transforms import vmap

__version__: str

__all__ = [
    "AxisError",
    "DType",
    "DTypeError",
    "Generator",
    "InternalError",
    "LLM",
    "MemoryLimitError",
    "ShapeError",
    "StateError",
    "Tensor",
    "TilegradError",
    "TraceError",
    "UserError",
    "abs",
    "absolute",
    "acos",
    "acosh",
    "add",
    "addbmm",
    "addcdiv",
    "addcmul",
    "addmm",
    "addmv",
    "addr",
    "all",
    "allclose",
    "amax",
    "amin",
    "aminmax",
    "any",
    "arange",
    "arccos",
    "arccosh",
    "arcsin",
    "arcsinh",
    "arctan",
    "arctan2",
    "arctanh",
    "argmax",
    "argmin",
    "argsort",
    "argwhere",
    "as_strided",
    "as_tensor",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "attention",
    "baddbmm",
    "batch_norm",
    "bernoulli",
    "bfloat16",
    "bilinear",
    "bincount",
    "bitcast",
    "bitwise_and",
    "bitwise_left_shift",
    "bitwise_not",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "block_diag",
    "bmm",
    "bool",
    "bool_",
    "broadcast_shapes",
    "broadcast_tensors",
    "broadcast_to",
    "bucketize",
    "cat",
    "cdist",
    "ceil",
    "celu",
    "checkpoint",
    "chip",
    "chunk",
    "clamp",
    "clamp_max",
    "clamp_min",
    "clip",
    "column_stack",
    "concat",
    "concatenate",
    "cond",
    "config",
    "configure",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "copysign",
    "cos",
    "cosh",
    "cosine_similarity",
    "count_nonzero",
    "cross",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "custom_jvp",
    "custom_vjp",
    "deg2rad",
    "device",
    "diag",
    "diag_embed",
    "diagflat",
    "diagonal",
    "diagonal_scatter",
    "diff",
    "digamma",
    "dist",
    "div",
    "divide",
    "dot",
    "double",
    "dropout",
    "dsplit",
    "dstack",
    "einsum",
    "elu",
    "embedding",
    "empty",
    "empty_like",
    "enable_grad",
    "eq",
    "equal",
    "erf",
    "erfc",
    "erfinv",
    "exchange",
    "exp",
    "exp2",
    "expit",
    "explain",
    "expm1",
    "eye",
    "fft",
    "fill",
    "finfo",
    "fix",
    "flatten",
    "flip",
    "fliplr",
    "flipud",
    "float",
    "float16",
    "float32",
    "float64",
    "float8_e4m3",
    "float8_e5m2",
    "float_power",
    "floor",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "frac",
    "from_dlpack",
    "from_numpy",
    "from_torch",
    "frombuffer",
    "full",
    "full_like",
    "gather",
    "ge",
    "gelu",
    "ger",
    "get_default_device",
    "get_default_dtype",
    "get_rng_state",
    "glu",
    "grad",
    "grad_mode",
    "grad_of",
    "greater",
    "greater_equal",
    "group_norm",
    "gt",
    "half",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "heaviside",
    "hessian",
    "histc",
    "hsplit",
    "hstack",
    "hypot",
    "iinfo",
    "index_add",
    "index_copy",
    "index_fill",
    "index_put",
    "index_reduce",
    "index_select",
    "inference_mode",
    "inner",
    "instance_norm",
    "int",
    "int16",
    "int32",
    "int4",
    "int64",
    "int8",
    "is_grad_enabled",
    "is_tensor",
    "isclose",
    "isfinite",
    "isin",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "kernel",
    "kernels",
    "kron",
    "kthvalue",
    "layer_norm",
    "le",
    "leaky_relu",
    "lerp",
    "less",
    "less_equal",
    "lgamma",
    "linalg",
    "linear",
    "linspace",
    "load",
    "load_bundle",
    "load_metadata",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_softmax",
    "logaddexp",
    "logaddexp2",
    "logcumsumexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logit",
    "logsigmoid",
    "logspace",
    "logsumexp",
    "long",
    "lt",
    "manual_seed",
    "masked_fill",
    "masked_scatter",
    "masked_select",
    "matmul",
    "max",
    "maximum",
    "mean",
    "median",
    "meshgrid",
    "min",
    "minimum",
    "mish",
    "mm",
    "models",
    "moveaxis",
    "movedim",
    "msort",
    "mul",
    "multinomial",
    "multiply",
    "mv",
    "nan_to_num",
    "nanmean",
    "nansum",
    "narrow",
    "ne",
    "neg",
    "negative",
    "nn",
    "no_grad",
    "nonzero",
    "norm",
    "normal",
    "not_equal",
    "one_hot",
    "ones",
    "ones_like",
    "optim",
    "outer",
    "override",
    "pad",
    "paged_append",
    "paged_attention",
    "paged_step",
    "pairwise_distance",
    "permute",
    "permute_dims",
    "pixel_shuffle",
    "pixel_unshuffle",
    "placement",
    "positive",
    "pow",
    "prelu",
    "prod",
    "promote_types",
    "put",
    "quant",
    "quantile",
    "rad2deg",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "ravel",
    "realize",
    "reciprocal",
    "record",
    "relu",
    "relu6",
    "remainder",
    "repeat_interleave",
    "reshape",
    "result_type",
    "rms_norm",
    "roll",
    "rot90",
    "round",
    "rsqrt",
    "rsub",
    "save",
    "save_bundle",
    "scalar_tensor",
    "scan",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "searchsorted",
    "select",
    "select_scatter",
    "selu",
    "serve",
    "set_default_device",
    "set_default_dtype",
    "set_rng_state",
    "set_threads",
    "short",
    "sigmoid",
    "sign",
    "signbit",
    "silu",
    "sin",
    "sinc",
    "sinh",
    "slice_scatter",
    "softmax",
    "softmin",
    "softplus",
    "softshrink",
    "softsign",
    "sort",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "std_mean",
    "sub",
    "subtract",
    "sum",
    "swapaxes",
    "swapdims",
    "synchronize",
    "t",
    "take",
    "take_along_dim",
    "tan",
    "tanh",
    "tanhshrink",
    "tensor",
    "tensor_split",
    "tensordot",
    "threshold",
    "tile",
    "topk",
    "trace",
    "train",
    "transpose",
    "tri",
    "tril",
    "tril_indices",
    "triu",
    "triu_indices",
    "true_divide",
    "trunc",
    "tune",
    "typed",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
    "unbind",
    "unflatten",
    "unfold",
    "unique",
    "unique_consecutive",
    "unsqueeze",
    "value_and_grad",
    "var",
    "var_mean",
    "vdot",
    "vjp",
    "vmap",
    "vsplit",
    "vstack",
    "where",
    "while_loop",
    "xlogy",
    "zeros",
    "zeros_like",
]
