"""Requests that nobody should send, at a server that must stay up: python bench/serve_fuzz.py URL

Bodies are good ones with fields taken out, doubled, given other types and extreme values, cut off
or filled with noise. What counts: no status of 500 and above but 503, no connection that hangs,
and a good request that is answered at the end. Writes a JSON object of the statuses.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import random
import time
import urllib.parse
from typing import Any

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "SAY hi"}], "max_tokens": 3}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "SAY hi", "max_tokens": 3},
    "/v1/responses": {"model": "tiny", "input": "SAY hi", "max_output_tokens": 3},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
FIELDS = (
    *("model", "messages", "prompt", "input", "tokens", "max_tokens", "max_completion_tokens"),
    *("temperature", "top_p", "top_k", "min_p", "n", "best_of", "stop", "stop_token_ids", "seed"),
    *("logit_bias", "logprobs", "top_logprobs", "stream", "stream_options", "echo", "suffix"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("response_format", "guided_choice", "guided_regex", "structured_outputs", "tools"),
    *("tool_choice", "chat_template", "chat_template_kwargs", "priority", "user", "system"),
    *("instructions", "text", "metadata", "stop_sequences", "max_output_tokens", "role"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, 1e308, -1e308, 1 << 31, 1 << 63, -(1 << 63), 1 << 70),
    *("", "x", "tiny", "\x00", "\ud800", "é☃\U0001f600", "<|im_end|>", "x" * 2000, "../../etc"),
    *([], [[]], [None], [1], ["a"], [-1], [1 << 40], [{}], {}, {"": ""}, {"a": {"b": [1]}}),
    *({"type": "json_object"}, {"type": "json_schema"}, {"type": "x"}, {"5": 1}, {"x": "y"}),
    *({"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}, "(", "[a-"),
    *([{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": 5}]),
    *([{"role": "tool", "content": "x"}], [{"role": "assistant", "tool_calls": [{}]}]),
    *([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}],),
)


def body_of(random_: random.Random) -> tuple[str, bytes]:
    """A path and a body."""
    path = random_.choice(list(GOOD))
    body: Any = json.loads(json.dumps(GOOD[path]))
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        body[random_.choice(FIELDS)] = random_.choice(VALUES)
    if random_.random() < 0.1:
        body.pop(random_.choice(list(body)), None)
    if random_.random() < 0.1 and isinstance(body.get("messages"), list):
        body["messages"] = body["messages"] * random_.choice((2, 50))
    data = json.dumps(body).encode()
    chance = random_.random()
    if chance < 0.05:
        return path, data[: random_.randrange(len(data))]
    if chance < 0.1:
        noisy = bytearray(data)
        for _ in range(3):
            noisy[random_.randrange(len(noisy))] = random_.randrange(256)
        return path, bytes(noisy)
    if chance < 0.12:
        return path, random_.randbytes(random_.randrange(200))
    return path, data


def fuzz(host: str, port: int, count: int, seed: int, timeout: float = 60.0) -> dict[str, Any]:
    """Send so many; how often each status came, and what was wrong."""
    random_ = random.Random(seed)
    statuses: collections.Counter[int] = collections.Counter()
    wrong: list[Any] = []
    begun = time.perf_counter()
    link = http.client.HTTPConnection(host, port, timeout=timeout)
    for _ in range(count):
        path, data = body_of(random_)
        try:
            link.request("POST", path, data, {"Content-Type": "application/json"})
            response = link.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            wrong.append([path, data[:200].decode("latin-1"), repr(error)])
            link.close()
            continue
        statuses[response.status] += 1
        if response.status >= 500 and response.status != 503:
            wrong.append([path, data[:200].decode("latin-1"), text[:200].decode("latin-1")])
        if response.status >= 400:
            error = json.loads(text)["error"]
            assert error["message"] and "Traceback" not in error["message"]
    link.request("POST", "/v1/chat/completions", json.dumps(CHAT))
    last = link.getresponse().status
    link.close()
    seconds = time.perf_counter() - begun
    return {
        "requests": count,
        "seed": seed,
        "seconds": round(seconds, 2),
        "statuses": {str(s): n for s, n in sorted(statuses.items())},
        "wrong": wrong,
        "good_request_at_the_end": last,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    url = urllib.parse.urlsplit(given.url)
    found = fuzz(url.hostname or "127.0.0.1", url.port or 8000, given.count, given.seed)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
