"""`tilegrad serve` as a process: from its start to its end by a signal, with a tiny real model."""

import concurrent.futures
import http.client
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from live_server import LONG, LiveServer, until

from tilegrad.generate import LLM

HERE = Path(__file__).parent
SCRIPTED = """
import asyncio, sys
from tilegrad.serve.run import run_server
from tilegrad.serve.settings import Settings
settings = Settings(
    sys.argv[1], "tiny", port=0, command=(sys.executable, sys.argv[2]), drain=float(sys.argv[3]),
    opening={"hold": sys.argv[4]},
)
def ready(server, port):
    print(f"http://127.0.0.1:{port}", flush=True)
asyncio.run(run_server(settings, ready=ready))
"""


class Process:
    """A server in a process of its own, ready."""

    def __init__(self, *command):
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        lines = queue.Queue()
        threading.Thread(
            target=lambda: lines.put(self.process.stdout.readline()), daemon=True
        ).start()
        self.line = lines.get(timeout=LONG)
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)\n", self.line)
        assert found, (self.line, self.process.poll())
        self.port = int(found[1])

    def chat(self, text, **more):
        body = {"messages": [{"role": "user", "content": text}], **more}
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
        link.request("POST", "/v1/chat/completions", json.dumps(body))
        response = link.getresponse()
        data = response.read()
        link.close()
        return response.status, data

    def running(self):
        """How many requests the engine has."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
        link.request("GET", "/v1/live")
        found = json.loads(link.getresponse().read())
        link.close()
        return found["running"]

    def end(self, number=None):
        if number is not None:
            self.process.send_signal(number)
        try:
            out, errors = self.process.communicate(timeout=LONG)
        finally:
            if self.process.poll() is None:
                self.process.kill()
        return self.process.returncode, out, errors


def children(pid):
    """The processes that a process started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def scripted_process(tiny_path, drain, hold=""):
    return Process("-c", SCRIPTED, tiny_path, HERE / "scripted_engine.py", drain, hold)


def test_the_command(tiny_path):
    server = Process(
        *("-m", "tilegrad.cli.main", "serve", tiny_path, "--port", "0", "--requests", "2"),
        *("--name", "mine", "--threads", "1", "--no-prepare", "--determinism", "invariant"),
    )
    status, data = server.chat("Hi", max_tokens=4, temperature=0)
    assert status == 200
    answer = json.loads(data)
    assert answer["model"] == "mine"
    code, out, errors = server.end(signal.SIGINT)
    assert code == 130 and out == ""
    assert "2 requests at once" in errors and "context, invariant;" in errors
    assert "curl http://127.0.0.1" in errors
    assert "the server has ended" in errors and "Traceback" not in errors
    llm = LLM(tiny_path, requests=1, threads=1, determinism="invariant")
    solo = llm.chat("Hi", max_tokens=4, temperature=0)
    assert answer["choices"][0]["message"]["content"] == solo.text


def test_a_signal_under_load_lets_requests_end(tiny_path, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    server = scripted_process(tiny_path, LONG, hold)
    (engine,) = children(server.process.pid)
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        many = [pool.submit(server.chat, "HOLD", max_tokens=40, stream=True) for _ in range(20)]
        until(lambda: server.running() == 20)
        hold.unlink()
        server.process.send_signal(signal.SIGTERM)
        for one in many:
            status, data = one.result(LONG)
            assert status == 200 and data.endswith(b"data: [DONE]\n\n")
    code, _, errors = server.end()
    assert code == 0 and "Traceback" not in errors
    with pytest.raises(OSError):
        os.kill(engine, 0)


def test_requests_that_do_not_end_are_ended(tiny_path):
    server = scripted_process(tiny_path, 0.3)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        many = [pool.submit(server.chat, "STUCK") for _ in range(4)]
        until(lambda: server.running() == 4)
        code, _, errors = server.end(signal.SIGTERM)
        assert code == 0 and "Traceback" not in errors
        for one in many:
            status, data = one.result(LONG)
            assert status == 503 and b"shutting down" in data


def test_a_second_signal_does_not_wait(tiny_path):
    """With long to drain, requests that never end are ended at once when somebody insists."""
    server = scripted_process(tiny_path, 10 * LONG)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        many = [pool.submit(server.chat, "STUCK") for _ in range(2)]
        until(lambda: server.running() == 2)
        server.process.send_signal(signal.SIGINT)
        concurrent.futures.wait(many, timeout=0.3)
        assert not any(one.done() for one in many), "the first signal waits"
        code, _, errors = server.end(signal.SIGINT)
        assert code == 0 and "Traceback" not in errors
        assert all(one.result(LONG)[0] == 503 for one in many)


def run_command(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "tilegrad.cli.main", "serve", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=LONG,
        env={**os.environ, **environment},
    )


def test_a_port_that_is_taken(tiny_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = run_command(tiny_path, "--port", port)
    assert found.returncode == 1 and f"port {port} is taken" in found.stderr
    assert "--port 0" in found.stderr and "Traceback" not in found.stderr


def test_what_is_missing(tiny_path, tmp_path):
    (tmp_path / "aiohttp.py").write_text("raise ImportError(name='aiohttp')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    found = run_command(tiny_path, PYTHONPATH=path)
    assert found.returncode == 1
    assert "aiohttp is not installed" in found.stderr and "tilegrad[serve]" in found.stderr


def test_a_model_in_the_engine_process(tiny_path):
    """Answers over HTTP are those of `LLM`; ids beyond the vocabulary are refused."""
    llm = LLM(tiny_path, requests=1, threads=1)
    with LiveServer(tiny_path, opening={"requests": 4, "threads": 1, "prepare": False}) as server:
        prompts = ["abc", "hello", "x"]
        body = {"prompt": prompts, "max_tokens": 6, "temperature": 0}
        status, found = server.post("/v1/completions", body)
        assert status == 200
        for prompt, choice in zip(prompts, found["choices"], strict=True):
            assert choice["text"] == llm.generate(prompt, max_tokens=6, temperature=0).text
        status, found = server.post("/v1/completions", {"prompt": [5, 258], "max_tokens": 2})
        assert status == 400 and found["error"]["param"] == "prompt"
        os.kill(server.server.engine._process.pid, signal.SIGKILL)
        status, found = server.post("/v1/completions", body)
        assert status == 200 and server.server.engine.deaths == 1
