# ruff: noqa: F401
"""Models people know, written to be read."""

from .decoder import Decoder
from .decoder_config import DecoderConfig
from .gpt2 import GPT2, GPT2Config
