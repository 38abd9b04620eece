"""The Llama decoder in plain NumPy, in any float dtype: what other computations are judged by.

It reads a GGUF file and unpacks its weights with `Format.to_float32`; nothing else of tilegrad is
in it. Neighbouring features turn together, as llama.cpp lays out queries and keys of such files.
Invariant: every product, sum and function is computed in the dtype asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tilegrad.exchange.gguf import GgufFile, read_gguf

Array = np.ndarray[Any, Any]


class Llama:
    """A model of architecture `llama` without scaled positions, windows or experts."""

    def __init__(self, file: str | Path | GgufFile, dtype: Any = np.float64) -> None:
        self.file = file if isinstance(file, GgufFile) else read_gguf(file)
        self.dtype = np.dtype(dtype)
        said = self.file.metadata
        if said["general.architecture"] != "llama" or "rope_freqs.weight" in self.file.tensors:
            raise SystemExit(f"{self.file.path}: only plain Llama models are known here")
        if any(k in said for k in ("llama.rope.scaling.type", "llama.expert_count")):
            raise SystemExit(f"{self.file.path}: scaled positions and experts are not known here")
        self.layers, self.heads = said["llama.block_count"], said["llama.attention.head_count"]
        self.key_heads = said.get("llama.attention.head_count_kv", self.heads)
        self.epsilon = said["llama.attention.layer_norm_rms_epsilon"]
        self.base = said.get("llama.rope.freq_base", 10000.0)
        self.embedding = self.weight("token_embd")
        tied = "output.weight" not in self.file.tensors
        self.head = self.embedding if tied else self.weight("output")

    def weight(self, name: str) -> Array:
        """A tensor of the file, unpacked."""
        stored = self.file.tensors[f"{name}.weight"]
        found = stored.format.to_float32(stored.raw).reshape(stored.shape)
        return found.astype(self.dtype)

    def norm(self, x: Array, name: str) -> Array:
        """(..., C): every row by the root of its mean square."""
        mean = (x * x).mean(-1, keepdims=True, dtype=self.dtype)
        return x / np.sqrt(mean + self.dtype.type(self.epsilon)) * self.weight(name)

    def turned(self, x: Array) -> Array:
        """(T, H, D): features 2i and 2i + 1 turned by position / base ** (2i / D)."""
        count, _, width = x.shape
        speeds = 1.0 / self.base ** (np.arange(0, width, 2) / width)
        angles = np.arange(count)[:, None] * speeds  # in float64: (T, D / 2)
        cosines, sines = (f(angles)[:, None].astype(self.dtype) for f in (np.cos, np.sin))
        even, odd = x[..., 0::2], x[..., 1::2]
        found = np.stack([even * cosines - odd * sines, odd * cosines + even * sines], -1)
        return found.reshape(x.shape)

    def attention(self, x: Array, block: str) -> Array:
        """(T, C) -> (T, C): every token over those up to it."""
        count = len(x)
        q, k, v = (x @ self.weight(f"{block}.attn_{n}").T for n in "qkv")
        q = self.turned(q.reshape(count, self.heads, -1))
        k = self.turned(k.reshape(count, self.key_heads, -1))
        v = v.reshape(count, self.key_heads, -1)
        later = np.triu(np.full((count, count), -np.inf, self.dtype), 1)
        scale, found = self.dtype.type(q.shape[-1] ** -0.5), np.empty_like(q)
        for head in range(self.heads):
            shared = head // (self.heads // self.key_heads)
            scores = q[:, head] @ k[:, shared].T * scale + later
            chances = np.exp(scores - scores.max(-1, keepdims=True))
            found[:, head] = chances @ v[:, shared] / chances.sum(-1, keepdims=True)
        return found.reshape(count, -1) @ self.weight(f"{block}.attn_output").T

    def feed_forward(self, x: Array, block: str) -> Array:
        """(T, C) -> (T, C)."""
        gate, up = (x @ self.weight(f"{block}.ffn_{n}").T for n in ("gate", "up"))
        return gate / (1 + np.exp(-gate)) * up @ self.weight(f"{block}.ffn_down").T

    def hidden(self, tokens: Any) -> Array:
        """(T,) -> (T, C): what the head reads."""
        x = self.embedding[np.asarray(tokens)]
        for layer in range(self.layers):
            block = f"blk.{layer}"
            x = x + self.attention(self.norm(x, f"{block}.attn_norm"), block)
            x = x + self.feed_forward(self.norm(x, f"{block}.ffn_norm"), block)
        return self.norm(x, "output_norm")

    def logits(self, tokens: Any) -> Array:
        """(T,) -> (T, V)."""
        return self.hidden(tokens) @ self.head.T

    def logits_in_parts(self, tokens: Any, rows: int = 256) -> Iterator[Array]:
        """The logits, some rows at a time."""
        hidden = self.hidden(tokens)
        for first in range(0, len(hidden), rows):
            yield hidden[first : first + rows] @ self.head.T


def log_softmax(logits: Array) -> Array:
    """Over the last axis, in the dtype of the logits."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
