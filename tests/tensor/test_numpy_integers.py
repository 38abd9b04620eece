"""NumPy's integers stand for ints: sizes, axes, counts, offsets, wherever an int is expected."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tilegrad as tg
import tilegrad.nn as nn
import tilegrad.nn.functional as F
from tilegrad import fft, linalg
from tilegrad.core.errors import UserError
from tilegrad.ir.symbol import Expr, symbol

Whole = Callable[[int], Any]  # an int as one of NumPy's
Case = Callable[[Whole], Any]

A = tg.tensor(np.arange(24, dtype=np.float32).reshape(4, 6) / 7 - 1)
CUBE = tg.tensor(np.sin(np.arange(2 * 4 * 6, dtype=np.float32)).reshape(2, 4, 6))
LINE = tg.tensor(np.cos(np.arange(12, dtype=np.float32)))
IMAGE = tg.tensor(np.sin(np.arange(2 * 4 * 6 * 6, dtype=np.float32)).reshape(2, 4, 6, 6))
SPACE = tg.tensor(np.sin(np.arange(4 * 4 * 4 * 4, dtype=np.float32)).reshape(1, 4, 4, 4, 4))
PAIRS = tg.stack([A, A * 2], -1)
SQUARE = tg.tensor(np.array([[2, 1, 0], [1, 3, 1], [0, 1, 4]], np.float32))
PICKS = tg.tensor(np.array([2, 0, 1, 2]))
TABLE = tg.tensor(np.array([[0, 1], [2, 3], [3, 0], [1, 1]]))
HEADS = tg.tensor(np.sin(np.arange(2 * 6 * 2 * 16, dtype=np.float32)).reshape(2, 2, 6, 16))
LOGITS = tg.tensor(np.sin(np.arange(5 * 1 * 4, dtype=np.float32)).reshape(5, 1, 4)).log_softmax(-1)


def weights(*shape: int) -> tg.Tensor:
    """Values of a shape, always the same."""
    size = int(np.prod(shape))
    return tg.tensor(np.cos(np.arange(size, dtype=np.float32)).reshape(shape))


def drawn(make: Callable[[], Any]) -> Any:
    """A random value, always the same; the layers of `nn` draw their weights."""
    tg.manual_seed(5)
    return make()


MOVED: dict[str, Case] = {
    "as_strided": lambda i: tg.as_strided(LINE, (i(2), i(3)), (i(4), i(1)), i(1)),
    "broadcast_to": lambda i: tg.broadcast_to(A, (i(2), i(4), i(6))),
    "broadcast_shapes": lambda i: tg.broadcast_shapes((i(2), i(1)), (i(3),)),
    "cat": lambda i: tg.cat([A, A], i(1)),
    "concat": lambda i: tg.concat([A, A], i(1)),
    "concatenate": lambda i: tg.concatenate([A, A], i(1)),
    "chunk": lambda i: tg.chunk(A, i(4), i(1)),
    "diag": lambda i: tg.diag(A, i(1)),
    "diag of a line": lambda i: tg.diag(LINE[:3], i(2)),
    "diag below": lambda i: tg.diag(A, i(-2)),
    "diag_embed": lambda i: tg.diag_embed(A, i(1), i(0), i(2)),
    "diagflat": lambda i: tg.diagflat(A[0], i(1)),
    "diagonal": lambda i: tg.diagonal(CUBE, i(1), i(1), i(2)),
    "diagonal below": lambda i: tg.diagonal(CUBE, i(-1), i(1), i(2)),
    "diagonal_scatter": lambda i: tg.diagonal_scatter(A, weights(4), i(2), i(0), i(1)),
    "diff": lambda i: tg.diff(A, i(2), i(1)),
    "dsplit": lambda i: tg.dsplit(CUBE, i(3)),
    "dsplit at": lambda i: tg.dsplit(CUBE, [i(1), i(3)]),
    "expand": lambda i: A[:1].expand(i(3), i(-1)),
    "expand sizes": lambda i: A.expand((i(2), i(4), i(6))),
    "flatten": lambda i: tg.flatten(CUBE, i(1), i(2)),
    "flip": lambda i: tg.flip(CUBE, i(1), i(2)),
    "flip list": lambda i: tg.flip(CUBE, [i(1), i(2)]),
    "flip dims": lambda i: tg.flip(CUBE, dims=i(1)),
    "hsplit": lambda i: tg.hsplit(A, i(3)),
    "meshgrid": lambda i: tg.meshgrid(tg.arange(i(2)), tg.arange(i(3))),
    "moveaxis": lambda i: tg.moveaxis(CUBE, i(0), i(2)),
    "movedim": lambda i: tg.movedim(CUBE, i(0), i(2)),
    "movedim several": lambda i: tg.movedim(CUBE, (i(0), i(1)), [i(2), i(0)]),
    "narrow": lambda i: tg.narrow(A, i(1), i(2), i(3)),
    "narrow from the end": lambda i: tg.narrow(A, i(1), i(-3), i(2)),
    "narrow at run time": lambda i: tg.narrow(A, i(1), tg.tensor(2), i(3)),
    "permute": lambda i: CUBE.permute(i(2), i(0), i(1)),
    "permute list": lambda i: tg.permute(CUBE, (i(2), i(0), i(1))),
    "permute_dims": lambda i: tg.permute_dims(CUBE, (i(2), i(0), i(1))),
    "repeat": lambda i: A.repeat(i(2), i(1), i(3)),
    "repeat list": lambda i: A.repeat([i(2), i(3)]),
    "repeat_interleave": lambda i: tg.repeat_interleave(A, i(2), i(1)),
    "repeat_interleave list": lambda i: tg.repeat_interleave(A, [i(1), i(0), i(2), i(1)], i(0)),
    "repeat_interleave size": lambda i: tg.repeat_interleave(A, PICKS, i(0), output_size=i(5)),
    "reshape": lambda i: A.reshape(i(3), i(-1)),
    "reshape list": lambda i: tg.reshape(A, [i(2), i(12)]),
    "roll": lambda i: tg.roll(A, i(2), i(1)),
    "roll back": lambda i: tg.roll(A, i(-2), i(1)),
    "roll all": lambda i: tg.roll(A, i(5)),
    "roll several": lambda i: tg.roll(A, (i(1), i(2)), (i(0), i(1))),
    "rot90": lambda i: tg.rot90(A, i(3), (i(0), i(1))),
    "select": lambda i: tg.select(A, i(1), i(3)),
    "select_scatter": lambda i: tg.select_scatter(A, weights(6), i(0), i(2)),
    "slice_scatter": lambda i: tg.slice_scatter(A, weights(4, 2), i(1), i(1), i(5), i(2)),
    "split": lambda i: tg.split(A, i(4), i(1)),
    "split sizes": lambda i: tg.split(A, [i(1), i(3)], i(0)),
    "squeeze": lambda i: tg.squeeze(A[:1], i(0)),
    "squeeze several": lambda i: tg.squeeze(A[:1, :1], (i(0), i(1))),
    "stack": lambda i: tg.stack([A, A], i(1)),
    "stride": lambda i: A.stride(i(0)),
    "size": lambda i: A.size(i(1)),
    "sum_to_size": lambda i: A.sum_to_size(i(1), i(6)),
    "swapaxes": lambda i: tg.swapaxes(CUBE, i(0), i(2)),
    "swapdims": lambda i: tg.swapdims(CUBE, i(0), i(2)),
    "tensor_split": lambda i: tg.tensor_split(A, i(4), i(1)),
    "tensor_split at": lambda i: tg.tensor_split(A, [i(1), i(-2)], i(1)),
    "tile": lambda i: A.tile((i(2), i(1))),
    "transpose": lambda i: tg.transpose(CUBE, i(0), i(2)),
    "unbind": lambda i: tg.unbind(A, i(1)),
    "unflatten": lambda i: tg.unflatten(A, i(1), (i(2), i(3))),
    "unflatten rest": lambda i: tg.unflatten(A, i(1), [i(2), i(-1)]),
    "unfold of a Tensor": lambda i: A.unfold(i(1), i(3), i(2)),
    "unsqueeze": lambda i: tg.unsqueeze(A, i(1)),
    "view": lambda i: A.view(i(2), i(12)),
    "vsplit": lambda i: tg.vsplit(A, i(2)),
    "index": lambda i: A[i(2), i(1) : i(5) : i(2)],
}

MADE: dict[str, Case] = {
    "arange": lambda i: tg.arange(i(2), i(11), i(3)),
    "bincount": lambda i: tg.bincount(PICKS, minlength=i(7)),
    "empty": lambda i: tg.empty(i(2), i(3)),
    "eye": lambda i: tg.eye(i(3), i(4)),
    "frombuffer": lambda i: tg.frombuffer(bytes(16), dtype=tg.int32, count=i(2), offset=i(4)),
    "full": lambda i: tg.full((i(2), i(3)), 5.0),
    "full size": lambda i: tg.full(i(2), 5.0),
    "linspace": lambda i: tg.linspace(0, 1, i(6)),
    "linspace one": lambda i: tg.linspace(0, 1, i(1)),
    "linspace none": lambda i: tg.linspace(0, 1, i(0)),
    "logspace": lambda i: tg.logspace(0, 1, i(6)),
    "multinomial": lambda i: drawn(lambda: tg.multinomial(LINE.abs(), i(3))),
    "new_full": lambda i: A.new_full((i(2), i(3)), 4),
    "new_ones": lambda i: A.new_ones(i(2), i(3)),
    "new_zeros": lambda i: A.new_zeros((i(2), i(3))),
    "normal": lambda i: drawn(lambda: tg.normal(0.0, 1.0, (i(2), i(3)))),
    "ones": lambda i: tg.ones(i(2), i(3)),
    "one_hot": lambda i: tg.one_hot(PICKS, i(4)),
    "one_hot found": lambda i: tg.one_hot(PICKS, i(-1)),
    "rand": lambda i: drawn(lambda: tg.rand(i(2), i(3))),
    "randint": lambda i: drawn(lambda: tg.randint(i(1), i(9), (i(2), i(3)))),
    "randint_like": lambda i: drawn(lambda: tg.randint_like(A, i(1), i(9))),
    "randn": lambda i: drawn(lambda: tg.randn((i(2), i(3)))),
    "randperm": lambda i: drawn(lambda: tg.randperm(i(5))),
    "tri": lambda i: tg.tri(i(3), i(4), i(1)),
    "tril": lambda i: tg.tril(A, i(1)),
    "tril below": lambda i: tg.tril(A, i(-1)),
    "triu": lambda i: tg.triu(A, i(1)),
    "tril_indices": lambda i: tg.tril_indices(i(3), i(4), i(1)),
    "triu_indices": lambda i: tg.triu_indices(i(3), i(4), i(1)),
    "zeros": lambda i: tg.zeros(i(2), i(3)),
    "zeros size": lambda i: tg.zeros((i(2), i(3))),
}

REDUCED: dict[str, Case] = {
    **{
        name: lambda i, name=name: getattr(tg, name)(CUBE, i(1))  # type: ignore[misc]
        for name in (
            *("all", "amax", "amin", "any", "argmax", "argmin", "argsort", "count_nonzero"),
            *("cummax", "cummin", "cumprod", "cumsum", "glu", "log_softmax", "logcumsumexp"),
            *("logsumexp", "max", "mean", "median", "min", "nanmean", "nansum", "prod"),
            *("softmax", "softmin", "sort", "std", "std_mean", "sum", "var", "var_mean"),
        )
    },
    **{
        f"{name} of several": lambda i, name=name: getattr(tg, name)(CUBE, (i(1), i(2)))  # type: ignore[misc]
        for name in ("amax", "amin", "count_nonzero", "logsumexp", "mean", "nansum", "std", "sum")
    },
    "aminmax": lambda i: tg.aminmax(CUBE, dim=i(1)),
    "cosine_similarity": lambda i: tg.cosine_similarity(A, A + 1, i(0)),
    "cross": lambda i: tg.cross(SQUARE, SQUARE + 1, i(1)),
    "gather": lambda i: tg.gather(A, i(1), TABLE),
    "histc": lambda i: tg.histc(A, i(5)),
    "index_add": lambda i: tg.index_add(A, i(0), PICKS, A),
    "index_copy": lambda i: tg.index_copy(A, i(0), PICKS[:3], A[:3]),
    "index_fill": lambda i: tg.index_fill(A, i(1), PICKS, 2.0),
    "index_reduce": lambda i: tg.index_reduce(A, i(0), PICKS, A, "amax"),
    "index_select": lambda i: tg.index_select(A, i(1), PICKS),
    "kthvalue": lambda i: tg.kthvalue(A, i(2), i(1)),
    "norm": lambda i: tg.norm(CUBE, 2, i(1)),
    "norm of several": lambda i: tg.norm(CUBE, 2, (i(1), i(2))),
    "quantile": lambda i: tg.quantile(A, 0.3, i(1)),
    "scatter": lambda i: tg.scatter(A, i(1), TABLE, weights(4, 2)),
    "scatter_add": lambda i: tg.scatter_add(A, i(1), TABLE, weights(4, 2)),
    "scatter_reduce": lambda i: tg.scatter_reduce(A, i(1), TABLE, weights(4, 2), "amax"),
    "take_along_dim": lambda i: tg.take_along_dim(A, TABLE, i(1)),
    "topk": lambda i: tg.topk(A, i(2), i(1)),
    "unique": lambda i: tg.unique(TABLE, dim=i(0)),
    "unique_consecutive": lambda i: tg.unique_consecutive(TABLE, dim=i(0)),
    "tensordot": lambda i: tg.tensordot(A, A.T, i(1)),
    "tensordot axes": lambda i: tg.tensordot(A, A, ((i(1),), (i(1),))),
    "tensordot an axis each": lambda i: tg.tensordot(A, A, (i(1), i(1))),
}

ALGEBRA: dict[str, Case] = {
    "linalg.cross": lambda i: linalg.cross(SQUARE, SQUARE + 1, dim=i(1)),
    "linalg.matrix_norm": lambda i: linalg.matrix_norm(CUBE, dim=(i(0), i(2))),
    "linalg.matrix_power": lambda i: linalg.matrix_power(SQUARE, i(5)),
    "linalg.matrix_power back": lambda i: linalg.matrix_power(SQUARE, i(-2)),
    "linalg.norm": lambda i: linalg.norm(CUBE, dim=i(1)),
    "linalg.tensorinv": lambda i: linalg.tensorinv(SQUARE.reshape(3, 3, 1), i(1)),
    "linalg.tensorsolve": lambda i: linalg.tensorsolve(SQUARE, SQUARE[0], (i(1),)),
    "linalg.vecdot": lambda i: linalg.vecdot(A, A, dim=i(0)),
    "fft.rfft": lambda i: fft.rfft(A, i(5), i(1)),
    "fft.irfft": lambda i: fft.irfft(fft.rfft(A), i(6), i(1)),
    "fft.fft": lambda i: fft.fft(PAIRS, i(8), i(0)),
    "fft.ifft": lambda i: fft.ifft(PAIRS, i(6), i(1)),
    "fft.hfft": lambda i: fft.hfft(PAIRS, i(6), i(1)),
    "fft.ihfft": lambda i: fft.ihfft(A, i(6), i(1)),
    "fft.fft2": lambda i: fft.fft2(PAIRS, (i(4), i(5)), (i(0), i(1))),
    "fft.ifft2": lambda i: fft.ifft2(PAIRS, (i(4), i(5)), (i(0), i(1))),
    "fft.ifftn": lambda i: fft.ifftn(PAIRS, (i(4), i(5)), (i(0), i(1))),
    "fft.irfftn": lambda i: fft.irfftn(PAIRS, (i(4), i(5)), (i(0), i(1))),
    "fft.rfft2": lambda i: fft.rfft2(A, (i(4), i(5)), (i(0), i(1))),
    "fft.irfft2": lambda i: fft.irfft2(fft.rfft2(A), (i(4), i(6)), (i(0), i(1))),
    "fft.fftn": lambda i: fft.fftn(PAIRS, (i(4), i(5)), (i(0), i(1))),
    "fft.fftn of an axis": lambda i: fft.fftn(PAIRS, i(4), i(1)),
    "fft.rfftn": lambda i: fft.rfftn(CUBE, (i(4), i(5)), (i(1), i(2))),
    "fft.fftfreq": lambda i: fft.fftfreq(i(5)),
    "fft.rfftfreq": lambda i: fft.rfftfreq(i(5)),
    "fft.fftshift": lambda i: fft.fftshift(A, i(1)),
    "fft.ifftshift": lambda i: fft.ifftshift(A, (i(0), i(1))),
}

TRANSFORMS: dict[str, Case] = {
    "grad": lambda i: tg.grad(lambda a, b: (a * b).sum(), i(1))(A, A + 1),
    "grad of several": lambda i: tg.grad(lambda a, b: (a * b).sum(), (i(0), i(1)))(A, A + 1),
    "value_and_grad": lambda i: tg.value_and_grad(lambda a, b: (a * b).sum(), i(1))(A, A + 1),
    "hessian": lambda i: tg.hessian(lambda a, b: (a * a * b).sum(), i(0))(LINE[:3], LINE[3:6]),
    "jacfwd": lambda i: tg.jacfwd(lambda a, b: a * b, i(1))(LINE[:3], LINE[3:6]),
    "jacrev": lambda i: tg.jacrev(lambda a, b: a * b, i(1))(LINE[:3], LINE[3:6]),
    "vmap": lambda i: tg.vmap(lambda a: a.cumsum(0), i(1), i(1))(A),
    "vmap axes": lambda i: tg.vmap(lambda a, b: a * b, (i(1), None), i(0))(A, A[:, 0]),
    "scan": lambda i: tg.scan(lambda a, x: (a + 1, a), LINE[:1], None, length=i(3)),
}

WINDOWS: dict[str, Case] = {
    **{
        f"max_pool{n}d": lambda i, n=n, x=x: getattr(F, f"max_pool{n}d")(  # type: ignore[misc]
            x, i(2), i(1), i(1), i(1), return_indices=True
        )
        for n, x in ((1, CUBE), (2, IMAGE), (3, SPACE))
    },
    **{
        f"avg_pool{n}d": lambda i, n=n, x=x: getattr(F, f"avg_pool{n}d")(  # type: ignore[misc]
            x, [i(2)] * n, i(1), i(1), count_include_pad=False
        )
        for n, x in ((1, CUBE), (2, IMAGE), (3, SPACE))
    },
    **{
        f"adaptive_{kind}_pool{n}d": lambda i, n=n, x=x, kind=kind: getattr(  # type: ignore[misc]
            F, f"adaptive_{kind}_pool{n}d"
        )(x, i(3))
        for kind in ("avg", "max")
        for n, x in ((1, CUBE), (2, IMAGE), (3, SPACE))
    },
    "adaptive_avg_pool2d sizes": lambda i: F.adaptive_avg_pool2d(IMAGE, (i(3), None)),
    "conv1d": lambda i: tg.conv1d(CUBE, weights(4, 2, 3), None, i(2), i(1), i(1), i(2)),
    "conv2d": lambda i: tg.conv2d(
        IMAGE, weights(4, 2, 3, 3), None, (i(2), i(1)), [i(1), i(1)], i(1), i(2)
    ),
    "conv3d": lambda i: tg.conv3d(SPACE, weights(2, 4, 2, 2, 2), None, i(2), i(1), i(1), i(1)),
    "conv_transpose1d": lambda i: tg.conv_transpose1d(
        CUBE, weights(4, 2, 3), None, i(2), i(1), i(1), i(2), i(1)
    ),
    "conv_transpose2d": lambda i: tg.conv_transpose2d(
        IMAGE, weights(4, 2, 3, 3), None, i(2), i(1), i(1), i(2), i(1)
    ),
    "conv_transpose3d": lambda i: tg.conv_transpose3d(
        SPACE, weights(4, 1, 2, 2, 2), None, i(2), i(1), i(1), i(2), i(1)
    ),
    "channel_shuffle": lambda i: F.channel_shuffle(IMAGE, i(2)),
    "pixel_shuffle": lambda i: tg.pixel_shuffle(IMAGE, i(2)),
    "pixel_unshuffle": lambda i: tg.pixel_unshuffle(IMAGE, i(2)),
    "interpolate size": lambda i: F.interpolate(IMAGE, size=i(3)),
    "interpolate sizes": lambda i: F.interpolate(IMAGE, (i(3), i(9)), mode="bilinear"),
    "upsample": lambda i: F.upsample(IMAGE, i(3)),
    "upsample_nearest": lambda i: F.upsample_nearest(IMAGE, (i(3), i(4))),
    "fold": lambda i: F.fold(weights(1, 8, 9), i(4), i(2), i(1), i(0), i(1)),
    "F.unfold": lambda i: F.unfold(IMAGE, i(2), i(1), i(1), (i(2), i(1))),
    "affine_grid": lambda i: F.affine_grid(weights(1, 2, 3), (i(1), i(1), i(3), i(4))),
    "pad": lambda i: F.pad(A, (i(1), i(2))),
    "pad cut": lambda i: F.pad(A, [i(-1), i(2)]),
    "pad value": lambda i: F.pad(A, (i(1), i(2)), value=3.0),
    **{
        f"pad {mode}": lambda i, mode=mode: F.pad(CUBE, (i(1), i(2)), mode)  # type: ignore[misc]
        for mode in ("reflect", "replicate", "circular")
    },
}

NETS: dict[str, Case] = {
    "attention": lambda i: tg.attention(HEADS, HEADS, HEADS, causal=True, window=i(2)),
    "attention pair": lambda i: tg.attention(HEADS, HEADS, HEADS, window=(i(2), None)),
    "cross_entropy": lambda i: F.cross_entropy(A, PICKS, ignore_index=i(2)),
    "nll_loss": lambda i: F.nll_loss(A, PICKS, ignore_index=i(2)),
    "ctc_loss": lambda i: F.ctc_loss(LOGITS, TABLE[1:2], (i(5),), (i(2),), blank=i(1)),
    "embedding": lambda i: F.embedding(TABLE, A, i(1)),
    "embedding gradient": lambda i: tg.grad(lambda w: F.embedding(TABLE, w, i(3)).sum())(A),
    "embedding_bag": lambda i: F.embedding_bag(TABLE, A, padding_idx=i(1)),
    "group_norm": lambda i: F.group_norm(IMAGE, i(2)),
    "gumbel_softmax": lambda i: drawn(lambda: F.gumbel_softmax(A, dim=i(0))),
    "layer_norm": lambda i: F.layer_norm(A, i(6)),
    "layer_norm several": lambda i: F.layer_norm(CUBE, (i(4), i(6))),
    "local_response_norm": lambda i: F.local_response_norm(IMAGE, i(3)),
    "normalize": lambda i: F.normalize(A, dim=i(0)),
    "rms_norm": lambda i: F.rms_norm(A, i(6)),
    "rms_norm several": lambda i: F.rms_norm(CUBE, [i(4), i(6)]),
}

# These take any number, so no arrays.
NUMBERS: dict[str, Case] = {
    "norm of order": lambda i: tg.norm(CUBE, i(2), i(1)),
    "round": lambda i: tg.round(A, decimals=i(2)),
    "std of a correction": lambda i: tg.std(A, i(1), correction=i(2)),
    "var of a correction": lambda i: tg.var(A, i(1), correction=i(2)),
    "linalg.norm of a matrix": lambda i: linalg.norm(CUBE, i(1), dim=(i(0), i(1))),
    "linalg.vector_norm": lambda i: linalg.vector_norm(CUBE, i(2), i(1)),
    "avg_pool2d divisor": lambda i: F.avg_pool2d(IMAGE, i(2), divisor_override=i(3)),
    "lp_pool1d": lambda i: F.lp_pool1d(CUBE, i(2), i(2), i(1)),
    "lp_pool2d": lambda i: F.lp_pool2d(IMAGE, i(2), (i(2), i(3)), i(1)),
    "interpolate factor": lambda i: F.interpolate(IMAGE, scale_factor=i(2)),
    "interpolate factors": lambda i: F.interpolate(IMAGE, scale_factor=(i(2), i(1))),
    "upsample_bilinear": lambda i: F.upsample_bilinear(IMAGE, scale_factor=i(2)),
    "multi_margin_loss": lambda i: F.multi_margin_loss(A, PICKS, p=i(2)),
}

LAYERS: dict[str, Case] = {
    "BatchNorm1d": lambda i: nn.BatchNorm1d(i(6))(A),
    "Bilinear": lambda i: nn.Bilinear(i(6), i(6), i(4))(A, A + 1),
    "Conv1d": lambda i: nn.Conv1d(i(4), i(2), i(3), i(2), i(1), i(1), i(2))(CUBE),
    "Conv2d": lambda i: nn.Conv2d(i(4), i(2), i(3), i(2), i(1), i(1), i(2))(IMAGE),
    "Conv2d sizes": lambda i: nn.Conv2d(i(4), i(2), (i(3), i(2)), padding=(i(1), i(0)))(IMAGE),
    "Conv2d borders": lambda i: nn.Conv2d(4, 2, i(3), padding=i(1), padding_mode="reflect")(IMAGE),
    "Conv3d": lambda i: nn.Conv3d(i(4), i(2), i(2))(SPACE),
    "ConvTranspose1d": lambda i: nn.ConvTranspose1d(i(4), i(2), i(3), i(2), i(1), i(1), i(2))(CUBE),
    "ConvTranspose2d": lambda i: nn.ConvTranspose2d(i(4), i(2), i(3), i(2), i(1), i(1))(IMAGE),
    "ConvTranspose3d": lambda i: nn.ConvTranspose3d(i(4), i(2), i(2))(SPACE),
    "Embedding": lambda i: nn.Embedding(i(5), i(3), i(2))(TABLE),
    "EmbeddingBag": lambda i: nn.EmbeddingBag(i(5), i(3), padding_idx=i(2))(TABLE),
    "Flatten": lambda i: nn.Flatten(i(1), i(2))(IMAGE),
    "Unflatten": lambda i: nn.Unflatten(i(1), (i(2), i(3)))(A),
    "Fold": lambda i: nn.Fold(i(4), i(2), i(1), i(0), i(1))(weights(1, 8, 9)),
    "Unfold": lambda i: nn.Unfold(i(2), i(1), i(1), i(2))(IMAGE),
    "GroupNorm": lambda i: nn.GroupNorm(i(2), i(4))(IMAGE),
    "GRU": lambda i: nn.GRU(i(6), i(3), i(2))(CUBE),
    "GRUCell": lambda i: nn.GRUCell(i(6), i(3))(A),
    "LSTM": lambda i: nn.LSTM(i(6), i(3), i(2), batch_first=True)(CUBE),
    "LSTMCell": lambda i: nn.LSTMCell(i(6), i(3))(A),
    "RNN": lambda i: nn.RNN(i(6), i(3), i(1))(CUBE),
    "RNNCell": lambda i: nn.RNNCell(i(6), i(3))(A),
    "InstanceNorm2d": lambda i: nn.InstanceNorm2d(i(4), affine=True)(IMAGE),
    "LayerNorm": lambda i: nn.LayerNorm(i(6))(A),
    "LayerNorm several": lambda i: nn.LayerNorm((i(4), i(6)))(CUBE),
    "RMSNorm": lambda i: nn.RMSNorm(i(6))(A),
    "Linear": lambda i: nn.Linear(i(6), i(3))(A),
    "LocalResponseNorm": lambda i: nn.LocalResponseNorm(i(3))(IMAGE),
    "MaxPool2d": lambda i: nn.MaxPool2d(i(2), i(1), i(1))(IMAGE),
    "AvgPool2d": lambda i: nn.AvgPool2d(i(2), i(1), i(1))(IMAGE),
    "AdaptiveAvgPool2d": lambda i: nn.AdaptiveAvgPool2d(i(3))(IMAGE),
    "BatchNorm2d": lambda i: nn.BatchNorm2d(i(4))(IMAGE),
    "BatchNorm3d": lambda i: nn.BatchNorm3d(i(4))(SPACE),
    "InstanceNorm1d": lambda i: nn.InstanceNorm1d(i(4))(CUBE),
    "InstanceNorm3d": lambda i: nn.InstanceNorm3d(i(4))(SPACE),
    "Transformer": lambda i: nn.Transformer(i(6), i(2), i(1), i(1), i(8), 0.0)(CUBE, CUBE),
    "TransformerDecoderLayer TransformerDecoder": lambda i: nn.TransformerDecoder(
        nn.TransformerDecoderLayer(i(6), i(2), i(8), 0.0), i(2)
    )(CUBE, CUBE),
    "TransformerEncoder": lambda i: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(i(6), i(2), i(8), 0.0), i(2)
    )(CUBE),
    "MultiheadAttention": lambda i: nn.MultiheadAttention(i(6), i(2))(CUBE, CUBE, CUBE),
    "PixelShuffle": lambda i: nn.PixelShuffle(i(2))(IMAGE),
    "PReLU": lambda i: nn.PReLU(i(4))(IMAGE),
    "Softmax": lambda i: nn.Softmax(i(1))(A),
    "TransformerEncoderLayer": lambda i: nn.TransformerEncoderLayer(i(6), i(2), i(8), 0.0)(CUBE),
    "Upsample": lambda i: nn.Upsample(i(3))(IMAGE),
    "Upsample factor": lambda i: nn.Upsample(scale_factor=i(2))(IMAGE),
}

CASES = {**MOVED, **MADE, **REDUCED, **ALGEBRA, **TRANSFORMS, **WINDOWS, **NETS}
KINDS: list[Any] = [np.int64, np.uint8, np.array]


def given(kind: Any) -> Whole:
    """How a kind makes a number; what a uint8 does not hold is an int64."""
    return lambda n: np.int64(n) if kind is np.uint8 and n < 0 else kind(n)


def same(one: Any, other: Any) -> None:
    """Equal, in shape, dtype and kind too."""
    assert type(one) is type(other)
    if isinstance(one, tg.Tensor):
        assert one.shape == other.shape, other.shape
        assert one.dtype is other.dtype
        assert all(type(s) is int for s in other.shape), other.shape
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            same(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("name", [*CASES, *NUMBERS, *LAYERS])
def test_a_numpy_integer_is_an_int(name: str) -> None:
    case = {**CASES, **NUMBERS, **LAYERS}[name]
    wanted = drawn(lambda: case(int))
    for kind in KINDS[:2] if name in NUMBERS else KINDS:
        same(wanted, drawn(lambda kind=kind: case(given(kind))))  # type: ignore[misc]


WHOLES = {
    *("dim", "dims", "dim0", "dim1", "dim2", "size", "sizes", "shape", "k", "n"),
    *("start", "length", "chunks", "groups", "kernel_size", "stride", "padding"),
    *("dilation", "num_classes", "axis", "axes", "offset", "shifts", "sections"),
    *("indices_or_sections", "repeats", "start_dim", "end_dim", "destination", "steps"),
    *("num_groups", "num_channels", "num_features", "normalized_shape", "padding_idx"),
    *("output_size", "output_padding", "upscale_factor", "downscale_factor"),
    *("split_size", "minlength", "bins", "diagonal", "num_samples", "row", "col"),
    *("in_axes", "out_axes", "num_heads", "in_features", "out_features", "in_channels"),
    *("out_channels", "hidden_size", "num_layers", "num_embeddings", "embedding_dim"),
    *("blank", "storage_offset", "s", "decimals", "argnums", "d_model", "ind"),
}
# A Tensor has such a name there.
TENSORS = {"lerp", "paged_append", "paged_step", "multi_head_attention_forward"}


def takes_one(function: Any) -> bool:
    """Whether an argument has a name of sizes, axes, counts or offsets."""
    return bool(WHOLES & set(inspect.signature(function).parameters))


def candidates() -> Iterator[str]:
    """Functions with an argument that is an axis, a size, a count or an offset."""
    for module in (tg, linalg, fft, F):
        for name in getattr(module, "__all__", None) or dir(module):
            function = getattr(module, name)
            if inspect.isfunction(function) and takes_one(function):
                yield name
    for name in dir(nn):
        if inspect.isclass(getattr(nn, name)) and takes_one(getattr(nn, name)):
            yield name


def test_every_function_of_sizes_and_axes_is_in_the_table() -> None:
    known = {word for name in (*CASES, *NUMBERS, *LAYERS) for word in name.split()}
    known |= {word.split(".")[-1] for word in known}
    assert sorted(set(candidates()) - known - TENSORS) == []


REFUSED: dict[str, Case] = {
    "narrow": lambda i: tg.narrow(A, 0, i(1), 1),
    "narrow's axis": lambda i: tg.narrow(A, i(1), 0, 1),
    "chunk": lambda i: tg.chunk(A, i(1)),
    "split": lambda i: tg.split(A, i(1)),
    "split sizes": lambda i: tg.split(A, [i(1), 3]),
    "tensor_split": lambda i: tg.tensor_split(A, i(1)),
    "roll": lambda i: tg.roll(A, i(1), 0),
    "movedim": lambda i: tg.movedim(A, i(1), 0),
    "topk": lambda i: tg.topk(A, i(1)),
    "kthvalue": lambda i: tg.kthvalue(A, i(1)),
    "diagonal": lambda i: tg.diagonal(A, i(1)),
    "diag": lambda i: tg.diag(A, i(1)),
    "one_hot": lambda i: tg.one_hot(PICKS * 0, i(1)),
    "bincount": lambda i: tg.bincount(PICKS, minlength=i(1)),
    "linspace": lambda i: tg.linspace(0, 1, i(1)),
    "pad": lambda i: F.pad(A, (i(1), 1)),
    "unfold": lambda i: A.unfold(0, i(1), 1),
    "pixel_shuffle": lambda i: tg.pixel_shuffle(IMAGE, i(1)),
    "max_pool2d": lambda i: F.max_pool2d(IMAGE, i(1)),
    "conv2d": lambda i: tg.conv2d(IMAGE, weights(4, 4, 1, 1), groups=i(1)),
    "interpolate": lambda i: F.interpolate(IMAGE, i(1)),
    "layer_norm": lambda i: F.layer_norm(A[:, :1], i(1)),
    "embedding": lambda i: F.embedding(TABLE, A, i(1)),
    "matrix_power": lambda i: linalg.matrix_power(SQUARE, i(1)),
    "rfft": lambda i: fft.rfft(A, i(1)),
    "sum": lambda i: tg.sum(A, i(1)),
    "reshape": lambda i: A[:1, :1].reshape(i(1)),
    "zeros": lambda i: tg.zeros(i(1)),
    "rand": lambda i: tg.rand(i(1)),
    "grad": lambda i: tg.grad(lambda a, b: (a * b).sum(), i(1))(A, A),
    "vmap": lambda i: tg.vmap(lambda a: a, i(1))(A),
}


SEVERAL = (
    *("split", "tensor_split", "roll", "movedim", "layer_norm", "sum", "interpolate"),
    *("max_pool2d", "grad", "vmap"),
)  # take a sequence too


@pytest.mark.parametrize("kind", [float, np.float32, bool, np.bool_, lambda n: np.array([n, n])])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_int_is_refused(name: str, kind: Any) -> None:
    several = name in (
        "split",
        "tensor_split",
        "roll",
        "movedim",
        "layer_norm",
        "sum",
        "interpolate",
    )
    several = several or name in ("max_pool2d", "grad", "vmap")
    if several and np.ndim(kind(1)):
        return  # a sequence is taken there
    with pytest.raises(UserError):
        REFUSED[name](kind)


N = symbol("N", 3, 9)


def test_a_symbol_stays_one() -> None:
    def parts(x: tg.Tensor[N]) -> Any:  # type: ignore[valid-type]
        count = x.shape[0]
        assert isinstance(count, Expr)
        return x.narrow(np.int64(0), np.int64(1), count - 1), x.split([np.uint8(1), count - 1])

    jitted = tg.jit(parts)
    for size in (5, 9):
        rest, (head, tail) = jitted(LINE[:size])
        same(LINE[1:size], rest)
        same(LINE[1:size], tail)
        same(LINE[:1], head)
