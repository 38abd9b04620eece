# ruff: noqa: F401
"""tilegrad: tensor programs compiled, whole graph at a time, to tiles and to machine code.

Everything a person imports is here: `Tensor`, dtypes, functions by PyTorch's names, transforms.
Invariant: importing loads only NumPy and ml_dtypes besides the package, starts no thread and
touches no device; rare parts (`LAZY`) are imported when they are first named.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from .core.config import config, configure, override, set_threads
from .core.dtype import (
    DType,
    bfloat16,
    bool_,
    float8_e4m3,
    float8_e5m2,
    float16,
    float32,
    float64,
    int4,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from .core.errors import (
    AxisError,
    DTypeError,
    InternalError,
    MemoryLimitError,
    ShapeError,
    StateError,
    TilegradError,
    TraceError,
    UserError,
)
from .tensor.activation import (
    celu,
    elu,
    gelu,
    glu,
    hardshrink,
    hardsigmoid,
    hardswish,
    hardtanh,
    leaky_relu,
    logsigmoid,
    mish,
    prelu,
    relu,
    relu6,
    selu,
    silu,
    softplus,
    softshrink,
    softsign,
    tanhshrink,
    threshold,
)
from .tensor.compare import (
    allclose,
    bitwise_and,
    bitwise_left_shift,
    bitwise_not,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
    eq,
    equal,
    ge,
    gt,
    isclose,
    isfinite,
    isinf,
    isnan,
    le,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    lt,
    ne,
    signbit,
)
from .tensor.convert import (
    bitcast,
    device,
    enable_grad,
    finfo,
    get_default_dtype,
    iinfo,
    inference_mode,
    is_grad_enabled,
    promote_types,
    result_type,
    set_default_dtype,
)
from .tensor.creation import (
    arange,
    as_tensor,
    empty,
    empty_like,
    eye,
    fill,
    from_numpy,
    frombuffer,
    full,
    full_like,
    linspace,
    logspace,
    meshgrid,
    one_hot,
    ones,
    ones_like,
    scalar_tensor,
    tri,
    tril,
    tril_indices,
    triu,
    triu_indices,
    zeros,
    zeros_like,
)
from .tensor.cumulative import (
    cummax,
    cummin,
    cumprod,
    cumsum,
    kthvalue,
    logcumsumexp,
    median,
    quantile,
)
from .tensor.einsum import einsum
from .tensor.elementwise import (
    add,
    addcdiv,
    addcmul,
    atan2,
    clamp,
    clamp_max,
    clamp_min,
    clip,
    copysign,
    div,
    float_power,
    floor_divide,
    fmax,
    fmin,
    fmod,
    hypot,
    lerp,
    logaddexp,
    maximum,
    minimum,
    mul,
    pow,
    remainder,
    rsub,
    sub,
    where,
)
from .tensor.interop import from_dlpack, from_torch, is_tensor
from .tensor.maths import (
    abs_ as abs,
)
from .tensor.maths import (
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atanh,
    ceil,
    cos,
    cosh,
    deg2rad,
    erf,
    erfc,
    erfinv,
    exp,
    exp2,
    expit,
    expm1,
    floor,
    frac,
    log,
    log1p,
    log2,
    log10,
    logit,
    nan_to_num,
    neg,
    positive,
    rad2deg,
    reciprocal,
    rsqrt,
    sigmoid,
    sign,
    sin,
    sinh,
    sqrt,
    square,
    tan,
    tanh,
    trunc,
)
from .tensor.maths import (
    round_ as round,
)
from .tensor.matmul import (
    addbmm,
    addmm,
    addmv,
    addr,
    baddbmm,
    bilinear,
    bmm,
    dot,
    inner,
    kron,
    linear,
    matmul,
    mm,
    mv,
    outer,
    tensordot,
    vdot,
)
from .tensor.movement import (
    broadcast_shapes,
    broadcast_tensors,
    broadcast_to,
    cat,
    chunk,
    concat,
    concatenate,
    dstack,
    flatten,
    flip,
    fliplr,
    flipud,
    hstack,
    moveaxis,
    movedim,
    narrow,
    permute,
    ravel,
    repeat_interleave,
    reshape,
    roll,
    rot90,
    select,
    split,
    squeeze,
    stack,
    swapaxes,
    swapdims,
    t,
    tensor_split,
    transpose,
    unbind,
    unflatten,
    unsqueeze,
    vstack,
)
from .tensor.padding import (
    block_diag,
    diag,
    diag_embed,
    diagflat,
    diagonal,
    pad,
    trace,
    unfold,
)
from .tensor.pieces import (
    as_strided,
    atleast_1d,
    atleast_2d,
    atleast_3d,
    column_stack,
    diagonal_scatter,
    diff,
    dsplit,
    hsplit,
    select_scatter,
    slice_scatter,
    vsplit,
)
from .tensor.random import (
    Generator,
    bernoulli,
    dropout,
    get_rng_state,
    manual_seed,
    multinomial,
    normal,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
    randperm,
    set_rng_state,
)
from .tensor.reduce import (
    all_ as all,
)
from .tensor.reduce import (
    amax,
    amin,
    aminmax,
    argmax,
    argmin,
    count_nonzero,
    log_softmax,
    logsumexp,
    mean,
    nanmean,
    nansum,
    norm,
    prod,
    softmax,
    softmin,
    std,
    std_mean,
    var,
    var_mean,
)
from .tensor.reduce import (
    any_ as any,
)
from .tensor.reduce import (
    max_ as max,
)
from .tensor.reduce import (
    min_ as min,
)
from .tensor.reduce import (
    sum_ as sum,
)
from .tensor.select import (
    argwhere,
    gather,
    index_add,
    index_copy,
    index_fill,
    index_put,
    index_reduce,
    index_select,
    masked_fill,
    masked_scatter,
    masked_select,
    nonzero,
    put,
    scatter,
    scatter_add,
    scatter_reduce,
    take,
    take_along_dim,
)
from .tensor.sort import (
    argsort,
    bincount,
    bucketize,
    histc,
    isin,
    msort,
    searchsorted,
    sort,
    topk,
    unique,
    unique_consecutive,
)
from .tensor.special import (
    digamma,
    heaviside,
    isneginf,
    isposinf,
    lgamma,
    logaddexp2,
    sinc,
    xlogy,
)
from .tensor.tensor import Tensor, grad_mode, no_grad, realize

__version__ = "0.1.0"

# PyTorch's other names. `tile` is the tile language here: tiling is the method Tensor.tile.
absolute, negative, subtract, multiply, divide = abs, neg, sub, mul, div
true_divide, greater, greater_equal, less, less_equal, not_equal = div, gt, ge, lt, le, ne
arcsin, arccos, arctan, arctan2, fix, permute_dims = asin, acos, atan, atan2, trunc, permute
arcsinh, arccosh, arctanh, ger = asinh, acosh, atanh, outer
half, double, long, short = float16, float64, int64, int16

# Not globals, which would hide Python's own in this file.
BUILTINS: dict[str, Any] = {"bool": bool_, "float": float32, "int": int32}

# Names that come from a module which is only imported when they are asked for.
LAZY: dict[str, str] = {
    "jit": "tensor.jit", "typed": "tensor.annotation", "grad": "tensor.transforms",
    "value_and_grad": "tensor.transforms", "vjp": "tensor.transforms",
    "jvp": "tensor.transforms", "vmap": "tensor.transforms", "jacrev": "tensor.transforms",
    "jacfwd": "tensor.transforms", "hessian": "tensor.transforms", "scan": "tensor.control",
    "cond": "tensor.control", "while_loop": "tensor.control", "checkpoint": "tensor.custom",
    "custom_vjp": "tensor.custom", "custom_jvp": "tensor.custom", "save": "tensor.files",
    "load": "tensor.files", "load_metadata": "tensor.files", "grad_of": "tensor.autograd",
    "conv1d": "tensor.convolution", "conv2d": "tensor.convolution",
    "conv3d": "tensor.convolution", "conv_transpose1d": "tensor.convolution",
    "conv_transpose2d": "tensor.convolution", "conv_transpose3d": "tensor.convolution",
    "attention": "tensor.attention", "paged_attention": "tensor.paged",
    "paged_append": "tensor.paged", "paged_step": "tensor.paged",
    "layer_norm": "tensor.norm", "group_norm": "tensor.norm", "batch_norm": "tensor.norm",
    "instance_norm": "tensor.norm", "rms_norm": "tensor.norm", "embedding": "tensor.norm",
    "cdist": "tensor.distance", "dist": "tensor.distance", "cross": "tensor.distance",
    "cosine_similarity": "tensor.loss", "pairwise_distance": "tensor.loss",
    "pixel_shuffle": "tensor.resize", "pixel_unshuffle": "tensor.resize",
    "set_default_device": "tensor.placement", "get_default_device": "tensor.placement",
    "synchronize": "tensor.placement", "explain": "tensor.explain",
    "placement": "tensor.explain", "kernel": "tensor.kernel",
    "LLM": "generate.llm", "record": "tensor.bundle", "save_bundle": "tensor.bundle",
    "load_bundle": "tensor.bundle",
}  # fmt: skip
FOLDERS = (
    "nn",
    "train",
    "models",
    "tile",
    "kernels",
    "tune",
    "quant",
    "exchange",
    "serve",
    "chip",
    "linalg",
    "optim",
    "fft",
)

PRIVATE = {"import_module", "find_spec", "ModuleType", "Any", "LAZY", "FOLDERS", "BUILTINS"}


def __getattr__(name: str) -> Any:
    if name in BUILTINS:
        return BUILTINS[name]
    if name in FOLDERS:
        return import_module(f".{name}", __name__)
    if name in LAZY:
        found = getattr(import_module(f".{LAZY[name]}", __name__), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'tilegrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    own = [n for n, value in globals().items() if not isinstance(value, ModuleType)]
    folders = ["tensor", *(f for f in FOLDERS if find_spec(f".{f}", __name__))]
    public = {n for n in own if not n.startswith("_")} - {*PRIVATE, "PRIVATE"}
    return sorted({*public, *LAZY, *BUILTINS, *folders})
