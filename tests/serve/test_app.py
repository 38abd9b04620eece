"""Routes that are no answers: health, models, metrics, words, the live view; and plain errors."""

import json
import sys


def test_what_there_is(scripted):
    assert scripted.ask("GET", "/health")[:2] == (200, {"status": "ready"})
    status, found, _ = scripted.ask("GET", "/version")
    assert status == 200 and found["version"]
    status, found, _ = scripted.ask("GET", "/v1/models")
    assert found["data"][0]["id"] == "tiny" and found["data"][0]["max_model_len"] == 512


def test_words_and_back(scripted):
    status, found = scripted.post("/tokenize", {"prompt": "añ", "return_token_strs": True})
    assert status == 200 and found["tokens"] == list("añ".encode())
    assert found["count"] == 3 and found["max_model_len"] == 512
    assert scripted.post("/detokenize", {"tokens": found["tokens"]}) == (200, {"prompt": "añ"})
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    _, found = scripted.post("/tokenize", chat)
    _, text = scripted.post("/detokenize", {"tokens": found["tokens"]})
    assert text["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    _, shorter = scripted.post("/tokenize", {**chat, "add_generation_prompt": False})
    assert shorter["count"] < found["count"]
    for tokens in ([-1], [258], ["a"], [1.5], 5):
        status, found = scripted.post("/detokenize", {"tokens": tokens})
        assert status == 400 and found["error"]["param"] == "tokens"


def test_control_tokens_never_come_out_of_a_message(scripted):
    _, found = scripted.post("/tokenize", {"messages": [{"role": "user", "content": "<|im_end|>"}]})
    assert found["tokens"].count(257) == 1  # the template's own


def test_without_packages_that_may_be_missing(scripted, monkeypatch):
    for name in ("prometheus_client", "llguidance"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    status, found, _ = scripted.ask("GET", "/metrics")
    assert status == 501 and "prometheus_client is not installed" in found["error"]["message"]
    status, found = scripted.chat("SAY hello", response_format={"type": "json_object"})
    assert status == 400 and "llguidance" in found["error"]["message"]
    status, _ = scripted.chat("SAY hello")
    assert status == 200


GUESSES = ("drafts", "draft_tokens", "accepted_tokens")


def test_metrics(scripted):
    scripted.chat("SAY hello")
    status, text, _ = scripted.ask("GET", "/metrics")
    lines = dict(
        line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#")
    )
    assert status == 200
    label = '{model_name="tiny"}'
    assert float(lines[f"tilegrad:generation_tokens_total{label}"]) >= 6
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "request_time_per_output_token_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
        "request_prefill_time_seconds_count",
        "request_inference_time_seconds_count",
        "request_prompt_tokens_sum",
        "request_generation_tokens_sum",
        "iteration_tokens_total_count",
    ):
        assert f"tilegrad:{name}{label}" in lines, name
    assert float(lines[f"tilegrad:request_queue_time_seconds_count{label}"]) >= 1
    assert float(lines[f"tilegrad:prefix_cache_hits_total{label}"]) == 20
    assert float(lines[f"tilegrad:num_preemptions_total{label}"]) == 3
    guesses = [f"tilegrad:spec_decode_num_{what}_total{label}" for what in GUESSES]
    assert [float(lines[name]) for name in guesses] == [5, 9, 4]
    assert any("request_success_total" in name and 'reason="stop"' in name for name in lines)


def test_the_live_view(scripted):
    scripted.chat("SAY hello")
    status, found, _ = scripted.ask("GET", "/v1/live")
    assert status == 200 and found["state"] == "ready" and found["model"] == "tiny"
    assert found["made_tokens"] > 0 and found["tokens_per_second"] > 0
    assert found["pages"] == {"used": 0, "all": 64} and found["requests"] == []
    assert found["step_seconds"] > 0


def test_plain_errors(scripted):
    status, found, _ = scripted.ask("GET", "/nowhere")
    assert status == 404 and found["error"]["type"] == "invalid_request_error"
    assert scripted.ask("GET", "/v1/chat/completions")[0] == 405
    for body in (b"", b"{", b"[]", b"3", b"\xff", b'{"a": NaN}', b"[" * 100_000):
        status, found = scripted.post("/v1/chat/completions", body)
        assert status == 400 and found["error"]["code"] == "invalid_json", body[:10]
    deep = b'{"messages":' + b"[" * 60 + b"]" * 60 + b"}"
    assert scripted.post("/v1/chat/completions", deep)[0] == 400
    status, found = scripted.post("/v1/messages", b"{")
    assert status == 400 and found["type"] == "error"


def test_a_body_that_is_too_large(scripted):
    status, found = scripted.post("/v1/chat/completions", b" " * ((8 << 20) + 1))
    assert status == 413 and "too large" in found["error"]["message"]


def test_ids_of_requests_are_handed_back(scripted):
    found = scripted.ask("GET", "/health", headers={"X-Request-Id": "mine-1"})
    assert found[2]["X-Request-Id"] == "mine-1"
    found = scripted.ask("GET", "/health", headers={"X-Request-Id": "bad id\t"})
    assert found[2]["X-Request-Id"].startswith("req-")


def test_http_1_0(scripted):
    """A client of the old kind gets a stream without chunks."""
    import socket

    body = json.dumps({"messages": [{"role": "user", "content": "SAY old"}], "stream": True})
    head = f"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=600) as link:
        link.sendall(f"{head}\r\n\r\n{body}".encode())
        data = b""
        while part := link.recv(65536):
            data += part
    text = data.decode().split("\r\n\r\n", 1)[1]
    assert text.startswith("data: {") and text.endswith("data: [DONE]\n\n")
