"""Models people know, written to be read."""

from .decoder.config import DecoderConfig
from .decoder.model import Decoder
from .gpt2 import GPT2, GPT2Config

__all__ = [
    "GPT2",
    "Decoder",
    "DecoderConfig",
    "GPT2Config",
]
