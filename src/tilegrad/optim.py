"""Optimizers, with PyTorch's names and arguments (`torch.optim`): those of `tilegrad.train`."""

from .train.adaptive import Adagrad, RMSprop
from .train.optimizer import SGD, Adam, AdamW, Optimizer

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Optimizer",
    "RMSprop",
]
