"""The load generator: scripts, times as a scripted clock has them, errors, numbers by hand."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is missing: pip install 'tilegrad[serve]'")

from fake_endpoint import Clock, FakeEndpoint
from live_server import LONG
from typer.testing import CliRunner

from tilegrad.cli import main
from tilegrad.core.errors import UserError
from tilegrad.core.svg import nice
from tilegrad.serve.load.client import Client, Endpoint, new_session
from tilegrad.serve.load.events import Events
from tilegrad.serve.load.load_run import Load, Result, model_of, run_load
from tilegrad.serve.load.plot import plotted
from tilegrad.serve.load.reply import Reply
from tilegrad.serve.load.script import (
    WORDS,
    Call,
    Lengths,
    Prefixes,
    as_text,
    at_rate,
    drawn,
    mini_sglang,
    of_file,
)
from tilegrad.serve.load.summary import limits_of, summed_up

RUNNER = CliRunner()

# ---- scripts ------------------------------------------------------------------------------------


def test_the_known_script_has_its_published_totals() -> None:
    calls = mini_sglang()
    assert len(calls) == 256
    assert sum(len(call.prompt) for call in calls) == 142_827
    assert sum(call.max_tokens for call in calls) == 133_966
    lengths = [n for call in calls for n in (len(call.prompt), call.max_tokens)]
    assert min(lengths) >= 100 and max(lengths) <= 1024
    assert mini_sglang() == calls


def test_random_asks() -> None:
    calls = drawn(6, Lengths.of("3-9"), Lengths.of("5"), prefixes=Prefixes(4, 2), vocabulary=50)
    assert all(7 <= len(call.prompt) <= 13 and call.max_tokens == 5 for call in calls)
    starts = [call.prompt[:4] for call in calls]
    assert starts[0] == starts[2] == starts[4] != starts[1] == starts[3]
    assert max(i for call in calls for i in call.prompt) < 50
    assert drawn(6, Lengths.of("3-9"), Lengths.of("5"), seed=1) != calls
    words = as_text(calls)
    assert words[0].prompt.split()[:4] == words[2].prompt.split()[:4]
    assert len(words[0].prompt.split()) == len(calls[0].prompt) and len(set(WORDS)) > 100


@pytest.mark.parametrize("text", ["", "0", "5-2", "a", "1-2-3", "-5"])
def test_bad_lengths(text: str) -> None:
    with pytest.raises(UserError, match="bad lengths"):
        Lengths.of(text)


def test_moments() -> None:
    calls = [Call((1,), 1)] * 2000
    assert {call.at for call in at_rate(calls, float("inf"))} == {0.0}
    even = [call.at for call in at_rate(calls, 4.0, poisson=False)]
    assert even[:3] == [0.0, 0.25, 0.5]
    chance = [call.at for call in at_rate(calls, 4.0, seed=3)]
    assert chance == [call.at for call in at_rate(calls, 4.0, seed=3)]
    gaps = [b - a for a, b in itertools.pairwise(chance)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.25, rel=0.1) and spread == pytest.approx(mean, rel=0.1)


def test_files_of_conversations(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "x" * 40}]
    whole = tmp_path / "a.json"
    whole.write_text(json.dumps([{"conversations": turns}, {"conversations": []}, 5]))
    assert of_file(whole, 2, None) == [Call("Why?", 10)] * 2
    assert of_file(whole, 1, Lengths(3, 3)) == [Call("Why?", 3)]
    lines = tmp_path / "a.jsonl"
    other = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "y"}]
    lines.write_text(json.dumps({"messages": other}) + "\n")
    assert of_file(lines, 1, None) == [Call("So?", 1)]
    for text in ("[]", "{", '{"conversations": 3}'):
        whole.write_text(text)
        with pytest.raises(UserError):
            of_file(whole, 1, None)
    with pytest.raises(UserError, match="cannot be read"):
        of_file(tmp_path / "none", 1, None)


# ---- streams ------------------------------------------------------------------------------------


def test_events_survive_any_cut() -> None:
    text = b'data: {"a":1}\n\n: ping\n\ndata: one\ndata: two\r\n\r\ndata:[DONE]\n\n'
    for size in range(1, len(text) + 1):
        events = Events()
        found = [e for i in range(0, len(text), size) for e in events.add(text[i : i + size])]
        assert found == [b'{"a":1}', b"one\ntwo", b"[DONE]"], size


def sent(fake: FakeEndpoint, call: Call = Call((1, 2), 3), **choices: Any) -> Reply:
    """The Reply that the client makes of a fake's answer."""

    async def work() -> Reply:
        async with fake.running() as url:
            where = Endpoint(url, "fake", **choices)
            async with new_session(where) as session:
                return await Client(session, where, fake.clock or Clock()).send(call)

    return asyncio.run(asyncio.wait_for(work(), LONG))


