"""Convolution, pooling and resizing against torch: values and gradients over their options."""

import numpy as np
import pytest
from torch_peer import close, compare, random_array, torch

from tilegrad import Tensor
from tilegrad.core.errors import ShapeError, UserError
from tilegrad.tensor import convolution, pooling, resize

functional = torch.nn.functional

OPTIONS = [
    {},
    {"stride": 2},
    {"padding": 1},
    {"dilation": 2},
    {"groups": 2},
    {"padding": "same"},
    {"padding": "valid"},
    {"stride": 2, "padding": 2, "dilation": 2, "groups": 4},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rank", [1, 2])
def test_convolution(rank: int, options: dict) -> None:
    groups = options.get("groups", 1)
    shapes = (2, 4, *(7, 6)[:rank]), (8, 4 // groups, *(3, 2)[:rank]), (8,)
    ours, theirs = getattr(convolution, f"conv{rank}d"), getattr(functional, f"conv{rank}d")
    compare(
        lambda x, w, b: ours(x, w, b, **options),
        lambda x, w, b: theirs(x, w, b, **options),
        *(random_array(s) for s in shapes),
        tolerance=1e-4,
    )


def test_convolution_in_three_axes_and_without_a_batch() -> None:
    x, w = random_array((4, 4, 5, 3)), random_array((2, 4, 2, 3, 1))
    compare(
        lambda x, w: convolution.conv3d(x, w, stride=(1, 2, 1), padding=(0, 1, 2)),
        lambda x, w: functional.conv3d(x, w, stride=(1, 2, 1), padding=(0, 1, 2)),
        x,
        w,
        tolerance=1e-4,
    )


TRANSPOSED = [
    {},
    {"stride": 2},
    {"padding": 1},
    {"dilation": 2},
    {"groups": 2},
    {"stride": 3, "padding": 1, "output_padding": 2, "dilation": 2, "groups": 2},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", TRANSPOSED, ids=str)
@pytest.mark.parametrize("rank", [1, 2])
def test_transposed_convolution(rank: int, options: dict) -> None:
    groups = options.get("groups", 1)
    shapes = (2, 4, *(5, 4)[:rank]), (4, 6 // groups, *(3, 2)[:rank]), (6,)
    name = f"conv_transpose{rank}d"
    ours, theirs = getattr(convolution, name), getattr(functional, name)
    compare(
        lambda x, w, b: ours(x, w, b, **options),
        lambda x, w, b: theirs(x, w, b, **options),
        *(random_array(s) for s in shapes),
        tolerance=1e-4,
    )


def test_low_precision_convolution_is_rounded_once() -> None:
    x, w, b = (Tensor(random_array(s)).to("bfloat16") for s in ((1, 4, 6), (3, 4, 3), (3,)))
    exact = convolution.conv1d(x.float(), w.float(), b.float()).to("bfloat16")
    found = convolution.conv1d(x, w, b)
    np.testing.assert_array_equal(found.float().numpy(), exact.float().numpy())


def test_fold_and_unfold() -> None:
    options = {"kernel_size": (3, 2), "dilation": 1, "padding": 1, "stride": 2}
    image = random_array((2, 3, 6, 5))
    compare(
        lambda x: convolution.unfold(x, **options), lambda x: functional.unfold(x, **options), image
    )
    columns = functional.unfold(torch.tensor(image), **options).numpy()
    compare(
        lambda x: convolution.fold(x, (6, 5), **options),
        lambda x: functional.fold(x, (6, 5), **options),
        columns,
    )


# ---- pooling --------------------------------------------------------------------------------

POOLS = [
    (2, {}),
    (3, {"stride": 2}),
    (3, {"stride": 2, "padding": 1}),
    (3, {"stride": 2, "padding": 1, "ceil_mode": True}),
    (2, {"ceil_mode": True}),
]


@pytest.mark.parametrize("kernel,options", POOLS, ids=str)
@pytest.mark.parametrize("rank", [1, 2])
def test_pooling(rank: int, kernel: int, options: dict) -> None:
    x = np.maximum(random_array((2, 3, *(7, 8)[:rank])), 0)  # zeros make ties
    for kind, more in (("max", [{}]), ("avg", [{}, {"count_include_pad": False}])):
        ours, theirs = (getattr(m, f"{kind}_pool{rank}d") for m in (pooling, functional))
        for extra in more:
            compare(
                lambda x, f=ours, e=extra: f(x, kernel, **options, **e),
                lambda x, f=theirs, e=extra: f(x, kernel, **options, **e),
                x,
            )


def test_more_pooling() -> None:
    x = random_array((2, 3, 6, 7))
    options = {"kernel_size": (2, 3), "stride": 2, "padding": 1, "dilation": (2, 1)}
    found = pooling.max_pool2d(Tensor(x), **options, return_indices=True)
    wanted = functional.max_pool2d(torch.tensor(x), **options, return_indices=True)
    for a, b in zip(found, wanted):
        close(a, b)
    compare(
        lambda x: pooling.avg_pool2d(x, 2, divisor_override=3),
        lambda x: functional.avg_pool2d(x, 2, divisor_override=3),
        x,
    )
    compare(lambda x: pooling.max_pool3d(x, 2, 1), lambda x: functional.max_pool3d(x, 2, 1), x)
    compare(lambda x: pooling.lp_pool2d(x, 2, 2), lambda x: functional.lp_pool2d(x, 2, 2), x)


@pytest.mark.parametrize("size", [1, 2, (4, 5), (None, 3)])
def test_adaptive_pooling(size: object) -> None:
    x = random_array((2, 3, 6, 7))
    for name in ("adaptive_avg_pool2d", "adaptive_max_pool2d"):
        ours, theirs = getattr(pooling, name), getattr(functional, name)
        compare(lambda x, f=ours: f(x, size), lambda x, f=theirs: f(x, size), x)
    found = pooling.adaptive_max_pool2d(Tensor(x), size, return_indices=True)[1]
    close(found, functional.adaptive_max_pool2d(torch.tensor(x), size, return_indices=True)[1])


# ---- resizing -------------------------------------------------------------------------------

MODES = [
    ("nearest", {}),
    ("nearest-exact", {}),
    ("area", {}),
    ("bilinear", {"align_corners": False}),
    ("bilinear", {"align_corners": True}),
    ("bicubic", {"align_corners": False}),
    ("bicubic", {"align_corners": True}),
]


@pytest.mark.parametrize("mode,options", MODES, ids=str)
@pytest.mark.parametrize("how", [{"size": (7, 3)}, {"scale_factor": (1.7, 2.0)}], ids=str)
def test_interpolate(mode: str, options: dict, how: dict) -> None:
    compare(
        lambda x: resize.interpolate(x, mode=mode, **how, **options),
        lambda x: functional.interpolate(x, mode=mode, **how, **options),
        random_array((2, 3, 4, 5)),
        tolerance=1e-4,
    )


def test_interpolate_in_one_axis() -> None:
    compare(
        lambda x: resize.interpolate(x, 9, mode="linear"),
        lambda x: functional.interpolate(x, 9, mode="linear"),
        random_array((2, 3, 5)),
    )


def test_shuffles() -> None:
    x = random_array((2, 8, 4, 6))
    compare(lambda x: resize.pixel_shuffle(x, 2), lambda x: functional.pixel_shuffle(x, 2), x)
    compare(lambda x: resize.pixel_unshuffle(x, 2), lambda x: functional.pixel_unshuffle(x, 2), x)
    compare(lambda x: resize.channel_shuffle(x, 4), lambda x: torch.channel_shuffle(x, 4), x)


def test_errors() -> None:
    x, w = Tensor(random_array((1, 4, 6))), Tensor(random_array((2, 3, 3)))
    with pytest.raises(ShapeError, match="conv1d: the channels do not fit"):
        convolution.conv1d(x, w)
    with pytest.raises(UserError, match="padding='same' needs stride 1"):
        convolution.conv1d(x[:, :3], w, stride=2, padding="same")
    with pytest.raises(ShapeError, match="the window does not fit"):
        convolution.conv1d(x[:, :3, :2], w)
    with pytest.raises(UserError, match="padding is too large"):
        pooling.max_pool1d(x, 2, padding=2)
    with pytest.raises(UserError, match="the mode does not fit"):
        resize.interpolate(x, 3, mode="bilinear")
