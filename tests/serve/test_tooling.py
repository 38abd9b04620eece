"""Calls of tools and reasoning over HTTP, with the official clients and scripted tokens; answers
that must have a form, with a tiny real model."""

import json

import pytest
from live_server import LONG, LiveServer, scripted_server
from tiny_model import write_file

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed")
anthropic = pytest.importorskip("anthropic", reason="the client of Anthropic is not installed")
pytest.importorskip("llguidance", reason="constraints need llguidance")

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# </think> #}"
)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
THOUGHT = f"<think>hmm</think>I look.{CALL}"


@pytest.fixture(scope="module")
def tool_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "tools.gguf"
    return write_file(path, context=512, template=TEMPLATE)


@pytest.fixture(scope="module")
def server(tool_path):
    with scripted_server(tool_path, opening={"context": 2048}) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=LONG, max_retries=0) as c:
        yield c


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="x", timeout=LONG, max_retries=0) as c:
        yield c


def said(text):
    return [{"role": "user", "content": f"SAY {text}"}]


def test_a_chat_that_calls(client):
    found = client.chat.completions.create(
        model="tiny", messages=said(THOUGHT), tools=[TOOL], max_tokens=200
    )
    (choice,) = found.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert choice.message.reasoning_content == "hmm"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {
        "city": "Oslo"
    }
    again = [
        *said("ok"),
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        *said("it rains"),
    ]
    found = client.chat.completions.create(model="tiny", messages=again, tools=[TOOL])
    assert found.choices[0].message.content == "it rains"
    assert found.choices[0].finish_reason == "stop"


def test_a_streamed_chat_that_calls(client):
    text = thought = arguments = ""
    names, ids = [], []
    stream = client.chat.completions.create(
        model="tiny", messages=said(THOUGHT + CALL), tools=[TOOL], stream=True
    )
    for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        thought += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id:
                ids.append(call.id)
                names.append(call.function.name)
            arguments += call.function.arguments or ""
    assert choice.finish_reason == "tool_calls"
    assert (text, thought) == ("I look.", "hmm")
    assert names == ["weather"] * 2 and len(set(ids)) == 2
    assert arguments == '{"city": "Oslo"}' * 2


def test_a_response_that_calls(client):
    tool = {"type": "function", **TOOL["function"]}
    found = client.responses.create(model="tiny", input=said(THOUGHT), tools=[tool])
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
    assert found.output[2].arguments == '{"city": "Oslo"}' and found.output_text == "I look."
    with client.responses.stream(model="tiny", input=said(THOUGHT), tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[2].arguments == '{"city": "Oslo"}'
    assert kinds.count("response.output_item.added") == 3
    assert kinds.count("response.output_item.done") == 3
    assert "response.function_call_arguments.delta" in kinds
    call, out = found.output[2], {"type": "function_call_output", "output": "rain"}
    found = client.responses.create(
        model="tiny",
        input=[*said("x"), call.model_dump(), {**out, "call_id": call.call_id}, *said("wet")],
        tools=[tool],
    )
    assert found.output_text == "wet"


def test_a_message_that_calls(claude):
    tool = {"name": "weather", "input_schema": CITY}
    found = claude.messages.create(
        model="tiny", max_tokens=200, messages=said(THOUGHT), tools=[tool]
    )
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use"]
    assert found.stop_reason == "tool_use" and found.content[2].input == {"city": "Oslo"}
    with claude.messages.stream(
        model="tiny", max_tokens=200, messages=said(THOUGHT), tools=[tool]
    ) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"city": "Oslo"} and final.content[1].text == "I look."
    result = {"type": "tool_result", "tool_use_id": final.content[2].id, "content": "rain"}
    answer = claude.messages.create(
        model="tiny",
        max_tokens=20,
        messages=[
            *said("x"),
            {"role": "assistant", "content": [b.model_dump() for b in final.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "SAY wet"}]},
        ],
        tools=[tool],
    )
    assert answer.content[0].text == "wet"


def test_choices_become_constraints(server, monkeypatch):
    seen = []
    add = server.server.engine.add
    monkeypatch.setattr(server.server.engine, "add", lambda one: (seen.append(one.spec), add(one)))
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("none", "auto", "required", named):
        status, found = server.chat("SAY hi", tools=[TOOL], tool_choice=choice)
        assert status == 200, found
    kinds = [spec.get("constraint", [None])[0] for spec in seen]
    assert kinds == [None, None, "ebnf", "ebnf"]


@pytest.mark.parametrize(
    "more, param",
    [
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL] * 200}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_what_is_refused(server, more, param):
    status, found = server.chat("SAY hi", **more)
    assert status == 400 and found["error"]["param"] == param, found


def test_models_without_tools_refuse_them(scripted):
    status, found = scripted.chat("SAY hi", tools=[TOOL])
    assert status == 400 and found["error"]["param"] == "tools"


def test_answers_that_must_have_a_form(tool_path):
    """A tiny model of random weights cannot but keep to the grammar."""
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with LiveServer(tool_path, opening={"requests": 2, "threads": 1, "prepare": False}) as server:
        status, found = server.chat("Is it?", response_format=form, temperature=0, max_tokens=200)
        assert status == 200
        assert isinstance(json.loads(found["choices"][0]["message"]["content"])["yes"], bool)
        status, found = server.chat("Which?", guided_choice=["left", "right"], temperature=0)
        assert found["choices"][0]["message"]["content"] in ("left", "right")
        status, found = server.chat("Go", tools=[TOOL], tool_choice="required", temperature=0)
        assert status == 200, found
        (call,) = found["choices"][0]["message"]["tool_calls"][:1]
        assert len(json.loads(call["function"]["arguments"])["city"]) <= 5
