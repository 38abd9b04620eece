"""`DecoderConfig`: what tells one decoder from another, as data.

It is made from a Hugging Face `config.json` or from GGUF metadata. Invariant: a DecoderConfig
is whole and consistent (sizes are positive and divide, one window for each layer): what is
missing, contradictory or unknown in a file is a UserError here and never a wrong model later.
`check` is long: a list of conditions, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import UserError
from . import gguf, huggingface
from .rotary import Rotary

MOST_HEAD_WIDTH = 1 << 14


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and traits of a decoder."""

    family: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    hidden: int  # features within the feed-forward part
    context: int  # most positions
    longest: int = 0  # positions that a file's own scaling allows, if more are asked for

    norm: str = "rms"  # or layer
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0  # added to weights of norms: 1 in Gemma's own files
    pre_norms: bool = True  # norms before attention and the feed-forward part
    post_norms: bool = False  # norms after attention and the feed-forward part
    parallel: bool = False  # attention and the feed-forward part read the same features
    shared_norm: bool = False  # and of these the same norm
    head_norms: bool = False  # norms of each query and key
    whole_norms: bool = False  # those are of all heads at once
    qkv_bias: bool = False
    output_bias: bool = False
    feed_bias: bool = False
    head_bias: bool = False
    activation: str = "silu"
    gated: bool = True
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what each part adds
    logit_scale: float = 1.0
    tied: bool = False  # the head's weight is the embedding's

    scale: float = 0.0  # of scores; 0: 1 / sqrt(head_width)
    softcap: float = 0.0  # of scores
    sinks: bool = False  # each head has one more score, of a key without a value
    logit_softcap: float = 0.0
    windows: tuple[int, ...] = ()  # how many tokens back each layer sees; 0: all. (): all see all
    rotary: Rotary | None = None  # None: positions are learned
    local_rotary: Rotary | None = None  # of layers that have a window, where it differs
    rotated: tuple[bool, ...] = ()  # which layers turn queries and keys; (): all

    experts: int = 0
    experts_used: int = 0
    expert_hidden: int = 0
    shared_hidden: int = 0  # features within the expert all tokens go to
    normalize_experts: bool = True  # shares of the picked experts add up to 1
    expert_bias: bool = False  # of experts and of their router
    gate_limit: float = 0.0  # gates of experts are clamped (gpt-oss); 0: they are not
    gate_slope: float = 1.702  # of the sigmoid of such gates
    routed: tuple[bool, ...] = ()  # which layers have experts; (): all, if there are any

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "scale", self.scale or (self.head_width**-0.5 if self.head_width > 0 else 0.0))
        put(self, "windows", self.windows or (0,) * self.layers)
        put(self, "longest", max(self.longest, self.context))
        put(self, "rotated", self.rotated or (True,) * self.layers)
        put(self, "routed", self.routed or (bool(self.experts),) * self.layers)
        check(self)

    @classmethod
    def from_huggingface(
        cls, given: Mapping[str, Any], context: int | None = None
    ) -> DecoderConfig:
        """From the dict of a config.json; `context` asks for fewer positions, or for more where
        the file has a scaling for them."""
        return cls(**huggingface.read(given, context))

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensors: Mapping[str, Any] | None = None
    ) -> DecoderConfig:
        """From GGUF metadata and the tensors of the file, by name.

        Tensors say what the metadata does not: whether the head is tied, which biases there
        are, how many tokens, and the divisors of rotary speeds.
        """
        return cls(**gguf.read(metadata, tensors))

    def attention(self, layer: int) -> dict[str, Any]:
        """How a layer attends: arguments of `tg.attention` besides q, k, v and causal."""
        return {"scale": self.scale, "softcap": self.softcap, "window": self.windows[layer] or None}

    def rotary_of(self, layer: int) -> Rotary | None:
        """How a layer turns queries and keys, if it does."""
        if not self.rotated[layer]:
            return None
        local = self.local_rotary is not None and self.windows[layer]
        return self.local_rotary if local else self.rotary

    def rotaries(self) -> list[Rotary]:
        """The ways of turning that layers use, each once."""
        found = {self.rotary_of(i): None for i in range(self.layers)}
        return [r for r in found if r is not None]


