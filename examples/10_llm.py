"""A language model: answers whole, in pieces, several at once; sampling; how likely a text is.

    python examples/10_llm.py [MODEL]

MODEL is smollm2 (98 MB, fetched by `tilegrad run smollm2 hello`), a .gguf file or a folder.
"""

import sys

import numpy as np

import tilegrad as tg
from tilegrad.exchange.fetch import kept_models

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
if model == "smollm2" and "smollm2" not in {kept.name for kept in kept_models()}:
    print("smollm2 is not here yet: `tilegrad run smollm2 hello` fetches it (98 MB)")
    sys.exit()

llm = tg.LLM(model, context=512, requests=4)
print(llm)

# An answer by the model's chat template, always the likeliest token.
answer = llm.chat("What is the capital of France?", max_tokens=32)
print(answer.text)
print(answer.finish, len(answer.tokens), f"{answer.timing.rate:.0f} tokens/s")

# The same as it is written; leaving the loop early ends the answer.
for piece in llm.chat_stream("Count from one to ten.", max_tokens=40, stop="5"):
    print(piece.text, end="", flush=True)
print()

# Going on from plain text, three at once, each with its own random numbers.
starts = ["The sea was", "In the morning", "A compiler is"]
for start, made in zip(starts, llm.generate(starts, max_tokens=12, temperature=0.8, seed=7)):
    print(start + made.text.replace("\n", " "))

# How likely the model finds a text: its perplexity.
ids = llm.tokenizer.encode("The quick brown fox jumps over the lazy dog.")
print("perplexity:", round(float(np.exp(-llm.score(ids).mean())), 1))
