"""A real tiny llama whose answers are written beforehand: every token has one that follows it.

Its layers add nothing, an embedding row is nearly at right angles to all others, and the output row
of a token is the embedding of the one before it in its script. So a script is a chain of tokens,
each of which is in the vocabulary once, and the last token of the prompt says which script runs.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilegrad.exchange.gguf_write import write_gguf

WIDTH, HIDDEN, HEAD, BYTES = 96, 32, 32, 256
CONTROL, USER_DEFINED = 3, 4
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}{% endif %}{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if messages[-1].role == 'tool' %}<|after|>{% elif tools %}<|call|>"
    "{% else %}<|talk|>{% endif %}{% endif %}"
)


def letters() -> list[str]:
    """The printable letters that stand for the 256 bytes in byte-pair vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    signs = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [signs[b] for b in range(256)]


def write_scripted(
    path: Path,
    scripts: Mapping[str, Sequence[str]],
    template: str = TEMPLATE,
    control: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
    context: int = 2048,
) -> Path:
    """A GGUF file: after the special token that names a script come its pieces, then the end.

    No piece may come twice, in one script or in two.
    """
    pieces = [piece for script in scripts.values() for piece in script]
    assert len(set(pieces)) == len(pieces), "a piece comes twice"
    special = [*control, *scripts]
    words = [*letters(), *special, *pieces]
    ids = {word: BYTES + i for i, word in enumerate([*special, *pieces])}
    follows: dict[int, int] = {}
    for start, script in scripts.items():
        chain = [ids[start], *(ids[piece] for piece in script)]
        follows |= dict(itertools.pairwise(chain))
    end = ids["<|im_end|>"]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.embedding_length": WIDTH,
        "llama.block_count": 1,
        "llama.attention.head_count": WIDTH // HEAD,
        "llama.attention.head_count_kv": 1,
        "llama.feed_forward_length": HIDDEN,
        "llama.context_length": context,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [1] * BYTES
        + [CONTROL] * len(special)
        + [USER_DEFINED] * len(pieces),
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.chat_template": template,
    }
    weights = _weights(len(words), follows, end)
    write_gguf(path, metadata, weights, kinds={"tokenizer.ggml.merges": ("array", "string")})
    return path


def _weights(words: int, follows: Mapping[int, int], end: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    embedding = random.choice([-1.0, 1.0], (words, WIDTH)).astype(np.float32)
    output = np.zeros((words, WIDTH), np.float32)
    for token in range(words):  # what is in no script ends the answer, more weakly
        following = follows.get(token)
        if following is None:
            output[end] += 0.02 * embedding[token]
        else:
            output[following] += embedding[token]
    lasts = set(follows.values()) - set(follows)
    for token in lasts:
        output[end] += embedding[token]
    one, zero = np.ones(WIDTH, np.float32), np.zeros
    shapes = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (HEAD, WIDTH),
        "attn_v": (HEAD, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (HIDDEN, WIDTH),
        "ffn_up": (HIDDEN, WIDTH),
        "ffn_down": (WIDTH, HIDDEN),
    }
    found: dict[str, Any] = {f"blk.0.{n}.weight": zero(s, np.float32) for n, s in shapes.items()}
    found |= {"blk.0.attn_norm.weight": one, "blk.0.ffn_norm.weight": one}
    return found | {
        "token_embd.weight": embedding,
        "output.weight": output,
        "output_norm.weight": one,
    }


def call_pieces(name: str, arguments: Any) -> list[str]:
    """A call in the form of Hermes, cut into words that come once."""
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    return [text[i : i + 5] for i in range(0, len(text), 5)]


__all__ = ["TEMPLATE", "call_pieces", "write_scripted"]
