"""Adapters behind a live server: models of their own names, mixed in one batch with the base."""

import concurrent.futures
import json

import pytest
from live_server import LONG, LiveServer
from lora_folder import ALL, write_adapter

from tilegrad.core.errors import UserError
from tilegrad.serve.model import ServedModel, read_tokenizer
from tilegrad.serve.server import Server
from tilegrad.serve.settings import Settings

NAMES = ("tiny", "first", "second", "third")


@pytest.fixture(scope="module")
def server(tiny_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {
        "first": str(write_adapter(folder / "1", 1, 4)),
        "second": str(write_adapter(folder / "2", 2, 8)),
        "third": str(write_adapter(folder / "3", 3, 2, targets=ALL[:1] + ALL[2:3])),
    }
    opening = {"requests": 4, "threads": 1, "prepare": False, "adapters": adapters}
    with LiveServer(tiny_path, opening={**opening, "determinism": "invariant"}) as found:
        yield found


def completion(server, model, number, **more):
    body = {
        "model": model,
        "prompt": [60 + number, 70, 80 + number],
        "max_tokens": 10,
        "temperature": 0.7,
        "seed": number,
        "logprobs": 2,
        "ignore_eos": True,
        **more,
    }
    status, found = server.post("/v1/completions", body)
    assert status == 200, found
    assert found["model"] == model
    return found["choices"][0]


def test_mixed_in_one_batch_each_answer_is_that_of_its_solo_run(server):
    """To the bit of the logprobs; base requests among them."""
    asked = [(NAMES[i % 4], i) for i in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(completion, server, *one) for one in asked]
        together = [one.result(LONG) for one in waiting]
    for (model, number), found in zip(asked, together):
        alone = completion(server, model, number)
        assert alone == found
    greedy = {n: completion(server, n, 0, temperature=0)["logprobs"]["tokens"] for n in NAMES}
    assert len({tuple(tokens) for tokens in greedy.values()}) == 4  # each has its own answer


def test_the_list_of_models(server):
    cards = server.ask("GET", "/v1/models")[1]["data"]
    assert [card["id"] for card in cards] == list(NAMES)
    assert [card["parent"] for card in cards] == [None, "tiny", "tiny", "tiny"]
    status, card, _ = server.ask("GET", "/v1/models/second")
    assert status == 200 and card["id"] == "second"
    assert "/" not in json.dumps(cards)  # no path of this machine


def test_a_name_that_there_is_not(server):
    status, found = server.post("/v1/completions", {"model": "fourth", "prompt": "a"})
    assert status == 404 and found["error"]["code"] == "model_not_found"
    assert found["error"]["param"] == "model" and "first" in found["error"]["message"]
    assert server.ask("GET", "/v1/models/fourth")[0] == 404


def test_every_route_says_whose_answer_it_is(server):
    said = {"max_tokens": 3, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    for name in NAMES[:2]:
        assert server.chat("hi", model=name, max_tokens=3)[1]["model"] == name
        assert server.post("/v1/messages", {"model": name, **said})[1]["model"] == name
        body = {"model": name, "input": "hi", "max_output_tokens": 3}
        assert server.post("/v1/responses", body)[1]["model"] == name
        chunks = server.events("/v1/chat/completions", {"model": name, **said})[:-1]
        assert {json.loads(chunk)["model"] for chunk in chunks} == {name}
        events = server.events("/v1/messages", {"model": name, **said})
        assert json.loads(events[0])["message"]["model"] == name


def test_pages_are_not_shared_between_adapters(server):
    prompt = "The same words for everybody, and enough of them to fill pages. " * 2

    def cached(model):
        body = {"model": model, "prompt": prompt, "max_tokens": 1}
        usage = server.post("/v1/completions", body)[1]["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(m) > 0 for m in ("tiny", "first", "first", "second", "tiny")] == [
        False,
        False,
        True,
        False,
        True,
    ]


def test_echoed_logprobs_are_those_of_the_adapter(server):
    more = {"echo": True, "max_tokens": 0, "temperature": 0}
    base, first = (completion(server, name, 5, **more)["logprobs"] for name in NAMES[:2])
    assert base["tokens"] == first["tokens"]
    assert base["token_logprobs"][1:] != first["token_logprobs"][1:]


def test_metrics_name_the_adapters(server):
    completion(server, "second", 1)
    text = server.ask("GET", "/metrics")[1].decode()
    line = next(t for t in text.splitlines() if t.startswith("tilegrad:lora_requests_info{"))
    assert 'max_lora="3"' in line and "waiting_lora_adapters" in line


def test_an_adapter_may_not_have_the_name_of_the_model(tiny_path):
    settings = Settings(str(tiny_path), "tiny", opening={"adapters": {"tiny": "/nowhere"}})
    with pytest.raises(UserError, match="name of the model"):
        Server(settings, ServedModel("tiny", read_tokenizer(str(tiny_path)), {}))
