# ruff: noqa: F401
"""Models people know, written to be read."""

from .gpt2 import GPT2, GPT2Config
