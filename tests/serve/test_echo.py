"""`echo` with logprobs: a prompt is scored before its answer begins, between steps of others."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal

import pytest
from live_server import LiveServer

from tilegrad.generate.llm import LLM

OPENING = {"requests": 3, "threads": 1, "prepare": False, "determinism": "invariant"}


@pytest.fixture(scope="module")
def server(tiny_path):
    with LiveServer(tiny_path, opening=OPENING) as server:
        yield server


def completion(server, prompt, **more):
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **more}
    status, found = server.post("/v1/completions", body)
    assert status == 200, found
    return found


def test_a_prompt_has_the_logprobs_that_its_tokens_were_made_with(server, tiny_path):
    """What was an answer is asked for as a prompt, and has the same bits."""
    made = completion(server, "a stone", max_tokens=9, logprobs=2)["choices"][0]["logprobs"]
    ids = [*b"a stone"]
    llm = LLM(tiny_path, requests=1, threads=1, determinism="invariant")
    ids += llm.generate(ids, max_tokens=9, temperature=0, ignore_end=True).tokens
    found = completion(server, ids, max_tokens=2, logprobs=2, echo=True)
    logprobs, text = found["choices"][0]["logprobs"], found["choices"][0]["text"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:16] == [float(x) for x in llm.score(ids)]
    assert logprobs["token_logprobs"][7:16] == made["token_logprobs"]
    assert logprobs["top_logprobs"][7:16] == made["top_logprobs"]
    assert {len(values) for values in logprobs.values()} == {18}
    assert found["usage"]["completion_tokens"] == 2
    for offset, token in zip(logprobs["text_offset"][:8], logprobs["tokens"]):
        assert text[offset : offset + len(token)] == token


def test_no_token_is_made(server):
    found = completion(server, ["a stone", "x"], max_tokens=0, logprobs=1, echo=True)
    for choice, prompt in zip(found["choices"], ("a stone", "x"), strict=True):
        assert choice["text"] == prompt and choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == list(prompt)
    assert found["usage"]["completion_tokens"] == 0 and found["usage"]["total_tokens"] == 8
    assert completion(server, "abc", max_tokens=0, echo=True)["choices"][0]["text"] == "abc"
    status, found = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 0})
    assert status == 400 and found["error"]["param"] == "max_tokens"


def test_a_stream_is_the_whole(server):
    body = {"prompt": ["hello", "sea"], "max_tokens": 4, "logprobs": 3, "echo": True}
    body |= {"temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    whole = completion(server, body["prompt"], max_tokens=4, logprobs=3, echo=True)
    events = server.events("/v1/completions", body)
    assert events.pop() == "[DONE]"
    assert json.loads(events[-1])["usage"]["completion_tokens"] == 8
    texts = ["", ""]
    numbers = [[], []]
    for event in map(json.loads, events):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            if choice["logprobs"]:
                numbers[choice["index"]] += choice["logprobs"]["token_logprobs"]
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["text"]
        assert numbers[choice["index"]] == choice["logprobs"]["token_logprobs"]


def test_more_of_them_than_there_are_slots(server):
    """They wait for a slot, beside others that run; each has what it has alone."""
    prompts = ["ab" * 150, "cd" * 5, "e", "fgh" * 40, "i j k", "lm" * 70]
    alone = [completion(server, p, max_tokens=3, logprobs=1, echo=True) for p in prompts]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        others = [pool.submit(completion, server, "x" * i, max_tokens=30) for i in range(1, 7)]
        many = [
            pool.submit(completion, server, p, max_tokens=3, logprobs=1, echo=True) for p in prompts
        ]
        for one, wanted in zip(many, alone, strict=True):
            assert one.result()["choices"] == wanted["choices"]
        assert all(one.result()["usage"]["completion_tokens"] == 30 for one in others)
    _, live, _ = server.ask("GET", "/v1/live")
    assert live["running"] == 0


def test_the_engine_dies_before_and_after(server):
    """Prompts are scored again where nobody has their logprobs."""
    body = {"max_tokens": 200, "logprobs": 1, "echo": True}
    wanted = completion(server, "a stone", **body)["choices"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        many = [pool.submit(completion, server, "a stone", **body) for _ in range(4)]
        concurrent.futures.wait(many, timeout=0.3)
        os.kill(server.server.engine._process.pid, signal.SIGKILL)
        assert all(one.result()["choices"] == wanted for one in many)
