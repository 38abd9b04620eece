"""The model that comes by name, where it was fetched: logprobs of float64, an answer, stops."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from lora_folder import ALL, Merged, log_softmax, pairs, write_adapter

from tilegrad.exchange.fetch import kept_models
from tilegrad.generate.llm import LLM

# Made by bench/llm_accuracy.py --freeze: the first tokens of the text that training ships.
KNOWN = json.loads(
    (Path(__file__).parents[1] / "models" / "data" / "smollm2_logprobs.json").read_text()
)
KEPT = {model.name: model.path for model in kept_models()}
pytestmark = pytest.mark.skipif("smollm2" not in KEPT, reason="smollm2 was not fetched")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(KEPT["smollm2"], context=512, requests=2)


def test_logprobs_are_those_of_float64(llm: LLM) -> None:
    ours, exact = llm.score(KNOWN["tokens"]).astype(np.float64), np.array(KNOWN["logprobs"])
    assert len(exact) == len(KNOWN["tokens"]) - 1 > 300
    assert np.abs(ours - exact).max() < 0.02
    ratio = math.exp(-ours.mean()) / math.exp(-exact.mean())
    assert abs(ratio - 1) < 0.0005


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["fp8", "int8"])
def test_logprobs_with_keys_and_values_of_8_bits(kept: str) -> None:
    """Perplexity beside float64's: within 1.5%, and no token is far off."""
    llm = LLM(KEPT["smollm2"], context=512, requests=1, kv_cache_dtype=kept)
    ours, exact = llm.score(KNOWN["tokens"]).astype(np.float64), np.array(KNOWN["logprobs"])
    assert abs(math.exp(exact.mean() - ours.mean()) - 1) < 0.015
    assert np.abs(ours - exact).mean() < 0.15


def test_an_answer(llm: LLM) -> None:
    answer = llm.chat("What is the capital of France?", max_tokens=24, logprobs=1)
    assert "Paris" in answer.text and answer.finish == "stop"
    assert "<|im_end|>" not in answer.text and min(answer.logprobs) > -5.0
    ids = [*llm.chat_ids("What is the capital of France?"), *answer.tokens]
    scores = llm.score(ids)[-len(answer.tokens) :]
    np.testing.assert_allclose(scores, answer.logprobs, atol=0.02)


def test_two_at_once_and_a_stop_string(llm: LLM) -> None:
    prompts = ["1, 2, 3, 4, 5, 6,", "Once upon a time"]
    alone = [llm.generate(p, max_tokens=12) for p in prompts]
    assert [a.tokens for a in llm.generate(prompts, max_tokens=12)] == [a.tokens for a in alone]
    stopped = llm.generate(prompts[0], max_tokens=30, stop=["0, 1"])
    assert stopped.text == " 7, 8, 9, 1" and stopped.finish == "stop"


@pytest.mark.slow
def test_an_adapter_over_quantised_weights(tmp_path: Path) -> None:
    """Against weights that NumPy unpacks and merges, in float64."""
    query, key, feed = (576, 576), (192, 576), (1536, 576)
    sizes = dict(zip(ALL, (query, key, key, query, feed, feed, feed[::-1])))
    tensors = pairs(7, 8, ALL, sizes, 30, 0.03)
    folder = write_adapter(tmp_path / "a", 0, 8, tensors)
    llm = LLM(KEPT["smollm2"], context=64, requests=1, adapters={"a": folder})
    tokens = KNOWN["tokens"][:16]
    logits = Merged(KEPT["smollm2"], tensors, 8 / 8, 64).logits(tokens)
    exact = log_softmax(logits)[np.arange(15), tokens[1:]]
    assert np.abs(llm.score(tokens, "a") - exact).max() < 0.03
    assert np.abs(llm.score(tokens) - exact).max() > 0.3
    assert np.abs(llm.score(tokens) - KNOWN["logprobs"][:15]).max() < 0.02
