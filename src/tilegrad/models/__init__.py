# ruff: noqa: F401
"""Models people know, written to be read."""

from .decoder.config import DecoderConfig
from .decoder.model import Decoder
from .gpt2 import GPT2, GPT2Config