def check(config: DecoderConfig) -> None:
    """Raise unless sizes are positive and fit each other."""
    op = f"DecoderConfig ({config.family})"

    def need(holds: Any, what: str, expected: Any, got: Any) -> None:
        if not holds:
            raise UserError(what, op=op, expected=expected, got=got)

    for name in (
        "vocabulary",
        "width",
        "layers",
        "heads",
        "key_heads",
        "head_width",
        "hidden",
        "context",
    ):
        value = getattr(config, name)
        need(isinstance(value, int) and value > 0, f"bad {name}", "a positive int", value)
    need(
        config.head_width <= MOST_HEAD_WIDTH,
        "bad head_width",
        f"at most {MOST_HEAD_WIDTH}",
        config.head_width,
    )
    need(
        config.heads % config.key_heads == 0,
        "heads do not share key heads evenly",
        f"heads a multiple of {config.key_heads}",
        config.heads,
    )
    for name in ("windows", "routed", "rotated"):
        got = len(getattr(config, name))
        need(got == config.layers, f"{name} are not one a layer", config.layers, got)
    need(min(config.windows) >= 0, "bad window", "counts of tokens", config.windows)
    need(config.norm in ("rms", "layer"), "unknown norm", "rms or layer", config.norm)
    need(
        config.parallel or not config.shared_norm,
        "parts share a norm one after the other",
        "parallel",
        config.parallel,
    )
    need(config.norm_epsilon > 0.0, "bad norm_epsilon", "above 0", config.norm_epsilon)
    for rotary in config.rotaries():
        _check_rotary(rotary, config, need)
    if config.experts:
        need(
            0 < config.experts_used <= config.experts,
            "bad count of experts for a token",
            f"1..{config.experts}",
            config.experts_used,
        )
        need(config.expert_hidden > 0, "bad expert_hidden", "above 0", config.expert_hidden)
        need(config.gate_limit >= 0.0, "bad gate_limit", "0 or above", config.gate_limit)
    need(
        config.experts or not any(config.routed),
        "layers are routed without experts",
        "experts",
        config.experts,
    )


def _check_rotary(rotary: Rotary, config: DecoderConfig, need: Any) -> None:
    need(
        rotary.width > 0 and rotary.width % 2 == 0 and rotary.width <= config.head_width,
        "bad count of features that turn",
        f"even, 2..{config.head_width}",
        rotary.width,
    )
    need(rotary.base > 1.0, "bad base of rotary positions", "above 1", rotary.base)
    need(
        rotary.kind in ("default", "linear", "llama3", "yarn"),
        "unknown rotary scaling",
        "default, linear, llama3 or yarn",
        rotary.kind,
    )
    need(rotary.factor > 0.0, "bad factor of rotary scaling", "above 0", rotary.factor)
    if rotary.kind in ("llama3", "yarn"):
        need(
            rotary.original > 0,
            "rotary scaling needs the context of training",
            "original_max_position_embeddings",
            rotary.original,
        )
    if rotary.kind == "llama3":
        need(
            rotary.high > rotary.low,
            "bad rotary scaling",
            "high_freq_factor > low_freq_factor",
            f"{rotary.high} and {rotary.low}",
        )
    need(
        len(rotary.divisors) in (0, rotary.width // 2) and all(d > 0 for d in rotary.divisors),
        "bad divisors of rotary speeds",
        f"{rotary.width // 2} above 0",
        f"{len(rotary.divisors)}",
    )
    need(
        min(rotary.beta_fast, rotary.beta_slow) > 0.0,
        "bad rotary scaling",
        "beta_fast and beta_slow above 0",
        f"{rotary.beta_fast} and {rotary.beta_slow}",
    )
    with np.errstate(all="ignore"):
        speeds = rotary.frequencies()
    need(np.isfinite(speeds).all(), "rotary speeds are not finite", "finite ones", rotary)


__all__ = ["DecoderConfig", "check"]
