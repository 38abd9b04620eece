"""Activation functions as layers.

Invariant: each is a function of `tensor` with its settings kept; names and defaults are
PyTorch's (but Softmax works along the last axis unless told), and `inplace` changes nothing.
"""

from __future__ import annotations

from typing import Any

from ..tensor import activation
from ..tensor.creation import full
from ..tensor.maths import sigmoid, tanh
from ..tensor.reduce import log_softmax, softmax, softmin
from ..tensor.tensor import Tensor
from .module import Module, Parameter
from .setting import Setting


class ReLU(Setting):
    """x where it is positive, else 0."""

    function = staticmethod(activation.relu)
    defaults = {"inplace": False}


class ReLU6(Setting):
    """x kept within 0..6."""

    function = staticmethod(activation.relu6)
    defaults = {"inplace": False}


class GELU(Setting):
    """x times the normal distribution function of x."""

    function = staticmethod(activation.gelu)
    defaults = {"approximate": "none"}


class SiLU(Setting):
    """x * sigmoid(x)."""

    function = staticmethod(activation.silu)
    defaults = {"inplace": False}


class Mish(Setting):
    """x * tanh(softplus(x))."""

    function = staticmethod(activation.mish)
    defaults = {"inplace": False}


class Sigmoid(Setting):
    """1 / (1 + exp(-x))."""

    function = staticmethod(sigmoid)


class LogSigmoid(Setting):
    """log(sigmoid(x))."""

    function = staticmethod(activation.logsigmoid)


class Tanh(Setting):
    """The hyperbolic tangent."""

    function = staticmethod(tanh)


class Tanhshrink(Setting):
    """x - tanh(x)."""

    function = staticmethod(activation.tanhshrink)


class Softplus(Setting):
    """log(1 + exp(beta * x)) / beta."""

    function = staticmethod(activation.softplus)
    defaults = {"beta": 1.0, "threshold": 20.0}


class Softsign(Setting):
    """x / (1 + |x|)."""

    function = staticmethod(activation.softsign)


class Softshrink(Setting):
    """x moved towards 0 by lambd, 0 within."""

    function = staticmethod(activation.softshrink)
    defaults = {"lambd": 0.5}


class Hardshrink(Setting):
    """x, but 0 where |x| <= lambd."""

    function = staticmethod(activation.hardshrink)
    defaults = {"lambd": 0.5}


class Hardtanh(Setting):
    """x kept within bounds."""

    function = staticmethod(activation.hardtanh)
    defaults = {"min_val": -1.0, "max_val": 1.0, "inplace": False}


class Hardsigmoid(Setting):
    """A sigmoid made of lines."""

    function = staticmethod(activation.hardsigmoid)
    defaults = {"inplace": False}


class Hardswish(Setting):
    """x * hardsigmoid(x)."""

    function = staticmethod(activation.hardswish)
    defaults = {"inplace": False}


class LeakyReLU(Setting):
    """x, with a small slope where it is negative."""

    function = staticmethod(activation.leaky_relu)
    defaults = {"negative_slope": 0.01, "inplace": False}


class ELU(Setting):
    """x, or alpha * (exp(x) - 1) where it is negative."""

    function = staticmethod(activation.elu)
    defaults = {"alpha": 1.0, "inplace": False}


class SELU(Setting):
    """A scaled ELU that keeps mean and variance."""

    function = staticmethod(activation.selu)
    defaults = {"inplace": False}


class CELU(Setting):
    """x, or alpha * (exp(x / alpha) - 1) where it is negative."""

    function = staticmethod(activation.celu)
    defaults = {"alpha": 1.0, "inplace": False}


class Threshold(Setting):
    """x above a threshold, else a value."""

    function = staticmethod(activation.threshold)
    required = ("threshold", "value")
    defaults = {"inplace": False}


class GLU(Setting):
    """One half of an axis times the sigmoid of the other."""

    function = staticmethod(activation.glu)
    defaults = {"dim": -1}


class Softmax(Setting):
    """exp(x) / sum(exp(x)) along an axis."""

    function = staticmethod(softmax)
    defaults = {"dim": -1}


class Softmin(Setting):
    """softmax(-x)."""

    function = staticmethod(softmin)
    defaults = {"dim": -1}


class LogSoftmax(Setting):
    """log(softmax(x))."""

    function = staticmethod(log_softmax)
    defaults = {"dim": -1}


class PReLU(Module):
    """x, with a slope that is trained where it is negative."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25, dtype: Any = None) -> None:
        super().__init__()
        self.num_parameters = num_parameters
        self.weight = Parameter(full((num_parameters,), init, dtype=dtype))

    def forward(self, x: Any) -> Tensor:
        """x, bent at 0."""
        return activation.prelu(x, self.weight)

    def extra_repr(self) -> str:
        """How many slopes."""
        return f"num_parameters={self.num_parameters}"


__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "GLU",
    "SELU",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "LogSigmoid",
    "LogSoftmax",
    "Mish",
    "PReLU",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softmin",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Tanhshrink",
    "Threshold",
]
