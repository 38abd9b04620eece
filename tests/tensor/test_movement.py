"""Movement, joining, cutting, padding and diagonals against torch."""

from __future__ import annotations

import pytest
from torch_tables import compare, data, torch

import tilegrad as tg

SHAPES = [(2, 3, 4), (1, 3, 1), (2, 0, 3)]
CASES = [
    ("reshape", lambda m, x: x.reshape(x.shape[0], -1) if x.numel() else x.reshape(0)),
    ("reshape list", lambda m, x: m.reshape(x, [x.shape[0] * x.shape[1], x.shape[2]])),
    ("view", lambda m, x: x.contiguous().view(x.shape[2], x.shape[0], x.shape[1])),
    ("permute", lambda m, x: x.permute(2, 0, 1)),
    ("permute tuple", lambda m, x: m.permute(x, (-1, 0, 1))),
    ("transpose", lambda m, x: x.transpose(0, -1)),
    ("swapaxes", lambda m, x: m.swapaxes(x, 0, 1)),
    ("mT", lambda m, x: x.mT),
    ("movedim", lambda m, x: m.movedim(x, 0, 2)),
    ("movedim several", lambda m, x: m.movedim(x, (0, 1), (-1, 0))),
    ("squeeze", lambda m, x: x.squeeze()),
    ("squeeze one", lambda m, x: x.squeeze(0)),
    ("squeeze several", lambda m, x: m.squeeze(x, (0, -1))),
    ("unsqueeze", lambda m, x: x.unsqueeze(1)),
    ("unsqueeze last", lambda m, x: m.unsqueeze(x, -1)),
    ("flatten", lambda m, x: x.flatten()),
    ("flatten some", lambda m, x: m.flatten(x, 1, 2)),
    ("expand", lambda m, x: x.unsqueeze(0).expand(2, -1, -1, -1)),
    ("expand new", lambda m, x: x.expand(3, *x.shape)),
    ("broadcast_to", lambda m, x: m.broadcast_to(x, (2, *x.shape))),
    ("repeat", lambda m, x: x.repeat(2, 1, 3)),
    ("repeat more", lambda m, x: x.repeat(2, 1, 1, 2)),
    ("tile", lambda m, x: x.tile(2, 2)),
    ("interleave", lambda m, x: m.repeat_interleave(x, 2, dim=1)),
    ("interleave flat", lambda m, x: x.repeat_interleave(2)),
    ("flip", lambda m, x: x.flip(0, 2)),
    ("flip tuple", lambda m, x: m.flip(x, (-1,))),
    ("fliplr", lambda m, x: m.fliplr(x)),
    ("flipud", lambda m, x: m.flipud(x)),
    ("roll", lambda m, x: x.roll(1, 2)),
    ("roll several", lambda m, x: m.roll(x, (1, -2), (0, 2))),
    ("roll flat", lambda m, x: m.roll(x, 5)),
    ("rot90", lambda m, x: [m.rot90(x, k, (0, 2)) for k in range(-1, 4)]),
    ("cat", lambda m, x: m.cat([x, x, x], dim=-1)),
    ("cat one", lambda m, x: m.cat([x])),
    ("cat empty", lambda m, x: m.cat([m.zeros(0, dtype=x.dtype), x])),
    ("stack", lambda m, x: m.stack([x, x], dim=1)),
    ("stack last", lambda m, x: m.stack((x, x), -1)),
    ("hstack", lambda m, x: m.hstack([x, x])),
    ("vstack", lambda m, x: m.vstack([x, x])),
    ("dstack", lambda m, x: m.dstack([x, x])),
    ("split", lambda m, x: x.split(2, dim=2)),
    ("split sizes", lambda m, x: m.split(x, [1, x.shape[2] - 1], dim=2)),
    ("chunk", lambda m, x: x.chunk(2, dim=-1)),
    ("chunk three", lambda m, x: m.chunk(x, 3, dim=2)),
    ("tensor_split", lambda m, x: m.tensor_split(x, 3, dim=2)),
    ("tensor_split at", lambda m, x: m.tensor_split(x, (1, 2), dim=0)),
    ("unbind", lambda m, x: x.unbind(2)),
    ("narrow", lambda m, x: x.narrow(2, 0, 1)),
    ("select", lambda m, x: x.select(2, 0)),
    ("diagonal", lambda m, x: m.diagonal(x, 0, 1, 2)),
    ("diagonal off", lambda m, x: [x.diagonal(k, 0, 2) for k in (-1, 1, 2)]),
    ("diag_embed", lambda m, x: [m.diag_embed(x, k) for k in (0, 1, -1)]),
    ("diag_embed axes", lambda m, x: m.diag_embed(x, 0, 0, 2)),
    ("chained", lambda m, x: x.permute(2, 0, 1).reshape(x.shape[2], -1).t().flip(0)),
    ("iterate", lambda m, x: [row * 2 for row in x]),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_movement(shape, dtype):
    skip = ("tensor_split at",) if shape[0] == 1 else ()
    compare(CASES, data(dtype, shape), skip=skip)


def test_matrices():
    x = data("float32", (4, 6))
    compare(
        [
            ("T", lambda m, x: x.T),
            ("t", lambda m, x: x.t()),
            ("diag", lambda m, x: [m.diag(x, k) for k in (-2, 0, 3)]),
            ("diag of line", lambda m, x: [m.diag(x[0], k) for k in (-1, 0, 2)]),
            ("diagflat", lambda m, x: m.diagflat(x)),
            ("trace", lambda m, x: m.trace(x)),
            ("block_diag", lambda m, x: m.block_diag(x, x[:1], x[0])),
            ("unflatten", lambda m, x: [x.unflatten(1, (2, 3)), m.unflatten(x, 1, (-1, 2))]),
            ("unfold", lambda m, x: [x.unfold(1, 3, 1), x.unfold(0, 2, 2), x.unfold(1, 1, 4)]),
            ("tril", lambda m, x: [m.tril(x, k) for k in (-1, 0, 2)]),
            ("triu", lambda m, x: [x.triu(k) for k in (-1, 0, 2)]),
        ],
        x,
    )


@pytest.mark.parametrize("dtype", ["float32", "int64", "float16"])
def test_pad(dtype):
    def constant(amounts, **options):
        return lambda m, x: _home(m).pad(x, amounts, **options)

    compare(
        [
            ("last", constant([1, 2])),
            ("two", constant((1, 0, 0, 2))),
            ("value", constant([1, 2, 3, 4], value=7)),
            ("cut", constant([-1, 2, 1, -2])),
            ("none", constant([0, 0])),
            ("all axes", constant([1, 1, 1, 1, 1, 1], value=-1)),
        ],
        data(dtype, (2, 3, 4)),
    )


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_pad_modes(mode):
    compare(
        [
            ("one", lambda m, x: _home(m).pad(x, (2, 1), mode=mode)),
            ("left", lambda m, x: _home(m).pad(x, (3, 0), mode=mode)),
        ],
        data("float32", (2, 3, 5)),
    )
    compare(
        [
            ("two", lambda m, x: _home(m).pad(x, (2, 1, 1, 2), mode=mode)),
            ("one of two", lambda m, x: _home(m).pad(x, (0, 0, 2, 0), mode=mode)),
        ],
        data("float32", (1, 2, 4, 5)),
    )


def _home(m):
    return torch.nn.functional if m is torch else m


def test_repeat_interleave_counts():
    x, counts = data("float32", (3, 2)), torch.tensor([2, 0, 3])
    compare(
        [
            ("tensor", lambda m, x, c: m.repeat_interleave(x, c, dim=0)),
            ("size", lambda m, x, c: m.repeat_interleave(x, c, dim=0, output_size=5)),
        ],
        x,
        counts,
    )
    assert tg.repeat_interleave(tg.arange(3), [2, 0, 1]).tolist() == [0, 0, 2]


def test_scalars():
    compare(
        [
            ("flatten", lambda m, x: x.flatten()),
            ("squeeze", lambda m, x: x.squeeze()),
            ("unsqueeze", lambda m, x: x.unsqueeze(0)),
            ("expand", lambda m, x: x.expand(2, 3)),
            ("reshape", lambda m, x: x.reshape(1, 1)),
            ("hstack", lambda m, x: m.hstack([x, x])),
            ("stack", lambda m, x: m.stack([x, x])),
        ],
        data("float32", ()),
    )


def test_non_contiguous_input():
    x = data("float32", (4, 6, 2)).permute(2, 0, 1)[:, 1:, ::2]
    compare(
        [
            ("reshape", lambda m, x: x.reshape(-1)),
            ("transpose", lambda m, x: x.transpose(0, 1)),
            ("cat", lambda m, x: m.cat([x, x])),
        ],
        x,
    )


def test_broadcast_shapes():
    assert tg.broadcast_shapes((2, 1), (3,)) == (2, 3)
    assert [t.shape for t in tg.broadcast_tensors(tg.ones(2, 1), tg.ones(3))] == [(2, 3)] * 2


def test_narrow_at_run_time():
    x = tg.arange(10)
    assert x.narrow(0, tg.tensor(3), 4).tolist() == [3, 4, 5, 6]
