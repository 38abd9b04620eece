"""A thousand requests that nobody should send; bench/serve_fuzz.py sends ten times as many."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "bench" / "serve_fuzz.py"


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("serve_fuzz", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fuzz


def test_fuzzed_requests(scripted, fuzz):
    found = fuzz("127.0.0.1", scripted.port, 1000, 1)
    assert found["wrong"] == []
    assert found["good_request_at_the_end"] == 200
    statuses = found["statuses"]
    assert sum(statuses.values()) == 1000
    assert int(statuses["200"]) > 50 and int(statuses["400"]) > 200
    assert scripted.server.engine.live == {} and scripted.server.engine.deaths == 0
