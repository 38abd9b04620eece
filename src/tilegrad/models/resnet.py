"""ResNet: pictures of 224 x 224 to 1000 classes, in the shapes of ResNet-18 and ResNet-50.

Batch norms are taken as folded into the convolutions before them, as they are where a trained
network runs; with `bias` the convolutions have what is left of them. Invariant: convolutions and
their sizes are the published ones.
"""

from __future__ import annotations

from .. import nn
from ..core.errors import UserError
from ..tensor.tensor import Tensor


class Basic(nn.Module):
    """Two convolutions of 3 x 3, added to their input."""

    grows = 1

    def __init__(self, inputs: int, width: int, stride: int, bias: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 3, stride, 1, bias=bias)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=bias)
        self.plain = inputs == width and stride == 1
        if not self.plain:
            self.shortcut = nn.Conv2d(inputs, width, 1, stride, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, width, H / stride, W / stride)."""
        y = self.second(self.first(x).relu())
        return (y + (x if self.plain else self.shortcut(x))).relu()


class Bottleneck(nn.Module):
    """Three convolutions, 1 x 1, 3 x 3 and 1 x 1, added to their input."""

    grows = 4

    def __init__(self, inputs: int, width: int, stride: int, bias: bool) -> None:
        super().__init__()
        outputs = 4 * width
        self.down = nn.Conv2d(inputs, width, 1, bias=bias)
        self.across = nn.Conv2d(width, width, 3, stride, 1, bias=bias)
        self.up = nn.Conv2d(width, outputs, 1, bias=bias)
        self.plain = inputs == outputs and stride == 1
        if not self.plain:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) -> (B, 4 width, H / stride, W / stride)."""
        y = self.up(self.across(self.down(x).relu()).relu())
        return (y + (x if self.plain else self.shortcut(x))).relu()


SHAPES: dict[int, tuple[type[Basic] | type[Bottleneck], tuple[int, ...]]] = {
    18: (Basic, (2, 2, 2, 2)),
    34: (Basic, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
}


def resnet(depth: int = 50, width: int = 64, bias: bool = True) -> nn.Sequential:
    """A ResNet of a known depth; `width` is that of the first stage, 64 as published."""
    if depth not in SHAPES:
        known = ", ".join(map(str, SHAPES))
        raise UserError("no such depth", op="resnet", expected=known, got=depth)
    kind, counts = SHAPES[depth]
    blocks: list[nn.Module] = []
    inputs = width
    for stage, count in enumerate(counts):
        for number in range(count):
            stride = 2 if number == 0 and stage > 0 else 1
            blocks.append(kind(inputs, width << stage, stride, bias))
            inputs = kind.grows * (width << stage)
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=bias),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(inputs, 1000),
    )


__all__ = ["resnet"]