@pytest.mark.parametrize("chat", [False, True])
def test_times_are_those_of_the_clock(chat: bool) -> None:
    fake = FakeEndpoint([0.5, 0.125, 0.25], Clock())
    reply = sent(fake, Call("hello", 3), chat=chat, api_key="secret")
    assert not reply.error and reply.status == 200
    assert reply.first == 0.5 and reply.gaps == [0.125, 0.25] and reply.whole == 0.875
    assert reply.per_token == 0.1875 and reply.prompt_tokens == 7 and reply.answer_tokens == 3
    body = fake.bodies[0]
    assert body["stream"] and body["ignore_eos"] and body["max_tokens"] == 3
    assert ("messages" in body) is chat and fake.keys == ["Bearer secret"]


def test_tokens_are_counted_by_usage_where_there_is_some() -> None:
    fake = FakeEndpoint([1.0, 1.0], Clock())
    fake.per_part = 4
    reply = sent(fake)
    assert reply.answer_tokens == 8 and reply.counted and reply.per_token == pytest.approx(1 / 7)
    fake = FakeEndpoint([1.0, 1.0], Clock())
    fake.usage = False
    reply = sent(fake)
    assert reply.answer_tokens == 2 and not reply.counted


def test_a_long_event_is_read_whole() -> None:
    fake = FakeEndpoint([0.0])
    fake.gaps = [0.0]

    async def long(response: Any, event: dict[str, Any]) -> None:
        event["padding"] = "x" * 400_000
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    fake._put = long  # type: ignore[method-assign]
    reply = sent(fake)
    assert not reply.error and len(reply.parts) == 1


@pytest.mark.parametrize(
    "failure, said",
    [
        (500, "HTTP 500: refused with 500"),
        (429, "HTTP 429"),
        ("event", "broke"),
        ("torn", "ended before [DONE]"),
    ],
)
def test_errors_are_in_the_reply(failure: Any, said: str) -> None:
    fake = FakeEndpoint([0.0, 0.0])
    fake.fails = {0: failure}
    assert said in sent(fake).error


def test_an_endpoint_that_is_not_there() -> None:
    where = Endpoint("http://127.0.0.1:9", "x", timeout=60)

    async def work() -> Reply:
        async with new_session(where) as session:
            return await Client(session, where).send(Call("a", 1))

    assert "Connect" in asyncio.run(work()).error
    with pytest.raises(UserError, match="cannot be reached"):
        asyncio.run(model_of("http://127.0.0.1:9"))


# ---- loads --------------------------------------------------------------------------------------


def test_asks_are_sent_when_they_are_due() -> None:
    clock, begun = Clock(), []

    async def send(call: Call) -> Reply:
        begun.append((call.max_tokens, clock.time))
        return Reply(clock.time, 1, [clock.time], clock.time, answer_tokens=1)

    calls = [Call("c", 3, 2.0), Call("a", 1, 0.0), Call("b", 2, 0.5)]
    result = asyncio.run(Load(send, now=clock, sleep=clock.sleep).run(calls))
    assert begun == [(1, 0.0), (2, 0.5), (3, 2.0)]
    assert result.seconds == 2.0 and result.late == 0.0


def test_so_many_at_once_at_most() -> None:
    running, most, told = 0, 0, []

    async def send(call: Call) -> Reply:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return Reply(0.0, 1, [1.0], 1.0)

    load = Load(send, 3, told=lambda done, total: told.append((done, total)))
    result = asyncio.run(load.run([Call("a", 1)] * 10))
    assert most == result.most_at_once == 3 and len(result.replies) == 10
    assert told[-1] == (10, 10)


def test_a_load_that_is_cancelled_leaves_nothing_behind() -> None:
    ended = []

    async def send(call: Call) -> Reply:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(call)
        raise AssertionError

    async def work() -> None:
        task = asyncio.create_task(Load(send).run([Call("a", 1)] * 4))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert len(ended) == 4


def test_a_whole_load() -> None:
    fake = FakeEndpoint([0.0, 0.0, 0.0])
    fake.fails = {5: 503}

    async def work() -> Result:
        async with fake.running() as url:
            where = Endpoint(url, await model_of(url))
            calls = drawn(8, Lengths(4, 4), Lengths(3, 3))
            return await run_load(where, calls, concurrency=1, warm_up=2)

    result = asyncio.run(asyncio.wait_for(work(), LONG))
    assert len(fake.bodies) == 1 + 2 + 8, "one tries ids, two warm up"
    assert [bool(reply.error) for reply in result.replies] == [False] * 2 + [True] + [False] * 5
    assert not result.notes and fake.bodies[-1]["prompt"][0] < 10_000


def test_words_where_ids_are_refused() -> None:
    fake = FakeEndpoint([0.0])
    fake.takes_ids = False

    async def work() -> Result:
        async with fake.running() as url:
            return await run_load(Endpoint(url, "m"), drawn(2, Lengths(4, 4), Lengths(1, 1)))

    result = asyncio.run(asyncio.wait_for(work(), LONG))
    assert not any(reply.error for reply in result.replies)
    assert "no ids here" in result.notes[0] and len(fake.bodies[-1]["prompt"].split()) == 4


# ---- numbers ------------------------------------------------------------------------------------


