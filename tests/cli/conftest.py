"""Two models for commands: one made of a script in the place of LLM, and a tiny real one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tilegrad.cli import opening
from tilegrad.exchange import fetch
from tilegrad.exchange.gguf_write import stored, write_gguf


@dataclass
class FakeTokenizer:
    """Words are tokens; a chat costs three more a message."""

    template_text: str | None = "a template"
    ends: frozenset[int] = frozenset({99})

    asked: list[Any] = field(default_factory=list)

    def encode(self, text: str) -> list[int]:
        self.asked.append(text)
        return [0] * len(text.split())

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        self.asked.append([dict(m) for m in messages])
        return [0] * sum(3 + len(m["content"].split()) for m in messages)


@dataclass
class FakeLLM:
    """Answers by a script: a list of pieces, or an exception to raise after them."""

    script: list[Any] = field(default_factory=lambda: ["Hel", "lo", "."])
    context: int = 64
    most: int = 1 << 20
    template: str | None = "a template"
    defaults: dict[str, Any] = field(default_factory=dict)
    opened: list[dict[str, Any]] = field(default_factory=list)
    asked: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)
    encoded: list[Any] = field(default_factory=list)
    closed: int = 0

    def __call__(self, path: Any, *, progress: Any = None, **choices: Any) -> FakeLLM:
        self.opened.append({"path": str(path), **choices})
        if "context" in choices:
            self.context = min(choices["context"], self.most)
        for stage in ("load", "compile"):
            progress(stage, 0, 1)
            progress(stage, 1, 1)
        return self

    @property
    def tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer(self.template, asked=self.encoded)

    def stream(self, prompt: list[int], **sampling: Any) -> Any:
        words = self.encoded[-1]
        self.asked.append(("stream" if isinstance(words, str) else "chat", words, sampling))
        return self.pieces()

    def chat_stream(self, messages: list[dict[str, str]], **sampling: Any) -> Any:
        self.asked.append(("chat", [dict(m) for m in messages], sampling))
        return self.pieces()

    def pieces(self) -> Any:
        try:
            for number, part in enumerate(self.script):
                if isinstance(part, BaseException):
                    raise part
                finish = "stop" if number == len(self.script) - 1 else None
                if isinstance(part, tuple):
                    part, finish = part
                token = 99 if not part and finish == "stop" else number
                yield SimpleNamespace(text=part, token=token, finish=finish)
        finally:
            self.closed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """A FakeLLM that every command gets, whatever model is named but "missing"."""
    llm = FakeLLM()
    find = fetch.find_model

    def found(name: Any, report: Any = None) -> Path:
        return find(name, report) if str(name) == "missing" else Path(str(name))

    monkeypatch.setattr(opening, "llm_class", lambda: llm)
    monkeypatch.setattr(fetch, "find_model", found)
    return llm


# ---- a tiny real model --------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def letters() -> list[str]:
    """The printable letters that stand for the 256 bytes in byte-pair vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    signs = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [signs[b] for b in range(256)]


def write_tiny_model(path: Path, context: int = 128, template: str | None = TEMPLATE) -> None:
    """A random llama of two layers as a GGUF file: Q4_1 and Q8_0 weights, bytes for tokens.

    The token that ends an answer has no weight, so answers end by their length.
    """
    random = np.random.default_rng(3)
    width, hidden, head, layers = 64, 96, 32, 2
    texts = [*letters(), "th", "<|im_start|>", "<|im_end|>"]
    kinds = [1] * 257 + [3, 3]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "Tiny\x1b[31m",
        "general.license": "mit",
        "llama.embedding_length": width,
        "llama.block_count": layers,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.feed_forward_length": hidden,
        "llama.context_length": context,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
    }
    if template is not None:
        metadata["tokenizer.chat_template"] = template

    def drawn(name: str, rows: int, columns: int, form: str = "Q4_1") -> Any:
        values = random.standard_normal((rows, columns)).astype(np.float32) / columns**0.5
        values[258:] = 0.0
        return stored(name, values, form)

    ones = np.ones(width, np.float32)
    tensors: dict[str, Any] = {
        "token_embd.weight": drawn("e", len(texts), width, "Q8_0"),
        "output_norm.weight": ones,
    }
    shapes = {
        "attn_q": (width, width),
        "attn_k": (head, width),
        "attn_v": (head, width),
        "attn_output": (width, width),
        "ffn_gate": (hidden, width),
        "ffn_up": (hidden, width),
        "ffn_down": (width, hidden),
    }
    for i in range(layers):
        tensors |= {f"blk.{i}.{n}.weight": drawn(n, *shape) for n, shape in shapes.items()}
        tensors |= {f"blk.{i}.attn_norm.weight": ones, f"blk.{i}.ffn_norm.weight": ones}
    write_gguf(path, metadata, tensors)


@pytest.fixture(scope="session")
def commands_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One cache for the commands of a run: what one compiles the next ones find."""
    folder = tmp_path_factory.getbasetemp()
    own = "PYTEST_XDIST_WORKER" in os.environ  # a folder of each worker, in one of the run
    return str((folder.parent if own else folder) / "commands")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the tiny model."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture
def tiny_long(tmp_path: Path) -> Path:
    """The tiny model with room for long answers."""
    write_tiny_model(tmp_path / "long.gguf", context=16384)
    return tmp_path / "long.gguf"
