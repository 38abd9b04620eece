"""The official clients of OpenAI and Anthropic, against a live server with scripted tokens."""

import pytest
from live_server import LONG

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed")
anthropic = pytest.importorskip("anthropic", reason="the client of Anthropic is not installed")


@pytest.fixture(scope="module")
def client(scripted):
    with openai.OpenAI(
        base_url=f"{scripted.url}/v1", api_key="none", timeout=LONG, max_retries=0
    ) as found:
        yield found


@pytest.fixture(scope="module")
def claude(scripted):
    with anthropic.Anthropic(
        base_url=scripted.url, api_key="none", timeout=LONG, max_retries=0
    ) as found:
        yield found


def said(text):
    return [{"role": "user", "content": text}]


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client):
    found = client.chat.completions.create(model="tiny", messages=said("SAY hello"), seed=1)
    assert found.choices[0].message.content == "hello"
    assert found.usage.completion_tokens == 6
    assert found.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream_the_way_frameworks_use_it(client):
    """As LangChain does: a base URL, a stream with usage, deltas added up."""
    text, usage, finish = "", None, None
    for chunk in client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "be brief"}, *said("SAY a b c")],
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.7,
    ):
        if chunk.usage:
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert (text, finish) == ("a b c", "stop")
    assert usage.completion_tokens == 6


def test_chat_with_everything(client):
    found = client.chat.completions.create(
        model="tiny",
        messages=said("SAY xyz"),
        max_completion_tokens=50,
        n=2,
        logprobs=True,
        top_logprobs=3,
        logit_bias={"5": -1},
        presence_penalty=0.1,
        frequency_penalty=0.1,
        stop=["never"],
        top_p=0.9,
        user="someone",
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1},
    )
    assert [c.message.content for c in found.choices] == ["xyz", "xyz"]
    assert found.choices[0].logprobs.content[0].top_logprobs[2].logprob == -2.5


def test_completions(client):
    found = client.completions.create(model="tiny", prompt=["SAY one", "SAY two"], n=2)
    assert [c.text for c in found.choices] == ["one", "one", "two", "two"]
    found = client.completions.create(model="tiny", prompt=list(b"SAY ids"), echo=True)
    assert found.choices[0].text == "SAY idsids"
    found = client.completions.create(model="tiny", prompt="count", max_tokens=3, logprobs=2)
    assert found.choices[0].text == "abc" and found.choices[0].finish_reason == "length"
    assert found.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert found.choices[0].logprobs.text_offset == [0, 1, 2]
    assert found.choices[0].logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}


def test_completions_stream(client):
    texts = ["", ""]
    stream = client.completions.create(
        model="tiny", prompt=["SAY one", "SAY two"], stream=True, echo=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["SAY oneone", "SAY twotwo"]


def test_completions_refuse(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt="x", suffix="y")
    assert error.value.param == "suffix"
    for prompt in ([], [[]], [[999999]], [1.5], [None], {}, ""):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model="tiny", prompt=prompt)
        assert error.value.param == "prompt"


def test_responses(client):
    found = client.responses.create(model="tiny", input="SAY hello", instructions="be kind")
    assert found.output_text == "hello" and found.status == "completed"
    assert found.usage.output_tokens == 6
    found = client.responses.create(
        model="tiny",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "count"}]},
        ],
        max_output_tokens=4,
    )
    assert found.output_text == "abcd" and found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="tiny", input="x", previous_response_id="resp_1")
    assert error.value.param == "previous_response_id"


def test_responses_stream(client):
    kinds, text = [], ""
    with client.responses.stream(model="tiny", input="SAY hello") as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
        final = stream.get_final_response()
    assert text == "hello" == final.output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert "response.content_part.done" in kinds and "response.output_item.added" in kinds


def test_messages(claude):
    found = claude.messages.create(
        model="tiny", max_tokens=100, system="be kind", messages=said("SAY hello")
    )
    assert found.content[0].text == "hello" and found.stop_reason == "end_turn"
    assert found.usage.output_tokens == 6
    found = claude.messages.create(model="tiny", max_tokens=3, messages=said("count"))
    assert found.content[0].text == "abc" and found.stop_reason == "max_tokens"
    found = claude.messages.create(
        model="tiny", max_tokens=30, messages=said("count"), stop_sequences=["ef"]
    )
    assert found.content[0].text == "abcd"
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "ef")


def test_messages_stream(claude):
    with claude.messages.stream(
        model="tiny", max_tokens=100, messages=said("SAY hello there")
    ) as stream:
        assert "".join(stream.text_stream) == "hello there"
        final = stream.get_final_message()
    assert final.content[0].text == "hello there" and final.stop_reason == "end_turn"
    assert final.usage.output_tokens == 12


def test_messages_count_and_refuse(claude):
    found = claude.messages.count_tokens(model="tiny", messages=said("four"))
    assert found.input_tokens == len("user\nfour\nassistant\n") + 3
    with pytest.raises(anthropic.BadRequestError) as error:
        claude.messages.create(model="tiny", max_tokens=5, messages=[])
    assert error.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="none", max_tokens=5, messages=said("x"))


def test_errors_have_their_types(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-99", messages=said("x"))
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=said("x"), temperature=9)
    assert wrong.value.param == "temperature"


def test_an_error_in_a_stream(client):
    stream = client.chat.completions.create(model="tiny", messages=said("NAN"), stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="not finite"):
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "ab"
