"""What the head of a decoder read in the last step, kept on the device for heads that guess.

Invariant: row t is that of the last step's token t, in the order in which the step had them.
"""

from __future__ import annotations

import numpy as np

from ..core.dtype import DType, int32
from ..tensor.creation import arange, tensor
from ..tensor.tensor import Tensor


class Features:
    """Features (tokens, C) of the last step, after the decoder's last norm."""

    def __init__(self, tokens: int, width: int, dtype: DType, device: str) -> None:
        self.all = tensor(np.zeros((tokens, width), dtype.numpy), device=device)

    def put(self, features: Tensor) -> None:
        """Keep the features (T, C) of a step."""
        at = arange(features.shape[0], dtype=int32)
        self.all.assign(self.all.index_copy(0, at, features))

    def tensors(self) -> dict[str, Tensor]:
        """Its state by name, for `jit`."""
        return {"features": self.all}


__all__ = ["Features"]
