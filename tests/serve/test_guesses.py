"""A live server that guesses: answers as without, streamed and scored, and its counts."""

from live_server import LiveServer

LABEL = '{model_name="tiny"}'
ASKED = {"prompt": "one two three one two three one", "max_tokens": 24, "temperature": 0}


def test_answers_and_counts(tiny_server, tiny_path):
    opening = {"requests": 2, "threads": 1, "prepare": False, "speculate": "ngram", "guesses": 2}
    with LiveServer(tiny_path, opening=opening) as server:
        for more in ({}, {"logprobs": 2}, {"temperature": 1.0, "seed": 5}, {"stop": ["e"]}):
            body = {"model": "tiny", **ASKED, **more}
            status, found = server.post("/v1/completions", body)
            assert status == 200, found
            _, wanted = tiny_server.post("/v1/completions", body)
            assert found["choices"][0]["text"] == wanted["choices"][0]["text"]
            assert found["usage"] == wanted["usage"]
        streamed = server.events("/v1/completions", {"model": "tiny", **ASKED})
        assert streamed[-1] == "[DONE]" and len(streamed) > 5
        text = server.ask("GET", "/metrics")[1].decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    drafts, guessed, true = (
        float(lines[f"tilegrad:spec_decode_num_{what}_total{LABEL}"])
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < drafts <= guessed and 0 <= true <= guessed
    plain = tiny_server.ask("GET", "/metrics")[1].decode()
    assert "spec_decode" not in plain