def replies() -> list[Reply]:
    """Three that ended well, one that did not."""
    return [
        Reply(0.0, 3, [1.0, 1.5, 2.5], 2.5, 10, 3, 4, True, 200),
        Reply(1.0, 5, [1.5, 2.0], 2.0, 20, 5, 0, True, 200),  # two parts brought five tokens
        Reply(2.0, 1, [4.0], 4.0, 30, 1, 0, True, 200),
        Reply(0.5, 9, [1.0], 9.0, 0, 0, 0, False, 200, "broke"),
    ]


def test_numbers_by_hand() -> None:
    s = summed_up(Result(replies(), 4.0, 3), {"ttft": 1.0, "tpot": 0.5})
    assert (s["requests"], s["completed"], s["failed"]) == (4, 3, 1)
    assert (s["prompt_tokens"], s["answer_tokens"], s["cached_tokens"]) == (60, 9, 4)
    assert s["requests_per_second"] == 0.75 and s["answer_tokens_per_second"] == 2.25
    assert s["total_tokens_per_second"] == 17.25 and s["short_answers"] == 0
    # TTFT 1, 0.5, 2 s; TPOT (2.5-1)/2 and (1-0.5)/4; ITL 0.5, 1, 0.5; E2E 2.5, 1, 2.
    assert s["ttft_ms"] == pytest.approx({"mean": 3500 / 3, "p50": 1000, "p90": 1800, "p99": 1980})
    assert s["tpot_ms"]["mean"] == pytest.approx(437.5) and s["tpot_ms"]["p50"] == 437.5
    assert s["itl_ms"]["p50"] == 500 and s["itl_ms"]["p90"] == pytest.approx(900)
    assert s["e2e_ms"]["mean"] == pytest.approx(5500 / 3)
    assert s["goodput"]["requests"] == 1 and s["goodput"]["share"] == 0.25
    assert s["goodput"]["requests_per_second"] == 0.25
    assert s["errors"] == [{"error": "broke", "count": 1}]
    assert s["tokens_counted_by"] == "the endpoint's usage"


def test_nothing_ended_well() -> None:
    s = summed_up(Result([Reply(0.0, 1, error="no")] * 3, 0.0, 1))
    assert s["completed"] == 0 and s["ttft_ms"] is None and s["requests_per_second"] == 0.0
    assert s["errors"] == [{"error": "no", "count": 3}]


def test_limits() -> None:
    assert limits_of("ttft:200,e2e:1000") == {"ttft": 0.2, "e2e": 1.0} and limits_of("") == {}
    for text in ("itl:3", "ttft", "ttft:0", "ttft:x"):
        with pytest.raises(UserError, match="bad limit"):
            limits_of(text)


def test_the_plot_is_whole() -> None:
    result = Result(replies(), 4.0, 3)
    root = ElementTree.fromstring(plotted(result, summed_up(result), "<a> & b"))
    texts = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<a> & b" in texts and any("p50 1,000" in text for text in texts), texts
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2 + 4
    empty = Result([Reply(0.0, 1, error="no")], 0.0, 1)
    assert "no request ended well" in plotted(empty, summed_up(empty), "x")
    assert [nice(v) for v in (0.0, 0.9, 1.0, 37.0, 950.0)] == [1.0, 1.0, 1.0, 40.0, 1000.0]


# ---- the command --------------------------------------------------------------------------------


@contextmanager
def in_a_thread(fake: FakeEndpoint) -> Iterator[str]:
    """The address of a fake that runs in a thread of its own."""
    ready, over, found = threading.Event(), threading.Event(), []

    async def work() -> None:
        async with fake.running() as url:
            found.append(url)
            ready.set()
            while not over.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    ready.wait(LONG)
    try:
        yield found[0]
    finally:
        over.set()
        thread.join()


def test_the_command(tmp_path: Path) -> None:
    fake = FakeEndpoint([0.0, 0.0])
    fake.fails = {4: 500}
    out, plot = tmp_path / "a.json", tmp_path / "a.svg"
    with in_a_thread(fake) as url:
        words = ["bench", "serve", "--url", f"{url}/v1/", "--requests", "4", "--warm-up", "1"]
        words += ["--prompt", "5-9", "--tokens", "2", "--goodput", "ttft:60000"]
        result = RUNNER.invoke(main.app, [*words, "--out", str(out), "--plot", str(plot)])
        assert result.exit_code == 0, result.output
        for word in ("TTFT", "TPOT", "ITL", "E2E", "p99", "3 of 4", "1 times HTTP 500", "75.0%"):
            assert word in result.stdout, word
        record = json.loads(out.read_text())
        assert record["completed"] == 3 and record["model"] == "fake" and record["rate"] == "inf"
        ElementTree.fromstring(plot.read_text())
        fake.fails = {n: 500 for n in range(100)}
        result = RUNNER.invoke(main.app, [*words, "--json"])
        assert result.exit_code == 1 and json.loads(result.stdout)["failed"] == 4
    assert "no request ended well" in result.stderr


def test_bad_usage() -> None:
    for words in (["--rate", "0"], ["--script", "mini-sglang", "--dataset", "x"]):
        assert RUNNER.invoke(main.app, ["bench", "serve", *words]).exit_code == 2, words
