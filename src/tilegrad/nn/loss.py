"""Losses as layers.

Invariant: each is a function of `tensor.loss` with its settings kept; names and defaults are
PyTorch's.
"""

from __future__ import annotations

from ..tensor import ctc, loss
from .setting import Setting


class CrossEntropyLoss(Setting):
    """-log softmax(input)[target]."""

    function = staticmethod(loss.cross_entropy)
    defaults = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    tensors_given = ("weight",)


class NLLLoss(Setting):
    """-input[target] for log-probabilities."""

    function = staticmethod(loss.nll_loss)
    defaults = {"weight": None, "ignore_index": -100, "reduction": "mean"}
    tensors_given = ("weight",)


class CTCLoss(Setting):
    """The loss of all alignments of a target with a sequence."""

    function = staticmethod(ctc.ctc_loss)
    defaults = {"blank": 0, "reduction": "mean", "zero_infinity": False}


class MSELoss(Setting):
    """(input - target) ** 2."""

    function = staticmethod(loss.mse_loss)
    defaults = {"reduction": "mean"}


class L1Loss(Setting):
    """|input - target|."""

    function = staticmethod(loss.l1_loss)
    defaults = {"reduction": "mean"}


class SmoothL1Loss(Setting):
    """A square near 0, a line beyond beta."""

    function = staticmethod(loss.smooth_l1_loss)
    defaults = {"reduction": "mean", "beta": 1.0}


class HuberLoss(Setting):
    """A square near 0, a line beyond delta."""

    function = staticmethod(loss.huber_loss)
    defaults = {"reduction": "mean", "delta": 1.0}


class BCELoss(Setting):
    """Cross-entropy of probabilities of one class."""

    function = staticmethod(loss.binary_cross_entropy)
    defaults = {"weight": None, "reduction": "mean"}
    tensors_given = ("weight",)


class BCEWithLogitsLoss(Setting):
    """Cross-entropy of logits of one class."""

    function = staticmethod(loss.binary_cross_entropy_with_logits)
    defaults = {"weight": None, "reduction": "mean", "pos_weight": None}
    tensors_given = ("weight", "pos_weight")


class KLDivLoss(Setting):
    """target * (log(target) - input) for log-probabilities."""

    function = staticmethod(loss.kl_div)
    defaults = {"reduction": "mean", "log_target": False}


class PoissonNLLLoss(Setting):
    """Negative log-likelihood of counts."""

    function = staticmethod(loss.poisson_nll_loss)
    defaults = {"log_input": True, "full": False, "eps": 1e-8, "reduction": "mean"}


class GaussianNLLLoss(Setting):
    """Negative log-likelihood under a normal distribution."""

    function = staticmethod(loss.gaussian_nll_loss)
    defaults = {"full": False, "eps": 1e-6, "reduction": "mean"}


class CosineEmbeddingLoss(Setting):
    """Distance in angle of pairs that belong together or not."""

    function = staticmethod(loss.cosine_embedding_loss)
    defaults = {"margin": 0.0, "reduction": "mean"}


class HingeEmbeddingLoss(Setting):
    """A distance, or what it lacks to a margin."""

    function = staticmethod(loss.hinge_embedding_loss)
    defaults = {"margin": 1.0, "reduction": "mean"}


class MarginRankingLoss(Setting):
    """max(0, -target * (input1 - input2) + margin)."""

    function = staticmethod(loss.margin_ranking_loss)
    defaults = {"margin": 0.0, "reduction": "mean"}


class SoftMarginLoss(Setting):
    """log(1 + exp(-target * input))."""

    function = staticmethod(loss.soft_margin_loss)
    defaults = {"reduction": "mean"}


class TripletMarginLoss(Setting):
    """An anchor nearer to its positive than to its negative."""

    function = staticmethod(loss.triplet_margin_loss)
    defaults = {"margin": 1.0, "p": 2.0, "eps": 1e-6, "swap": False, "reduction": "mean"}


class MultiLabelSoftMarginLoss(Setting):
    """Binary cross-entropy averaged over classes."""

    function = staticmethod(loss.multilabel_soft_margin_loss)
    defaults = {"weight": None, "reduction": "mean"}
    tensors_given = ("weight",)


class MultiMarginLoss(Setting):
    """max(0, margin - input[target] + input) over other classes."""

    function = staticmethod(loss.multi_margin_loss)
    defaults = {"p": 1, "margin": 1.0, "weight": None, "reduction": "mean"}
    tensors_given = ("weight",)


class CosineSimilarity(Setting):
    """The cosine of the angle between vectors."""

    function = staticmethod(loss.cosine_similarity)
    defaults = {"dim": 1, "eps": 1e-8}


class PairwiseDistance(Setting):
    """The p-norm of differences over the last axis."""

    function = staticmethod(loss.pairwise_distance)
    defaults = {"p": 2.0, "eps": 1e-6, "keepdim": False}


__all__ = [
    "BCELoss",
    "BCEWithLogitsLoss",
    "CTCLoss",
    "CosineEmbeddingLoss",
    "CosineSimilarity",
    "CrossEntropyLoss",
    "GaussianNLLLoss",
    "HingeEmbeddingLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "MarginRankingLoss",
    "MultiLabelSoftMarginLoss",
    "MultiMarginLoss",
    "NLLLoss",
    "PairwiseDistance",
    "PoissonNLLLoss",
    "SmoothL1Loss",
    "SoftMarginLoss",
    "TripletMarginLoss",
]
