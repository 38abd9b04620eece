"""Streams beside one another against solo runs, over HTTP: samples of bench/serve_streams.py."""

import asyncio
import runpy
from pathlib import Path

import pytest
from live_server import LiveServer

from tilegrad.exchange.fetch import kept_models

FILE = Path(__file__).resolve().parents[2] / "bench" / "serve_streams.py"
BENCH = runpy.run_path(str(FILE))
KEPT = {model.name: model.path for model in kept_models()}


def check(path, streams, seconds, tokens, context):
    opening = {"requests": streams, "prepare": False, "context": context}
    opening |= {"determinism": "invariant", "threads": 2}
    with LiveServer(path, opening=opening) as server:
        status, found = server.post("/tokenize", {"prompt": BENCH["TEXT"][:200]})
        assert status == 200
        load = BENCH["Load"](server.url, found["tokens"], tokens)
        record = asyncio.run(load.run(streams, seconds, least=3 * streams))
        live = server.ask("GET", "/v1/live")[1]
    assert not load.errors and not load.different, (load.errors[:3], load.different[:3])
    assert record["equal"] > 2 * streams and record["left"], record
    assert live["running"] == live["waiting"] == 0


def test_every_stream_is_its_solo_run(tiny_path):
    check(tiny_path, 6, 1.0, 8, 256)


@pytest.mark.slow
@pytest.mark.skipif("smollm2" not in KEPT, reason="smollm2 was not fetched")
def test_every_stream_of_a_real_model_is_its_solo_run():
    check(KEPT["smollm2"], 8, 20.0, 8, 256)


def test_growth_of_memory_is_seen():
    memory = BENCH["Memory"].__new__(BENCH["Memory"])
    memory.pids = {"http": 1, "engine": 2}
    memory.samples = [(float(t), {"http": 10**8, "engine": 10**9 + t * 10**5}) for t in range(600)]
    found = memory.record(60.0)
    assert not found["http"]["grew"] and found["engine"]["grew"]
    assert found["engine"]["end_mb"] > found["engine"]["settled_mb"] and len(found["series"]) <= 66
