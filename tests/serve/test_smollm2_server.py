"""The shipped model behind the server, with the official clients; skipped where it is absent."""

import concurrent.futures

import pytest
from live_server import LONG, LiveServer

from tilegrad.exchange.fetch import kept_models

openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed")
anthropic = pytest.importorskip("anthropic", reason="the client of Anthropic is not installed")
KEPT = {model.name: model.path for model in kept_models()}
pytestmark = pytest.mark.skipif("smollm2" not in KEPT, reason="smollm2 was not fetched")
QUESTION = [{"role": "user", "content": "What is the capital of France? One word."}]


@pytest.fixture(scope="module")
def server():
    with LiveServer(
        KEPT["smollm2"], opening={"requests": 4, "context": 512, "prepare": False}
    ) as found:
        yield found


def test_all_clients_get_one_answer(server):
    """Whole, streamed, by three routes and four at once: the same words."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=LONG, max_retries=0)
    claude = anthropic.Anthropic(base_url=server.url, api_key="x", timeout=LONG, max_retries=0)
    chat = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**chat)
    text = whole.choices[0].message.content
    assert "Paris" in text

    def streamed():
        chunks = client.chat.completions.create(**chat, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [one.result(LONG) for one in [pool.submit(streamed) for _ in range(4)]] == [text] * 4
    told = {"model": "tiny", "temperature": 0}
    assert client.responses.create(**told, input=QUESTION, max_output_tokens=12).output_text == text
    message = claude.messages.create(
        model="tiny", messages=QUESTION, max_tokens=12, extra_body={"temperature": 0}
    )
    assert message.content[0].text == text
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
