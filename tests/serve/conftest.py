"""Servers on loopback for the tests here: one with scripted tokens, one with a tiny model."""

import sys
from pathlib import Path

import pytest

here = Path(__file__).parent
for folder in (here.parent / "generate", here):
    sys.path.insert(0, str(folder))

pytest.importorskip("aiohttp", reason="the server needs aiohttp")
pytest.importorskip("prometheus_client", reason="the server needs prometheus_client")

from live_server import LiveServer, scripted_server  # noqa: E402
from tiny_model import write_file  # noqa: E402


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A tiny model whose tokens are bytes."""
    return write_file(tmp_path_factory.mktemp("tiny") / "tiny.gguf", context=512)


@pytest.fixture(scope="module")
def scripted(tiny_path):
    """A server whose engine does what the prompts say."""
    with scripted_server(tiny_path) as server:
        yield server


@pytest.fixture(scope="module")
def tiny_server(tiny_path):
    """A server with the tiny model."""
    with LiveServer(tiny_path, opening={"requests": 4, "threads": 1, "prepare": False}) as server:
        yield server
