"""Training: optimizers, learning rates, clipping, a loop."""

from . import rate
from .adaptive import Adagrad, RMSprop
from .clip import clip_grad_norm_, clip_grad_value_
from .loop import History, make_step, train
from .optimizer import SGD, Adam, AdamW, Optimizer

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "History",
    "Optimizer",
    "RMSprop",
    "clip_grad_norm_",
    "clip_grad_value_",
    "make_step",
    "rate",
    "train",
]
