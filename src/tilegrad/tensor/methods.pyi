"""The methods of `Tensor`, each a function of this folder.

`python tests/test_stubs.py` writes this file; do not edit it by hand.
"""

from typing import Any

from . import activation as _activation
from . import autograd as _autograd
from . import compare as _compare
from . import convert as _convert
from . import creation as _creation
from . import cumulative as _cumulative
from . import distance as _distance
from . import elementwise as _elementwise
from . import index as _index
from . import interop as _interop
from . import maths as _maths
from . import matmul as _matmul
from . import movement as _movement
from . import padding as _padding
from . import pieces as _pieces
from . import random as _random
from . import reduce as _reduce
from . import select as _select
from . import sort as _sort
from . import special as _special
from .tensor import Tensor

class Methods:
    __abs__ = _maths.abs_
    __add__ = _elementwise.add
    __and__ = _compare.bitwise_and
    __array__ = _interop._array
    __array_namespace__ = _interop._array_namespace
    __buffer__ = _interop._buffer
    __ceil__ = _maths.ceil
    __contains__ = _interop._contains
    __copy__ = _interop._copy
    __deepcopy__ = _interop._deepcopy
    __dlpack__ = _interop._dlpack
    __dlpack_device__ = _interop._dlpack_device
    def __eq__(self, b: Any) -> Tensor: ...  # type: ignore[override]
    __floor__ = _maths.floor
    __floordiv__ = _elementwise.floor_divide
    __format__ = _interop._format
    __ge__ = _compare.ge
    __getitem__ = _index.getitem
    __gt__ = _compare.gt
    __hash__ = _interop._hash
    __iadd__ = _elementwise.add
    __iand__ = _compare.bitwise_and
    __ifloordiv__ = _elementwise.floor_divide
    __ilshift__ = _compare.bitwise_left_shift
    __imod__ = _elementwise.remainder
    __imul__ = _elementwise.mul
    __invert__ = _compare.bitwise_not
    __ior__ = _compare.bitwise_or
    __ipow__ = _elementwise.pow
    __irshift__ = _compare.bitwise_right_shift
    __isub__ = _elementwise.sub
    __iter__ = _interop._iterate
    __itruediv__ = _elementwise.div
    __ixor__ = _compare.bitwise_xor
    __le__ = _compare.le
    __lshift__ = _compare.bitwise_left_shift
    __lt__ = _compare.lt
    __matmul__ = _matmul.matmul
    __mod__ = _elementwise.remainder
    __mul__ = _elementwise.mul
    def __ne__(self, b: Any) -> Tensor: ...  # type: ignore[override]
    __neg__ = _maths.neg
    __or__ = _compare.bitwise_or
    __pos__ = _maths.positive
    __pow__ = _elementwise.pow
    def __radd__(self, other: Any) -> Tensor: ...
    def __rand__(self, other: Any) -> Tensor: ...
    __reduce__ = _interop._reduce
    __reduce_ex__ = _interop._reduce_ex
    __repr__ = _interop._repr
    def __rfloordiv__(self, other: Any) -> Tensor: ...
    def __rlshift__(self, other: Any) -> Tensor: ...
    __rmatmul__ = _matmul._reflected_matmul
    def __rmod__(self, other: Any) -> Tensor: ...
    def __rmul__(self, other: Any) -> Tensor: ...
    def __ror__(self, other: Any) -> Tensor: ...
    __round__ = _maths.round_
    def __rpow__(self, other: Any) -> Tensor: ...
    def __rrshift__(self, other: Any) -> Tensor: ...
    __rshift__ = _compare.bitwise_right_shift
    def __rsub__(self, other: Any) -> Tensor: ...
    def __rtruediv__(self, other: Any) -> Tensor: ...
    def __rxor__(self, other: Any) -> Tensor: ...
    __setitem__ = _index.setitem
    __sub__ = _elementwise.sub
    __truediv__ = _elementwise.div
    __trunc__ = _maths.trunc
    __xor__ = _compare.bitwise_xor
    abs = _maths.abs_
    abs_ = _maths.abs_
    absolute = _maths.abs_
    acos = _maths.acos
    acos_ = _maths.acos
    acosh = _maths.acosh
    add = _elementwise.add
    add_ = _elementwise.add
    addbmm = _matmul.addbmm
    addcdiv = _elementwise.addcdiv
    addcdiv_ = _elementwise.addcdiv
    addcmul = _elementwise.addcmul
    addcmul_ = _elementwise.addcmul
    addmm = _matmul.addmm
    addmv = _matmul.addmv
    addr = _matmul.addr
    all = _reduce.all_
    allclose = _compare.allclose
    amax = _reduce.amax
    amin = _reduce.amin
    aminmax = _reduce.aminmax
    any = _reduce.any_
    arccos = _maths.acos
    arccosh = _maths.acosh
    arcsin = _maths.asin
    arcsinh = _maths.asinh
    arctan = _maths.atan
    arctanh = _maths.atanh
    argmax = _reduce.argmax
    argmin = _reduce.argmin
    argsort = _sort.argsort
    argwhere = _select.nonzero
    as_strided = _pieces.as_strided
    asin = _maths.asin
    asin_ = _maths.asin
    asinh = _maths.asinh
    atan = _maths.atan
    atan2 = _elementwise.atan2
    atan_ = _maths.atan
    atanh = _maths.atanh
    backward = _autograd.backward
    baddbmm = _matmul.baddbmm
    bernoulli = _random.bernoulli
    bernoulli_ = _random.bernoulli_
    def bfloat16(self) -> Tensor: ...
    bincount = _sort.bincount
    bitwise_and = _compare.bitwise_and
    bitwise_and_ = _compare.bitwise_and
    bitwise_left_shift = _compare.bitwise_left_shift
    bitwise_left_shift_ = _compare.bitwise_left_shift
    bitwise_not = _compare.bitwise_not
    bitwise_not_ = _compare.bitwise_not
    bitwise_or = _compare.bitwise_or
    bitwise_or_ = _compare.bitwise_or
    bitwise_right_shift = _compare.bitwise_right_shift
    bitwise_right_shift_ = _compare.bitwise_right_shift
    bitwise_xor = _compare.bitwise_xor
    bitwise_xor_ = _compare.bitwise_xor
    bmm = _matmul.bmm
    def bool(self) -> Tensor: ...
    broadcast_to = _movement.broadcast_to
    def byte(self) -> Tensor: ...
    ceil = _maths.ceil
    ceil_ = _maths.ceil
    celu = _activation.celu
    def char(self) -> Tensor: ...
    chunk = _movement.chunk
    clamp = _elementwise.clamp
    clamp_ = _elementwise.clamp
    clamp_max = _elementwise.clamp_max
    clamp_max_ = _elementwise.clamp_max
    clamp_min = _elementwise.clamp_min
    clamp_min_ = _elementwise.clamp_min
    clip = _elementwise.clamp
    clone = _convert.clone
    contiguous = _movement.contiguous
    copy_ = _creation.copy_
    copysign = _elementwise.copysign
    cos = _maths.cos
    cos_ = _maths.cos
    cosh = _maths.cosh
    cosh_ = _maths.cosh
    count_nonzero = _reduce.count_nonzero
    cpu = _convert.cpu
    cross = _distance.cross
    cuda = _convert.cuda
    cummax = _cumulative.cummax
    cummin = _cumulative.cummin
    cumprod = _cumulative.cumprod
    cumsum = _cumulative.cumsum
    deg2rad = _maths.deg2rad
    diag = _padding.diag
    diag_embed = _padding.diag_embed
    diagflat = _padding.diagflat
    diagonal = _padding.diagonal
    diagonal_scatter = _pieces.diagonal_scatter
    diff = _pieces.diff
    digamma = _special.digamma
    digamma_ = _special.digamma
    dim = _interop.dim
    dist = _distance.dist
    div = _elementwise.div
    div_ = _elementwise.div
    divide = _elementwise.div
    dot = _matmul.dot
    def double(self) -> Tensor: ...
    dropout = _random.dropout
    dsplit = _pieces.dsplit
    element_size = _convert.element_size
    elu = _activation.elu
    elu_ = _activation.elu
    eq = _compare.eq
    equal = _compare.equal
    erf = _maths.erf
    erf_ = _maths.erf
    erfc = _maths.erfc
    erfinv = _maths.erfinv
    exp = _maths.exp
    exp2 = _maths.exp2
    exp2_ = _maths.exp2
    exp_ = _maths.exp
    expand = _movement.expand
    expand_as = _movement.expand_as
    expm1 = _maths.expm1
    expm1_ = _maths.expm1
    exponential_ = _random.exponential_
    fill = _creation.fill
    fill_ = _creation.fill_
    fill_diagonal = _pieces.fill_diagonal
    fix = _maths.trunc
    flatten = _movement.flatten
    flip = _movement.flip
    fliplr = _movement.fliplr
    flipud = _movement.flipud
    def float(self) -> Tensor: ...
    float_power = _elementwise.float_power
    floor = _maths.floor
    floor_ = _maths.floor
    floor_divide = _elementwise.floor_divide
    floor_divide_ = _elementwise.floor_divide
    fmax = _elementwise.fmax
    fmin = _elementwise.fmin
    fmod = _elementwise.fmod
    fmod_ = _elementwise.fmod
    frac = _maths.frac
    frac_ = _maths.frac
    gather = _select.gather
    ge = _compare.ge
    gelu = _activation.gelu
    gelu_ = _activation.gelu
    ger = _matmul.outer
    glu = _activation.glu
    greater = _compare.gt
    greater_equal = _compare.ge
    gt = _compare.gt
    def half(self) -> Tensor: ...
    hardshrink = _activation.hardshrink
    hardsigmoid = _activation.hardsigmoid
    hardswish = _activation.hardswish
    hardswish_ = _activation.hardswish
    hardtanh = _activation.hardtanh
    hardtanh_ = _activation.hardtanh
    heaviside = _special.heaviside
    heaviside_ = _special.heaviside
    histc = _sort.histc
    hsplit = _pieces.hsplit
    hypot = _elementwise.hypot
    index_add = _select.index_add
    index_add_ = _select.index_add
    index_copy = _select.index_copy
    index_copy_ = _select.index_copy
    index_fill = _select.index_fill
    index_fill_ = _select.index_fill
    index_put = _select.index_put
    index_put_ = _select.index_put
    index_reduce = _select.index_reduce
    index_reduce_ = _select.index_reduce
    index_select = _select.index_select
    inner = _matmul.inner
    def int(self) -> Tensor: ...
    is_contiguous = _interop.is_contiguous
    is_floating_point = _convert.is_floating_point
    isclose = _compare.isclose
    isfinite = _compare.isfinite
    isin = _sort.isin
    isinf = _compare.isinf
    isnan = _compare.isnan
    isneginf = _special.isneginf
    isposinf = _special.isposinf
    kron = _matmul.kron
    kthvalue = _cumulative.kthvalue
    le = _compare.le
    leaky_relu = _activation.leaky_relu
    leaky_relu_ = _activation.leaky_relu
    lerp = _elementwise.lerp
    lerp_ = _elementwise.lerp
    less = _compare.lt
    less_equal = _compare.le
    lgamma = _special.lgamma
    lgamma_ = _special.lgamma
    log = _maths.log
    log10 = _maths.log10
    log10_ = _maths.log10
    log1p = _maths.log1p
    log1p_ = _maths.log1p
    log2 = _maths.log2
    log2_ = _maths.log2
    log_ = _maths.log
    log_softmax = _reduce.log_softmax
    logaddexp = _elementwise.logaddexp
    logaddexp2 = _special.logaddexp2
    logcumsumexp = _cumulative.logcumsumexp
    logical_and = _compare.logical_and
    logical_not = _compare.logical_not
    logical_not_ = _compare.logical_not
    logical_or = _compare.logical_or
    logical_xor = _compare.logical_xor
    logit = _maths.logit
    logsigmoid = _activation.logsigmoid
    logsumexp = _reduce.logsumexp
    def long(self) -> Tensor: ...
    lt = _compare.lt
    masked_fill = _select.masked_fill
    masked_fill_ = _select.masked_fill
    masked_scatter = _select.masked_scatter
    masked_scatter_ = _select.masked_scatter
    masked_select = _select.masked_select
    matmul = _matmul.matmul
    max = _reduce.max_
    maximum = _elementwise.maximum
    maximum_ = _elementwise.maximum
    mean = _reduce.mean
    median = _cumulative.median
    min = _reduce.min_
    minimum = _elementwise.minimum
    minimum_ = _elementwise.minimum
    mish = _activation.mish
    mm = _matmul.mm
    moveaxis = _movement.movedim
    movedim = _movement.movedim
    mul = _elementwise.mul
    mul_ = _elementwise.mul
    multinomial = _random.multinomial
    multiply = _elementwise.mul
    mv = _matmul.mv
    nan_to_num = _maths.nan_to_num
    nan_to_num_ = _maths.nan_to_num
    nanmean = _reduce.nanmean
    nansum = _reduce.nansum
    narrow = _movement.narrow
    ndimension = _interop.dim
    ne = _compare.ne
    neg = _maths.neg
    neg_ = _maths.neg
    negative = _maths.neg
    nelement = _interop.nelement
    new_full = _creation.new_full
    new_ones = _creation.new_ones
    new_zeros = _creation.new_zeros
    nonzero = _select.nonzero
    norm = _reduce.norm
    normal_ = _random.normal_
    not_equal = _compare.ne
    outer = _matmul.outer
    pad = _padding.pad
    permute = _movement.permute
    positive = _maths.positive
    pow = _elementwise.pow
    pow_ = _elementwise.pow
    prod = _reduce.prod
    put = _select.put
    put_ = _select.put
    quantile = _cumulative.quantile
    rad2deg = _maths.rad2deg
    ravel = _movement.ravel
    reciprocal = _maths.reciprocal
    reciprocal_ = _maths.reciprocal
    register_hook = _autograd.register_hook
    relu = _activation.relu
    relu6 = _activation.relu6
    relu6_ = _activation.relu6
    relu_ = _activation.relu
    remainder = _elementwise.remainder
    remainder_ = _elementwise.remainder
    repeat = _movement.repeat
    repeat_interleave = _movement.repeat_interleave
    requires_grad_ = _autograd.requires_grad_
    reshape = _movement.reshape
    reshape_as = _movement.reshape_as
    retain_grad = _autograd.retain_grad
    roll = _movement.roll
    rot90 = _movement.rot90
    round = _maths.round_
    round_ = _maths.round_
    rsqrt = _maths.rsqrt
    rsqrt_ = _maths.rsqrt
    scatter = _select.scatter
    scatter_ = _select.scatter
    scatter_add = _select.scatter_add
    scatter_add_ = _select.scatter_add
    scatter_reduce = _select.scatter_reduce
    scatter_reduce_ = _select.scatter_reduce
    select = _movement.select
    select_scatter = _pieces.select_scatter
    selu = _activation.selu
    sgn = _maths.sign
    def short(self) -> Tensor: ...
    sigmoid = _maths.sigmoid
    sigmoid_ = _maths.sigmoid
    sign = _maths.sign
    sign_ = _maths.sign
    signbit = _compare.signbit
    silu = _activation.silu
    silu_ = _activation.silu
    sin = _maths.sin
    sin_ = _maths.sin
    sinc = _special.sinc
    sinc_ = _special.sinc
    sinh = _maths.sinh
    sinh_ = _maths.sinh
    slice_scatter = _pieces.slice_scatter
    softmax = _reduce.softmax
    softmin = _reduce.softmin
    softplus = _activation.softplus
    softshrink = _activation.softshrink
    softsign = _activation.softsign
    sort = _sort.sort
    split = _movement.split
    sqrt = _maths.sqrt
    sqrt_ = _maths.sqrt
    square = _maths.square
    square_ = _maths.square
    squeeze = _movement.squeeze
    std = _reduce.std
    stride = _pieces.stride
    sub = _elementwise.sub
    sub_ = _elementwise.sub
    subtract = _elementwise.sub
    sum = _reduce.sum_
    sum_to_size = _pieces.sum_to_size
    swapaxes = _movement.transpose
    swapdims = _movement.transpose
    t = _movement.t
    take = _select.take
    take_along_dim = _select.take_along_dim
    tan = _maths.tan
    tan_ = _maths.tan
    tanh = _maths.tanh
    tanh_ = _maths.tanh
    tanhshrink = _activation.tanhshrink
    tensor_split = _movement.tensor_split
    tile = _movement.tile
    to = _convert.to
    to_device = _interop._to_device
    topk = _sort.topk
    torch = _interop.to_torch
    transpose = _movement.transpose
    tril = _creation.tril
    tril_ = _creation.tril
    triu = _creation.triu
    triu_ = _creation.triu
    true_divide = _elementwise.div
    trunc = _maths.trunc
    trunc_ = _maths.trunc
    type = _convert.type_
    type_as = _convert.type_as
    unbind = _movement.unbind
    unflatten = _movement.unflatten
    unfold = _padding.unfold
    uniform_ = _random.uniform_
    unique = _sort.unique
    unique_consecutive = _sort.unique_consecutive
    unsqueeze = _movement.unsqueeze
    var = _reduce.var
    var_mean = _reduce.var_mean
    view = _movement.view
    view_as = _movement.view_as
    vsplit = _pieces.vsplit
    where = _elementwise._where_method
    xlogy = _special.xlogy
    xlogy_ = _special.xlogy
    zero_ = _creation.zero_
    zero_grad = _autograd.zero_grad
