"""Chat completions over HTTP, with scripted tokens."""

import json

import pytest

from tilegrad.generate.request import Produced


def chat(text, **more):
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


def test_an_answer_in_one_piece(scripted):
    status, found = scripted.chat("SAY hello world")
    assert status == 200
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "hello world"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    assert found["object"] == "chat.completion" and found["model"] == "tiny"
    usage = found["usage"]
    assert usage["completion_tokens"] == len("hello world") + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.skipif(
    "cached" not in Produced.__dataclass_fields__, reason="the engine has no prefix cache"
)
def test_cached_tokens_are_told(scripted):
    _, found = scripted.chat("CACHED", max_tokens=3)
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
    _, found = scripted.chat("SAY hi")
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_stream_is_the_same_text(scripted):
    body = chat("SAY wörld ☃ \U0001f600!", stream_options={"include_usage": True})
    *chunks, last = scripted.events("/v1/chat/completions", body)
    assert last == "[DONE]"
    chunks = [json.loads(c) for c in chunks]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == "wörld ☃ \U0001f600!"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(text.encode()) + 1


def test_several_choices(scripted):
    status, found = scripted.chat("SAY abc", n=3)
    assert status == 200
    assert [c["index"] for c in found["choices"]] == [0, 1, 2]
    assert [c["message"]["content"] for c in found["choices"]] == ["abc"] * 3
    assert found["usage"]["completion_tokens"] == 12
    events = scripted.events("/v1/chat/completions", chat("SAY abc", n=2))
    texts = ["", ""]
    for data in events[:-1]:
        for choice in json.loads(data)["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["abc", "abc"]


def test_stop_strings_and_ids(scripted):
    _, found = scripted.chat("SAY one two three", stop=["two", "zzz"])
    choice = found["choices"][0]
    assert choice["message"]["content"] == "one " and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "two"
    _, found = scripted.chat("SAY one two", stop="two", include_stop_str_in_output=True)
    assert found["choices"][0]["message"]["content"] == "one two"
    _, found = scripted.chat("SAY one two", stop_token_ids=[ord("w")])
    assert found["choices"][0]["message"]["content"] == "one t"
    assert found["choices"][0]["stop_reason"] == ord("w")
    text = "".join(
        json.loads(d)["choices"][0]["delta"].get("content", "")
        for d in scripted.events("/v1/chat/completions", chat("SAY one two", stop="two"))[:-1]
    )
    assert text == "one "


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_lengths(scripted, name):
    _, found = scripted.chat("go", **{name: 5})
    assert found["choices"][0]["message"]["content"] == "abcde"
    assert found["choices"][0]["finish_reason"] == "length"


def test_without_a_length_the_context_is_filled(scripted):
    _, found = scripted.chat("go")
    assert found["usage"]["total_tokens"] == 512


def test_logprobs(scripted):
    _, found = scripted.chat("SAY ab", logprobs=True, top_logprobs=2)
    content = found["choices"][0]["logprobs"]["content"]
    assert [c["token"] for c in content] == ["a", "b"]
    assert content[0]["logprob"] == -0.5 and content[0]["bytes"] == [97]
    assert [t["token"] for t in content[0]["top_logprobs"]] == ["a", "b"]
    events = scripted.events("/v1/chat/completions", chat("SAY ab", logprobs=True))
    shown = [json.loads(d)["choices"][0]["logprobs"] for d in events[:-1]]
    tokens = [t["token"] for s in shown if s for t in s["content"]]
    assert tokens == ["a", "b"]
    assert all(t["top_logprobs"] == [] for s in shown if s for t in s["content"])


def test_content_parts(scripted):
    parts = [{"type": "text", "text": "SAY "}, {"type": "text", "text": "hi"}]
    status, found = scripted.chat(parts)
    assert status == 200 and found["choices"][0]["message"]["content"] == "hi"
    image = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
    status, found = scripted.chat(image)
    assert status == 400
    assert found["error"]["param"] == "messages[0].content[0].type"
    assert "text alone" in found["error"]["message"]


@pytest.mark.parametrize(
    "more, param",
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"logit_bias": {"900": 1}}, "logit_bias"),
        ({"logit_bias": {"9": "x"}}, "logit_bias"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"seed": 1 << 64}, "seed"),
        ({"model": "gpt-17"}, "model"),
        ({"chat_template": "{{ 7*7 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"x": "y"}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ],
)
def test_wrong_values_are_refused_by_name(scripted, more, param):
    status, found = scripted.chat("SAY hi", **more)
    assert status == (404 if param == "model" else 400), found
    assert found["error"]["param"] == param
    assert found["error"]["type"] == "invalid_request_error"


def test_unknown_fields_and_nulls_are_ignored(scripted):
    status, found = scripted.chat("SAY hi", user="me", store=False, temperature=None, x_new=[1])
    assert status == 200 and found["choices"][0]["message"]["content"] == "hi"


def test_a_prompt_that_is_too_long(scripted):
    for count in (600, 100_000):
        status, found = scripted.chat("x" * count)
        assert status == 400 and found["error"]["code"] == "context_length_exceeded"
