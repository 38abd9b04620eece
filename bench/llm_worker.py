"""One side of a comparison of language models, in a process of its own.

    python llm_worker.py KIND MODEL THREADS CONTEXT [OPTION]

KIND is `ours` (OPTION `int8`: weights and tokens rounded to it), `llama` (llama.cpp through
llama-cpp-python, OPTION `flash` for its flash attention), or `transformers` (with torch.compile).
Reads one JSON request a line and answers each with one line: prefill and decode with the seconds
they took, memory with what the process holds.
KIND `first` writes a line as soon as the first token of an answer is there.

    python llm_worker.py quantise MODEL FORMAT OUT

writes a GGUF file anew with llama.cpp's own call. Only the side asked for is imported, so another
interpreter may run this file. Invariant: all sides are timed alike,
from ids in host memory to the greedily picked id in host memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

CHUNK = 512
PROMPT = "Write one sentence about the sea."


def resident() -> dict[str, int]:
    """Bytes of memory of this process: now, at most, of its own, of mapped files."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    names = {"resident": "VmRSS", "peak": "VmHWM", "own": "RssAnon", "files": "RssFile"}
    return {ours: int(lines[theirs].split()[0]) << 10 for ours, theirs in names.items()}


class Ours:
    """tilegrad, by its public interface."""

    def __init__(self, model: str, threads: int, context: int, option: str) -> None:
        import tilegrad

        self.llm = tilegrad.LLM(
            model, threads=threads, context=context, requests=1, quantization=option or None
        )

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        """Seconds of a prompt and its next token."""
        start = time.perf_counter()
        answer = self.llm.generate(tokens, max_tokens=1, temperature=0.0, ignore_end=True)
        return {"seconds": time.perf_counter() - start, "tokens": list(answer.tokens)}

    def decode(self, tokens: list[int], count: int) -> dict[str, Any]:
        """Seconds of `count` tokens after the first one."""
        start, made = 0.0, []
        for piece in self.llm.stream(
            tokens, max_tokens=count + 1, temperature=0.0, ignore_end=True
        ):
            start = start or time.perf_counter()
            made.append(piece.token)
        return {"seconds": time.perf_counter() - start, "tokens": made}


class LlamaCpp:
    """llama.cpp, by its C interface; weights are packed anew at load, or multiplied as stored."""

    def __init__(self, model: str, threads: int, context: int, option: str) -> None:
        import ctypes

        import llama_cpp as c

        self.c, self.array = c, ctypes.c_int32
        c.llama_backend_init()
        self.log = c.llama_log_callback(lambda *_: None)
        c.llama_log_set(self.log, None)
        given = c.llama_model_default_params()
        given.use_extra_bufts = "stored" not in option
        self.model = c.llama_model_load_from_file(model.encode(), given)
        made = c.llama_context_default_params()
        made.n_ctx, made.n_batch, made.n_ubatch = context, CHUNK, CHUNK
        made.n_threads = made.n_threads_batch = threads
        made.flash_attn_type = "flash" in option
        self.context = c.llama_init_from_model(self.model, made)
        self.vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))

    def clear(self) -> None:
        """Forget all tokens."""
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)

    def feed(self, tokens: list[int]) -> int:
        """The likeliest token after these."""
        import numpy as np

        for first in range(0, len(tokens), CHUNK):
            part = tokens[first : first + CHUNK]
            ids = (self.array * len(part))(*part)  # the batch only points to it
            batch = self.c.llama_batch_get_one(ids, len(part))
            if self.c.llama_decode(self.context, batch):
                sys.exit("llama_decode failed")
        logits = self.c.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        """Seconds of a prompt and its next token."""
        self.clear()
        start = time.perf_counter()
        found = self.feed(tokens)
        return {"seconds": time.perf_counter() - start, "tokens": [found]}

    def decode(self, tokens: list[int], count: int) -> dict[str, Any]:
        """Seconds of `count` tokens after the first one."""
        self.clear()
        made = [self.feed(tokens)]
        start = time.perf_counter()
        for _ in range(count):
            made.append(self.feed(made[-1:]))
        return {"seconds": time.perf_counter() - start, "tokens": made}


class Transformers:
    """Hugging Face transformers: the step over a static cache and the prompt, both compiled."""

    def __init__(self, model: str, threads: int, context: int, option: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        transformers.logging.set_verbosity_error()
        self.torch, self.transformers, self.most = torch, transformers, context
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16")
        self.model.eval()
        mode = option or None
        self.whole = torch.compile(
            lambda ids: self.model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].argmax(),
            mode=mode,
        )
        self.step = torch.compile(self._step, mode=mode)

    def _step(self, ids: Any, places: Any, cache: Any) -> Any:
        return (
            self.model(
                ids,
                position_ids=places[None],
                cache_position=places,
                past_key_values=cache,
                logits_to_keep=1,
            )
            .logits[:, -1]
            .argmax(-1, True)
        )

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        """Seconds of a prompt and its next token."""
        ids = self.torch.tensor([tokens])
        start = time.perf_counter()
        found = int(self.whole(ids))
        return {"seconds": time.perf_counter() - start, "tokens": [found]}

    def decode(self, tokens: list[int], count: int) -> dict[str, Any]:
        """Seconds of `count` tokens after the first one."""
        torch = self.torch
        cache = self.transformers.StaticCache(config=self.model.config, max_cache_len=self.most)
        out = self.model(
            torch.tensor([tokens]),
            past_key_values=cache,
            logits_to_keep=1,
            cache_position=torch.arange(len(tokens)),
        )
        ids = out.logits[:, -1].argmax(-1, True)
        places, made = torch.tensor([len(tokens)]), [int(ids)]
        start = time.perf_counter()
        for _ in range(count):
            ids = self.step(ids, places, cache)
            made.append(int(ids))
            places += 1
        return {"seconds": time.perf_counter() - start, "tokens": made}


SIDES: dict[str, Callable[..., Any]] = {
    "ours": Ours,
    "llama": LlamaCpp,
    "transformers": Transformers,
}


def quantise(model: str, name: str, out: str) -> None:
    """A GGUF file with its weights in another format, as llama.cpp rounds them."""
    import llama_cpp as c

    given = c.llama_model_quantize_default_params()
    given.ftype = getattr(c, f"LLAMA_FTYPE_MOSTLY_{name}")
    given.allow_requantize = True
    if c.llama_model_quantize(model.encode(), out.encode(), given):
        sys.exit("llama_model_quantize failed")


def first(model: str, threads: int, context: int) -> None:
    """Say when the first token of an answer is there, then end."""
    import tilegrad

    llm = tilegrad.LLM(model, threads=threads, context=context, requests=1)
    piece = next(llm.chat_stream(PROMPT, max_tokens=8, temperature=0.0))
    print(json.dumps({"token": piece.token}), flush=True)


def main() -> None:
    """Answer requests until there are no more."""
    if sys.argv[1] == "quantise":
        quantise(*sys.argv[2:5])
        return
    kind, model, threads, context = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if kind == "first":
        first(model, threads, context)
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    side = SIDES[kind](model, threads, context, (sys.argv[5:] or [""])[0])
    print(json.dumps(resident()), file=answers, flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        name = told.pop("do")
        found = resident() if name == "memory" else getattr(side, name)(**told)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
